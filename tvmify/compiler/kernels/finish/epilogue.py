"""Fuses the element-wise epilogue of a kernel into the loop that stores its result."""

from __future__ import annotations

from tvm import s_tir
from tvm.s_tir.schedule import SBlockRV

from tvmify.compiler import sizes
from tvmify.compiler.kernels.common.axes import name_as
from tvmify.compiler.kernels.common.inlining import nests_too_deep
from tvmify.compiler.kernels.common.loops import blocks_of, is_injective, is_output, iterations
from tvmify.compiler.sizes import Size


def inline_producers(sch: s_tir.Schedule, anchor: str, keep: tuple[str, ...] = ()) -> None:
    """Inline every element-wise block before the anchor, except those named in `keep`."""
    for block in blocks_of(sch):
        name = sch.get(block).name_hint
        if name == anchor:
            return
        if name not in keep and is_injective(sch, block):
            sch.compute_inline(block)


def inline_chain(sch: s_tir.Schedule, first: str) -> None:
    """Inline every element-wise block after `first` into its readers, except outputs."""
    names = [sch.get(block).name_hint for block in blocks_of(sch)]
    for name in names[names.index(first) + 1 :]:
        block = sch.get_sblock(name)
        inlined = is_injective(sch, block) and not is_output(sch, block)
        if inlined and not nests_too_deep(sch, block) and not _is_spread(sch, block):
            sch.compute_inline(block)


def fuse_epilogue(sch: s_tir.Schedule, store: str) -> tuple[SBlockRV, list[str]]:
    """Fuse the epilogue of a kernel into the block that stores its result.

    The loops and the names of their axes stay those of `store`, so its tiles remain the kernel's: a
    chain that ends in a permutation or a reshape writes to permuted places instead of being a pass
    of its own.

    Parameters
    ----------
    store
        Name of the block that reads the kernel's tile and is the first of the chain.

    Returns
    -------
    block
        The block that stores.
    rest
        Names of blocks that could not be fused (such as a second output), which are separate nests.
    """
    inline_chain(sch, store)
    names = [sch.get(block).name_hint for block in blocks_of(sch)]
    rest = names[names.index(store) + 1 :]
    size = iterations(sch, sch.get_sblock(store))
    near = [name for name in rest if iterations(sch, sch.get_sblock(name)) == size]
    if len(near) == 1:
        try:
            sch.reverse_compute_inline(sch.get_sblock(near[0]))
        except s_tir.ScheduleError:
            if rest == near and _same_loops(sch, store, near[0]):
                last = sch.get_sblock(near[0])
                name_as(sch, last, sch.get_sblock(store))
                sch.compute_inline(sch.get_sblock(store))
                return last, []
        else:
            rest.remove(near[0])
    return sch.get_sblock(store), rest


def _is_spread(sch: s_tir.Schedule, block: SBlockRV) -> bool:
    """Whether elements are broadcast, as a gate over an image: inlined, each is computed again."""
    return any(iterations(sch, c) > iterations(sch, block) for c in sch.get_consumers(block))


def _same_loops(sch: s_tir.Schedule, one: str, other: str) -> bool:
    def extents(name: str) -> list[Size]:
        return [sch.get(loop).extent for loop in sch.get_loops(sch.get_sblock(name))]

    return sizes.same_shape(extents(one), extents(other))

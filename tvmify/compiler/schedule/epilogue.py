"""Fusing the element-wise chain that follows a kernel into the loop that stores its result."""

from __future__ import annotations

from contextlib import suppress

from tvm import s_tir
from tvm.s_tir.schedule import SBlockRV

from tvmify.compiler.schedule.elementwise import iterations, nests_too_deep
from tvmify.compiler.schedule.loops import blocks_of, is_injective, is_output


def inline_producers(sch: s_tir.Schedule, anchor: str, keep: tuple[str, ...] = ()) -> None:
    """Inline every element-wise block before the anchor, except those named in `keep`."""
    for block in blocks_of(sch):
        name = sch.get(block).name_hint
        if name == anchor:
            return
        if name not in keep and is_injective(sch, block):
            sch.compute_inline(block)


def fuse_epilogue(sch: s_tir.Schedule, store: str) -> tuple[SBlockRV, list[str]]:
    """Draw what follows a kernel into the block that stores its result.

    The loops stay those of `store`, so its tiles remain the kernel's: a chain that ends in a
    permutation or a reshape writes to permuted places instead of being a pass of its own.

    Parameters
    ----------
    store
        Name of the block that reads the kernel's tile and is the first of the chain.

    Returns
    -------
    block
        The block that stores.
    rest
        Names of blocks that could not be drawn in (a second output, say): nests of their own.
    """
    names = [sch.get(block).name_hint for block in blocks_of(sch)]
    spread = ""
    for name in names[names.index(store) + 1 :]:
        block = sch.get_sblock(name)
        inlined = is_injective(sch, block) and not is_output(sch, block)
        if inlined and not spread and _is_spread(sch, block):
            spread = name
        elif inlined and not nests_too_deep(sch, block):
            sch.compute_inline(block)
    names = [sch.get(block).name_hint for block in blocks_of(sch)]
    rest = names[names.index(store) + 1 :]
    if spread and rest[0] == spread:
        with suppress(s_tir.ScheduleError):  # something else reads the result of the kernel too
            sch.reverse_compute_inline(sch.get_sblock(spread))
            del rest[0]
    elif len(rest) == 1 and not _is_spread(sch, sch.get_sblock(store)):
        try:
            sch.reverse_compute_inline(sch.get_sblock(rest[0]))
        except s_tir.ScheduleError:
            if _same_loops(sch, store, rest[0]):
                sch.compute_inline(sch.get_sblock(store))
                return sch.get_sblock(rest[0]), []
        else:
            rest = []
    return sch.get_sblock(store), rest


def _is_spread(sch: s_tir.Schedule, block: SBlockRV) -> bool:
    """Whether each result is read in many places, as a gate is that an image is multiplied by."""
    own = iterations(sch, block)
    return any(iterations(sch, consumer) > own for consumer in sch.get_consumers(block))


def _same_loops(sch: s_tir.Schedule, one: str, other: str) -> bool:
    def extents(name: str) -> list[int]:
        return [int(sch.get(loop).extent) for loop in sch.get_loops(sch.get_sblock(name))]

    return extents(one) == extents(other)

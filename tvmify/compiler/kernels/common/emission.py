"""Emits loops over vector registers, for kernels that schedules cannot produce."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from tvmify.compiler import sizes
from tvmify.compiler.microarchitecture import Microarchitecture
from tvmify.compiler.sizes import Size


def vectors(width: int, lanes: int) -> list[tuple[int, int]]:
    """Split `width` elements into registers, (start, lanes) each; the tail by halving."""
    cuts, start = [], 0
    while start < width:
        while lanes > width - start:
            lanes //= 2
        cuts.append((start, lanes))
        start += lanes
    return cuts


def lanewise(cuts: list[tuple[int, int]], body: Callable[[Expr], None]) -> None:
    """Emit the body for each element of some vectors; it is given the element's number."""
    for start, lanes in cuts:
        if lanes == 1:
            body(tirx.const(start, "int32"))
            continue
        with T.vectorized(lanes) as lane:
            body(lane + start)


@contextmanager
def block(name: str) -> Iterator[None]:
    """Open a block, so that buffers which are allocated in it belong to one thread."""
    with T.sblock(name):
        T.reads([])
        T.writes([])
        yield


def argument(name: str, shape: Sequence[Size], dtype: str) -> tirx.Buffer:
    """Declare an argument of the function with its type in Relax, as fusion requires."""
    own = [*map(sizes.as_expression, shape)]
    return T.arg(name, T.buffer(own, dtype))


@contextmanager
def anchor(name: str, reads: Iterable[tirx.Buffer], *writes: tirx.Buffer) -> Iterator[None]:
    """Open the block of all loops of a kernel, by which `Handwritten` finds it."""

    def whole(tensor: tirx.Buffer) -> Expr:
        return tensor[tuple(slice(0, size) for size in sizes.sizes_of(tensor.shape))]

    with T.sblock("root"), T.sblock(name):
        T.reads([whole(tensor) for tensor in reads])
        T.writes([whole(tensor) for tensor in writes])
        yield


def registers(shape: tuple[int, ...], dtype: str) -> tirx.Buffer:
    """Allocate sums that stay in registers: every index must be constant after unrolling."""
    return T.sblock_alloc_buffer(shape, dtype, scope="local")


def scratch(shape: tuple[Size, ...], dtype: str) -> tirx.Buffer:
    """Allocate thread-local memory."""
    # TVM takes a bare variable for its definition.
    own = [tirx.max(size, 1) if isinstance(size, tirx.Var) else size for size in shape]
    return T.sblock_alloc_buffer(own, dtype)


def fold(sums: tirx.Buffer, row: Expr, lanes: int, join: Callable[[Expr, Expr], Expr]) -> None:
    """Reduce the lanes of one register by halves; the result is in the first lane."""
    while lanes > 1:
        lanes //= 2

        def halve(lane: Expr, half: int = lanes) -> None:
            T.buffer_store(sums, join(sums[row, lane], sums[row, lane + half]), [row, lane])

        lanewise([(0, lanes)], halve)


def tasks(count: Size, work: float, byte_count: float, machine: Microarchitecture):
    """Open the outermost loop: parallel if that pays."""
    parallel = sizes.hint(count) > 1 and machine.worth_threads(work, byte_count)
    return (T.parallel if parallel else T.serial)(count)

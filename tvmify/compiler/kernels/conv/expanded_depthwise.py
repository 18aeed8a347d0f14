"""A 1×1 convolution and the depthwise convolution of its result in one kernel. The inverted
residuals of mobile networks expand an image sixfold before each channel is filtered, and the wide
image does not fit in the private caches. Channels are filtered independently, so a task computes
some rows of one panel of channels completely: the product with the panel, tile by tile as in
`matmul`, into a zero-padded buffer of the task; then the window over that buffer, while it is in
L2. Rows that the windows of two tasks share are computed by both. The buffer stores each vector of
channels as a separate image, so that the window reads memory in order.

Loops, outermost first: bands of rows and panels, in parallel → rows → tiles of pixels → input
channels → a register tile; then rows → vectors of channels → tiles of pixels → the window.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

from tvm import s_tir, tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmify.compiler import sizes
from tvmify.compiler.costs import CONVOLUTION
from tvmify.compiler.kernels.common import tiles
from tvmify.compiler.kernels.common.emission import anchor, block, registers, scratch, tasks
from tvmify.compiler.kernels.common.legalizing import FUSIBLE, accumulator
from tvmify.compiler.kernels.common.loops import element_count
from tvmify.compiler.kernels.common.notes import note_on
from tvmify.compiler.kernels.common.prefetch import prefetches
from tvmify.compiler.kernels.common.rewriting import names_of
from tvmify.compiler.kernels.common.schedule import Schedule
from tvmify.compiler.kernels.conv import depthwise
from tvmify.compiler.kernels.conv.channelwise import ranked_pixels
from tvmify.compiler.kernels.conv.windows import Window
from tvmify.compiler.kernels.finish.chain import Chain
from tvmify.compiler.kernels.finish.epilogue import inline_producers
from tvmify.compiler.kernels.matmul import template as product
from tvmify.compiler.microarchitecture import Microarchitecture, bits_of

#: Of the rule, and of its anchor.
NAME = "expanded depthwise"

#: The names, in the kernel, of the arguments of both functions.
Arguments = Mapping[tirx.Var, tirx.Var]


@dataclass(frozen=True)
class Stage:
    """One of the two functions: its arguments, the operands of its kernel, and its epilogue."""

    parameters: list[tirx.Var]
    image: tirx.Var
    weights: tirx.Var
    chain: Chain

    @classmethod
    def of(cls, sch: s_tir.Schedule, anchor: str) -> Stage | None:
        """Read a function; None if its kernel reads anything but two arguments, once each."""
        parameters = list(sch.mod["main"].params)
        chain = Chain.of(sch, anchor)
        if chain is None:
            return None
        operands = [region.source for region in sch.get(sch.get_sblock(anchor)).reads]
        if len(operands) != 2 or operands[0] in chain.arguments:
            return None
        if not all(operand in parameters for operand in operands):
            return None
        return cls(parameters, operands[0], operands[1], chain)

    @property
    def result(self) -> tirx.Var:
        """The argument that it writes."""
        return self.parameters[-1]

    @property
    def tensors(self) -> tuple[tirx.Var, tirx.Var, tirx.Var]:
        """Operands and result."""
        return self.image, self.weights, self.result


@dataclass(frozen=True)
class ExpandedDepthwise:
    """Both functions, and how their work is cut.

    Attributes
    ----------
    image, middle, out
        Shapes ``[batch, height, width, channels]``.
    panel
        Channels of a task: a panel of the packed weights of the product.
    rows
        Rows of the result that a task computes.
    """

    first: Stage
    second: Stage
    window: Window
    image: tuple[Any, ...]
    middle: tuple[Any, ...]
    out: tuple[Any, ...]
    panel: int
    rows: int
    dtype: str
    machine: Microarchitecture

    @classmethod
    def of(
        cls, first: tirx.PrimFunc, second: tirx.PrimFunc, machine: Microarchitecture
    ) -> ExpandedDepthwise | None:
        """Describe two functions as one kernel; None if they do not match, or it would not pay."""
        blocks = [names_of(function.body.block.body) for function in (first, second)]
        if product.ANCHOR not in blocks[0] or depthwise.TILE not in blocks[1]:
            return None
        if product.PARTIAL in blocks[0]:
            return None
        one, other = Schedule(first), Schedule(second)
        tile = other.get(other.get_sblock(depthwise.TILE))
        window = note_on(tile, Window)
        inline_producers(other, depthwise.TILE)
        widened, filtered = Stage.of(one, product.ANCHOR), Stage.of(other, depthwise.TILE)
        if (
            window is None
            or widened is None
            or filtered is None
            or not filtered.image.same_as(filtered.parameters[0])
        ):
            return None
        tensors = *widened.tensors, *filtered.tensors
        dtypes = {str(tensor.ty.dtype) for tensor in tensors}
        shapes = [tuple(sizes.sizes_of(tensor.ty.shape)) for tensor in tensors]
        if not all(sizes.is_static(*shape[1:]) for shape in shapes):
            return None
        image, panels, middle, _, _, out = shapes
        panel, dtype = panels[-1], dtypes.pop()
        lanes = machine.lanes(bits_of(dtype))
        if (
            dtypes
            or accumulator(dtype) != dtype
            or not sizes.same_shape(image[:-1], middle[:-1])
            or len(out) != 4
        ):
            return None
        # The filter's weights have a vector of channels too: where there are fewer, less.
        if middle[3] % panel or panel % lanes or shapes[4][-1] != lanes:
            return None
        rows = _rows(window, middle, out, panel, bits_of(dtype), machine)
        if rows is None:
            return None
        return cls(widened, filtered, window, image, middle, out, panel, rows, dtype, machine)

    @property
    def bands(self) -> int:
        """How many tasks share a panel."""
        return -(-self.out[1] // self.rows)

    @property
    def lanes(self) -> int:
        """Channels of a vector."""
        return self.machine.lanes(bits_of(self.dtype))

    def function(self) -> tirx.PrimFunc:
        """Write the kernel: its arguments are those of the first function, less its result, and
        those of the second, less its image.
        """
        with IRBuilder() as builder, T.prim_func(is_private=True, s_tir=True):
            T.func_attr(FUSIBLE)
            arguments: dict[tirx.Var, tirx.Var] = {}
            outer = [p for p in self.first.parameters if not p.same_as(self.first.result)]
            outer += [p for p in self.second.parameters if not p.same_as(self.second.image)]
            for i, parameter in enumerate(outer):
                buffer = T.buffer(parameter.ty.shape, str(parameter.ty.dtype))
                arguments[parameter] = T.arg(f"argument{i}", buffer)
            *read, out = arguments.values()
            with anchor(NAME, read, out):
                self._emit(arguments)
        return builder.get()

    def _emit(self, arguments: Arguments) -> None:
        panels = self.middle[3] // self.panel
        count = self.out[0] * self.bands * panels
        image, middle, out = map(element_count, (self.image, self.middle, self.out))
        work = float(middle * self.image[3] + out * prod(self.window.size))
        traffic = (image + out) * bits_of(self.dtype) // 8
        # Panels of one band follow one another: a core writes whole pixels, which it reads next.
        with (
            tasks(
                count if isinstance(count, Expr) else _const(count), work, traffic, self.machine
            ) as task,
            block("task"),
        ):
            batch, band = task // panels // self.bands, task // panels % self.bands
            _Task(self, arguments, batch, band, task % panels).emit()


def _rows(
    window: Window,
    middle: tuple[Any, ...],
    out: tuple[Any, ...],
    panel: int,
    bits: int,
    machine: Microarchitecture,
) -> int | None:
    """Choose how many rows a task computes: few repeated ones, and tasks for all cores.

    None if too many would be repeated.
    """
    panels, pixel = middle[3] // panel, panel * bits // 8

    def computed(rows: int) -> int:
        border = window.padding[0] + window.padding[2]
        return -(-out[1] // rows) * window.reach((rows, out[2]))[0] - border

    def cost(rows: int) -> float:
        tasks = sizes.hint(out[0]) * -(-out[1] // rows) * panels
        return computed(rows) * _unevenness(tasks, machine.core_counts(CONVOLUTION.cores))

    fitting = [
        rows
        for rows in range(1, out[1] + 1)
        if prod(window.reach((rows, out[2]))) * pixel <= machine.working_set
        and computed(rows) <= CONVOLUTION.most_repeated * middle[1]
    ]
    return min(fitting, key=cost, default=None)


def _const(value: int) -> Expr:
    # Of the type of all sizes: a conversion of indices would hide vectors from TVM.
    return tirx.const(value, "int64")


class _Task:
    """Emits one band of rows of one panel of channels."""

    def __init__(
        self, about: ExpandedDepthwise, arguments: Arguments, batch: Expr, band: Expr, panel: Expr
    ) -> None:
        self.about, self.arguments = about, arguments
        self.batch, self.panel = batch, panel
        self.first_row = band * about.rows
        window = about.window
        tall, wide = window.reach((about.rows, about.out[2]))
        self.tall, self.wide = tall, max(wide, about.middle[2] + window.padding[1])
        self.vectors = about.panel // about.lanes
        shape = (self.vectors, tall, self.wide, about.lanes)
        self.buffer = scratch(shape, about.dtype)
        self.zero = tirx.const(0, about.dtype)

    def emit(self) -> None:
        about, window = self.about, self.about.window
        height, width = about.middle[1:3]
        rows = _const(about.rows)
        seen = _const(self.tall)
        if about.out[1] % about.rows:
            rows = tirx.min(rows, _const(about.out[1]) - self.first_row)
            seen = (rows - 1) * window.strides[0] + (window.size[0] - 1) * window.dilation[0] + 1
        with T.serial(seen) as row:
            source = self.first_row * window.strides[0] - window.padding[0] + row
            inside = tirx.all(source >= 0, source < height)
            with T.If(inside):
                with T.Then():
                    self.expand(row, source)
                    left = window.padding[1]
                    self.clear(row, [*range(left), *range(left + width, self.wide)])
                with T.Else(), T.serial(_const(self.wide)) as x:
                    self.clear(row, [x])
        with T.serial(rows) as row, T.serial(_const(self.vectors)) as vector:
            self.filter(row, vector)

    @contextmanager
    def along(self, width: int, pixels: int) -> Iterator[Expr]:
        """Open a loop over tiles of pixels; yield the first pixel of each.

        The last tile is moved back to fit, and computes some pixels a second time.
        """
        with T.serial(_const(-(-width // pixels))) as number:
            start = number * pixels
            yield tirx.min(start, _const(width - pixels)) if width % pixels else start

    def clear(self, row: Expr, columns: Sequence[Expr | int]) -> None:
        """Set some pixels of a row of the buffer to zero."""
        for x in columns:
            with T.unroll(_const(self.vectors)) as v, T.vectorized(_const(self.about.lanes)) as i:
                T.buffer_store(self.buffer, self.zero, [v, row, x, i])

    def expand(self, row: Expr, source: Expr) -> None:
        """The product of one row of the image with the panel."""
        about, lanes = self.about, self.about.lanes
        width, depth = about.image[2:]
        bits = bits_of(about.dtype)
        tile = next(
            tile
            for tile in tiles.ranked(width, about.panel, about.machine, bits)
            if tile.columns == about.panel
        )
        steps = tiles.steps(tile, about.machine, bits, depth)
        image, weights = (self.arguments[v] for v in (about.first.image, about.first.weights))
        with self.along(width, tile.rows) as start, block("expand"):
            sums = registers((tile.rows, about.panel), about.dtype)
            self.fill(sums, tile.rows, self.vectors)
            with T.serial(_const(depth // steps)) as several:
                # The next tile's pixels: another core may have written them.
                fetched = steps * tile.rows
                following = [self.batch, source, start + tile.rows, several * fetched]
                for fetch in prefetches(image, following, fetched):
                    T.evaluate(fetch.value)
                with T.unroll(_const(steps)) as i, self.tile(tile.rows, self.vectors) as tiled:
                    (x, v, lane), k = tiled, several * steps + i
                    c = v * lanes + lane
                    pixel = image[self.batch, source, start + x, k]
                    T.buffer_store(sums, sums[x, c] + pixel * weights[self.panel, k, c], [x, c])
            with self.tile(tile.rows, self.vectors) as (x, v, lane):
                c = v * lanes + lane
                place = [self.batch, source, start + x, self.panel * about.panel + c]
                value = about.first.chain.apply(sums[x, c], place, self.arguments)
                at = [v, row, start + x + about.window.padding[1], lane]
                T.buffer_store(self.buffer, value, at)

    @contextmanager
    def tile(self, rows: int, vectors: int = 1) -> Iterator[tuple[Expr, Expr, Expr]]:
        """Open the unrolled loops over a register tile: its row, vector, and lane."""
        lanes = _const(self.about.lanes)
        with T.unroll(_const(rows)) as x, T.unroll(_const(vectors)) as v, T.vectorized(lanes) as i:
            yield x, v, i

    def fill(self, sums: tirx.Buffer, rows: int, vectors: int = 1) -> None:
        """Set a register tile to zero."""
        with self.tile(rows, vectors) as (x, v, lane):
            T.buffer_store(sums, self.zero, [x, v * self.about.lanes + lane])

    def filter(self, row: Expr, vector: Expr) -> None:
        """One row of the result, one vector of channels."""
        about, lanes, window = self.about, self.about.lanes, self.about.window
        width = about.out[2]
        held = min(prod(window.size), about.machine.vector_registers // 2)
        across = min(ranked_pixels(width, about.machine.accumulators - held)[0], width)
        weights, out = (self.arguments[v] for v in (about.second.weights, about.second.result))
        channels = self.panel * self.vectors + vector
        with self.along(width, across) as start, block("filter"):
            sums = registers((across, lanes), about.dtype)
            self.fill(sums, across)
            loop = T.unroll if prod(window.size) <= CONVOLUTION.unrolled_window else T.serial
            size = [_const(count) for count in window.size]
            with loop(size[0]) as ry, loop(size[1]) as rx, self.tile(across) as (x, _, lane):
                y, at = window.at(row, start + x, ry, rx)
                pixel = self.buffer[vector, y, at, lane]
                weight = weights[channels, ry, rx, lane]
                T.buffer_store(sums, sums[x, lane] + pixel * weight, [x, lane])
            with self.tile(across) as (x, _, lane):
                place = [self.batch, self.first_row + row, start + x, channels * lanes + lane]
                value = about.second.chain.apply(sums[x, lane], place, self.arguments)
                T.buffer_store(out, value, place)


def _unevenness(tasks: int, cores: tuple[int, ...]) -> float:
    """The mean imbalance on these numbers of cores, where the last one has fewer tasks."""
    return sum(-(-tasks // n) * n / tasks for n in cores) / len(cores)

"""A 1×1 convolution and the depthwise convolution of its result in one kernel.

The inverted residuals of mobile networks widen an image sixfold before each channel is filtered,
and the wide image does not fit the private caches. Channels are filtered one by one, so a task
computes some rows of one panel of channels from end to end: the product with the panel, tile by
tile as in `matmul`, into a buffer of the task's own, which has the zeros of the border around it;
then the window over that buffer, while it is in the second cache. Rows that the windows of two
tasks share are computed by both. The buffer holds each vector of channels as an image of its own,
so that the window reads memory in order.

Loops, outermost first: bands of rows and panels, in parallel → rows → tiles of pixels → input
channels → a register tile; then rows → vectors of channels → tiles of pixels → the window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from tvm import s_tir, tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmify.compiler.schedule import depthwise, product, tiles
from tvmify.compiler.schedule.chain import Chain
from tvmify.compiler.schedule.channelwise import WINDOW, pixels
from tvmify.compiler.schedule.emission import block, registers, scratch, tasks
from tvmify.compiler.schedule.epilogue import inline_producers
from tvmify.compiler.schedule.legalizing import OPAQUE
from tvmify.compiler.schedule.loops import find
from tvmify.compiler.schedule.microarchitecture import Microarchitecture, bits_of
from tvmify.compiler.schedule.plans import unevenness
from tvmify.compiler.schedule.windows import Window

Arguments = Mapping[tirx.Var, tirx.Var]


@dataclass(frozen=True)
class Stage:
    """One of the two functions: its arguments, the operands of its kernel, what follows that."""

    parameters: list[tirx.Var]
    image: tirx.Var
    weights: tirx.Var
    chain: Chain

    @classmethod
    def of(cls, sch: s_tir.Schedule, anchor: str) -> Stage | None:
        """Read a scheduled function; None if its kernel reads anything but arguments."""
        parameters = list(sch.mod["main"].params)
        chain = Chain.of(sch, anchor)
        reads = [region.source for region in sch.get(sch.get_sblock(anchor)).reads]
        if chain is None or len(reads) != 2:
            return None
        return cls(parameters, reads[0], reads[1], chain)


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
    image: tuple[int, ...]
    middle: tuple[int, ...]
    out: tuple[int, ...]
    panel: int
    rows: int
    dtype: str
    machine: Microarchitecture

    @classmethod
    def of(
        cls, first: tirx.PrimFunc, second: tirx.PrimFunc, machine: Microarchitecture
    ) -> ExpandedDepthwise | None:
        """Describe two functions as one kernel; None if they are not of the kind, or it is dear."""
        one, other = s_tir.Schedule(first), s_tir.Schedule(second)
        multiply, filter_ = find(one, product.ANCHOR), find(other, depthwise.TILE)
        if multiply is None or filter_ is None or find(one, product.PARTIAL) is not None:
            return None
        window = Window.from_numbers(other.get(filter_).annotations[WINDOW])
        inline_producers(other, depthwise.TILE)
        stages = Stage.of(one, product.ANCHOR), Stage.of(other, depthwise.TILE)
        if stages[0] is None or stages[1] is None:
            return None
        image, middle, out = (
            tuple(int(size) for size in variable.ty.shape)
            for variable in (stages[0].image, stages[1].image, stages[1].parameters[-1])
        )
        panel = int(stages[0].weights.ty.shape[-1])
        dtype = str(stages[0].image.ty.dtype)
        lanes = tiles.lanes_for(panel, machine, bits_of(dtype))
        whole = len(image) == 4 and middle[3] % panel == 0 and panel % lanes == 0
        if not whole or dtype != "float32" or stages[1].weights.ty.shape[-1] != lanes:
            return None
        rows = _rows(window, middle, out, panel, bits_of(dtype), machine)
        if rows is None:
            return None
        return cls(*stages, window, image, middle, out, panel, rows, dtype, machine)

    @property
    def bands(self) -> int:
        return -(-self.out[1] // self.rows)

    @property
    def lanes(self) -> int:
        return self.machine.lanes(bits_of(self.dtype))

    def function(self) -> tirx.PrimFunc:
        """Write the kernel: its arguments are those of the first function, less its result, and
        those of the second, less its image.
        """
        with IRBuilder() as builder, T.prim_func(is_private=True, s_tir=True):
            T.func_attr(
                {
                    "tirx.noalias": True,
                    "tirx.is_scheduled": True,
                    "op_pattern": OPAQUE,
                    "tvmify.rule": "expanded depthwise",
                }
            )
            arguments: dict[tirx.Var, tirx.Var] = {}
            for stage, left_out in ((self.first, self.first.parameters[-1]), (self.second, self.second.image)):
                for parameter in stage.parameters:
                    if not parameter.same_as(left_out):
                        buffer = T.buffer(parameter.ty.shape, str(parameter.ty.dtype))
                        arguments[parameter] = T.arg(f"argument{len(arguments)}", buffer)
            self._emit(arguments)
        return builder.get()

    def _emit(self, arguments: Arguments) -> None:
        panels = self.middle[3] // self.panel
        count = self.out[0] * self.bands * panels
        work = float(prod(self.middle) * self.image[3] + prod(self.out) * prod(self.window.size))
        traffic = 4 * (prod(self.image) + prod(self.out))
        with tasks(tirx.const(count, "int64"), work, traffic, self.machine) as task, block("task"):
            _Task(self, arguments, task // panels // self.bands, task // panels % self.bands, task % panels).emit()


def _rows(
    window: Window,
    middle: tuple[int, ...],
    out: tuple[int, ...],
    panel: int,
    bits: int,
    machine: Microarchitecture,
) -> int | None:
    """Choose how many rows a task computes: few repeated rows, tasks for all cores."""
    panels = middle[3] // panel

    def seen(rows: int) -> tuple[int, int]:
        return window.reach((rows, out[2]))

    def cost(rows: int) -> float:
        bands = -(-out[1] // rows)
        return bands * seen(rows)[0] * unevenness(out[0] * bands * panels)

    fitting = [
        rows
        for rows in range(1, out[1] + 1)
        if prod(seen(rows)) * panel * bits // 8 <= machine.l2_bytes // 2
    ]
    return min(fitting, key=cost, default=None)


def _const(value: int) -> Expr:
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

    def clear(self, row: Expr, columns: list[Expr | int]) -> None:
        for x in columns:
            for vector in range(self.vectors):
                with T.vectorized(_const(self.about.lanes)) as lane:
                    T.buffer_store(self.buffer, self.zero, [vector, row, x, lane])

    def expand(self, row: Expr, source: Expr) -> None:
        """The product of one row of the image with the panel."""
        about, lanes = self.about, self.about.lanes
        width, depth = about.image[2:]
        tile = next(
            tile
            for tile in tiles.ranked(width, about.panel, about.machine, bits_of(about.dtype))
            if tile.columns == about.panel
        )
        image, weights = (self.arguments[v] for v in (about.first.image, about.first.weights))
        # The last tile begins where it fits: what it shares with the one before is the same.
        with T.serial(_const(-(-width // tile.rows))) as number, block("expand"):
            start = tirx.min(number * tile.rows, _const(width - tile.rows)) if width % tile.rows else number * tile.rows
            sums = registers((tile.rows, about.panel), about.dtype)
            self.fill(sums, tile.rows)
            with T.serial(_const(depth)) as k, T.unroll(_const(tile.rows)) as x:
                with T.unroll(_const(self.vectors)) as vector, T.vectorized(_const(lanes)) as lane:
                    c = vector * lanes + lane
                    pixel = image[self.batch, source, start + x, k]
                    T.buffer_store(sums, sums[x, c] + pixel * weights[self.panel, k, c], [x, c])
            with T.unroll(_const(tile.rows)) as x:
                with T.unroll(_const(self.vectors)) as vector, T.vectorized(_const(lanes)) as lane:
                    c = vector * lanes + lane
                    place = [self.batch, source, start + x, self.panel * about.panel + c]
                    value = about.first.chain.apply(sums[x, c], place, self.arguments)
                    at = [vector, row, start + x + about.window.padding[1], lane]
                    T.buffer_store(self.buffer, value, at)

    def fill(self, sums: tirx.Buffer, rows: int) -> None:
        lanes = self.about.lanes
        with T.unroll(_const(rows)) as x, T.unroll(_const(int(sums.shape[1]) // lanes)) as vector:
            with T.vectorized(_const(lanes)) as lane:
                T.buffer_store(sums, self.zero, [x, vector * lanes + lane])

    def filter(self, row: Expr, vector: Expr) -> None:
        """One row of the result, one vector of channels."""
        about, lanes, window = self.about, self.about.lanes, self.about.window
        width = about.out[2]
        held = min(prod(window.size), about.machine.vector_registers // 2)
        across = min(pixels(width, about.machine.accumulators - held), width)
        weights, out = (
            self.arguments[v] for v in (about.second.weights, about.second.parameters[-1])
        )
        channels = self.panel * self.vectors + vector
        with T.serial(_const(-(-width // across))) as number, block("filter"):
            start = tirx.min(number * across, _const(width - across)) if width % across else number * across
            sums = registers((across, lanes), about.dtype)
            self.fill(sums, across)
            with T.unroll(_const(window.size[0])) as ry, T.unroll(_const(window.size[1])) as rx:
                with T.unroll(_const(across)) as x, T.vectorized(_const(lanes)) as lane:
                    y, at = window.at(row, start + x, ry, rx)
                    pixel = self.buffer[vector, y, at, lane]
                    weight = weights[channels, ry, rx, lane]
                    T.buffer_store(sums, sums[x, lane] + pixel * weight, [x, lane])
            with T.unroll(_const(across)) as x, T.vectorized(_const(lanes)) as lane:
                place = [self.batch, self.first_row + row, start + x, channels * lanes + lane]
                value = about.second.chain.apply(sums[x, lane], place, self.arguments)
                T.buffer_store(out, value, place)

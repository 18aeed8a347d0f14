"""LSTM, GRU and plain layers: the steps of one direction of one layer, as handwritten loops. The
projection of all inputs, which does not depend on previous steps, is a matrix product outside. A
step processes the hidden units in tiles: the sums of all gates over the previous state stay in
registers (for a few rows of the batch at a time; those of a long state, or with strict accuracy,
are sums of blocks), and the activations and the new state are computed from them. So a step is one
pass over the recurrent weights, which are packed in that order: ``[tiles, previous state, gates,
tile]``. In each step, tiles are divided among threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmify.compiler import sizes
from tvmify.compiler.kernels.common.emission import (
    anchor,
    argument,
    block,
    lanewise,
    registers,
    scratch,
    vectors,
)
from tvmify.compiler.kernels.common.legalizing import FUSIBLE
from tvmify.compiler.kernels.common.sums import longest_sum, split_evenly
from tvmify.compiler.kernels.recurrent.plan import Plan
from tvmify.compiler.sizes import Size


def kernel(plan: Plan, reverse: bool, cell: bool = True) -> tirx.PrimFunc:
    """Return the function of projected inputs, packed weights, first states, and results.

    Parameters
    ----------
    cell
        Whether the last cell of an LSTM is a result, too. With one result, what follows it can be
        computed in the kernel.
    """
    if plan.kind == "lstm":
        return lstm(plan, reverse, cell)
    return gru(plan, reverse) if plan.kind == "gru" else rnn(plan, reverse)


def lstm(plan: Plan, reverse: bool, returns_cell: bool = True) -> tirx.PrimFunc:
    """Steps of an LSTM; gates in torch's order: input, forget, cell, output."""
    with IRBuilder() as builder, T.prim_func(is_private=True, s_tir=True):
        T.func_attr(FUSIBLE)
        layer = _Layer(plan, reverse)
        first_cell = layer.argument("first_cell", plan.batch, plan.padded)
        weights = [layer.argument("projection", *plan.projection_shape)] if plan.projected else []
        states = layer.argument("states", plan.steps, plan.batch, plan.padded_state)
        last = [layer.argument("cell", plan.batch, plan.padded)] if returns_cell else []
        with layer.kernel("lstm", [first_cell, *weights], states, *last):
            cell = last[0] if last else scratch((plan.batch, plan.padded), plan.dtype)
            layer.copy(first_cell, cell)
            projection = _Projection(layer, *weights, states) if weights else None

            def each(tile: _Tile) -> None:
                sums = tile.sums_of(tile.projected)

                def activate(row: Expr, i: Expr) -> None:
                    # Cells are updated after all rows, since the last row may be computed twice.
                    kept = tirx.sigmoid(sums[row, 1, i]) * cell[tile.place(row), tile.unit(i)]
                    added = tirx.sigmoid(sums[row, 0, i]) * tirx.tanh(sums[row, 2, i])
                    T.buffer_store(sums, kept + added, [row, 1, i])
                    shown = tirx.sigmoid(sums[row, 3, i]) * tirx.tanh(sums[row, 1, i])
                    T.buffer_store(sums, shown, [row, 3, i])

                def store(row: Expr, i: Expr) -> None:
                    at = [tile.place(row), tile.unit(i)]
                    T.buffer_store(cell, sums[row, 1, i], at)
                    if projection:
                        T.buffer_store(projection.units, sums[row, 3, i], at)
                    else:
                        tile.store(states, sums[row, 3, i], row, i)

                tile.each(activate)
                tile.each(store)

            layer.each_tile(each, projection.step if projection else None)
    return builder.get()


def gru(plan: Plan, reverse: bool) -> tirx.PrimFunc:
    """Steps of a GRU; gates in torch's order: reset, update, new."""
    with IRBuilder() as builder, T.prim_func(is_private=True, s_tir=True):
        T.func_attr(FUSIBLE)
        layer = _Layer(plan, reverse)
        new_bias = layer.argument("new_bias", plan.padded)
        states = layer.argument("states", plan.steps, plan.batch, plan.padded)
        with layer.kernel("gru", [new_bias], states):

            def each(tile: _Tile) -> None:
                def first(row: Expr, gate: Expr, i: Expr) -> Expr:
                    # The new gate has a separate bias, since the reset gate multiplies only one of
                    # its two sums.
                    own = new_bias[tile.unit(i)]
                    return tirx.Select(gate == 2, own, tile.projected(row, gate, i))

                sums = tile.sums_of(first)

                def activate(row: Expr, i: Expr) -> None:
                    reset, update = (tirx.sigmoid(sums[row, gate, i]) for gate in (0, 1))
                    new = tile.projected(row, 2, i) + reset * sums[row, 2, i]
                    # Stored first, since TVM's code generator would repeat it: it contains a
                    # sigmoid.
                    T.buffer_store(sums, new, [row, 2, i])
                    T.buffer_store(sums, tirx.tanh(sums[row, 2, i]), [row, 2, i])
                    old = layer.previous[tile.step % 2, tile.place(row), tile.unit(i)]
                    state = sums[row, 2, i] + update * (old - sums[row, 2, i])
                    T.buffer_store(sums, state, [row, 2, i])
                    tile.store(states, sums[row, 2, i], row, i)

                tile.each(activate)

            layer.each_tile(each)
    return builder.get()


def rnn(plan: Plan, reverse: bool) -> tirx.PrimFunc:
    """Steps of a plain recurrent layer."""
    with IRBuilder() as builder, T.prim_func(is_private=True, s_tir=True):
        T.func_attr(FUSIBLE)
        layer = _Layer(plan, reverse)
        states = layer.argument("states", plan.steps, plan.batch, plan.padded)
        with layer.kernel("rnn", [], states):

            def each(tile: _Tile) -> None:
                sums = tile.sums_of(tile.projected)
                zero = tirx.const(0.0, plan.dtype)

                def activate(row: Expr, i: Expr) -> None:
                    x = sums[row, 0, i]
                    state = tirx.Select(x < zero, zero, x) if plan.is_relu else tirx.tanh(x)
                    T.buffer_store(sums, state, [row, 0, i])
                    tile.store(states, sums[row, 0, i], row, i)

                tile.each(activate)

            layer.each_tile(each)
    return builder.get()


class _Layer:
    """What all kinds of layers read, and the loops over their steps and tiles."""

    def __init__(self, plan: Plan, reverse: bool) -> None:
        self.plan, self.reverse = plan, reverse
        self.input = self.argument("projected", plan.steps, plan.batch, plan.gates, plan.padded)
        self.weights = self.argument("weights", *plan.packed_shape)
        self.first_state = self.argument("first_state", plan.batch, plan.padded_state)

    def argument(self, name: str, *shape: Size) -> tirx.Buffer:
        """Declare the next argument of the function."""
        return argument(name, shape, self.plan.dtype)

    def copy(self, source: tirx.Buffer, to: tirx.Buffer, *lead: int) -> None:
        """Copy a state."""
        with T.grid(self.plan.batch, source.shape[1]) as (row, unit):
            T.buffer_store(to, source[row, unit], [*lead, row, unit])

    @contextmanager
    def kernel(
        self, name: str, reads: Sequence[tirx.Buffer], *writes: tirx.Buffer
    ) -> Iterator[None]:
        """Open the anchor, once all arguments are declared, and set the first state."""
        with anchor(name, [self.input, self.weights, self.first_state, *reads], *writes):
            #: The states before and after a step use two buffers in turn.
            shape = (2, self.plan.batch, self.plan.padded_state)
            self.previous = scratch(shape, self.plan.dtype)
            self.copy(self.first_state, self.previous, 0)
            yield

    def time(self, step: Expr) -> Expr:
        """Return the index of a step in inputs and states."""
        return self.plan.steps - 1 - step if self.reverse else step

    def shared(self, parts: Size) -> Any:
        """Open a loop over what threads may share."""
        return T.parallel(parts) if self.plan.fork else T.serial(parts)

    def each_tile(
        self, body: Callable[[_Tile], None], after: Callable[[Expr], None] | None = None
    ) -> None:
        """Emit the loops over steps and over tiles of units and rows.

        If the batch is symbolic, the last rows get a tile with only as many rows as may be left.

        Parameters
        ----------
        after
            Emits what follows the tiles of a step.
        """
        with T.serial(self.plan.steps) as step:
            with self.shared(self.plan.parts) as part:
                self._tiles(step, part, body)
            if after is not None:
                after(step)

    def _tiles(self, step: Expr, part: Expr, body: Callable[[_Tile], None]) -> None:
        plan = self.plan
        if sizes.is_static(plan.batch):
            with block("tile"):
                body(_Tile(self, step, part, plan.rows))
            return
        left = plan.batch - part % plan.blocks * plan.rows
        before = 0
        for rows in plan.few_rows:
            inside = left > before if rows == plan.rows else tirx.all(left > before, left <= rows)
            with T.If(inside), T.Then(), block("tile"):
                body(_Tile(self, step, part, rows))
            before = rows


class _Tile:
    """Some hidden units of some rows in one step."""

    def __init__(self, layer: _Layer, step: Expr, part: Expr, rows: int) -> None:
        self.layer, self.plan, self.step, self.rows = layer, layer.plan, step, rows
        self.number, self.block = part // layer.plan.blocks, part % layer.plan.blocks
        self.time = layer.time(step)
        self.lanes = vectors(layer.plan.tile, layer.plan.lanes)

    def place(self, row: Expr) -> Expr:
        """Return the index of a row of the batch, at most that of the last one."""
        return tirx.min(self.block * self.plan.rows + row, self.plan.batch - 1)

    def unit(self, i: Expr) -> Expr:
        """Return the number of a hidden unit of the tile."""
        return self.number * self.plan.tile + i

    def projected(self, row: Expr, gate: Expr | int, i: Expr) -> Expr:
        """Return what the input of the step adds."""
        return self.layer.input[self.time, self.place(row), gate, self.unit(i)]

    def each(self, body: Callable[[Expr, Expr], None]) -> None:
        """Emit the body for each row and unit."""
        with T.unroll(self.rows) as row:
            lanewise(self.lanes, lambda i: body(row, i))

    def store(self, states: tirx.Buffer, state: Expr, row: Expr, i: Expr) -> None:
        """Store a new state, for the next step and for the caller."""
        at = [self.place(row), self.unit(i)]
        T.buffer_store(self.layer.previous, state, [(self.step + 1) % 2, *at])
        T.buffer_store(states, state, [self.time, *at])

    def sums_of(self, first: Callable[[Expr, Expr, Expr], Expr]) -> tirx.Buffer:
        """Emit the sums of all gates, ``[rows, gates, units]``, from what each begins with."""
        layer, plan = self.layer, self.plan

        def term(k: Expr, row: Expr, gate: Expr, i: Expr) -> Expr:
            state = layer.previous[self.step % 2, self.place(row), k]
            return state * layer.weights[self.number, k, gate, i]

        sums = _Sums((self.rows, plan.gates, plan.tile), plan, term)
        return sums.emit(first, plan.state, plan.depth)


class _Projection:
    """The states of an LSTM that projects its hidden units, and these units."""

    def __init__(self, layer: _Layer, weights: tirx.Buffer, states: tirx.Buffer) -> None:
        self.layer, self.weights, self.states = layer, weights, states
        self.units = scratch((layer.plan.batch, layer.plan.padded), layer.plan.dtype)

    def step(self, step: Expr) -> None:
        """Emit the product of one step, whose hidden units are computed."""
        plan = self.layer.plan
        tiles, hidden, width = plan.projection_shape
        with self.layer.shared(tiles * plan.blocks) as part, block("project"):
            number, rows = part // plan.blocks, part % plan.blocks

            def place(row: Expr) -> Expr:
                return tirx.min(rows * plan.rows + row, plan.batch - 1)

            def term(k: Expr, row: Expr, _: Expr, i: Expr) -> Expr:
                return self.units[place(row), k] * self.weights[number, k, i]

            zero = tirx.const(0.0, plan.dtype)
            length = split_evenly(hidden, longest_sum(hidden))
            sums = _Sums((plan.rows, 1, width), plan, term).emit(lambda *_: zero, hidden, length)
            with T.unroll(plan.rows) as row:

                def store(i: Expr) -> None:
                    at = [place(row), number * width + i]
                    T.buffer_store(self.layer.previous, sums[row, 0, i], [(step + 1) % 2, *at])
                    T.buffer_store(self.states, sums[row, 0, i], [self.layer.time(step), *at])

                lanewise(vectors(width, plan.lanes), store)


class _Sums:
    """Sums in registers, ``[rows, gates, units]``.

    Parameters
    ----------
    term
        Returns a term of one of them, from its number and the place of the sum.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        plan: Plan,
        term: Callable[[Expr, Expr, Expr, Expr], Expr],
    ) -> None:
        self.shape, self.dtype, self.term = shape, plan.dtype, term
        self.lanes = vectors(shape[-1], plan.lanes)

    def emit(
        self, first: Callable[[Expr, Expr, Expr], Expr], depth: int, length: int
    ) -> tirx.Buffer:
        """Emit as many terms as the depth, in blocks of a length, added to the first values."""
        sums = self._registers()
        self._each(lambda *at: T.buffer_store(sums, first(*at), [*at]))
        self._add_up(sums, 0, length)
        if length < depth:
            with T.serial(-(-depth // length) - 1) as number:
                start = (number + 1) * length
                own = self._registers()
                zero = tirx.const(0.0, self.dtype)
                self._each(lambda *at: T.buffer_store(own, zero, [*at]))
                self._add_up(own, start, tirx.min(length, depth - start))
                self._each(lambda *at: T.buffer_store(sums, sums[at] + own[at], [*at]))
        return sums

    def _registers(self) -> tirx.Buffer:
        return registers(self.shape, self.dtype)

    def _each(self, body: Callable[[Expr, Expr, Expr], None]) -> None:
        rows, gates, _ = self.shape
        with T.unroll(rows) as row, T.unroll(gates) as gate:
            lanewise(self.lanes, lambda i: body(row, gate, i))

    def _add_up(self, sums: tirx.Buffer, start: Expr | int, count: Expr | int) -> None:
        """Emit one block of terms."""
        with T.serial(count) as k:
            self._each(
                lambda *at: T.buffer_store(sums, sums[at] + self.term(start + k, *at), [*at])
            )

"""The steps of recurrent networks: one function with a serial loop over time.

What does not depend on the step before, the projection of all inputs, is a matrix product outside.
A step goes through the hidden units in tiles: for each, the sums of all gates over the previous
state stay in registers (a few rows of the batch at a time; those of a long state, and all where
accuracy is to be strict, are sums of blocks), and the activations and the new state follow from
there. So a step is one pass over the recurrent weights, which lie in the order of that pass:
``[tiles, previous state, gates, tile]``. Tiles are shared out among threads in each step.
"""

# pyright: basic, reportInvalidTypeForm=false
from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script import tirx as T

from tvmify.compiler.schedule.legalizing import scheduled_as
from tvmify.compiler.schedule.microarchitecture import Microarchitecture, bits_of
from tvmify.compiler.schedule.plans import longest_sum, split_evenly


@dataclass(frozen=True)
class Plan:
    """How a recurrence is cut up.

    Attributes
    ----------
    steps, batch, hidden, gates
        Extents of the problem.
    lanes, vectors
        Of a tile of hidden units; `padded` is a multiple of their product.
    rows
        Of the batch that are computed together.
    depth
        Of the previous state, whose products are one sum. The last block may be shorter.
    fork
        Whether a step is long enough to share out.
    """

    steps: int
    batch: int
    hidden: int
    gates: int
    dtype: str
    padded: int
    lanes: int
    vectors: int
    rows: int
    depth: int
    fork: bool

    @classmethod
    def of(
        cls,
        steps: int,
        batch: int,
        hidden: int,
        gates: int,
        dtype: str,
        machine: Microarchitecture,
    ) -> Plan:
        """Fill the registers: two vectors of each gate, and rows as there is room."""
        lanes = machine.lanes(bits_of(dtype))
        vectors = 2 if hidden > lanes else 1
        tile = vectors * lanes
        padded = -(-hidden // tile) * tile
        rows = min(batch, max(1, machine.accumulators // (gates * vectors)))
        work = batch * gates * hidden * padded
        fork = machine.worth_threads(work, gates * hidden * padded * bits_of(dtype) // 8)
        depth = split_evenly(hidden, longest_sum(hidden))
        extents = steps, batch, hidden, gates
        return cls(*extents, dtype, padded, lanes, vectors, rows, depth, fork)

    @property
    def tile(self) -> int:
        """Hidden units that are computed together."""
        return self.lanes * self.vectors

    @property
    def packed_shape(self) -> tuple[int, int, int, int]:
        """Shape of the recurrent weights."""
        return (self.padded // self.tile, self.hidden, self.gates, self.tile)


def lstm(plan: Plan, reverse: bool) -> tirx.PrimFunc:
    """Steps of an LSTM; gates in torch's order: input, forget, cell, output."""
    steps, batch, hidden, padded = plan.steps, plan.batch, plan.hidden, plan.padded
    dtype, lanes, vectors, tile, rows = plan.dtype, plan.lanes, plan.vectors, plan.tile, plan.rows
    tiles, blocks, depth = padded // tile, -(-batch // rows), plan.depth
    shared = T.parallel if plan.fork else T.serial
    last, sign = (steps - 1, -1) if reverse else (0, 1)

    @T.prim_func(private=True, s_tir=True)
    def lstm_steps(  # noqa: PLR0912
        projected: T.Buffer((steps, batch, 4, padded), dtype),
        weights: T.Buffer((tiles, hidden, 4, tile), dtype),
        first_state: T.Buffer((batch, padded), dtype),
        first_cell: T.Buffer((batch, padded), dtype),
        states: T.Buffer((steps, batch, padded), dtype),
        cell: T.Buffer((batch, padded), dtype),
    ):
        T.func_attr(scheduled_as("lstm"))
        previous = T.alloc_buffer((2, batch, padded), dtype)
        for b, j in T.grid(batch, padded):
            previous[0, b, j] = first_state[b, j]
            cell[b, j] = first_cell[b, j]
        for step in T.serial(steps):
            for part in shared(tiles * blocks):
                with T.sblock("tile"):
                    T.reads(projected[0:steps, 0:batch, 0:4, 0:padded])
                    T.writes(states[0:steps, 0:batch, 0:padded])
                    sums = T.alloc_buffer((rows, 4, tile), dtype, scope="local")
                    for r in T.unroll(rows):
                        for g in T.unroll(4):
                            for v in T.unroll(vectors):
                                for i in T.vectorized(lanes):
                                    sums[r, g, v * lanes + i] = projected[
                                        last + sign * step,
                                        T.min(part % blocks * rows + r, batch - 1),
                                        g,
                                        part // blocks * tile + v * lanes + i,
                                    ]
                    for k in T.serial(depth):
                        for r in T.unroll(rows):
                            for g in T.unroll(4):
                                for v in T.unroll(vectors):
                                    for i in T.vectorized(lanes):
                                        sums[r, g, v * lanes + i] = (
                                            sums[r, g, v * lanes + i]
                                            + previous[
                                                step % 2,
                                                T.min(part % blocks * rows + r, batch - 1),
                                                k,
                                            ]
                                            * weights[part // blocks, k, g, v * lanes + i]
                                        )
                    for block in T.serial(-(-hidden // depth) - 1):
                        next_sums = T.alloc_buffer((rows, 4, tile), dtype, scope="local")
                        for r in T.unroll(rows):
                            for g in T.unroll(4):
                                for v in T.unroll(vectors):
                                    for i in T.vectorized(lanes):
                                        next_sums[r, g, v * lanes + i] = 0.0
                        for k in T.serial(T.min(depth, hidden - (block + 1) * depth)):
                            for r in T.unroll(rows):
                                for g in T.unroll(4):
                                    for v in T.unroll(vectors):
                                        for i in T.vectorized(lanes):
                                            next_sums[r, g, v * lanes + i] = (
                                                next_sums[r, g, v * lanes + i]
                                                + previous[
                                                    step % 2,
                                                    T.min(part % blocks * rows + r, batch - 1),
                                                    (block + 1) * depth + k,
                                                ]
                                                * weights[
                                                    part // blocks,
                                                    (block + 1) * depth + k,
                                                    g,
                                                    v * lanes + i,
                                                ]
                                            )
                        for r in T.unroll(rows):
                            for g in T.unroll(4):
                                for v in T.unroll(vectors):
                                    for i in T.vectorized(lanes):
                                        sums[r, g, v * lanes + i] = (
                                            sums[r, g, v * lanes + i]
                                            + next_sums[r, g, v * lanes + i]
                                        )
                    for r in T.unroll(rows):
                        for v in T.unroll(vectors):
                            for i in T.vectorized(lanes):
                                # A cell is old until all rows are through: the last may come twice.
                                sums[r, 1, v * lanes + i] = T.sigmoid(
                                    sums[r, 1, v * lanes + i]
                                ) * cell[
                                    T.min(part % blocks * rows + r, batch - 1),
                                    part // blocks * tile + v * lanes + i,
                                ] + T.sigmoid(sums[r, 0, v * lanes + i]) * T.tanh(
                                    sums[r, 2, v * lanes + i]
                                )
                                sums[r, 3, v * lanes + i] = T.sigmoid(
                                    sums[r, 3, v * lanes + i]
                                ) * T.tanh(sums[r, 1, v * lanes + i])
                    for r in T.unroll(rows):
                        for v in T.unroll(vectors):
                            for i in T.vectorized(lanes):
                                cell[
                                    T.min(part % blocks * rows + r, batch - 1),
                                    part // blocks * tile + v * lanes + i,
                                ] = sums[r, 1, v * lanes + i]
                                previous[
                                    (step + 1) % 2,
                                    T.min(part % blocks * rows + r, batch - 1),
                                    part // blocks * tile + v * lanes + i,
                                ] = sums[r, 3, v * lanes + i]
                                states[
                                    last + sign * step,
                                    T.min(part % blocks * rows + r, batch - 1),
                                    part // blocks * tile + v * lanes + i,
                                ] = sums[r, 3, v * lanes + i]

    return lstm_steps


def gru(plan: Plan, reverse: bool) -> tirx.PrimFunc:
    """Steps of a GRU; gates in torch's order: reset, update, new."""
    steps, batch, hidden, padded = plan.steps, plan.batch, plan.hidden, plan.padded
    dtype, lanes, vectors, tile, rows = plan.dtype, plan.lanes, plan.vectors, plan.tile, plan.rows
    tiles, blocks, depth = padded // tile, -(-batch // rows), plan.depth
    shared = T.parallel if plan.fork else T.serial
    last, sign = (steps - 1, -1) if reverse else (0, 1)

    @T.prim_func(private=True, s_tir=True)
    def gru_steps(  # noqa: PLR0912
        projected: T.Buffer((steps, batch, 3, padded), dtype),
        weights: T.Buffer((tiles, hidden, 3, tile), dtype),
        first_state: T.Buffer((batch, padded), dtype),
        new_bias: T.Buffer((padded,), dtype),
        states: T.Buffer((steps, batch, padded), dtype),
    ):
        T.func_attr(scheduled_as("gru"))
        previous = T.alloc_buffer((2, batch, padded), dtype)
        for b, j in T.grid(batch, padded):
            previous[0, b, j] = first_state[b, j]
        for step in T.serial(steps):
            for part in shared(tiles * blocks):
                with T.sblock("tile"):
                    T.reads(projected[0:steps, 0:batch, 0:3, 0:padded])
                    T.writes(states[0:steps, 0:batch, 0:padded])
                    sums = T.alloc_buffer((rows, 3, tile), dtype, scope="local")
                    for r in T.unroll(rows):
                        for g in T.unroll(3):
                            for v in T.unroll(vectors):
                                for i in T.vectorized(lanes):
                                    sums[r, g, v * lanes + i] = T.Select(
                                        g == 2,
                                        new_bias[part // blocks * tile + v * lanes + i],
                                        projected[
                                            last + sign * step,
                                            T.min(part % blocks * rows + r, batch - 1),
                                            g,
                                            part // blocks * tile + v * lanes + i,
                                        ],
                                    )
                    for k in T.serial(depth):
                        for r in T.unroll(rows):
                            for g in T.unroll(3):
                                for v in T.unroll(vectors):
                                    for i in T.vectorized(lanes):
                                        sums[r, g, v * lanes + i] = (
                                            sums[r, g, v * lanes + i]
                                            + previous[
                                                step % 2,
                                                T.min(part % blocks * rows + r, batch - 1),
                                                k,
                                            ]
                                            * weights[part // blocks, k, g, v * lanes + i]
                                        )
                    for block in T.serial(-(-hidden // depth) - 1):
                        next_sums = T.alloc_buffer((rows, 3, tile), dtype, scope="local")
                        for r in T.unroll(rows):
                            for g in T.unroll(3):
                                for v in T.unroll(vectors):
                                    for i in T.vectorized(lanes):
                                        next_sums[r, g, v * lanes + i] = 0.0
                        for k in T.serial(T.min(depth, hidden - (block + 1) * depth)):
                            for r in T.unroll(rows):
                                for g in T.unroll(3):
                                    for v in T.unroll(vectors):
                                        for i in T.vectorized(lanes):
                                            next_sums[r, g, v * lanes + i] = (
                                                next_sums[r, g, v * lanes + i]
                                                + previous[
                                                    step % 2,
                                                    T.min(part % blocks * rows + r, batch - 1),
                                                    (block + 1) * depth + k,
                                                ]
                                                * weights[
                                                    part // blocks,
                                                    (block + 1) * depth + k,
                                                    g,
                                                    v * lanes + i,
                                                ]
                                            )
                        for r in T.unroll(rows):
                            for g in T.unroll(3):
                                for v in T.unroll(vectors):
                                    for i in T.vectorized(lanes):
                                        sums[r, g, v * lanes + i] = (
                                            sums[r, g, v * lanes + i]
                                            + next_sums[r, g, v * lanes + i]
                                        )
                    for r in T.unroll(rows):
                        for v in T.unroll(vectors):
                            for i in T.vectorized(lanes):
                                sums[r, 2, v * lanes + i] = T.tanh(
                                    projected[
                                        last + sign * step,
                                        T.min(part % blocks * rows + r, batch - 1),
                                        2,
                                        part // blocks * tile + v * lanes + i,
                                    ]
                                    + T.sigmoid(sums[r, 0, v * lanes + i])
                                    * sums[r, 2, v * lanes + i]
                                )
                                sums[r, 2, v * lanes + i] = sums[r, 2, v * lanes + i] + T.sigmoid(
                                    sums[r, 1, v * lanes + i]
                                ) * (
                                    previous[
                                        step % 2,
                                        T.min(part % blocks * rows + r, batch - 1),
                                        part // blocks * tile + v * lanes + i,
                                    ]
                                    - sums[r, 2, v * lanes + i]
                                )
                                previous[
                                    (step + 1) % 2,
                                    T.min(part % blocks * rows + r, batch - 1),
                                    part // blocks * tile + v * lanes + i,
                                ] = sums[r, 2, v * lanes + i]
                                states[
                                    last + sign * step,
                                    T.min(part % blocks * rows + r, batch - 1),
                                    part // blocks * tile + v * lanes + i,
                                ] = sums[r, 2, v * lanes + i]

    return gru_steps

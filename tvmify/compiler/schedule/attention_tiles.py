"""Attention of many queries: blocks of queries against blocks of keys, all of it in caches.

A task is one head and a block of queries. The block is turned, so that lanes are queries. Then, for
each block of keys: scores, [keys × queries] in register tiles of which each key is broadcast;
maximum and sum of the exponentials down the keys, with no work across lanes; and weighted values,
[queries × elements], with lanes along a head as they lie in memory. From one block of keys to the
next the sums so far are rescaled to the new maximum (Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018; Dao et al., "FlashAttention", 2022). Keys and values are read where
they are, without copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from tvmify.compiler.schedule import tiles
from tvmify.compiler.schedule.emission import block, lanewise, registers, scratch, tasks, vectors
from tvmify.compiler.schedule.microarchitecture import Microarchitecture, bits_of
from tvmify.compiler.schedule.powers import exponent_scale, weight

if TYPE_CHECKING:
    from tvmify.compiler.schedule.attention import Attention

#: Queries that share what is read of keys and values where these do not stay in the second cache.
#: About as many as tiles of AVX-512 have (48 or 64); with AVX2, where it was measured, a sixth
#: faster than the 16 of one tile.
_FAR_QUERIES = 48


def emit(attention: Attention, tensors: dict[str, tirx.Buffer], machine: Microarchitecture) -> None:
    """Write the kernel into the open function."""
    _Kernel.of(attention, machine).emit(tensors, machine)


def padded_queries(attention: Attention, machine: Microarchitecture) -> int:
    """Return the number of queries, rounded up to whole tasks: what a mask has to cover."""
    queries = _Kernel.of(attention, machine).queries
    return -(-attention.query.length // queries) * queries


@dataclass(frozen=True)
class _Kernel:
    """The tiles, and the numbers that follow from them.

    Attributes
    ----------
    width
        Queries whose scores are in registers at a time.
    groups
        How many times as many a task has: they share what is read of keys and values.
    keys
        Keys whose scores are in registers at a time.
    block
        Tiles of keys in a block: their scores stay in the first cache.
    rows, columns
        Queries, and vectors of a head, of the tile of weighted values.
    """

    attention: Attention
    lanes: int
    value_lanes: int
    width: int
    groups: int
    keys: int
    block: int
    rows: int
    columns: int

    @classmethod
    def of(cls, attention: Attention, machine: Microarchitecture) -> _Kernel:
        bits = bits_of(attention.dtype)
        places, count = attention.query.length, attention.key.length
        ranked = tiles.ranked(count, places, machine, bits)
        tile = next(t for t in ranked if tiles.leaves_register(t, machine, bits, places))
        groups = 1
        if machine.distance(count * (attention.size + attention.value_size) * bits // 8) > 1:
            in_all = -(-places // tile.columns)
            per_head = -(-in_all // max(1, _FAR_QUERIES // tile.columns))
            groups = -(-in_all // per_head)  # as many for each task as can be
        # A third of the first cache, by estimate: keys and values stream through the rest.
        most = max(1, machine.l1_bytes // 3 * 8 // bits // (groups * tile.columns) // tile.rows)
        steps = -(-count // tile.rows)
        blocks = -(-steps // most)
        lanes = tiles.lanes_for(attention.value_size, machine, bits)
        fitting = [
            t
            for t in tiles.candidates(machine, bits, attention.value_size)
            if groups * tile.columns % t.rows == 0
            and tiles.leaves_register(t, machine, bits, attention.value_size)
        ]
        width = len(vectors(attention.value_size, lanes)) * lanes

        def cost(t: tiles.Tile) -> tuple[float, float]:
            number = groups * tile.columns // t.rows * -(-width // t.columns)
            return number * tiles.cycles(t, machine, bits, width), number * (
                t.rows + t.columns // lanes
            )

        values = min(fitting, key=cost)
        return cls(
            attention,
            tiles.lanes_for(places, machine, bits),
            lanes,
            tile.columns,
            groups,
            tile.rows,
            -(-steps // blocks),
            values.rows,
            values.columns // lanes,
        )

    @property
    def queries(self) -> int:
        return self.groups * self.width

    @property
    def blocks(self) -> int:
        steps = -(-self.attention.key.length // self.keys)
        return -(-steps // self.block)

    def emit(self, tensors: dict[str, tirx.Buffer], machine: Microarchitecture) -> None:
        about = self.attention
        per_head = -(-about.query.length // self.queries)
        count = about.batch * about.heads * per_head
        with tasks(count, about.work, 0, machine) as task, block("task"):
            head = task // per_head
            place = _Place(head // about.heads, head % about.heads, task % per_head * self.queries)
            _Task(self, tensors, place).emit()


@dataclass(frozen=True)
class _Place:
    """Where a task is: of which head, and its first query."""

    batch: Expr
    head: Expr
    query: Expr


class _Task:
    """Emits the stages of one task."""

    def __init__(self, kernel: _Kernel, tensors: dict[str, tirx.Buffer], place: _Place) -> None:
        self.kernel = kernel
        self.about = kernel.attention
        self.tensors = tensors
        self.place = place
        self.dtype = self.about.dtype
        self.lowest = tirx.const(-math.inf, self.dtype)
        self.across = vectors(kernel.width, kernel.lanes)
        self.values = vectors(self.about.value_size, kernel.value_lanes)
        queries = kernel.queries
        self.turned = scratch((self.about.size, queries), self.dtype)
        self.scores = scratch((kernel.block * kernel.keys, queries), self.dtype)
        per_query = registers if kernel.groups == 1 else scratch
        self.best, self.shift, self.total, self.factor = (
            per_query((queries,), self.dtype) for _ in range(4)
        )
        self.online = kernel.blocks > 1
        if self.online:
            self.sums = scratch((queries, self.about.value_size), self.dtype)

    def number(self, value: float) -> Expr:
        return tirx.const(value, self.dtype)

    def emit(self) -> None:
        about, kernel = self.about, self.kernel
        self.turn_queries()
        self.each_query(lambda i: T.buffer_store(self.best, self.lowest, [i]))
        self.each_query(lambda i: T.buffer_store(self.total, self.number(0), [i]))
        steps: Expr | int = -(-about.key.length // kernel.keys)
        if about.causal:  # blocks above the diagonal are not even looked at
            seen = tirx.min(self.place.query + kernel.queries, about.key.length)
            steps = (seen + kernel.keys - 1) // kernel.keys
        if not self.online:
            self.key_block(0, steps)
            return
        with T.serial(kernel.queries) as row:
            lanewise(self.values, lambda i: T.buffer_store(self.sums, self.number(0), [row, i]))
        with T.serial((steps + kernel.block - 1) // kernel.block) as number:
            first = number * kernel.block
            self.key_block(first, tirx.min(first + kernel.block, steps))
        self.store()

    def each_group(self, body: Callable[[Expr], None]) -> None:
        """Emit the body for each group of queries; it is given the number of its first query."""
        kernel = self.kernel
        if kernel.groups == 1:
            body(tirx.const(0, "int32"))
            return
        left = self.about.query.length - self.place.query
        present = (left + kernel.width - 1) // kernel.width
        with T.serial(tirx.min(present, kernel.groups)) as number:
            body(number * kernel.width)

    def each_query(self, body: Callable[[Expr], None]) -> None:
        self.each_group(lambda start: lanewise(self.across, lambda i: body(start + i)))

    def turn_queries(self) -> None:
        """Copy the block of queries, scaled, so that they are next to each other."""
        about, place = self.about, self.place
        last = about.query.length - 1
        with T.serial(self.kernel.queries) as row, T.serial(about.size) as i:
            at = tirx.min(place.query + row, last)
            value = about.query.at(self.tensors["query"], place.batch, place.head, at, i)
            T.buffer_store(
                self.turned, value * self.number(about.scale * exponent_scale(self.dtype)), [i, row]
            )

    def key_block(self, first: Expr | int, end: Expr | int) -> None:
        """Go through the tiles of keys from `first` to before `end`."""
        about, kernel = self.about, self.kernel
        whole, rest = divmod(about.key.length, kernel.keys)
        if self.online:
            self.each_query(lambda i: T.buffer_store(self.shift, self.best[i], [i]))
        if whole:
            stop = end if not rest else tirx.min(end, whole)
            with T.serial(first, stop) as step:
                self.each_group(lambda start: self.score_tile(step, first, kernel.keys, start))
        if rest:
            with T.If(_is_above(end, whole)), T.Then():
                self.each_group(lambda start: self.score_tile(whole, first, rest, start))
        count = tirx.min(end * kernel.keys, about.key.length) - first * kernel.keys
        self.exponentials(count)
        self.weigh(first * kernel.keys, count)

    def score_tile(self, step: Expr | int, first: Expr | int, keys: int, start: Expr) -> None:
        """Scores of a tile of keys for a group of queries, with the mask, and their largest."""
        about, kernel, place = self.about, self.kernel, self.place
        at = step * kernel.keys
        with block("scores"):
            tile = registers((keys, kernel.width), self.dtype)
            with T.unroll(keys) as key:
                lanewise(self.across, lambda i: T.buffer_store(tile, self.number(0), [key, i]))
            with T.serial(about.size) as k, T.unroll(keys) as key:
                value = about.key.at(
                    self.tensors["key"], place.batch, place.head // about.shared, at + key, k
                )
                lanewise(
                    self.across,
                    lambda i: T.buffer_store(
                        tile, tile[key, i] + value * self.turned[k, start + i], [key, i]
                    ),
                )

            def finish(key: Expr, i: Expr) -> None:
                query = start + i
                where = (place.batch, place.head, place.query + query, at + key)
                score = about.masked(tile[key, i], self.tensors, where)
                T.buffer_store(tile, score, [key, i])
                T.buffer_store(self.best, tirx.max(self.best[query], tile[key, i]), [query])
                T.buffer_store(self.scores, tile[key, i], [at + key - first * kernel.keys, query])

            with T.unroll(keys) as key:
                lanewise(self.across, lambda i: finish(key, i))

    def exponentials(self, count: Expr) -> None:
        """Scores become weights, relative to the largest score so far; their sums add up."""
        zero = self.number(0)
        if self.online:
            self.each_query(self.rescale)
        else:
            # A query that sees no key has only -∞, from which -∞ cannot be taken.
            self.each_query(
                lambda i: T.buffer_store(
                    self.shift, T.Select(self.best[i] == self.lowest, zero, self.best[i]), [i]
                )
            )

        def rate(key: Expr, i: Expr) -> None:
            T.buffer_store(self.scores, weight(self.scores[key, i] - self.shift[i]), [key, i])
            T.buffer_store(self.total, self.total[i] + self.scores[key, i], [i])

        def rate_group(start: Expr) -> None:
            with T.serial(count) as key:
                lanewise(self.across, lambda i: rate(key, start + i))

        self.each_group(rate_group)

    def rescale(self, i: Expr) -> None:
        """Turn what was summed relative to the last maximum to the new one."""
        shift = T.Select(self.best[i] == self.lowest, self.number(0), self.best[i])
        T.buffer_store(self.factor, weight(self.shift[i] - shift), [i])
        T.buffer_store(self.shift, shift, [i])
        T.buffer_store(self.total, self.total[i] * self.factor[i], [i])

    def weigh(self, start: Expr | int, count: Expr) -> None:
        """Add the weighted values of a block of keys."""
        kernel = self.kernel
        tiles_of_rows = kernel.queries // kernel.rows
        if not self.online:
            self.divide()
        left = tirx.min(self.about.query.length - self.place.query, kernel.queries)
        # The last tile may reach into queries that are absent, whose scores are anything: they are
        # not stored.
        with T.serial(tirx.min((left + kernel.rows - 1) // kernel.rows, tiles_of_rows)) as number:
            for at in range(0, len(self.values), kernel.columns):
                self.value_tile(number, self.values[at : at + kernel.columns], start, count)

    def value_tile(
        self, number: Expr, cuts: list[tuple[int, int]], start: Expr | int, count: Expr
    ) -> None:
        about, kernel, place = self.about, self.kernel, self.place
        origin = cuts[0][0]
        width = cuts[-1][0] + cuts[-1][1] - origin
        own = [(at - origin, lanes) for at, lanes in cuts]
        head = place.head // about.shared
        with block("values"):
            tile = registers((kernel.rows, width), self.dtype)

            def begin(row: Expr, i: Expr) -> None:
                at = number * kernel.rows + row
                value = self.number(0)
                if self.online:
                    value = self.sums[at, origin + i] * self.factor[at]
                T.buffer_store(tile, value, [row, i])

            def add(key: Expr, row: Expr, i: Expr) -> None:
                value = about.value.at(
                    self.tensors["value"], place.batch, head, start + key, origin + i
                )
                weight = self.scores[key, number * kernel.rows + row]
                T.buffer_store(tile, tile[row, i] + weight * value, [row, i])

            def end(row: Expr, i: Expr) -> None:
                at = number * kernel.rows + row
                if self.online:
                    T.buffer_store(self.sums, tile[row, i], [at, origin + i])
                else:
                    index = [place.batch, place.query + at, place.head, origin + i]
                    T.buffer_store(self.tensors["out"], tile[row, i] * self.factor[at], index)

            with T.unroll(kernel.rows) as row:
                lanewise(own, lambda i: begin(row, i))
            with T.serial(count) as key, T.unroll(kernel.rows) as row:
                lanewise(own, lambda i: add(key, row, i))
            with T.unroll(kernel.rows) as row:
                if self.online:
                    lanewise(own, lambda i: end(row, i))
                else:
                    self.if_there(
                        number * kernel.rows + row, lambda: lanewise(own, lambda i: end(row, i))
                    )

    def if_there(self, row: Expr, body: Callable[[], None]) -> None:
        """Emit the body for a query that exists: the last task may have fewer."""
        if self.about.query.length % self.kernel.queries == 0:
            body()
            return
        with T.If(self.place.query + row < self.about.query.length), T.Then():
            body()

    def divide(self) -> None:
        """The factor becomes one over the sum of the weights, which is 0 where no key was seen."""
        empty, one = self.number(self.about.empty), self.number(1)
        self.each_query(
            lambda i: T.buffer_store(
                self.factor,
                T.Select(self.best[i] == self.lowest, empty, one / self.total[i]),
                [i],
            )
        )

    def store(self) -> None:
        place = self.place
        self.divide()
        with T.serial(self.kernel.queries) as row:

            def write(i: Expr) -> None:
                index = [place.batch, place.query + row, place.head, i]
                T.buffer_store(self.tensors["out"], self.sums[row, i] * self.factor[row], index)

            self.if_there(row, lambda: lanewise(self.values, write))


def _is_above(end: Expr | int, whole: int) -> Expr:
    return end > whole if not isinstance(end, int) else tirx.const(end > whole, "bool")

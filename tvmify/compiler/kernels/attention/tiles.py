"""Attention of many queries: blocks of queries against blocks of keys, all in caches. A task is one
head and a block of queries. The block is transposed, so that lanes are queries. Then, for each
block of keys: scores, [keys × queries] in register tiles into which each key is broadcast; maximum
and sum of the exponentials over the keys, without reductions across lanes; and weighted values,
[queries × elements], with lanes along a head as in memory. Between blocks of keys, the sums so far
are rescaled to the new maximum, and those of the block are added: sums of sums are more accurate
than one over all keys (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018;
Dao et al., "FlashAttention", 2022). Keys and values are read where they are, without copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from tvmify.compiler import sizes
from tvmify.compiler.kernels.attention.powers import exponent_scale, weight
from tvmify.compiler.kernels.common import tiles
from tvmify.compiler.kernels.common.emission import (
    block,
    lanewise,
    registers,
    scratch,
    tasks,
    vectors,
)
from tvmify.compiler.microarchitecture import Microarchitecture, bits_of
from tvmify.compiler.sizes import Size

if TYPE_CHECKING:
    from tvmify.compiler.kernels.attention.plan import Tiles
    from tvmify.compiler.kernels.attention.template import Attention


def emit(
    attention: Attention, tensors: dict[str, tirx.Buffer], plan: Tiles, machine: Microarchitecture
) -> None:
    """Write the kernel into the open function."""
    per_head = sizes.ceil_div(attention.query.length, plan.queries)
    count = attention.batch * attention.heads * per_head
    with tasks(count, attention.likely.work, 0, machine) as task, block("task"):
        head, first = task // per_head, task % per_head * plan.queries
        place = _Place(head // attention.heads, head % attention.heads, first)
        _Task(attention, plan, tensors, place, machine).emit()


@dataclass(frozen=True)
class _Place:
    """The place of a task: its batch and head, and its first query."""

    batch: Expr
    head: Expr
    query: Expr


class _Task:
    """Emits the stages of one task."""

    def __init__(
        self,
        about: Attention,
        plan: Tiles,
        tensors: dict[str, tirx.Buffer],
        place: _Place,
        machine: Microarchitecture,
    ) -> None:
        self.about, self.plan = about, plan
        self.tensors = tensors
        self.place = place
        self.dtype = about.dtype
        self.lowest = tirx.const(-math.inf, self.dtype)
        bits = bits_of(about.dtype)
        likely = sizes.hint(about.query.length)
        self.across = vectors(plan.width, tiles.lanes_for(likely, machine, bits))
        self.values = vectors(about.value_size, tiles.lanes_for(about.value_size, machine, bits))
        queries = plan.queries
        self.transposed = scratch((about.size, queries), self.dtype)
        self.scores = scratch((plan.block * plan.keys, queries), self.dtype)
        per_query = registers if plan.groups == 1 else scratch
        self.best, self.shift, self.total, self.factor = (
            per_query((queries,), self.dtype) for _ in range(4)
        )
        self.online = sizes.bounds(about.key.length)[1] > plan.block * plan.keys
        #: The sum of the weights of a block, and of all before it.
        self.own = per_query((queries,), self.dtype) if self.online else self.total
        if self.online:
            self.sums = scratch((queries, about.value_size), self.dtype)

    def number(self, value: float) -> Expr:
        return tirx.const(value, self.dtype)

    def emit(self) -> None:
        about, plan = self.about, self.plan
        self.transpose_queries()
        self.each_query(lambda i: T.buffer_store(self.best, self.lowest, [i]))
        self.each_query(lambda i: T.buffer_store(self.total, self.number(0), [i]))
        steps: Size = sizes.ceil_div(about.key.length, plan.keys)
        if about.causal:  # blocks above the diagonal are skipped
            seen = tirx.min(self.place.query + plan.queries, about.key.length)
            steps = (seen + plan.keys - 1) // plan.keys
        if not self.online:
            self.key_block(0, steps)
            return
        with T.serial(self.present()) as row:
            lanewise(self.values, lambda i: T.buffer_store(self.sums, self.number(0), [row, i]))
        with T.serial((steps + plan.block - 1) // plan.block) as number:
            first = number * plan.block
            self.key_block(first, tirx.min(first + plan.block, steps))
        self.store()

    def present(self) -> Size:
        """How many queries of the task are computed: those that exist, in whole groups."""
        plan, length = self.plan, self.about.query.length
        if sizes.is_static(length):
            return plan.queries
        left = length - self.place.query
        return tirx.min((left + plan.width - 1) // plan.width * plan.width, plan.queries)

    def each_group(self, body: Callable[[Expr], None]) -> None:
        """Emit the body for each group of queries; it is given the number of its first query."""
        plan = self.plan
        if plan.groups == 1:
            body(tirx.const(0, "int32"))
            return
        left = self.about.query.length - self.place.query
        present = (left + plan.width - 1) // plan.width
        with T.serial(tirx.min(present, plan.groups)) as number:
            body(number * plan.width)

    def each_query(self, body: Callable[[Expr], None]) -> None:
        self.each_group(lambda start: lanewise(self.across, lambda i: body(start + i)))

    def transpose_queries(self) -> None:
        """Copy the block of queries, scaled, so that they are next to each other."""
        about, place = self.about, self.place
        last = about.query.length - 1
        # LLVM takes most of a second to find no vectors in a loop that stores elements far apart.
        with T.serial(about.size) as i, T.serial(self.present()) as row:
            at = tirx.min(place.query + row, last)
            value = about.query.at(self.tensors["query"], place.batch, place.head, at, i)
            T.buffer_store(
                self.transposed,
                value * self.number(about.scale * exponent_scale(self.dtype)),
                [i, row],
            )

    def key_block(self, first: Expr | int, end: Expr | int) -> None:
        """Go through the tiles of keys from `first` to before `end`."""
        about, plan = self.about, self.plan
        length = about.key.length
        if self.online:
            self.each_query(lambda i: T.buffer_store(self.shift, self.best[i], [i]))
        rest: int | None
        if sizes.is_static(length):
            whole, rest = divmod(length, plan.keys)
        else:
            whole, rest = length // plan.keys, None
        if rest is None:
            with T.serial(first, tirx.min(end, whole)) as step:
                self.each_group(lambda start: self.score_tile(step, first, plan.keys, start))
            with T.If(end > whole), T.Then():
                self.each_group(
                    lambda start: self.score_tile(whole, first, plan.keys, start, all_present=False)
                )
        elif whole:
            stop = end if not rest else tirx.min(end, whole)
            with T.serial(first, stop) as step:
                self.each_group(lambda start: self.score_tile(step, first, plan.keys, start))
        if rest:
            with T.If(_is_above(end, whole)), T.Then():
                self.each_group(lambda start: self.score_tile(whole, first, rest, start))
        count = tirx.min(end * plan.keys, about.key.length) - first * plan.keys
        self.exponentials(count)
        self.weigh(first * plan.keys, count)

    def score_tile(
        self,
        step: Expr | int,
        first: Expr | int,
        keys: int,
        start: Expr,
        *,
        all_present: bool = True,
    ) -> None:
        """Scores of a tile of keys for a group of queries, with the mask, and their largest.

        Past the last key, the last one is read again, and its results are discarded.
        """
        about, plan, place = self.about, self.plan, self.place
        at = step * plan.keys

        def present(key: Expr) -> Expr:
            return at + key if all_present else tirx.min(at + key, about.key.length - 1)

        with block("scores"):
            tile = registers((keys, plan.width), self.dtype)
            with T.unroll(keys) as key:
                lanewise(self.across, lambda i: T.buffer_store(tile, self.number(0), [key, i]))
            with T.serial(about.size) as k, T.unroll(keys) as key:
                value = about.key.at(
                    self.tensors["key"], place.batch, place.head // about.shared, present(key), k
                )
                lanewise(
                    self.across,
                    lambda i: T.buffer_store(
                        tile, tile[key, i] + value * self.transposed[k, start + i], [key, i]
                    ),
                )

            def finish(key: Expr, i: Expr) -> None:
                query = start + i
                where = (place.batch, place.head, place.query + query, present(key))
                score = about.masked(tile[key, i], self.tensors, where)
                if not all_present:
                    score = T.Select(at + key < about.key.length, score, self.lowest)
                T.buffer_store(tile, score, [key, i])
                T.buffer_store(self.best, tirx.max(self.best[query], tile[key, i]), [query])
                T.buffer_store(self.scores, tile[key, i], [at + key - first * plan.keys, query])

            with T.unroll(keys) as key:
                lanewise(self.across, lambda i: finish(key, i))

    def exponentials(self, count: Expr) -> None:
        """Scores become weights, relative to the largest score so far; their sums add up."""
        zero = self.number(0)
        if self.online:
            self.each_query(self.rescale)
            self.each_query(lambda i: T.buffer_store(self.own, zero, [i]))
        else:
            # A query that sees no key has only -∞, from which -∞ cannot be taken.
            self.each_query(
                lambda i: T.buffer_store(
                    self.shift, T.Select(self.best[i] == self.lowest, zero, self.best[i]), [i]
                )
            )

        def rate(key: Expr, i: Expr) -> None:
            T.buffer_store(self.scores, weight(self.scores[key, i] - self.shift[i]), [key, i])
            T.buffer_store(self.own, self.own[i] + self.scores[key, i], [i])

        def rate_group(start: Expr) -> None:
            with T.serial(count) as key:
                lanewise(self.across, lambda i: rate(key, start + i))

        self.each_group(rate_group)
        if self.online:
            self.each_query(lambda i: T.buffer_store(self.total, self.total[i] + self.own[i], [i]))

    def rescale(self, i: Expr) -> None:
        """Rescale the sums from the previous maximum to the new one."""
        shift = T.Select(self.best[i] == self.lowest, self.number(0), self.best[i])
        T.buffer_store(self.factor, weight(self.shift[i] - shift), [i])
        T.buffer_store(self.shift, shift, [i])
        T.buffer_store(self.total, self.total[i] * self.factor[i], [i])

    def weigh(self, start: Expr | int, count: Expr) -> None:
        """Add the weighted values of a block of keys."""
        plan = self.plan
        tiles_of_rows = plan.queries // plan.rows
        if not self.online:
            self.divide()
        left = tirx.min(self.about.query.length - self.place.query, plan.queries)
        # The last tile may contain queries that do not exist; their results are not stored.
        with T.serial(tirx.min((left + plan.rows - 1) // plan.rows, tiles_of_rows)) as number:
            for at in range(0, len(self.values), plan.columns):
                self.value_tile(number, self.values[at : at + plan.columns], start, count)

    def value_tile(
        self, number: Expr, cuts: list[tuple[int, int]], start: Expr | int, count: Expr
    ) -> None:
        about, plan, place = self.about, self.plan, self.place
        origin = cuts[0][0]
        width = cuts[-1][0] + cuts[-1][1] - origin
        own = [(at - origin, lanes) for at, lanes in cuts]
        head = place.head // about.shared
        with block("values"):
            tile = registers((plan.rows, width), self.dtype)

            def add(key: Expr, row: Expr, i: Expr) -> None:
                value = about.value.at(
                    self.tensors["value"], place.batch, head, start + key, origin + i
                )
                weight = self.scores[key, number * plan.rows + row]
                T.buffer_store(tile, tile[row, i] + weight * value, [row, i])

            def end(row: Expr, i: Expr) -> None:
                at = number * plan.rows + row
                if self.online:
                    before = self.sums[at, origin + i] * self.factor[at]
                    T.buffer_store(self.sums, before + tile[row, i], [at, origin + i])
                else:
                    index = [place.batch, place.query + at, place.head, origin + i]
                    T.buffer_store(self.tensors["out"], tile[row, i] * self.factor[at], index)

            with T.unroll(plan.rows) as row:
                lanewise(own, lambda i: T.buffer_store(tile, self.number(0), [row, i]))
            with T.serial(count) as key, T.unroll(plan.rows) as row:
                lanewise(own, lambda i: add(key, row, i))
            with T.unroll(plan.rows) as row:
                if self.online:
                    lanewise(own, lambda i: end(row, i))
                else:
                    self.if_there(
                        number * plan.rows + row, lambda: lanewise(own, lambda i: end(row, i))
                    )

    def if_there(self, row: Expr, body: Callable[[], None]) -> None:
        """Emit the body for a query that exists: the last task may have fewer."""
        length = self.about.query.length
        if sizes.is_static(length) and length % self.plan.queries == 0:
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
        with T.serial(self.present()) as row:

            def write(i: Expr) -> None:
                index = [place.batch, place.query + row, place.head, i]
                T.buffer_store(self.tensors["out"], self.sums[row, i] * self.factor[row], index)

            self.if_there(row, lambda: lanewise(self.values, write))


def _is_above(end: Expr | int, whole: int) -> Expr:
    return end > whole if not isinstance(end, int) else tirx.const(end > whole, "bool")

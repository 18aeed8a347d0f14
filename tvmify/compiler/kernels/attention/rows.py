"""Attention of a few queries, as in a decoding step: one pass over the keys, one over the values. A
task is one head of keys and values with some of the queries that share it: those of a group of
heads (grouped-query attention) count as queries of one head. Scores are dot products along the
head, whose lanes are reduced at the end; all scores of a query stay in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from tvmify.compiler import sizes
from tvmify.compiler.costs import ATTENTION
from tvmify.compiler.kernels.attention.powers import exponent_scale, weight
from tvmify.compiler.kernels.common import tiles
from tvmify.compiler.kernels.common.emission import (
    block,
    fold,
    lanewise,
    registers,
    scratch,
    tasks,
    vectors,
)
from tvmify.compiler.microarchitecture import Microarchitecture, bits_of

if TYPE_CHECKING:
    from tvmify.compiler.kernels.attention.template import Attention

#: A single sum over the values of more keys than this violates the accuracy policy.
_LONGEST = 128


def emit(attention: Attention, tensors: dict[str, tirx.Buffer], machine: Microarchitecture) -> None:
    """Write the kernel into the open function."""
    all_rows = attention.shared * attention.query.length
    rows = ATTENTION.rows
    if sizes.is_static(all_rows):
        rows = max(n for n in range(1, ATTENTION.rows + 1) if all_rows % n == 0)
    heads = attention.heads // attention.shared
    pieces = sizes.ceil_div(all_rows, rows)
    likely = attention.likely
    key, value = likely.key.shape, likely.value.shape
    read = (math.prod(key) + math.prod(value)) * bits_of(attention.dtype) // 8
    count = attention.batch * heads * pieces
    with tasks(count, likely.work, read, machine) as task, block("task"):
        number = task // pieces
        _Rows(
            attention, tensors, machine, rows, number // heads, number % heads, task % pieces * rows
        ).emit()


class _Rows:
    """Emits the stages of one task."""

    def __init__(
        self,
        about: Attention,
        tensors: dict[str, tirx.Buffer],
        machine: Microarchitecture,
        rows: int,
        batch: Expr,
        head: Expr,
        first: Expr,
    ) -> None:
        self.about, self.tensors = about, tensors
        self.rows, self.batch, self.head, self.first = rows, batch, head, first
        self.dtype = about.dtype
        bits = bits_of(about.dtype)
        self.lanes = tiles.lanes_for(about.size, machine, bits)
        self.key_lanes = tiles.lanes_for(sizes.hint(about.key.length), machine, bits)
        self.value_lanes = tiles.lanes_for(about.value_size, machine, bits)
        self.queries = scratch((rows, about.size), self.dtype)
        self.is_open = not sizes.is_static(about.key.length)
        room = about.key.length
        if self.is_open:  # for whole tiles and vectors of keys
            step = math.lcm(self.key_lanes, ATTENTION.keys)
            room = sizes.ceil_div(room, step) * step
        self.scores = scratch((rows, room), self.dtype)

    def number(self, value: float) -> Expr:
        return tirx.const(value, self.dtype)

    def query(self, row: Expr) -> tuple[Expr, Expr]:
        """Head and place of a row."""
        at = self.first + row
        length = self.about.query.length
        if not sizes.is_static(length):  # the last piece may have fewer rows
            at = tirx.min(at, self.about.shared * length - 1)
        return self.head * self.about.shared + at // length, at % length

    def emit(self) -> None:
        about = self.about
        for row in range(self.rows):
            head, place = self.query(row)

            def scale(i: Expr, row: int = row, head: Expr = head, place: Expr = place) -> None:
                value = about.query.at(self.tensors["query"], self.batch, head, place, i)
                T.buffer_store(
                    self.queries,
                    value * self.number(about.scale * exponent_scale(self.dtype)),
                    [row, i],
                )

            lanewise(vectors(about.size, self.lanes), scale)
        if self.is_open:
            with T.serial(sizes.ceil_div(about.key.length, ATTENTION.keys)) as step:
                self.score(step * ATTENTION.keys, ATTENTION.keys)
            whole = rest = 0
        else:
            whole, rest = divmod(about.key.length, ATTENTION.keys)
        if whole:
            with T.serial(whole) as step:
                self.score(step * ATTENTION.keys, ATTENTION.keys)
        if rest:
            self.score(whole * ATTENTION.keys, rest)
        with T.serial(self.rows) as row:
            self.softmax(row)
        cuts = vectors(about.value_size, self.value_lanes)
        for at in range(0, len(cuts), ATTENTION.vectors):
            self.weigh(cuts[at : at + ATTENTION.vectors])

    def score(self, start: Expr | int, keys: int) -> None:
        """Dot products of some keys with all rows."""
        about = self.about
        cuts = vectors(about.size, self.lanes)
        whole = [cut for cut in cuts if cut[1] == self.lanes]
        with block("scores"):
            sums = registers((keys * self.rows, self.lanes), self.dtype)
            with T.unroll(keys * self.rows) as pair:
                lanewise(
                    [(0, self.lanes)], lambda i: T.buffer_store(sums, self.number(0), [pair, i])
                )

            def multiply(at: Expr | int, lanes: int) -> None:
                with T.unroll(keys) as key, T.unroll(self.rows) as row:
                    pair = key * self.rows + row

                    def add(i: Expr) -> None:
                        place = self.present(start + key)
                        value = about.key.at(
                            self.tensors["key"], self.batch, self.head, place, at + i
                        )
                        product = self.queries[row, at + i] * value
                        T.buffer_store(sums, sums[pair, i] + product, [pair, i])

                    lanewise([(0, lanes)], add)

            with T.serial(len(whole)) as step:
                multiply(step * self.lanes, self.lanes)
            for at, lanes in cuts[len(whole) :]:
                multiply(at, lanes)
            with T.unroll(keys * self.rows) as pair:
                fold(sums, pair, self.lanes, lambda a, b: a + b)
            with T.unroll(keys) as key, T.unroll(self.rows) as row:
                T.buffer_store(self.scores, sums[key * self.rows + row, 0], [row, start + key])

    def present(self, key: Expr) -> Expr:
        """Return the index of a key, at most that of the last one."""
        return tirx.min(key, self.about.key.length - 1) if self.is_open else key

    def softmax(self, row: Expr) -> None:
        """Mask the scores of a row and turn them into weights whose sum is 1."""
        about = self.about
        lowest = tirx.const(-math.inf, self.dtype)
        head, place = self.query(row)

        with block("softmax"):
            best = registers((1, self.key_lanes), self.dtype)
            total = registers((1, self.key_lanes), self.dtype)
            every = [(0, self.key_lanes)]
            lanewise(every, lambda i: T.buffer_store(best, lowest, [0, i]))
            lanewise(every, lambda i: T.buffer_store(total, self.number(0), [0, i]))

            def rate(key: Expr, i: Expr, all_present: bool) -> None:
                seen = key if all_present else self.present(key)
                score = about.masked(
                    self.scores[row, key], self.tensors, (self.batch, head, place, seen)
                )
                if not all_present:
                    score = T.Select(key < about.key.length, score, lowest)
                T.buffer_store(self.scores, score, [row, key])
                T.buffer_store(best, tirx.max(best[0, i], self.scores[row, key]), [0, i])

            self.along(rate)
            fold(best, 0, self.key_lanes, tirx.max)
            # A query that sees no key has only -∞, from which -∞ cannot be taken.
            shift = T.Select(best[0, 0] == lowest, self.number(0), best[0, 0])

            def rise(key: Expr, i: Expr, _: bool) -> None:
                value = weight(self.scores[row, key] - shift)
                T.buffer_store(self.scores, value, [row, key])
                T.buffer_store(total, total[0, i] + self.scores[row, key], [0, i])

            self.along(rise)
            fold(total, 0, self.key_lanes, lambda a, b: a + b)
            factor = T.Select(
                best[0, 0] == lowest, self.number(about.empty), self.number(1) / total[0, 0]
            )
            T.buffer_store(total, factor, [0, 0])

            def normal(key: Expr, _: Expr, __: bool) -> None:
                T.buffer_store(self.scores, self.scores[row, key] * total[0, 0], [row, key])

            self.along(normal)

    def along(self, body: Callable[[Expr, Expr, bool], None]) -> None:
        """Emit the body for all keys.

        It is given the key, its lane, and whether all lanes are keys that exist.
        """
        lanes, length = self.key_lanes, self.about.key.length
        if self.is_open:
            with T.serial(length // lanes) as step:
                lanewise([(0, lanes)], lambda i: body(step * lanes + i, i, True))
            if lanes > 1:
                start = length // lanes * lanes
                with T.If(start < length), T.Then():
                    lanewise([(0, lanes)], lambda i: body(start + i, i, False))
            return
        whole, rest = divmod(self.about.key.length, self.key_lanes)
        if whole:
            with T.serial(whole) as step:
                lanewise([(0, self.key_lanes)], lambda i: body(step * self.key_lanes + i, i, True))
        lanewise(vectors(rest, self.key_lanes), lambda i: body(whole * self.key_lanes + i, i, True))

    def weigh(self, cuts: list[tuple[int, int]]) -> None:
        """Sum the weighted values of some vectors of the head."""
        origin = cuts[0][0]
        width = cuts[-1][0] + cuts[-1][1] - origin
        own = [(at - origin, lanes) for at, lanes in cuts]
        length = self.about.key.length
        with block("values"):
            sums = total = registers((self.rows, width), self.dtype)
            if sizes.bounds(length)[1] <= _LONGEST:
                self.add_values(sums, own, origin, 0, length)
            else:
                total = scratch((self.rows, width), self.dtype)
                self.clear(total, own)
                with T.serial(sizes.ceil_div(length, _LONGEST)) as number:
                    start = number * _LONGEST
                    self.add_values(sums, own, origin, start, tirx.min(length - start, _LONGEST))
                    with T.unroll(self.rows) as row:

                        def add(i: Expr) -> None:
                            T.buffer_store(total, total[row, i] + sums[row, i], [row, i])

                        lanewise(own, add)
            for row in range(self.rows):
                self.store(total, row, own, origin)

    def clear(self, buffer: tirx.Buffer, own: list[tuple[int, int]]) -> None:
        """Set a buffer to zero."""
        with T.unroll(self.rows) as row:
            lanewise(own, lambda i: T.buffer_store(buffer, self.number(0), [row, i]))

    def add_values(
        self,
        sums: tirx.Buffer,
        own: list[tuple[int, int]],
        origin: int,
        start: Expr | int,
        count: Expr | int,
    ) -> None:
        """Sum the weighted values of `count` keys."""
        self.clear(sums, own)
        with T.serial(count) as number, T.unroll(self.rows) as row:

            def add(i: Expr) -> None:
                value = self.about.value.at(
                    self.tensors["value"], self.batch, self.head, start + number, origin + i
                )
                product = self.scores[row, start + number] * value
                T.buffer_store(sums, sums[row, i] + product, [row, i])

            lanewise(own, add)

    def store(self, total: tirx.Buffer, row: int, own: list[tuple[int, int]], origin: int) -> None:
        """Write some vectors of a row of the result, if the row exists."""
        head, place = self.query(row)

        def store(i: Expr) -> None:
            index = [self.batch, place, head, origin + i]
            T.buffer_store(self.tensors["out"], total[row, i], index)

        all_rows = self.about.shared * self.about.query.length
        if sizes.is_static(all_rows):
            lanewise(own, store)
        else:
            with T.If(self.first + row < all_rows), T.Then():
                lanewise(own, store)

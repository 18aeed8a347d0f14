"""How attention is cut: which kernel computes it, its tiles, and the alternatives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tvmify.compiler import sizes
from tvmify.compiler.costs import ATTENTION
from tvmify.compiler.kernels.common import tiles
from tvmify.compiler.kernels.common.emission import vectors
from tvmify.compiler.microarchitecture import Microarchitecture, bits_of

if TYPE_CHECKING:
    from tvmify.compiler.kernels.attention.template import Attention


@dataclass(frozen=True)
class Rows:
    """The kernel for few queries, which has no choices."""

    def __str__(self) -> str:
        return "rows"


@dataclass(frozen=True)
class Tiles:
    """The kernel for many queries.

    Attributes
    ----------
    width
        Queries whose scores are in registers at a time.
    groups
        How many such groups of queries a task has. They share each read of keys and values.
    keys
        Keys whose scores are in registers at a time.
    block
        Tiles of keys in a block, whose scores stay in L1.
    rows, columns
        Queries, and vectors of a head, of the tile of weighted values.
    """

    width: int
    groups: int
    keys: int
    block: int
    rows: int
    columns: int

    def __str__(self) -> str:
        scores = f"{self.groups}x{self.width} queries {self.block}x{self.keys} keys"
        return f"{scores} values {self.rows}x{self.columns}"

    @property
    def queries(self) -> int:
        """Queries of one task."""
        return self.groups * self.width


Plan = Rows | Tiles


def candidates(attention: Attention, machine: Microarchitecture) -> list[Plan]:
    """Return the plans worth trying, the one estimated fastest first."""
    about = attention.likely
    if about.query.length == 1:
        return [Rows()]
    own, *others = _tiled(about, machine, _ranked(attention, machine))
    if about.has_few_queries(machine):
        return [Rows(), own]
    if about.query.length <= machine.lanes(bits_of(about.dtype)):
        others = [Rows(), *others]
    return [own, *others]


def for_all(plan: Plan, about: Attention, machine: Microarchitecture) -> Plan:
    """Adapt a plan for the likely number of keys to any number of keys.

    A block becomes as long as fits in L1, so that most calls have a single one.
    """
    if isinstance(plan, Rows) or sizes.is_static(about.key.length):
        return plan
    most = max(plan.block, _most_keys(plan.queries, plan.keys, about, machine))
    return replace(plan, block=min(most, -(-sizes.bounds(about.key.length)[1] // plan.keys)))


def _ranked(attention: Attention, machine: Microarchitecture) -> list[tiles.Tile]:
    """Return tiles of scores, keys × queries, the best first.

    Where these numbers are symbolic, the best tile is best on average for numbers around the likely
    ones.
    """
    bits = bits_of(attention.dtype)
    keys, queries = (sizes.around(x.length) for x in (attention.key, attention.query))
    most = max(queries)
    if sizes.is_static(attention.key.length, attention.query.length):
        ranked = tiles.ranked(keys[0], most, machine, bits)
    else:

        def cost(tile: tiles.Tile) -> float:
            wasted = sum(
                -(-few // tile.rows) * -(-across // tile.columns) / (few * across)
                for few, across in zip(keys, queries, strict=True)
            )
            return wasted * tiles.cycles(tile, machine, bits, most)

        ranked = sorted(tiles.candidates(machine, bits, most), key=cost)
    return [tile for tile in ranked if tiles.leaves_register(tile, machine, bits, most)]


def _tiled(about: Attention, machine: Microarchitecture, ranked: list[tiles.Tile]) -> list[Tiles]:
    places = about.query.length
    first = ranked[0]
    own, *others = [
        _cut(about, tile, _groups(about, tile, machine), machine)
        for tile in (first, *tiles.alternatives(ranked, lambda t: t.columns, lambda t: t.rows))
    ]
    blocks = -(-about.key.length // (own.keys * own.block))
    longer, shorter = (_blocks(about, own, count) for count in (max(1, blocks // 2), blocks * 2))
    grouped = [
        _cut(about, first, groups, machine)
        for groups in (1, own.groups * 2)
        if (groups - 1) * own.width < places  # otherwise it has no queries
    ]
    return list(dict.fromkeys([own, *others[:1], *grouped, longer, shorter, *others[1:]]))


def _groups(about: Attention, tile: tiles.Tile, machine: Microarchitecture) -> int:
    """How many tiles of queries are multiplied by each block of keys."""
    bits, count = bits_of(about.dtype), about.key.length
    if machine.distance(count * (about.size + about.value_size) * bits // 8) <= 1:
        return 1
    in_all = -(-about.query.length // tile.columns)
    per_head = -(-in_all // max(1, ATTENTION.far_queries // tile.columns))
    return -(-in_all // per_head)  # the most per task


def _cut(about: Attention, tile: tiles.Tile, groups: int, machine: Microarchitecture) -> Tiles:
    """Return the plan of a tile of scores: keys × queries."""
    bits, size = bits_of(about.dtype), about.value_size
    queries = groups * tile.columns
    lanes = tiles.lanes_for(size, machine, bits)
    width = len(vectors(size, lanes)) * lanes

    def cost(t: tiles.Tile) -> tuple[float, float]:
        number = queries // t.rows * -(-width // t.columns)
        loaded = number * (t.rows + t.columns // lanes)
        return number * tiles.cycles(t, machine, bits, width), loaded

    values = min(
        (
            t
            for t in tiles.candidates(machine, bits, size)
            if queries % t.rows == 0 and tiles.leaves_register(t, machine, bits, size)
        ),
        key=cost,
    )
    most = _most_keys(queries, tile.rows, about, machine)
    plan = Tiles(tile.columns, groups, tile.rows, most, values.rows, values.columns // lanes)
    return _blocks(about, plan, -(-about.key.length // (tile.rows * most)))


def _most_keys(queries: int, keys: int, about: Attention, machine: Microarchitecture) -> int:
    """How many tiles of keys may make a block, so that its scores stay in L1."""
    numbers = machine.l1_bytes // ATTENTION.scores * 8 // bits_of(about.dtype)
    return max(1, numbers // queries // keys)


def _blocks(about: Attention, plan: Tiles, count: int) -> Tiles:
    """Return a plan with `count` blocks of keys of almost equal size."""
    steps = -(-about.key.length // plan.keys)
    return replace(plan, block=-(-steps // min(count, steps)))

"""Tiles that cover a symbolic size are all whole: the last one overlaps the one before it, so that
an element is computed twice rather than under a condition. What such a tile keeps for itself is
indexed by the place in it, and has one size. Only where there is not even one whole tile do its
blocks have conditions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm_ffi
from tvm import s_tir, sym, tirx
from tvm.ir import Expr, Range, TensorLoad
from tvm.tirx import Stmt

from tvmify.compiler import sizes
from tvmify.compiler.kernels.common.bounds import conjunction
from tvmify.compiler.kernels.common.rewriting import (
    rewrite_loops,
    substitute,
    uses,
    with_buffers,
    with_loop_body,
    with_new_variables,
)

#: Annotation of the innermost loop over tiles. Each iteration must write all that it reads of the
#: tensors that no other loop accesses, and write to others what any iteration would.
TILES = "tvmify.tiles"
_ZERO = tirx.const(0, "int64")


def whole_tiles(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Rewrite the loops over tiles of a scheduled function."""
    if not isinstance(function.body, s_tir.SBlockRealize):
        return function
    own, total = set(function.body.block.alloc_buffers), _accesses(function.body)
    replaced: dict[tirx.Var, tirx.Var] = {}

    def whole(loop: tirx.For, _: Any) -> Stmt:
        inside = _accesses(loop.body)
        tile = _Tile({x for x, count in inside.items() if x in own and count == total[x]})
        tile.measure(loop.body, [])
        overlapping = tile.rewritten(loop.body, [], overlap=True)
        fits = [condition for condition in tile.fits.values() if not sizes.proved(condition)]
        body = overlapping
        if fits:
            alone = with_new_variables(tile.rewritten(loop.body, [], overlap=False))
            body = tirx.IfThenElse(conjunction(fits), overlapping, alone)
        replaced.update(tile.tensors)
        return with_loop_body(loop, body)

    function = rewrite_loops(function, TILES, whole)
    return with_buffers(function, lambda old: replaced.get(old, old)) if replaced else function


def _accesses(stmt: Stmt) -> Counter[tirx.Var]:
    """Count the loads and stores of each tensor."""
    found: Counter[tirx.Var] = Counter()

    def note(node: Any) -> None:
        found[node.source if isinstance(node, TensorLoad) else node.buffer] += 1

    tvm_ffi.structural_walk(stmt, [((TensorLoad, tirx.BufferStore), note)])
    return found


@dataclass
class _Tile:
    """Rewrites the blocks of a tile.

    Attributes
    ----------
    own
        The tensors that only this loop accesses.
    tensors
        What takes their place.
    fits
        That sizes are not less than those of a tile, by their text.
    """

    own: set[tirx.Var]
    tensors: dict[tirx.Var, tirx.Var] = field(default_factory=dict)
    fits: dict[str, Expr] = field(default_factory=dict)
    #: How far the last tile may reach, by where a tile starts along an axis of a result.
    ends: dict[str, Expr] = field(default_factory=dict)

    def measure(self, stmt: Stmt, inside: list[tirx.For]) -> None:
        """Note how long results are. An operand may be longer, if a part of it is read."""
        if isinstance(stmt, tirx.SeqStmt):
            for part in stmt.seq:
                self.measure(part, inside)
        elif isinstance(stmt, tirx.For):
            self.measure(stmt.body, [*inside, stmt])
        elif stmt.block.body.buffer not in self.own:
            for axis, value in zip(stmt.block.iter_vars, stmt.iter_values, strict=True):
                start = _at(value, inside, [0] * len(inside))
                self.ends[str(start)] = axis.dom.extent

    def rewritten(self, stmt: Stmt, inside: list[tirx.For], *, overlap: bool) -> Stmt:
        """Return loops and blocks of a tile, with or without the conditions of an incomplete one.

        Parameters
        ----------
        inside
            The loops of the tile around them.
        """
        if isinstance(stmt, tirx.SeqStmt):
            parts = [self.rewritten(part, inside, overlap=overlap) for part in stmt.seq]
            return tirx.SeqStmt(parts)
        if isinstance(stmt, tirx.For):
            body = self.rewritten(stmt.body, [*inside, stmt], overlap=overlap)
            if overlap:
                return with_loop_body(stmt, body)
            # Rows that are read across are no longer whole.
            kind = tirx.ForKind.SERIAL if stmt.annotations else stmt.kind
            return tirx.For(stmt.loop_var, stmt.min, stmt.extent, kind, body)
        if not isinstance(stmt, s_tir.SBlockRealize):
            raise TypeError(f"a tile consists of loops around blocks: {type(stmt).__name__}")
        return self._block(stmt, inside, overlap)

    def _block(
        self, realize: s_tir.SBlockRealize, inside: list[tirx.For], overlap: bool
    ) -> s_tir.SBlockRealize:
        block, values = realize.block, list(realize.iter_values)
        places: dict[tirx.Var, tirx.IterVar] = {}
        offsets: list[Expr] = []
        for number, axis in enumerate(block.iter_vars):
            start = _at(values[number], inside, [0] * len(inside))
            if not sizes.variables_of(start):
                continue  # all places along this axis are in the tile
            offset, side = _inside(values[number] - start, inside)
            size, dtype = self.ends.get(str(start), axis.dom.extent), axis.var.ty
            if overlap and side > 1 and sizes.factor(size) % side:
                values[number] = tirx.min(start, size - side) + offset
                self.fits[f"{side} {size}"] = side <= size
            domain = Range.from_min_extent(_ZERO, tirx.const(side, "int64"))
            place = tirx.Var(f"{axis.var.name}_inside", dtype)
            places[axis.var] = tirx.IterVar(domain, place, tirx.IterVar.DataPar)
            offsets.append(offset)

        def within(source: tirx.Var, indices: Sequence[Expr]) -> list[Expr]:
            at = [places.get(i) if isinstance(i, tirx.Var) else None for i in indices]
            if source not in self.tensors:
                shape = [
                    size if place is None else place.dom.extent
                    for size, place in zip(source.ty.shape, at, strict=True)
                ]
                dtype, scope = str(source.ty.dtype), str(source.scope())
                self.tensors[source] = tirx.decl_buffer(shape, dtype, source.name, scope=scope)
            pairs = zip(indices, at, strict=True)
            return [index if place is None else place.var for index, place in pairs]

        def visit(node: Expr) -> Expr | None:
            if not isinstance(node, TensorLoad) or node.source not in self.own:
                return None
            indices = within(node.source, node.indices)
            return tirx.BufferLoad(self.tensors[node.source], indices)

        store: Any = block.body
        value = substitute(store.value, visit)
        if store.buffer in self.own:
            indices = within(store.buffer, store.indices)
            store = tirx.BufferStore(self.tensors[store.buffer], value, indices)
        else:
            store = tirx.BufferStore(store.buffer, value, store.indices)
        axes = [*block.iter_vars, *places.values()]
        predicate = tirx.const(1, "bool") if overlap else realize.predicate
        return s_tir.SBlockRealize(
            [*values, *offsets], predicate, s_tir.SBlock(axes, [], [], block.name_hint, store)
        )


def _inside(offset: Expr, inside: list[tirx.For]) -> tuple[Expr, int]:
    """Return the place in a tile, simplified, and how many there are."""
    offset = sym.Analyzer().simplify(offset)
    loops = [loop for loop in inside if uses(offset, [loop.loop_var])]
    last = _at(offset, loops, [int(loop.extent) - 1 for loop in loops])
    return offset, int(last) + 1


def _at(value: Expr, loops: list[tirx.For], places: list[int]) -> Any:
    """Return an expression where loops have reached some places."""
    analyzer = sym.Analyzer()
    for loop, place in zip(loops, places, strict=True):
        analyzer.bind(loop.loop_var, tirx.const(place, str(loop.loop_var.ty.dtype)))
    return analyzer.simplify(value)

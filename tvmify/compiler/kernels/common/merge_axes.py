"""Axes that run through memory together, as one axis of the product of their sizes. Schedules find
the axes of a fused loop by division, and TVM understands few quotients by symbols: tiles of a loop
over the `h * w` pixels of any image would divide for each lane. Axes of one element are dropped, so
that those beside them are neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import Expr, Range, TensorLoad, TensorRegion
from tvm.tirx import Stmt

from tvmify.compiler import sizes
from tvmify.compiler.kernels.common.bounds import has_symbols
from tvmify.compiler.kernels.common.rewriting import substitute
from tvmify.compiler.sizes import Size

_T = TypeVar("_T")
_ZERO = tirx.const(0, "int64")


@dataclass(frozen=True)
class _Axes:
    """Which axes of a block or a tensor there are, and which continue the one before them.

    Attributes
    ----------
    kept
        The numbers of those that have several elements.
    continued
        Places in `kept`.
    """

    kept: list[int]
    continued: set[int]

    @property
    def groups(self) -> Iterator[list[int]]:
        """Yield the axes that become one, in order."""
        group: list[int] = []
        for place, axis in enumerate(self.kept):
            if group and place not in self.continued:
                yield group
                group = []
            group.append(axis)
        if group:
            yield group


@dataclass(frozen=True)
class Merged:
    """A function with fewer axes.

    Attributes
    ----------
    function
        The function, with other arguments in the same memory.
    arguments
        By each of these: the original argument, and of which axes each axis consists.
    """

    function: tirx.PrimFunc
    arguments: dict[tirx.Var, tuple[tirx.Var, list[list[int]]]]

    def restored(self, scheduled: tirx.PrimFunc) -> tirx.PrimFunc:
        """Return a schedule of the function with the original arguments.

        The place along a merged axis becomes the index of its last axis, which it may exceed. So
        does `codegen/join_axes.py` write such indices.
        """
        first = Range.from_min_extent(0, 1)

        def spread(source: tirx.Var, parts: Sequence[_T], other: _T) -> list[_T]:
            old, groups = self.arguments[source]
            of_last = {group[-1]: part for group, part in zip(groups, parts, strict=True)}
            return [of_last.get(axis, other) for axis in range(len(old.ty.shape))]

        def load(node: TensorLoad) -> Expr:
            if node.source not in self.arguments:
                return node
            at = spread(node.source, node.indices, _ZERO)
            return tirx.BufferLoad(self.arguments[node.source][0], at)

        def store(node: tirx.BufferStore) -> tirx.BufferStore:
            if node.buffer not in self.arguments:
                return node
            at = spread(node.buffer, node.indices, _ZERO)
            return tirx.BufferStore(self.arguments[node.buffer][0], node.value, at)

        def region(node: TensorRegion) -> TensorRegion:
            if node.source not in self.arguments:
                return node
            parts = spread(node.source, node.region, first)
            return tirx.BufferRegion(self.arguments[node.source][0], parts)

        rewrites = [(TensorLoad, load), (tirx.BufferStore, store), (TensorRegion, region)]
        body = tvm_ffi.structural_map(scheduled.body, rewrites)
        own = [self.arguments[p][0] if p in self.arguments else p for p in scheduled.params]
        return tirx.PrimFunc(own, body, scheduled.ret_type, scheduled.attrs)


def merge_axes(function: tirx.PrimFunc) -> Merged | None:
    """Merge the axes of a function that is not scheduled; None if there are none to merge.

    Neighbouring axes are merged if the second is symbolic, and all blocks and tensors have both.
    """
    if not has_symbols(function) or not isinstance(function.body, s_tir.SBlockRealize):
        return None
    root = function.body.block
    nests = list(root.body.seq) if isinstance(root.body, tirx.SeqStmt) else [root.body]
    blocks = [_Block.of(nest) for nest in nests]
    if any(block is None for block in blocks) or root.match_buffers:
        return None
    return _Merging([block for block in blocks if block is not None], function).merged()


def variables_apart(value: Expr) -> set[tirx.Var]:
    """Return the variables whose value matters by itself, as in a condition, not as an index."""
    return _Accesses.of(value).apart


@dataclass
class _Accesses:
    """What an expression reads.

    Attributes
    ----------
    places
        The tensors that it reads, and where.
    apart
        The variables whose value matters by itself, and not as an index.
    """

    places: list[tuple[tirx.Var, Sequence[Expr]]] = field(default_factory=list)
    apart: set[tirx.Var] = field(default_factory=set)

    @classmethod
    def of(cls, value: Expr) -> _Accesses:
        found = cls()
        found.scan(value)
        return found

    def note(self, source: tirx.Var, indices: Sequence[Expr]) -> None:
        """Add an access."""
        self.places.append((source, indices))
        for index in indices:
            if not isinstance(index, tirx.Var):
                self.scan(index)

    def scan(self, value: Expr) -> None:
        """Add what an expression reads."""

        def visit(node: Expr) -> Expr | None:
            if isinstance(node, TensorLoad):
                self.note(node.source, node.indices)
                return node
            if isinstance(node, tirx.Var):
                self.apart.add(node)
            return None

        substitute(value, visit)


@dataclass
class _Block:
    """A block that stores one element, in a loop for each of its axes."""

    block: s_tir.SBlock
    accesses: _Accesses
    axes: _Axes

    @classmethod
    def of(cls, nest: Stmt) -> _Block | None:
        """Return the block in a nest of loops, or None for any other statement."""
        loops: list[tirx.For] = []
        while isinstance(nest, tirx.For):
            loops.append(nest)
            nest = nest.body
        if not isinstance(nest, s_tir.SBlockRealize):
            return None
        block, values = nest.block, nest.iter_values
        stores = [block.body] if block.init is None else [block.body, block.init]
        is_plain = all(isinstance(store, tirx.BufferStore) for store in stores)
        is_plain &= len(loops) == len(values) > 0 and isinstance(nest.predicate, tirx.IntImm)
        is_plain &= all(v.same_as(x.loop_var) for v, x in zip(values, loops, strict=False))
        is_plain &= not any(x.annotations or x.kind != tirx.ForKind.SERIAL for x in loops)
        if not is_plain or block.alloc_buffers or block.match_buffers:
            return None
        accesses = _Accesses()
        for store in stores:
            accesses.note(store.buffer, store.indices)
            accesses.scan(store.value)
        for access in (*block.reads, *block.writes):
            accesses.note(access.source, [_index(part) for part in access.region])
        return cls(block, accesses, _axes_of(list(block.iter_vars), accesses.apart))

    def extent(self, axis: int) -> Expr:
        """Return the number of places along an axis."""
        return self.block.iter_vars[axis].dom.extent


def _axes_of(axes: list[tirx.IterVar], apart: set[tirx.Var]) -> _Axes:
    """Return the axes of a block, of which those continue others that may."""
    spatial = [i for i, axis in enumerate(axes) if int(axis.iter_type) == tirx.IterVar.DataPar]
    units = [i for i in spatial if sizes.is_one(axes[i].dom.extent)]
    dropped = units[:-1] if units == spatial else units
    kept = [i for i in range(len(axes)) if i not in dropped]
    continued = {
        place
        for place, (first, second) in enumerate(pairwise(kept), start=1)
        if int(axes[first].iter_type) == int(axes[second].iter_type)
        and not sizes.is_static(axes[second].dom.extent)
        and not apart & {axes[first].var, axes[second].var}
    }
    return _Axes(kept, continued)


def _axes_of_tensor(shape: Sequence[Size]) -> _Axes:
    kept = [axis for axis, size in enumerate(shape) if not sizes.is_one(size)]
    kept = kept or list(range(len(shape)))[-1:]
    symbolic = [not sizes.is_static(shape[axis]) for axis in kept]
    return _Axes(kept, {place for place in range(1, len(kept)) if symbolic[place]})


def _index(part: Range) -> Expr:
    """Return the index of an element, or something that is no axis."""
    return part.min if sizes.is_one(part.extent) else part.min + part.extent


class _Merging:
    """Finds the axes of blocks and tensors that all agree on, and rewrites a function."""

    def __init__(self, blocks: list[_Block], function: tirx.PrimFunc) -> None:
        self.blocks, self.function = blocks, function
        self.of_tensors: dict[tirx.Var, _Axes] = {}
        for block in blocks:
            for source, _ in block.accesses.places:
                self.of_tensors[source] = _axes_of_tensor(sizes.sizes_of(source.ty.shape))
        before = -1
        while before != (before := self._continued()):
            for block in blocks:
                for source, indices in block.accesses.places:
                    self._agree(block, source, indices)

    def _continued(self) -> int:
        every = [block.axes for block in self.blocks] + list(self.of_tensors.values())
        return sum(len(axes.continued) for axes in every)

    def _agree(self, block: _Block, source: tirx.Var, indices: Sequence[Expr]) -> None:
        """Give up axes that an access does not pass through together."""
        axes, own, shape = block.axes, self.of_tensors[source], source.ty.shape
        numbers = {block.block.iter_vars[axis].var: n for n, axis in enumerate(axes.kept)}
        given = [indices[axis] for axis in own.kept]
        at = [numbers.get(index) if isinstance(index, tirx.Var) else None for index in given]
        for place, number in enumerate(at):
            is_pair = place > 0 and number is not None and at[place - 1] == number - 1
            is_whole = is_pair and all(
                sizes.same(shape[own.kept[place - i]], block.extent(axes.kept[number - i]))
                for i in (0, 1)
            )
            if not (is_whole and number in axes.continued):
                own.continued.discard(place)
            if number is None:
                continue
            if not (is_whole and place in own.continued):
                axes.continued.discard(number)
            is_followed = place + 1 < len(at) and at[place + 1] == number + 1
            if not (is_followed and place + 1 in own.continued):
                axes.continued.discard(number + 1)

    def merged(self) -> Merged | None:
        """Return the function with merged axes; None if there are none."""
        if all(len(list(axes.groups)) == len(x.ty.shape) for x, axes in self.of_tensors.items()):
            return None
        tensors = {source: self._tensor(source) for source in self.of_tensors}
        parts = [self._nest(block, tensors) for block in self.blocks]
        root = self.function.body.block
        block = s_tir.SBlock(
            [],
            [],
            [],
            root.name_hint,
            tirx.SeqStmt(parts) if len(parts) > 1 else parts[0],
            alloc_buffers=[tensors.get(buffer, buffer) for buffer in root.alloc_buffers],
            annotations=root.annotations,
        )
        given = [tensors.get(parameter, parameter) for parameter in self.function.params]
        body = s_tir.SBlockRealize([], True, block)
        function = tirx.PrimFunc(given, body, self.function.ret_type, self.function.attrs)
        arguments = {
            new: (old, list(self.of_tensors[old].groups))
            for new, old in zip(given, self.function.params, strict=True)
            if not new.same_as(old)
        }
        return Merged(function, arguments)

    def _tensor(self, source: tirx.Var) -> tirx.Var:
        shape, groups = sizes.sizes_of(source.ty.shape), list(self.of_tensors[source].groups)
        if len(groups) == len(shape):
            return source
        merged = (sizes.product(shape[axis] for axis in group) for group in groups)
        own = [*map(sizes.as_expression, merged)]
        scope = str(source.scope())
        return tirx.decl_buffer(own, str(source.ty.dtype), source.name, scope=scope)

    def _nest(self, block: _Block, tensors: dict[tirx.Var, tirx.Var]) -> Stmt:
        """Return a block and its loops with merged axes."""
        old = block.block
        axes: list[tirx.IterVar] = []
        # Only the last variable of merged axes is looked up.
        new: dict[tirx.Var, Expr] = {axis.var: _ZERO for axis in old.iter_vars}
        for group in block.axes.groups:
            extent = sizes.as_expression(sizes.product(block.extent(axis) for axis in group))
            last = old.iter_vars[group[-1]]
            variable = tirx.Var(last.var.name, "int64")
            axes.append(
                tirx.IterVar(Range.from_min_extent(_ZERO, extent), variable, last.iter_type)
            )
            new[last.var] = variable

        def at(source: tirx.Var, indices: Sequence[Expr]) -> list[Expr]:
            return [renamed(indices[group[-1]]) for group in self.of_tensors[source].groups]

        def visit(node: Expr) -> Expr | None:
            if isinstance(node, TensorLoad):
                return tirx.BufferLoad(tensors[node.source], at(node.source, node.indices))
            return new.get(node) if isinstance(node, tirx.Var) else None

        def renamed(node: Expr) -> Expr:
            return substitute(node, visit)

        def region(access: TensorRegion) -> TensorRegion:
            groups = self.of_tensors[access.source].groups
            parts = [access.region[group[-1]] for group in groups]
            ranges = [Range.from_min_extent(renamed(p.min), renamed(p.extent)) for p in parts]
            return tirx.BufferRegion(tensors[access.source], ranges)

        def stored(store: tirx.BufferStore) -> tirx.BufferStore:
            indices = at(store.buffer, store.indices)
            return tirx.BufferStore(tensors[store.buffer], renamed(store.value), indices)

        inside = s_tir.SBlock(
            axes,
            [*map(region, old.reads)],
            [*map(region, old.writes)],
            old.name_hint,
            stored(old.body),
            None if old.init is None else stored(old.init),
            annotations=old.annotations,
        )
        loops = [tirx.Var(f"i{number}", "int64") for number in range(len(axes))]
        nest: Stmt = s_tir.SBlockRealize(loops, True, inside)
        for loop, axis in zip(reversed(loops), reversed(axes), strict=True):
            nest = tirx.For(loop, _ZERO, axis.dom.extent, tirx.ForKind.SERIAL, nest)
        return nest

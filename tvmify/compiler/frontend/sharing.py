"""Finds how results of a program share memory, and what it writes to, before it is made functional.
In a functional program every value is a separate tensor. In eager PyTorch a result may be an
argument, a buffer, a view of either, or a view of another result, and a write to one changes the
other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from tvmify.artifact.geometry import Geometry, Strided
from tvmify.artifact.recorded_shapes import size_of, symbol_names
from tvmify.artifact.results import Argument, Repeated
from tvmify.compiler.aten import aliases, operators
from tvmify.compiler.frontend import memory
from tvmify.compiler.frontend.probes import geometry_in
from tvmify.compiler.frontend.strides import decisive_tensors, lineage
from tvmify.errors import UnsupportedOperator
from tvmify.torch_compat.symbols import is_symbolic

#: Operators that return their argument itself if there is nothing to do; no schema says so.
_IDENTITIES = frozenset(
    """contiguous to type_as resolve_conj resolve_neg positive sum_to_size flatten ravel atleast_1d
    atleast_2d atleast_3d real""".split()
)
#: Operators that return their argument itself if they drop nothing.
_DROPOUTS = frozenset("dropout feature_dropout alpha_dropout feature_alpha_dropout".split())


@dataclass(frozen=True)
class ModuleTensor:
    """A parameter, buffer or attribute of the module, by its dotted name."""

    name: str

    def __str__(self) -> str:
        return repr(self.name)


@dataclass(frozen=True)
class Literal:
    """A tensor of a closure, a global or a constant, which the program holds by value."""

    name: str

    def __str__(self) -> str:
        return repr(self.name)


#: What a program may write to.
Writable: TypeAlias = Argument | ModuleTensor


@dataclass(frozen=True)
class Place:
    """The place of a result that has no memory of its own.

    Attributes
    ----------
    base
        What the result is, or is a view of; a `Repeated` may be a later result, if that is
        computed.
    geometry
        None if the result is the base itself, the same object.
    """

    base: Writable | Repeated
    geometry: Geometry | None = None


@dataclass(frozen=True)
class Sharing:
    """How a program uses memory that others see.

    Attributes
    ----------
    places
        The place of each result; None for results with memory of their own.
    orders
        For results that others are views of: the order of the axes in memory.
    contiguous
        For which arguments, and tensors of the module, any of this holds only if they are
        contiguous.
    written
        Bases that operators write to, which the functional program must also write to.
    """

    places: list[Place | None]
    orders: dict[int, tuple[int, ...]]
    contiguous: frozenset[Writable]
    written: frozenset[Writable]


def sharing(program: ExportedProgram) -> Sharing:
    """Describe the results of a program that was recorded with contiguous arguments.

    Raises
    ------
    UnsupportedOperator
        It returns or writes to memory in a way that may differ from call to call.
    """
    return _Reader(program).read()


def written_bases(program: ExportedProgram) -> dict[Writable, fx.Node]:
    """Return what a functional program writes to, and the new values."""
    leaves: dict[str, int] = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            leaves[spec.arg.name] = len(leaves)
    (results,) = program.graph.output_node().args
    written: dict[Writable, fx.Node] = {}
    for spec, node in zip(program.graph_signature.output_specs, results, strict=True):  # type: ignore[arg-type]
        if spec.kind is OutputKind.USER_INPUT_MUTATION:
            written[Argument(leaves[str(spec.target)])] = node
        elif spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION):
            written[ModuleTensor(str(spec.target))] = node
        elif spec.kind is not OutputKind.USER_OUTPUT:
            raise UnsupportedOperator([spec.kind.name], "a result of an unknown kind")
    return written


class _Reader:
    def __init__(self, program: ExportedProgram) -> None:
        self.program = program
        self.bases: dict[fx.Node, Writable | Literal] = {}
        self.owners: dict[int, list[fx.Node]] = {}
        self.parameters: set[fx.Node] = set()
        self.contiguous: set[Writable] = set()
        self.written: set[Writable] = set()
        self.names = symbol_names(program)
        leaf = -1
        placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
        for spec in program.graph_signature.input_specs:
            leaf += spec.kind is InputKind.USER_INPUT
            node = placeholders.get(spec.arg.name)
            if node is None or not isinstance(node.meta.get("val"), torch.Tensor):
                continue
            if spec.kind is InputKind.USER_INPUT:
                self.bases[node] = Argument(leaf)
            elif spec.kind is InputKind.CONSTANT_TENSOR:
                self.bases[node] = Literal(str(spec.target))
            else:
                self.bases[node] = ModuleTensor(str(spec.target))
                if spec.kind is InputKind.PARAMETER:
                    self.parameters.add(node)
            self.owners.setdefault(memory.storage(node), []).append(node)

    def read(self) -> Sharing:
        arguments = [node for node, base in self.bases.items() if isinstance(base, Argument)]
        for node in decisive_tensors(self.program.graph, arguments):
            self._need_contiguous(node)
        for node in operators.calls(self.program.graph):
            if operators.is_mutating(node):
                self._check_write(node)
            if node.target is torch.ops.aten.as_strided.default:
                self._check_offset(node)
        (results,) = self.program.graph.output_node().args
        nodes = [self._itself(x) if isinstance(x, fx.Node) else None for x in results]  # type: ignore[union-attr]
        places: list[Place | None] = [None] * len(nodes)
        first: dict[fx.Node, int] = {}
        computed: dict[int, list[int]] = {}
        for i, node in enumerate(nodes):
            if node is None or not isinstance(node.meta.get("val"), torch.Tensor):
                continue
            if first.setdefault(node, i) != i:
                places[i] = Place(Repeated(first[node]))
                continue
            if node in self.bases or memory.storage(node) in self.owners:
                places[i] = self._place(node)
            else:
                computed.setdefault(memory.storage(node), []).append(i)
        orders: dict[int, tuple[int, ...]] = {}
        for group in computed.values():
            self._relate(group, nodes, places, orders)
        return Sharing(places, orders, frozenset(self.contiguous), frozenset(self.written))

    def _check_write(self, node: fx.Node) -> None:
        """Record what is written to; refuse constants and changes of shape."""
        for written in aliases.written_tensors(node):
            _check_windows(node, written)
            owners = self.owners.get(memory.storage(written), [])
            if len(owners) > 1:
                raise UnsupportedOperator(
                    [operators.name(node)],
                    f"it writes to memory that {' and '.join(self._names(owners))} share",
                )
            for owner in owners:
                if aliases.is_fresh_literal(owner):
                    continue
                base = self.bases[owner]
                if isinstance(base, Literal):
                    raise UnsupportedOperator(
                        [operators.name(node)],
                        "it writes into a tensor of a closure, a global or a constant",
                    )
                if (
                    torch.Tag.inplace_view in node.target.tags  # type: ignore[union-attr]
                    or aliases.is_resized(node, written)
                ):
                    raise UnsupportedOperator(
                        [operators.name(node)], "it changes the shape of an argument or buffer"
                    )
                self.written.add(base)

    def _check_offset(self, node: fx.Node) -> None:
        """Refuse an offset in memory that begins elsewhere in another call."""
        offset = operators.arguments(node)["storage_offset"]
        *_, root = lineage(node)
        if offset is not None and root in self.bases and not aliases.is_fresh_literal(root):
            raise UnsupportedOperator(
                [operators.name(node)],
                f"its offset counts from where the memory of {self.bases[root]} begins, which may "
                "differ from call to call",
            )

    def _names(self, owners: list[fx.Node]) -> list[str]:
        return [str(self.bases[owner]) for owner in owners]

    def _itself(self, node: fx.Node) -> fx.Node:
        """Follow operators that return their argument itself."""
        while node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            source = aliases.argument_returned(node, written=True)
            if operators.base_name(node) in _DROPOUTS and node.args[2] is False:
                source = node.args[0]
            elif source is None and operators.base_name(node) in _IDENTITIES:
                first = node.args[0]
                if isinstance(first, fx.Node) and memory.is_same(first, node):
                    source = first
                    if first.target is torch.ops.aten.alias.default:  # as `contiguous` is recorded
                        source = first.args[0]
            if source is None:
                break
            node = source  # type: ignore[assignment]
        return node

    def _need_contiguous(self, node: fx.Node) -> None:
        """Record that strides of an argument matter; those of a literal are part of the program."""
        base = self.bases.get(node)
        if base is not None and not isinstance(base, Literal):
            self.contiguous.add(base)

    def _place(self, node: fx.Node) -> Place:
        if node in self.bases:
            owner, geometry = node, None
        else:
            owners = self.owners[memory.storage(node)]
            if len(owners) > 1:
                raise UnsupportedOperator(
                    [operators.name(node)], "it returns a view of memory that two tensors share"
                )
            owner = owners[0]
            geometry = self._geometry(node, owner)
            lying = geometry_in(list(lineage(node)), self.names, geometry.sizes)
            if lying is None:
                self._need_contiguous(owner)
            geometry = lying or geometry
        base = self.bases[owner]
        if isinstance(base, Literal):
            raise UnsupportedOperator(
                [operators.name(node)], "it returns a tensor of a closure, a global or a constant"
            )
        if owner in self.parameters and node is not owner and _is_detached(node, owner):
            # a view of the parameter would have its gradients
            raise UnsupportedOperator(
                [operators.name(node)], f"it returns a detached view of the parameter {base}"
            )
        return Place(base, geometry)

    def _relate(
        self,
        group: list[int],
        nodes: list[Any],
        places: list[Place | None],
        orders: dict[int, tuple[int, ...]],
    ) -> None:
        """Describe results that share memory as views of one of them."""
        if len(group) > 1 and is_symbolic(*(nodes[i].meta["val"] for i in group)):
            self._relate_varying(group, nodes, places)
            return
        if len(group) == 1 or not memory.overlap([self._numbers(nodes[i]) for i in group]):
            return
        largest = max(group, key=lambda i: nodes[i].meta["val"].numel())
        base = nodes[largest]
        value = base.meta["val"]
        shown = memory.positions(self._numbers(base))
        inside = all(
            torch.isin(memory.positions(self._numbers(nodes[i])), shown).all() for i in group
        )
        order = tuple(range(value.dim()))
        if not value.is_contiguous():  # the stride of an axis of one element does not matter
            order = tuple(sorted(order, key=lambda axis: -value.stride(axis)))
        is_dense = value.permute(order).is_contiguous()
        if not (inside and is_dense):
            raise UnsupportedOperator(
                [operators.name(base)], "it returns views that partly overlap"
            )
        orders[largest] = order
        for i in group:
            if i != largest or not value.is_contiguous():
                places[i] = Place(Repeated(largest), self._geometry(nodes[i], base))

    def _relate_varying(
        self, group: list[int], nodes: list[Any], places: list[Place | None]
    ) -> None:
        """Describe results of symbolic sizes as views of the one that covers their memory."""
        values = [nodes[i].meta["val"] for i in group]
        whole = next((i for i in group if memory.fills_storage(nodes[i].meta["val"])), None)
        if whole is None and not any(memory.overlap(each) for each in self._with_numbers(values)):
            return
        if whole is None:
            raise UnsupportedOperator(
                [operators.name(nodes[group[0]])], "it returns views that partly overlap"
            )
        for i in group:
            if i != whole:
                places[i] = Place(Repeated(whole), self._geometry(nodes[i], nodes[whole]))

    def _with_numbers(self, tensors: list[torch.Tensor]) -> Iterator[list[Strided]]:
        """Yield the layouts of tensors with distinct numbers in place of symbols."""
        names = list(self.names.values())
        primes = [n for n in range(5, 1000) if all(n % d for d in range(2, n))][: len(names)]
        for order in (primes, primes[::-1]):
            numbers = dict(zip(names, order, strict=True))
            yield [self._lying(x, 0).at(numbers) for x in tensors]

    def _numbers(self, node: fx.Node) -> Strided:
        return self._lying(node.meta["val"], 0).at({})

    def _lying(self, x: torch.Tensor, origin: int | torch.SymInt) -> Geometry:
        return Geometry(
            tuple(size_of(size, self.names) for size in x.shape),
            tuple(size_of(stride, self.names) for stride in x.stride()),
            size_of(x.storage_offset() - origin, self.names),
        )

    def _geometry(self, node: fx.Node, base: fx.Node) -> Geometry:
        x, whole = node.meta["val"], base.meta["val"]
        if x.dtype != whole.dtype or x.is_conj() or x.is_neg():
            raise UnsupportedOperator(
                [operators.name(node)], f"it returns {whole.dtype} memory as {x.dtype}"
            )
        return self._lying(x, whole.storage_offset())


def _check_windows(write: fx.Node, written: fx.Node) -> None:
    """Refuse a write to windows of ``unfold`` that do not divide a tensor: made functional, it
    clears the elements between windows and behind them.
    """
    view: Any = written
    while isinstance(view, fx.Node) and view.op == "call_function":
        is_operator = isinstance(view.target, torch._ops.OpOverload)
        whole: Any = aliases.argument_returned(view, written=False) if is_operator else view.args[0]
        if view.target is torch.ops.aten.unfold.default:
            axis, size, step = view.args[1:]
            shape = whole.meta["val"].shape
            length = shape[axis] if shape else 1
            if size != step or not isinstance(length, int) or length % step:
                raise UnsupportedOperator(
                    [operators.name(write)],
                    "it writes to windows that overlap or do not cover the tensor",
                )
        view = whole


def _is_detached(view: fx.Node, owner: fx.Node) -> bool:
    """Whether ``detach`` is among the operators that make a view of a tensor."""
    node: Any = view
    while isinstance(node, fx.Node) and node is not owner:
        if node.target is torch.ops.aten.detach.default:
            return True
        is_operator = isinstance(node.target, torch._ops.OpOverload)
        node = aliases.argument_returned(node, written=False) if is_operator else node.args[0]
    return False

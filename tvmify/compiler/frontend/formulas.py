"""Elements that are functions of their index: ranges, positions, masks of any length. In static
programs such tensors are constants. With symbolic sizes they cannot be evaluated, but an element
can be written as an expression of its index, about which facts can be proved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from tvm import sym, tirx
from tvm.ir import Expr

from tvmify.compiler.aten.operators import arguments, base_name
from tvmify.compiler.frontend import places
from tvmify.compiler.frontend.constants import constant_of
from tvmify.compiler.sizes import analyzer_of, is_one, is_static, same

if TYPE_CHECKING:
    from tvmify.compiler.frontend.importer import Importer

_Place = Sequence[Any]


_POINTWISE: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "ge": tirx.GE,
    "gt": tirx.GT,
    "le": tirx.LE,
    "lt": tirx.LT,
    "eq": tirx.EQ,
    "ne": tirx.NE,
    "logical_and": tirx.And,
    "logical_or": tirx.Or,
    "logical_not": tirx.Not,
    "bitwise_and": tirx.And,
    "bitwise_or": tirx.Or,
    "bitwise_not": tirx.Not,
}
#: The ones that are bitwise on integers.
_OF_BOOLEANS = (
    "logical_and",
    "logical_or",
    "logical_not",
    "bitwise_and",
    "bitwise_or",
    "bitwise_not",
)
#: The arguments that they fill a tensor with.
_FILLS = {
    "full": "fill_value",
    "new_full": "fill_value",
    "full_like": "fill_value",
    "fill": "value",
    "scalar_tensor": "s",
}
_ONES = ("ones", "new_ones", "ones_like")
_ZEROS = ("zeros", "new_zeros", "zeros_like")
_SAME_PLACE = ("alias", "clone", "_to_copy", "lift_fresh_copy")
_RESHAPES = ("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze")


class Formulas:
    """The elements of a program's tensors, as far as they are known without running it."""

    def __init__(self, importer: Importer) -> None:
        self._importer = importer

    def element(self, node: Any, place: _Place) -> Expr | None:
        """Return an integer or boolean element of a node as an expression.

        None if it is not a function of its index.

        Parameters
        ----------
        place
            An index expression for each axis.
        """
        if not isinstance(node, fx.Node):
            return _constant(node)
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not _is_integral(value.dtype):
            return None
        constant = constant_of(self._importer.program, node)
        if constant is not None:
            return _known(constant, place)
        if node.op != "call_function" or not hasattr(node.target, "_schema"):
            return None
        name = base_name(node)
        if name == "arange" or name in _FILLS or name in _ONES or name in _ZEROS:
            return _made(node, name, place)
        if name in _POINTWISE:
            return self._pointwise(node, name, place)
        return self._moved(node, name, place)

    def _moved(self, node: fx.Node, name: str, place: _Place) -> Expr | None:
        """Return an element of a view or broadcast of another tensor."""
        if not node.args or not isinstance(node.args[0], fx.Node):
            return None
        source = node.args[0]
        inner = self._inner_place(node, name, source, place)
        element = None if inner is None else self.element(source, inner)
        if element is None or name != "_to_copy":
            return element
        is_bool, was_bool = node.meta["val"].dtype is torch.bool, str(element.ty.dtype) == "bool"
        if is_bool and not was_bool:
            return tirx.NE(element, tirx.const(0, "int64"))
        return element.astype("int64") if was_bool and not is_bool else element

    def _pointwise(self, node: fx.Node, name: str, place: _Place) -> Expr | None:
        if arguments(node).get("alpha", 1) != 1:
            return None
        if name in _OF_BOOLEANS and any(
            n.meta["val"].dtype is not torch.bool for n in node.all_input_nodes
        ):
            return None
        operands = []
        for operand in node.args:
            where = self._broadcast(operand, place) if isinstance(operand, fx.Node) else place
            element = self.element(operand, where)
            if element is None:
                return None
            operands.append(element)
        if name not in _OF_BOOLEANS:
            operands = [x.astype("int64") if str(x.ty.dtype) == "bool" else x for x in operands]
        return _POINTWISE[name](*operands)

    def _broadcast(self, node: fx.Node, place: _Place) -> list[Any]:
        shape = self._importer.shape(node)
        last = list(place)[len(place) - len(shape) :]
        return [_ZERO if is_one(size) else at for size, at in zip(shape, last, strict=True)]

    def _inner_place(
        self, node: fx.Node, name: str, source: fx.Node, place: _Place
    ) -> list[Any] | None:
        """Return the index, in its source, of an element of a view."""
        shape, out = self._importer.shape(source), self._importer.shape(node)
        if name in _SAME_PLACE:
            return list(place)
        if name == "expand":
            return self._broadcast(source, place)
        if name in _RESHAPES:
            return _reshaped(shape, out, place)
        if name == "permute":
            axes = [axis % len(shape) for axis in node.args[1]]  # type: ignore[union-attr]
            return [place[axes.index(axis)] for axis in range(len(shape))]
        given = arguments(node)
        axis = given.get("dim", 0) % len(shape) if shape else 0
        if name == "slice":
            start, step = given.get("start") or 0, given.get("step") or 1
            if not is_static(start) or start < 0:
                return None
            return [*place[:axis], place[axis] * step + start, *place[axis + 1 :]]
        if name == "select":
            index = given["index"]
            if not is_static(index) or index < 0:
                return None
            return [*place[:axis], tirx.const(index, "int64"), *place[axis:]]
        return None

    # ---------------------------------------------------------------------------------- proofs

    def places(
        self, nodes: Sequence[fx.Node], out: Sequence[Any], extents: Sequence[Any]
    ) -> Callable[[_Place], list[Expr]] | None:
        """Return a function that computes indices, if all are proved to be in range.

        Parameters
        ----------
        nodes
            Index tensors.
        out
            The shape that they are broadcast to.
        extents
            Extents of the axes that they index.
        """
        variables, analyzer = self._at(out)
        for node, extent in zip(nodes, extents, strict=True):
            element = self.element(node, self._broadcast(node, variables))
            if element is None or str(element.ty.dtype) == "bool":
                return None
            if not (analyzer.can_prove(element >= 0) and analyzer.can_prove(element < extent)):
                return None

        def compute(place: _Place) -> list[Expr]:
            elements = (self.element(node, self._broadcast(node, place)) for node in nodes)
            return [element for element in elements if element is not None]

        return compute

    def is_causal(self, mask: fx.Node, queries: Any, keys: Any) -> bool:
        """Whether a bool mask is causal: each query sees exactly the keys up to its position."""
        shape = self._importer.shape(mask)
        if len(shape) < 2 or not (same(shape[-2], queries) and same(shape[-1], keys)):
            return False
        variables, analyzer = self._at(shape)
        element = self.element(mask, variables)
        if element is None or str(element.ty.dtype) != "bool":
            return False
        query, key = variables[-2:]
        with analyzer.constraint_scope(key <= query):
            if not analyzer.can_prove(element):
                return False
        with analyzer.constraint_scope(key > query):
            return bool(analyzer.can_prove(tirx.Not(element)))

    def is_neutral(self, mask: fx.Node) -> bool:
        """Whether a bool mask is proved to hide nothing."""
        variables, analyzer = self._at(self._importer.shape(mask))
        element = self.element(mask, variables)
        is_bool = element is not None and str(element.ty.dtype) == "bool"
        return is_bool and bool(analyzer.can_prove(element))

    def _at(self, shape: Sequence[Any]) -> tuple[list[tirx.Var], sym.Analyzer]:
        """Return variables for an index into a tensor, and an analyzer that knows their ranges."""
        variables = [tirx.Var(f"i{axis}", "int64") for axis in range(len(shape))]
        return variables, analyzer_of(dict(zip(variables, shape, strict=True)))


_ZERO = tirx.const(0, "int64")


def _known(constant: torch.Tensor, place: _Place) -> Expr | None:
    """Return an element of a constant that is uniform, or piecewise linear along an axis."""
    if constant.numel() == 0:
        return None
    first = constant.flatten()[0]
    if bool((constant == first).all()):
        return _constant(first.item())
    if constant.dtype is torch.bool or constant.numel() != max(constant.shape):
        return None
    found = places.formula(constant.flatten().tolist())
    axis = constant.shape.index(constant.numel())
    return None if found is None else found(place[axis])


def _made(node: fx.Node, name: str, place: _Place) -> Expr | None:
    """Return an element of a tensor made from numbers."""
    if name == "arange":
        given = arguments(node)
        start, step = given.get("start", 0), given.get("step", 1)
        is_of_floats = isinstance(start, float) or isinstance(step, float)
        return None if is_of_floats else place[0] * step + start
    if name in _FILLS:
        return _constant(arguments(node)[_FILLS[name]])
    is_bool = node.meta["val"].dtype is torch.bool
    return _constant(name in _ONES if is_bool else int(name in _ONES))


def _constant(value: Any) -> Expr | None:
    if isinstance(value, Expr):
        return value
    if isinstance(value, bool):
        return tirx.const(value, "bool")
    return tirx.const(value, "int64") if isinstance(value, int) else None


def _is_integral(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _reshaped(shape: Sequence[Any], out: Sequence[Any], place: _Place) -> list[Any] | None:
    """Return the index before a reshape that adds or drops axes of one element."""
    kept = [(size, at) for size, at in zip(out, place, strict=True) if not is_one(size)]
    sizes = [size for size in shape if not is_one(size)]
    if len(kept) != len(sizes) or not all(
        same(a, b) for a, (b, _) in zip(sizes, kept, strict=True)
    ):
        return None
    found = iter(at for _, at in kept)
    return [_ZERO if is_one(size) else next(found) for size in shape]

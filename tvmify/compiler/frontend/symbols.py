"""Translates symbols of a recorded program to TVM variables, so that no converter sees a SymInt."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy import functions
from tvm import sym, tirx
from tvm.ir import Expr

from tvmify.artifact.expressions import Size as Recorded
from tvmify.artifact.expressions import Term
from tvmify.artifact.recorded_shapes import size_of, size_of_expression
from tvmify.compiler.sizes import Size, as_number, is_static
from tvmify.errors import UnsupportedOperator
from tvmify.torch_compat.symbols import SYMBOLS

#: In TVM, each operator of a `Term`, for sizes, which are not negative.
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": tirx.floordiv,
    "%": tirx.floormod,
    "max": tirx.max,
    "min": tirx.min,
}
#: The same for numbers that are not integers, in double precision as in Python.
_OF_FLOATS: dict[type, Callable[..., Any]] = {
    sympy.Add: lambda *terms: reduce(operator.add, terms),
    sympy.Mul: lambda *factors: reduce(operator.mul, factors),
    functions.Max: lambda *terms: reduce(tirx.max, terms),
    functions.Min: lambda *terms: reduce(tirx.min, terms),
    functions.IntTrueDiv: tirx.div,
    functions.FloatTrueDiv: tirx.div,
    functions.ToFloat: lambda number: number,
    functions.FloatPow: tirx.pow,
    functions.OpaqueUnaryFn_sqrt: tirx.sqrt,
    functions.OpaqueUnaryFn_exp: tirx.exp,
    functions.OpaqueUnaryFn_log: tirx.log,
}


class Symbols:
    """The symbols of a program, by torch's names.

    Parameters
    ----------
    names
        The canonical name of each of torch's symbols.
    equal
        Simpler expressions for sizes that are equal in all served calls: TVM does not know that a
        skip connection and its bypassed layers have results of one size.
    """

    def __init__(
        self, names: Mapping[str, str], equal: Mapping[sympy.Expr, sympy.Expr] | None = None
    ) -> None:
        self._names = names
        self._equal = dict(equal or {})
        # One object for one expression: TVM compares by identity.
        self._sizes: dict[Recorded, Size] = {}

    def size(self, value: int | torch.SymInt) -> Size:
        """Return a size of torch as a number, or as a TVM expression.

        Raises
        ------
        UnsupportedOperator
            Its expression has an operator without a translation.
        """
        if not isinstance(value, torch.SymInt):
            return int(value)
        return self._of(value.node.expr)

    def _of(self, expression: Any) -> Size:
        while (simpler := expression.xreplace(self._equal)) != expression:
            expression = simpler
        return self._translated(size_of_expression(expression, self._names))

    def stored(self, value: int | torch.SymInt) -> Recorded:
        """Return a size of torch as an artifact holds it; as `size`."""
        return size_of(value, self._names)

    def number(self, value: torch.SymFloat) -> Expr:
        """Return a number that is computed from sizes as a TVM expression in double precision.

        Raises
        ------
        UnsupportedOperator
            It is computed in a way that has no translation.
        """
        return self._float(value.node.expr)

    def _float(self, expression: sympy.Expr) -> Any:
        if expression.is_number:
            return tirx.const(float(expression), "float64")
        if expression.is_integer:  # exact, and rounded once
            return as_number(self._of(expression), "float64")
        function = _OF_FLOATS.get(type(expression))
        if function is None:
            raise UnsupportedOperator(
                ["aten.sym_size.int"], f"the number {expression} cannot be expressed"
            )
        return function(*map(self._float, expression.args))

    def _translated(self, size: Recorded) -> Any:
        if isinstance(size, int):
            return size
        if size not in self._sizes:
            self._sizes[size] = self._translate(size)
        return self._sizes[size]

    def _translate(self, size: str | Term) -> Any:
        if isinstance(size, str):
            return tirx.Var(size, "int64")
        found = reduce(_OPERATORS[size.operator], map(self._translated, size.operands))
        # As TVM writes it: it compares some shapes by their text.
        return found if is_static(found) else sym.Analyzer().simplify(found)


def settle_sizes(graph: fx.Graph, symbols: Symbols) -> None:
    """Replace sizes in calls by TVM expressions, and in results by torch's, in place.

    Raises
    ------
    UnsupportedOperator
        A condition depends on sizes, or a number in a way that has no translation.
    """
    numbers = {node for node in graph.nodes if _is_number(node)}
    # Those that only checks read, which are guards, need no translation.
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "output":
            node.args = fx.map_arg(
                node.args, lambda source: source.meta["val"] if source in numbers else source
            )
        elif node.op == "call_function" and not (node in numbers or _is_check(node)):
            for source in node.all_input_nodes:
                if source in numbers and source not in values:
                    values[source] = _translated(source, symbols, reader=node)
            node.args, node.kwargs = fx.map_arg(
                (node.args, node.kwargs), lambda source: values.get(source, source)
            )
    for node in reversed(graph.nodes):
        is_guard = _is_check(node) and not numbers.isdisjoint(node.all_input_nodes)
        if node.op == "call_function" and (node in numbers or is_guard) and not node.users:
            graph.erase_node(node)


def _is_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    is_computed = node.op == "call_function" and isinstance(value, (int, float))
    return is_computed or isinstance(value, SYMBOLS)


def _is_check(node: fx.Node) -> bool:
    return node.meta.get("val") is None


def _translated(number: fx.Node, symbols: Symbols, reader: fx.Node) -> Any:
    value = number.meta["val"]
    if isinstance(value, torch.SymInt):
        return symbols.size(value)
    if isinstance(value, torch.SymFloat):
        return symbols.number(value)
    if isinstance(value, torch.SymBool):
        raise UnsupportedOperator(
            [str(reader.target)], "an argument is a condition on symbolic sizes"
        )
    return value

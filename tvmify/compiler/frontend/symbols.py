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
            raise UnsupportedOperator(["aten.sym_size.int"], f"the number {expression}")
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
    # Those that only checks read, which are guards, need no translation.
    values: dict[fx.Node, Any] = {}
    numbers: set[fx.Node] = set()

    def translated(source: fx.Node) -> Any:
        if source in numbers and source not in values:
            value = source.meta["val"]
            if isinstance(value, torch.SymInt):
                values[source] = symbols.size(value)
            elif isinstance(value, torch.SymFloat):
                values[source] = symbols.number(value)
            elif isinstance(value, torch.SymBool):
                raise UnsupportedOperator([str(node.target)], "a condition that depends on sizes")
            else:
                values[source] = value
        return values.get(source, source)

    for node in list(graph.nodes):
        value = node.meta.get("val")
        is_computed = node.op == "call_function" and isinstance(value, (int, float))
        if is_computed or isinstance(value, SYMBOLS):
            numbers.add(node)
        elif node.op == "output":
            node.args = fx.node.map_arg(
                node.args, lambda source: source.meta["val"] if source in numbers else source
            )
        elif node.op == "call_function" and value is not None:
            node.args, node.kwargs = fx.node.map_arg((node.args, node.kwargs), translated)
    for node in reversed(list(graph.nodes)):
        is_check = (
            node.op == "call_function"
            and node.meta.get("val") is None
            and not numbers.isdisjoint(node.all_input_nodes)
        )
        if (node in numbers or is_check) and not node.users and node.op == "call_function":
            graph.erase_node(node)

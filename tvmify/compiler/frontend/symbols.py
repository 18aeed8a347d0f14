"""Symbols of a recorded program as TVM variables, so that no SymInt reaches a converter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy import functions
from tvm import sym, tirx

from tvmify.compiler.sizes import Size, is_static
from tvmify.errors import UnsupportedOperator
from tvmify.torch_compat.symbols import SYMBOLS

#: What TVM computes the same as torch for sizes, which are not negative.
_FUNCTIONS: dict[type, Callable[..., Any]] = {
    sympy.Add: lambda *terms: reduce(lambda a, b: a + b, terms),
    sympy.Mul: lambda *factors: reduce(lambda a, b: a * b, factors),
    functions.FloorDiv: tirx.floordiv,
    functions.CleanDiv: tirx.floordiv,
    functions.Mod: tirx.floormod,
    functions.PythonMod: tirx.floormod,
    functions.Max: lambda *terms: reduce(tirx.max, terms),
    functions.Min: lambda *terms: reduce(tirx.min, terms),
}


class Symbols:
    """The symbols of a program, by torch's names.

    Parameters
    ----------
    names
        Canonical name of each of torch's.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        # One object for one expression: TVM compares by identity.
        self._sizes: dict[sympy.Expr, Size] = {}

    def size(self, value: int | torch.SymInt) -> Size:
        """Return a size of torch as a number, or as a TVM expression.

        Raises
        ------
        UnsupportedOperator
            It is computed from others in a way that has no translation.
        """
        if not isinstance(value, torch.SymInt):
            return int(value)
        return self._translated(value.node.expr)

    def _translated(self, expression: sympy.Expr) -> Any:
        if expression not in self._sizes:
            # As TVM writes it: it compares some shapes by their text.
            found = self._translate(expression)
            self._sizes[expression] = found if is_static(found) else sym.Analyzer().simplify(found)
        return self._sizes[expression]

    def _translate(self, expression: sympy.Expr) -> Any:
        if expression.is_Integer:
            return int(expression)
        if isinstance(expression, sympy.Symbol):
            return tirx.Var(self._names[str(expression)], "int64")
        operands = [self._translated(operand) for operand in expression.args]
        if isinstance(expression, sympy.Pow) and expression.exp.is_Integer and expression.exp > 0:
            return reduce(lambda a, b: a * b, [operands[0]] * int(expression.exp))
        function = _FUNCTIONS.get(type(expression))
        if function is None:
            raise UnsupportedOperator(["aten.sym_size.int"], f"the size {expression}")
        return function(*operands)


def settle_sizes(graph: fx.Graph, symbols: Symbols) -> None:
    """Put TVM expressions, in place, where nodes take sizes that are computed in the graph.

    Raises
    ------
    UnsupportedOperator
        A number that is no integer depends on sizes.
    """
    values: dict[fx.Node, Any] = {}
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            values[node] = symbols.size(value)
        elif isinstance(value, SYMBOLS):
            values[node] = None
        if node.op != "call_function" or not any(n in values for n in node.all_input_nodes):
            continue
        if node in values or value is None:
            continue  # of numbers, or checks one: that is a guard
        if any(values.get(source, 0) is None for source in node.all_input_nodes):
            raise UnsupportedOperator([str(node.target)], "a number that depends on sizes")
        node.args, node.kwargs = fx.node.map_arg(
            (node.args, node.kwargs), lambda source: values.get(source, source)
        )
    for node in reversed(list(graph.nodes)):
        is_check = (
            node.op == "call_function"
            and node.meta.get("val") is None
            and any(source in values for source in node.all_input_nodes)
        )
        if (node in values or is_check) and not node.users and node.op == "call_function":
            graph.erase_node(node)

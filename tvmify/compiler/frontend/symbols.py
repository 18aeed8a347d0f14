"""Translates symbols of a recorded program to TVM variables, so that no converter sees a SymInt."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch
from torch import fx
from tvm import sym, tirx

from tvmify.artifact.expressions import Size as Recorded
from tvmify.artifact.expressions import Term
from tvmify.artifact.recorded_shapes import size_of
from tvmify.compiler.sizes import Size, is_static
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


class Symbols:
    """The symbols of a program, by torch's names.

    Parameters
    ----------
    names
        The canonical name of each of torch's symbols.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
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
        return self._translated(size_of(value, self._names))

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
    """Replace sizes that the graph computes by TVM expressions, in place.

    Raises
    ------
    UnsupportedOperator
        A number that is not an integer depends on sizes.
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
            continue  # computes numbers, or checks one, which is a guard
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

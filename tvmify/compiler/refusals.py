"""What is not compiled, said before anything is translated."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from tvmify.compiler import operators
from tvmify.errors import UnsupportedOperator


def refuse(nodes: Iterable[fx.Node]) -> None:
    """Refuse calls of operators, if there are any.

    Raises
    ------
    UnsupportedOperator
        Names all of them, so that a person needs not find them one by one.
    """
    names = [operators.name(node) for node in nodes]
    if names:
        raise UnsupportedOperator(names)

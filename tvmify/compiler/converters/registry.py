"""The table of converters and the decorator that fills it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tvm import relax

if TYPE_CHECKING:
    from torch import fx

    from tvmify.compiler.importer import Importer

    Converter = Callable[[Importer, fx.Node], Any]

#: From the short name of an ATen overload (``"add.Tensor"``) to the function that translates a
#: call of it. A function returns a Relax value, or a tuple of them for an operator with several
#: results; the importer compares shape and dtype with torch's and casts where only the dtype
#: differs.
CONVERTERS: dict[str, Converter] = {}


def converts(*operators: str) -> Callable[[Converter], Converter]:
    """Register a function as the converter of one or more ATen overloads."""

    def register(function: Converter) -> Converter:
        for operator in operators:
            if operator in CONVERTERS:
                raise ValueError(f"two converters for {operator}")
            CONVERTERS[operator] = function
        return function

    return register


def dtype_of(x: relax.Expr) -> str:
    """Return the name of the dtype of a Relax tensor."""
    return str(x.ty.dtype)

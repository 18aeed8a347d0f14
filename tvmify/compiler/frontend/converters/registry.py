"""The table of converters and the decorator that fills it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tvm import relax, tirx

from tvmify.compiler.backend import is_for_gpu
from tvmify.compiler.sizes import Size
from tvmify.errors import UnsupportedOperator

if TYPE_CHECKING:
    from torch import fx

    from tvmify.compiler.frontend.importer import Importer

    Converter = Callable[[Importer, fx.Node], Any]

#: The function that translates a call of an ATen overload, by its short name (``"add.Tensor"``). It
#: returns a Relax value, or a tuple for an operator with several results; the importer compares
#: shape and dtype with torch's, and casts if only the dtype differs.
CONVERTERS: dict[str, Converter] = {}
#: The same for calls that take or return complex numbers.
COMPLEX_CONVERTERS: dict[str, Converter] = {}


def converts(
    *operators: str, with_complex: bool = False, **variant: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the converter of one or more ATen overloads.

    Parameters
    ----------
    with_complex
        Whether it also converts calls that take or return complex numbers.
    variant
        Further arguments of the function: how these overloads differ from others that it converts.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        converter = partial(function, **variant)
        if with_complex:
            _register(COMPLEX_CONVERTERS, operators)(converter)
        _register(CONVERTERS, operators)(converter)
        return function

    return register


def converts_complex(*operators: str) -> Callable[[Converter], Converter]:
    """Register the converter of ATen overloads for complex numbers."""
    return _register(COMPLEX_CONVERTERS, operators)


def _register(
    table: dict[str, Converter], operators: Sequence[str]
) -> Callable[[Converter], Converter]:
    def register(function: Converter) -> Converter:
        for operator in operators:
            if operator in table:
                raise ValueError(f"two converters for {operator}")
            table[operator] = function
        return function

    return register


def dtype_of(x: relax.Expr) -> str:
    """Return the name of the dtype of a Relax tensor."""
    return str(x.ty.dtype)


def per_axis(value: Any, rank: int) -> list[int]:
    """Return a number for each axis: the one that was given, or those in a list."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * rank if len(values) == 1 else values


def refuse_on_gpu(name: str) -> None:
    """Leave an operator to PyTorch, if the target is a GPU.

    Raises
    ------
    UnsupportedOperator
        It is: the converter makes a sequential loop, or one for the registers of a CPU.
    """
    if is_for_gpu():
        raise UnsupportedOperator([name], "its loop is written for CPUs")


def call_loop(
    importer: Importer,
    function: tirx.PrimFunc,
    name: str,
    arguments: list[relax.Expr],
    shape: Size | Sequence[Size],
    *,
    in_place: bool = False,
) -> relax.Var:
    """Bind a call of one of `converters.loops`.

    The result has the dtype of the first argument; in place, it is the first argument.

    Parameters
    ----------
    shape
        The shape of the result; a number of elements, if it is flat.
    """
    refuse_on_gpu(name)
    variable = importer.block_builder.add_func(function, name)
    sizes = list(shape) if isinstance(shape, Sequence) else [shape]
    result = relax.TensorType(sizes, str(arguments[0].ty.dtype))
    if in_place:
        return importer.emit(relax.op.call_tir_inplace(variable, arguments, 0, result))
    return importer.emit(relax.call_tir(variable, arguments, result))

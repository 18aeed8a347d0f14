"""Match the arguments of a call with the parameters of a TorchScript forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tvmify.capture.values import code_of, protect
from tvmify.errors import UnsupportedInput


class _Mismatch(Exception):
    """A value is not of the type that an annotation, or its absence, asks for."""


def bind(
    parameters: Sequence[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    coerce: bool,
    as_given: bool = False,
) -> list[Any]:
    """Return one TorchScript value for each parameter.

    Parameters
    ----------
    parameters
        Of the forward's schema, without self.
    coerce
        Make an int a float where the parameter is a float.
    as_given
        Return the very objects that were given, but for dtypes.

    Raises
    ------
    UnsupportedInput
        An argument is missing, unknown, or of another type than the parameter.
    """
    # Names are for keywords only: a traced forward may have two parameters of one name.
    names = [parameter.name for parameter in parameters]
    unknown = kwargs.keys() - set(names[len(args) :])
    if len(args) > len(parameters) or unknown:
        surplus = ", ".join(sorted(unknown)) or f"{len(args)} positional arguments"
        raise UnsupportedInput(
            f"The scripted forward takes ({', '.join(names)}), not {surplus}",
            "Call it with these arguments.",
        )
    values = []
    for position, parameter in enumerate(parameters):
        if position < len(args) or parameter.name in kwargs:
            given = args[position] if position < len(args) else kwargs[parameter.name]
            try:
                value = _converted(given, parameter.type, coerce)
            except _Mismatch:
                raise UnsupportedInput(
                    f"Argument {parameter.name} is a {type(given).__name__} where "
                    f"TorchScript expects {parameter.type.annotation_str}",
                    "Annotate the parameter in forward.",
                ) from None
            if as_given:
                value = code_of(given)
        elif parameter.has_default_value():
            value = protect(parameter.default_value)
        else:
            raise UnsupportedInput(
                f"Argument {parameter.name} is missing", "Call the module with it."
            )
        values.append(value)
    return values


def _converted(value: Any, type_: Any, coerce: bool) -> Any:
    kind = type_.kind()
    if kind in _EXACT:
        value = code_of(value)
        if kind == "FloatType" and coerce and type(value) is int:
            return float(value)
        if not isinstance(value, _EXACT[kind]) or (isinstance(value, bool) and kind != "BoolType"):
            raise _Mismatch
        return value
    if kind == "AnyType":
        return protect(value)
    if kind == "OptionalType":
        return None if value is None else _converted(value, type_.getElementType(), coerce)
    if kind == "ListType" and isinstance(value, (list, tuple)):
        element = type_.getElementType()
        return protect([_converted(item, element, coerce) for item in value])
    if kind == "DictType" and isinstance(value, dict):
        key_type, value_type = type_.getKeyType(), type_.getValueType()
        return protect(
            {
                _converted(key, key_type, coerce): _converted(item, value_type, coerce)
                for key, item in value.items()
            }
        )
    if kind == "TupleType" and isinstance(value, tuple):
        elements = type_.elements()
        if len(elements) == len(value):
            items = zip(value, elements, strict=True)
            return tuple(_converted(item, element, coerce) for item, element in items)
    if kind == "UnionType":
        for alternative in type_.containedTypes():
            try:
                return _converted(value, alternative, coerce)
            except _Mismatch:
                continue
    raise _Mismatch


_EXACT: dict[str, Any] = {
    "TensorType": torch.Tensor,
    "IntType": int,
    "FloatType": float,
    "BoolType": bool,
    "ComplexType": complex,
    "StringType": str,
    "NumberType": (int, float, complex),
    "NoneType": type(None),
    "DeviceObjType": torch.device,
}

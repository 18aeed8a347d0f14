"""Match the arguments of a call with the parameters of a TorchScript forward."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tvmify.capture.values import code_of, protect
from tvmify.errors import UnsupportedInput
from tvmify.signature import NumberArgument


class _Mismatch(Exception):
    """A value does not have the type that an annotation, or the lack of one, demands."""


def bind(
    parameters: Sequence[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    defaults: Mapping[str, Any] | None = None,
    *,
    as_given: bool = False,
) -> list[Any]:
    """Return one TorchScript value for each parameter.

    Parameters
    ----------
    parameters
        The parameters of forward's schema, without self.
    defaults
        Python's default values; None if there is only the schema, where TorchScript has turned an
        int into a float if the parameter is a float.
    as_given
        Return the given objects themselves, except dtypes.

    Raises
    ------
    UnsupportedInput
        An argument or default is missing, unknown, or of another type than the parameter.
    """
    coerce = defaults is None
    # Names matter for keywords only: a traced forward may have two parameters of one name.
    names = [parameter.name for parameter in parameters]
    unknown = kwargs.keys() - set(names[len(args) :])
    if len(args) > len(parameters) or unknown:
        surplus = ", ".join(sorted(unknown)) or f"{len(args)} positional arguments"
        raise UnsupportedInput(
            f"the scripted forward takes ({', '.join(names)}), not {surplus}",
            "Call it with the arguments that forward takes.",
        )
    values = []
    for position, parameter in enumerate(parameters):
        if position < len(args):
            given = args[position]
        elif parameter.name in kwargs:
            given = kwargs[parameter.name]
        elif defaults is not None and parameter.name in defaults:
            given = defaults[parameter.name]  # which TorchScript may have turned into a float
        elif parameter.has_default_value():
            given = parameter.default_value
        else:
            raise UnsupportedInput(
                f"argument {parameter.name!r} is missing", "Pass it in the call."
            )
        try:
            value = _converted(given, parameter.type, coerce)
        except _Mismatch:
            kind = given.kind if isinstance(given, NumberArgument) else type(given)
            raise UnsupportedInput(
                f"argument {parameter.name!r} is of type {kind.__name__} where "
                f"TorchScript expects {parameter.type.annotation_str}",
                "Annotate the parameter in forward.",
            ) from None
        values.append(code_of(given) if as_given else value)
    return values


def defaults_of(callable_: Any) -> dict[str, Any]:
    """Return Python's default values for a function, or for a module's forward."""
    forward = callable_.forward if isinstance(callable_, torch.nn.Module) else callable_
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):  # of something built in
        return {}
    return {p.name: p.default for p in parameters if p.default is not p.empty}


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

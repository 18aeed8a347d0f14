"""TorchScript expressions that build the result of a saved module from its tensors."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils import _pytree as pytree

from tvmify.artifact import Artifact
from tvmify.artifact.expressions import Size, Term
from tvmify.artifact.geometry import MOST_AXES, Geometry, base_stride
from tvmify.artifact.results import ComputedSize, View
from tvmify.errors import SaveError


class ResultText(NamedTuple):
    """A TorchScript expression that builds a result from its tensors."""

    annotation: str
    compiled: str  # from the list _tensors
    interpreted: str  # from the tuple _eager


_SCALARS = {bool: "bool", int: "int", float: "float", str: "str", type(None): "NoneType"}


@dataclass(frozen=True)
class TensorPlace:
    """A placeholder for a tensor in a result.

    Attributes
    ----------
    source
        The number of the program's tensor, or what `argument_source` returns.
    geometry
        Geometry of the view of that tensor.
    """

    source: int
    geometry: Geometry | None = None

    @staticmethod
    def viewed(view: View, whole: TensorPlace) -> TensorPlace:
        """Return the placeholder for a view."""
        return TensorPlace(whole.source, view.geometry)

    def write(self, whole: str, symbols: Mapping[str, str]) -> str:
        """Return an expression for the tensor, given expressions for its base and for symbols."""
        if self.geometry is None:
            return whole
        known = {base_stride(axis): f"{whole}.stride({axis})" for axis in range(MOST_AXES)}
        symbols = {**symbols, **known}
        numbers = (self.geometry.sizes, self.geometry.strides, (self.geometry.offset,))
        sizes, strides, (offset,) = ([_code(n, symbols) for n in part] for part in numbers)
        offset = f"{whole}.storage_offset() + {offset}"
        return f"torch.as_strided({whole}, [{', '.join(sizes)}], [{', '.join(strides)}], {offset})"


def argument_source(tensor: int) -> int:
    """Return the source that stands for a tensor of the arguments in `SavedModule`."""
    return ~tensor


@dataclass(frozen=True)
class SizePlace:
    """A placeholder for a number in a result that is computed from sizes."""

    size: Size

    @staticmethod
    def of(result: ComputedSize) -> SizePlace:
        """Return the placeholder for a number."""
        return SizePlace(result.value)


@dataclass(frozen=True)
class Home:
    """A size of a tensor that is just a symbol."""

    leaf: int
    axis: int
    place: int  # index of the tensor among those that `run` returns

    def __str__(self) -> str:
        return f"_tensors[{self.place}].size({self.axis})"


def homes_of(artifact: Artifact, first: int) -> dict[str, Home]:
    """Return a home for each symbol in a result, numbered from this place on."""
    wanted = set().union(*(output.symbols() for output in artifact.outputs))
    homes: dict[str, Home] = {}
    for leaf, sizes in artifact.shapes.leaves.items() if artifact.shapes else ():
        for axis, size in enumerate(sizes):
            if isinstance(size, str) and size in wanted - homes.keys():
                homes[size] = Home(leaf, axis, first + len(homes))
    return homes


def _code(size: Size, symbols: Mapping[str, str]) -> str:
    """Write a size in TorchScript, whose min and max take two arguments."""
    if not isinstance(size, Term):
        return symbols[size] if isinstance(size, str) else f"({size})" if size < 0 else str(size)
    first, *others = (_code(operand, symbols) for operand in size.operands)
    for other in others:
        calls = size.operator in ("min", "max")
        first = (
            f"{size.operator}({first}, {other})" if calls else f"({first} {size.operator} {other})"
        )
    return first


class Writer:
    """Writes a result as an expression of its tensors, and numbers them.

    Parameters
    ----------
    tensors
        The name of their list.
    symbols
        The sizes that vary, as expressions; None if the list contains views.
    """

    def __init__(self, tensors: str, symbols: Mapping[str, str] | None = None) -> None:
        self._tensors = tensors
        self._symbols = symbols
        self._count = 0

    def write(self, value: Any) -> str:
        """Return a result, or a part of one, as an expression."""
        if isinstance(value, TensorPlace):
            self._count += 1
            text = f"{self._tensors}[{self._count - 1}]"
            return text if self._symbols is None else value.write(text, self._symbols)
        if isinstance(value, SizePlace):
            if self._symbols is None:
                raise SaveError(
                    "the result has a size, which torch.jit.trace records as a constant: change "
                    "the module so that torch.jit.script can compile it"
                )
            return _code(value.size, self._symbols)
        if type(value) in _SCALARS:
            is_number = type(value) is not float or math.isfinite(value)
            return repr(value) if is_number else f"float({str(value)!r})"
        if isinstance(value, dict):
            items = [f"{key!r}: {self.write(item)}" for key, item in value.items()]
            return f"{{{', '.join(items)}}}"
        items = ", ".join(map(self.write, value))
        if isinstance(value, list):
            return f"[{items}]"
        if _class_name(value):
            return f"{_class_name(value)}({items})"
        return f"({items},)" if items else "()"


def annotation(value: Any) -> str:
    """Return the type annotation of a result, from its value."""
    if isinstance(value, TensorPlace):
        return "Tensor"
    if isinstance(value, SizePlace):
        return "int"
    if type(value) in _SCALARS:
        return _SCALARS[type(value)]
    if isinstance(value, dict):
        key = _homogeneous("", list(value), "") if value else "str"
        return _homogeneous(f"Dict[{key}, ", list(value.values()))
    if isinstance(value, list):
        return _homogeneous("List[", value)
    return _class_name(value) or f"Tuple[{', '.join(map(annotation, value))}]"


def _class_name(value: tuple[Any, ...]) -> str:
    """Return the name of a named tuple; empty for a plain one."""
    return type(value).__name__ if hasattr(value, "_fields") else ""


def plain(value: Any, names: dict[str, Any]) -> Any:
    """Convert containers of other classes to those of TorchScript; remember named tuples."""
    from tvmify.capture.scripted.interpretable import resolved_class

    if isinstance(value, (TensorPlace, SizePlace)) or type(value) in _SCALARS:
        return value
    if type(value) is list:
        return [plain(item, names) for item in value]
    if isinstance(value, Mapping):
        items = {key: plain(item, names) for key, item in value.items()}
        is_dict = type(value) in (dict, OrderedDict)
        is_dict |= all(isinstance(item, TensorPlace) for item in items.values())
        return items if is_dict else tuple(items.values())
    children, _ = pytree.SUPPORTED_NODES[pytree._get_node_type(value)].flatten_fn(value)
    items = [plain(item, names) for item in children]
    if hasattr(value, "_fields"):
        names.setdefault(type(value).__name__, resolved_class(type(value)))
        return type(value)(*items)
    return tuple(items)


def _homogeneous(opening: str, items: list[Any], closing: str = "]") -> str:
    types = set(map(annotation, items)) or {"Tensor"}
    if len(types) > 1:
        raise SaveError(
            f"the result has a dict or list of several types ({', '.join(sorted(types))}), which "
            "TorchScript cannot express: return a tuple"
        )
    return f"{opening}{types.pop()}{closing}"

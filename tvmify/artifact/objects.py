"""Results with objects that pytree does not know, such as transformers' caches.

During capture, a `Described` replaces each of them: it holds the object's tensors, and describes
its other attributes as text. Every call then creates new objects from it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tvmify.artifact.structure import find_class


class CannotDescribe(Exception):
    """An object has state outside its attributes, or an attribute of an unsupported type."""


@dataclass
class Described:
    """A placeholder for an object in a result; a pytree node.

    Attributes
    ----------
    text
        Its class and attributes, as JSON.
    tensors
        The tensors that it holds, and sizes that differ from call to call; of a ``torch.Size``, the
        sizes.
    """

    text: str
    tensors: list[Any]

    def restore(self) -> Any:
        """Return a new object.

        Raises
        ------
        AttributeError
            The module that defines its class is not imported.
        """
        return _restored(_parsed(self.text), self.tensors)


pytree.register_pytree_node(
    Described,
    lambda described: (described.tensors, described.text),
    lambda tensors, text: Described(text, list(tensors)),
    serialized_type_name="tvmify.Described",
)


def describe_objects(result: Any, held: Callable[[], set[int]]) -> Any:
    """Replace the plain objects in a result that pytree treats as leaves, and each ``torch.Size``.

    An object that cannot be described stays. So does one that may outlive the call, since a copy
    would lose its identity: one that is held, or that has no tensor to show that the call made it.

    Parameters
    ----------
    held
        Returns the ids of the objects that existed before the call; called only if needed.
    """
    # Filled when the first object is found, and then with the parts of each object.
    taken: set[int] = set()

    def replace(leaf: Any) -> Any:
        if isinstance(leaf, torch.Size):
            return describe_size(leaf)
        if isinstance(leaf, torch.Tensor) or not _is_plain_object(leaf):
            return leaf
        if not taken:
            taken.update(held())
        description = _Description(taken)
        try:
            text = json.dumps(description.of(leaf))
        except CannotDescribe:
            return leaf
        return Described(text, description.tensors) if description.tensors else leaf

    return pytree.tree_map(replace, result, is_leaf=is_size)


def is_size(value: Any) -> bool:
    """Whether a value is a ``torch.Size``, which pytree turns into a plain tuple."""
    return isinstance(value, torch.Size)


def describe_size(size: Iterable[int]) -> Described:
    """Return the placeholder for a ``torch.Size`` in a result; each size is a leaf of its own."""
    sizes = list(size)
    return Described(json.dumps({"Size": [{"tensor": i} for i in range(len(sizes))]}), sizes)


def restore_objects(result: Any) -> Any:
    """Recreate the objects that `describe_objects` replaced."""
    return pytree.tree_map_only(
        Described, Described.restore, result, is_leaf=lambda node: isinstance(node, Described)
    )


def holds_objects(structure: pytree.TreeSpec) -> bool:
    """Whether a result structure contains objects for `restore_objects`."""
    return structure.type is Described or any(map(holds_objects, structure.children()))


def reachable(roots: Iterable[Any]) -> set[int]:
    """Return the ids of everything reachable through containers and attributes."""
    found: set[int] = set()
    todo = list(roots)
    while todo:
        value = todo.pop()
        if id(value) in found or isinstance(value, (torch.Tensor, type)):
            continue
        found.add(id(value))
        if isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            todo += value
        else:
            todo += getattr(value, "__dict__", {}).values()
    return found


class _Description:
    """Describes an object; refuses one that occurs twice, or that is in `taken`."""

    def __init__(self, taken: set[int]) -> None:
        self.tensors: list[torch.Tensor | torch.SymInt] = []
        self._taken = taken

    def of(self, value: Any) -> Any:
        """Return a value in JSON types; `_restored` is the inverse."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, (torch.Tensor, torch.SymInt)):
            self.tensors.append(value)
            return {"tensor": len(self.tensors) - 1}
        if isinstance(value, type):
            return {"class": _class_name(value)}
        if type(value) in (torch.dtype, torch.device):
            return {type(value).__name__: str(value).removeprefix("torch.")}
        if type(value) in (tuple, torch.Size):
            return {type(value).__name__: [self.of(item) for item in value]}
        if id(value) in self._taken:
            raise CannotDescribe(f"a {type(value).__qualname__} is also referenced elsewhere")
        self._taken.add(id(value))
        if type(value) is list:
            return {"list": [self.of(item) for item in value]}
        if type(value) is dict:
            return {"dict": [[self.of(key), self.of(item)] for key, item in value.items()]}
        if not _is_plain_object(value):
            raise CannotDescribe(f"a {type(value).__qualname__} has state besides its attributes")
        attributes = {name: self.of(item) for name, item in vars(value).items()}
        return {"object": _class_name(type(value)), "attributes": attributes}


def _class_name(cls: type) -> str:
    name = f"{cls.__module__}.{cls.__qualname__}"
    if find_class(name) is not cls:
        raise CannotDescribe(f"{name} has no importable name")
    return name


def _is_plain_object(value: Any) -> bool:
    """Whether the attributes of an object of the class are its whole state."""
    cls = type(value)
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (nn.Module, type))
        and all(getattr(cls, name, None) is getattr(object, name, None) for name in _COPYING)
        and not any(vars(base).get("__slots__") for base in cls.__mro__)
    )


#: Names that a class defines if its objects have state outside their attributes.
_COPYING = ("__new__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__del__")
_parsed = functools.lru_cache(json.loads)


def _restored(description: Any, tensors: list[Any]) -> Any:
    if not isinstance(description, dict):
        return description
    if "object" in description:
        value = object.__new__(find_class(description["object"]))
        attributes = description["attributes"].items()
        vars(value).update((name, _restored(item, tensors)) for name, item in attributes)
        return value
    ((kind, content),) = description.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {_restored(key, tensors): _restored(item, tensors) for key, item in content}
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](_restored(item, tensors) for item in content)
    return _NAMED[kind](content)


_CONTAINERS: dict[str, Callable[[Iterable[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "Size": torch.Size,
}
_NAMED: dict[str, Callable[[str], Any]] = {
    "class": find_class,
    "device": torch.device,
    "dtype": lambda name: getattr(torch, name),
}

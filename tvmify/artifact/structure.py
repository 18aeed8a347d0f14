"""Convert the structure of a result to text and back, also in another process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tvmify.errors import NotCompiled
from tvmify.system.third_party_messages import words

# PyTorch flattens the result types of its operators (``torch.return_types.max``) but registers no
# serialized name for them.
for _class in torch.return_types.all_return_types:
    _name = f"torch.return_types.{_class.__name__}"
    _known = pytree.SUPPORTED_SERIALIZED_TYPES[_class]
    pytree.SUPPORTED_SERIALIZED_TYPES[_class] = _known._replace(serialized_type_name=_name)
    pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[_name] = _class


def structure_text(structure: pytree.TreeSpec) -> str:
    """Write the structure of a pytree as text.

    Raises
    ------
    NotCompiled
        It contains a class that another process could not find by name.
    """
    for cls in _named_tuples(structure):
        name = f"{cls.__module__}.{cls.__qualname__}"
        if find_class(name) is not cls:
            raise NotCompiled(
                f"the result holds a {name}, which has no importable name",
                "Define the class at the top level of a module.",
            )
        _register(cls, name)
    try:
        text = pytree.treespec_dumps(structure)
        # JSON has no tuples, so a dict may come back with other keys, or not at all.
        if _is_same(structure_of(text), structure):
            return text
        reason = "some of its keys have a type that JSON does not preserve"
    except (NotImplementedError, TypeError) as error:
        reason = str(error)
    raise NotCompiled(
        f"the structure of the result cannot be stored: {reason}",
        "Return a tuple, list, dict or named tuple with plain keys, or register the class with "
        "torch.utils._pytree under a serialized_type_name.",
    )


def structure_of(text: str) -> pytree.TreeSpec:
    """Read back what `structure_text` wrote.

    Only classes of modules that are already imported are found, so that text from elsewhere cannot
    trigger an import.

    Raises
    ------
    NotCompiled
        A class is not imported, or is not registered with ``torch.utils._pytree``.
    """
    while True:
        try:
            return pytree.treespec_loads(text)
        except NotImplementedError as error:
            # PyTorch's error names the first unknown class.
            cls = next((c for word in words(error) if _is_named_tuple(c := find_class(word))), None)
            if cls is None:
                raise NotCompiled(
                    f"the structure of the result cannot be restored: {error}",
                    "Import the module that defines the class before the first call.",
                ) from error
            _register(cls, f"{cls.__module__}.{cls.__qualname__}")


def _is_same(found: pytree.TreeSpec, structure: pytree.TreeSpec) -> bool:
    """Whether two structures are equal, down to the types of keys: an ``IntEnum`` equals an int."""
    return found == structure and _key_types(found) == _key_types(structure)


def _key_types(structure: pytree.TreeSpec) -> list[Any]:
    return [_types(structure.context), *map(_key_types, structure.children())]


def _types(keys: Any) -> Any:
    return list(map(_types, keys)) if isinstance(keys, (list, tuple)) else type(keys)


def _named_tuples(structure: pytree.TreeSpec) -> Iterator[type[Any]]:
    if _is_named_tuple(structure.context):
        yield structure.context
    for child in structure.children():
        yield from _named_tuples(child)


def _register(cls: type[Any], name: str) -> None:
    # PyTorch flattens every named tuple, but serializes only those with a registered name.
    if cls not in pytree.SUPPORTED_SERIALIZED_TYPES:
        pytree._register_namedtuple(cls, serialized_type_name=name)


def find_class(name: str) -> Any:
    """Return the object of a dotted name in the imported modules, or None."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        found: object = sys.modules.get(".".join(parts[:end]))
        if found is not None:
            for part in parts[end:]:
                found = getattr(found, part, None)
            return found
    return None


def _is_named_tuple(cls: object) -> bool:
    return isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields")

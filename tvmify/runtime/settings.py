"""Lists, dicts and sets of plain values that an attribute holds, such as the names of adapters.

What is in them is part of the state of a module, as what is assigned to its attributes.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Hashable
from typing import Any, NamedTuple

PLAIN = (bool, int, float, complex, str, bytes, type(None))
_DICTS = (dict, OrderedDict, defaultdict)
_SETS = (set, frozenset)
#: Each item is compared at each call; larger collections are data rather than settings.
_MOST_ITEMS = 64


class Settings(NamedTuple):
    """What is in a collection.

    Attributes
    ----------
    value
        Equal for collections of the same type that hold equal values in the same order.
    collections
        The collection itself and those in it.
    """

    value: Hashable
    collections: list[Any]


def settings_in(collection: Any) -> Settings | None:
    """Return what is in a collection; None if it is large, or holds other things than settings."""
    collections: list[Any] = []
    try:
        return Settings(_value_of(collection, collections), collections)
    except _NoSettingsError:
        return None


class _NoSettingsError(Exception):
    """Something else is in a collection."""


def _value_of(value: Any, collections: list[Any]) -> Hashable:
    # Types tell 1, 1.0 and True apart.
    kind = type(value)
    if kind in PLAIN:
        return kind, value
    if kind not in (list, tuple, *_DICTS, *_SETS):
        raise _NoSettingsError
    if kind not in (tuple, frozenset):
        collections.append(value)
    # A list that contains itself has too many.
    if len(value) > _MOST_ITEMS or len(collections) > _MOST_ITEMS:
        raise _NoSettingsError
    items = value.items() if isinstance(value, dict) else value
    described = (_value_of(item, collections) for item in tuple(items))
    return kind, frozenset(described) if kind in _SETS else tuple(described)

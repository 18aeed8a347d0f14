"""Lists, dicts and sets that an attribute holds, such as the names of adapters.

What is in them is part of the state of a module, as what is assigned to its attributes: plain
values, and by identity all others, such as tensors, functions and modules.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from tvmify.runtime.identity import PLAIN, ByIdentity, ByWeakIdentity, contents

_DICTS = (dict, OrderedDict, defaultdict)
_SETS = (set, frozenset)
_COLLECTIONS = (list, tuple, *_DICTS, *_SETS)
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
    """Return what is in a collection; None if it is none, is large, or has keys of other kinds."""
    if type(collection) not in _COLLECTIONS:
        return None
    collections: list[Any] = []
    try:
        return Settings(_value_of(collection, collections), collections)
    except _NoSettingsError:
        return None


class _NoSettingsError(Exception):
    """A collection is large, or looking for an item would run code of the item's class."""


def _value_of(value: Any, collections: list[Any]) -> Hashable:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return ByWeakIdentity(value)
    if kind not in _COLLECTIONS:
        return contents(value) if kind in PLAIN else ByIdentity(value)
    if kind not in (tuple, frozenset):
        collections.append(value)
    # A list that contains itself exceeds the limit, too.
    if len(value) > _MOST_ITEMS or len(collections) > _MOST_ITEMS:
        raise _NoSettingsError
    if kind in _SETS:
        return kind, frozenset(map(_key, tuple(value)))
    if kind in _DICTS:
        items = tuple(value.items())
        return kind, tuple((_key(key), _value_of(item, collections)) for key, item in items)
    return kind, tuple(_value_of(item, collections) for item in tuple(value))


def _key(key: Any) -> Hashable:
    kind = type(key)
    if kind is tuple:
        return kind, tuple(map(_key, key))
    if kind not in PLAIN:
        raise _NoSettingsError
    return contents(key)

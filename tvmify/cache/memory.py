"""The memory cache: an LRU cache of the entries of one module."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from cachetools import LRUCache

from tvmify.system.forks import short_lock

Value = TypeVar("Value")

#: Aliases per value. They are small: keys only.
_ALIASES = 16
#: Keys that are found without the lock. Calls of a few shapes in turn are as fast as those of one.
_RECENT = 64


class MemoryCache(Generic[Value]):
    """A thread-safe `cachetools.LRUCache` with counters.

    Simultaneous hits of one key in several threads may count as one.

    Parameters
    ----------
    size
        The most values to keep.
    """

    def __init__(self, size: int) -> None:
        self._values: LRUCache[Hashable, Value] = LRUCache(size)
        self._aliases: LRUCache[Hashable, Hashable] = LRUCache(_ALIASES * size)
        # A lookup reorders the cache, so readers need the lock too.
        self._lock = short_lock()
        # What was found last: finding it again does not reorder, and needs no lock.
        self._recent: dict[Hashable, Value] = {}
        self.hits = 0
        self.misses = 0

    def load(self, key: Hashable) -> Value | None:
        """Return the value of a key, or None; count a hit or a miss."""
        recent = self._recent.get(key)
        if recent is not None:
            self.hits += 1
            return recent
        with self._lock:
            value = self._get(key)
            if value is None:
                self.misses += 1
                return None
            self.hits += 1
            if len(self._recent) >= _RECENT:
                self._reorder()
            self._recent[key] = value
            return value

    def peek(self, key: Hashable) -> Value | None:
        """Return the value of a key, or None, without counting."""
        with self._lock:
            return self._get(key)

    def _get(self, key: Hashable) -> Value | None:
        value = self._values.get(key)
        if value is None and self._aliases:
            value = self._values.get(self._aliases.get(key))
        return value

    def _reorder(self) -> None:
        """Tell the LRU what was found without it. The lock is held."""
        for key in self._recent:
            self._get(key)
        self._recent = {}

    def alias(self, key: Hashable, other: Hashable) -> None:
        """Let a key lead to the value of another one, as long as that is kept."""
        with self._lock:
            self._aliases[key] = other
            self._recent.pop(key, None)

    def store(self, key: Hashable, value: Value) -> list[Hashable]:
        """Store a value; a full cache evicts the least recently used one.

        Returns
        -------
        list
            The keys of evicted values.
        """
        with self._lock:
            self._reorder()  # and none may be found that is evicted
            evicted = []
            while key not in self._values and len(self._values) >= self._values.maxsize:
                evicted.append(self._values.popitem()[0])
            self._values[key] = value
            return evicted

    def discard(self, key: Hashable) -> None:
        """Remove the value of a key, if there is one."""
        with self._lock:
            self._values.pop(key, None)
            self._recent = {}

    def clear(self) -> None:
        """Remove every value; keep the counts."""
        with self._lock:
            self._values.clear()
            self._aliases.clear()
            self._recent = {}

    def values(self) -> list[Value]:
        """Return the values, least recently used first."""
        with self._lock:
            self._reorder()
            return list(self._values.values())

    def __len__(self) -> int:
        with self._lock:
            return len(self._values)

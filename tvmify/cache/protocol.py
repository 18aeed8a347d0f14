"""What all caches have in common; `tests/cache/behaviour/test_contract.py` says what it means."""

from __future__ import annotations

from typing import Protocol, TypeVar

K_contra = TypeVar("K_contra", contravariant=True)
V = TypeVar("V")


class Cache(Protocol[K_contra, V]):
    """Keeps values by their keys, for as long as it likes. Any thread may use it."""

    def load(self, key: K_contra, /) -> V | None:
        """Return the value of a key, or None if there is none that can be used."""
        ...

    def store(self, key: K_contra, value: V, /) -> object:
        """Keep a value, as far as there is room for it."""
        ...

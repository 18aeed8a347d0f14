"""Values that are compared by identity, since their contents cannot be compared or need not be."""

from __future__ import annotations

import weakref

import torch


class ByIdentity:
    """An object compared by identity; holding it keeps its address from being reused."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class ByWeakIdentity:
    """A tensor compared by identity, and not kept alive."""

    __slots__ = ("_hash", "_reference")

    def __init__(self, value: torch.Tensor) -> None:
        self._hash = id(value)
        self._reference = weakref.ref(value)

    def __eq__(self, other: object) -> bool:
        value = self._reference()
        return self is other or (
            isinstance(other, ByWeakIdentity) and value is not None and other._reference() is value
        )

    def __hash__(self) -> int:
        return self._hash

"""What the values of a module's attributes are compared by: their contents, or their identity."""

from __future__ import annotations

import struct
import weakref
from collections.abc import Hashable

import torch

#: Types of values that are compared by their contents.
PLAIN = (bool, int, float, complex, str, bytes, type(None))


def contents(value: Hashable) -> Hashable:
    """Return what is equal for the same plain values only.

    Types tell 1, 1.0 and True apart, and bits 0.0 and -0.0; a NaN equals itself.
    """
    if isinstance(value, float):
        return type(value), struct.pack("d", value)
    if isinstance(value, complex):
        return type(value), struct.pack("2d", value.real, value.imag)
    return type(value), value


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

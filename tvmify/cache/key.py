"""The key of a compiled program: named texts, each hashed by itself."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Key:
    """Everything that decides the compiled code, under names that a person can read.

    Two programs share an entry exactly when all their texts are equal. The digest finds the entry;
    the texts are stored beside it and compared again, so that not even a collision is believed.

    Attributes
    ----------
    entries
        Name to text: ``program``, ``inputs``, ``target`` …
    """

    entries: Mapping[str, str]

    @functools.cached_property
    def hashes(self) -> dict[str, str]:
        """SHA-256 of each entry, by name."""
        return {
            name: hashlib.sha256(self.entries[name].encode()).hexdigest()
            for name in sorted(self.entries)
        }

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 over names and hashes: 64 hexadecimal digits, the name of the disk entry."""
        lines = "".join(f"{name} {digest}\n" for name, digest in self.hashes.items())
        return hashlib.sha256(lines.encode()).hexdigest()

    def differences(self, other: Key) -> list[str]:
        """Return the names of the entries in which two keys differ."""
        names = sorted(set(self.entries) | set(other.entries))
        return [name for name in names if self.entries.get(name) != other.entries.get(name)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and dict(self.entries) == dict(other.entries)

    def __hash__(self) -> int:
        return hash(self.digest)

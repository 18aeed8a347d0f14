"""The key of a compiled program: named texts, each with its own hash."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Key:
    """Everything that determines the compiled code, under readable names.

    Two programs share an entry if and only if all their texts are equal. The digest locates the
    entry; its stored texts are then compared as well, so a hash collision is harmless.

    Attributes
    ----------
    entries
        Texts by name: ``program``, ``inputs``, ``target`` …
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
        """SHA-256 over names and hashes: 64 hexadecimal digits that name the disk entry."""
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

"""The key of a compiled program: named texts, each with its own hash."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

#: The entry ``torch`` of keys of programs that do not depend on its version.
ANY_TORCH = "any"


@dataclass(frozen=True, eq=False)
class Key:
    """Everything that determines the compiled code, under readable names.

    Two programs share an entry if and only if all their texts are equal. The digest locates the
    entry; its stored texts are then compared as well, so a hash collision is harmless.

    Attributes
    ----------
    entries
        Texts by name: ``program``, ``inputs``, ``target`` …
    digest
        SHA-256 over the names and the SHA-256 of each text: 64 hexadecimal digits that name the
        disk entry.
    """

    entries: Mapping[str, str]
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        # Not a cached property, which has a lock that would stay locked in a forked child.
        lines = "".join(f"{name} {digest}\n" for name, digest in self.hashes().items())
        object.__setattr__(self, "digest", hashlib.sha256(lines.encode()).hexdigest())

    def hashes(self) -> dict[str, str]:
        """Return the SHA-256 of each text, by name."""
        return {
            name: hashlib.sha256(self.entries[name].encode()).hexdigest()
            for name in sorted(self.entries)
        }

    def differences(self, other: Key) -> list[str]:
        """Return the names of the entries in which two keys differ.

        The version of PyTorch is not among them if one of the keys is for any version.
        """
        names = sorted(set(self.entries) | set(other.entries))
        pairs = {name: (self.entries.get(name), other.entries.get(name)) for name in names}
        if ANY_TORCH in pairs.get("torch", ()):
            del pairs["torch"]
        return [name for name, (ours, its) in pairs.items() if ours != its]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and dict(self.entries) == dict(other.entries)

    def __hash__(self) -> int:
        return hash(self.digest)

"""The manifest of a disk entry: its key, its files, and how to call the program."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvmify.artifact import FORMAT_VERSION, Artifact
from tvmify.cache.key import Key
from tvmify.errors import CacheError

#: The end of the text: the SHA-256 of everything before it.
_SEAL = ',\n "sha256": "{}"\n}}\n'
_SEAL_LENGTH = len(_SEAL.format("0" * 64))
#: Bytes of the largest library that is accepted.
LARGEST_LIBRARY = 1 << 31


@dataclass(frozen=True)
class Manifest:
    """The contents of ``manifest.json``.

    Attributes
    ----------
    key
        The texts that the entry was built for.
    artifact
        The description of the compiled program, as `Artifact.description` gives it.
    library_sha256
        SHA-256 of ``module.so`` (see `library_file`) in hexadecimal, checked before loading.
    library_size
        Its size in bytes.
    """

    key: Key
    artifact: dict[str, Any]
    library_sha256: str
    library_size: int

    @classmethod
    def of(cls, key: Key, artifact: Artifact) -> Manifest:
        """Describe an artifact to be stored under a key."""
        content = library_file(key, artifact)
        digest = hashlib.sha256(content).hexdigest()
        return cls(key, artifact.description(), digest, len(content))

    def to_json(self) -> str:
        """Return the text of ``manifest.json``."""
        document = {
            "format": FORMAT_VERSION,
            "key": dict(self.key.entries),
            "artifact": self.artifact,
            "library": {"sha256": self.library_sha256, "size": self.library_size},
        }
        text = json.dumps(document, indent=1, sort_keys=True).removesuffix("\n}")
        return text + _SEAL.format(hashlib.sha256(text.encode()).hexdigest())

    @classmethod
    def from_json(cls, content: bytes) -> Manifest:
        """Read the contents of ``manifest.json``.

        Raises
        ------
        CacheError
            It is not a manifest, was modified, or has another format version.
        """
        sealed, seal = content[:-_SEAL_LENGTH], content[-_SEAL_LENGTH:]
        if seal != _SEAL.format(hashlib.sha256(sealed).hexdigest()).encode():
            raise CacheError(
                "its manifest is damaged, or was not written by this version of tvmify"
            )
        try:
            document = json.loads(content)
            if document["format"] != FORMAT_VERSION:
                raise CacheError(f"format {document['format']!r:.50} is not {FORMAT_VERSION}")
            library = document["library"]
            key = Key({_text(name): _text(text) for name, text in document["key"].items()})
            size = library["size"]
            if type(size) is not int or not 0 <= size <= LARGEST_LIBRARY:
                raise CacheError(f"a library of {size!r:.50} bytes is too large")
            return cls(key, dict(document["artifact"]), _text(library["sha256"]), size)
        except _MALFORMED as error:
            raise CacheError(f"its manifest is invalid: {error!r:.200}") from error

    def check(self, content: bytes) -> None:
        """Compare the contents of ``module.so`` with their checksum.

        Raises
        ------
        CacheError
            They differ.
        """
        if hashlib.sha256(content).hexdigest() != self.library_sha256:
            raise CacheError(
                f"the library has {len(content)} bytes that do not match its SHA-256 "
                f"(stored: {self.library_size} bytes)"
            )

    def artifact_of(self, content: bytes) -> Artifact:
        """Join the description and the contents of ``module.so``.

        Raises
        ------
        CacheError
            They are not what was stored, or do not belong together.
        """
        self.check(content)
        try:
            library, bond = content[:-_BOND_LENGTH], content[-_BOND_LENGTH:]
            if bond != _bond(self.key, self.artifact):
                raise CacheError("its manifest is not the one that its library was built with")
            return Artifact.from_description(library, self.artifact)
        except _MALFORMED as error:
            raise CacheError(f"its program description is invalid: {error!r:.200}") from error


def library_file(key: Key, artifact: Artifact) -> bytes:
    """Return the contents of ``module.so``: the library, and a digest that ties it to its key.

    Compiled code is called as its description says, without further checks. So a manifest alone,
    even with valid checksums, must not be able to change the description.
    """
    return artifact.library + _bond(key, artifact.description())


def _bond(key: Key, description: Mapping[str, Any]) -> bytes:
    fields = {name: value for name, value in description.items() if name not in _CHANGES_LATER}
    return hashlib.sha256(f"{key.digest} {json.dumps(fields, sort_keys=True)}".encode()).digest()


_BOND_LENGTH = 32
#: Fields that calls do not depend on, and that may change after the build.
_CHANGES_LATER = ("verdicts", "report")
#: What parsing raises for a document that is malformed, too large or too deeply nested.
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError, MemoryError)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.50} is not a string")
    value.encode()  # a lone surrogate cannot be hashed
    return value

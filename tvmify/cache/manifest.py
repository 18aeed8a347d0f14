"""The manifest of a disk entry: which key it serves, what its files are, how to call them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from tvmify.artifact import FORMAT_VERSION, Artifact
from tvmify.cache.key import Key
from tvmify.errors import CacheError


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
        SHA-256 of ``module.so`` in hexadecimal, checked before it is loaded.
    library_size
        Its size in bytes.
    """

    key: Key
    artifact: dict[str, Any]
    library_sha256: str
    library_size: int

    @classmethod
    def of(cls, key: Key, artifact: Artifact) -> Manifest:
        """Describe an artifact that is to be stored under a key."""
        digest = hashlib.sha256(artifact.library).hexdigest()
        return cls(key, artifact.description(), digest, len(artifact.library))

    def to_json(self) -> str:
        """Return the text of ``manifest.json``."""
        document = {
            "format": FORMAT_VERSION,
            "key": dict(self.key.entries),
            "artifact": self.artifact,
            "library": {"sha256": self.library_sha256, "size": self.library_size},
        }
        return json.dumps(document, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read the text of ``manifest.json``.

        Raises
        ------
        CacheError
            The text is not a manifest, or is one of another format version.
        """
        try:
            document = json.loads(text)
            if document["format"] != FORMAT_VERSION:
                raise CacheError(f"format {document['format']!r} is not {FORMAT_VERSION}")
            library = document["library"]
            key = Key({str(name): str(value) for name, value in document["key"].items()})
            return cls(
                key, dict(document["artifact"]), str(library["sha256"]), int(library["size"])
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CacheError(f"not a manifest: {error!r}") from error

    def artifact_of(self, library: bytes) -> Artifact:
        """Join the description and the bytes of the library.

        Raises
        ------
        CacheError
            The bytes are not those that were stored, or the description is incomplete.
        """
        if hashlib.sha256(library).hexdigest() != self.library_sha256:
            raise CacheError(
                f"the library has {len(library)} bytes that do not match its SHA-256 "
                f"(stored: {self.library_size} bytes)"
            )
        try:
            return Artifact.from_description(library, self.artifact)
        except (KeyError, TypeError, ValueError) as error:
            raise CacheError(f"incomplete description: {error!r}") from error

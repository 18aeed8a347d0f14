"""The disk cache: one directory per entry, complete from the moment it is visible."""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from pathlib import Path

from tvmify.artifact import Artifact
from tvmify.cache.key import Key
from tvmify.cache.manifest import Manifest
from tvmify.errors import CacheError, TvmifyWarning

MANIFEST = "manifest.json"
LIBRARY = "module.so"


class DiskCache:
    """Compiled programs under a directory, each in a folder named by the digest of its key.

    A fault of the disk costs time, never an answer: an entry that is damaged or foreign is a miss,
    and a directory that cannot be written is a warning, once.

    Parameters
    ----------
    directory
        Where the entries are; made, readable by the user alone, when the first one is stored.
        Loading an entry runs its code: the directory must be one that only the user writes to.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def load(self, key: Key) -> Artifact | None:
        """Return the artifact of a key, or None if there is none that can be trusted."""
        entry = self.directory / key.digest
        try:
            manifest = Manifest.from_json((entry / MANIFEST).read_text("utf-8"))
            if manifest.key != key:
                raise CacheError(f"it was stored for another key ({manifest.key.differences(key)})")
            return manifest.artifact_of((entry / LIBRARY).read_bytes())
        except FileNotFoundError:
            return None
        except (CacheError, OSError, UnicodeDecodeError) as error:
            _warn(f"the entry {entry} is not used and will be built again: {error}")
            return None

    def store(self, key: Key, artifact: Artifact) -> None:
        """Keep an artifact under a key, replacing an entry that `load` would not return."""
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            # A sibling is on the same file system: the rename publishes all files at once.
            with tempfile.TemporaryDirectory(prefix=".new-", dir=self.directory) as temporary:
                new = Path(temporary) / "entry"
                new.mkdir(mode=0o700)
                _write(new / LIBRARY, artifact.library)
                _write(new / MANIFEST, Manifest.of(key, artifact).to_json().encode())
                self._publish(new, self.directory / key.digest, Path(temporary) / "old")
        except OSError as error:
            _warn(f"compiled programs are kept in memory only: {self.directory}: {error}")

    def _publish(self, new: Path, entry: Path, aside: Path) -> None:
        try:
            new.rename(entry)
        except OSError:
            if not entry.exists():
                raise
            # Either an entry that could not be loaded, or one that another process has just
            # stored; replacing that one too is harmless, since libraries run from a copy in memory.
            with contextlib.suppress(FileNotFoundError):
                entry.rename(aside)
            with contextlib.suppress(OSError):  # a third process was faster: its entry serves
                new.rename(entry)


def _write(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        # Without it a power cut can leave a renamed entry with empty files.
        os.fsync(file.fileno())


def _warn(message: str) -> None:
    warnings.warn(f"tvmify's disk cache: {message}", TvmifyWarning, stacklevel=3)

"""One entry on disk: a directory with a manifest and a library, both checked when read."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tvmify.cache import directory
from tvmify.cache.manifest import Manifest
from tvmify.errors import CacheError

MANIFEST = "manifest.json"
LIBRARY = "module.so"
#: Bytes of the longest manifest that is stored or read. A BERT layer needs 6 KB; parsing JSON of
#: this size takes at most a second and 300 MB.
LONGEST_MANIFEST = 4 << 20

_DIGEST = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True)
class StoredEntry:
    """An entry as listed, before its contents are read.

    Attributes
    ----------
    digest
        Digest of its key; the name of its directory.
    path
        Its directory.
    bytes
        Its size on disk.
    used
        When it was last loaded or stored, in seconds since the epoch.
    """

    digest: str
    path: Path
    bytes: int
    used: float

    @classmethod
    def at(cls, path: Path) -> StoredEntry:
        """Return the entry in a directory.

        Raises
        ------
        OSError
            It is gone.
        """
        status = path.lstat()
        size, used = status.st_size, status.st_mtime
        if stat.S_ISDIR(status.st_mode):
            with os.scandir(path) as files:
                for file in files:
                    status = file.stat(follow_symlinks=False)
                    size += status.st_size
                    used = status.st_mtime if file.name == MANIFEST else used
        return cls(path.name, path, size, used)

    @property
    def stored(self) -> float:
        """When its program was built, in seconds since the epoch; 0 if it is gone."""
        try:  # readers touch the manifest, and verdicts replace it
            return (self.path / LIBRARY).lstat().st_mtime
        except OSError:
            return 0.0

    def manifest(self) -> Manifest:
        """Read the manifest.

        Raises
        ------
        CacheError
            It is damaged, or gone.
        """
        try:
            with directory.opened(self.path, kind=os.O_DIRECTORY) as entry:
                manifest = read_manifest(entry)
        except OSError as error:
            raise CacheError(f"the manifest of {self.path} cannot be read: {error}") from error
        return manifest


def is_digest(name: str) -> bool:
    """Whether a directory with this name is an entry."""
    return _DIGEST.match(name) is not None


def read_manifest(entry: int) -> Manifest:
    """Read the manifest in an open entry.

    Raises
    ------
    CacheError
        It is damaged.
    OSError
        It cannot be read.
    """
    with directory.opened(MANIFEST, entry) as file:
        return Manifest.from_json(directory.read(file, LONGEST_MANIFEST))


class EntryFiles(NamedTuple):
    """What the files of an entry contain."""

    manifest: Manifest
    library: bytes


def read_files(entry: int) -> EntryFiles:
    """Read the manifest and the library in an open entry, and check one against the other.

    Raises
    ------
    CacheError
        A file is damaged.
    OSError
        A file cannot be read.
    """
    # The library is opened first, so that an entry that is removed now can still be read.
    with directory.opened(LIBRARY, entry) as file:
        manifest = read_manifest(entry)
        library = directory.read(file, manifest.library_size)
    manifest.check(library)
    return EntryFiles(manifest, library)


def touch(entry: int, now: float) -> None:
    """Mark an open entry as used now, ignoring errors."""
    with contextlib.suppress(OSError):
        os.utime(MANIFEST, (now, now), dir_fd=entry, follow_symlinks=False)

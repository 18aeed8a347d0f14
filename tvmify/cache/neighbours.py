"""For programs that were built: the most similar entry of the disk cache."""

from __future__ import annotations

from pathlib import Path

from tvmify.cache.differences import nearest
from tvmify.cache.disk import DiskCache
from tvmify.cache.key import Key
from tvmify.cache.stored import StoredEntry
from tvmify.errors import CacheError

#: The most entries read, most recently used first, and the most programs compared with them.
_MOST_ENTRIES = 200
_MOST_PROGRAMS = 16
#: An entry with more differences than this is of another module, and explains nothing.
_MOST_DIFFERENCES = 6


class Neighbours:
    """The entries of a directory, read once, on first use.

    Parameters
    ----------
    directory
        The disk cache's directory, or None if there is none.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._stored: list[tuple[StoredEntry, Key]] | None = None
        self._asked = 0

    def lines(self, key: Key) -> list[str]:
        """Describe how a program that was built differs from the most similar older entry.

        Empty if none is similar, or if many programs were compared before.
        """
        self._asked += 1
        if self._asked > _MOST_PROGRAMS:
            return []
        if self._stored is None:
            self._stored = self._read()
        others = [(entry, other) for entry, other in self._stored if other != key]
        own = [entry.stored for entry, other in self._stored if other == key]
        # An entry stored later cannot explain the miss.
        older = (other for entry, other in others if not own or entry.stored < own[0])
        found = nearest(key, older)
        if found is None or len(found.differences) > _MOST_DIFFERENCES:
            return []
        title = f"nearest older entry: {found.key.digest}, differs (here → there):"
        return [title, *found.differences]

    def _read(self) -> list[tuple[StoredEntry, Key]]:
        if self._directory is None:
            return []
        try:
            entries = DiskCache(self._directory).entries()[-_MOST_ENTRIES:]
        except (CacheError, OSError):  # the cache itself has already warned
            return []
        read = []
        for entry in entries:
            try:
                read.append((entry, entry.manifest().key))
            except CacheError:  # a damaged entry is not a neighbour
                continue
        return read

"""The disk cache: one directory per entry, published atomically."""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from tvmify.artifact import Artifact
from tvmify.cache import directory as private
from tvmify.cache.eviction import surplus
from tvmify.cache.key import Key
from tvmify.cache.locks import locked
from tvmify.cache.manifest import Manifest, library_file
from tvmify.cache.stored import (
    LIBRARY,
    LONGEST_MANIFEST,
    MANIFEST,
    EntryFiles,
    StoredEntry,
    is_digest,
    read_files,
    touch,
)
from tvmify.errors import CacheError, warn
from tvmify.system.forks import short_lock
from tvmify.system.variables import Limits

#: Directories beside the entries, for damaged entries and for lock files.
QUARANTINE, LOCKS = "quarantine", "locks"
#: Name prefixes of directories that are being written or removed.
_NEW, _OLD = ".new-", ".old-"
#: Seconds after which such a directory counts as left behind by a dead process.
_ORPHANED = 3600.0
#: How many damaged entries are kept for inspection.
_MOST_QUARANTINED = 8
#: Fraction to which a full cache is reduced, so that not every store has to evict.
_ENOUGH = 0.9


class DiskCache:
    """Compiled programs under a directory, each in a folder named by the digest of its key.

    A disk fault costs time, never a result: a damaged or foreign entry is quarantined and counts as
    a miss, and an unusable directory causes one warning. Any number of threads and processes may
    share a directory.

    Parameters
    ----------
    directory
        Where the entries are; created, private to the user, when the first one is stored. Loading
        an entry runs its code, so a directory that others may write to is not used.
    limits
        How much it may hold; the least recently used entries are evicted first.
    clock
        Returns seconds since the epoch: the times at which entries are used.

    Attributes
    ----------
    directory, limits
        As given.
    counts
        What this process did: ``hits``, ``misses`` (two for each program that it builds, since it
        looks again once it holds the lock), ``stored``, ``quarantined``, ``evicted``.
    """

    def __init__(
        self,
        directory: Path,
        limits: Limits = Limits(),  # noqa: B008
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.directory = directory
        self.limits = limits
        self._clock = clock
        self.counts: Counter[str] = Counter()
        self._lock = short_lock()
        self._reported: set[str] = set()

    def load(self, key: Key) -> Artifact | None:
        """Return the artifact of a key, or None if there is no valid one."""
        artifact = None
        try:
            if private.is_there(self.directory):
                artifact = self._load(key)
        except (CacheError, OSError) as error:
            self._warn("directory", f"{self.directory} is not used: {error}")
        self._count("misses" if artifact is None else "hits")
        return artifact

    def store(self, key: Key, artifact: Artifact) -> None:
        """Store an artifact under a key, replacing an entry that `load` would not return."""
        try:
            private.ensure(self.directory)
            self._publish(key, artifact)
            self._count("stored")
            self._make_room(key.digest)
        except (CacheError, OSError) as error:
            self._warn(
                "directory", f"compiled programs are kept in memory only: {self.directory}: {error}"
            )

    def reject(self, key: Key, problem: str) -> None:
        """Quarantine an entry that `load` returned and that turned out to be unusable."""
        path = self.directory / key.digest
        with contextlib.suppress(CacheError, OSError):  # then the entry came from another level
            if private.is_there(self.directory):
                self._move_aside(path)
        self._warn(path.name, f"the entry {path} is not used and will be built again: {problem}")

    @contextlib.contextmanager
    def building(self, digest: str, timeout: float) -> Iterator[bool]:
        """Keep other processes from building the same program at the same time.

        Yields
        ------
        bool
            False if another process held the lock for longer than `timeout` seconds, or the file
            system has no locks: then the program may be built twice.
        """
        try:
            private.ensure(self.directory)
            (self.directory / LOCKS).mkdir(mode=0o700, exist_ok=True)
        except (CacheError, OSError):  # `store` will report it
            yield False
            return
        # Lock files can never be removed safely, so 4096 of them are shared by all keys.
        with locked(self.directory / LOCKS / f"{digest[:3]}.lock", timeout) as is_mine:
            yield is_mine

    # -------------------------------------------------------------------------------- inspection

    def entries(self) -> list[StoredEntry]:
        """Return the entries, least recently used first.

        Raises
        ------
        CacheError
            The directory is not private; all methods below raise this too.
        """
        found = []
        if private.is_there(self.directory):
            for path in self.directory.iterdir():
                if is_digest(path.name):
                    with contextlib.suppress(OSError):  # another process has just removed it
                        found.append(StoredEntry.at(path))
        return sorted(found, key=lambda entry: (entry.used, entry.digest))

    def read(self, digest: str) -> EntryFiles:
        """Return what the files of an entry contain, after checking it.

        Raises
        ------
        CacheError
            It is damaged, or belongs to another key.
        FileNotFoundError
            There is no such entry.
        """
        if not is_digest(digest) or not private.is_there(self.directory):
            raise FileNotFoundError(errno.ENOENT, "there is no such entry", digest)
        with private.opened(self.directory / digest, kind=os.O_DIRECTORY) as entry:
            try:
                files = read_files(entry)
            except FileNotFoundError as error:
                raise CacheError(f"it has no {error.filename}") from error
        if files.manifest.key.digest != digest:
            raise CacheError("it is the entry of another key")
        files.manifest.artifact_of(files.library)
        return files

    def verify(self) -> dict[str, str]:
        """Read all entries; return what is wrong with each damaged one, by digest.

        Damaged entries are quarantined, unless reading the disk failed.
        """
        damaged: dict[str, str] = {}
        for entry in self.entries():
            try:
                self.read(entry.digest)
            except FileNotFoundError:
                continue
            except OSError as error:
                damaged[entry.digest] = f"it cannot be read: {error}"
            except CacheError as error:
                damaged[entry.digest] = str(error)
                self._move_aside(entry.path)
        return damaged

    def prune(self, limits: Limits) -> list[StoredEntry]:
        """Remove the least recently used entries until the limits hold; return what was removed."""
        return [entry for entry in surplus(self.entries(), limits) if self._remove(entry)]

    def clear(self) -> int:
        """Remove all entries, including damaged ones; return how many there were."""
        removed = sum(self._remove(entry) for entry in self.entries())
        for path in self.quarantined():
            private.remove(path)
        return removed

    def quarantined(self) -> list[Path]:
        """Return the directories of damaged entries, latest last."""
        place = self.directory / QUARANTINE
        if not private.is_there(self.directory) or not place.is_dir():
            return []
        return sorted(place.iterdir(), key=lambda path: path.lstat().st_ctime)

    # --------------------------------------------------------------------------------- loading

    def _load(self, key: Key) -> Artifact | None:
        path = self.directory / key.digest
        try:
            with private.opened(path, kind=os.O_DIRECTORY) as entry:
                try:
                    manifest, library = read_files(entry)
                    if manifest.key != key:
                        names = manifest.key.differences(key)
                        raise CacheError(f"it was stored for another key ({', '.join(names)})")
                    artifact = manifest.artifact_of(library)
                except (CacheError, FileNotFoundError) as error:
                    if not _is_at(entry, path):  # another process has just removed or replaced it
                        return None
                    raise CacheError(str(error)) from error
                touch(entry, self._clock())
                return artifact
        except CacheError as error:
            self._move_aside(path)
            self._warn(path.name, f"the entry {path} is not used and will be built again: {error}")
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                self._warn(path.name, f"the entry {path} cannot be read: {error}")
        return None

    def _move_aside(self, path: Path) -> None:
        """Move a damaged entry into quarantine."""
        place = self.directory / QUARANTINE
        self._count("quarantined")
        try:
            place.mkdir(mode=0o700, exist_ok=True)
            path.rename(place / f"{path.name}-{secrets.token_hex(4)}")
        except FileNotFoundError:  # another process has quarantined it
            return
        except OSError:
            private.remove(path)
        with contextlib.suppress(OSError):
            for old in self.quarantined()[:-_MOST_QUARANTINED]:
                private.remove(old)

    # --------------------------------------------------------------------------------- storing

    def _publish(self, key: Key, artifact: Artifact) -> None:
        path = self.directory / key.digest
        manifest = Manifest.of(key, artifact)
        text = manifest.to_json().encode()
        if len(text) > LONGEST_MANIFEST:
            raise CacheError(f"a manifest of {len(text)} bytes is not stored")
        # A sibling is on the same file system, so one rename publishes all files.
        with tempfile.TemporaryDirectory(prefix=_NEW, dir=self.directory) as temporary:
            new = Path(temporary) / "entry"
            new.mkdir(mode=0o700)
            private.write(new / MANIFEST, text)
            with private.opened(new, kind=os.O_DIRECTORY) as entry:
                touch(entry, self._clock())
            if self._update(path, manifest, new / MANIFEST):
                return
            private.write(new / LIBRARY, library_file(key, artifact))
            try:
                new.rename(path)
            except OSError as error:
                # Another process has just stored this program: its entry is as good.
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
        with private.opened(self.directory, kind=os.O_DIRECTORY) as file:
            os.fsync(file)

    def _update(self, path: Path, manifest: Manifest, new: Path) -> bool:
        """Whether the key has a valid entry; update its manifest if the library is the same."""
        try:
            with private.opened(path, kind=os.O_DIRECTORY) as entry:
                present, library = read_files(entry)
                if present.key != manifest.key:
                    raise CacheError("it was stored for another key")
                present.artifact_of(library)
                if present.library_sha256 == manifest.library_sha256:
                    # Into the directory that was read, even if another has taken its name.
                    os.replace(new, MANIFEST, dst_dir_fd=entry)
                return True
        except FileNotFoundError:
            if path.exists():
                self._move_aside(path)
        except (CacheError, OSError):
            self._move_aside(path)
        return False

    # -------------------------------------------------------------------------------- eviction

    def _make_room(self, latest: str) -> None:
        """Enforce the limits but keep the latest entry; remove leftovers of dead processes."""
        entries = self.entries()
        if surplus(entries, self.limits):
            enough = Limits(*(limit and int(limit * _ENOUGH) for limit in self.limits))
            for entry in surplus(entries, enough):
                if entry.digest != latest:
                    self._count("evicted", self._remove(entry))
        for path in self.directory.iterdir():
            if path.name.startswith((_NEW, _OLD)) and self._clock() - _changed(path) > _ORPHANED:
                private.remove(path)

    def _remove(self, entry: StoredEntry) -> bool:
        """Remove an entry unless it was used since it was listed; return whether it was removed."""
        try:
            if StoredEntry.at(entry.path).used != entry.used:
                return False
            # A rename is atomic, so no reader sees half an entry, and needs no disk space.
            old = entry.path.rename(self.directory / f"{_OLD}{secrets.token_hex(4)}")
        except OSError:  # another process was faster, or it is not ours to remove
            return False
        private.remove(old)
        return True

    def _count(self, name: str, times: int = 1) -> None:
        with self._lock:
            self.counts[name] += times

    def _warn(self, about: str, message: str) -> None:
        with self._lock:
            is_news = about not in self._reported
            self._reported.add(about)
        if is_news:
            warn(f"tvmify's disk cache: {message}")


@functools.lru_cache(maxsize=16)
def disk_at(directory: Path, limits: Limits) -> DiskCache:
    """Return this process's only cache for a directory, so that each warning appears once."""
    return DiskCache(directory, limits)


def _is_at(file: int, path: Path) -> bool:
    """Whether a path still names this open directory."""
    try:
        return os.path.samestat(os.fstat(file), path.lstat())
    except OSError:
        return False


def _changed(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:  # it is gone, and nothing is left to remove
        return math.inf

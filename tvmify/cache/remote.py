"""The shared cache behind the user's own: a folder or an object store, through fsspec."""

from __future__ import annotations

import contextlib
import functools
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from tvmify.artifact import Artifact
from tvmify.cache.attempts import Attempts, Paused
from tvmify.cache.key import Key
from tvmify.cache.packed import pack, unpack
from tvmify.errors import CacheError, warn
from tvmify.system.forks import short_lock

#: Timeout of one operation, and pause after a failure, in seconds.
TIMEOUT, PAUSE = 10.0, 60.0
#: Bytes of the largest object that is read; a larger one is not ours.
_LARGEST = 256 << 20

Result = TypeVar("Result")


class RemoteCache:
    """Compiled programs under an fsspec URL: one object each, named by the digest of its key.

    Its faults never reach a call. A failure or timeout counts as a miss, warns the first time, and
    pauses access to the remote. Reads and writes pause independently, so a read-only remote works.

    Parameters
    ----------
    url
        A folder, or a prefix in a bucket. Loading an entry runs its code, so everyone who can write
        there must be trusted.
    timeout, pause, clock
        See `Attempts`.
    """

    def __init__(
        self,
        url: str,
        timeout: float | None = None,
        pause: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = url
        self._timeout = TIMEOUT if timeout is None else timeout
        self._pause = PAUSE if pause is None else pause
        self._reading = Attempts(self._timeout, self._pause, clock)
        self._writing = Attempts(self._timeout, self._pause, clock)
        self._counts: Counter[str] = Counter()
        self._lock = short_lock()

    @property
    def name(self) -> str:
        """The URL without its password and its query, which may be a signature."""
        return self._without_secrets(self._url)

    def _without_secrets(self, text: str) -> str:
        _, _, query = self._url.partition("?")
        text = text.replace(f"?{query}", "") if query else text
        return re.sub(r"//[^/\s]*@", "//", text)

    @property
    def counts(self) -> dict[str, int]:
        """Counts of hits, misses, stored, failed, damaged, and skipped (during a pause)."""
        with self._lock:
            return dict(self._counts)

    def load(self, key: Key) -> Artifact | None:
        """Return the artifact of a key, or None if no valid one can be read."""
        content = self._attempt("reading", self._reading, functools.partial(self._get, key))
        if not content:
            if content is not None:
                self._count("misses")
            return None
        try:
            entry = unpack(content)
            if entry.key != key:
                names = ", ".join(entry.key.differences(key))
                raise CacheError(f"it was stored for another key ({names})")
        except CacheError as error:
            self._fault("damaged", f"the entry {key.digest} is not used: {error}")
            return None
        self._count("hits")
        return entry.artifact

    def store(self, key: Key, artifact: Artifact) -> None:
        """Write an entry, replacing an existing one."""
        content = pack(key, artifact)
        if len(content) > _LARGEST:
            self._fault("failed", f"{key.digest} is too large to store: {len(content)} bytes")
            return
        put = functools.partial(self._put, key, content)
        if self._attempt("writing", self._writing, put):
            self._count("stored")

    def _attempt(
        self, what: str, attempts: Attempts, operation: Callable[[], Result]
    ) -> Result | None:
        try:
            return attempts.run(operation)
        except Paused:
            self._count("skipped")
        except Exception as error:  # each file system raises its own types
            self._fault(
                "failed",
                f"{what} failed, and is skipped for {self._pause:g} s: {type(error).__name__}: "
                f"{self._without_secrets(str(error))}",
            )
        return None

    def _get(self, key: Key) -> bytes:
        """Return an object, or empty bytes if there is none."""
        files, path = self._place(key)
        try:
            return files.cat_file(path, start=0, end=_LARGEST)
        except FileNotFoundError:
            return b""

    def _put(self, key: Key, content: bytes) -> bool:
        from fsspec.implementations.local import LocalFileSystem

        files, path = self._place(key)
        if not isinstance(files, LocalFileSystem):
            files.pipe_file(path, content)  # object stores publish an object atomically
            return True
        files.makedirs(path.rpartition("/")[0], exist_ok=True)
        temporary = f"{path}.{secrets.token_hex(8)}.tmp"
        try:
            files.pipe_file(temporary, content)
            files.mv(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                files.rm_file(temporary)
            raise
        return True

    def _place(self, key: Key) -> tuple[Any, str]:
        # Imported here, since a process with only disk hits needs no fsspec; resolved every time,
        # since fsspec needs a new file system object after a fork.
        from fsspec.core import url_to_fs

        files, root = url_to_fs(self._url)
        return files, f"{root.rstrip('/')}/{key.digest}.zip"

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    def _fault(self, what: str, message: str) -> None:
        self._count(what)
        if self.counts.get("failed", 0) + self.counts.get("damaged", 0) == 1:
            warn(f"tvmify's shared cache {self.name}: {message}")


@functools.cache
def remote_at(url: str) -> RemoteCache:
    """Return this process's only cache for a URL, so that all modules share its pauses."""
    return RemoteCache(url)

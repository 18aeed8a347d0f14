"""Two cache levels as one: the user's directory, and behind it one that machines share."""

from __future__ import annotations

from contextlib import AbstractContextManager

from tvmify.artifact import Artifact
from tvmify.cache.disk import DiskCache
from tvmify.cache.key import Key
from tvmify.cache.protocol import Cache


class TwoLevels:
    """A read-through and write-through cache in front of a remote one.

    Parameters
    ----------
    near
        Read first; also stores what was read from the remote.
    far
        Read on a miss; every store goes here too.
    """

    def __init__(self, near: DiskCache, far: Cache[Key, Artifact]) -> None:
        self.near = near
        self.far = far

    def load(self, key: Key) -> Artifact | None:
        """Return the artifact of a key from the first level that has it."""
        artifact = self.near.load(key)
        if artifact is None and (artifact := self.far.load(key)) is not None:
            self.near.store(key, artifact)
        return artifact

    def store(self, key: Key, artifact: Artifact) -> None:
        """Store an artifact on both levels."""
        self.near.store(key, artifact)
        self.far.store(key, artifact)

    def reject(self, key: Key, problem: str) -> None:
        """Quarantine an entry that was loaded; the next build replaces it on both levels."""
        self.near.reject(key, problem)

    def building(self, digest: str, timeout: float) -> AbstractContextManager[bool]:
        """Lock a key against other processes on this machine, see `DiskCache.building`."""
        return self.near.building(digest, timeout)

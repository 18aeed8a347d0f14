"""Two levels as one: the user's own directory, and behind it what several machines share."""

from __future__ import annotations

from contextlib import AbstractContextManager

from tvmify.artifact import Artifact
from tvmify.cache.disk import DiskCache
from tvmify.cache.key import Key
from tvmify.cache.remote import RemoteCache


class TwoLevels:
    """Reads through to the remote, and writes through to it.

    Parameters
    ----------
    near
        Asked first; keeps what the other one had.
    far
        Asked for what is not there; given all that is stored.
    """

    def __init__(self, near: DiskCache, far: RemoteCache) -> None:
        self.near = near
        self.far = far

    def load(self, key: Key) -> Artifact | None:
        """Return the artifact of a key from the first level that has it."""
        artifact = self.near.load(key)
        if artifact is None and (artifact := self.far.load(key)) is not None:
            self.near.store(key, artifact)
        return artifact

    def store(self, key: Key, artifact: Artifact) -> None:
        """Keep an artifact on both levels."""
        self.near.store(key, artifact)
        self.far.store(key, artifact)

    def reject(self, key: Key, problem: str) -> None:
        """Set an entry aside that was loaded; what is built instead replaces it on both levels."""
        self.near.reject(key, problem)

    def building(self, digest: str, timeout: float) -> AbstractContextManager[bool]:
        """Lock a key among the processes of this machine, as `DiskCache.building` does."""
        return self.near.building(digest, timeout)

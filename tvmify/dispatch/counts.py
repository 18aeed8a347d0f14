"""Counts of what the calls of one module or function have done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tvmify.dispatch.programs import Source


class CacheInfo(NamedTuple):
    """Cache statistics of one decorated module or function.

    Attributes
    ----------
    hits, misses
        Calls whose signature was, or was not, in the memory cache.
    builds
        Programs that were compiled.
    disk_hits
        Programs that were loaded from the disk cache.
    entries
        Compiled signatures in the memory cache now.
    seconds
        Seconds spent on new entries, by stage.
    eager
        Calls that ran in eager PyTorch, for any reason.
    evictions
        Signatures that were evicted from the memory cache.
    postponed
        Calls that ran in eager because capturing would have blocked them or others.
    """

    hits: int
    misses: int
    builds: int
    disk_hits: int
    entries: int
    seconds: Mapping[str, float]
    eager: int = 0
    evictions: int = 0
    postponed: int = 0

    def with_parts(self, parts: Iterable[CacheInfo]) -> CacheInfo:
        """Return these counts plus those of the parts of the module."""
        parts = list(parts)
        seconds = Counter(self.seconds)
        for part in parts:
            seconds.update(part.seconds)
        return self._replace(
            builds=self.builds + sum(part.builds for part in parts),
            disk_hits=self.disk_hits + sum(part.disk_hits for part in parts),
            entries=self.entries + sum(part.entries for part in parts),
            seconds=dict(seconds),
        )

    @classmethod
    def total(cls, parts: Sequence[CacheInfo]) -> CacheInfo:
        """Return the sums over several modules or functions."""
        seconds: Counter[str] = Counter()
        for part in parts:
            seconds.update(part.seconds)
        names = [name for name in cls._fields if name != "seconds"]
        counts = {name: sum(getattr(part, name) for part in parts) for name in names}
        return cls(**counts, seconds=dict(seconds))


@dataclass
class Counts:
    """The counts of `CacheInfo` that no cache keeps."""

    builds: int = 0
    disk_hits: int = 0
    eager: int = 0
    postponed: int = 0
    #: By stage.
    seconds: Counter[str] = field(default_factory=Counter)

    def found(self, source: Source) -> None:
        """Count a program by where it came from."""
        self.builds += source is Source.BUILT
        self.disk_hits += source is Source.LOADED

"""Kernel times measured on this machine: the seconds of every candidate of a workload."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from tvmify.cache import directory as private
from tvmify.errors import CacheError, warn

#: Name of the file, beside the cache entries.
FILE = "measurements.jsonl"
#: Bytes of the largest file that is read: enough for a million workloads.
_LARGEST = 1 << 28
#: A candidate replaces the rule's choice, which comes first, if it takes at most this fraction of
#: its time: smaller gains may be noise.
_WORTHWHILE = 0.95


class Measurements:
    """Times of kernels, shared by all programs and processes of a user.

    The file has one JSON object per line. Each line is one write in append mode, which POSIX keeps
    whole among several processes, so no lock is needed. A line also begins with a line break, so
    that one cut off by a power failure spoils no other. Unreadable lines are skipped, and their
    workloads measured again when needed.

    Parameters
    ----------
    directory
        The disk cache's directory; None keeps measurements in memory.
    processor
        Everything besides the workload that affects the time of a candidate: target, number of
        threads, compiler version. Times from others are ignored.
    """

    def __init__(self, directory: Path | None, processor: str) -> None:
        self._path = directory / FILE if directory is not None else None
        self._processor = sha256(processor.encode()).hexdigest()[:16]
        self._seconds: dict[str, dict[str, float]] = {}
        if self._path is not None:
            self._read(self._path)

    def __len__(self) -> int:
        return len(self._seconds)

    def best(self, workload: str, candidates: Sequence[str]) -> str | None:
        """Return the fastest candidate, or None unless all of them were measured.

        Parameters
        ----------
        candidates
            Names, the rule's choice first; it wins unless another is faster by more than noise.
        """
        known = self._seconds.get(workload, {})
        if any(name not in known for name in candidates):
            return None
        fastest = min(candidates, key=known.__getitem__)
        first = candidates[0]
        return fastest if known[fastest] <= _WORTHWHILE * known[first] else first

    def record(self, workload: str, seconds: Mapping[str, float]) -> None:
        """Record the times of a workload's candidates; infinity means that one cannot run."""
        self._seconds.setdefault(workload, {}).update(seconds)
        if self._path is None:
            return
        entry = {"processor": self._processor, "workload": workload, "seconds": dict(seconds)}
        try:
            private.ensure(self._path.parent)
            # Do not follow a link, or block on a pipe.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
            file = os.open(self._path, flags, 0o600)
            try:
                os.write(file, f"\n{json.dumps(entry)}\n".encode())
            finally:
                os.close(file)
        except (CacheError, OSError) as error:
            warn(f"tvmify's measurements are kept in memory only: {self._path}: {error}")
            self._path = None

    def _read(self, path: Path) -> None:
        try:
            if not private.is_there(path.parent):
                return
            with private.opened(path) as file:
                lines = private.read(file, _LARGEST).splitlines()
        except (CacheError, OSError):  # it does not exist yet, or is not trusted
            return
        for line in lines:
            try:
                entry = json.loads(line)
                if entry["processor"] == self._processor:
                    known = self._seconds.setdefault(str(entry["workload"]), {})
                    known.update(_times(entry["seconds"]))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                continue


def _times(seconds: Mapping[str, object]) -> dict[str, float]:
    return {
        name: float(time)
        for name, time in seconds.items()
        if isinstance(time, (int, float)) and not math.isnan(time) and time > 0
    }

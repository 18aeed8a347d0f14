"""What was measured on this machine: for each workload the seconds of every candidate."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from tvmify.cache import directory as private
from tvmify.errors import CacheError, warn

#: Name of the file, beside the entries of compiled programs.
FILE = "measurements.jsonl"
#: Bytes of the largest file that is read: a line for each of a million workloads.
_LARGEST = 1 << 28
#: A candidate displaces the first one, the choice of the rule, if it takes at most so much of its
#: time: a smaller gain is as likely noise.
_WORTHWHILE = 0.95


class Measurements:
    """Times of kernels, shared by all programs and processes of a user.

    One JSON object a line. A line is appended by a single write to a file opened for appending,
    which POSIX keeps whole among several processes, so there is no lock. It begins with a line
    break too: half a line that a power cut left spoils no other. What cannot be read is skipped,
    and measured again when it is asked for.

    Parameters
    ----------
    directory
        Of the disk cache; None keeps what is measured in memory.
    processor
        All that decides, besides the workload, how long a candidate takes: the target, the
        number of threads, the version of the compiler. Times of others are not seen.
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
        """Return the fastest candidate, or None if one of them was never measured.

        Parameters
        ----------
        candidates
            Names, the rule's choice first: it stays unless another is faster by more than noise.
        """
        known = self._seconds.get(workload, {})
        if any(name not in known for name in candidates):
            return None
        fastest = min(candidates, key=known.__getitem__)
        first = candidates[0]
        return fastest if known[fastest] <= _WORTHWHILE * known[first] else first

    def record(self, workload: str, seconds: Mapping[str, float]) -> None:
        """Keep the times of a workload's candidates; infinity stands for one that cannot run."""
        self._seconds.setdefault(workload, {}).update(seconds)
        if self._path is None:
            return
        entry = {"processor": self._processor, "workload": workload, "seconds": dict(seconds)}
        try:
            private.ensure(self._path.parent)
            # Neither through a link nor into a pipe.
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
        except (CacheError, OSError):  # not there yet, or not to be trusted: nothing is known
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

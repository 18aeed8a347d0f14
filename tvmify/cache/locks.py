"""Locks between processes. They save work; correctness never depends on them.

They are taken by ``flock`` itself: the package filelock lets all locks wait for a fork in progress,
while a fork waits for threads at work, such as one that is taking a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

#: Seconds between two attempts to take a lock that another process holds.
_POLL = 0.05
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

_held = threading.local()


class _File:
    """An open file, on which a lock may be held."""

    def __init__(self, path: Path) -> None:
        self._number: int | None = os.open(path, _FLAGS, 0o600)
        _files.add(self)

    def lock(self, timeout: float) -> bool:
        """Take the lock; return False if it stays taken, or the file system has none."""
        assert self._number is not None
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(self._number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_POLL)
            except OSError:
                return False
            else:
                return True

    def unlock(self) -> None:
        """Release the lock, also for children that have the file open."""
        if self._number is not None:
            fcntl.flock(self._number, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file. The lock is released when all processes have."""
        _files.discard(self)
        if self._number is not None:
            os.close(self._number)
            self._number = None


#: The open files of this process.
_files: set[_File] = set()


def _leave_to_parent() -> None:
    for file in tuple(_files):
        with contextlib.suppress(OSError):
            file.close()


os.register_at_fork(after_in_child=_leave_to_parent)


@contextlib.contextmanager
def locked(path: Path, timeout: float) -> Iterator[bool]:
    """Hold a lock on a file, which is created if needed and never removed.

    The lock is the kernel's (``flock``), which releases it however the process ends. It is
    reentrant.

    Parameters
    ----------
    timeout
        The most seconds to wait.

    Yields
    ------
    bool
        False if the wait timed out, or the file system has no locks.
    """
    holder = os.getpid(), path
    own: set[tuple[int, Path]] = vars(_held).setdefault("locks", set())
    if holder in own:
        yield True
        return
    try:
        file = _File(path)
    except OSError:
        yield False
        return
    with contextlib.closing(file):
        if not file.lock(timeout):
            yield False
            return
        own.add(holder)
        try:
            yield True
        finally:
            own.discard(holder)
            with contextlib.suppress(OSError):  # the disk failed; closing releases the lock
                file.unlock()

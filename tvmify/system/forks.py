"""Forks: a child has one thread, and the locks of all the others.

Three rules make every fork of a process safe whose other threads run, load or compile:

- A fork waits until no thread is in the middle of a stage of a build (`at_work`), for a library
  that is interrupted there, torch or TVM, would never be whole again in the child. Threads wait at
  the end of their stage until the fork is done, and then go on.
- Locks come from here. In a child all are free but those of the thread that forked. What a
  `short_lock` guards is not in the middle of a change either.
- A child that was forked in the middle of a stage nevertheless, because that took too long, knows
  it (`refuse_if_torn`): it runs what was compiled before, and compiles nothing.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from tvmify.errors import NotCompiled

#: Seconds that a fork waits at most for threads to come to the end of their stages.
LONGEST_STAGE = 30.0
#: Seconds that a fork waits at most for all short locks.
_LONGEST_MOMENT = 1.0


class Lock:
    """A re-entrant lock that may be held for long: a fork does not wait for it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _keep(self, _long_locks)

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            with _work.resting():  # else a fork would wait for this thread, and it for another one
                self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    @contextlib.contextmanager
    def held(self, *, wait: bool) -> Iterator[bool]:
        """Hold it, and yield True; or yield False if that would mean to wait and `wait` is not."""
        if wait:
            with self:
                yield True
            return
        is_held = self._lock.acquire(blocking=False)
        try:
            yield is_held
        finally:
            if is_held:
                self._lock.release()

    def free(self) -> None:
        """Release it in a forked child, whoever had it, unless it is this thread."""
        if not self._lock._is_owned():  # type: ignore[attr-defined]
            self._lock._at_fork_reinit()  # type: ignore[attr-defined]


def short_lock() -> threading.Lock:
    """Return a lock that is held for moments, by threads that wait for nothing meanwhile."""
    lock = threading.Lock()
    _keep(lock, _short_locks)
    return lock


class _Work:
    """Which threads are in the middle of something that no fork may interrupt."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._threads: dict[int, int] = {}  # by what they are at
        self._forks = 0

    def begin(self, task: object) -> None:
        """Begin, in this thread, after any fork that is under way."""
        with self._changed:
            self._changed.wait_for(lambda: not self._forks)
            self._threads[id(task)] = threading.get_ident()

    def end(self, task: object) -> None:
        """End what has begun, if it has."""
        with self._changed:
            self._threads.pop(id(task), None)
            self._changed.notify_all()

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Wait in here for another thread or process: a fork is harmless meanwhile."""
        thread = threading.get_ident()
        with self._changed:
            own = [task for task, other in self._threads.items() if other == thread]
            for task in own:
                del self._threads[task]
            self._changed.notify_all()
        try:
            yield
        finally:
            if own:
                with self._changed:
                    self._changed.wait_for(lambda: not self._forks)
                    self._threads |= dict.fromkeys(own, thread)

    def _others(self) -> bool:
        return any(thread != threading.get_ident() for thread in self._threads.values())

    def pause(self) -> None:
        """Wait for the other threads, and let none begin until `resume`."""
        self._changed.acquire()
        self._forks += 1
        self._changed.wait_for(lambda: not self._others(), timeout=LONGEST_STAGE)

    def resume(self) -> None:
        """Let other threads go on."""
        self._forks -= 1
        self._changed.notify_all()
        self._changed.release()

    def forget_others(self) -> bool:
        """Keep, in a child, what this thread is at; return whether others were at something."""
        thread = threading.get_ident()
        own = {task: other for task, other in self._threads.items() if other == thread}
        is_torn = len(own) < len(self._threads)
        self._changed = threading.Condition()
        self._threads, self._forks = own, 0
        return is_torn


def _keep(lock: Any, kept: set[weakref.ref[Any]]) -> None:
    kept.add(weakref.ref(lock, kept.discard))


def _alive(kept: set[weakref.ref[Any]]) -> list[Any]:
    # Not a WeakSet, whose iteration fails when another thread adds to it.
    return [lock for lock in (reference() for reference in tuple(kept)) if lock is not None]


_long_locks: set[weakref.ref[Lock]] = set()
_short_locks: set[weakref.ref[threading.Lock]] = set()
_held: list[threading.Lock] = []
_work = _Work()
_is_torn = _collects = False

begin, end, resting = _work.begin, _work.end, _work.resting


@contextlib.contextmanager
def at_work() -> Iterator[None]:
    """Let forks wait until this is over."""
    task = object()
    begin(task)
    try:
        yield
    finally:
        end(task)


def is_torn() -> bool:
    """Whether this process was forked in the middle of a build, and so cannot build any more."""
    return _is_torn


def refuse_if_torn() -> None:
    """Refuse to compile in a child that was forked in the middle of a build.

    Raises
    ------
    NotCompiled
        It was.
    """
    if _is_torn:
        raise NotCompiled(
            "this process was forked while another thread compiled, and that did not end in time",
            "Start processes by spawn or forkserver, or fork when no thread compiles; what was "
            "compiled before the fork runs compiled.",
        )


def _before() -> None:
    global _collects  # noqa: PLW0603
    _work.pause()
    # A collection could call what takes one of these locks.
    _collects = gc.isenabled()
    gc.disable()
    patience = _LONGEST_MOMENT
    for lock in _alive(_short_locks):
        if lock.acquire(blocking=False) or (patience and lock.acquire(timeout=patience)):
            _held.append(lock)
        else:
            patience = 0.0


def _release() -> None:
    while _held:
        _held.pop().release()
    if _collects:
        gc.enable()


def _after_in_parent() -> None:
    _release()
    _work.resume()


def _after_in_child() -> None:
    global _is_torn  # noqa: PLW0603
    held = {id(lock) for lock in _held}
    for lock in _alive(_short_locks):
        if id(lock) not in held:
            lock._at_fork_reinit()  # type: ignore[attr-defined]
    _release()
    for lock in _alive(_long_locks):
        lock.free()
    _is_torn = _work.forget_others() or _is_torn


os.register_at_fork(
    before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child
)

"""Safe forks: a child has only one thread, but the locks of all threads of its parent.

Three rules make forks safe while other threads run, load or compile:

- A fork waits until no thread is inside a build stage (`at_work`), because the child's copy of a
  library that was interrupted there, torch or TVM, would stay inconsistent. Threads that end a
  stage wait until the fork is done.
- All locks are created here. In a child, all are released except those of the thread that forked.
  A fork also waits for every `short_lock`, so that what it guards is consistent.
- If a stage takes too long, the fork goes ahead, and the child knows it (`refuse_if_torn`): it runs
  what was compiled before, but compiles nothing.
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

#: The most seconds that a fork waits for threads to end their stages.
LONGEST_STAGE = 30.0
#: The most seconds that a fork waits for all short locks.
_LONGEST_MOMENT = 1.0


class Lock:
    """A re-entrant lock that may be held for a long time: a fork does not wait for it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _keep(self, _long_locks)

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            with _work.resting():  # otherwise a fork would wait for a thread that is itself waiting
                self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    @contextlib.contextmanager
    def held(self, *, wait: bool) -> Iterator[bool]:
        """Hold the lock and yield True; yield False if it is taken and `wait` is False."""
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
        """Release the lock in a forked child, unless this thread holds it."""
        if not self._lock._is_owned():  # type: ignore[attr-defined]
            self._lock._at_fork_reinit()  # type: ignore[attr-defined]


def short_lock() -> threading.Lock:
    """Return a lock for brief use; a thread that holds it must not wait for anything else."""
    lock = threading.Lock()
    _keep(lock, _short_locks)
    return lock


class _Work:
    """Which threads are doing something that a fork must not interrupt."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._threads: dict[int, int] = {}  # id of a task -> thread id
        self._forks = 0

    def begin(self, task: object) -> None:
        """Begin a task in this thread, after any fork in progress."""
        with self._changed:
            self._changed.wait_for(lambda: not self._forks)
            self._threads[id(task)] = threading.get_ident()

    def end(self, task: object) -> None:
        """End a task, if it has begun."""
        with self._changed:
            self._threads.pop(id(task), None)
            self._changed.notify_all()

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Allow forks while this thread waits for another thread or process."""
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
        """Wait until the other threads end their work; none can begin until `resume`."""
        self._changed.acquire()
        self._forks += 1
        self._changed.wait_for(lambda: not self._others(), timeout=LONGEST_STAGE)

    def resume(self) -> None:
        """Let other threads go on."""
        self._forks -= 1
        self._changed.notify_all()
        self._changed.release()

    def forget_others(self) -> bool:
        """Keep only this thread's work in a child; return whether other threads were at work."""
        thread = threading.get_ident()
        own = {task: other for task, other in self._threads.items() if other == thread}
        is_torn = len(own) < len(self._threads)
        self._changed = threading.Condition()
        self._threads, self._forks = own, 0
        return is_torn


def _keep(lock: Any, kept: set[weakref.ref[Any]]) -> None:
    kept.add(weakref.ref(lock, kept.discard))


def _alive(kept: set[weakref.ref[Any]]) -> list[Any]:
    # Not a WeakSet, because iterating over one fails when another thread adds to it.
    return [lock for lock in (reference() for reference in tuple(kept)) if lock is not None]


_long_locks: set[weakref.ref[Lock]] = set()
_short_locks: set[weakref.ref[threading.Lock]] = set()
_held: list[threading.Lock] = []
_work = _Work()
_is_torn = _collects = False

begin, end, resting = _work.begin, _work.end, _work.resting


@contextlib.contextmanager
def at_work() -> Iterator[None]:
    """Make forks wait until this context ends."""
    task = object()
    begin(task)
    try:
        yield
    finally:
        end(task)


def is_torn() -> bool:
    """Whether this process was forked in the middle of a build, so that it can no longer build."""
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
            "this process was forked while another thread was compiling and did not stop in time",
            "Start processes by spawn or forkserver, or fork while no thread compiles; programs "
            "that were compiled before the fork still run.",
        )


def _before() -> None:
    global _collects  # noqa: PLW0603
    _work.pause()
    # A garbage collection could run code that takes one of these locks.
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

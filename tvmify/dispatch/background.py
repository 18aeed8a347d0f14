"""One thread, and one process at low priority, that build what no call waits for."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from tvmify.dispatch.allowance import allowance
from tvmify.dispatch.building import Builder
from tvmify.dispatch.reasons import without_frames

#: How many builds may wait; calls that want further ones go on in eager, and ask again.
MOST_WAITING = 64
#: Seconds without a job after which the process that compiles ends.
_IDLE = 60.0
#: Seconds between two looks at whether a build may begin.
_LOOK = 0.1
#: What is added to the thread's niceness. Not more: a thread that gets no processor while it holds
#: the interpreter's lock keeps the calls waiting, too (docs/measurements/threads.md).
_NICENESS = 5


class Stopped(BaseException):
    """The process ends: what is being built is given up. Not for `except Exception`."""


class Job:
    """A build that is to come, or its outcome.

    Parameters
    ----------
    build
        Returns the result; takes a function to call between two of its stages, which may raise
        `Stopped`.

    Attributes
    ----------
    is_over
        Whether there will be no more of it. If then there is neither result nor error, it was given
        up, and is to be done again.
    result, error
        What ``build`` returned, or raised.
    """

    def __init__(self, build: Callable[[Callable[[], None]], Any]) -> None:
        self._build: Callable[[Callable[[], None]], Any] | None = build
        self.is_over = False
        self.result: Any = None
        self.error: Exception | None = None

    def run(self, between: Callable[[], None]) -> None:
        """Build; `Stopped` leaves it as it was."""
        assert self._build is not None
        try:
            self.result = self._build(between)
        except Exception as error:  # of any kind: it is raised where the result is asked for
            self.error = without_frames(error)
        self.give_up()

    def give_up(self) -> None:
        """Let it be over, as it is now."""
        self._build = None  # which holds a program and its weights
        self.is_over = True


class Worker:
    """Runs jobs one after the other, in a thread that begins with the first.

    It holds jobs weakly: what nobody waits for any more is not begun.

    Parameters
    ----------
    most
        How many jobs may wait.
    """

    def __init__(self, most: int = MOST_WAITING) -> None:
        self._most = most
        self._jobs: deque[weakref.ref[Job]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._running: Job | None = None
        self._is_stopped = False
        self.builder = Builder()

    def has_room(self) -> bool:
        """Whether `submit` would take a job."""
        return len(self._jobs) < self._most and not self._is_stopped

    def submit(self, job: Job) -> bool:
        """Queue a job; return whether there was room for it."""
        with self._changed:
            if not self.has_room():
                return False
            self._jobs.append(weakref.ref(job))
            if self._thread is None:
                # A daemon, so that the interpreter gets to `stop`, which waits for its end.
                self._thread = threading.Thread(target=self._run, name="tvmify", daemon=True)
                self._thread.start()
                atexit.register(self.stop)
            self._changed.notify_all()
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until there is nothing to do; return whether that is so."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not (self._jobs or self._running), timeout=timeout
            )

    def stop(self) -> None:
        """Begin no more jobs, and give up the present one: wait for the end of its stage."""
        with self._changed:
            self._is_stopped = True
            self._jobs.clear()
            self._changed.notify_all()
        self.builder.stop()
        if self._thread not in (None, threading.current_thread()):
            self._thread.join()

    def abandon(self) -> None:
        """Give up all jobs, in a forked child, whose calls submit them to a worker of its own."""
        self._changed, self._thread, self._is_stopped = threading.Condition(), None, True
        self.builder.abandon()
        for job in [self._running, *(reference() for reference in self._jobs)]:
            if job is not None:
                job.give_up()

    # ------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # a system without either
            present = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), present + _NICENESS)
        while (job := self._next()) is not None:
            with contextlib.suppress(Stopped):
                job.run(self._between)
            del job
            with self._changed:
                self._running = None
                self._changed.notify_all()
        self.builder.end()

    def _next(self) -> Job | None:
        with self._changed:
            while not self._is_stopped:
                if not self._jobs:
                    if not self._changed.wait(_IDLE):
                        self.builder.end()
                elif not allowance.has_room():  # for what is done in this process
                    self._changed.wait(_LOOK)
                elif (job := self._jobs.popleft()()) is not None:
                    self._running = job
                    return job
                else:
                    self._changed.notify_all()
            return None

    def _between(self) -> None:
        if self._is_stopped:
            raise Stopped


#: The one of this process.
worker = Worker()


def has_room() -> bool:
    """Whether the worker of this process, whichever that is by now, would take a job."""
    return worker.has_room()


def builder_here() -> Builder | None:
    """Return what compiles for this thread in another process; None if it does so itself."""
    is_worker = threading.current_thread() is worker._thread
    return worker.builder if is_worker else None


def _after_fork_in_child() -> None:
    global worker
    before, worker = worker, Worker()
    before.abandon()


os.register_at_fork(after_in_child=_after_fork_in_child)

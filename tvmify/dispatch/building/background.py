"""Builds that no call waits for: one thread, and one process with low priority."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from tvmify.dispatch.building import Builder
from tvmify.dispatch.building.allowance import allowance
from tvmify.dispatch.reasons import without_frames
from tvmify.errors import TvmifyWarning
from tvmify.system.stack import large_stacks

_LOG = logging.getLogger(__name__)

#: The most builds in the queue; calls that need another one run in eager, and try again later.
MOST_WAITING = 64
#: Seconds without a job after which the compiler process ends.
_IDLE = 60.0
#: Seconds between two checks whether a build may begin.
_LOOK = 0.1
#: What is added to the thread's niceness. Not more: a thread that holds the interpreter's lock, and
#: is not scheduled, makes calls wait (docs/measurements/threads.md).
_NICENESS = 5


class Stopped(BaseException):
    """The process ends, so the build is abandoned. `except Exception` must not catch this."""


class Job:
    """A build that is queued, running or done.

    Parameters
    ----------
    build
        Returns the result. Its argument is a function to call between stages, which may raise
        `Stopped`.

    Attributes
    ----------
    is_over
        Whether it has ended. Without a result or an error, it was abandoned, and has to be done
        again.
    result, error
        What ``build`` returned or raised.
    """

    def __init__(self, build: Callable[[Callable[[], None]], Any]) -> None:
        self._build: Callable[[Callable[[], None]], Any] | None = build
        self.is_over = False
        self.result: Any = None
        self.error: Exception | None = None

    def run(self, between: Callable[[], None]) -> None:
        """Build; `Stopped` leaves the job unchanged."""
        assert self._build is not None
        try:
            self.result = self._build(between)
        except TvmifyWarning as warning:  # an error by the user's filters, but not of a call
            _LOG.warning("%s", warning)
        except Exception as error:  # of any kind: the call that needs the result raises it
            self.error = without_frames(error)
        self.give_up()

    def give_up(self) -> None:
        """End the job without a result."""
        self._build = None  # which holds a program and its weights
        self.is_over = True


class Worker:
    """Runs jobs in order, in a thread that starts with the first one.

    It holds jobs weakly, so it starts none that is no longer needed.

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
        """Whether `submit` would accept a job."""
        return len(self._jobs) < self._most and not self._is_stopped

    def submit(self, job: Job) -> bool:
        """Queue a job; return whether there was room for it."""
        with self._changed:
            if not self.has_room():
                return False
            if self._thread is None:
                # A daemon, so that the interpreter calls `stop`, which waits for the thread.
                thread = threading.Thread(target=self._run, name="tvmify", daemon=True)
                with large_stacks():
                    thread.start()  # raises if there may be no more threads: the next job tries
                self._thread = thread
                atexit.register(self.stop)
            self._jobs.append(weakref.ref(job))
            self._changed.notify_all()
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all jobs are done; return whether they are."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not (self._jobs or self._running), timeout=timeout
            )

    def stop(self) -> None:
        """Start no more jobs, and abandon the current one at the end of its stage."""
        with self._changed:
            self._is_stopped = True
            self._jobs.clear()
            self._changed.notify_all()
        self.builder.stop()
        if self._thread not in (None, threading.current_thread()):
            self._thread.join()
        if getattr(sys, "last_type", None) is KeyboardInterrupt:
            # CPython ends by SIGINT then, but forgets it when any thread executes code from a text,
            # as an import of a dataclass does.
            with contextlib.suppress(KeyboardInterrupt):
                exec("raise KeyboardInterrupt")

    def abandon(self) -> None:
        """Abandon all jobs in a forked child, whose calls submit them to its own worker."""
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
        # A compiler process that has ended must not end this one, whose SIGPIPE may do its default.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPIPE])
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


#: The worker of this process.
worker = Worker()


def has_room() -> bool:
    """Whether the current worker of this process would accept a job."""
    return worker.has_room()


def builder_here() -> Builder | None:
    """Return the process that compiles for this thread; None if the thread compiles."""
    is_worker = threading.current_thread() is worker._thread
    return worker.builder if is_worker else None


def _after_fork_in_child() -> None:
    global worker
    before, worker = worker, Worker()
    before.abandon()


os.register_at_fork(after_in_child=_after_fork_in_child)

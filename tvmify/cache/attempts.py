"""Operations that may fail or hang: each has a timeout, and a failure is followed by a pause."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

Result = TypeVar("Result")


class Paused(Exception):
    """The operation was skipped: the last attempt failed recently, or is still hanging."""


class Attempts:
    """Runs each operation in its own thread, with a timeout.

    Parameters
    ----------
    timeout
        Seconds to wait for one operation. Python cannot kill a thread: one that takes longer keeps
        running, and nothing else is attempted until it ends.
    pause
        Seconds to wait after a failure before the next attempt.
    clock
        Returns seconds.
    """

    def __init__(
        self, timeout: float, pause: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._timeout = timeout
        self._pause = pause
        self._clock = clock
        self._resumes = float("-inf")
        self._hanging: threading.Thread | None = None

    def run(self, operation: Callable[[], Result]) -> Result:
        """Run an operation and return its result.

        Raises
        ------
        Paused
            The operation was skipped.
        TimeoutError
            The operation timed out.
        Exception
            Whatever the operation raised.
        """
        # After a fork, a thread that hung in the parent is not alive here.
        if self._clock() < self._resumes or (self._hanging and self._hanging.is_alive()):
            raise Paused
        outcome: Future[Result] = Future()
        # A daemon thread: the interpreter would wait for a pool's threads at exit.
        thread = threading.Thread(
            target=_settle, args=(outcome, operation), name="tvmify remote cache", daemon=True
        )
        try:
            thread.start()
            if not wait([outcome], self._timeout).done:
                self._hanging = thread
                raise TimeoutError(f"no answer in {self._timeout:g} s")
            return outcome.result()
        except Exception:
            self._resumes = self._clock() + self._pause
            raise


def _settle(outcome: Future[Result], operation: Callable[[], Result]) -> None:
    try:
        outcome.set_result(operation())
    except Exception as error:
        outcome.set_exception(error)
    except BaseException as error:  # a Rust panic is not an Exception
        outcome.set_exception(RuntimeError(repr(error)))

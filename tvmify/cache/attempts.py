"""Attempts at what may fail or hang: each has bounded time, and a fault is followed by a pause."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

Result = TypeVar("Result")


class Paused(Exception):
    """Nothing was attempted: the last attempt failed a short while ago, or still hangs."""


class Attempts:
    """Runs operations in threads of their own, and waits for each a bounded time.

    Parameters
    ----------
    timeout
        Seconds to wait for one operation. Python cannot end a thread: one that takes longer goes
        on alone, and nothing is attempted until it has ended.
    pause
        Seconds after a failure during which nothing is attempted.
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
        """Return what an operation returns.

        Raises
        ------
        Paused
            It was not run.
        TimeoutError
            It takes too long.
        Exception
            What it raised.
        """
        # A thread that hung when this process was forked from another is not alive in this one.
        if self._clock() < self._resumes or (self._hanging and self._hanging.is_alive()):
            raise Paused
        outcome: Future[Result] = Future()
        # A daemon: a pool's threads would be waited for when the interpreter ends.
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
    except BaseException as error:  # a panic of a library in Rust is none of Exception
        outcome.set_exception(RuntimeError(repr(error)))

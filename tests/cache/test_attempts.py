from __future__ import annotations

import contextlib
import threading

import pytest

from tvmify.cache.attempts import Attempts, Paused


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def fail() -> None:
    raise OSError("no network")


def test_operation_result_is_returned() -> None:
    attempts = Attempts(10, 10)
    assert attempts.run(lambda: 3) == 3
    assert attempts.run(threading.current_thread) is not threading.current_thread()


def test_failure_suspends_attempts() -> None:
    clock = Clock()
    attempts = Attempts(10, 60, clock)
    with pytest.raises(OSError, match="no network"):
        attempts.run(fail)
    clock.now = 59
    with pytest.raises(Paused):
        attempts.run(lambda: 3)
    clock.now = 60
    assert attempts.run(lambda: 3) == 3


def test_hanging_operation_is_abandoned() -> None:
    clock, begun, ended = Clock(), threading.Event(), threading.Event()
    attempts = Attempts(0, 60, clock)
    hanging: list[threading.Thread] = []

    def hang() -> None:
        hanging.append(threading.current_thread())
        begun.set()
        ended.wait()

    with pytest.raises(TimeoutError):
        attempts.run(hang)
    assert begun.wait(10)
    clock.now = 100
    for _ in range(3):
        with pytest.raises(Paused):
            attempts.run(hang)
    ended.set()
    (thread,) = hanging
    assert thread.daemon  # the interpreter can end without it
    thread.join()
    attempted = threading.Event()
    with contextlib.suppress(TimeoutError):
        attempts.run(attempted.set)
    assert attempted.wait(10)


def test_not_even_a_panic_passes() -> None:
    class PanicException(BaseException):
        """The exception that Rust extension modules raise."""

    def panic() -> None:
        raise PanicException("index out of bounds")

    with pytest.raises(RuntimeError, match="index out of bounds"):
        Attempts(10, 10).run(panic)

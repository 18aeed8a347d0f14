"""Timers for the examples."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def timed(call: Callable[[], Result]) -> tuple[Result, float]:
    """Return the result of a call, and its milliseconds."""
    start = time.perf_counter()
    result = call()
    return result, (time.perf_counter() - start) * 1e3


def medians(*calls: Callable[[], object], rounds: int = 15) -> list[float]:
    """Return the median milliseconds of each call.

    The calls take turns, so that noise on the machine affects all of them alike.
    """
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for taken, call in zip(times, calls, strict=True):
            taken.append(timed(call)[1])
    return [statistics.median(taken) for taken in times]

"""The results of the benchmark, and the ratios that the goals limit."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.contenders import BASELINE, CONTENDERS, OURS

#: The peer whose first call is compared with ours.
SLOW_STARTER = "freezing"


@dataclass
class Result:
    """One contender on one model; numbers are None if it could not run.

    Attributes
    ----------
    bursts
        For each round: median and minimum milliseconds of a call, and the number of calls.
    first_call_s
        Seconds from the module to the first result, with cold caches.
    peak_mib
        Peak memory of the process.
    error
        Largest error over largest value, against float64.
    reason
        Why the contender could not run.
    remark
        A note, such as why tvmify ran the module in eager PyTorch.
    """

    model: str
    threads: int
    contender: str
    bursts: list[dict[str, Any]] = field(default_factory=list)
    first_call_s: float | None = None
    peak_mib: float | None = None
    error: float | None = None
    reason: str = ""
    remark: str = ""

    @property
    def median_ms(self) -> float | None:
        """The median of the rounds' medians."""
        return statistics.median(b["median_ms"] for b in self.bursts) if self.bursts else None

    @property
    def minimum_ms(self) -> float | None:
        """The fastest call of all."""
        return min((b["minimum_ms"] for b in self.bursts), default=None)

    def record(self) -> dict[str, Any]:
        """Return everything in a form that JSON can store."""
        summary = {"median_ms": self.median_ms, "minimum_ms": self.minimum_ms}
        return dataclasses.asdict(self) | summary


class Row:
    """All contenders on one model with one number of threads."""

    def __init__(self, results: Iterable[Result]) -> None:
        self.results = {result.contender: result for result in results}
        first = next(iter(self.results.values()))
        self.model, self.threads = first.model, first.threads

    def median_ms(self, contender: str) -> float | None:
        """Return a contender's time, or None if it has none."""
        result = self.results.get(contender)
        return result.median_ms if result else None

    @property
    def best_peer(self) -> str | None:
        """The fastest contender except tvmify."""
        times = {name: self.median_ms(name) for name in CONTENDERS if name != OURS}
        measured = {name: taken for name, taken in times.items() if taken is not None}
        return min(measured, key=lambda name: measured[name], default=None)

    @property
    def to_best_peer(self) -> float | None:
        """Our time over the best peer's."""
        return _ratio(self.median_ms(OURS), self.median_ms(self.best_peer or ""))

    @property
    def to_eager(self) -> float | None:
        """Our time over eager PyTorch's."""
        return _ratio(self.median_ms(OURS), self.median_ms(BASELINE))

    @property
    def first_call(self) -> float | None:
        """The time of our first call relative to Inductor with freezing."""
        ours, theirs = self.results.get(OURS), self.results.get(SLOW_STARTER)
        if ours is None or theirs is None:
            return None
        return _ratio(ours.first_call_s, theirs.first_call_s)


def rows(results: Iterable[Result]) -> list[Row]:
    """Group results by model and number of threads, in the order of the results."""
    groups: dict[tuple[str, int], list[Result]] = {}
    for result in results:
        groups.setdefault((result.model, result.threads), []).append(result)
    return [Row(group) for group in groups.values()]


def geometric_mean(ratios: Iterable[float | None]) -> float | None:
    """Return the geometric mean of the known ratios, or None if there are none."""
    known = [math.log(ratio) for ratio in ratios if ratio is not None]
    return math.exp(statistics.fmean(known)) if known else None


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or theirs is None else ours / theirs

"""Workers take turns, and those that fail are dropped."""

from __future__ import annotations

from typing import Any

from benchmarks.process import WorkerError, take_turns
from benchmarks.results import Result


class Worker:
    """A fake worker that fails in the burst with this number, if any."""

    def __init__(self, name: str, order: list[str], fails_at: int | None = None) -> None:
        self.name, self.order, self.fails_at = name, order, fails_at

    def burst(self) -> dict[str, Any]:
        self.order.append(self.name)
        if self.order.count(self.name) == self.fails_at:
            raise WorkerError("the process died: SIGKILL")
        return {"median_ms": 1.0, "minimum_ms": 0.5, "calls": 5, "peak_mib": 100.0}


def test_contenders_alternate_and_failures_drop_out() -> None:
    order: list[str] = []
    begun: list[int] = []
    workers: dict[str, Any] = {"eager": Worker("eager", order), "gone": Worker("gone", order, 2)}
    results = {name: Result("mlp_1", 2, name) for name in workers}
    take_turns(workers, results, 3, begun.append)
    assert order == ["eager", "gone", "eager", "gone", "eager"]
    assert begun == [0, 1, 2]
    assert len(results["eager"].bursts) == 3 and results["eager"].peak_mib == 100.0
    assert "peak_mib" not in results["eager"].bursts[0]
    assert len(results["gone"].bursts) == 1 and "SIGKILL" in results["gone"].reason

"""Times calls on an NVIDIA GPU; needs only PyTorch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

BURST = 0.5  # seconds
FEWEST_CALLS = 20


def burst(call: Callable[[], Any], seconds: float = BURST) -> dict[str, Any]:
    """Call for some time; return milliseconds from call to result, by the GPU's clock.

    Each call starts on an idle GPU, so that the host's time to launch it counts, too.
    """
    call()
    torch.cuda.synchronize()
    taken: list[float] = []
    begin = time.perf_counter()
    while len(taken) < FEWEST_CALLS or time.perf_counter() - begin < seconds:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end))
    return {"median_ms": statistics.median(taken), "minimum_ms": min(taken), "calls": len(taken)}

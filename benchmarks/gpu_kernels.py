"""The kernels that a call launches on an NVIDIA GPU, and the time of each.

    python -m benchmarks.gpu_kernels CASE [--contenders eager,tvmify] [--output FILE]

Each contender runs in its own process. Times are GPU times from PyTorch's profiler, also for
kernels that a CUDA graph launches. `benchmarks.gpu` includes the host's time between them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler_util import DeviceType

from benchmarks.gpu_worker import CASES, CONTENDERS, loaded
from benchmarks.models import chosen

CALLS = 20


def main() -> None:
    """Print a table for each contender; write them all as JSON."""
    parser = argparse.ArgumentParser(description="The kernels of a call on an NVIDIA GPU.")
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--contenders", default="*", help="names or patterns (default: all)")
    parser.add_argument(
        "--seconds", type=float, default=120, help="time limit per contender (default: 120)"
    )
    parser.add_argument("--output", type=Path, help="write the kernels to this JSON file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(profiled(given.case, given.one)))
        return
    measured: dict[str, Any] = {}
    for contender in chosen(given.contenders, list(CONTENDERS)):
        measured[contender] = _in_process(given.case, contender, given.seconds)
        print(rendered(given.case, contender, measured[contender]), flush=True)
        if given.output is not None:
            given.output.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")


def _in_process(case: str, contender: str, seconds: float) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_kernels", case]
    with tempfile.TemporaryFile("w+") as log:
        try:
            done = subprocess.run(
                [*command, "--one", contender],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"reason": f"no result in {seconds:.0f} s"}
        log.seek(0)
        if done.returncode:
            return {"reason": log.read()[-2000:]}
    return json.loads(done.stdout.splitlines()[-1])


def profiled(case: str, contender: str) -> dict[str, Any]:
    """Return the kernels of a call: how often each is launched, and its total microseconds."""
    with torch.inference_mode():
        module, args = loaded(CASES[case])
        call = CONTENDERS[contender](module, args)
        for _ in range(5):  # compiled, tuned, captured
            call()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(CALLS):
                call()
            torch.cuda.synchronize()
    counts, times = defaultdict[str, int](int), defaultdict[str, float](float)
    for event in profile.events() or ():
        if event.device_type == DeviceType.CUDA:
            counts[event.name] += 1
            times[event.name] += event.device_time_total
    kernels = {
        name: {"launches": counts[name] / CALLS, "us": times[name] / CALLS}
        for name in sorted(times, key=times.__getitem__, reverse=True)
    }
    return {"us": sum(times.values()) / CALLS, "kernels": kernels}


def rendered(case: str, contender: str, measured: dict[str, Any]) -> str:
    """Return the result of `profiled` as a table, or the reason why there is none."""
    if "reason" in measured:
        return f"{case}, {contender}: {measured['reason']}"
    kernels = measured["kernels"]
    launches = sum(kernel["launches"] for kernel in kernels.values())
    lines = [f"{case}, {contender}: {measured['us']:.1f} us in {launches:.0f} kernels"]
    lines += [
        f"{kernel['us']:9.1f} us {kernel['launches']:6.1f} × {name[:100]}"
        for name, kernel in kernels.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()

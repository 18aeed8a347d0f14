"""The process of one contender on one model: it prepares, then measures on request.

    python -m benchmarks.worker MODEL CONTENDER THREADS FOLDER

Its first line on standard output reports the preparation. For each line of standard input, it
measures one burst of calls and answers with a line. All output is JSON.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch
from torch.utils import _pytree as pytree

from benchmarks.contenders import CONTENDERS, Setting, first_line
from benchmarks.models import build
from benchmarks.reference import EXPORT, ONNX, OUTPUTS

MILLISECONDS = 1e3
WARM_UP = 0.05  # seconds, for caches and clock frequencies after other processes ran
BURST = 0.3  # seconds
FEWEST_CALLS = 5


def prepare(model: str, name: str, threads: int, folder: Path) -> tuple[Callable[[], Any], dict]:
    """Return the call of a contender, and a report of its first call."""
    torch.set_num_threads(threads)
    module, args = build(model)
    setting = Setting(threads, folder / ONNX)
    if (folder / EXPORT).exists():
        export = json.loads((folder / EXPORT).read_text(encoding="utf-8"))
        setting.export_seconds = export["seconds"]
        if export["reason"] and name == "onnxruntime":
            raise RuntimeError(f"no ONNX file: {export['reason']}")
    contender = CONTENDERS[name]
    start = time.perf_counter()
    call = contender.prepare(module, args, setting)
    outputs = call()
    first = time.perf_counter() - start + setting.used_onnx * setting.export_seconds
    error = largest_error(outputs, torch.load(folder / OUTPUTS))
    return call, {"first_call_s": first, "error": error, "remark": setting.remark()}


def largest_error(outputs: Any, references: list[torch.Tensor]) -> float:
    """Return the largest error over the largest value, for the output where it is largest.

    Raises
    ------
    ValueError
        The number or the shapes of the outputs differ from the reference.
    """
    leaves = [torch.as_tensor(leaf) for leaf in pytree.tree_leaves(outputs)]
    if [leaf.shape for leaf in leaves] != [reference.shape for reference in references]:
        raise ValueError("the outputs are not of the reference's number and shapes")
    errors = [
        float((leaf.double() - reference).abs().max() / reference.abs().max())
        for leaf, reference in zip(leaves, references, strict=True)
    ]
    return max(errors)


def burst(call: Callable[[], Any], seconds: float = BURST) -> dict[str, Any]:
    """Call for some time, and at least a few times; return the milliseconds of calls."""
    until = time.perf_counter() + WARM_UP
    call()
    while time.perf_counter() < until:
        call()
    taken: list[float] = []
    begin = time.perf_counter()
    while len(taken) < FEWEST_CALLS or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        call()
        taken.append((time.perf_counter() - start) * MILLISECONDS)
    return {"median_ms": statistics.median(taken), "minimum_ms": min(taken), "calls": len(taken)}


def serve(model: str, name: str, threads: int, folder: Path, answers: TextIO) -> None:
    """Prepare, then answer each line of standard input."""

    def answer(record: dict[str, Any]) -> None:
        print(json.dumps(record), file=answers, flush=True)

    with getattr(torch, CONTENDERS[name].mode)():
        try:
            call, report = prepare(model, name, threads, folder)
        except Exception as error:  # a failure is a blank with its reason
            answer({"reason": f"{type(error).__name__}: {first_line(error)}"})
            return
        answer(report)
        for _ in sys.stdin:
            measured = burst(call)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # from kilobytes
            answer(measured | {"peak_mib": peak})


def main() -> None:
    """Reserve standard output for the answers: compilers print to it."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    model, name, threads, folder = sys.argv[1:]
    serve(model, name, int(threads), Path(folder), answers)


if __name__ == "__main__":
    main()

"""Requests of random sizes: what they cost the first time, and once everything is compiled.

    python -m benchmarks.requests [--models minilm,bert_4] [--requests 200] [--rounds 3]

Each contender gets the same requests in a process of its own. The first pass is from cold caches.
Further passes are made in turns. Times are CPU seconds of the process and its children, since
compilers use several processes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.process import Worker, WorkerError

if TYPE_CHECKING:
    from torch import Tensor, nn

    Run = Callable[[tuple[Tensor, ...]], Any]

MODELS = ("minilm", "bert_4")
BATCHES = (1, 16)
LENGTHS = (5, 200)
SEED = 1


def sizes(count: int) -> list[tuple[int, int]]:
    """Return the batch and the length of each request, the same in every process."""
    draw = random.Random(SEED)
    return [(draw.randint(*BATCHES), draw.randint(*LENGTHS)) for _ in range(count)]


def _model(name: str) -> nn.Module:
    import torch
    import transformers

    from benchmarks import models

    if name == "minilm":
        return models.build("minilm_16")[0]
    torch.manual_seed(SEED)
    config = transformers.BertConfig(num_hidden_layers=4)
    from benchmarks.models.transformer import Hidden

    return Hidden(transformers.BertModel(config)).eval()


def _eager(module: nn.Module) -> Run:
    return lambda request: module(*request)


def _inductor(module: nn.Module) -> Run:
    import torch

    compiled = torch.compile(module, dynamic=True)
    return lambda request: compiled(*request)


def _openvino(module: nn.Module) -> Run:
    import openvino as ov  # pyright: ignore[reportMissingImports]
    import torch

    example = tuple(torch.ones(2, 16, dtype=torch.long) for _ in range(2))
    with torch.no_grad():
        model = ov.convert_model(module, example_input=example)
    model.reshape({i: [-1, -1] for i in range(len(model.inputs))})
    hints = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    request = ov.Core().compile_model(model, "CPU", hints).create_infer_request()
    return lambda given: list(request.infer([x.numpy() for x in given]).values())


def _tvmify(module: nn.Module) -> Run:
    from tvmify import tvmify

    fast: Any = tvmify(module, dynamic=None, compare=False, progress=False)

    def run(request: tuple[Tensor, ...]) -> Any:
        return fast(*request)

    run.programs = lambda: fast.cache_info().builds  # type: ignore[attr-defined]
    return run


CONTENDERS: dict[str, Callable[[nn.Module], Run]] = {
    "eager": _eager,
    "inductor": _inductor,
    "openvino": _openvino,
    "tvmify": _tvmify,
}


def work(name: str, model: str, count: int, answers: Any) -> None:
    """Make the first pass, then one for each line of standard input."""
    import torch

    torch.set_num_threads(1)
    requests = []
    for batch, length in sizes(count):
        mask = torch.ones(batch, length, dtype=torch.long)
        mask[:, length - length // 4 :] = 0
        tokens = torch.randint(1000, (batch, length), generator=torch.Generator().manual_seed(SEED))
        requests.append((tokens, mask))
    # Inductor folds nothing under inference_mode.
    with torch.no_grad():
        start = _cpu()
        run = CONTENDERS[name](_model(model))
        for request in requests:
            run(request)
        programs = getattr(run, "programs", lambda: None)()
        print(json.dumps({"seconds": _cpu() - start, "programs": programs}), file=answers)
        answers.flush()
        for _ in sys.stdin:
            start = time.process_time()
            for request in requests:
                run(request)
            answers.write(json.dumps({"seconds": time.process_time() - start}) + "\n")
            answers.flush()


def _cpu() -> float:
    kinds = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    usages = [resource.getrusage(kind) for kind in kinds]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def compare(model: str, count: int, rounds: int) -> None:
    """Print a line for each contender."""
    print(f"\n{model}: {count} requests, batch {BATCHES}, length {LENGTHS}, CPU seconds")
    print(f"{'':12} {'first pass':>11} {'warm pass':>11} {'programs':>9}")
    with tempfile.TemporaryDirectory() as folder:
        workers: dict[str, Worker] = {}
        first: dict[str, dict[str, Any]] = {}
        warm: dict[str, list[float]] = {}
        try:
            for name in CONTENDERS:
                command = [sys.executable, "-m", "benchmarks.requests", "work", name, model]
                worker = Worker([*command, str(count)], Path(folder), name, threads=1)
                try:
                    first[name], warm[name] = worker.answer(), []
                    workers[name] = worker
                except WorkerError as error:
                    print(f"{name:12} {error}")
                    worker.__exit__(None, None, None)
            for _ in range(rounds):
                for name, worker in workers.items():
                    warm[name].append(worker.burst()["seconds"])
        finally:
            for worker in workers.values():
                worker.__exit__(None, None, None)
    for name, seconds in warm.items():
        programs = first[name]["programs"]
        least, total = statistics.median(seconds), first[name]["seconds"]
        print(f"{name:12} {total:11.1f} {least:11.2f} {'' if programs is None else programs:>9}")


def main() -> None:
    """Be the driver, or one of the contenders."""
    if sys.argv[1:2] == ["work"]:
        answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # compilers print
        work(sys.argv[2], sys.argv[3], int(sys.argv[4]), answers)
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    for model in given.models.split(","):
        compare(model, given.requests, given.rounds)


if __name__ == "__main__":
    main()

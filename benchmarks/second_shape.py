"""The cost of the first call with a second shape, which builds a program for any size.

    python -m benchmarks.second_shape [--models minilm_16,gpt2_prefill] [--rounds 1]

Times are CPU seconds over all threads, in new processes with empty caches. One process calls a
model with two sizes and ``dynamic=None``, another with ``dynamic=False``, whose second program is
for that size alone. The first call also loads TVM.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from typing import Any

from benchmarks import models
from benchmarks.process import answer_of
from benchmarks.sizes import CASES, resized

#: The default models.
USUAL = "minilm_16,bert_base,gpt2_prefill,vit_base"


def work(model: str, programs: str) -> list[float]:
    """Run in the new process: return the CPU seconds of the first call of each of two sizes.

    `programs` says what the second call builds: a program for ``"any"`` size, or for ``"each"``.
    """
    import torch

    from tvmify import tvmify

    case = CASES[model]
    module, arguments = models.build(model)
    # `strict` makes sure that compiled code is timed, even on a busy machine.
    dynamic = None if programs == "any" else False
    fast: Any = tvmify(module, dynamic=dynamic, compare=False, strict=True, progress=False)
    taken = []
    with torch.inference_mode():
        for size in case.sizes[1:3]:
            inputs = resized(arguments, case.axes, size)
            start = time.process_time()
            fast(*inputs)
            taken.append(time.process_time() - start)
    serves_any = "serves sizes with" in fast.explain()
    if fast.cache_info().builds != 2 or serves_any != (programs == "any"):
        raise RuntimeError(f"not the programs that were to be timed:\n{fast.explain()}")
    return taken


def run(model: str, programs: str) -> list[float]:
    """Measure in a new process, and return its result."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.second_shape"]
        environment = {"TVMIFY_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
        return answer_of([*command, "--models", model, "--work", programs], environment)


def main() -> None:
    """Print a line for each model: medians over the rounds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.second_shape", description=__doc__)
    parser.add_argument("--models", default=USUAL, help="names or patterns")
    parser.add_argument("--rounds", type=int, default=1, help="number of processes of each kind")
    parser.add_argument("--work", choices=("each", "any"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    names = models.chosen(given.models, list(CASES))
    if given.work is not None:
        print(json.dumps(work(names[0], given.work)))
        return
    print(f"{'CPU seconds':14} {'first call':>10} {'static':>8} {'any size':>8}  ratio to each")
    for name in names:
        firsts, statics, anys = [], [], []
        for _ in range(given.rounds):
            for programs, seconds in (("each", statics), ("any", anys)):
                first, second = run(name, programs)
                firsts.append(first)
                seconds.append(second)
        first, static, any_size = map(statistics.median, (firsts, statics, anys))
        print(
            f"{name:14} {first:10.2f} {static:8.2f} {any_size:8.2f}  "
            f"{any_size / first:.2f} {any_size / static:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()

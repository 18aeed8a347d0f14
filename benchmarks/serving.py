"""One saved model under load: throughput with 1 to 8 threads, right answers, constant memory.

    python -m benchmarks.serving [--calls 100000] [--threads 1 2 4 8] [--size 32]

Requests are independent and have several signatures; each answer is compared with that of a single
thread. For each number of threads, ``--calls`` calls run in total. PyTorch uses one thread, as in a
server with a thread for each request. At the end, load_state_dict runs during the calls: each
answer has to match one of the two sets of weights.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import resource
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import tvmify

_SAMPLES = 100


def model() -> nn.Module:
    """Return a network whose kernels take 50 µs for an image of 32 × 32."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 8)]
    return nn.Sequential(*layers).eval()


def requests(size: int = 32, count: int = 8) -> list[Tensor]:
    """Return images of this size, with two alternating signatures."""
    return [torch.randn(1 + i % 2, 3, size, size) for i in range(count)]


def resident() -> int:
    """Return the resident memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Load(NamedTuple):
    """The results of many calls."""

    seconds: float
    wrong: int
    memory: list[int]  # bytes, over the calls

    @property
    def growth(self) -> float:
        """Growth of memory over the last 90 % of the calls, relative to their start."""
        late = self.memory[len(self.memory) // 10 :]
        return max(late) / late[0] - 1


def under_load(
    call: Callable[[Tensor], Tensor],
    inputs: Sequence[Tensor],
    accepted: Sequence[Sequence[Tensor]],
    threads: int,
    calls: int,
) -> Load:
    """Call from several threads at once; ``accepted`` has the right answers for each input."""
    each = calls // threads
    start = threading.Barrier(threads + 1)
    memory: list[int] = []

    def work(number: int) -> int:
        wrong = 0
        start.wait()
        for turn in range(each):
            index = (number + turn) % len(inputs)
            y = call(inputs[index])
            wrong += not any(torch.equal(y, right) for right in accepted[index])
            if number == 0 and turn % max(1, each // _SAMPLES) == 0:
                memory.append(resident())
        return wrong

    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(_as_server, work, number) for number in range(threads)]
        start.wait()
        began = time.perf_counter()
        wrong = sum(future.result() for future in futures)
        return Load(time.perf_counter() - began, wrong, memory)


def _as_server(work: Callable[[int], int], number: int) -> int:
    torch.set_num_threads(1)  # both settings are per thread
    with torch.inference_mode():
        return work(number)


class Reloading:
    """A context in which another thread loads the sets of weights in turn."""

    def __init__(self, loaded: nn.Module, weights: Sequence[dict[str, Tensor]]) -> None:
        self._loaded, self._weights = loaded, weights
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.loads = 0

    def _run(self) -> None:
        for weights in itertools.cycle(self._weights):
            if self._over.wait(0.001):
                return
            self._loaded.load_state_dict(weights)
            self.loads += 1

    def __enter__(self) -> Reloading:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def two_sets(loaded: nn.Module) -> list[dict[str, Tensor]]:
    """Return two sets of weights; a mixture of them gives neither set's answers."""
    first = {name: value.clone() for name, value in loaded.state_dict().items()}
    return [first, {name: value * 2 + 1 for name, value in first.items()}]


def answers(
    loaded: nn.Module, inputs: Sequence[Tensor], sets: Sequence[dict[str, Tensor]]
) -> list[list[Tensor]]:
    """Return the answer to each input with each set of weights; leave the first set loaded."""
    found: list[list[Tensor]] = [[] for _ in inputs]
    with torch.inference_mode():
        for weights in sets:
            loaded.load_state_dict(weights)
            for right, x in zip(found, inputs, strict=True):
                right.append(loaded(x))
        loaded.load_state_dict(sets[0])
    return found


def _arguments() -> Any:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--size", type=int, default=32, help="height and width of the images")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8])
    return parser.parse_args()


def main() -> int:
    """Print a table; return 1 if an answer is wrong or memory grows."""
    arguments = _arguments()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    inputs, eager = requests(arguments.size), model()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "model.pt")
        tvmify.save(eager, path, signatures=[(inputs[0],), (inputs[1],)])
        loaded = tvmify.load(path, strict=True)
    sets = two_sets(loaded)
    accepted = answers(loaded, inputs, sets)
    old = [right[:1] for right in accepted]

    table = Table("threads", "calls", "wrong", "calls per second", "memory over the last 90 %")
    failed = False
    for threads in arguments.threads:
        under_load(loaded, inputs, old, threads, 2000)  # its threads' first calls
        gc.collect()
        load = under_load(loaded, inputs, old, threads, arguments.calls)
        failed |= load.wrong > 0 or load.growth >= 0.01
        rate = f"{arguments.calls / load.seconds:,.0f}"
        table.add_row(
            str(threads), str(arguments.calls), str(load.wrong), rate, f"{load.growth:+.2%}"
        )
    with Reloading(loaded, sets) as reloading:
        load = under_load(loaded, inputs, accepted, arguments.threads[-1], arguments.calls)
    failed |= load.wrong > 0
    rate = f"{arguments.calls / load.seconds:,.0f}"
    name = f"{arguments.threads[-1]}, beside {reloading.loads} loads of weights"
    table.add_row(name, str(arguments.calls), str(load.wrong), rate, f"{load.growth:+.2%}")
    Console().print(table)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

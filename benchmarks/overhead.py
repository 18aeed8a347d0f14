"""The overhead of a call, measured on tiny models: microseconds, next to eager PyTorch.

    python benchmarks/overhead.py [--inductor] [--json FILE]

Each peer runs in its own process. The processes take turns, one round at a time, so that noise on
the machine affects all of them alike. The table shows medians over the rounds, under
`torch.inference_mode()`.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from tvmify import load, save, tvmify
from tvmify.capture import capture
from tvmify.runtime import Executor, PackedWeights, cpu_features
from tvmify.target import target_for

MICROSECONDS = 1e6
#: Calls of one run of `Loop`.
INTERPRETED_CALLS = 100


class Add(nn.Module):
    """One of the cheapest operators."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of ``x``."""
        return x + 1


class OneLinear(nn.Module):
    """One operator with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(batch, 16)`` from ``(batch, 16)``."""
        return self.layer(x)


class TwentyOperators(nn.Module):
    """Ten linear layers, each with an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(10)))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(batch, 16)`` from ``(batch, 16)``."""
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class Loop(nn.Module):
    """Calls a module many times without going back to Python."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, calls: int) -> Tensor:
        """Return the result of the last call."""
        result = x
        for _ in range(calls):
            result = self.module(x)
        return result


MODELS: dict[str, type[nn.Module]] = {
    "one add": Add,
    "one linear": OneLinear,
    "twenty operators": TwentyOperators,
}
# Goals: the largest time of a call, as a multiple of eager's.
BARS = {"one linear": 1.0, "twenty operators": 0.15}

DECORATED = "tvmify"
PEERS = {
    "eager": "eager",
    DECORATED: "tvmify",
    "executor": "tvmify, the executor alone",
    "saved": "tvmify, a loaded file",
    "interpreted": "tvmify, a loaded file called by TorchScript, as from C++",
    "inductor": "torch.compile",
}


def prepare(peer: str, module: nn.Module, x: Tensor) -> Callable[[], Any]:
    """Compile a module with a peer, and return the function that calls it once."""
    if peer == "eager":
        return lambda: module(x)
    if peer == "inductor":
        compiled = torch.compile(module)
        return lambda: compiled(x)
    if peer == "executor":
        forward = executor(module, x).compiled.forward
        return lambda: forward([x])
    fast = tvmify(module, target="llvm", strict=True, progress=False)
    if peer == DECORATED:
        return lambda: fast(x)
    with tempfile.TemporaryDirectory() as folder:
        save(fast, Path(folder, "model.pt"), example_inputs=x)
        loaded = load(Path(folder, "model.pt"), strict=True)
    if peer == "saved":
        return lambda: loaded(x)
    loop = torch.jit.script(Loop(loaded))
    return lambda: loop(x, INTERPRETED_CALLS)


def executor(module: nn.Module, x: Tensor) -> Executor:
    """Run the stages of a compilation by hand, to get the executor without the dispatcher."""
    from tvmify.compiler import compile  # TVM: the other peers do without it

    program = capture(module, (x,), {})
    artifact = compile(program.export((x,), {}), target_for("llvm", "cpu", cpu_features()))
    made = Executor(artifact)
    weights = dict(module.named_parameters())
    made.bind([weights[name] for name in artifact.weights], PackedWeights())
    return made


@torch.inference_mode()
def work(peer: str, calls: int) -> None:
    """Run as a peer: for each line of standard input, measure one round and print it as JSON."""
    torch.manual_seed(0)
    x = torch.randn(4, 16)
    ready = {}
    for name, model in MODELS.items():
        module = model().eval()
        expected = module(x)
        ready[name] = prepare(peer, module, x)
        result = ready[name]()
        result = result[0] if isinstance(result, list) else result
        torch.testing.assert_close(result, expected)
    each = INTERPRETED_CALLS if peer == "interpreted" else 1
    print("ready", flush=True)
    for _ in sys.stdin:
        taken = {
            name: timeit.timeit(call, number=calls // each) / calls * MICROSECONDS
            for name, call in ready.items()
        }
        print(json.dumps(taken), flush=True)


class Worker:
    """A process that measures one peer."""

    def __init__(self, peer: str, calls: int) -> None:
        command = [sys.executable, __file__, "--peer", peer, "--calls", str(calls)]
        self.peer = peer
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._line()

    def measure(self) -> dict[str, float]:
        """Return the microseconds per call of each model, from one round."""
        assert self.process.stdin is not None
        self.process.stdin.write("round\n")
        self.process.stdin.flush()
        return json.loads(self._line())

    def stop(self) -> None:
        """Let the process end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {PEERS[self.peer]!r} ended; see its error above")
        return line


def measure(peers: list[str], rounds: int, calls: int) -> dict[str, dict[str, float]]:
    """Return the median microseconds per call, for each peer and model."""
    workers = [Worker(peer, calls) for peer in peers]
    for worker in workers:
        worker.measure()  # warms caches and clocks; not counted
    measured: dict[str, dict[str, list[float]]] = {
        peer: {model: [] for model in MODELS} for peer in peers
    }
    for _ in range(rounds):
        for worker in workers:
            for model, taken in worker.measure().items():
                measured[worker.peer][model].append(taken)
    for worker in workers:
        worker.stop()
    return {
        peer: {model: statistics.median(taken) for model, taken in models.items()}
        for peer, models in measured.items()
    }


def show(medians: dict[str, dict[str, float]]) -> None:
    """Print the table, and whether the goals are met."""
    table = Table("µs per call (ratio to eager)", *MODELS, box=None)
    for peer, models in medians.items():
        cells = (
            f"{taken:.1f} ({taken / medians['eager'][name]:.2f})" for name, taken in models.items()
        )
        table.add_row(PEERS[peer], *cells)
    console = Console()
    console.print(table)
    for name, bar in BARS.items():
        for peer in (DECORATED, "saved"):
            ratio = medians[peer][name] / medians["eager"][name]
            verdict = "holds" if ratio <= bar else "does NOT hold"
            console.print(f"{name}, {PEERS[peer]}: {ratio:.2f}; the bar of {bar:.2f} {verdict}")


def main() -> None:
    """Measure, print the table, and write the JSON file if one is given."""
    parser = argparse.ArgumentParser(description="Microseconds per call of tiny models.")
    parser.add_argument("--inductor", action="store_true", help="measure torch.compile as well")
    parser.add_argument("--rounds", type=int, default=21, help="rounds per peer (default: 21)")
    parser.add_argument("--calls", type=int, default=2000, help="calls per round (default: 2000)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the medians to a file")
    parser.add_argument("--peer", choices=PEERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        work(arguments.peer, arguments.calls)
        return

    peers = [peer for peer in PEERS if peer != "inductor" or arguments.inductor]
    medians = measure(peers, arguments.rounds, arguments.calls)
    show(medians)
    if arguments.json:
        record = {
            "unit": "microseconds per call",
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "rounds": arguments.rounds,
            "calls": arguments.calls,
            "medians": medians,
        }
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Calls of real modules whose entries were mutated, each in a process that may crash.

``python -m tests.cache.calls build DIRECTORY`` compiles them; ``… call DIRECTORY FIRST LAST``
mutates their entries by these seeds, and prints the outcomes of the calls as JSON. Each call runs
in a process forked from one without loaded code and threads.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.cache import mutations
from tvmify import tvmify
from tvmify.cache.directory import remove
from tvmify.dispatch import keys
from tvmify.dispatch.dispatcher import Dispatcher
from tvmify.dispatch.work import Work
from tvmify.errors import BuildError

#: Seconds of processor time after which a call counts as hanging.
_PATIENCE = 20
RIGHT, MISS, WRONG, RAISED = "right", "miss", "wrong", "raised"
#: Exit codes of a process, by outcome.
_CODES = {RIGHT: 10, MISS: 11, WRONG: 12, RAISED: 13}


@tvmify(target="llvm")
class Plain(nn.Module):
    """Has weights to pack, and arguments of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(24, 40)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return a new tensor."""
        return torch.relu(self.layer(x)) * y


@tvmify(target="llvm")
class Busy(nn.Module):
    """Writes to its state, and returns a view of an argument and the argument itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(24, 8)
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return four tensors, one of them computed."""
        self.count += self.layer(x).sum(0)
        return self.layer(x), x[1:, :3], y, self.count


def build(directory: Path) -> None:
    """Fill the cache directory, and keep the results of the calls."""
    with torch.inference_mode():
        for number, (net, args) in enumerate(_modules()):
            results = net(*args)
            assert net.cache_info().builds == 1, net.explain()
            torch.save(results, directory / f"{number}.pt")


def call(directory: Path, first: int, last: int) -> dict[str, dict[str, int]]:
    """Mutate entries by the seeds from `first` to before `last`, and call their modules."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cache = Path(os.environ["TVMIFY_CACHE_DIR"])
    Work.build = _miss  # type: ignore[method-assign]
    os.environ["TVMIFY_CACHE_DIR"] = str(directory / "none")
    with torch.inference_mode():
        modules = _modules()
        for net, args in modules:
            net(*args)  # up to the key, the slowest part, so that children need not
    os.environ["TVMIFY_CACHE_DIR"] = str(cache)
    entries = [cache / digest for digest in _missed]
    for entry in entries:
        entry.rename(directory / entry.name)
    found: dict[str, Counter[str]] = {"damage": Counter(), "forgery": Counter()}
    for seed in range(first, last):
        chance = random.Random(seed)
        for entry in entries:
            remove(entry)
            shutil.copytree(directory / entry.name, entry)
        number, kind = seed % 2, chance.choice(list(found))
        what = _mutate(kind, entries[number], entries[1 - number], chance)
        outcome = _outcome(*modules[number], torch.load(directory / f"{number}.pt"))
        if outcome not in (RIGHT, MISS):
            print(f"{seed}: {what}: {outcome}", file=sys.stderr)
        found[kind][outcome] += 1
    return {kind: dict(outcomes) for kind, outcomes in found.items()}


def _modules() -> list[tuple[Any, tuple[torch.Tensor, ...]]]:
    torch.manual_seed(0)
    return [(net.eval(), (torch.randn(5, 24), torch.randn(5, 40))) for net in (Plain(), Busy())]


def _mutate(kind: str, entry: Path, other: Path, chance: random.Random) -> str:
    if kind == "forgery":
        return mutations.forge(entry, chance)
    name = chance.choice(list(mutations.DAMAGE))
    mutations.DAMAGE[name](entry, other, chance)
    return name


def _outcome(net: Any, args: tuple[torch.Tensor, ...], expected: Any) -> str:
    child = os.fork()
    if child == 0:
        code = _CODES[RAISED]
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_CPU, (_PATIENCE, _PATIENCE))
            code = _CODES[_call(net, args, expected)]
        except Exception as error:  # any kind of error is an outcome
            print(f"{type(error).__name__}: {error}"[:300], file=sys.stderr)
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    names = {code: name for name, code in _CODES.items()}
    return names.get(code) or f"ended by {signal.Signals(-code).name if code < 0 else code}"


def _call(net: Any, args: tuple[torch.Tensor, ...], expected: Any) -> str:
    _missed.clear()
    dispatcher = next(value for value in vars(net).values() if isinstance(value, Dispatcher))
    dispatcher.state.memory.clear()
    with torch.inference_mode():
        if hasattr(net, "count"):
            net.count.zero_()
        result = net(*args)
    if _missed:
        return MISS
    if isinstance(result, torch.Tensor):
        return RIGHT if torch.equal(result, expected) else WRONG
    is_right = all(map(torch.equal, result, expected)) and len(result) == len(expected)
    shares = result[1].data_ptr() == args[0][1:].data_ptr() and result[2] is args[1]
    return RIGHT if is_right and shares and result[3] is net.count else WRONG


_missed: list[str] = []


def _miss(work: Any, *_: Any) -> Any:
    _missed.append(keys.key_for_any_torch(work.key).digest)
    raise BuildError("it is not in the cache", "It is not to be: this is a test.")


def main() -> None:
    """Run the command line."""
    what, directory, *rest = sys.argv[1:]
    if what == "build":
        build(Path(directory))
    else:
        print(json.dumps(call(Path(directory), *map(int, rest))))


if __name__ == "__main__":
    main()

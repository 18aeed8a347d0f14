"""Random programs with branches, loops, writes, views and state, split into regions.

Regions run in PyTorch here, so that hundreds of programs take seconds. The test is that the parts
together give the same results as the whole program.
"""

from __future__ import annotations

import copy
import itertools
import linecache
import random
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tvmify.capture import Part, drive
from tvmify.dispatch.regions import _REGIONS, _run_region
from tvmify.errors import NotCompiled

_HEADER = """
from typing import List, Tuple
import torch
from torch import Tensor, nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3), requires_grad=False)
        self.state = torch.randn(3, 3)
        self.count = 1

    def forward(self, x: Tensor, y: Tensor, n: int, flag: bool) -> Tuple[Tensor, Tensor]:
        kept: List[Tensor] = [x]
"""
_EXPRESSIONS = (
    "{a}.exp().clamp(max=3.0)|torch.sin({a})|{a} + {b}|{a} * {b}|{a} * 0.5|torch.tanh({a})|"
    "torch.relu({a})|{a} - {i}|{a}.t()|{a}.view(-1).view(3, 3)|{a}[0:3]|self.weight * {a}|"
    "torch.where({a} > 0, {a}, {b})|torch.cat([{a}, {b}], 0)[1:4]|{a} * int({b}.size(0))|"
    "{a}.reshape(9).reshape(3, 3)|torch.stack([{a}, {b}]).sum(0)|{a}.contiguous()|"
    "torch.matmul({a}, {b}).clamp(-2.0, 2.0)|torch.zeros({a}.size(0), 3) + {a}[0]|"
    "self.state + {a}|torch.chunk(torch.cat([{a}, {b}]), 2)[1]|kept[0] * {a}|"
    "{a} if {a}.dim() == 2 else {b}.exp()|torch.dropout({a}, 0.5, self.training)"
).split("|")
_WRITES = "{a}.mul_(0.5)|{a}[0] = 1.5|torch.relu_({a})|{a}.add_({b})|kept.append({a})".split("|")
_CONDITIONS = "bool({a}.sum() > {i})|{a}.size(0) == 3|{i} > 1|flag|self.count > 2".split("|")


class _Writer:
    """Writes the source of a random forward."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._names = (f"v{i}" for i in itertools.count())
        self._writes = seed % 3 == 0
        self.lines: list[str] = []

    def block(self, tensors: list[str], numbers: list[str], depth: int) -> list[str]:
        tensors, numbers, indent = list(tensors), list(numbers), "    " * (depth + 2)
        choice, chance = self._random.choice, self._random.random

        def filled(patterns: list[str]) -> str:
            return choice(patterns).format(a=choice(tensors), b=choice(tensors), i=choice(numbers))

        for _ in range(self._random.randint(3, 8)):
            kind = chance()
            if kind < 0.7 or depth == 3:
                name = next(self._names) if chance() < 0.6 else choice(tensors)
                self.lines.append(f"{indent}{name} = {filled(_EXPRESSIONS)}")
                tensors += [name] * (name not in tensors)
            elif kind < 0.76 and self._writes:
                self.lines.append(indent + filled(_WRITES))
            elif kind < 0.82:
                setting = f"state = {choice(tensors)}" if chance() < 0.5 else "count += 1"
                self.lines.append(f"{indent}self.{setting}")
            elif chance() < 0.6:
                self.lines.append(f"{indent}if {filled(_CONDITIONS)}:")
                self.block(tensors, numbers, depth + 1)
                if chance() < 0.6:
                    self.lines.append(f"{indent}else:")
                    self.block(tensors, numbers, depth + 1)
            else:
                index = next(self._names)
                self.lines.append(f"{indent}for {index} in range({choice(numbers)} % 3):")
                self.block(tensors, [*numbers, index], depth + 1)
                self.lines.append(f"{indent}    if {filled(_CONDITIONS)}:\n{indent}        break")
        return tensors


def _scripted(seed: int, folder: Path) -> Any:
    writer = _Writer(seed)
    results = writer.block(["x", "y"], ["n", "2"], 0)
    source = _HEADER + "\n".join(writer.lines) + f"\n        return {results[-1]}, {results[0]}\n"
    path = folder / "program.py"  # TorchScript reads the source
    path.write_text(source)
    linecache.checkcache(str(path))
    module: Any = types.ModuleType(f"random_program_{seed}")
    sys.modules[module.__name__] = module
    exec(compile(source, str(path), "exec"), module.__dict__)
    return torch.jit.script(module.Net().eval())


class _InPyTorch:
    """A region that is not compiled; its results own their memory, like compiled ones."""

    def __init__(self, part: Part) -> None:
        self._run = part.in_eager
        self._booleans = part.booleans
        self.calls = 0

    def __call__(self, tensors: list[Tensor], integers: list[Any], floats: list[float]) -> Any:
        self.calls += 1
        for place in self._booleans:
            integers[place] = bool(integers[place])
        memory = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        results = self._run(*tensors, *integers, *floats)
        return [r.clone() if r.untyped_storage().data_ptr() in memory else r for r in results]


@pytest.mark.usefixtures("inference")
def test_random_programs_match_after_region_splitting(tmp_path: Path) -> None:
    calls = 0
    numbers = itertools.count(10**6).__next__
    for seed in range(60):
        torch.manual_seed(seed)
        theirs = _scripted(seed, tmp_path)
        ours = copy.deepcopy(theirs)
        try:
            driver = drive(ours, numbers, _run_region)
        except NotCompiled:
            continue  # too many writes
        regions = {number: _InPyTorch(part) for number, part in driver.parts.items()}
        _REGIONS.update(regions)  # type: ignore[arg-type]
        driver.bind(ours)
        for call in range(3):
            first = [torch.randn(3, 3), torch.randn(3, 3)]
            second = [tensor.clone() for tensor in first]
            found = driver.run(driver.bound((*first, call, call != 1), {}))
            expected = theirs(*second, call, call != 1)
            for i in range(3):
                left = [*found, *first, ours.state, ours.weight]
                right = [*expected, *second, theirs.state, theirs.weight]
                for a, b in zip(left, right, strict=True):
                    assert torch.allclose(a, b, equal_nan=True), f"seed {seed}, call {call}, {i}"
                assert ours.count == theirs.count
                if i < 2:  # a write shows which tensors share memory
                    found[i].mul_(1.25)
                    expected[i].mul_(1.25)
        calls += sum(region.calls for region in regions.values())
    assert calls > 50

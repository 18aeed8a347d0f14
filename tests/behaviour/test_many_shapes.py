"""A service that gets a new shape in each call."""

from __future__ import annotations

import gc
import os
import random
from itertools import product
from pathlib import Path

import torch
from torch import nn

from tvmify import tvmify

_SHAPES = [(batch, length, 8) for batch, length in product(range(2, 42), range(2, 27))]
_PASSES = 10
#: Bytes that anything else in the process may allocate.
_SLACK = 1 << 20


def _resident() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def test_memory_does_not_grow_with_the_number_of_shapes() -> None:
    width, largest = 1024, 2000
    module = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).eval()
    fast = tvmify(module, dynamic=True, compare=False, progress=False)
    rows = random.Random(0).sample(range(1000, largest), 100)
    with torch.inference_mode():
        for count in (largest, *rows[:2]):
            fast(torch.zeros(count, width))
        before = _resident()
        for count in rows:
            fast(torch.zeros(count, width))
    assert fast.cache_info().builds == 1
    assert _resident() - before < 8 * largest * width * 4  # the sizes differ by a factor of 2


def test_dropped_results_are_returned_to_the_system() -> None:
    module = nn.Linear(16, 1024).eval()
    fast, x = tvmify(module, compare=False, progress=False), torch.zeros(2000, 16)
    with torch.inference_mode():
        fast(x)
        before = _resident()
        results = [fast(x) for _ in range(100)]
        while_held = _resident()
        del results
    size = 2000 * 1024 * 4
    assert while_held - before > 75 * size  # some blocks were there already
    assert _resident() - before < 40 * size


def test_memory_is_constant_over_10_000_calls_of_1000_shapes():
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    fast = tvmify(module, dynamic=True, compare=False, progress=False)
    sizes = []
    with torch.inference_mode():
        for _ in range(_PASSES):
            for shape in _SHAPES:
                assert fast(torch.ones(shape)).shape == shape
            gc.collect()
            sizes.append(_resident())
    info = fast.cache_info()
    assert info.builds == info.entries == 3  # one for each class of sizes
    assert info.hits == (_PASSES - 1) * len(_SHAPES)
    assert max(sizes[2:]) - sizes[1] < _SLACK

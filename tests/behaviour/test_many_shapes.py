"""A service that gets a new shape in each call."""

from __future__ import annotations

import gc
import os
import sys
from itertools import product
from pathlib import Path

import pytest
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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
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

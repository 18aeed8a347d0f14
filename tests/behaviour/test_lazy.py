"""Modules whose parameters get their shapes from the first call."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tvmify import NotCompiled
from tvmify import tvmify as decorate


def sequence() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2))


def root() -> nn.Module:
    return nn.LazyLinear(4)


def nested() -> nn.Module:
    head = nn.Sequential(nn.Flatten(), nn.LazyLinear(2))
    return nn.Sequential(nn.LazyConv2d(3, 3), nn.LazyBatchNorm2d(), head)


def made(make: Callable[[], nn.Module]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # lazy modules are a new feature
        return make().eval()


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("make", [sequence, root, nested])
def test_the_first_call_sets_the_shapes_and_later_ones_run_compiled(
    make: Callable[[], nn.Module], warm: bool
) -> None:
    x = torch.linspace(-1, 1, 96).reshape(2, 3, 4, 4)
    plain, fast = made(make), decorate(made(make))
    with torch.no_grad():
        torch.manual_seed(1)
        expected = plain(x)
        torch.manual_seed(1)
        if warm:
            fast.warmup([tuple(x.shape)])
        for _ in range(3):
            torch.testing.assert_close(fast(x), expected)
    assert fast.cache_info().hits >= 1 and fast.cache_info().entries == 1
    assert "runs compiled" in str(fast.explain())


def test_a_lazy_module_is_an_error_if_strict_until_it_is_warmed_up() -> None:
    fast = decorate(made(sequence), strict=True)
    with torch.no_grad():
        with pytest.raises(NotCompiled, match=r"'0\.weight' is lazy.*warmup"):
            fast(torch.ones(2, 3))
        fast.warmup([(2, 3)])
        fast(torch.ones(2, 3))

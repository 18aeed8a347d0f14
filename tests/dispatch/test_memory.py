"""More signatures than the memory cache keeps: evicted and kept ones, and the limit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tvmify import TvmifyWarning
from tvmify import tvmify as decorate


class Exported(nn.Module):
    """TorchScript refuses ``**``, so that each signature is captured separately."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.layer(x) + 1


def rows(count: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * count).reshape(count, 4)


@pytest.mark.parametrize("cache", [True, False])
def test_evicted_signature_is_neither_captured_nor_built_again(
    captured: list[int], inference: None, cache: bool
) -> None:
    net: Any = decorate(Exported().eval(), cache_size=3, cache=cache, dynamic=False)
    with pytest.warns(TvmifyWarning, match=r"more than cache_size=3 signatures") as warned:
        for count in (1, 2, 3, 4, 1, 2):
            torch.testing.assert_close(net(rows(count)), net.layer(rows(count)) + 1)
    assert len(warned) == 1
    assert captured == [1, 2, 3, 4]
    info = net.cache_info()
    assert (info.builds, info.entries, info.evictions, info.eager) == (4, 3, 3, 0)
    assert "evicted: 3" in str(net.explain())


def test_repeated_misses_end_in_eager(captured: list[int], inference: None) -> None:
    net: Any = decorate(Exported().eval(), cache_size=2, dynamic=False)
    with pytest.warns(TvmifyWarning) as warned:
        for count in (1, 2, 3, 4, 5, 6, 5, 6, 3, 4):
            torch.testing.assert_close(net(rows(count)), net.layer(rows(count)) + 1)
    said = [str(warning.message) for warning in warned]
    assert ["cache_size=2" in said[0], "runs in eager PyTorch: it was called" in said[1]] == [
        True
    ] * 2
    assert len(said) == 2
    info = net.cache_info()
    assert (captured, info.builds, info.evictions, info.eager) == ([1, 2, 3, 4], 4, 2, 4)
    assert info.entries == 2  # and they still run compiled: 3 and 4
    net.refresh()
    net(rows(5))
    assert net.cache_info().evictions == 0
    assert captured[-1] == 5


def test_warmup_and_strict_compile_beyond_cache_size(inference: None) -> None:
    net: Any = decorate(Exported().eval(), cache_size=1, dynamic=False)
    with pytest.warns(TvmifyWarning, match="cache_size=1"):
        net.warmup(*([(count, 4)] for count in (1, 2, 3, 4)))
    assert net.cache_info().builds == 4
    strict: Any = decorate(Exported().eval(), cache_size=1, strict=True, dynamic=False)
    with pytest.warns(TvmifyWarning, match="cache_size=1"):
        for count in (1, 2, 3, 4):
            strict(rows(count))
    assert (strict.cache_info().entries, strict.cache_info().eager) == (1, 0)


def test_outcomes_of_an_old_state_are_not_evictions(inference: None) -> None:
    class Scaled(nn.Module):
        scale = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale + 1

    net: Any = decorate(Scaled().eval(), cache_size=2)
    for scale in (1.0, 2.0, 3.0, 4.0):
        net.scale = scale
        assert torch.equal(net(rows(1)), rows(1) * scale + 1)
    assert (net.cache_info().evictions, net.cache_info().eager) == (0, 0)


def test_a_refusal_outlives_its_eviction(captured: list[int], inference: None) -> None:
    net: Any = decorate(lambda x: x.nonzero() + 1, cache_size=1, dynamic=False)
    with pytest.warns(TvmifyWarning):
        for count in (1, 2, 1):
            assert torch.equal(net(rows(count)), rows(count).nonzero() + 1)
    assert captured == [1, 2]


class Cache:
    """Not a container known to PyTorch."""


def test_calls_without_a_signature_are_counted_and_explained(inference: None) -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor, past: Any = None) -> torch.Tensor:
            return x + 1

    net: Any = decorate(Net().eval())
    with pytest.warns(TvmifyWarning, match="is a .*Cache") as warned:
        for _ in range(3):
            net(rows(1), past=Cache())
    assert len(warned) == 1
    info = net.cache_info()
    assert (info.hits, info.misses, info.eager, info.entries) == (2, 1, 3, 0)
    assert "runs in eager PyTorch: argument ['past'] is a" in str(net.explain())

"""Typical user code: type checkers accept it, and find its errors."""

from __future__ import annotations

import torch
from torch import nn
from typing_extensions import assert_type

import tvmify as package
from tvmify import CacheInfo, Decorated, Explanation, tvmify


@tvmify
class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y


@tvmify(target="llvm", strict=True, methods=["encode"])
class Coder(nn.Module, Decorated):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


@tvmify(dynamic=None)
def twice(x: torch.Tensor, *, plus: int = 0) -> torch.Tensor:
    return 2 * x + plus


class Plain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)


def names_of(net: Net, coder: Coder, plain: Plain) -> list[str]:
    return [type(module).__name__ for module in (net, coder, plain)]


def use(net: Net, coder: Coder, plain: Plain) -> None:
    fast = tvmify(plain, cache=False, on_miss="build")
    y = fast(torch.randn(3))
    assert_type(net.eval().cache_info(), CacheInfo)
    assert_type(net.warmup([(8, 3)], dtype=torch.float32), CacheInfo)
    assert_type(net.explain(), Explanation)
    net.refresh()
    assert set(net.state_dict()) == {"layer.weight", "layer.bias"}
    assert_type(coder.encode(y), torch.Tensor)
    assert_type(coder.cache_info().builds, int)
    assert_type(fast.explain().signatures[0].reason, str)
    assert_type(fast.warmup({"x": (3,)}), CacheInfo)
    assert_type(twice(y, plus=3), torch.Tensor)
    assert_type(twice.cache_info(), CacheInfo)
    assert_type(package.cache_info(net), CacheInfo)
    assert_type(package.tvmify(lambda x: x).explain(), Explanation)
    if package.is_decorated(plain):
        plain.refresh()
    assert names_of(net, coder, fast) == ["Net", "Coder", "Plain"]
    everything: list[Decorated] = [net, coder, fast, twice]
    assert all(package.explain(one).methods for one in everything)


def mistakes(plain: Plain) -> None:
    tvmify(plain, strcit=True)  # type: ignore[call-overload]
    tvmify(plain, on_miss="later")  # type: ignore[call-overload]
    tvmify(plain).warmup([(3,)], dtype="float32")  # type: ignore[arg-type]
    twice(3)  # type: ignore[arg-type]
    twice.cache_infos()  # type: ignore[attr-defined]

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tvmify
from tvmify import OptionError
from tvmify import tvmify as decorate


@decorate(strict=True)
class Typed(nn.Module, tvmify.Decorated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + 1


class Undecorated(nn.Module, tvmify.Decorated):
    pass


@pytest.mark.usefixtures("inference")
def test_decorated_as_base_class(tmp_path: Path) -> None:
    x = torch.randn(3)
    net = Typed().eval()
    for one in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net)), decorate(net)):
        assert torch.equal(one(x), torch.relu(x) + 1)
        assert one.cache_info().misses == 1
        one.refresh()
        assert one.cache_info().entries == 0
        assert one.warmup([x], [(2, 3)]).entries == 2
    assert [m.name for m in net.explain().methods] == ["Typed"]
    torch.testing.assert_close(torch.jit.script(net)(x), net(x))
    tvmify.save(net, tmp_path / "net.pt")


def test_the_methods_need_the_decorator() -> None:
    with pytest.raises(TypeError, match="Undecorated is not decorated"):
        Undecorated().explain()


def test_is_decorated() -> None:
    script = torch.jit.script(nn.ReLU())
    decorated = [Typed(), decorate(nn.ReLU()), decorate(script), decorate(lambda x: x)]
    assert all(map(tvmify.is_decorated, decorated))
    others = [Typed, nn.ReLU(), script, Undecorated(), len, None, tvmify]
    assert not any(map(tvmify.is_decorated, others))


@pytest.mark.parametrize("path", ["net.pt", Path("net.pt")])
@pytest.mark.parametrize(
    "function",
    [
        decorate,
        tvmify.cache_info,
        tvmify.explain,
        tvmify.refresh,
        tvmify.warmup,
        lambda path: tvmify.save(path, "copy.pt"),
        lambda path: tvmify.export(path, "copy.pt2", signature=[(3,)]),
    ],
)
def test_a_path_in_place_of_a_module(function: Any, path: Any) -> None:
    with pytest.raises(OptionError, match=r"not a module.* torch\.jit\.load\('net\.pt'\)"):
        function(path)


def test_the_file_of_an_exported_program_in_place_of_a_module() -> None:
    with pytest.raises(OptionError, match=r"torch\.export\.load\('net\.pt2'\)"):
        decorate("net.pt2")  # type: ignore[call-overload]


@pytest.mark.parametrize("name", ["llvm", "cpu", "cuda"])
def test_non_keyword_option(name: Any) -> None:
    with pytest.raises(OptionError, match=f"write tvmify\\(target={name!r}\\)"):
        decorate(name)


@pytest.mark.parametrize(
    ("function", "call"),
    [
        (lambda net: tvmify.save("net.pt", net), r"save\(model, path\)"),
        (lambda net: tvmify.export("net.pt2", net), r"export\(model, path\)"),
        (tvmify.load, r"load\(path\)"),
        (tvmify.inspect, r"inspect\(path\)"),
    ],
)
def test_a_module_in_place_of_a_path(function: Any, call: str) -> None:
    with pytest.raises(OptionError, match=f"path is a ReLU: write {call}"):
        function(nn.ReLU())

"""Results of compiled modules that contain objects unknown to pytree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import tvmify
from tvmify import SaveError
from tvmify.artifact.objects import describe_objects, holds_objects, reachable, restore_objects
from tvmify.dispatch import load_or_build


class Layer:
    def __init__(self, keys: Tensor) -> None:
        self.keys = keys
        self.kind = type(self)
        self.dtype, self.device = keys.dtype, keys.device
        self.rows = keys.shape[0]


class Cache:
    def __init__(self, *layers: Layer) -> None:
        self.layers = list(layers)
        self.sizes = {0: (1, 2.5), "shape": layers[0].keys.shape}
        self.name: str | None = None


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.linear(x)
        return {"y": y, "cache": Cache(Layer(y + 1), Layer(y * 2)), "nothing": None}


class Keeping(Caching):
    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache(Layer(torch.zeros(1)))

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"y": self.linear(x), "cache": self.cache}


def assert_like(cache: Any, eager: Any) -> None:
    assert type(cache) is Cache and type(cache.layers) is list
    assert cache.sizes == eager.sizes and type(cache.sizes["shape"]) is torch.Size
    for layer, other in zip(cache.layers, eager.layers, strict=True):
        torch.testing.assert_close(layer.keys, other.keys)
        assert (layer.kind, layer.dtype, layer.device) == (Layer, other.dtype, other.device)
        assert layer.rows == other.rows and type(layer.rows) is int


def test_every_call_returns_a_new_object(inference: None, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Caching().eval()
    for _ in range(2):  # built, then loaded from disk
        fast: Any = tvmify.tvmify(net, strict=True)
        for x in (torch.randn(2, 4), torch.randn(2, 4)):
            result, eager = fast(x), net(x)
            assert list(result) == list(eager) and result["nothing"] is None
            assert_like(result["cache"], eager["cache"])
            result["cache"].layers.clear()
        monkeypatch.setattr(load_or_build, "_LOADED", {})
    assert fast.cache_info().disk_hits == 1


def test_sizes_in_an_object_match_the_call(inference: None) -> None:
    net = Caching().eval()
    fast: Any = tvmify.tvmify(net, dynamic=True, strict=True, cache=False)
    for rows in (2, 3, 5):
        x = torch.randn(rows, 4)
        assert_like(fast(x)["cache"], net(x)["cache"])
    assert fast.cache_info().builds == 1


def test_object_of_the_module_is_returned_itself(inference: None) -> None:
    net = Keeping().eval()
    fast: Any = tvmify.tvmify(net, compare=False)
    x = torch.randn(2, 4)
    result = fast(x)
    torch.testing.assert_close(result["y"], net(x)["y"])
    assert result["cache"] is net.cache
    assert fast.cache_info().builds == 1  # of the submodule


def test_files_have_no_objects(tmp_path: Path) -> None:
    for write in (tvmify.save, tvmify.export):
        with pytest.raises(SaveError, match="objects"):
            write(
                tvmify.tvmify(Caching().eval()),
                tmp_path / "net",
                example_inputs=(torch.ones(2, 4),),
            )


def test_non_plain_objects_are_left_alone() -> None:
    x = torch.ones(2)
    twice = Layer(x)
    for value in (Slotted(x), nn.ReLU(), Cache(twice, twice), object(), lambda: x):
        assert describe_objects(value, set) is value
    constant = Layer(x)
    del constant.keys
    assert describe_objects(constant, set) is constant
    kept = Layer(x)
    assert describe_objects([kept], lambda: reachable([{"any": (kept,)}])) == [kept]


def test_an_object_in_two_places_is_not_made_two() -> None:
    layer = Layer(torch.ones(2))
    cache = Cache(layer)
    assert describe_objects((layer, cache), set)[1] is cache  # torch.export then refuses it


def test_holds_objects() -> None:
    assert not holds_objects(pytree.tree_structure({"a": [1, (2, None)]}))
    described = describe_objects([{"a": Layer(torch.ones(2))}], set)
    assert holds_objects(pytree.tree_structure(described))
    assert isinstance(restore_objects(described)[0]["a"], Layer)


def sizes(x: Tensor) -> Any:
    return {"a": x.size(), "b": [x * 2, (x.shape[0], x.T.shape)], "c": None, "d": tuple(x.shape)}


def sizes_and_branch(x: Tensor, size: Any) -> Any:
    scale = [3, 2][isinstance(size, torch.Size)]  # TorchScript does not know torch.Size
    return x.new_ones(size) * scale, size, size[:1], x.shape


def kinds(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.tolist()
    if isinstance(result, dict):
        return {key: kinds(value) for key, value in result.items()}
    if isinstance(result, (list, tuple)):
        return type(result), [kinds(item) for item in result]
    return type(result), result


@pytest.mark.parametrize(
    ("function", "arguments"), [(sizes, ()), (sizes_and_branch, (torch.Size([2, 3]),))]
)
def test_a_size_stays_a_size(function: Any, arguments: Any) -> None:
    fast = tvmify.tvmify(function, strict=True, cache=False)
    x = torch.randn(4, 3)
    for _ in range(2):
        assert kinds(fast(x, *arguments)) == kinds(function(x, *arguments))

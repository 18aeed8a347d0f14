"""Arguments and results of all structures, through the decorator."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutput

from tvmify import TvmifyWarning
from tvmify import tvmify as decorate
from tvmify.artifact.structure import structure_of, structure_text
from tvmify.errors import NotCompiled

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Level(enum.IntEnum):
    LOW = 1


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


@dataclasses.dataclass
class Box:
    inside: torch.Tensor
    other: Any = None
    count: int = 3


torch.export.register_dataclass(Box, serialized_type_name="tests.artifact.test_structure.Box")


def same(ours: Any, eager: Any) -> bool:
    """Whether two results have the same structure, and leaves of equal types and values."""
    pairs = zip(pytree.tree_leaves(ours), pytree.tree_leaves(eager), strict=True)
    return pytree.tree_structure(ours) == pytree.tree_structure(eager) and all(
        type(a) is type(b) and (torch.allclose(a, b) if isinstance(a, torch.Tensor) else a == b)
        for a, b in pairs
    )


CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "dict": (lambda d: {"a": d["x"] + 1, "b": [d["y"] * 2]}, ({"x": X, "y": X},), {}),
    "keys that are numbers": (lambda d: {1: d[0] + 1, "b": d["a"]}, ({0: X, "a": X},), {}),
    "OrderedDict": (
        lambda d: collections.OrderedDict(b=d["x"] + 1, a=d["y"]),
        (collections.OrderedDict(y=X, x=X),),
        {},
    ),
    "defaultdict": (lambda d: d["x"] + 1, (collections.defaultdict(int, x=X),), {}),
    "deque": (lambda d: collections.deque([d[0] + 1]), (collections.deque([X]),), {}),
    "named tuple": (lambda p: Pair(p.left + 1, (p.right,)), (Pair(X, X * 2),), {}),
    "dataclass": (lambda b: Box(b.inside + b.count, None, 5), (Box(X, None, 4),), {}),
    "dataclass inside": (
        lambda d: [Box(d["b"].inside + 1, d["b"].other[0])],
        ({"b": Box(X, [X])},),
        {},
    ),
    "ModelOutput": (
        lambda o: BaseModelOutput(o.last_hidden_state + 1, hidden_states=(o[0] * 2, o[0])),
        (BaseModelOutput(last_hidden_state=X),),
        {},
    ),
    "empty containers": (lambda x, *rest, **more: (x + 1, (), [], {}), (X,), {}),
    "values that are no tensors": (lambda x: (x + 1, None, 3, 2.5, "text", True), (X,), {}),
    "None": (lambda x, mask=None: x + 1 if mask is None else x * mask, (X, None), {}),
    "None in a container": (lambda p: p.left + 1 if p.right is None else 0, (Pair(X, None),), {}),
    "True": (lambda x, twice: x * 2 if twice else x + 1, (X, True), {}),
    "a text": (lambda x, kind: getattr(torch, kind)(x), (X, "neg"), {}),
    "an int": (lambda x, n: (x.repeat(n, 1), n), (X, 2), {}),
    "a size": (lambda x, size: x.reshape(size) + 1, (X, torch.Size([4, 3])), {}),
    "a dtype": (lambda x, dtype: (x + 1).to(dtype), (X, torch.float64), {}),
    "a device": (lambda x, device: x + torch.ones(4, device=device), (X, torch.device("cpu")), {}),
    "keyword only": (lambda x, *, k, m=2: x * k + m, (X,), {"k": 3}),
    "keywords in another order": (lambda *, a, b: a - 2 * b, (), {"b": X, "a": X + 1}),
    "any keywords": (lambda x, **more: x * more["k"] + len(more), (X,), {"z": X, "k": 3}),
    "any positions": (lambda *x: x[0] + x[1][0], (X, [X, 1]), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_answered_as_in_eager(name: str, inference: None) -> None:
    function, args, kwargs = CALLS[name]
    fast: Any = decorate(function, strict=True)
    expected = function(*args, **kwargs)
    for _ in range(2):
        assert same(fast(*args, **kwargs), expected)
    assert fast.cache_info().hits == 1


class Choosing(nn.Module):
    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        times: int = 1,
        *,
        kind: str = "sum",
        negate: bool = False,
    ) -> torch.Tensor:
        x = x if mask is None else x * mask
        x = x * times if kind == "sum" else x**times
        return -x if negate else x


def test_non_numeric_values_are_part_of_the_program(inference: None) -> None:
    net = Choosing().eval()
    fast: Any = decorate(net, strict=True)
    calls: list[dict[str, Any]] = [{}, {"mask": X}, {"times": 2}]
    calls += [{"kind": "power", "times": 2}, {"negate": True}, {"negate": False}, {"mask": None}]
    for kwargs in calls:
        torch.testing.assert_close(fast(X, **kwargs), net(X, **kwargs))
    assert fast.cache_info().entries == len(calls)


def _add_key(x: torch.Tensor, d: dict[str, Any]) -> torch.Tensor:
    d["new"] = x + 1
    return x * 2


def _drop_key(x: torch.Tensor, d: dict[str, Any]) -> torch.Tensor:
    d.pop("a")
    return x * 2


def _append(x: torch.Tensor, items: list[Any]) -> torch.Tensor:
    items.append(x + 1)
    return x * 2


def _replace(x: torch.Tensor, items: list[Any]) -> torch.Tensor:
    items[0] = x * 3
    return items[0] * 2


def _assign(x: torch.Tensor, box: Box) -> torch.Tensor:
    box.inside = x + 1
    return x * 2


@pytest.mark.parametrize(
    ("function", "make"),
    [
        (_add_key, dict),
        (_drop_key, lambda: {"a": X}),
        (_append, list),
        (_replace, lambda: [X]),
        (_assign, lambda: Box(X)),
    ],
)
def test_container_changes_reach_the_caller(
    function: Callable[..., Any], make: Callable[[], Any], inference: None
) -> None:
    fast = decorate(function)
    ours, theirs = make(), make()
    with pytest.warns(TvmifyWarning, match="changes a list"):
        result = fast(X, ours)
    assert torch.equal(result, function(X, theirs))
    assert same(ours, theirs)


def test_an_object_of_a_local_class_runs_in_eager(inference: None) -> None:
    class Pair:
        def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
            self.parts = first, second

    with pytest.warns(TvmifyWarning, match="whose class is defined at the top level of its module"):
        result = decorate(lambda x: Pair(x + 1, x * 2))(X)
    assert torch.equal(result.parts[0], X + 1)


def test_a_cache_of_transformers_runs_in_eager(inference: None) -> None:
    def remember(x: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        keys, _ = cache.update(x, x, 0)
        return keys * 2

    fast = decorate(remember)
    x, cache = torch.ones(1, 1, 3, 4), DynamicCache()
    with pytest.warns(TvmifyWarning, match="DynamicCache"):
        fast(x, cache)
    assert fast(x, cache).shape == (1, 1, 6, 4)


@pytest.mark.parametrize(
    "result", [{(1, 2): X}, {None: X, 1: X}, {torch.float32: X}, BaseModelOutput(X)]
)
def test_structure_round_trips_or_is_refused(result: Any) -> None:
    structure = pytree.tree_structure(result)
    try:
        text = structure_text(structure)
    except NotCompiled as refusal:
        assert "cannot be stored" in str(refusal)
    else:
        assert structure_of(text) == structure


@pytest.mark.parametrize("key", [(1, 2), Level.LOW], ids=["tuple", "IntEnum"])
def test_unsupported_result_keys_run_eager(key: Any, inference: None) -> None:
    fast = decorate(lambda x: {key: x + 1})
    with pytest.warns(TvmifyWarning, match="structure of the result"):
        ((found, value),) = fast(X).items()
    assert found is key
    assert torch.equal(value, X + 1)


def test_torch_return_types_are_supported(inference: None) -> None:
    def function(x: torch.Tensor) -> Any:
        return {"largest": (2 * x).max(1), "two": x.topk(2)}

    x = torch.rand(3, 4)
    result = decorate(function, strict=True)(x)
    assert type(result["largest"]) is torch.return_types.max
    assert torch.equal(result["two"].indices, function(x)["two"].indices)


def test_torch_size_is_kept_in_examples(inference: None) -> None:
    function, args, kwargs = CALLS["a size"]
    fast: Any = decorate(function, strict=True)
    fast(*args, **kwargs)
    (((_, size), _),) = fast._tvmify_dispatcher.examples()
    assert type(size) is torch.Size

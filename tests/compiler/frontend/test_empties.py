"""Operators on empty tensors: eager's results, or eager's error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from tests.compiler.programs import compiled, executed
from tvmify import tvmify

SHAPES = [(0, 4), (3, 0), (0, 0)]
OVER_ALL = "all any argmax argmin logsumexp max mean median min mode prod std sum var".split()
OVER_ONE = """all amax amin any argmax argmin cummax cumprod cumsum kthvalue logsumexp max mean
median min mode nansum nanmean prod softmax sort std sum topk var""".split()
OTHERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "all of integers": lambda x: (x.int().all(1), x.int().all(1).float().sum(), ~x.int().all(0)),
    "aminmax": torch.aminmax,
    "behind": lambda x: (x + 1).max() * 2,
    "bmm": lambda x: torch.bmm(x[None], x.t()[None]),
    "cat": lambda x: torch.cat([x, x]),
    "embedding_bag": lambda x: F.embedding_bag(
        torch.zeros(0, dtype=torch.long), x.new_ones(3, 4), torch.zeros(2, dtype=torch.long)
    ),
    "gather": lambda x: x.gather(1, torch.zeros(x.shape[0], 2, dtype=torch.long)),
    "index": lambda x: x[torch.zeros(2, dtype=torch.long)],
    "index_add": lambda x: torch.zeros(2, x.shape[1]).index_add(
        0, torch.zeros(x.shape[0], dtype=torch.long), x
    ),
    "linear": lambda x: F.linear(x, torch.ones(3, x.shape[1]), torch.ones(3)),
    "matmul": lambda x: x.t() @ x,
    "norm": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "quantile": lambda x: x.quantile(0.5),
}


def outcome(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return pytree.tree_leaves(function(*args))
    except Exception as error:
        return type(error)


def same(got: Any, want: Any) -> bool:
    if isinstance(want, type) or isinstance(got, type):
        return got is want
    pairs = zip(got, want, strict=True)
    return all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in pairs)


def _of(name: str, *arguments: Any) -> Callable[[torch.Tensor], Any]:
    def function(x: torch.Tensor) -> Any:
        given = (1, *arguments) if name in ("kthvalue", "topk") else arguments
        return getattr(torch, name)(x, *given)

    return function


@pytest.fixture
def tables() -> dict[str, Callable[[torch.Tensor], Any]]:
    functions = {f"{name}()": _of(name) for name in OVER_ALL if name not in ("logsumexp", "mode")}
    functions |= {f"{name}({axis})": _of(name, axis) for name in OVER_ONE for axis in (0, 1)}
    return functions | OTHERS


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reductions_of_no_elements_match_eager(
    shape: tuple[int, ...], tables: dict[str, Callable[[torch.Tensor], Any]]
):
    x = torch.zeros(shape)
    fine = {name: f for name, f in tables.items() if not isinstance(outcome(f, x), type)}

    def each(x: torch.Tensor) -> dict[str, Any]:
        return {name: tuple(pytree.tree_leaves(f(x))) for name, f in fine.items()}

    got, want = executed(compiled(each, x), each, x), each(x)
    wrong = [name for name in fine if not same(got[name], want[name])]
    assert not wrong


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.filterwarnings("ignore::tvmify.TvmifyWarning")
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_errors_over_no_elements_match_eager(
    shape: tuple[int, ...], tables: dict[str, Callable[[torch.Tensor], Any]]
):
    x = torch.zeros(shape)
    raised = 0
    for name, function in tables.items():
        expected = outcome(function, x)
        if not isinstance(expected, type):
            continue
        raised += 1
        with torch.no_grad():
            got = outcome(tvmify(lambda x, f=function: f(x), cache=False, compare=False), x)
        assert got is expected, name
    assert raised > 5


@torch.inference_mode()
def test_varying_size_beside_zero_has_one_program() -> None:
    def spread(x: torch.Tensor) -> torch.Tensor:
        return x[:, :0].unsqueeze(1).expand(x.shape[0], 2, 0).sum(2) + x.sum()

    function = tvmify(spread, cache=False, compare=False, strict=True)
    for rows in (5, 9, 13, 40):  # the second program is tuned for another number of rows
        x = torch.randn(rows, 4)
        torch.testing.assert_close(function(x), spread(x))
    assert function.cache_info().builds == 2

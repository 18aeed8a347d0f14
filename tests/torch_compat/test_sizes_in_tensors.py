"""Sizes that code puts into tensors and uses as sizes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, export

from tests.compiler.programs import Program
from tvmify import tvmify
from tvmify.torch_compat.sizes_in_tensors import SizesInTensors

TABLE = torch.arange(128.0).view(64, 2)


def _span(x: torch.Tensor) -> torch.Tensor:
    span = torch.tensor(min(x.size(0), 32))
    return TABLE[32 - span : 32 + span]


def _halves(x: torch.Tensor) -> Any:
    half = torch.div(x.size(0), 2, rounding_mode="trunc")
    return x[:half], x[half:]


def _table(x: torch.Tensor) -> torch.Tensor:
    count = torch.floor_divide(torch.as_tensor(x.size(0)), 2)
    return torch.arange(count * 3).view(count, 3) + x.sum()


def _limits(x: torch.Tensor) -> torch.Tensor:
    longest = torch.tensor(x.size(0))
    return torch.arange(100).clamp(-longest, longest * 2 - 1)


def _larger(x: torch.Tensor) -> torch.Tensor:
    rows, columns = torch.tensor(x.size(0)), torch.tensor(x.size(1))
    return x.new_zeros(torch.maximum(rows, columns).item(), rows + columns)


def _number(x: torch.Tensor) -> torch.Tensor:
    return x * (torch.tensor(x.size(0)) - 1).clone() + torch.tensor(x.size(0)).float().sqrt()


def _kinds(x: torch.Tensor) -> Any:
    rows = torch.tensor(x.size(0))
    flag = rows.bool()
    if rows > 1:
        flag = flag & (rows > 2)
    # Keyword arguments are data.
    named = torch.div(input=torch.clone(input=rows), other=2, rounding_mode="floor")
    limited = torch.clamp(input=x, max=rows)
    return (
        named,
        limited,
        flag,
        rows.to(torch.int32).clamp(max=torch.tensor(x.size(1))),
        x.new_zeros(2) + rows,
    )


CASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "bounds of a slice": _span,
    "quotient of a number": _halves,
    "size of a view": _table,
    "limits": _limits,
    "larger of two": _larger,
    "factor": _number,
    "other types": _kinds,
}


@pytest.mark.parametrize("name", CASES)
def test_sizes_stay_symbols(name: str) -> None:
    function = CASES[name]
    sizes = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    with SizesInTensors():
        program = export(
            Program(function), (torch.zeros(6, 5),), dynamic_shapes=(sizes,), strict=False
        )
    for seed, shape in enumerate([(6, 5), (4, 9), (31, 2)]):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(program.module()(x), function(x))


class Span(nn.Module):
    """Slices a table of distances, as DeBERTa does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, 8))

    def forward(self, x):
        span = torch.tensor(min(x.size(1), 32))
        return x @ self.table[32 - span : 32 + span].t()


class RecordedSpan(Span):
    """The same for ``torch.export``."""

    def forward(self, x, *rest):  # TorchScript refuses star arguments
        return super().forward(x)


@pytest.mark.parametrize("kind", [Span, RecordedSpan])
def test_two_programs_serve_all_lengths(kind: type[Span]) -> None:
    torch.manual_seed(0)
    net = kind().eval()
    fast: Any = tvmify(net, cache=False, strict=True, compare=False)
    with torch.no_grad():
        for length in (12, 20, 28, 16, 24, 31, 9, 17):
            x = torch.randn(2, length, 8)
            torch.testing.assert_close(fast(x), net(x))
    assert fast.cache_info().builds == 2


class Written(nn.Module):
    """Writes to tensors made from sizes."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x, *rest):
        rows = torch.tensor(x.size(0))
        if self.way == "in place":
            rows += 1
        elif self.way == "by a view":
            rows.view(1).fill_(2)
        elif self.way == "by an earlier view":
            view = rows.view(1)
            view -= 1
        elif self.way == "by one of several views":
            rows.view(1).split(1)[0].sub_(1)
        elif self.way == "by an index":
            rows[()] = 1
        elif self.way == "behind a view":
            before, rows = rows, rows.detach()
            before -= 1
        return x.new_zeros(5) + rows, x[:rows]


WAYS = [
    "not",
    "in place",
    "by a view",
    "by an earlier view",
    "by one of several views",
    "by an index",
    "behind a view",
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore::tvmify.TvmifyWarning")
def test_written_tensors_have_their_values(way: str) -> None:
    net = Written(way).eval()
    fast: Any = tvmify(net, cache=False, compare=False, dynamic=True)
    for rows in (4, 7):
        x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows))
        for mine, eager in zip(fast(x), net(x), strict=True):
            assert torch.equal(mine, eager)

"""Ints that forward uses as sizes and positions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tvmify
from tests.tolerances import assert_close_to_reference
from tvmify.integrations.torch_compile import backend as backend_of_tvmify


class Positions(nn.Module):
    """Adds rows of a table to its input; ``rows`` selects them."""

    def __init__(self, rows: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        super().__init__()
        self.rows = rows
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.randn(64, 8))

    def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return self.linear(x) + self.rows(self.table, n)


def positions(rows: Callable[[torch.Tensor, int], torch.Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return Positions(rows).eval()


def check(fast: Any, module: nn.Module, *numbers: int) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        for n in numbers:
            assert_close_to_reference(fast(x, n), module, (x, n), {})


@pytest.mark.parametrize(
    "rows",
    [
        lambda table, n: table[n : n + 4],
        lambda table, n: torch.arange(n, n + 8),
        lambda table, n: table.new_ones(n).sum() * n,
    ],
    ids=["slice", "range", "size"],
)
def test_one_program_serves_all_values(rows: Callable[..., torch.Tensor]) -> None:
    module = positions(rows)
    fast = tvmify.tvmify(module, cache=False, strict=True)
    check(fast, module, 9, 10, 11, 15, 40)
    assert fast.cache_info().builds == 2  # for the first value, and for any
    check(fast, module, 0, 1)  # constants, as sizes are
    assert fast.cache_info().builds == 4
    assert "int s0" in str(fast.explain())


def test_values_that_count_loops_are_constants() -> None:
    module = positions(lambda table, n: sum(table[i] * i for i in range(n)))
    fast = tvmify.tvmify(module, cache=False, strict=True)
    check(fast, module, 3, 4, 5, 4)
    assert fast.cache_info().entries == 3
    assert "int s0" not in str(fast.explain())


def test_values_that_are_compared_become_guards() -> None:
    module = positions(lambda table, n: table[n] if n % 2 else table[:n].sum(0))
    fast = tvmify.tvmify(module, cache=False, strict=True)
    check(fast, module, 8, 9, 11, 13, 10, 12)
    assert fast.cache_info().builds == 3  # the first value, odd ones, and even ones


def test_values_that_no_size_has_are_constants() -> None:
    module = positions(lambda table, n: table[n:].sum(0))
    fast = tvmify.tvmify(module, cache=False)
    check(fast, module, 8, 9, 10, -3, -4, 2**40, 2**70)
    assert fast.cache_info().builds == 6


def test_tensors_like_those_passed_for_ints_are_other_arguments() -> None:
    module = positions(
        lambda table, n: table[: len(n) if isinstance(n, torch.Tensor) else n].sum(0)
    )
    fast = tvmify.tvmify(module, cache=False, strict=True)
    check(fast, module, 8, 9, 10)
    x = torch.ones(4, 8)
    with torch.inference_mode():
        for rows in (9, 11, 12):
            like = torch.empty(rows, 0, dtype=torch.uint8)
            assert_close_to_reference(fast(x, like), module, (x, like), {})
        check(fast, module, 13)


def test_another_instance_loads_the_program(tmp_path: Path) -> None:
    module = positions(lambda table, n: table[:n].sum(0))
    check(tvmify.tvmify(copy.copy(module), cache=tmp_path), module, 8, 9)
    again = tvmify.tvmify(copy.deepcopy(module), cache=tmp_path)
    check(again, module, 8, 12, 20)
    assert again.cache_info().builds == 0


class Cache(nn.Module):
    """Attention to all tokens so far, kept in buffers."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(2, 32, 8))

    def forward(self, x: torch.Tensor, start: int) -> torch.Tensor:
        query, key, value = self.project(x).chunk(3, -1)
        end = start + x.shape[1]
        self.keys[:, start:end] = key
        self.values[:, start:end] = value
        scores = query @ self.keys[:, :end].mT
        return scores.softmax(-1) @ self.values[:, :end]


@pytest.mark.parametrize("backend", [False, True], ids=["decorated", "torch.compile"])
def test_steps_of_decoding_write_to_buffers(backend: bool) -> None:
    torch.manual_seed(0)
    module = Cache().eval()
    own = copy.deepcopy(module)
    fast: Any
    if backend:
        torch._dynamo.reset()
        fast = torch.compile(own, backend=backend_of_tvmify)
    else:
        fast = tvmify.tvmify(own, cache=False, strict=True)
    start = 0
    with torch.inference_mode():
        for length in (5, *[1] * 8):
            x = torch.randn(2, length, 8)
            torch.testing.assert_close(fast(x, start), module(x, start))
            torch.testing.assert_close(dict(own.named_buffers()), dict(module.named_buffers()))
            start += length
    if not backend:
        assert fast.cache_info().builds == 2  # the prompt, and any step
        assert "computed by PyTorch" not in str(fast.explain())


def test_long_prompts_are_summed_by_one_program() -> None:
    class Prefix(nn.Module):
        rows: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rows", torch.zeros(2, 512, 8))

        def forward(self, x: torch.Tensor, start: int) -> torch.Tensor:
            end = start + x.shape[1]
            self.rows[: x.shape[0], start:end] = x
            return self.rows[:, :end].sum(1)

    module = Prefix().eval()
    fast: Any = tvmify.tvmify(copy.deepcopy(module), cache=False, strict=True)
    with torch.inference_mode():
        for start in (3, 4, 100, 101, 300, 301, 480):  # more rows are summed in blocks
            x = torch.randn(2, 1, 8)
            torch.testing.assert_close(fast(x, start), module(x, start))
    torch.testing.assert_close(fast.rows, module.rows, rtol=0, atol=0)
    assert fast.cache_info().builds == 4  # the first value, and a program for each class

"""Writing at computed positions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.compiler.programs import check, check_each, compiled, executed
from tvmify import tvmify


def test_booleans_that_are_added_stay_true():
    check_each(
        {
            "accumulate": lambda x, at: x.index_put((at,), x.flip(0), accumulate=True),
            "scatter_add": lambda x, at: x.scatter_add(0, at, ~x),
        },
        torch.tensor([True, False, True, False]),
        torch.tensor([0, 0, 1, 3]),
    )


def test_elements_of_a_copied_vector_are_written():
    def written(x: torch.Tensor, at: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return x.index_put((at,), new) * x

    check(written, torch.randn(6), torch.tensor([4, -5, 4]), torch.randn(3))


def test_writing_at_positions():
    def slices(x: torch.Tensor, i: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x.clone()
        z[:, 1:3] = y[:, :2]
        z[:, 0] = 0
        z[..., 2] += 1
        return z

    check_each(
        {
            "slices": slices,
            "scatter": lambda x, i, y: x.scatter(0, i.view(3, 1, 1).expand(3, 6, 8), y[:3]),
            "scatter_number": lambda x, i, y: x.scatter(1, i.view(1, 3, 1), 2.5),
            "scatter_add": lambda x, i, y: x.scatter_add(0, i.view(3, 1, 1).expand(3, 6, 8), y),
            "scatter_add of fewer": lambda x, i, y: x.scatter_add(
                0, i.view(3, 1, 1).expand(3, 6, 7), y
            ),
            "scatter_add elsewhere": lambda x, i, y: x.scatter_add(
                1, i.view(1, 3, 1).expand(4, 3, 8), y
            ),
            "index_put": lambda x, i, y: x.index_put((i,), y[0]),
            "accumulate": lambda x, i, y: x.index_put((i * 0 - 1, i), y[0, :3], accumulate=True),
            "masked": lambda x, i, y: x.masked_fill(x > 0, -1.0),
            "gather of no axes": lambda x, i, y: x.sum().gather(0, i * 0),
            "take": lambda x, i, y: x.take(i[:2, None] - 7),
            "take of no axes": lambda x, i, y: x.take(i[0] * 2) + y,
        },
        torch.randn(4, 6, 8),
        torch.tensor([3, 0, 1]),
        torch.randn(4, 6, 8),
    )


def test_index_add_refuses_negative_positions():
    """Unlike `index_put`, which counts them from the end."""

    def program(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return x.index_add(0, i, x[:2], alpha=2)

    args = torch.randn(4, 3), torch.tensor([1, 1])
    artifact = compiled(program, *args)
    torch.testing.assert_close(executed(artifact, program, *args), program(*args))
    with pytest.raises(IndexError, match="index out of range in self"):
        executed(artifact, program, args[0], torch.tensor([0, -1]))


def test_added_rows_match_eager() -> None:
    check_each(
        {
            "rows": lambda x, i, y: x.index_add(0, i, y[:3]),
            "columns": lambda x, i, y: x.index_add(-1, i, y[..., :3], alpha=-2),
            "middle": lambda x, i, y: x.index_add(1, i, y[:, :3]),
            "one": lambda x, i, y: x.index_add(0, i[0], y[:1]),
            "vector": lambda x, i, y: x[0, 0].index_add(0, i, y[0, 0, :3]),
        },
        torch.randn(4, 6, 8),
        torch.tensor([3, 0, 3]),
        torch.randn(4, 6, 8),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("with_self", [True, False])
@pytest.mark.parametrize("how", ["sum", "prod", "mean", "amax", "amin"])
def test_reductions_at_positions_match_eager(how: str, with_self: bool, dtype: torch.dtype) -> None:
    def program(x: Tensor, i: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        rows = i[:, :1].expand_as(y)
        return tuple(x.scatter_reduce(0, at, y, how, include_self=with_self) for at in (i, rows))

    x, y = (torch.randint(-4, 5, (rows, 3)).to(dtype) for rows in (5, 9))
    if dtype.is_floating_point:
        y[0, 0], y[1, 1] = torch.inf, torch.nan
        y[2] = -torch.inf
    args = x, torch.randint(4, (9, 3)), y  # nothing is written to the last row
    artifact = compiled(program, *args)
    assert not artifact.report["bridged"]
    torch.testing.assert_close(executed(artifact, program, *args), program(*args), equal_nan=True)


@pytest.mark.parametrize(
    "add",
    [
        lambda x, i, y: x.index_add(0, i, y),
        lambda x, i, y: x.scatter_add(0, i[:, None].expand_as(y), y),
        lambda x, i, y: x.scatter_reduce(0, i[:, None].expand_as(y), y, "sum"),
    ],
    ids=["index_add", "scatter_add", "scatter_reduce"],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_halves_are_rounded_once(add: Callable[..., Tensor], dtype: torch.dtype) -> None:
    ones = torch.ones(3000, 4, dtype=dtype)
    args = torch.zeros(2, 4, dtype=dtype), torch.zeros(3000, dtype=torch.int64), ones
    artifact = compiled(add, *args)
    assert executed(artifact, add, *args)[0, 0] == 3000


@pytest.mark.parametrize("columns", [1, 7, 64, 160])
def test_messages_along_edges_are_added_in_one_kernel(columns: int) -> None:
    """As in a graph convolution: read, weighted, added."""

    def program(x: Tensor, source: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, target, x[source] * weight[:, None])

    edges = torch.randint(50, (2, 4000))
    args = torch.randn(50, columns), *edges, torch.rand(4000)
    check(program, *args)
    kernels = compiled(program, *args).report["kernels"]
    assert any("taken" in name and "write_runs" in name for name in kernels) == (columns >= 64)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float64])
def test_wide_rows_of_any_type_are_written(dtype: torch.dtype) -> None:
    """By several tasks, in whole registers."""

    def program(x: Tensor, at: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        rows = at[:, None].expand(-1, 256)
        return x.index_add(0, at, x[source]), x.scatter(0, rows, x.flip(1)[source])

    x = torch.randint(3, (30, 256)).to(dtype)
    args = x, *torch.randint(30, (2, 400))
    torch.testing.assert_close(
        executed(compiled(program, *args), program, *args), program(*args), rtol=0, atol=0
    )


def test_messages_of_graphs_of_any_size_are_added() -> None:
    def program(x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        return torch.zeros_like(x).index_add(0, target, x[source] * 2)

    fast = tvmify(program, dynamic=True, cache=False, strict=True, compare=False)
    for nodes, count in ((5, 9), (40, 300), (17, 2)):
        x, edges = torch.randn(nodes, 64), torch.randint(nodes, (2, count))
        torch.testing.assert_close(fast(x, edges), program(x, edges))
    assert fast.cache_info().builds == 1

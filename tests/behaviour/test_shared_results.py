"""Results that share memory with arguments, buffers, weights and each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tvmify
from tests.behaviour.stateful import Stateful, X, inputs, strided
from tvmify import TvmifyWarning
from tvmify import tvmify as decorate


class Views(Stateful):
    def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
        y = x @ self.weight
        flat = y.view(-1)
        return x, x.t(), x[1:], self.cache, self.cache[0], self.weight, y, flat, flat, y * 2


def shared(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x.t() + 1
    return y, y[1:], x.detach(), x.contiguous(), x.view(2, 6), x.expand(2, 3, 4)


def chunks(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x * 2).chunk(2, dim=1)


def identity(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return F.dropout(x, 0.5, training=False), (x + 1).clone()


def transposed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # The transposed tensor is contiguous: the stride of an axis of one element does not matter.
    y = (x + 1).reshape(1, 3, 4, 1).contiguous(memory_format=torch.channels_last)
    return y.transpose(1, 2), y


def geometry(results: Any) -> list[Any]:
    return [(r.stride(), r.storage_offset()) for r in results]


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("function", [shared, chunks, identity, transposed])
def test_results_share_memory_as_in_eager(function: Callable[..., Any], no_grad: None):
    fast = decorate(function, strict=True)
    for _ in range(2):
        (x,) = inputs(1, 3, 4)
        actual, expected = fast(x), function(x)
        torch.testing.assert_close(actual, expected)
        for i, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
            assert (ours is x) == (theirs is x), i
            assert (ours.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()) == (
                theirs.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
            ), i


@pytest.mark.parametrize("grad", [False, True])
def test_results_may_be_buffers_weights_and_views(grad: bool):
    plain = Views().eval()
    fast = decorate(plain, strict=True)
    (x,) = inputs(1, 3, 4)
    with torch.set_grad_enabled(grad):
        actual, expected = fast(x), plain(x)
        torch.testing.assert_close(actual, expected)
        assert geometry(actual) == geometry(expected)
        assert [r.requires_grad for r in actual] == [r.requires_grad for r in expected]
    assert actual[0] is x and actual[3] is plain.cache and actual[5] is plain.weight
    assert actual[7] is actual[8] or grad
    with torch.no_grad():
        actual[7].zero_()
        assert not actual[6].any() and actual[9].any()
        actual[4].fill_(5)
    assert plain.cache[0].eq(5).all()
    if grad:
        (ours,) = torch.autograd.grad(actual[9].sum(), plain.weight)
        (theirs,) = torch.autograd.grad(expected[9].sum(), plain.weight)
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("grad", [False, True])
def test_detached_weights_in_results_have_no_gradients(grad: bool):
    class Detached(Stateful):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x @ self.weight, self.weight.detach(), self.weight.detach()[0], self.weight

    plain = Detached().eval()
    fast = decorate(plain)
    with torch.set_grad_enabled(grad), pytest.warns(TvmifyWarning, match="a detached view"):
        actual, expected = fast(torch.ones(3, 4)), plain(torch.ones(3, 4))
    assert [r.requires_grad for r in actual] == [r.requires_grad for r in expected]
    assert all(r.data_ptr() == plain.weight.data_ptr() for r in actual[1:])


def views(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    halves = x.view(x.shape[0], 2, -1)
    return x + 1, x.t(), x[1:, ::2], x.diagonal(1), x.unsqueeze(1).expand(-1, 2, -1), halves, x


class ViewsOfState(nn.Module):
    """Has an expanded buffer, and a transposed weight."""

    ids: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ids", torch.arange(6.0).expand(2, 6))
        weight = torch.linspace(-1, 1, 18).view(6, 3).t()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.ids[:, 1:], self.weight[1:], self.ids, x.sum(0)


def all_strides(rows: int, columns: int) -> list[torch.Tensor]:
    wide = inputs(1, 2 * rows + 2, 2 * columns + 2)[0]
    return [
        wide[:rows, :columns].contiguous(),
        wide[1 : rows + 1, 2 : columns + 2],
        wide[: 2 * rows : 2, : 2 * columns : 2],
        inputs(1, columns, rows)[0].t(),
        inputs(1, columns)[0].expand(rows, columns),
    ]


@pytest.mark.parametrize("function", [views, ViewsOfState().eval()])
def test_views_of_any_strides(function: Callable[..., Any], no_grad: None):
    state = [] if function is views else [function.ids, function.weight]  # type: ignore[attr-defined]
    fast = decorate(function, strict=True)
    for x in [*all_strides(4, 6), *all_strides(6, 8)]:
        actual, expected = fast(x), function(x)
        torch.testing.assert_close(actual, expected)
        for ours, theirs in zip(actual, expected, strict=True):
            assert (ours is x) == (theirs is x)
            if any(
                theirs.untyped_storage()._cdata == y.untyped_storage()._cdata for y in (x, *state)
            ):
                assert geometry([ours]) == geometry([theirs])
                assert ours.data_ptr() == theirs.data_ptr()
    info = fast.cache_info()
    assert (info.builds, info.eager) == (2, 0)


@pytest.mark.parametrize("backend", ["decorated", "torch.compile"])
def test_results_of_strided_arguments_share_memory(backend: str, no_grad: None):
    def shared_results(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = F.linear(x, y)
        return z, z.reshape(-1), z[1:], z.transpose(0, 1), x * 2

    if backend == "decorated":
        fast: Any = decorate(shared_results, strict=True)
    else:
        fast = torch.compile(shared_results, backend="tvmify", options={"strict": True})
    for x, y in zip(all_strides(4, 6), all_strides(3, 6), strict=True):
        actual, expected = fast(x, y), shared_results(x, y)
        torch.testing.assert_close(actual, expected)
        assert geometry(actual[:4]) == geometry(expected[:4])
        assert len(set(map(storage, actual[:4]))) == 1


def copied(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.contiguous(), x.reshape(-1), x + 1


def written(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    flat = y.reshape(-1)
    y.add_(1)
    return flat.sum() + 0 * y.contiguous().add_(1) + y


def of_memory(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).as_strided((3,), (1,)) + 1


def of_its_memory(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((2,), (1,)) + 1


@pytest.mark.parametrize("function", [copied, written, of_memory, of_its_memory])
def test_eager_runs_if_the_result_depends_on_strides(function: Callable[..., Any], no_grad: None):
    fast = decorate(function)
    contiguous, *others = all_strides(4, 6)
    torch.testing.assert_close(fast(contiguous), function(contiguous))
    assert fast.cache_info().eager == 0
    with pytest.warns(TvmifyWarning, match="not contiguous"):
        for x in others:
            actual, expected = fast(x), function(x)
            torch.testing.assert_close(actual, expected)
            if function is copied:
                assert [y.data_ptr() == x.data_ptr() for y in actual] == [
                    y.data_ptr() == x.data_ptr() for y in expected
                ]
    assert fast.cache_info().eager == len(others)


def test_a_view_that_eager_refuses_is_refused(no_grad: None):
    fast = decorate(shared)
    fast(*inputs(1, 3, 4))
    with pytest.raises(RuntimeError):
        fast(inputs(1, 4, 3)[0].t())  # has no view of that shape


def test_other_arguments_may_have_any_strides(no_grad: None):
    fast = decorate(lambda x, y: (x.view(-1), x.t() @ y), strict=True)
    for x, y in zip(5 * all_strides(4, 6)[:1], all_strides(4, 3), strict=True):
        flat, product = fast(x, y)
        assert flat.data_ptr() == x.data_ptr()
        torch.testing.assert_close(product, x.t() @ y)


def test_saved_views_are_right(tmp_path: Any, no_grad: None):
    def viewed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = x + 1
        return y, y.view(-1), x[1:]

    tvmify.save(viewed, tmp_path / "file.pt", example_inputs=(X[0],))
    program = tvmify.export(viewed, example_inputs=(X[0],)).module(check_guards=False)
    for x in (X[0], strided(X[0])):
        torch.testing.assert_close(program(x), viewed(x))
    loaded = tvmify.load(tmp_path / "file.pt", strict=True)
    torch.testing.assert_close(loaded(X[0]), viewed(X[0]))
    y, flat, _ = loaded(X[0])
    assert y.data_ptr() == flat.data_ptr()
    x = strided(X[0])
    torch.testing.assert_close(loaded(x), viewed(x))
    assert geometry(loaded(x)[2:]) == geometry(viewed(x)[2:])
    assert loaded(x)[2].data_ptr() == x[1:].data_ptr()

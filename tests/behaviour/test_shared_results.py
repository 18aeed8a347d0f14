"""Results that share memory with arguments, buffers, weights and each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

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


def turned(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # The turned one is contiguous: where an axis of one element lies does not matter.
    y = (x + 1).reshape(1, 3, 4, 1).contiguous(memory_format=torch.channels_last)
    return y.transpose(1, 2), y


def geometry(results: Any) -> list[Any]:
    return [(r.stride(), r.storage_offset()) for r in results]


@pytest.mark.parametrize("function", [shared, chunks, identity, turned])
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


def test_views_of_strided_arguments_are_for_eager(no_grad: None):
    fast = decorate(shared)
    fast(*inputs(1, 3, 4))
    x = inputs(1, 4, 3)[0].t()
    with pytest.raises(RuntimeError):
        fast(x)  # as eager: this has no view of that shape
    x = strided(inputs(1, 3, 4)[0])
    part = decorate(lambda x: (x + 1, x[1:]))
    part(*inputs(1, 3, 4))
    with pytest.warns(TvmifyWarning, match="not contiguous"):
        assert part(x)[1].data_ptr() == x[1:].data_ptr()


def test_as_strided_of_a_non_contiguous_argument_runs_eager(no_grad: None):
    fast = decorate(lambda x: x.as_strided((2,), (1,)) + 1)
    x = torch.arange(8.0)
    assert torch.equal(fast(x[:4]), x[:2] + 1)
    with pytest.warns(TvmifyWarning, match="not contiguous"):
        assert torch.equal(fast(x[::2]), x[:2] + 1)


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
    with pytest.raises(RuntimeError, match="which memory is shared"):
        loaded(strided(X[0]))
    loaded = tvmify.load(tmp_path / "file.pt")
    with pytest.warns(UserWarning, match="which memory is shared"):
        torch.testing.assert_close(loaded(strided(X[0])), viewed(strided(X[0])))

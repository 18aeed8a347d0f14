"""Gradients, tangents and transforms of torch.func, of a module that runs compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call

from tests.behaviour.changes import Net, X, check, weight
from tests.tolerances import assert_close_to_reference
from tvmify import NotCompiled
from tvmify import tvmify as decorate

pytestmark = pytest.mark.usefixtures("quiet", "shared_cache")


def gradients(
    module: Any, weights: dict[str, torch.Tensor], x: torch.Tensor = X
) -> list[torch.Tensor | None]:
    with torch.enable_grad():
        result = functional_call(module, weights, (x,)).square().sum()
        return list(torch.autograd.grad(result, list(weights.values()), allow_unused=True))


@pytest.mark.parametrize("leaves", [True, False])
def test_gradients_reach_the_weights_of_a_functional_call(leaves: bool) -> None:
    plain = Net().eval()
    fast = decorate(plain)
    fast(X)
    factor = torch.tensor(2.0, requires_grad=True)
    with torch.enable_grad():
        weights = {
            name: weight(*w.shape) if leaves else weight(*w.shape).detach() * factor
            for name, w in plain.named_parameters()
        }

    def in_eager(x: torch.Tensor, *values: torch.Tensor) -> list[torch.Tensor | None]:
        leaves = [value.detach().requires_grad_() for value in values]
        return gradients(plain, dict(zip(weights, leaves, strict=True)), x)

    assert_close_to_reference(gradients(fast, weights), in_eager, (X, *weights.values()))
    check(fast, plain, X)


def test_recurrent_layers_follow_parameters_that_are_not_assigned() -> None:
    """As in a functional call: only eager calls update the list of weights that the layer reads."""
    plain = nn.GRU(4, 4).eval()
    fast = decorate(plain)
    check(fast, plain, X)
    weights = {name: weight + 1 for name, weight in plain.named_parameters()}
    for _ in range(2):
        found = functional_call(fast, weights, (X,))
        torch.testing.assert_close(found, functional_call(plain, weights, (X,)))
        check(fast, plain, X)
    before = fast.weight_hh_l0
    with torch.enable_grad():
        result = fast(X)[0].sum()
    for module in (plain, fast):
        module._parameters["weight_hh_l0"] = nn.Parameter(torch.ones(12, 4))
    check(fast, plain, X)
    found = torch.autograd.grad(result, before)
    plain.weight_hh_l0 = before
    with torch.enable_grad():
        expected = torch.autograd.grad(plain(X)[0].sum(), before)
    torch.testing.assert_close(found, expected)
    assert fast.cache_info().builds <= 1


def test_backward_uses_weights_and_mode_of_its_call() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.9), nn.Linear(4, 2)).eval()
    fast = decorate(plain)
    found = []
    with torch.enable_grad():
        for module in (plain, fast):
            before = module[0].weight
            result = module(X)
            module[0].weight = nn.Parameter(torch.zeros(4, 4))
            module.train()
            found += torch.autograd.grad(result.square().sum(), before)
            module[0].weight = before
            module.eval()
    torch.testing.assert_close(*found)


def tangent_of_a_weight(module: Any) -> Any:
    layer = module.layers[2]
    with forward_ad.dual_level():
        kept = layer._parameters.pop("weight")
        try:
            layer.weight = forward_ad.make_dual(kept.detach(), torch.ones_like(kept))
            return forward_ad.unpack_dual(module(X)).tangent
        finally:
            del layer.weight
            layer.register_parameter("weight", kept)


def tangent_of_an_input(module: Any) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(module(forward_ad.make_dual(X, X))).tangent


def tangent_by_functional_call(module: Any) -> Any:
    with forward_ad.dual_level():
        weights = {
            name: forward_ad.make_dual(w.detach(), torch.ones_like(w))
            for name, w in module.named_parameters()
        }
        return forward_ad.unpack_dual(functional_call(module, weights, (X,))).tangent


def tangent_written_in_place(module: Any) -> Any:
    weights = module.requires_grad_(False).layers[2].weight
    with forward_ad.dual_level():
        module(X)
        weights.mul_(forward_ad.make_dual(torch.ones(()), torch.ones(())))
        return forward_ad.unpack_dual(module(X)).tangent


def jvp(module: Any) -> torch.Tensor:
    return torch.func.jvp(module, (X,), (X,))[1]


def jacobian(module: Any) -> torch.Tensor:
    return torch.func.jacrev(module)(X)


def vmap(module: Any) -> torch.Tensor:
    return torch.func.vmap(module)(X)


def per_sample(module: Any) -> torch.Tensor:
    weights = {name: w.detach() for name, w in module.named_parameters()}

    def loss(weights: Any, x: torch.Tensor) -> torch.Tensor:
        return functional_call(module, weights, (x,)).sum()

    return torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, X)["layers.0.weight"]


@pytest.mark.parametrize(
    "differentiate",
    [
        tangent_of_a_weight,
        tangent_of_an_input,
        tangent_by_functional_call,
        tangent_written_in_place,
        jvp,
        jacobian,
        vmap,
        per_sample,
    ],
)
def test_transforms_see_the_operators(differentiate: Callable[[Any], Any]) -> None:
    plain = Net().eval()
    fast = decorate(plain)
    check(fast, plain, X)
    torch.testing.assert_close(differentiate(fast), differentiate(plain))
    torch.testing.assert_close(differentiate(fast), differentiate(plain))
    hits = fast.cache_info().hits
    check(fast, plain, X)
    check(fast, plain, X)
    assert fast.cache_info().hits > hits


def test_forward_mode_is_an_error_if_strict() -> None:
    fast = decorate(Net().eval(), strict=True)
    with forward_ad.dual_level(), pytest.raises(NotCompiled, match="forward-mode"):
        fast(X)
    jvp(fast)
    fast(X)

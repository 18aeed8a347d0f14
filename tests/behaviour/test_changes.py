"""After any change of a module, the next call computes the same as eager PyTorch."""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from tests.behaviour.changes import CHANGES, Layer, Net, Scaled, X, check, weight
from tvmify import NotCompiled
from tvmify import tvmify as decorate

pytestmark = pytest.mark.usefixtures("quiet", "shared_cache")


@pytest.mark.parametrize("change", CHANGES)
def test_change_is_detected(change: Callable[[Any], Any]) -> None:
    plain = nn.Sequential(Net()).eval()
    fast = decorate(plain)
    before = check(fast, plain, X)
    undo = change(plain[0])
    try:
        assert not torch.allclose(check(fast, plain, X), before)
        check(fast, plain, X)
    finally:
        if undo:
            undo()
    check(fast, plain, X)


def test_a_hook_for_all_modules_runs_for_each_and_only_while_it_is_there() -> None:
    plain = Net().eval()
    fast = decorate(plain)
    fast(X)
    seen: list[str] = []
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, *_: seen.append(type(module).__name__)
    )
    try:
        fast(X)
        ours, seen[:] = list(seen), []
        plain(X)
        assert ours == seen
    finally:
        hook.remove()
    hits = fast.cache_info().hits
    fast(X)
    fast(X)
    assert fast.cache_info().hits == hits + 2


def test_global_hooks_are_refused_by_functions() -> None:
    layer = nn.Linear(4, 4).eval()
    fast = decorate(lambda x: layer(x) + 0.5, strict=True)
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(NotCompiled, match="every module has a forward hook"):
            fast(X)
    finally:
        hook.remove()
    torch.testing.assert_close(fast(X), layer(X) + 0.5)


class Slotted(nn.Linear):
    __slots__ = ("factor",)
    factor: float

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, self.weight, self.bias) * self.factor


def test_modules_with_slots_run_in_eager() -> None:
    plain = Slotted(4, 4).eval()
    plain.factor = 2.0
    alone, inside = decorate(plain), decorate(nn.Sequential(plain).eval())
    check(alone, plain, X)
    check(inside, plain, X)
    plain.factor = 3.0
    check(inside, plain, X)
    assert alone.cache_info().eager == 1 and inside.cache_info().eager == 2
    assert "'0.factor' is in __slots__" in str(inside.explain())


def test_parametrizations_in_training_mode_are_compiled() -> None:
    plain = nn.Sequential(nn.Linear(4, 4)).eval()
    parametrizations.weight_norm(plain[0])  # a new module, in training mode
    check(decorate(plain, strict=True), plain, X)


def test_non_changes_do_not_rebuild() -> None:
    fast = decorate(Net().eval(), strict=True)
    fast(X)
    Layer.made = 3  # type: ignore[attr-defined]
    fast(X)
    weights = fast.layers[0].weight
    Layer.made += 1  # type: ignore[attr-defined]
    decorate(nn.Sequential(nn.Linear(4, 3)).eval(), strict=True)(X)
    fast(X)
    assert weights is fast.layers[0].weight
    assert fast.cache_info().hits == 2 and fast.cache_info().misses == 1
    del Layer.made  # type: ignore[attr-defined]


def test_state_after_a_restored_one_is_distinguished() -> None:
    plain: Any = nn.Sequential(Net()).eval()
    fast = decorate(plain, strict=True)
    ways = {"a": lambda x: x * 2, "b": lambda x: x * 3, "c": lambda x: x * 4}
    for way in "abacbac":
        plain[0].layers[1].forward = ways[way]
        check(fast, plain, X)
        check(fast, plain, X)
    assert fast.cache_info().misses == 3


def test_modules_with_the_same_layers_in_another_order_are_distinguished() -> None:
    layers = {"a": nn.Linear(4, 4), "b": nn.Tanh()}
    swapped = dict(reversed(layers.items()))
    both = [nn.Sequential(OrderedDict(order)) for order in (layers, swapped)]
    plain = nn.Sequential(*both).eval()
    check(decorate(plain, strict=True), plain, X)
    for module in both:
        check(decorate(module, strict=True), module, X)


class Collections(nn.Module):
    """Holds tensors, functions and modules in lists, dicts and tuples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tensors = [torch.ones(4), torch.ones(4)]
        self.pair = (torch.ones(4), 1.0)
        self.named = {"scale": torch.ones(4)}
        self.functions = [torch.tanh]
        self.layers = [nn.Linear(4, 4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        for function in self.functions:
            x = function(x)
        return sum(self.tensors, x) * self.named["scale"] + self.pair[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.tensors.__setitem__(0, torch.zeros(4)),
        lambda net: net.tensors.pop(),
        lambda net: setattr(net, "pair", (torch.zeros(4), 1.0)),
        lambda net: net.named.update(scale=torch.full((4,), 3.0)),
        lambda net: net.functions.__setitem__(0, torch.sin),
        lambda net: net.layers.__setitem__(0, nn.Tanh()),
        lambda net: net.layers.append(nn.Tanh()),
    ],
)
def test_replaced_collection_items_are_detected(change: Callable[[Any], Any]) -> None:
    plain = Collections().eval()
    fast = decorate(plain, strict=True)
    check(fast, plain, X)
    change(plain)
    fast.pair = plain.pair  # replaced here; the others are shared and edited in place
    check(fast, plain, X)
    check(fast, plain, X)
    assert fast.cache_info().misses == 2


@pytest.mark.parametrize(
    "odd",
    [
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.eye(4).to_sparse(),
        lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
        lambda: torch.ones(4, device="meta"),
        lambda: torch.ones(4, dtype=torch.complex64).conj(),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_unread_tensors_may_be_of_any_kind(odd: Callable[[], torch.Tensor]) -> None:
    plain: Any = Net().eval()
    fast = decorate(plain, strict=True)
    fast.unused = plain.unused = odd()
    check(fast, plain, X)


# ---------------------------------------------------------------- modules that are not registered


class Holder(nn.Module):
    """Calls a module that it holds without registering it."""

    def __init__(self, hold: Callable[[nn.Module], Any], find: Callable[[Any], Any]) -> None:
        super().__init__()
        object.__setattr__(self, "held", hold(self.made()))
        self.find = find

    @staticmethod
    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()

    def forward(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return torch.tanh(self.find(self.held)(x))


HOLDERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "attribute": (lambda m: m, lambda h: h),
    "list": (lambda m: [m], lambda h: h[0]),
    "tuple": (lambda m: (1, m), lambda h: h[1]),
    "dict": (lambda m: {"a.b": [m]}, lambda h: h["a.b"][0]),
    "set": (lambda m: {m}, lambda h: next(iter(h))),
    "deque": (lambda m: deque([m]), lambda h: h[0]),
    "method": (lambda m: m.forward, lambda h: h),
    "partial": (lambda m: functools.partial(m.forward), lambda h: h),
}


def changes_of(inner: Any) -> list[Callable[[], Any]]:
    return [
        lambda: inner[0].weight.mul_(2),
        lambda: setattr(inner[0], "weight", weight(4, 4)),
        lambda: setattr(inner[1], "bias", None),
        lambda: inner.append(nn.Tanh()),
        lambda: setattr(inner[0], "__class__", Scaled),
        lambda: inner[1].register_forward_hook(lambda m, a, r: r + 5),
    ]


@pytest.mark.parametrize("how", HOLDERS)
def test_unregistered_modules_are_watched(how: str) -> None:
    inner: list[Any] = []

    def hold(module: Any) -> Any:
        inner.append(module)
        return HOLDERS[how][0](module)

    plain = Holder(hold, HOLDERS[how][1]).eval()
    fast = decorate(plain)
    before = check(fast, plain, X)
    assert "runs compiled" in str(fast.explain())
    changes = changes_of(inner[0])
    for change in changes if how == "list" else changes[:2]:
        change()
        after = check(fast, plain, X)
        assert not torch.allclose(after, before)
        before = after


def test_parent_module_is_not_watched() -> None:
    class Child(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.parent: list[nn.Module] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    parent = nn.Sequential(decorate(Child().eval(), strict=True))
    child: Any = parent[0]
    child.parent.append(parent)
    for _ in range(3):
        child(X)
        parent.steps = torch.zeros(1)
    parent.train()
    child.eval()
    child(X)
    assert child.cache_info().hits == 3


def test_gradients_reach_unregistered_modules() -> None:
    plain: Any = Holder(*HOLDERS["list"]).eval()
    fast = decorate(plain)
    with torch.enable_grad():
        for module in (plain, fast):
            module(X).sum().backward()
            if module is plain:
                expected = plain.held[0][0].weight.grad.clone()
                plain.held[0].zero_grad()
    torch.testing.assert_close(plain.held[0][0].weight.grad, expected)


def test_untied_weights_are_distinguished() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
            self.two.weight = self.one.weight

        def forward(self, x, *rest):  # type: ignore[no-untyped-def]
            return self.two(self.one(x))

    plain = Tied().eval()
    fast = decorate(plain, strict=True)
    check(fast, plain, X)
    plain.two.weight = weight(4, 4)
    check(fast, plain, X)
    plain.one.weight.data = plain.two.weight.data
    check(fast, plain, X)
    plain.two.weight.data = weight(4, 4).data * 3
    check(fast, plain, X)


def _refuse(self: object, *args: object) -> NoReturn:
    raise NotImplementedError


def _refusing(base: type, *methods: str) -> Any:
    return type(f"Refusing{base.__name__}", (base,), dict.fromkeys(methods, _refuse))


UNUSUAL = {
    "tuple": _refusing(tuple, "__len__", "__iter__", "__eq__", "__hash__")((1, 2)),
    "list": _refusing(list, "__len__", "__iter__", "__bool__", "__eq__")([1, 2]),
    "dict": _refusing(dict, "__len__", "__iter__", "values", "items", "keys")(a=1),
    "set": _refusing(set, "__len__", "__iter__", "__contains__")([1]),
    "str": _refusing(str, "__len__", "__hash__")("a"),
    "float": _refusing(float, "__eq__", "__float__")(3.0),
    "object": _refusing(object, "__len__", "__eq__", "__hash__", "__iter__", "__bool__")(),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_attributes_need_no_usual_methods(name: str) -> None:
    """Tuples of e3nn raise an error in `len`."""
    model = nn.Linear(4, 3).eval()
    model.unusual = UNUSUAL[name]
    fast = decorate(model, compare=False, strict=True)
    with torch.inference_mode():
        for rows in (2, 2, 3):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(fast(x), model(x))
    assert fast.cache_info().eager == 0

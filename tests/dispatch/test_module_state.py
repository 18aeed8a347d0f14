"""Changes that a dispatcher notices: of weights, structure and hooks, and by forward itself."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

from tests.dispatch.nets import Scaled, X, assert_same
from tvmify import TvmifyWarning
from tvmify import tvmify as decorate
from tvmify.dispatch import attempt, module_state


def write_in_place(m: Scaled) -> None:
    with torch.no_grad():
        m.linear.weight.mul_(3)


def write_buffer(m: Scaled) -> None:
    m.shift.add_(1)


def load_state(m: Scaled) -> None:
    m.load_state_dict(Scaled().state_dict())


def swap_parameter(m: Scaled) -> None:
    m.linear.weight = nn.Parameter(torch.eye(4))


def swap_buffer(m: Scaled) -> None:
    m.shift = torch.full((4,), 7.0)


def swap_in_the_registry(m: Scaled) -> None:
    m.linear._parameters["bias"] = nn.Parameter(torch.ones(4))


def point_elsewhere(m: Scaled) -> None:
    m.linear.weight.data = torch.eye(4)


def step_an_optimizer(m: Scaled) -> None:
    m.linear.weight.grad = torch.ones(4, 4)
    torch.optim.SGD([m.linear.weight], lr=1.0).step()


def write_through_data(m: Scaled) -> None:
    m.linear.weight.data.copy_(torch.eye(4))


def write_through_numpy(m: Scaled) -> None:
    m.shift.numpy()[:] = 5


def swap_equal_submodule(m: Scaled) -> None:
    m.linear = nn.Linear(4, 4)


@pytest.mark.parametrize(
    "change",
    [
        write_in_place,
        write_buffer,
        load_state,
        swap_parameter,
        swap_buffer,
        swap_in_the_registry,
        point_elsewhere,
        step_an_optimizer,
        write_through_data,
        write_through_numpy,
        swap_equal_submodule,
    ],
)
def test_new_weights_take_effect_without_a_build(
    pair: tuple[Any, Scaled], change: Callable[[Scaled], None]
) -> None:
    fast, _ = pair
    with torch.no_grad():
        before = fast(X)
    change(fast)
    assert_same(fast)
    with torch.no_grad():
        assert not torch.allclose(fast(X), before)
    assert fast.cache_info().builds == 1


def test_weights_are_packed_once_for_all_shapes(pair: tuple[Any, Scaled]) -> None:
    fast, _ = pair
    assert_same(fast, x=X[:2])
    assert_same(fast, x=X[:1])
    write_in_place(fast)
    for rows in (1, 2, 3):
        assert_same(fast, x=X[:rows])
    assert fast.cache_info().builds == 3


def set_attribute(m: Scaled) -> None:
    m.scale = 5.0


def set_attribute_of_a_submodule(m: Scaled) -> None:
    m.norm.eps = 0.5


def replace_submodule(m: Scaled) -> None:
    m.norm = nn.Identity()  # type: ignore[assignment]


def replace_list(m: Scaled) -> None:
    m.sizes = [4]


@pytest.mark.parametrize(
    "change", [set_attribute, set_attribute_of_a_submodule, replace_submodule, replace_list]
)
def test_structure_change_is_detected_without_refresh(
    pair: tuple[Any, Scaled], change: Callable[[Scaled], None]
) -> None:
    fast, _ = pair
    change(fast)
    assert_same(fast)
    assert fast.cache_info().builds == 2


class Signed(nn.Module):
    """Returns the signs of zeros in an attribute and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.0
        self.scales = [0.0]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return 1 / (x * self.scale), 1 / (x * self.scales[0])


def test_the_sign_of_a_zero_is_a_change() -> None:
    fast, x = cast("Any", decorate(Signed().eval(), cache=False)), torch.ones(64)
    for scale, item in ((0.0, 0.0), (-0.0, 0.0), (-0.0, -0.0), (0.0, 0.0)):
        fast.scale, fast.scales = scale, [item]
        for result, zero in zip(fast(x), (scale, item), strict=True):
            assert torch.equal(result, 1 / (x * zero))
    assert fast.cache_info().builds == 3


def test_a_nan_is_equal_to_itself() -> None:
    fast, x = cast("Any", decorate(Signed().eval(), cache=False)), torch.ones(64)
    for _ in range(3):
        fast.scale = float("nan")
        assert fast(x)[0].isnan().all()
    assert fast.cache_info().builds == 1


def test_edit_in_place_needs_refresh(pair: tuple[Any, Scaled]) -> None:
    fast, _ = pair
    fast.sizes[0] = 9
    fast.refresh()
    assert_same(fast)


def test_a_single_element_written_through_data_needs_refresh(pair: tuple[Any, Scaled]) -> None:
    fast, _ = pair
    fast.linear.weight.data[1, 1] = 9
    fast.refresh()
    assert_same(fast)
    assert fast.cache_info().builds == 1


def test_weights_made_in_inference_mode_have_no_version_and_are_still_followed() -> None:
    with torch.inference_mode():
        fast: Any = decorate(Scaled().eval(), strict=True)
        fast(X)
        fast.load_state_dict(Scaled().state_dict())
        assert_same(fast)
    assert fast.cache_info().builds == 1


def test_a_tensor_of_a_closure_is_followed(inference: None) -> None:
    table = torch.arange(4.0)
    fast = decorate(lambda x: x + table, strict=True)
    assert torch.equal(fast(X), X + table)
    table.mul_(3)
    assert torch.equal(fast(X), X + table)
    assert torch.equal(fast(X), X + table)
    assert fast.cache_info().entries == 1


def test_a_module_is_freed_with_its_last_reference() -> None:
    plain = Scaled().eval()
    fast: Any = decorate(plain, strict=True)
    with torch.no_grad():
        fast(X)
    weight = weakref.ref(plain.linear.weight)
    gc.collect()  # frees what torch.export left behind
    gc.disable()
    try:
        del fast, plain
        assert weight() is None
    finally:
        gc.enable()


def test_restored_state_hits_again(pair: tuple[Any, Scaled]) -> None:
    fast, _ = pair
    for _ in range(3):
        fast.scale = 5.0
        assert_same(fast)
        fast.scale = 2.0
        assert_same(fast)
    assert fast.cache_info().builds == 2


def test_a_hook_on_a_submodule_is_honoured() -> None:
    fast: Any = decorate(Scaled().eval())
    with torch.no_grad():
        fast(X)
    seen: list[int] = []
    handle = fast.linear.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad(), pytest.warns(TvmifyWarning, match="'linear' has a forward hook"):
        fast(X)
    assert seen == [1]
    handle.remove()
    assert_same(fast)
    assert fast.cache_info().builds == 1


class ChangesItself(nn.Module):
    def __init__(self, change: Callable[[Any, torch.Tensor], object]) -> None:
        super().__init__()
        self.calls, self.seen, self.latest, self.history = 0, {}, [None], []
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self, x)
        return x + self.calls


def count(net: Any, x: torch.Tensor) -> None:
    net.calls += 1


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (count, "calls"),
        (lambda net, x: net.history.append(x * 2), "history"),
        (lambda net, x: net.latest.__setitem__(0, x * 2), "latest"),
        (lambda net, x: net.seen.update(x=x * 2), "seen"),
    ],
    ids=["attribute", "list", "item", "dict"],
)
def test_self_modifying_module_runs_eager(
    change: Callable[[Any, torch.Tensor], object], name: str, captured: list[int]
) -> None:
    net = ChangesItself(change).eval()
    fast: Any = decorate(copy.deepcopy(net))
    with pytest.warns(TvmifyWarning) as record:
        for _ in range(12):
            assert torch.equal(fast(X), net(X))
    assert fast.calls == net.calls
    assert f"changes from call to call ({name})" in str(record[-1].message)
    assert len(captured) <= 3  # two see the change, and one is after the fifth


class Asks(nn.Module):
    """Cannot be captured with tensors of inference mode, and sets an attribute in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.parameters_of_call: dict[str, torch.Tensor] = {}
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.parameters_of_call = {"n": torch.tensor([1.0])}
        return self.linear(x * 2 if x.is_inference() else x)


@pytest.mark.usefixtures("inference")
def test_a_module_that_fails_and_changes_itself_is_soon_left(
    count_calls: Callable[..., list[Any]],
) -> None:
    attempts = count_calls(attempt, "capture")
    net = Asks().eval()
    fast: Any = decorate(copy.deepcopy(net), compare=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TvmifyWarning)
        for _ in range(10):
            x = torch.randn(3, 4)
            torch.testing.assert_close(fast(x), net(x))
    assert len(attempts) <= 3  # two of the module, one of the part
    assert (fast.cache_info().eager, fast.cache_info().builds) == (5, 1)


class Grid(nn.Module):
    """Keeps a value derived from the shape of a call, as detectors do. TorchScript refuses it."""

    def __init__(self) -> None:
        super().__init__()
        self.size, self.grid = 0, None
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, **_: object) -> torch.Tensor:
        if self.size != x.shape[0]:
            self.size, self.grid = x.shape[0], torch.arange(x.shape[0]).unsqueeze(1)
        return self.linear(x) + self.grid


@pytest.mark.usefixtures("inference")
def test_calls_of_alternating_shapes_are_not_captured_each_time(
    count_calls: Callable[..., list[Any]],
) -> None:
    attempts = count_calls(attempt, "capture")
    net = Grid().eval()
    fast: Any = decorate(copy.deepcopy(net), compare=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TvmifyWarning)
        for size in (2, 3) * 2:
            x = torch.randn(size, 4)
            torch.testing.assert_close(fast(x), net(x))
        assert len(attempts) == 2
        for _ in range(3):  # now it does not change
            torch.testing.assert_close(fast(x), net(x))
    assert len(attempts) == 3
    assert fast.cache_info().builds == 1
    assert fast.cache_info().eager == 5


class Remembers(nn.Module):
    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.counts = counts
        self.calls, self.latest, self.history = 1, None, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.latest = x
        if self.counts:
            self.calls += 1
            self.history.append(x.sum())
        return self.body(x) * self.calls


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.usefixtures("inference")
def test_submodules_are_compiled_if_a_module_changes_itself_in_each_call(*, counts: bool) -> None:
    net = Remembers(counts=counts).eval()
    fast: Any = decorate(copy.deepcopy(net), compare=False)
    for step in range(12):
        if step == 9:  # these are not changes by forward
            for module in (net, fast):
                module.calls = 50
                module.body.weight.mul_(2)
        x = torch.randn(3, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TvmifyWarning)
            torch.testing.assert_close(fast(x), net(x))
        assert fast.latest is x
    assert (fast.calls, len(fast.history)) == (net.calls, len(net.history))
    info = fast.cache_info()
    assert info.eager <= 7
    assert info.builds == 1
    (method,) = fast.explain().methods
    assert {part.name for part in method.parts} == {"Remembers.body"}


class Anchors(nn.Module):
    """Sets an attribute in each call, from the second on to an equal list.

    Detectors of torchvision do so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.anchors: list[torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.anchors = list(self.anchors or [torch.ones(4)])
        y = self.body(x)
        return y + self.anchors[0] if len(y[y > 0].unique()) > 1 else y


@pytest.mark.usefixtures("inference")
def test_attributes_set_to_equal_values_are_not_inspected_forever(
    count_calls: Callable[..., list[Any]],
) -> None:
    inspected = count_calls(module_state, "watch")
    net = Anchors().eval()
    fast: Any = decorate(copy.deepcopy(net), compare=False)
    counts = []
    for _ in range(12):
        x = torch.randn(3, 4)
        torch.testing.assert_close(fast(x), net(x))
        counts.append(len(inspected))
    assert counts[-1] == counts[-4]
    info = fast.cache_info()
    assert (info.builds, info.eager) == (1, 0)
    (method,) = fast.explain().methods
    assert [(part.name, part.info.misses) for part in method.parts] == [("Anchors.body", 1)]
    fast.body = nn.Linear(4, 4).eval()
    net.body = fast.body
    torch.testing.assert_close(fast(x), net(x))
    fast.anchors = net.anchors = [torch.zeros(4)]
    torch.testing.assert_close(fast(x), net(x))


class Supervised(nn.Module):
    """Keeps the results of all levels in one list, as segmentation networks do."""

    def __init__(self, levels: int, found: list[torch.Tensor]) -> None:
        super().__init__()
        self.level = levels
        self.body = nn.Linear(4, 4)
        self.inner = Supervised(levels - 1, found) if levels else None
        self.found = found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        if self.inner is not None:
            x = x + self.inner(x)
        self.found[self.level] = x
        return x


@pytest.mark.usefixtures("inference")
def test_modules_within_one_that_changes_itself_are_not_waited_for_again() -> None:
    net = Supervised(3, [X] * 4).eval()
    fast: Any = decorate(copy.deepcopy(net), compare=False)
    for _ in range(10):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TvmifyWarning)
            torch.testing.assert_close(fast(x := torch.randn(3, 4)), net(x))
        torch.testing.assert_close(fast.found, net.found)
    assert fast.cache_info().builds == 1  # a Linear, whose program all levels share
    assert "Supervised.inner.inner.inner.body" in str(fast.explain())


def test_module_initialized_by_first_call_compiles_at_second() -> None:
    def set_up(net: Any, x: torch.Tensor) -> None:
        if net.calls == 0:
            net.calls = 3

    fast: Any = decorate(ChangesItself(set_up).eval())
    with pytest.warns(TvmifyWarning, match="sets the attribute calls"):
        fast(X)
    assert torch.equal(fast(X), X + 3)
    assert fast.cache_info().builds == 1

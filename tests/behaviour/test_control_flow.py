"""Control flow that depends on values: regions are compiled, TorchScript runs the rest."""

from __future__ import annotations

import copy
import functools
from typing import Any, List, Tuple  # noqa: UP035

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from tests.behaviour.control_flow import decorated, eager
from tests.threads import together
from tvmify import NotCompiled, TvmifyWarning, tvmify

# TorchScript reads the old spellings of generic types everywhere.
# ruff: noqa: UP006


class Branch(nn.Module):
    """A branch in a branch, code before and after, and an early return."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)) * 2
        if bool(h.sum() > 0):
            h = torch.sigmoid(self.second(h)) + h
            if bool(h.max() > 2.5):
                return torch.exp(-h) * 3 + 1
        else:
            h = torch.cos(h) * 0.5 - h
        return torch.relu(h) * h + 1


class Until(nn.Module):
    """A loop that carries a tensor and a number, and ends depending on the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tuple[Tensor, int]:
        count = 0
        while bool(x.abs().sum() > 1) and count < 20:
            x = torch.tanh(self.step(x)) * 0.25 + 0.125 * x
            count += 1
        return x, count


class Sequence(nn.Module):
    """A loop over a length that collects its results, and may end early."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tuple[Tensor, List[Tensor]]:
        h = torch.zeros(x.size(1), 8)
        found: List[Tensor] = []
        for i in range(x.size(0)):
            h = torch.tanh(self.cell(torch.cat([x[i], h], 1))) * 1.5
            if bool(h[0, 0] > 1.25):
                break
            found.append(h)
        return h, found


@pytest.mark.usefixtures("inference")
def test_branches_and_early_returns_take_the_way_of_eager() -> None:
    net = decorated(Branch, strict=True)
    ways = set()
    for scale in (1, -1, 4, -4):
        for _ in range(4):
            x = torch.randn(2, 8) * scale
            assert_close(net(x), eager(net, x))
            h = torch.tanh(net.first(x)) * 2
            ways.add((bool(h.sum() > 0), bool((torch.sigmoid(net.second(h)) + h).max() > 2.5)))
    assert len(ways) > 2
    text = str(net.explain())
    assert "runs by regions" in text
    assert "a branch depends on" in text or "number is read" in text
    assert text.count("a region of") == 5
    assert "1 linear" in text


@pytest.mark.usefixtures("inference")
def test_a_region_in_a_loop_is_compiled_once_for_each_shape() -> None:
    net = decorated(Until)
    for rows, programs in ((3, 2), (3, 2), (5, 4)):
        x = torch.randn(rows, 8)
        result, count = net(x)
        expected, expected_count = eager(net, x)
        assert_close(result, expected)
        assert count == expected_count > 1
        assert net.cache_info().builds == programs
        assert net.cache_info().entries == programs


@pytest.mark.usefixtures("inference")
def test_a_second_process_takes_the_regions_from_disk() -> None:
    x = torch.randn(3, 8)
    first, second = decorated(Until), decorated(Until)
    first(x)
    assert first.cache_info().builds == 2
    second(x)
    assert second.cache_info().builds == 0


@pytest.mark.usefixtures("inference")
def test_a_loop_may_end_early_and_collect_tensors() -> None:
    net = decorated(Sequence)
    lengths = set()
    for length in (1, 6, 6, 6):
        x = torch.randn(length, 2, 4) * 2
        (h, found), (expected, expected_found) = net(x), eager(net, x)
        assert_close(h, expected)
        assert type(found) is list
        assert len(found) == len(expected_found)
        lengths.add(len(found))
        for ours, theirs in zip(found, expected_found, strict=True):
            assert_close(ours, theirs)
    assert len(lengths) > 1
    assert net.cache_info().builds == 1


@pytest.mark.usefixtures("inference")
def test_changed_weights_are_seen_by_every_region() -> None:
    net = decorated(Until)
    x = torch.randn(3, 8)
    net(x)
    net.step.weight.mul_(0.5)
    assert_close(net(x)[0], eager(net, x)[0])
    net.step.weight = nn.Parameter(torch.eye(8) * 0.5, requires_grad=False)
    assert_close(net(x)[0], eager(net, x)[0])
    net.load_state_dict({k: torch.randn_like(v) for k, v in net.state_dict().items()})
    assert_close(net(x)[0], eager(net, x)[0])
    assert net.cache_info().builds == 2


def test_gradients_match_eager() -> None:
    net = decorated(Branch)
    x = torch.randn(2, 8)
    net(x).sum().backward()
    ours = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    eager(net, x).sum().backward()
    theirs = [p.grad for p in net.parameters() if p.grad is not None]
    assert ours and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    with pytest.warns(TvmifyWarning, match="requires a gradient"):
        assert net(x.requires_grad_()).requires_grad


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for i in range(4):
            x = torch.exp(x) * 0.25 + 1
            if bool(x.max() > 100):
                raise ValueError(f"too large after {i}")
        return x


@pytest.mark.usefixtures("inference")
def test_exception_in_a_loop_matches_eager() -> None:
    net = decorated(Raises)
    assert_close(net(-torch.ones(4)), eager(net, -torch.ones(4)))
    with pytest.raises(ValueError, match="too large after 1"):
        net(torch.full((4,), 3.0))


# ------------------------------------------------------------------------------- writes and views


def _written_between(x: Tensor, out: Tensor) -> Tensor:
    y = torch.exp(torch.sin(x) * 2) * 2 + 1
    view = y[0]  # made before the write, used after it
    if bool(y.sum() > 0):
        y.mul_(2)
    z = torch.sin(view) * 3 + y
    z[0] = 7
    return torch.cos(z) * 2 - view


def _written_in_a_loop(x: Tensor, out: Tensor) -> Tensor:
    out = out.clone()
    h = x
    for i in range(out.size(0)):
        h = torch.tanh(h) * 1.5 + 0.1
        if bool(h.sum() > -1000):
            out[i] = h[0]
    return torch.exp(out) * 2 + h[0]


def _argument_written(x: Tensor, out: Tensor) -> Tensor:
    y = torch.exp(x) * 2 + 1
    if bool(y.sum() > 0):
        out.add_(y)
    return torch.sin(out) * 2 + y


def _views_returned(x: Tensor, out: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    y = torch.exp(x) * 2 + 1
    if bool(y.sum() < 0):
        return y, y, y
    z = torch.sin(y) * 2 + 1
    return z[0], z.view(-1), x.t()


@pytest.mark.usefixtures("inference")
@pytest.mark.parametrize(
    "function", [_written_between, _written_in_a_loop, _argument_written, _views_returned]
)
def test_writes_and_views_are_as_in_eager(function: Any) -> None:
    ours = tvmify(torch.jit.script(function))
    for _ in range(2):
        x, out = torch.randn(3, 3), torch.zeros(3, 3)
        x2, out2 = x.clone(), out.clone()
        result, expected = ours(x, out), function(x2, out2)
        assert_close(result, expected)
        assert_close(out, out2)
        if isinstance(result, tuple):
            for tensors in (result, expected):
                tensors[0].add_(1)  # shares memory with the second
                tensors[2].mul_(2)  # shares memory with the argument
            assert_close(result, expected)
            assert_close(x, x2)
    assert ours.cache_info().entries > 0


class Counts(nn.Module):
    """Keeps state in attributes, and has a method besides forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0
        self.last = torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        if self.last.numel() > 0:
            x = torch.tanh(x + self.last) * 0.5
        y = torch.relu(self.linear(x)) * 2 + 1
        self.last = y
        self.calls += 1
        return y * self.calls

    @torch.jit.export
    def reset(self) -> None:
        self.last = torch.zeros(0)
        self.calls = 0


@pytest.mark.usefixtures("inference")
def test_a_script_module_keeps_its_state() -> None:
    script = torch.jit.script(Counts()).eval()
    ours, theirs = tvmify(copy.deepcopy(script), strict=True), copy.deepcopy(script)
    for round_ in range(2):
        for call in range(3):
            x = torch.randn(2, 4)
            assert_close(ours(x), theirs(x))
            assert ours.calls == theirs.calls == call + 1
            assert_close(ours.last, theirs.last)
        assert ours.cache_info().builds == 2
        ours.reset()
        theirs.reset()
        assert ours.last.numel() == 0, round_


def test_state_and_gradients_together_stay_with_eager() -> None:
    ours = tvmify(torch.jit.script(Counts()).eval())
    with pytest.warns(TvmifyWarning, match="may have side effects"):
        assert ours(torch.randn(2, 4)).requires_grad
    assert ours.calls == 1


@pytest.mark.usefixtures("inference")
def test_plain_module_setting_attributes_stays_eager() -> None:
    net = decorated(Counts)
    with pytest.warns(TvmifyWarning, match="attribute"):
        net(torch.randn(2, 4))
    assert net.calls == 1


@pytest.mark.usefixtures("inference")
def test_threads_share_a_module() -> None:
    net = decorated(Until, dynamic=False)
    inputs = [torch.randn(rows, 8) for rows in (2, 3, 4, 2, 3, 4)]
    results: dict[int, Any] = {}

    def call(i: int) -> None:
        with torch.inference_mode():
            for _ in range(5):
                results[i] = net(inputs[i])

    together(functools.partial(call, i) for i in range(len(inputs)))
    for i, x in enumerate(inputs):
        assert_close(results[i][0], eager(net, x)[0])
    assert net.cache_info().builds == 2 * 3


class Grows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        while bool(x.sum() < 50):
            y = torch.exp(-x) * 0.5 + 1
            x = torch.cat([x, y])
        return x


@pytest.mark.usefixtures("inference")
def test_shapes_without_end_run_in_eager_from_some_number_on() -> None:
    net = decorated(Grows, dynamic=False, cache_size=2)
    x = torch.ones(2)
    with pytest.warns(TvmifyWarning, match="more signatures than cache_size"):
        assert_close(net(x), eager(net, x))
    assert net.cache_info().builds == 2


@pytest.mark.usefixtures("inference")
def test_random_numbers_match_eager() -> None:
    @tvmify
    def noisy(x: Tensor) -> Tensor:
        y = torch.exp(x) * 2 + 1
        if bool(y.sum() > 0):
            y = torch.sin(y + torch.rand_like(y)) * 2
        return torch.cos(y) * y + torch.randn(3)

    x = torch.randn(3)
    for _ in range(2):
        torch.manual_seed(3)
        ours = noisy(x)
        torch.manual_seed(3)
        assert_close(ours, noisy.__wrapped__(x))
    assert noisy.cache_info().entries > 0


def test_strict_refuses_functions_without_regions() -> None:
    @tvmify(strict=True)
    def small(x: Tensor) -> Tensor:
        return x + 1 if bool(x.sum() > 0) else x - 1

    with pytest.raises(NotCompiled, match="values"), torch.no_grad():
        small(torch.ones(2))

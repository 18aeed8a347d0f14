"""Buffers and arguments that a call writes to, and results that share memory with others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tvmify
from tests.behaviour.stateful import Stateful, X, twice_written
from tests.threads import together
from tvmify import TvmifyWarning
from tvmify import tvmify as decorate
from tvmify.decorate.decorated import dispatcher_of


class Counter(Stateful):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x @ self.weight * self.calls


class UnscriptableCounter(Stateful):
    def forward(self, x, *rest):  # type: ignore[no-untyped-def]
        self.calls += 1
        self.total.add_(x.sum(0))
        return x @ self.weight * self.calls + self.total


class Cache(Stateful):
    """Keys of a transformer, written at a position given as a tensor."""

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        self.cache.index_copy_(1, position, x @ self.weight)
        return self.cache.sum(1)


class Slices(Stateful):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache[:, 1:] = self.cache[:, :-1].clone()
        self.cache[:, 0] = x
        self.cache[0].mul_(2)
        return self.cache.mean(1)


class Rows(Stateful):
    def forward(self, x: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        self.cache[row, column] = x
        return self.cache @ self.weight


class Normalized(Stateful):
    """Batch norm with statistics of the batch, in a module in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm: Any = self.norm
        norm.num_batches_tracked.add_(1)
        normal = F.batch_norm(
            x, norm.running_mean, norm.running_var, norm.weight, norm.bias, True, 0.3, 1e-5
        )
        return normal @ self.weight


def sequence(*calls: Any) -> list[tuple[Any, ...]]:
    return [call if isinstance(call, tuple) else (call,) for call in calls]


AT = [torch.tensor([i]) for i in (0, 4, 0)]
PROGRAMS = [
    (Counter, sequence(*X)),
    (UnscriptableCounter, sequence(*X)),
    (Cache, [(x[:, None], at) for x, at in zip(X, AT, strict=True)]),
    (Slices, sequence(*X)),
    (Rows, [(x, torch.tensor([1, 0]), torch.tensor([i, -1])) for i, x in enumerate(X)]),
    (Normalized, sequence(*X)),
]


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    found = dict(module.named_buffers()) | dict(module.named_parameters())
    return found | {k: v for k, v in vars(module).items() if isinstance(v, torch.Tensor)}


def assert_same_tensors(ours: Any, theirs: Any) -> None:
    for name, tensor in tensors_of(theirs).items():
        assert torch.allclose(tensors_of(ours)[name], tensor, atol=1e-5), name


def dispatcher(fast: Any) -> Any:
    return dispatcher_of(fast)


@pytest.mark.parametrize(("cls", "calls"), PROGRAMS, ids=lambda v: getattr(v, "__name__", ""))
def test_state_changes_as_in_eager(cls: Any, calls: Any):
    plain = cls().eval()
    reference = copy.deepcopy(plain)
    fast = decorate(plain, strict=True)
    identities = {name: id(tensor) for name, tensor in tensors_of(fast).items()}
    weights = set()
    for args in calls:
        with torch.no_grad():
            expected, actual = reference(*args), fast(*args)
        assert torch.allclose(actual, expected, atol=1e-5)
        assert_same_tensors(fast, reference)
        weights.add(id(dispatcher(fast).state.module.weights))
    assert {name: id(tensor) for name, tensor in tensors_of(fast).items()} == identities
    info = fast.cache_info()
    assert (info.builds, info.misses, info.hits) == (1, 1, len(calls) - 1)
    assert len(weights) == 1  # packed once
    assert "writes to" in str(fast.explain())


def test_gradients_come_from_eager():
    plain = Counter().eval()
    fast = decorate(plain)
    with pytest.warns(TvmifyWarning, match=r"writes to 'calls'.*no_grad"):
        fast(X[0]).sum().backward()
    assert plain.calls == 1 and plain.weight.grad is not None
    with torch.no_grad():
        fast(X[0])
    assert plain.calls == 2
    assert "runs compiled" in str(fast.explain())


def test_state_is_read_when_it_is_needed(no_grad: None):
    fast = decorate(Counter().eval(), strict=True)
    fast(X[0])
    fast.calls.fill_(10)
    assert torch.allclose(fast(X[0]), X[0] @ fast.weight * 11, atol=1e-4)
    fast.calls = torch.tensor(20)
    assert torch.allclose(fast(X[0]), X[0] @ fast.weight * 21, atol=1e-4)
    with torch.no_grad():
        fast.weight.mul_(2)
    assert torch.allclose(fast(X[0]), X[0] @ fast.weight * 22, atol=1e-4)
    assert fast.calls == 22 and fast.cache_info().builds == 1


class Switched(Stateful):
    """Reads a buffer in some calls, and writes to it in others."""

    def forward(self, x: torch.Tensor, write: bool) -> torch.Tensor:
        if write:
            self.weight.add_(1)
        return x @ self.weight


@pytest.mark.parametrize("first", [True, False])
def test_a_packed_copy_does_not_outlive_a_write(first: bool, no_grad: None):
    plain = Switched().eval().requires_grad_(False)
    reference = copy.deepcopy(plain)
    fast = decorate(plain, strict=True)
    for write in (first, not first, True, False, False, True, False):
        assert torch.allclose(fast(X[0], write), reference(X[0], write), atol=1e-4)


def test_aliased_buffer_runs_eager(no_grad: None):
    plain = Counter().eval()
    plain.register_buffer("other", plain.calls.view(1))

    class Both(Counter):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x * self.other

    plain.__class__ = Both
    fast = decorate(plain)
    with pytest.warns(TvmifyWarning, match="'calls' and 'other' share"):
        for i in range(3):
            assert torch.allclose(fast(X[0]), X[0] * (i + 1))


def test_failing_call_leaves_the_state_of_eager(no_grad: None):
    class Indexed(Stateful):
        def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x[at]

    fast = decorate(Indexed().eval())
    fast(X[0], torch.tensor([0]))
    with pytest.raises(IndexError):
        fast(X[0], torch.tensor([5]))
    assert fast.calls == 2  # eager counted before it failed
    fast(X[0], torch.tensor([1]))
    assert fast.calls == 3


def test_warm_up_and_capture_do_not_mutate(no_grad: None):
    for cls, calls in PROGRAMS:
        fast = decorate(cls().eval(), strict=True)
        before = copy.deepcopy(tensors_of(fast))
        fast.warmup(list(calls[0]))
        for name, tensor in tensors_of(fast).items():
            assert tensor.equal(before[name]), (cls, name)


@pytest.mark.parametrize("size", [1, 3])
def test_capture_writes_to_no_tensor_of_a_closure(size: int, no_grad: None):
    held, items = torch.zeros(size), [torch.zeros(size)]

    def closure(x, *rest):  # type: ignore[no-untyped-def]
        return x + held.add_(1)

    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = items

        def forward(self, x, *rest):  # type: ignore[no-untyped-def]
            return x + self.items[0].add_(1)

    for program, tensor in ((closure, held), (Listed().eval(), items[0])):
        fast = decorate(program)
        with pytest.warns(TvmifyWarning, match="neither argument nor buffer"):
            fast(torch.zeros(size))
        assert tensor.eq(1).all()
        assert fast(torch.zeros(size)).eq(2).all()


def test_threads_of_one_stateful_module(no_grad: None):
    fast = decorate(Counter().eval(), strict=True)
    fast(X[0])

    def work() -> None:
        with torch.inference_mode():
            for _ in range(200):
                ratio = fast(X[0]) / (X[0] @ fast.weight)
                assert torch.allclose(ratio, ratio[0, 0].round(), atol=1e-2)

    together([work] * 4)
    assert 200 < fast.calls <= 801


def test_a_second_process_finds_the_code(no_grad: None):
    first = decorate(Counter().eval(), strict=True)
    first(X[0])
    again = decorate(Counter().eval(), strict=True)
    again(X[0])
    again(X[0])
    assert again.calls == 2 and again.cache_info().builds == 0


def test_saving_state_is_refused(tmp_path: Any, no_grad: None):
    example = (X[0],)
    for program in (Counter().eval(), twice_written):
        with pytest.raises(tvmify.SaveError, match="writes to"):
            tvmify.save(program, tmp_path / "file.pt", example_inputs=example)
        with pytest.raises(tvmify.SaveError, match="writes to"):
            tvmify.export(program, example_inputs=example)

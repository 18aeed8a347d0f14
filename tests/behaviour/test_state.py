"""Buffers and arguments that a call writes to, and results that share memory with others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tvmify
from tests.threads import together
from tvmify import TvmifyWarning
from tvmify import tvmify as decorate
from tvmify.decorate.decorated import dispatcher_of


class Stateful(nn.Module):
    """What the modules here have: two buffers, a plain tensor and a weight."""

    calls: torch.Tensor
    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(2, 6, 4), persistent=False)
        self.total = torch.zeros(4)
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16).reshape(4, 4))


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
    """Keys of a transformer: written at a position that is a tensor."""

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
    """Batch normalization by the batch, in a module that is otherwise not training."""

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


@pytest.fixture
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def sequence(*calls: Any) -> list[tuple[Any, ...]]:
    return [call if isinstance(call, tuple) else (call,) for call in calls]


def inputs(count: int, *shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


X = inputs(3, 2, 4)
AT = [torch.tensor([i]) for i in (0, 4, 0)]
PROGRAMS = [
    (Counter, sequence(*X)),
    (UnscriptableCounter, sequence(*X)),
    (Cache, [(x[:, None], at) for x, at in zip(X, AT, strict=True)]),
    (Slices, sequence(*X)),
    (Rows, [(x, torch.tensor([1, 0]), torch.tensor([i, -1])) for i, x in enumerate(X)]),
    (Normalized, sequence(*X)),
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVMIFY_CACHE_DIR", str(tmp_path))


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


# ---------------------------------------------------------------------------------- arguments


def twice_written(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    x[:, 1:].mul_(2)
    return x


def handed_on(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    old = x.clone()
    x.copy_(y)
    y.copy_(old * 2)
    return old, x + y


def through_a_view(x: torch.Tensor) -> torch.Tensor:
    x.view(-1)[3:5].fill_(7)
    return x.sum()


def with_out(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.mul(x, y, out=x)


def rounded(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    x.masked_fill_(mask > 0, -1.0).clamp_(-0.5, 0.5)
    return x.t()


def inplace_relu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x, inplace=True) + 1


# No schema says that these write.
def of_a_batch(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, mean[0], variance[0], training=True, momentum=0.3)


def of_instances(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    return F.instance_norm(x.T[None], mean[1], variance[2])


WRITERS = [
    *(twice_written, handed_on, through_a_view, with_out, rounded, inplace_relu),
    *(of_a_batch, of_instances),
]


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same elements, every second column of a larger tensor."""
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1])
    wide[..., ::2] = x
    return wide[..., ::2]


def given(function: Callable[..., Any]) -> list[torch.Tensor]:
    return inputs(function.__code__.co_argcount, 3, 4)


def same_storage(results: Any, args: Any) -> list[list[bool]]:
    tensors = [*(results if isinstance(results, tuple) else (results,)), *args]
    starts = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [[a == b for b in starts] for a in starts]


@pytest.mark.parametrize("function", WRITERS)
def test_arguments_are_written_as_in_eager(function: Callable[..., Any], no_grad: None):
    fast = decorate(function, strict=True)
    for _ in range(2):
        ours, theirs = given(function), given(function)
        versions = [tensor._version for tensor in ours]
        actual, expected = fast(*ours), function(*theirs)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(ours, theirs)
        assert same_storage(actual, ours) == same_storage(expected, theirs)
        changed = [not torch.equal(a, b) for a, b in zip(ours, given(function), strict=True)]
        assert [t._version > v for t, v in zip(ours, versions, strict=True)] == changed
    assert fast.cache_info().hits == 1


@pytest.mark.parametrize(
    ("size", "step", "runs_eager"), [(2, 2, False), (2, 3, True), (1, 5, True)]
)
def test_windows_are_written_as_in_eager(size: int, step: int, runs_eager: bool, no_grad: None):
    def function(x: torch.Tensor) -> torch.Tensor:
        x.unfold(0, size, step).mul_(2)
        return x + 1

    fast, (x,) = decorate(function), inputs(1, 8)
    with pytest.warns(TvmifyWarning, match="windows") if runs_eager else nullcontext():
        found = fast(y := x.clone())
    assert torch.equal(found, function(x))
    assert torch.equal(y, x)


@pytest.mark.parametrize(("start", "size"), [(0, 2), (0, 0), (3, 0)])
def test_out_is_resized_as_in_eager(start: int, size: int, no_grad: None):
    def function(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        torch.sum(x, 0, out=out[start:] if start else out)
        return x + 1

    x = torch.randn(3, 2)
    memory = [torch.zeros(8) for _ in range(2)]
    ours, theirs = (m[: start + size] for m in memory)
    with nullcontext() if size == 2 else pytest.warns(TvmifyWarning, match="changes the shape"):
        assert torch.equal(decorate(function)(x, ours), function(x, theirs))
    assert torch.equal(ours, theirs)
    assert torch.equal(*memory)


def test_strided_arguments_are_written_where_they_are(no_grad: None):
    fast = decorate(handed_on, strict=True)
    ours = [strided(x) for x in given(handed_on)]
    theirs = [strided(x) for x in given(handed_on)]
    torch.testing.assert_close(fast(*ours), handed_on(*theirs))
    torch.testing.assert_close([x._base for x in ours], [x._base for x in theirs])


def test_mutated_argument_is_returned_as_itself(no_grad: None):
    fast = decorate(twice_written, strict=True)
    (x,) = given(twice_written)
    assert fast(x) is x


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.view(3, 4)], ids=["itself", "view"])
def test_aliased_arguments_run_eager(view: Callable[..., Any], no_grad: None):
    fast = decorate(handed_on)
    fast(*given(handed_on))
    (ours,), (theirs,) = inputs(1, 3, 4), inputs(1, 3, 4)
    with pytest.warns(TvmifyWarning, match="shares memory"):
        actual = fast(ours, view(ours))
    torch.testing.assert_close(actual, handed_on(theirs, view(theirs)))
    torch.testing.assert_close(ours, theirs)


def test_unwritable_argument_is_refused_as_in_eager(no_grad: None):
    fast = decorate(twice_written)
    fast(*given(twice_written))
    with pytest.raises(RuntimeError):
        fast(torch.zeros(1, 4).expand(3, 4))
    with torch.inference_mode():
        x = torch.zeros(3, 4)
        fast(x.clone())
    with pytest.raises(RuntimeError):
        fast(x)


def test_weight_as_argument_runs_eager(no_grad: None):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 4), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return x * self.weight

    plain = Scaled().eval()
    fast = decorate(plain)
    fast(torch.zeros(3, 4))
    with pytest.warns(TvmifyWarning, match="shares memory"):
        assert fast(plain.weight).equal(torch.full((3, 4), 4.0))
    assert fast(torch.zeros(3, 4)).equal(torch.full((3, 4), 2.0))


# ------------------------------------------------------------------------------------ results


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


# -------------------------------------------------------------------------------- around a call


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
    """Reads a buffer in one kind of call, and writes to it in another."""

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

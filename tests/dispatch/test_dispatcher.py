from __future__ import annotations

import copy
import functools
import gc
import os
import subprocess
import sys
import textwrap
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import tvmify
from tests.threads import together
from tests.tolerances import assert_close_to_reference
from tvmify import TensorSpec, TvmifyWarning
from tvmify import tvmify as decorate
from tvmify.dispatch import dispatcher, module_state
from tvmify.dispatch.progress import Stages


class Scaled(nn.Module):
    """A module with one of each kind of thing that can change later."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("shift", torch.ones(4))
        self.scale = 2.0
        self.sizes = [1, 2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)) * self.scale + self.shift * self.sizes[0]


X = torch.linspace(-1, 1, 12).reshape(3, 4)


@pytest.fixture
def pair() -> tuple[Any, Scaled]:
    """A compiled module that was called once, and the eager one it shares its parts with."""
    plain = Scaled().eval()
    fast = decorate(plain, strict=True)
    with torch.no_grad():
        fast(X)
    return fast, plain


def assert_same(fast: Any, module: Any = None, x: torch.Tensor = X) -> None:
    module = module or fast
    with torch.no_grad():
        assert torch.allclose(fast(x), Scaled.forward(module, x), atol=1e-5)


# ------------------------------------------------------------------------------------- weights


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


# ----------------------------------------------------------------------------------- structure


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


def test_edit_in_place_needs_refresh(pair: tuple[Any, Scaled]) -> None:
    fast, _ = pair
    fast.sizes[0] = 9
    fast.refresh()
    assert_same(fast)


def test_another_thread_refreshes_between_a_miss_and_the_lock(
    pair: tuple[Any, Scaled], monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, _ = pair

    def refresh_first(*args: Any) -> Stages:
        fast.refresh()
        return Stages(*args)

    monkeypatch.setattr(dispatcher, "Stages", refresh_first)
    assert_same(fast, x=X[:2])


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
    gc.collect()  # what torch.export left behind while this was built
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
    assert len(captured) <= 6


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
def test_what_a_module_calls_is_compiled_if_it_changes_itself_each_time(*, counts: bool) -> None:
    net = Remembers(counts=counts).eval()
    fast: Any = decorate(copy.deepcopy(net), compare=False)
    for step in range(12):
        if step == 9:  # which are no changes of its own
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
    """As torchvision's detectors: each call sets an attribute, the second and later ones to an
    equal list.
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
def test_what_forward_sets_to_equal_values_is_not_inspected_for_ever(
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
    """Keeps what each of its levels finds in one list, as networks for segmentation do."""

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
    assert fast.cache_info().builds == 1  # that of a Linear, which all levels share
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


# --------------------------------------------------------------------------- modes and refusals


def test_training_runs_eager_with_one_warning_and_back() -> None:
    fast: Any = decorate(Scaled())
    with pytest.warns(TvmifyWarning, match="the module is in training mode") as record:
        fast(X)
        fast(X)
    assert len(record) == 1
    assert fast.norm.num_batches_tracked == 2
    fast.eval()
    assert_same(fast)
    fast.norm.train()
    with pytest.warns(TvmifyWarning, match="submodule 'norm' is in training"):
        fast(X)


def test_input_requiring_grad_runs_eager() -> None:
    fast: Any = decorate(Scaled().eval())
    x = X.clone().requires_grad_()
    with pytest.warns(TvmifyWarning, match="an input requires a gradient"):
        fast(x).sum().backward()
    assert x.grad is not None
    with torch.no_grad():
        fast(x)
    assert fast.cache_info().builds == 1


def test_weights_get_gradients() -> None:
    plain = Scaled().eval()
    fast: Any = decorate(plain, strict=True)
    result = fast(X)
    assert result.requires_grad
    assert fast.cache_info().builds == 1
    result.square().sum().backward()
    gradients = {n: p.grad for n, p in plain.named_parameters()}
    plain.zero_grad()
    plain(X).square().sum().backward()
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(gradients[name], parameter.grad, atol=1e-4)


def test_gradients_reach_an_unreferenced_module() -> None:
    weight = nn.Parameter(torch.eye(4))

    def compiled() -> torch.Tensor:
        net = nn.Linear(4, 4, bias=False).eval()
        net.weight = weight
        return decorate(net, strict=True)(X)

    compiled().sum().backward()
    assert weight.grad is not None
    assert torch.allclose(weight.grad, X.sum(0).expand(4, 4), atol=1e-5)


def test_weights_changed_before_backward_are_an_error_as_in_eager() -> None:
    fast: Any = decorate(Scaled().eval())
    result = fast(X)
    with torch.no_grad():
        fast.linear.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_frozen_weights_give_plain_results() -> None:
    fast: Any = decorate(Scaled().eval().requires_grad_(False), strict=True)
    assert not fast(X).requires_grad
    fast.linear.weight.requires_grad_(True)
    assert fast(X).requires_grad


@pytest.mark.parametrize(
    ("call", "error", "word"),
    [
        (lambda m: m.train()(X), tvmify.TrainingMode, "training mode"),
        (lambda m: m(X.clone().requires_grad_()), tvmify.GradientsNeeded, "gradient"),
        (lambda m: m(X.to(torch.complex64)), tvmify.UnsupportedInput, "complex64"),
        (lambda m: m(X.to_sparse()), tvmify.UnsupportedInput, "sparse"),
        (lambda m: m(X.to("meta")), tvmify.UnsupportedTarget, "meta"),
    ],
)
def test_strict_names_the_reason_and_the_next_step(
    call: Callable[[Any], Any], error: type[tvmify.NotCompiled], word: str
) -> None:
    fast = decorate(Scaled().eval(), strict=True)
    with pytest.raises(error, match=word) as caught:
        call(fast)
    assert caught.value.next_step in str(caught.value)


def test_an_error_of_the_model_is_the_error_of_eager() -> None:
    fast: Any = decorate(Scaled().eval())
    with torch.no_grad(), pytest.raises(RuntimeError, match="mat1 and mat2"):
        fast(torch.ones(3, 5))


# --------------------------------------------------------------------------- caches and keys


def test_two_instances_share_the_code_but_not_the_weights() -> None:
    one, two = (decorate(Scaled().eval(), strict=True) for _ in range(2))
    assert_same(one)
    assert_same(two)
    assert tvmify.cache_info(one).builds == 1
    assert tvmify.cache_info(two).builds == 0
    assert tvmify.cache_info(two).disk_hits == 0


class Minus(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x - y


class ReversedMinus(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y - x


class MinusTwice(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x - 2 * y


def test_different_wiring_or_constants_are_different_programs(inference: None) -> None:
    for cls in (Minus, ReversedMinus, MinusTwice):
        fast = decorate(cls().eval(), strict=True)
        assert torch.equal(fast(X, X * 3), cls()(X, X * 3))
        assert fast.cache_info().builds == 1


def test_a_cpu_feature_is_part_of_the_key(inference: None) -> None:
    features = [f"+{name}" for name in tvmify.runtime.cpu_features()]  # type: ignore[attr-defined]
    smaller = [name for name in features if "avx512" not in name]
    for mattr in (features, smaller):
        target = {"kind": "llvm", "mattr": mattr}
        fast: Any = decorate(Minus().eval(), target=target, strict=True)
        assert torch.equal(fast(X, X * 3), X - X * 3)
        assert fast.cache_info().builds == int(mattr is features or smaller != features)


def test_keyed_modes_have_separate_entries(inference: None) -> None:
    class Filled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.ones(3, 1)

    fast = decorate(Filled().eval())
    fast(X)
    torch.set_default_dtype(torch.float64)
    try:
        assert fast(X).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert fast(X).dtype == torch.float32


def test_a_default_device_does_not_stop_compilation(inference: None) -> None:
    fast = decorate(Scaled().eval(), strict=True)
    with torch.device("cpu"):
        assert_same(fast)
        assert_same(fast)
    assert fast.cache_info().entries == 1


def test_the_memory_cache_has_the_size_of_the_option(inference: None) -> None:
    fast = decorate(Minus().eval(), strict=True, cache_size=2, dynamic=False)
    with pytest.warns(TvmifyWarning, match="more than cache_size=2 signatures"):
        for rows in (1, 2, 3):
            fast(X[:rows], X[:rows])
    assert fast.cache_info().entries == 2
    fast(X[:1], X[:1])
    assert fast.cache_info().builds == 3  # the code was still in memory
    assert fast.cache_info().misses == 4


def test_no_files_without_disk_cache(cache_directory: Path, inference: None) -> None:
    fast = decorate(Minus().eval(), strict=True, cache=False)
    fast(X, X)
    assert not cache_directory.exists()


def test_warm_up_builds_and_the_call_hits(pair: tuple[Any, Scaled]) -> None:
    fast, _ = pair
    fast.warmup([(5, 4)], [TensorSpec((6, 4))], {"x": torch.zeros(7, 4)})
    builds = fast.cache_info().builds
    assert builds == 4
    with torch.no_grad():
        fast(torch.ones(5, 4))
        fast(torch.ones(6, 4))
        fast(x=torch.ones(7, 4))
    assert fast.cache_info().builds == builds


def test_warm_up_reports_refusals() -> None:
    fast: Any = decorate(Scaled())
    with pytest.warns(TvmifyWarning, match="training"):
        fast.warmup([(5, 4)])
    with pytest.raises(tvmify.TrainingMode):
        decorate(Scaled(), strict=True).warmup([(5, 4)])  # type: ignore[attr-defined]


PROGRAM = """
    import sys, torch, tvmify
    from torch import nn

    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(4, 8, 1), nn.ReLU(), nn.Linear(3, 2)).eval()
    fast = tvmify.tvmify(net, strict=True)
    x = torch.linspace(-1, 1, 12).reshape(1, 4, 3)
    with torch.no_grad():
        assert torch.allclose(fast(x), net(x), atol=1e-5)
    info = fast.cache_info()
    slow = [name for name in ("tvm", "torch._dynamo", "sympy") if name in sys.modules]
    print(info.builds, info.disk_hits, slow, *sorted(info.seconds))
"""


def run(program: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(program)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def test_second_process_loads_from_disk_without_tvm() -> None:
    assert run(PROGRAM, PYTHONHASHSEED="1").startswith("1 0 ['tvm', 'torch._dynamo', 'sympy']")
    assert run(PROGRAM, PYTHONHASHSEED="2").startswith("0 1 []")


# ------------------------------------------------------------------------- structure and threads


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Nested(nn.Module):
    def forward(
        self, batch: dict, pair: tuple, *, offset: torch.Tensor, twice: bool = False
    ) -> dict:
        total = batch["a"] + batch["b"][0] * pair[1]
        total = total * 2 if twice else total
        return {"sum": total + offset, "pair": (pair[0], [total - offset, 3]), "none": None}


def test_nested_inputs_and_outputs_and_keywords(inference: None) -> None:
    net = Nested().eval()
    fast = decorate(net, strict=True)
    args = ({"a": X, "b": [X * 2]}, (X + 1, X - 1))
    for kwargs in ({"offset": X}, {"offset": X, "twice": True}):
        assert_close_to_reference(fast(*args, **kwargs), net, args, kwargs)
    assert fast.cache_info().builds == 2


def test_registered_pytrees_are_supported(inference: None) -> None:
    class Swap(nn.Module):
        def forward(self, pair: Pair) -> Pair:
            return Pair(pair.right * 2, pair.left + 1)

    fast = decorate(Swap().eval(), strict=True)
    result = fast(Pair(X, X - 1))
    assert isinstance(result, Pair)
    assert torch.equal(result.left, (X - 1) * 2)
    fast(Pair(X, X - 1))
    assert fast.cache_info().hits == 1


BASE = torch.linspace(-1, 1, 65)

ODD_TENSORS = {
    "transposed": BASE[:64].reshape(8, 8).t(),
    "strided": BASE[::3],
    "misaligned": BASE[1:],
    "expanded": BASE[:1].expand(4, 5),
    "channels last": BASE[:64].reshape(1, 4, 4, 4).contiguous(memory_format=torch.channels_last),
    "zero-size": torch.empty(0),
    "zero-size in two dimensions": torch.empty(3, 0),
    "0-dim": torch.tensor(0.5),
}


@pytest.mark.parametrize("name", ODD_TENSORS)
def test_odd_tensors_are_right(name: str, inference: None) -> None:
    def normalized(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x) / (x.abs() + 1) - x

    fast = decorate(normalized, strict=True)
    assert_close_to_reference(fast(ODD_TENSORS[name]), normalized, (ODD_TENSORS[name],))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: (x, 3), "computes no tensor"),
        (lambda x: x.to_sparse().to_dense(), "aten._to_sparse"),
        (lambda x: x[x > 0], "depends on the values of tensors"),
    ],
)
def test_unsupported_module_runs_eager_with_a_reason(
    function: Callable[[torch.Tensor], Any], reason: str, inference: None
) -> None:
    fast = decorate(function)
    with pytest.warns(TvmifyWarning, match=reason):
        torch.manual_seed(1)
        result = fast(X.clone())
    torch.manual_seed(1)
    torch.testing.assert_close(result, function(X.clone()), rtol=0, atol=0)
    strict = decorate(function, strict=True)
    with pytest.raises(tvmify.NotCompiled, match=reason):
        strict(X.clone())


def test_returned_argument_is_the_same_object(inference: None) -> None:
    fast = decorate(lambda x: (x, x + 1), strict=True)
    assert fast(X)[0] is X


def test_results_belong_to_the_caller(inference: None) -> None:
    fast = decorate(Minus().eval(), strict=True)
    first = fast(X, X * 2)
    kept = first.clone()
    for _ in range(10):
        fast(X * 5, X)
    assert torch.equal(first, kept)
    first.zero_()
    assert torch.equal(fast(X, X * 2), kept)


def test_concurrent_first_calls_build_once() -> None:
    plain = Scaled().eval()
    fast: Any = decorate(plain, strict=True, dynamic=False)
    with torch.no_grad():
        expected = {rows: plain(X[:rows]) for rows in (1, 2, 3)}
    barrier = threading.Barrier(8)

    def work(seed: int) -> None:
        barrier.wait()
        with torch.no_grad():
            for i in range(200):
                rows = (seed + i) % 3 + 1
                assert torch.allclose(fast(X[:rows]), expected[rows], atol=1e-5)

    together(functools.partial(work, seed) for seed in range(8))
    assert fast.cache_info().builds == 3


def test_explain_reports_where_calls_ran() -> None:
    fast: Any = decorate(Scaled().eval())
    with torch.no_grad():
        fast(X)
    with pytest.warns(TvmifyWarning):
        fast(X.clone().requires_grad_())
    text = str(fast.explain())
    assert "runs compiled" in text
    assert "captured by: torchscript" in text
    assert "code: built" in text
    assert "runs in eager PyTorch: an input requires a gradient" in text
    assert "kernels:" in text


def test_explain_names_the_nearest_older_entry() -> None:
    fast: Any = decorate(Minus().eval())
    with torch.no_grad():
        fast(X, X)
        assert "nearest older entry" not in str(fast.explain())
        fast(X[:2], X[:2])
    text = str(fast.explain())
    assert text.count("nearest older entry") == 1
    assert "      inputs 0: shape [2, 4] → [3, 4]\n" in text
    again: Any = decorate(Minus().eval())
    with torch.no_grad():
        again(X, X)
    assert "nearest" not in str(again.explain())  # nothing was missed


def test_progress_is_shown_only_on_request(capfd: pytest.CaptureFixture[str]) -> None:
    with torch.no_grad():
        decorate(Minus().eval(), cache=False)(X[:1], X[:1])
    assert capfd.readouterr().err == ""

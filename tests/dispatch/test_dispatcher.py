from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import tvmify
from tests.dispatch.nets import Minus, Scaled, X, assert_same
from tests.threads import together
from tests.tolerances import assert_close_to_reference
from tvmify import TensorSpec, TvmifyWarning
from tvmify import tvmify as decorate
from tvmify.dispatch import dispatcher
from tvmify.dispatch.progress import Stages


def test_another_thread_refreshes_between_a_miss_and_the_lock(
    pair: tuple[Any, Scaled], monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, _ = pair

    def refresh_first(*args: Any) -> Stages:
        fast.refresh()
        return Stages(*args)

    monkeypatch.setattr(dispatcher, "Stages", refresh_first)
    assert_same(fast, x=X[:2])


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


@pytest.mark.parametrize(
    ("call", "error", "word"),
    [
        (lambda m: m.train()(X), tvmify.TrainingMode, "training mode"),
        (lambda m: m(X.clone().requires_grad_()), tvmify.GradientsNeeded, "gradient"),
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

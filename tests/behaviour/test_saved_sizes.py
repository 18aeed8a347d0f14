"""Saved files with programs for many shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import tvmify
from tests.processes import run_python
from tests.tolerances import assert_close_to_reference


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


class Parity(Small):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x.relu() if x.size(0) % 2 == 1 else x.tanh()


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(count))


def called(module: nn.Module, *counts: int, **options: Any) -> Any:
    fast = tvmify.tvmify(module, **{"dynamic": None, "cache": False, "strict": True} | options)
    with torch.inference_mode():
        for count in counts:
            fast(rows(count))
    return fast


def signatures(module: Any) -> list[str]:
    return list(module._tvmify.explain())


def check(served: Any, module: nn.Module, *counts: int) -> None:
    with torch.no_grad():
        for count in counts:
            assert_close_to_reference(served(rows(count)), module, (rows(count),), {})


@pytest.fixture
def small() -> nn.Module:
    torch.manual_seed(0)
    return Small().eval()


def test_unseen_lengths_run_without_the_compiler(tmp_path: Path, small: nn.Module) -> None:
    tvmify.save(called(small, 3, 5), tmp_path / "model.pt")
    torch.save((rows(11), small(rows(11))), tmp_path / "expected.pt")
    script = """
        import sys
        import torch
        import tvmify.runtime
        model = torch.jit.load("model.pt")
        model._tvmify.set_strict(True)
        x, expected = torch.load("expected.pt")
        with torch.inference_mode():
            torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
        assert not {"tvm", "tvm_ffi", "tvmify.compiler"} & set(sys.modules)
        print(len(model._tvmify.explain()))
    """
    done = run_python(script, cwd=tmp_path)
    assert done.stdout.split() == ["2"]  # for the first length, and for any


def test_each_size_class_is_saved_once(tmp_path: Path, small: nn.Module) -> None:
    fast = called(small, 3, 5, 20, 30, 100)
    builds = fast.cache_info().builds
    tvmify.save(fast, tmp_path / "all.pt")
    tvmify.save(fast, tmp_path / "one.pt", example_inputs=rows(7))
    assert fast.cache_info().builds == builds == 3
    for name, count in ("all.pt", 3), ("one.pt", 2):
        loaded = tvmify.load(tmp_path / name, strict=True)
        assert len(signatures(loaded)) == count
        check(loaded, small, 2, 7, 17, 70, 300)


def test_guarded_sizes_run_uncompiled(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Parity().eval()
    fast = called(module, 3, 5)
    tvmify.save(fast, tmp_path / "model.pt", example_inputs=rows(7))
    strict = tvmify.load(tmp_path / "model.pt", strict=True)
    check(strict, module, 3, 9, 33)
    for count in (1, 4):
        with pytest.raises(RuntimeError, match="holds no code"):
            strict(rows(count))
    loaded = tvmify.load(tmp_path / "model.pt")
    with pytest.warns(UserWarning, match="holds no code"):
        check(loaded, module, 4)


def test_branches_on_a_size_are_saved_each(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Parity().eval()
    tvmify.save(called(module, 3, 5, 4), tmp_path / "model.pt")
    check(tvmify.load(tmp_path / "model.pt", strict=True), module, 2, 3, 5, 8, 11)


def test_true_saves_a_program_for_many_shapes_without_a_call(
    tmp_path: Path, small: nn.Module
) -> None:
    tvmify.save(called(small, dynamic=True), tmp_path / "model.pt", example_inputs=rows(6))
    check(tvmify.load(tmp_path / "model.pt", strict=True), small, 2, 6, 40)


def test_keyword_calls_have_separate_programs(tmp_path: Path, small: nn.Module) -> None:
    fast = called(small)
    tvmify.save(fast, tmp_path / "model.pt", signatures=[[(3, 8)], [(5, 8)]])
    loaded = tvmify.load(tmp_path / "model.pt", strict=True)
    check(loaded, small, 3, 5)
    with pytest.raises(RuntimeError, match="holds no code"):
        loaded(rows(4))


def test_dynamic_programs_are_built_for_all_targets(tmp_path: Path, small: nn.Module) -> None:
    plain = {"kind": "llvm", "mattr": ["+avx2", "+fma"]}
    tvmify.save(called(small, 3, 5), tmp_path / "model.pt", targets=[plain])
    check(tvmify.load(tmp_path / "model.pt", strict=True), small, 3, 9)


def test_dims_are_saved_with_all_classes_within_their_limits(
    tmp_path: Path, small: nn.Module
) -> None:
    n = Dim("n", max=80)
    tvmify.save(called(small, 3), tmp_path / "model.pt", signatures=[[(n, 8)]])
    loaded = tvmify.load(tmp_path / "model.pt", strict=True)
    assert len(signatures(loaded)) == 2  # up to 64, and more
    check(loaded, small, 2, 3, 64, 65, 80)
    for count in (1, 81):
        with pytest.raises(RuntimeError, match="holds no code"):
            loaded(rows(count))


def test_declared_sizes_are_saved_without_a_call(tmp_path: Path, small: nn.Module) -> None:
    fast = called(small, dynamic_shapes={"x": {0: Dim("n", max=40)}})
    tvmify.save(fast, tmp_path / "model.pt", example_inputs=rows(6))
    loaded = tvmify.load(tmp_path / "model.pt", strict=True)
    check(loaded, small, 2, 6, 40)
    with pytest.raises(RuntimeError, match="holds no code"):
        loaded(rows(41))


def test_invariable_dims_are_not_saved(tmp_path: Path) -> None:
    module = nn.Upsample(scale_factor=1.3, mode="bicubic").eval()
    with pytest.raises(tvmify.SaveError, match="nothing of Upsample could be compiled"):
        tvmify.save(module, tmp_path / "model.pt", signatures=[[(1, 3, Dim("height"), 8)]])


def test_dims_without_a_program_are_not_saved_as_one_shape(
    tmp_path: Path, small: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tvmify.dispatch.generality.sizes.MOST_PROGRAMS", 0)
    with pytest.raises(tvmify.SaveError, match="no other program with symbolic sizes"):
        tvmify.save(called(small), tmp_path / "model.pt", signatures=[[(Dim("n"), 8)]])


def test_an_exported_program_is_for_one_shape(small: nn.Module) -> None:
    with pytest.raises(tvmify.SaveError, match="a number in place of each Dim"):
        tvmify.export(small, signature=[(Dim("n"), 8)])


class Counts(Small):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:  # type: ignore[override]
        return self.linear(x), x.size(0) * 2


def test_sizes_among_results_are_saved(tmp_path: Path) -> None:
    module = Counts().eval()
    tvmify.save(called(module, 3, 5), tmp_path / "model.pt")
    loaded = tvmify.load(tmp_path / "model.pt", strict=True)
    for count in (3, 7, 40):
        found, doubled = loaded(rows(count))
        assert doubled == 2 * count
        torch.testing.assert_close(found, module(rows(count))[0])

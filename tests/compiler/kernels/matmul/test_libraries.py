"""Products that PyTorch's libraries compute: which ones, and their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tvmify
from tests.compiler.programs import check, compiled, executed, target
from tests.compiler.tune.test_tuning import Stopwatch, tuned
from tests.processes import run_python
from tests.tolerances import assert_close_to_reference
from tvmify.artifact import Artifact
from tvmify.cache import Measurements
from tvmify.compiler import Tuning, compile
from tvmify.compiler.costs import COMPACT
from tvmify.compiler.environment import prepare_tvm
from tvmify.compiler.kernels.matmul import libraries, pairs
from tvmify.compiler.microarchitecture import Microarchitecture
from tvmify.decorate.decorated import saved_method
from tvmify.target import Target, target_for
from tvmify.torch_compat.silence import silenced

NAMES = {line.dtype: line.name for line in libraries.LIBRARIES}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
_AVX512 = "avx2 fma avx512f avx512bw avx512cd avx512dq avx512vl avx512bf16 avx512fp16".split()


@pytest.fixture
def _paired(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use products of pairs for bfloat16 on any processor."""
    monkeypatch.setattr(pairs, "COMPACT", replace(COMPACT, few_unpacked=0.01))
    monkeypatch.setattr(Microarchitecture, "keeps", lambda self, size: False)


@pytest.fixture
def _forced(_paired: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use libraries for all products that they support."""
    lines = tuple(replace(line, unmeasured=lambda *_: True) for line in libraries.LIBRARIES)
    monkeypatch.setattr(libraries, "LIBRARIES", lines)


class Product(nn.Module):
    """A product with a weight, transposed in memory or not, and an epilogue."""

    def __init__(self, transposed: bool, bias: bool, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(40, 64) if transposed else torch.randn(64, 40))
        self.bias = nn.Parameter(torch.randn(40)) if bias else None
        self.transposed, self.after = transposed, after

    def forward(self, x: Tensor) -> Tensor:
        if self.transposed:
            return self.after(F.linear(x, self.weight, self.bias))
        if self.bias is None:
            return self.after(x @ self.weight)
        return self.after(torch.addmm(self.bias, x.flatten(0, -2), self.weight))


class Attention(nn.Module):
    """Three projections that are merged into one product."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        heads = [
            layer(x).unflatten(-1, (4, 16)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 64, 40))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.weight)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(64, 96, bias=False), nn.Linear(64, 96, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.gate(x)) * self.up(x)


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 40)).to(dtype).eval()


def by_library(module: nn.Module, *args: Tensor) -> Artifact:
    """Compile, run, and compare with eager."""
    with torch.no_grad():
        artifact = compiled(module, *args)
        assert_close_to_reference(executed(artifact, module, *args), module, args)
    return artifact


@DTYPES
@pytest.mark.usefixtures("_forced")
@pytest.mark.parametrize("shape", [(40, 64), (3, 17, 64)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_results(dtype, shape, bias, transposed):
    x = torch.randn(shape).to(dtype)
    for after in (torch.relu, lambda y: y):
        module = Product(transposed, bias, after).to(dtype)
        artifact = by_library(module, x)
        (name,) = artifact.report["libraries"].values()
        assert name == NAMES[str(dtype)[6:]]
        assert "matmul" not in artifact.report["kernels"].values()
        assert len(artifact.packed) == 1 + bias


@pytest.mark.usefixtures("_forced")
@pytest.mark.parametrize(
    ("module", "count"),
    [pytest.param(Attention(), 1, id="merged"), pytest.param(Gated(), 0, id="gated")],
)
@DTYPES
def test_products_of_one_input(module, count, dtype):
    artifact = by_library(module.to(dtype), torch.randn(2, 40, 64).to(dtype))
    assert len(artifact.report["libraries"]) == count


@pytest.mark.usefixtures("_forced")
@pytest.mark.parametrize(
    ("program", "shapes"),
    [
        pytest.param(nn.Linear(64, 40), [(31, 64)], id="few rows"),
        pytest.param(torch.matmul, [(40, 64), (64, 40)], id="no weight"),
        pytest.param(nn.Linear(64, 1), [(40, 64)], id="one column"),
        pytest.param(Experts(), [(3, 40, 64)], id="stacked"),
    ],
)
def test_products_left_to_own_kernels(program, shapes):
    artifact = check(program, *(torch.randn(shape) for shape in shapes))
    assert not artifact.report["libraries"]


@pytest.mark.usefixtures("_forced")
def test_unrounded_bfloat16_sums_use_own_kernels():
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 40).bfloat16())

        def forward(self, x: Tensor) -> Tensor:
            return x.float() @ self.weight.float()

    assert not by_library(Wide(), torch.randn(48, 64).bfloat16()).report["libraries"]


class Database:
    """A fake database in which libraries are the fastest, if they are candidates."""

    def __init__(self) -> None:
        self.asked: dict[str, Sequence[str]] = {}

    def best(self, workload: str, candidates: Sequence[str]) -> str | None:
        self.asked[workload] = candidates
        return next((name for name in candidates if "aten::" in name), candidates[0])

    def record(self, workload: str, seconds: Any) -> None:
        raise AssertionError("nothing is to be measured")


@DTYPES
@pytest.mark.usefixtures("_paired")
def test_measured_winner_is_used(dtype):
    module, x, database = mlp(dtype), torch.randn(48, 64).to(dtype), Database()
    with torch.no_grad():
        exported = torch.export.export(module, (x,))
        artifact = compile(exported, target(), tuning=Tuning(lambda *_: [], database))
        assert_close_to_reference(executed(artifact, module, x), module, (x,))
    assert len(artifact.report["libraries"]) == 2
    name = NAMES[str(dtype)[6:]]
    offered = [candidates for candidates in database.asked.values() if len(candidates) == 2]
    assert [candidates[1] for candidates in offered] == [name] * 2
    assert set(artifact.report["libraries"].values()) == {name}


@DTYPES
@pytest.mark.usefixtures("_paired")
def test_candidates_are_measured_with_a_bias_and_an_activation(dtype):
    stopwatch = Stopwatch()
    x = torch.randn(2, 24, 64).to(dtype)
    report = tuned(mlp(dtype), Measurements(None, "cpu"), stopwatch, (x,)).report["tuning"]
    # Our kernels among themselves, and the rule's kernel against a library.
    assert (report["measured"], report["failed"]) == (4, {})
    beside = [i for i, shapes in enumerate(stopwatch.shapes) if len(shapes) == 3]
    assert [stopwatch.shapes[i] for i in beside] == [
        [(2, 24, 64), (96, 64), (96,)],
        [(2, 24, 96), (40, 96), (40,)],
    ]
    for kernel, library in (stopwatch.measured[i] for i in beside):
        kernels = kernel.report["kernels"]
        (product,) = (name for name, rule in kernels.items() if rule == "matmul")
        assert "add" in product and "relu" in product
        assert "matmul" not in library.report["kernels"].values()
        assert "relu" in "".join(library.report["kernels"])


@DTYPES
def test_library_is_not_called_without_amx(dtype):
    x = torch.randn(512, 64).to(dtype)
    features = [name for name in target().features if not name.startswith("amx")]
    with torch.no_grad():
        exported = torch.export.export(mlp(dtype), (x,))
    report = compile(exported, target_for(None, "cpu", features)).report
    assert not report["libraries"] and not report["bridged"]


def lowered(module: nn.Module, x: Tensor, machine: Target) -> dict[str, str]:
    """Return the parts of a program for another machine that libraries compute."""
    prepare_tvm()
    from tvmify.compiler import pipeline
    from tvmify.compiler.frontend.decompositions import decompose
    from tvmify.compiler.frontend.importer import import_program
    from tvmify.compiler.kernels.matmul.call_libraries import called

    built_for = pipeline.tvm_target(machine)
    with torch.no_grad(), silenced(), built_for:
        imported = import_program(decompose(torch.export.export(module, (x,))))
    return called(pipeline.lower(imported.ir_mod, built_for))


@pytest.mark.parametrize(("depth", "fewest"), [(768, 47), (4096, 41), (64, 225)], ids=str)
@pytest.mark.parametrize("named", [False, True], ids=["features", "mcpu"])
def test_amx_is_used_from_a_minimum_number_of_rows(depth, fewest, named):
    amx = {"mcpu": "sapphirerapids", "mattr": []} if named else {}
    option = {"kind": "llvm", "mtriple": "x86_64-unknown-linux-gnu", "mcpu": "x86-64", **amx}
    features = [*_AVX512, *([] if named else ["amx-bf16"])]
    machine = target_for(option, "cpu", features)
    module = nn.Linear(depth, 768).bfloat16()
    for rows, expected in ((fewest - 1, 0), (fewest, 1)):
        x = torch.randn(rows, depth).bfloat16()
        assert len(lowered(module, x, machine)) == expected
    assert not lowered(nn.Linear(depth, 768), torch.randn(2 * fewest, depth), machine)


def test_code_is_generated_for_a_machine_with_amx():
    machine = target_for(None, "cpu", [*_AVX512, "amx-bf16"])
    with torch.no_grad():
        exported = torch.export.export(mlp(torch.bfloat16), (torch.randn(8, 64).bfloat16(),))
    artifact = compile(exported, machine)
    # It also runs without AMX, which only the called libraries use.
    assert "amx-bf16" not in Target.parse(artifact.target).requirements
    assert artifact.report["unscheduled"] == 0


@DTYPES
@pytest.mark.usefixtures("_forced")
def test_new_weights_and_saved_files(dtype, tmp_path: Path):
    module, x = mlp(dtype), torch.randn(48, 64).to(dtype)
    fast: Any = tvmify.tvmify(module, strict=True, compare=False, cache=False)
    with torch.no_grad():
        assert_close_to_reference(fast(x), module, (x,))
        module[0].weight.mul_(2)
        module[2].bias.add_(1)
        result = fast(x)
        assert_close_to_reference(result, module, (x,))
        assert len(saved_method(fast).compiled((x,), {}).report["libraries"]) == 2
        assert "by a library: packed matmul 1x48" in str(fast.explain())
        tvmify.save(fast, tmp_path / "model.pt")
        loaded = tvmify.load(tmp_path / "model.pt", strict=True)
        assert torch.equal(loaded(x), result)
        assert torch.equal(loaded(x), fast(x))


def test_forked_child_does_not_wait_for_parent_threads():
    script = """
        import os, sys
        from dataclasses import replace
        import torch
        import tvmify
        from tvmify.compiler.kernels.matmul import libraries

        lines = libraries.LIBRARIES
        libraries.LIBRARIES = tuple(replace(line, unmeasured=lambda *_: True) for line in lines)
        torch.set_num_threads(2)
        module, x = torch.nn.Linear(512, 512).eval(), torch.randn(128, 512)
        fast = tvmify.tvmify(module, strict=True, compare=False, cache=False)
        with torch.no_grad():
            expected = fast(x)
            child = os.fork()
            if child == 0:
                os._exit(not torch.allclose(fast(x)[:8], expected[:8], atol=1e-5))
            status = os.waitpid(child, 0)[1]
        sys.exit(os.waitstatus_to_exitcode(status) or "by a library" not in str(fast.explain()))
    """
    run_python(script)

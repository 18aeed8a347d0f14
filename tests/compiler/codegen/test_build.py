"""Libraries are linked without another program, unless one is requested or needed."""

from __future__ import annotations

import inspect
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import tvm
from torch import nn

from tvmify import TvmifyWarning, tvmify
from tvmify.cache import DiskCache
from tvmify.compiler import compile
from tvmify.compiler.codegen import build, elf
from tvmify.compiler.codegen.elf import machines
from tvmify.compiler.codegen.objects import is_whole_library
from tvmify.system import toolchain
from tvmify.target import Target

PROGRAM = """
import sys
import torch
from torch import nn
from tvmify import tvmify
torch.manual_seed(0)
layers = nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
net = nn.Sequential(*layers, nn.Linear(1024, 32), nn.LayerNorm(32), nn.GELU()).eval()
fast = tvmify(net, target="llvm", strict=True)
with torch.inference_mode():
    x = torch.randn(2, 3, 16, 16)
    assert torch.allclose(fast(x), net(x), rtol=1e-3, atol=1e-4)
print(fast.cache_info().builds, fast.cache_info().disk_hits, "tvm" in sys.modules)
"""


@pytest.fixture
def no_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CXX", "CC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were run."""
    commands: list[list[str]] = []
    run = toolchain.run

    def noted(command: list[str], *arguments: Any) -> None:
        commands.append(command)
        run(command, *arguments)

    monkeypatch.setattr(toolchain, "run", noted)
    return commands


def refuse(*_: Any) -> bytes:
    raise elf.CannotLink("a relocation of type 99 to f is not known")


def test_no_external_program_is_needed(cache_directory: Path, no_programs: None) -> None:
    said = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.split())
    assert said == [["1", "0", "True"], ["0", "1", "False"]]


def test_the_kernels_of_a_stored_library_have_names(cache_directory: Path, inference: None) -> None:
    net, x = nn.Linear(3, 2).eval(), torch.randn(4, 3)
    tvmify(net, target="llvm", strict=True)(x)
    (library,) = cache_directory.rglob("*.so")
    listed = subprocess.run(["nm", str(library)], capture_output=True, text=True, check=True).stdout
    assert " t tvmify_" in listed and " T __tvm_ffi_tvmify_" in listed


def test_only_functions_of_the_vm_are_not_optimized(
    monkeypatch: pytest.MonkeyPatch, inference: None
) -> None:
    levels: dict[str, int] = {}
    codegen_build = build.codegen_build

    def noted(part: tvm.IRModule, target: tvm.target.Target) -> tvm.runtime.Module:
        names = [variable.name_hint for variable in part.get_global_vars()]
        levels.update(dict.fromkeys(names, int(target.attrs.get("opt-level", 3))))
        return codegen_build(part, target)

    monkeypatch.setattr(build, "codegen_build", noted)
    monkeypatch.setattr(build, "_compiled", inspect.unwrap(build._compiled))
    net, x = nn.Linear(3, 2).eval(), torch.randn(4, 3)
    fast: Any = tvmify(net, target="llvm", strict=True, cache=False)
    assert torch.allclose(fast(x), net(x), atol=1e-5)
    assert {"__vmtir__main", "__vmtir__pack"} < levels.keys()
    assert all(level == 3 * (not name.startswith("__vmtir__")) for name, level in levels.items())


@pytest.mark.parametrize("how", ["ours", "asked for", "needed"])
def test_linker_selection(
    how: str, started: list[list[str]], monkeypatch: pytest.MonkeyPatch, inference: None
) -> None:
    if how == "asked for":
        monkeypatch.setenv("TVMIFY_SYSTEM_LINKER", "1")
    if how == "needed":
        monkeypatch.setattr(elf, "link", refuse)
    net, x = nn.Sequential(nn.Linear(3, 2), nn.Softmax(-1)).eval(), torch.randn(4, 3)
    fast: Any = tvmify(net, target="llvm", strict=True, cache=False)
    assert torch.allclose(fast(x), net(x), atol=1e-5)
    assert len(started) == (how != "ours")


def test_failure_of_both_linkers_runs_eager_with_both_reasons(
    cache_directory: Path, no_programs: None, monkeypatch: pytest.MonkeyPatch, inference: None
) -> None:
    monkeypatch.setattr(elf, "link", refuse)
    net, x = nn.Linear(3, 2).eval(), torch.randn(4, 3)
    fast: Any = tvmify(net, target="llvm")
    with pytest.warns(TvmifyWarning, match=r"type 99 .* no C\+\+ compiler .*apt-get install g\+\+"):
        assert torch.equal(fast(x), net(x))
    assert DiskCache(cache_directory).entries() == []


def test_code_for_another_processor_is_linked_here(no_programs: None) -> None:
    other = "aarch64" if platform.machine() == "x86_64" else "x86_64"
    target = Target.parse(f'{{"kind": "llvm", "mtriple": "{other}-linux-gnu"}}')
    net = nn.Sequential(nn.Linear(3, 16), nn.Softmax(-1)).eval()
    library = compile(torch.export.export(net, (torch.randn(4, 3),)), target).library
    assert library[18:20] == machines.NUMBERS[other].to_bytes(2, "little")
    assert is_whole_library(library)

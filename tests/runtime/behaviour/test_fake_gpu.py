"""Programs on fake GPUs: the device, stream and memory that they use.

C++ and C code in ``fake_gpu`` replaces PyTorch's and CUDA's parts for GPUs, on host memory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.compiler.gpu_programs import cross_built, kernels_on_cpu, needs_nvcc
from tests.compiler.nets import Bags, Block, Residual
from tvmify.compiler.cuda import nvcc

SOURCES = Path(__file__).parents[1] / "fake_gpu"
TORCH = Path(torch.__file__).parent

pytestmark = [
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this PyTorch knows real GPUs"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to build the fake"),
]


def build(command: str, *arguments: str | Path) -> None:
    compiler = [command, "-w", "-O0", "-shared", "-fPIC"]
    subprocess.run([*compiler, *map(str, arguments)], check=True, timeout=300)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process with two fake GPUs."""
    folder = tmp_path_factory.mktemp("fake")
    versions = folder / "versions"
    versions.write_text("libcudart.so.13 { global: *; };")
    for name, *options in (
        ("libcuda.so.1",),
        ("libcudart.so.13", f"-Wl,--version-script={versions}"),
    ):
        build(
            "gcc", SOURCES / "cuda.c", "-o", folder / name, f"-Wl,-soname,{name}", "-ldl", *options
        )
    headers = [f"-I{TORCH / 'include'}", f"-I{TORCH / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10", folder / "libcudart.so.13"]
    fake = folder / "libfake.so"
    build("g++", "-std=c++20", *headers, SOURCES / "torch.cpp", "-o", fake, *libraries)
    return os.environ | {
        "LD_LIBRARY_PATH": f"{folder}:{TORCH / 'lib'}",
        "LD_PRELOAD": f"libtorch_cpu.so {fake}",
    }


def run(environment: dict[str, str], module: str, *arguments: str) -> None:
    command = [sys.executable, "-W", "ignore", "-m", f"tests.runtime.fake_gpu.{module}"]
    done = subprocess.run(
        [*command, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.endswith("done\n"), done.stdout + done.stderr


def test_calls_use_the_device_stream_and_memory_of_their_tensors(environment: dict[str, str]):
    run(environment, "calls")


def images() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Residual(), (torch.randn(2, 3, 32, 32),)


def sequences() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Block(), (torch.randn(2, 6, 32), torch.ones(2, 1, 1, 6, dtype=torch.bool))


def words() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Bags(), (torch.randint(20, (3, 5)),)


@needs_nvcc
@pytest.mark.parametrize("make", [images, sequences, words])
def test_gpu_programs_match_eager(
    make: Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]],
    environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    sources: list[str] = []
    compile_source = nvcc.compile

    def noted(source: str, arch: str) -> bytes:
        sources.append(source)
        return compile_source(source, arch)

    monkeypatch.setattr(nvcc, "compile", noted)
    module, inputs = make()
    artifact = cross_built(module.eval(), *inputs)
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    with torch.no_grad():
        program = {
            "library": torch.frombuffer(bytearray(artifact.library), dtype=torch.uint8),
            "target": artifact.target,
            "weights": [tensors[name].detach() for name in artifact.weights],
            "inputs": list(inputs),
            "expected": [module(*inputs)],
        }
    torch.save(program, tmp_path / "program.pt")
    kernels = kernels_on_cpu(sources[0], tmp_path)
    given = environment | {"FAKE_GPU_KERNELS": str(kernels)}
    run(given, "programs", str(tmp_path / "program.pt"))

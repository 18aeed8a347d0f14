"""Programs on GPUs that are fakes: which device, stream and memory they use.

What PyTorch and CUDA do for a GPU stands in C++ and C beside this, over the memory of the host.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SOURCES = Path(__file__).parent / "fake_gpu"
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
        build("gcc", SOURCES / "cuda.c", "-o", folder / name, f"-Wl,-soname,{name}", *options)
    headers = [f"-I{TORCH / 'include'}", f"-I{TORCH / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10"]
    fake = folder / "libfake.so"
    build("g++", "-std=c++20", *headers, SOURCES / "torch.cpp", "-o", fake, *libraries)
    return os.environ | {
        "LD_LIBRARY_PATH": f"{folder}:{TORCH / 'lib'}",
        "LD_PRELOAD": f"libtorch_cpu.so {fake}",
    }


def test_calls_use_the_device_stream_and_memory_of_their_tensors(environment: dict[str, str]):
    command = [sys.executable, "-W", "ignore", "-m", "tests.runtime.fake_gpu.calls"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.endswith("done\n"), done.stdout + done.stderr

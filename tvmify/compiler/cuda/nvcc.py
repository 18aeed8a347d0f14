"""CUDA C++ → cubin, by nvcc, or by NVRTC where there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tvmify.compiler.cuda import nvrtc
from tvmify.errors import BuildError

#: TVM writes an infinity of type bfloat16 so, which no header of CUDA's knows.
_INFINITY = "-Dinff=__int_as_float(0x7f800000)"
#: No fast math: eager's own kernels are not compiled with it either.
_BOTH = ["-std=c++17", "-w", _INFINITY]
_OPTIONS = [
    *(*_BOTH, "-cubin", "-O3", "--expt-relaxed-constexpr"),
    *(f"-U__CUDA_NO_{name}_OPERATORS__" for name in ("HALF", "BFLOAT16", "BFLOAT162")),
    *(f"-U__CUDA_NO_{name}_CONVERSIONS__" for name in ("HALF", "BFLOAT16", "BFLOAT162")),
]

#: What to do where there is neither.
INSTALL = f"Install the CUDA toolkit and put nvcc on PATH, or `pip install {nvrtc.PACKAGES}`."


def find() -> str | None:
    """Return the path of nvcc: on PATH, in the toolkit that ``CUDA_HOME`` names, or the usual."""
    homes = (os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH"))
    places = [str(Path(home, "bin")) for home in homes if home]
    for folder in (None, *places, "/usr/local/cuda/bin"):
        found = shutil.which("nvcc", path=folder)
        if found is not None:
            return found
    return None


def compile(source: str, arch: str) -> bytes:
    """Compile CUDA C++ for one architecture.

    Raises
    ------
    BuildError
        There is no compiler for it.
    RuntimeError
        The compiler refuses the source, or does not know the architecture.
    """
    nvcc = find()
    if nvcc is not None:
        return _by_nvcc(nvcc, source, arch)
    if nvrtc.find():
        return nvrtc.compile(source, arch, _BOTH)
    raise BuildError("there is no compiler for CUDA", INSTALL)


def _by_nvcc(nvcc: str, source: str, arch: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="tvmify-") as folder:
        given, made = Path(folder, "kernels.cu"), Path(folder, "kernels.cubin")
        given.write_text(source)
        command = [nvcc, f"-arch={arch}", *_OPTIONS, "-o", str(made), str(given)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(f"nvcc for {arch}: {(result.stderr or result.stdout).strip()}")
        return made.read_bytes()

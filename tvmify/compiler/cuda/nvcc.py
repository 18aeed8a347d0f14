"""CUDA C++ → cubin, by nvcc, or by NVRTC where there is none."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tvmify.errors import BuildError

#: TVM writes an infinity of type bfloat16 so, which no header of CUDA's knows.
_INFINITY = "-Dinff=__int_as_float(0x7f800000)"
#: No fast math: eager's own kernels are not compiled with it either.
_OPTIONS = (
    f"-cubin -O3 -w -std=c++17 --expt-relaxed-constexpr {_INFINITY} "
    "-U__CUDA_NO_HALF_OPERATORS__ -U__CUDA_NO_HALF_CONVERSIONS__ "
    "-U__CUDA_NO_BFLOAT16_OPERATORS__ -U__CUDA_NO_BFLOAT16_CONVERSIONS__ "
    "-U__CUDA_NO_BFLOAT162_OPERATORS__ -U__CUDA_NO_BFLOAT162_CONVERSIONS__"
).split()
#: For NVRTC: the first three undo what TVM asks it for.
_EXACT = ["--ftz=false", "--prec-div=true", "--prec-sqrt=true", _INFINITY]


#: What to do where there is neither.
INSTALL = "Install the CUDA toolkit and put nvcc on PATH, or `pip install cuda-bindings`."


def find() -> str | None:
    """Return the path of nvcc: on PATH, in the toolkit that ``CUDA_HOME`` names, or the usual."""
    homes = (os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH"))
    places = [str(Path(home, "bin")) for home in homes if home]
    for folder in (None, *places, "/usr/local/cuda/bin"):
        found = shutil.which("nvcc", path=folder)
        if found is not None:
            return found
    return None


def nvrtc() -> str | None:
    """Return the package through which NVRTC can be called, if it is installed."""
    package = "cuda.bindings"
    found = importlib.util.find_spec("cuda") and importlib.util.find_spec(package)
    return package if found else None


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
    if nvrtc():
        from tvm.support.nvcc import compile_cuda

        return bytes(compile_cuda(source, "cubin", arch, _EXACT, compiler="nvrtc"))
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

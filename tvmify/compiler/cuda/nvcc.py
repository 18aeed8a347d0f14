"""CUDA C++ → machine code and PTX, by nvcc, or by NVRTC where there is none.

Both are for the architecture without its specific features ("sm_90" for "sm_90a"), which TVM's
kernels do not use. So the driver of a later GPU can compile the PTX.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tvmify.compiler.cuda import nvrtc
from tvmify.errors import BuildError

#: TVM's name for an infinity of type bfloat16, which no header of CUDA defines.
_INFINITY = "-Dinff=__int_as_float(0x7f800000)"
#: No fast math: eager's own kernels are not compiled with it either.
_BOTH = ["-std=c++17", "-w", _INFINITY]
OPTIONS = [
    *(*_BOTH, "-fatbin", "-O3", "--expt-relaxed-constexpr"),
    *(f"-U__CUDA_NO_{name}_OPERATORS__" for name in ("HALF", "BFLOAT16", "BFLOAT162")),
    *(f"-U__CUDA_NO_{name}_CONVERSIONS__" for name in ("HALF", "BFLOAT16", "BFLOAT162")),
]

#: What to do if there is neither.
INSTALL = f"Install the CUDA toolkit and put nvcc on PATH, or `pip install {nvrtc.PACKAGES}`."


def find() -> str | None:
    """Return the path of nvcc: on PATH, in the toolkit that ``CUDA_HOME`` names, or in the default
    one.
    """
    homes = (os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH"))
    places = [str(Path(home, "bin")) for home in homes if home]
    for folder in (None, *places, "/usr/local/cuda/bin"):
        found = shutil.which("nvcc", path=folder)
        if found is not None:
            return found
    return None


def compile(source: str, arch: str) -> bytes:
    """Compile CUDA C++ to a fatbin, for one architecture and for all later ones.

    Raises
    ------
    BuildError
        There is no compiler for it.
    RuntimeError
        The compiler refuses the source, or does not know the architecture.
    """
    generation = arch.strip("sm_af")
    nvcc = find()
    if nvcc is not None:
        return _by_nvcc(nvcc, source, generation)
    if nvrtc.find():
        return nvrtc.compile(source, generation, _BOTH)
    raise BuildError("there is no compiler for CUDA", INSTALL)


def _by_nvcc(nvcc: str, source: str, generation: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="tvmify-") as folder:
        given, made = Path(folder, "kernels.cu"), Path(folder, "kernels.fatbin")
        given.write_text(source)
        virtual, real = f"compute_{generation}", f"sm_{generation}"
        code = f"arch={virtual},code=[{real},{virtual}]"
        command = [nvcc, "-gencode", code, *OPTIONS, "-o", str(made), str(given)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(f"nvcc for {real}: {(result.stderr or result.stdout).strip()}")
        return made.read_bytes()

"""CUDA C++ → fatbin by NVRTC and nvFatbin, libraries that pip brings; for machines without nvcc."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

#: What pip installs as ``tvmify[cuda]``: the libraries, what calls them, and headers.
PACKAGES = "cuda-bindings nvidia-cuda-cccl nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-nvfatbin"
_HEADERS = ("cudart", "cccl")
_MODULE = "cuda.bindings.nvrtc"


def find() -> str | None:
    """Return the module through which NVRTC can be called, if it is installed."""
    packages = ("cuda", "cuda.bindings", _MODULE)
    return _MODULE if all(importlib.util.find_spec(name) for name in packages) else None


def compile(source: str, generation: str, options: Sequence[str]) -> bytes:
    """Compile CUDA C++ to a fatbin.

    Parameters
    ----------
    source
        The kernels.
    generation
        The architecture: "90" for ``sm_90``.
    options
        Further ones, of the compiler.

    Raises
    ------
    RuntimeError
        NVRTC refuses the source, or does not know the architecture, or a part of it is missing.
    """
    nvrtc: Any = importlib.import_module(_MODULE)
    pathfinder: Any = importlib.import_module("cuda.pathfinder")
    folders = [pathfinder.find_nvidia_header_directory(name) for name in _HEADERS]
    if None in folders:
        raise RuntimeError(f"NVRTC finds no headers of CUDA: pip install {PACKAGES}")
    includes = (f"--include-path={folder}" for folder in folders)
    given = [f"--gpu-architecture=sm_{generation}", *options, *includes]
    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), b"kernels.cu", 0, None, None))
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(given), [x.encode() for x in given])
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
            _checked(nvrtc.nvrtcGetProgramLog(program, log))
            said = log.decode(errors="replace").strip("\0\n") or result.name
            raise RuntimeError(f"NVRTC for sm_{generation}: {said}")
        cubin = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
        ptx = bytearray(_checked(nvrtc.nvrtcGetPTXSize(program)))
        _checked(nvrtc.nvrtcGetPTX(program, ptx))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return _joined(bytes(cubin), bytes(ptx), generation)


def _joined(cubin: bytes, ptx: bytes, generation: str) -> bytes:
    nvfatbin: Any = importlib.import_module("cuda.bindings.nvfatbin")
    try:
        handle = nvfatbin.create(["-64"], 1)
    except RuntimeError as error:  # it is loaded at the first call
        raise RuntimeError(f"nvFatbin is missing: pip install {PACKAGES}") from error
    try:
        nvfatbin.add_cubin(handle, cubin, len(cubin), generation, "kernels")
        nvfatbin.add_ptx(handle, ptx, len(ptx), generation, "kernels", "")
        fatbin = bytearray(nvfatbin.size(handle))
        nvfatbin.get(handle, fatbin)
        return bytes(fatbin)
    finally:
        nvfatbin.destroy(handle)


def _checked(returned: tuple[Any, ...]) -> Any:
    result, *values = returned
    if result.value:
        raise RuntimeError(f"NVRTC: {result.name}")
    return values[0] if values else None

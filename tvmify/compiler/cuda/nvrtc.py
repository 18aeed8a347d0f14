"""CUDA C++ → fatbin by NVRTC and nvFatbin, libraries that pip brings; for machines without nvcc."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

#: The packages of ``tvmify[cuda]``: the libraries, their Python bindings, and headers.
PACKAGES = "cuda-bindings nvidia-cuda-cccl nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-nvfatbin"
_HEADERS = ("cudart", "cccl")
_MODULE = "cuda.bindings.nvrtc"


def find() -> str | None:
    """Return the module that calls NVRTC, if everything that it needs is installed.

    PyTorch installs NVRTC and its module, but not nvFatbin.
    """
    packages = ("cuda", "cuda.bindings", _MODULE)
    if not all(importlib.util.find_spec(name) for name in packages):
        return None
    pathfinder: Any = importlib.import_module("cuda.pathfinder")
    try:
        pathfinder.load_nvidia_dynamic_lib("nvfatbin")
    except RuntimeError:
        return None
    headers = map(pathfinder.find_nvidia_header_directory, _HEADERS)
    return None if None in headers else _MODULE


def compile(source: str, generation: str, options: Sequence[str]) -> bytes:
    """Compile CUDA C++ to a fatbin.

    Parameters
    ----------
    source
        The kernels.
    generation
        The architecture: "90" for ``sm_90``.
    options
        Further options of the compiler.

    Raises
    ------
    RuntimeError
        NVRTC refuses the source, or does not know the architecture.
    """
    nvrtc: Any = importlib.import_module(_MODULE)
    pathfinder: Any = importlib.import_module("cuda.pathfinder")
    folders = map(pathfinder.find_nvidia_header_directory, _HEADERS)
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
    handle = nvfatbin.create(["-64"], 1)
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

"""CUDA C++ → cubin by NVRTC, a library that pip brings; for machines without nvcc."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

#: What pip installs as ``tvmify[cuda]``: the library, what calls it, and headers.
PACKAGES = "cuda-bindings nvidia-cuda-cccl nvidia-cuda-nvrtc nvidia-cuda-runtime"
_HEADERS = ("cudart", "cccl")
_MODULE = "cuda.bindings.nvrtc"


def find() -> str | None:
    """Return the module through which NVRTC can be called, if it is installed."""
    packages = ("cuda", "cuda.bindings", _MODULE)
    return _MODULE if all(importlib.util.find_spec(name) for name in packages) else None


def compile(source: str, arch: str, options: Sequence[str]) -> bytes:
    """Compile CUDA C++ for one architecture.

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
    given = [f"--gpu-architecture={arch}", *options, *(f"--include-path={x}" for x in folders)]
    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), b"kernels.cu", 0, None, None))
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(given), [x.encode() for x in given])
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
            _checked(nvrtc.nvrtcGetProgramLog(program, log))
            said = log.decode(errors="replace").strip("\0\n") or result.name
            raise RuntimeError(f"NVRTC for {arch}: {said}")
        cubin = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
        return bytes(cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _checked(returned: tuple[Any, ...]) -> Any:
    result, *values = returned
    if result.value:
        raise RuntimeError(f"NVRTC: {result.name}")
    return values[0] if values else None

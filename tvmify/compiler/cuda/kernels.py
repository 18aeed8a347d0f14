"""The kernels of a program: CUDA C++ → one fatbin → part of the shared library.

Where TVM's CUDA runtime is not loaded, TVM leaves the source in the library, to be compiled where
it runs. Here it is always compiled at once, and replaces the source in what TVM packs into the
library.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import tvm
from tvm.tirx.build import codegen_build

from tvmify.compiler.cuda import nvcc
from tvmify.system import forks

#: The environment belongs to the whole process.
_GENERATING = forks.Lock()
#: TVM's names of such modules, and of the host's code, which is packed without content.
_KIND, _HOST = b"cuda", b"_lib"
#: TVM's names for forms of code. TVM passes a "cubin" to the driver, which also accepts a fatbin.
_SOURCE, _BINARY = b"cuda", b"cubin"
#: TVM leaves it out where only a constant is of a half type.
_HEADER = "#include <cuda_fp16.h>\n"


@dataclass(frozen=True)
class Kernels:
    """The kernels of one program, as a module of TVM that cannot run, as CUDA C++, and compiled."""

    module: tvm.runtime.Module
    source: str
    fatbin: bytes


def generate(ir_mod: tvm.IRModule, target: tvm.target.Target) -> Kernels:
    """Generate and compile the code of lowered kernels."""
    with _GENERATING, _without_runtime():
        module = codegen_build(ir_mod, target)
    source = str(module.inspect_source("cuda"))
    compiled = nvcc.compile(_HEADER + source, str(target.attrs["arch"]))
    return Kernels(module, source, compiled)


@contextmanager
def _without_runtime() -> Iterator[None]:
    # If its runtime is loaded, TVM would compile the kernels itself.
    name = "TVM_COMPILE_FORCE_FALLBACK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def pack(executable: tvm.runtime.Module, kernels: Kernels) -> bytes:
    """Pack everything but machine code of the host, with compiled kernels.

    Parameters
    ----------
    executable
        The virtual machine's program, which imports the kernels.
    kernels
        The same.
    """
    packed = tvm.runtime._ffi_api.ModulePackImportsToTensor(executable).numpy().tobytes()
    return with_fatbin(packed, kernels.source.encode(), kernels.fatbin)


def with_fatbin(packed: bytes, source: bytes, fatbin: bytes) -> bytes:
    """Replace source by a fatbin in modules as TVM packs them.

    Packed are the number of bytes that follow, two arrays that say which module imports which, and
    then each module as its kind and its content; the host's code has none. The content
    of kernels is the form of their code, a table of them, and the code. All but the table are
    preceded by their length in 64 bits.
    """
    reader = _Reader(packed, 8)
    reader.skip_numbers()
    reader.skip_numbers()
    parts = [packed[8 : reader.at]]
    head, tail = _text(_SOURCE), _text(source)
    replaced = 0
    while reader.at < len(packed):
        kind = reader.text()
        parts.append(_text(kind))
        if kind == _HOST:
            continue
        content = reader.text()
        if kind == _KIND and content.startswith(head) and content.endswith(tail):
            table = content[len(head) : len(content) - len(tail)]
            content = _text(_BINARY) + table + _text(fatbin)
            replaced += 1
        parts.append(_text(content))
    if replaced != 1 or reader.at != len(packed):
        raise RuntimeError("TVM packs kernels in an unknown format")
    whole = b"".join(parts)
    return struct.pack("<Q", len(whole)) + whole


class _Reader:
    """Reads what TVM packs, piece by piece."""

    def __init__(self, content: bytes, at: int) -> None:
        self.content, self.at = content, at

    def number(self) -> int:
        (value,) = struct.unpack_from("<Q", self.content, self.at)
        self.at += 8
        return int(value)

    def text(self) -> bytes:
        size = self.number()
        self.at += size
        return self.content[self.at - size : self.at]

    def skip_numbers(self) -> None:
        count = self.number()
        self.at += 8 * count


def _text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content

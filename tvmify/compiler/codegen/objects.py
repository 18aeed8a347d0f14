"""Machine code in memory."""

from __future__ import annotations

import errno
import os
import re
import resource
import struct
from pathlib import Path

import tvm

from tvmify.compiler.codegen import scratch
from tvmify.errors import BuildError

#: The paths of files in memory: LLVM writes to paths only, and the loader reads from paths only.
_OPEN_FILES = Path("/proc/self/fd")
#: A line of assembly makes fewer bytes of object code, with its relocation and symbol.
_LINE = 128
#: Headers of an object file.
_HEADERS = 1 << 16
_ZEROS = re.compile(r"^\s*\.(?:zero|space|skip)\s+(\d+)", re.MULTILINE)
#: How a little-endian 64-bit ELF file begins, and the type of a shared library.
_MAGIC, _LIBRARY = b"\x7fELF\x02\x01", 3


def emit(module: tvm.runtime.Module) -> bytes:
    """Return the object code of an LLVM module.

    LLVM ends the process if it cannot write, so it writes to a file in memory.

    Raises
    ------
    BuildError
        The process may not write a file of that size, or has no /proc.
    """
    _check_limit(module)
    if not _OPEN_FILES.is_dir():
        raise BuildError(
            f"there is no {_OPEN_FILES}, from which compiled code is loaded",
            "Mount /proc in this container or chroot, and call refresh().",
        )
    try:
        file = os.memfd_create("tvmify-object", os.MFD_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM, errno.EACCES):
            raise
        return _emit_to_disk(module)
    try:
        module.write_to_file(str(_OPEN_FILES / str(file)), "o")
        return _content(file)
    finally:
        os.close(file)


def _emit_to_disk(module: tvm.runtime.Module) -> bytes:
    """Emit to a disk with enough room, for sandboxes that forbid files in memory."""
    with scratch.folder(_largest_size(str(module.inspect_source("asm")))) as folder:
        path = folder / "kernels.o"
        module.write_to_file(str(path), "o")
        return path.read_bytes()


def _content(file: int) -> bytes:
    with open(file, "rb", closefd=False) as stream:
        stream.seek(0)
        return stream.read()


def _check_limit(module: tvm.runtime.Module) -> None:
    """Refuse object code that may exceed the file size limit, which applies in memory, too."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit == resource.RLIM_INFINITY:
        return
    largest = _largest_size(str(module.inspect_source("asm")))
    if largest > limit:
        raise BuildError(
            f"this process may write files of {limit / 1e6:.3g} MB, and object code may take "
            f"{largest / 1e6:.3g} MB",
            "Raise the limit (ulimit -f, LimitFSIZE= of systemd), and call refresh().",
        )


def _largest_size(assembly: str) -> int:
    """Return an upper bound for the size of an object file, from its assembly."""
    zeros = sum(map(int, _ZEROS.findall(assembly)))
    return _HEADERS + len(assembly) + _LINE * assembly.count("\n") + zeros


def is_whole_library(content: bytes) -> bool:
    """Whether these are the bytes of a complete shared library. Loading a truncated one would crash
    the process.
    """
    try:
        kind, _, _, _, programs, sections = struct.unpack_from("<HHIQQQ", content, 16)
        program_size, program_count, section_size, section_count = struct.unpack_from(
            "<HHHH", content, 54
        )
        segments = [
            struct.unpack_from("<IIQQQQ", content, programs + i * program_size)
            for i in range(program_count)
        ]
    except struct.error:  # it is truncated
        return False
    ends = [at + length for _, _, at, _, _, length in segments]
    ends.append(sections + section_size * section_count)
    return content.startswith(_MAGIC) and kind == _LIBRARY and max(ends) <= len(content)

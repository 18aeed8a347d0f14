"""Machine code in memory."""

from __future__ import annotations

import errno
import os
import re
import resource
import struct

import tvm

from tvmify.compiler.codegen import scratch
from tvmify.errors import BuildError

#: A line of assembly makes fewer bytes, with its relocation and symbol, apart from its text.
_LINE = 128
#: Headers of an object file.
_HEADERS = 1 << 16
_ZEROS = re.compile(r"^\s*\.(?:zero|space|skip)\s+(\d+)", re.MULTILINE)
#: Of ELF with 64 bits, least significant byte first: how a file begins, and the kind of a library.
_MAGIC, _LIBRARY = b"\x7fELF\x02\x01", 3


def emit(module: tvm.runtime.Module) -> bytes:
    """Return the object code of an LLVM module.

    LLVM ends the process if it cannot write, so it is given a file in memory.

    Raises
    ------
    BuildError
        This process may not write a file of that size.
    """
    _check_limit(module)
    try:
        file = os.memfd_create("tvmify-object", os.MFD_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM, errno.EACCES):
            raise
        return _emit_to_disk(module)
    try:
        module.write_to_file(f"/proc/self/fd/{file}", "o")
        return _content(file)
    finally:
        os.close(file)


def _emit_to_disk(module: tvm.runtime.Module) -> bytes:
    """Do without files in memory, which some sandboxes forbid: look for room on a disk first."""
    with scratch.folder(_largest_size(str(module.inspect_source("asm")))) as folder:
        path = folder / "kernels.o"
        module.write_to_file(str(path), "o")
        return path.read_bytes()


def _content(file: int) -> bytes:
    with open(file, "rb", closefd=False) as stream:
        stream.seek(0)
        return stream.read()


def _check_limit(module: tvm.runtime.Module) -> None:
    """Refuse what may be larger than the limit for files, which holds for those in memory too."""
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
    """Return a bound for the bytes of an object file, from its assembly."""
    zeros = sum(map(int, _ZEROS.findall(assembly)))
    return _HEADERS + len(assembly) + _LINE * assembly.count("\n") + zeros


def is_whole_library(content: bytes) -> bool:
    """Whether these are the bytes of a shared library, to its end.

    To load a part of one would end the process.
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
    except struct.error:  # it is shorter
        return False
    ends = [at + length for _, _, at, _, _, length in segments]
    ends.append(sections + section_size * section_count)
    return content.startswith(_MAGIC) and kind == _LIBRARY and max(ends) <= len(content)

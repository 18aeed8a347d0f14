"""Which versions of its functions the C library offers to programs that are linked here.

A reference without a version would reach the oldest: ``expf`` of 2001, which is slower.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import struct
from pathlib import Path

from tvmify.compiler.codegen.elf import records as elf
from tvmify.compiler.codegen.elf.machines import NUMBERS

#: The libraries that compiled code calls, apart from TVM's; every process of PyTorch has them.
NAMES = ("libm.so.6", "libc.so.6")
#: From this number on versions have names; those that are not offered any more have a bit above it.
_FIRST = 2

#: By symbol: the library that has it, and the version.
Versions = dict[str, tuple[str, str]]


def versions(machine: int) -> Versions:
    """Return the functions of the C library, if code for this architecture can run here."""
    return _versions() if NUMBERS.get(platform.machine()) == machine else {}


@functools.cache
def _versions() -> Versions:
    found: Versions = {}
    with contextlib.suppress(OSError):  # code without versions runs too
        for path in _loaded():
            for symbol, version in _exports(path.read_bytes()):
                found.setdefault(symbol, (path.name, version))
    return found


def _loaded() -> list[Path]:
    """Return the files of the C library that this process uses."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = (Path(line[line.index("/") :]) for line in lines if "/" in line)
    loaded = {path.name: path for path in paths if path.name in NAMES}
    return [loaded[name] for name in NAMES if name in loaded]


def _exports(content: bytes) -> list[tuple[str, str]]:
    """Return the symbols that a library offers, with the version that a linker gives each."""
    (start,) = struct.unpack_from("<Q", content, 40)
    (count,) = struct.unpack_from("<H", content, 60)
    size = elf.SECTION.size
    headers = [elf.SECTION.unpack_from(content, start + i * size) for i in range(count)]
    parts = {
        header[1]: (content[header[4] : header[4] + header[5]], header[6]) for header in headers
    }
    if not {elf.DYNSYM, elf.VERSYM, elf.VERDEF} <= parts.keys():
        return []
    symbols, linked = parts[elf.DYNSYM]
    _, _, _, _, offset, length, _, _, _, _ = headers[linked]
    names = content[offset : offset + length]
    version_names = _version_names(parts[elf.VERDEF][0], names)
    numbers = struct.iter_unpack("<H", parts[elf.VERSYM][0])
    return [
        (elf.text_at(names, name), version_names[number])
        for (name, _, _, section, _, _), (number,) in zip(
            elf.SYMBOL.iter_unpack(symbols), numbers, strict=True
        )
        if section != elf.UNDEFINED and number in version_names  # which no hidden one is
    ]


def _version_names(definitions: bytes, names: bytes) -> dict[int, str]:
    found, at = {}, 0
    while True:
        _, _, number, _, _, first, following = struct.unpack_from("<HHHHIII", definitions, at)
        (name,) = struct.unpack_from("<I", definitions, at + first)
        if number >= _FIRST:
            found[number] = elf.text_at(names, name)
        if not following:
            return found
        at += following

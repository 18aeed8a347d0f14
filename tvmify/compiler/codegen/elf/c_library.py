"""Symbol versions of the C library. A reference without a version would bind to the oldest one: the
``expf`` of 2001, which is slower.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import struct
from pathlib import Path

from tvmify.compiler.codegen.elf import records as elf
from tvmify.compiler.codegen.elf.machines import NUMBERS

#: The libraries that compiled code calls, besides TVM's; every PyTorch process has loaded them.
NAMES = ("libm.so.6", "libc.so.6")
#: Versions from this number on have names; hidden ones have a higher bit set.
_FIRST = 2

#: By symbol: its library and version.
Versions = dict[str, tuple[str, str]]


def versions(machine: int) -> Versions:
    """Return the symbols of the C library, if this machine can run code for the architecture."""
    return _versions() if NUMBERS.get(platform.machine()) == machine else {}


@functools.cache
def _versions() -> Versions:
    found: Versions = {}
    with contextlib.suppress(OSError):  # code without versions works, too
        for path in _loaded():
            for symbol, version in _exports(path.read_bytes()):
                found.setdefault(symbol, (path.name, version))
    return found


def _loaded() -> list[Path]:
    """Return the files of the C library in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = (Path(line[line.index("/") :]) for line in lines if "/" in line)
    loaded = {path.name: path for path in paths if path.name in NAMES}
    return [loaded[name] for name in NAMES if name in loaded]


def _exports(content: bytes) -> list[tuple[str, str]]:
    """Return the symbols that a library exports, with their default versions."""
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
        if section != elf.UNDEFINED and number in version_names  # hidden ones are not default
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

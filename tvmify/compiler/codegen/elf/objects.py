"""Reads and writes object files."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tvmify.compiler.codegen.elf import records as elf


class CannotLink(Exception):
    """An object file has something that this linker does not support."""


@dataclass(frozen=True)
class Section:
    """A section of an object file; `size` is its size in memory, and `content` may be empty."""

    name: str
    kind: int
    flags: int
    content: bytes
    size: int
    alignment: int


class Symbol(NamedTuple):
    """A symbol of an object file."""

    name: str
    kind: int
    binding: int
    visibility: int
    section: int
    value: int
    size: int


class Relocation(NamedTuple):
    """A place in a section that refers to a symbol."""

    offset: int
    kind: int
    symbol: int
    addend: int


@dataclass(frozen=True)
class ObjectFile:
    """The contents of an object file; `relocations` are by the number of a loaded section."""

    machine: int
    sections: Sequence[Section]
    symbols: Sequence[Symbol]
    relocations: dict[int, list[Relocation]]


def read(content: bytes) -> ObjectFile:
    """Read an object file.

    Raises
    ------
    CannotLink
        It is not an object file, is damaged, or has sections of an unsupported kind.
    """
    try:
        return _read(content)
    except (struct.error, ValueError, IndexError) as error:
        raise CannotLink(f"{len(content)} bytes are not an object file: {error}") from error


def _read(content: bytes) -> ObjectFile:
    identification, kind, machine, _, _, _, start, _, _, _, _, entry, count, named = (
        elf.HEADER.unpack_from(content)
    )
    if identification[:7] != elf.IDENTIFICATION[:7] or kind != elf.RELOCATABLE:
        raise ValueError("its header is that of another format")
    if entry != elf.SECTION.size or not 0 < count < elf.RESERVED:
        raise ValueError(f"it has {count} sections of {entry} bytes")
    headers = [elf.SECTION.unpack_from(content, start + i * entry) for i in range(count)]
    contents = [_content(content, header) for header in headers]
    sections = [
        Section(elf.text_at(contents[named], name), kind, flags, bytes_, size, alignment or 1)
        for (name, kind, flags, _, _, size, _, _, alignment, _), bytes_ in zip(
            headers, contents, strict=True
        )
    ]
    symbols: list[Symbol] = []
    relocations: dict[int, list[Relocation]] = {}
    for (_, kind, _, _, _, _, linked, info, _, _), bytes_ in zip(headers, contents, strict=True):
        if kind == elf.SYMTAB:
            symbols += _symbols(bytes_, contents[linked])
        elif kind == elf.RELA_SECTION and sections[info].flags & elf.ALLOC:
            relocations[info] = [
                Relocation(offset, both & 0xFFFFFFFF, both >> 32, addend)
                for offset, both, addend in elf.RELA.iter_unpack(bytes_)
            ]
        elif kind in (elf.REL_SECTION, elf.GROUP, elf.SYMTAB_INDICES):
            raise CannotLink(f"an object file has a section of type {kind}")
    return ObjectFile(machine, sections, symbols, relocations)


def _content(content: bytes, header: tuple[int, ...]) -> bytes:
    _, kind, _, _, offset, size, _, _, _, _ = header
    if kind == elf.NOBITS or not size:
        return b""
    if offset + size > len(content):
        raise ValueError("it ends within a section")
    return content[offset : offset + size]


def _symbols(table: bytes, names: bytes) -> list[Symbol]:
    return [
        Symbol(elf.text_at(names, name), info & 15, info >> 4, other & 3, section, value, size)
        for name, info, other, section, value, size in elf.SYMBOL.iter_unpack(table)
    ]


def undefined(content: bytes) -> list[str]:
    """Return the symbols that an object file refers to and does not define."""
    symbols = read(content).symbols
    return [s.name for s in symbols if s.name and s.section == elf.UNDEFINED]


def with_data(symbol: str, content: bytes, like: bytes) -> bytes:
    """Return an object file that defines one symbol, as constant data.

    Parameters
    ----------
    like
        Another object file, for the same processor.
    """
    _, _, machine, *_ = elf.HEADER.unpack_from(like)
    names = b"\0" + symbol.encode() + b"\0"
    table = elf.SYMBOL.pack(0, 0, 0, 0, 0, 0) + elf.SYMBOL.pack(
        1, elf.GLOBAL << 4 | elf.OBJECT, elf.DEFAULT, 1, 0, len(content)
    )
    titles = b"\0.rodata\0.symtab\0.strtab\0.note.GNU-stack\0"
    # Name, type, flags, content, link, info, alignment, size of an entry.
    sections: list[tuple[bytes, int, int, bytes, int, int, int, int]] = [
        (b".rodata", elf.PROGBITS, elf.ALLOC, content, 0, 0, 64, 0),
        (b".symtab", elf.SYMTAB, 0, table, 3, 1, 8, elf.SYMBOL.size),
        (b".strtab", elf.STRTAB, 0, names, 0, 0, 1, 0),
        (b".strtab", elf.STRTAB, 0, titles, 0, 0, 1, 0),
        (b".note.GNU-stack", elf.PROGBITS, 0, b"", 0, 0, 1, 0),
    ]
    body = bytearray(elf.HEADER.size)
    headers = [elf.SECTION.pack(*[0] * 10)]
    for title, kind, flags, inside, link, info, alignment, entry in sections:
        body += bytes(-len(body) % alignment)
        at = titles.index(title)
        headers.append(
            elf.SECTION.pack(
                at, kind, flags, 0, len(body), len(inside), link, info, alignment, entry
            )
        )
        body += inside
    body += bytes(-len(body) % 8)
    elf.HEADER.pack_into(
        body,
        0,
        *(elf.IDENTIFICATION, elf.RELOCATABLE, machine, 1, 0, 0, len(body), 0),
        *(elf.HEADER.size, 0, 0, elf.SECTION.size, len(headers), 4),
    )
    return bytes(body) + b"".join(headers)

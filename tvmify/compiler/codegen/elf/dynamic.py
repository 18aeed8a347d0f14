"""The sections for the dynamic loader and debuggers: symbols, versions and relocations."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from tvmify.compiler.codegen.elf import records as elf
from tvmify.compiler.codegen.elf.c_library import NAMES, Versions
from tvmify.compiler.codegen.elf.parts import Image, Part
from tvmify.compiler.codegen.elf.symbols import Definition, Symbols

# Tags of the dynamic section.
_END, _NEEDED, _HASH, _STRTAB, _SYMTAB, _RELA = 0, 1, 4, 5, 6, 7
_RELA_SIZE, _RELA_ENTRY, _STRTAB_SIZE, _SYMTAB_ENTRY, _FLAGS = 8, 9, 10, 11, 30
_CONSTRUCTORS, _CONSTRUCTORS_SIZE = 25, 27
_VERSYM, _FLAGS_1, _VERNEED, _VERNEED_COUNT = 0x6FFFFFF0, 0x6FFFFFFB, 0x6FFFFFFE, 0x6FFFFFFF
#: Two flags with one meaning: bind all symbols when the library is loaded.
_BIND_NOW, _NOW = 8, 1
#: The number of symbols without a version, and the first number with one.
_UNVERSIONED, _FIRST_VERSION = 1, 2

Placed = Mapping[tuple[int, int], tuple[Part, int]]


class _Names:
    """A string table."""

    def __init__(self) -> None:
        self.content, self._found = bytearray(b"\0"), {"": 0}

    def add(self, name: str) -> int:
        if name not in self._found:
            self._found[name] = len(self.content)
            self.content += name.encode() + b"\0"
        return self._found[name]


class Named:
    """The symbols that a library imports and exports.

    Parameters
    ----------
    imports
        Names of the imported symbols.
    found
        Their versions in the C library.
    relocations
        How many relocations there will be.
    placed
        The sections of the library.
    constructors
        The addresses of what runs when the library is loaded.

    Attributes
    ----------
    numbers
        The numbers of the imports in relocations.
    parts, dynamic
        Sections with constants, and the dynamic section.
    """

    def __init__(
        self,
        imports: Sequence[str],
        symbols: Symbols,
        found: Versions,
        relocations: int,
        placed: Placed,
        constructors: Part,
    ) -> None:
        self._imports = [(name, symbols.may_lack(name)) for name in imports]
        self._exports = [
            definition
            for definition in symbols.definitions.values()
            if definition.symbol.visibility == elf.DEFAULT and _is_in(definition, placed)
        ]
        self._constructors = constructors
        self.numbers = {name: number for number, name in enumerate(imports, 1)}
        names = _Names()
        self._names = names
        order = [*imports, *(definition.symbol.name for definition in self._exports)]
        self._starts = [names.add(name) for name in order]
        self._needed = [names.add(name) for name in NAMES]

        self._strings = Part(".dynstr", elf.STRTAB, elf.ALLOC)
        self._table = Part(".dynsym", elf.DYNSYM, elf.ALLOC, 8)
        self._table.link, self._table.info = self._strings, 1
        self._table.entry = elf.SYMBOL.size
        self._table.reserve(elf.SYMBOL.size * (1 + len(order)))
        hashes = Part(".hash", elf.HASH, elf.ALLOC, 8)
        hashes.link, hashes.entry = self._table, 4
        _append(hashes, _hash_table(order))
        self._numbers = Part(".gnu.version", elf.VERSYM, elf.ALLOC, 2)
        self._numbers.link, self._numbers.entry = self._table, 2
        self._versions = Part(".gnu.version_r", elf.VERNEED, elf.ALLOC, 8)
        self._versions.link = self._strings
        self._add_versions(imports, found)
        self._relocations = Part(".rela.dyn", elf.RELA_SECTION, elf.ALLOC, 8)
        self._relocations.link, self._relocations.entry = self._table, elf.RELA.size
        self._relocations.reserve(elf.RELA.size * relocations)
        self._filled = 0
        _append(self._strings, bytes(names.content))
        self._hashes = hashes
        tables = [hashes, self._table, self._strings, self._numbers, self._versions]
        self.parts = [*tables, self._relocations]
        self.dynamic = Part(".dynamic", elf.DYNAMIC_SECTION, elf.ALLOC | elf.WRITE, 8)
        self.dynamic.link, self.dynamic.entry = self._strings, elf.DYNAMIC.size
        self.dynamic.reserve(elf.DYNAMIC.size * len(self._entries()))

    def _add_versions(self, imports: Sequence[str], found: Versions) -> None:
        wanted = {name: found[name] for name in imports if name in found}
        if not wanted:
            return
        number = {version: i for i, version in enumerate(dict.fromkeys(wanted.values()), 2)}
        numbers = [number[wanted[name]] if name in wanted else _UNVERSIONED for name in imports]
        numbers = [0, *numbers, *[_UNVERSIONED] * len(self._exports)]
        _append(self._numbers, struct.pack(f"<{len(numbers)}H", *numbers))
        libraries = list(dict.fromkeys(library for library, _ in number))
        self._versions.info = len(libraries)
        for library in libraries:
            own = [version for version in number if version[0] == library]
            following = 16 * (1 + len(own)) if library != libraries[-1] else 0
            content = struct.pack(
                "<HHIII", 1, len(own), self._names.add(library), 16, following
            ) + b"".join(
                struct.pack(
                    "<IHHII",
                    *(_hash(version[1]), 0, number[version], self._names.add(version[1])),
                    0 if version == own[-1] else 16,
                )
                for version in own
            )
            _append(self._versions, content)

    def relocate(self, at: int, kind: int, symbol: int, addend: int) -> None:
        """Add a relocation, with which the dynamic loader writes an address."""
        elf.RELA.pack_into(self._relocations.content, self._filled, at, symbol << 32 | kind, addend)
        self._filled += elf.RELA.size

    def fill(self, image: Image, symbols: Symbols, placed: Placed) -> None:
        """Write everything that depends on addresses, and add symbols for debuggers."""
        undefined = [
            elf.SYMBOL.pack(
                *(start, (elf.WEAK if weak else elf.GLOBAL) << 4, elf.DEFAULT, elf.UNDEFINED, 0, 0)
            )
            for start, (_, weak) in zip(self._starts, self._imports, strict=False)
        ]
        defined = [
            _symbol(start, definition, placed)
            for start, definition in zip(self._starts[len(undefined) :], self._exports, strict=True)
        ]
        null = bytes(elf.SYMBOL.size)
        self._table.content[:] = b"".join((null, *undefined, *defined))
        entries = [elf.DYNAMIC.pack(*entry) for entry in self._entries()]
        self.dynamic.content[:] = b"".join(entries)

        names, kinds = _Names(), (elf.FUNCTION, elf.OBJECT)
        first, later = (
            [
                _symbol(names.add(definition.symbol.name), definition, placed)
                for definition in several
                if definition.symbol.kind in kinds and _is_in(definition, placed)
            ]
            for several in (symbols.locals, symbols.definitions.values())
        )
        table = Part(".symtab", elf.SYMTAB, 0, 8)
        strings = Part(".strtab", elf.STRTAB, 0)
        table.link, table.info, table.entry = strings, 1 + len(first), elf.SYMBOL.size
        _append(table, b"".join((null, *first, *later)))
        _append(strings, bytes(names.content))
        image.add(table)
        image.add(strings)

    def _entries(self) -> list[tuple[int, int]]:
        """Return the dynamic section, whose size is the same before and after the layout."""
        entries = [(_NEEDED, name) for name in self._needed]
        entries += [
            (_HASH, self._hashes.address),
            (_STRTAB, self._strings.address),
            (_STRTAB_SIZE, self._strings.size),
            (_SYMTAB, self._table.address),
            (_SYMTAB_ENTRY, elf.SYMBOL.size),
        ]
        if self._relocations.size:
            entries += [
                (_RELA, self._relocations.address),
                (_RELA_SIZE, self._relocations.size),
                (_RELA_ENTRY, elf.RELA.size),
            ]
        if self._constructors.size:
            entries += [
                (_CONSTRUCTORS, self._constructors.address),
                (_CONSTRUCTORS_SIZE, self._constructors.size),
            ]
        if self._versions.size:
            entries += [
                (_VERSYM, self._numbers.address),
                (_VERNEED, self._versions.address),
                (_VERNEED_COUNT, self._versions.info),
            ]
        return [*entries, (_FLAGS, _BIND_NOW), (_FLAGS_1, _NOW), (_END, 0)]


def _append(part: Part, content: bytes) -> None:
    part.append(content, len(content), 1)


def _is_in(definition: Definition, placed: Placed) -> bool:
    return (definition.place.file, definition.place.section) in placed


def _symbol(name: int, definition: Definition, placed: Placed) -> bytes:
    symbol, place = definition.symbol, definition.place
    part, start = placed[place.file, place.section]
    info = symbol.binding << 4 | symbol.kind
    address = part.address + start + place.offset
    return elf.SYMBOL.pack(name, info, symbol.visibility, part.number, address, symbol.size)


def _hash(name: str) -> int:
    value = 0
    for byte in name.encode():
        value = (value << 4) + byte
        high = value & 0xF0000000
        value = (value ^ high >> 24) & ~high
    return value


def _hash_table(names: Sequence[str]) -> bytes:
    """Return the hash table of the symbols, whose first name is empty."""
    buckets, chain = [0] * max(1, len(names)), [0]
    for number, name in enumerate(names, 1):
        bucket = _hash(name) % len(buckets)
        chain.append(buckets[bucket])
        buckets[bucket] = number
    return struct.pack(
        f"<{2 + len(buckets) + len(chain)}I", len(buckets), len(chain), *buckets, *chain
    )

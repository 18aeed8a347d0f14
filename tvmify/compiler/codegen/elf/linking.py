"""Links object files of kernels, as LLVM generates them, to one shared library. The result is that
of ``ld -shared -z now -Bsymbolic``: calls between the files are direct, the GOT is read-only once
the library is loaded, and no memory is both writable and executable. Constructors run when it is
loaded. There is no lazy binding, no thread-local storage, and nothing runs when it is unloaded.
Anything else is refused with `CannotLink`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tvmify.compiler.codegen.elf import dynamic, unwinding
from tvmify.compiler.codegen.elf import records as elf
from tvmify.compiler.codegen.elf.c_library import Versions, versions
from tvmify.compiler.codegen.elf.machines import Form, Means, machine_of
from tvmify.compiler.codegen.elf.objects import CannotLink, Section, read
from tvmify.compiler.codegen.elf.parts import Image, Part
from tvmify.compiler.codegen.elf.symbols import Meaning, Place, Symbols

_FLAGS = elf.WRITE | elf.ALLOC | elf.EXECUTE | elf.MERGE | elf.STRINGS | elf.INFO_LINK
#: Permissions of sections, by their type.
_ACCESS = {
    elf.PROGBITS: (0, elf.WRITE, elf.EXECUTE),
    elf.NOBITS: (elf.WRITE,),
    elf.X86_64_UNWIND: (0,),
    elf.INIT_ARRAY: (elf.WRITE,),
}
#: What older compilers call constructors and destructors; their type is that of data.
_OLD_NAMES = (".ctors", ".dtors")
#: The priority of constructors without one: the last.
_LAST = 1 << 16
#: The header of the build ID note: sizes, type, owner.
_NOTE = struct.pack("<III4s", 4, 20, 3, b"GNU\0")
#: Bytes in an address.
_ADDRESS = 8


def link(
    objects: Sequence[bytes], alias: Callable[[str], str], found: Versions | None = None
) -> bytes:
    """Link object files to a shared library.

    Parameters
    ----------
    objects
        Their contents.
    alias
        Returns another name for an undefined symbol, or an empty string.
    found
        Symbols of the C library, with their versions; None for those of this process.

    Raises
    ------
    CannotLink
        They contain something unsupported, or are damaged.
    """
    files = [read(content) for content in objects]
    if len({file.machine for file in files}) != 1:
        raise CannotLink("object files are for different processors, or there are none")
    symbols = Symbols(files, alias)
    linker = _Linker(symbols, files[0].machine)
    linker.place([file.sections for file in files])
    for number, file in enumerate(files):
        for section, relocations in file.relocations.items():
            if (number, section) not in linker.placed:
                continue
            size = file.sections[section].size
            for relocation in relocations:
                if relocation.offset >= size:
                    raise CannotLink("an object file has a relocation beyond its section")
                meaning = symbols.meaning(number, relocation.symbol)
                place = Place(number, section, relocation.offset)
                linker.refer(place, relocation.kind, meaning, relocation.addend)
    try:
        return linker.write(versions(files[0].machine) if found is None else found)
    except (struct.error, ValueError) as error:  # the value does not fit
        raise CannotLink(f"an address is out of reach: {error}") from error


class _Reference(NamedTuple):
    """A relocation to apply when all addresses are known."""

    part: Part
    offset: int
    form: Form
    meaning: Meaning
    addend: int


class _Linker:
    def __init__(self, symbols: Symbols, number: int) -> None:
        self.symbols = symbols
        self.number, self.machine = number, machine_of(number)
        #: The part that contains a section of a file, and the offset in it.
        self.placed: dict[tuple[int, int], tuple[Part, int]] = {}
        self.references: list[_Reference] = []
        #: The number of the GOT entry, or of the jump, by its target.
        self.entries: dict[Meaning, int] = {}
        self.jumps: dict[str, int] = {}
        code = elf.ALLOC | elf.EXECUTE
        data = elf.ALLOC | elf.WRITE
        self.note = Part(".note.gnu.build-id", elf.NOTE, elf.ALLOC, 4)
        self.constants = Part(".rodata", elf.PROGBITS, elf.ALLOC)
        self.frames_table = Part(".eh_frame_hdr", elf.PROGBITS, elf.ALLOC, 4)
        self.frames = Part(".eh_frame", elf.PROGBITS, elf.ALLOC, 8)
        self.text = Part(".text", elf.PROGBITS, code)
        self.jump_code = Part(".plt", elf.PROGBITS, code, 16)
        self.constants_with_addresses = Part(".data.rel.ro", elf.PROGBITS, data)
        self.constructors = Part(".init_array", elf.INIT_ARRAY, data, _ADDRESS)
        self.table = Part(".got", elf.PROGBITS, data, _ADDRESS)
        self.data = Part(".data", elf.PROGBITS, data)
        self.zeros = Part(".bss", elf.NOBITS, data)

    def place(self, files: Sequence[Sequence[Section]]) -> None:
        """Place each loaded section of each file in a part of the library."""
        loaded = [
            (_priority(section), file, number)
            for file, sections in enumerate(files)
            for number, section in enumerate(sections)
            if section.flags & elf.ALLOC and section.kind != elf.NOTE
        ]
        for _, file, number in sorted(loaded):
            section = files[file][number]
            part = self._part_for(section)
            offset = part.append(section.content, section.size, section.alignment)
            self.placed[file, number] = part, offset

    def _part_for(self, section: Section) -> Part:
        access = section.flags & (elf.WRITE | elf.EXECUTE)
        allowed = _ACCESS.get(section.kind, ())
        is_old = section.name.startswith(_OLD_NAMES)
        if access not in allowed or section.flags & ~_FLAGS or is_old:
            raise CannotLink(
                f"a section {section.name} has type {section.kind} and flags {section.flags:#x}"
            )
        if section.name == ".eh_frame":
            # Without a gap, which would end the records.
            if section.size % 8:
                raise CannotLink(f"a section .eh_frame has {section.size} bytes")
            return self.frames
        if section.kind == elf.INIT_ARRAY:
            # Without a gap, which would be called.
            if section.size % _ADDRESS or section.alignment > _ADDRESS:
                raise CannotLink(f"a section {section.name} has {section.size} bytes")
            return self.constructors
        if section.flags & elf.EXECUTE:
            return self.text
        if section.kind == elf.NOBITS:
            return self.zeros
        if not section.flags & elf.WRITE:
            return self.constants
        has_addresses = section.name.startswith(".data.rel.ro")
        return self.constants_with_addresses if has_addresses else self.data

    def refer(self, place: Place, kind: int, meaning: Meaning, addend: int) -> None:
        """Record a relocation, and what it needs."""
        form = self.machine.forms.get(kind)
        called = meaning if isinstance(meaning, str) else "a symbol"
        if form is None:
            raise CannotLink(f"a relocation of type {kind} to {called} is not known")
        part, start = self.placed[place.file, place.section]
        if isinstance(meaning, Place) and (meaning.file, meaning.section) not in self.placed:
            raise CannotLink("an object file refers to a section that is not loaded")
        if isinstance(meaning, str) and form.means is Means.SYMBOL:
            raise CannotLink(f"an object file expects to define {called} itself")
        if form.means is Means.ADDRESS and not part.flags & elf.WRITE:
            raise CannotLink(f"{part.name} has the address of {called}")
        if form.means is Means.CALL and isinstance(meaning, str):
            self.jumps.setdefault(meaning, len(self.jumps))
        if form.means is Means.ENTRY or (form.means is Means.CALL and isinstance(meaning, str)):
            self.entries.setdefault(meaning, len(self.entries))
        self.references.append(_Reference(part, start + place.offset, form, meaning, addend))

    def write(self, found: Versions) -> bytes:
        """Return the library."""
        records = unwinding.functions(bytes(self.frames.content))
        if records:
            self.frames_table.reserve(unwinding.table_size(len(records)))
            self.frames.append(bytes(4), 4, 4)  # the end of the records
        self.note.append(_NOTE + bytes(20), len(_NOTE) + 20, 4)
        self.table.reserve(_ADDRESS * len(self.entries))
        self.jump_code.reserve(self.machine.jump_size * len(self.jumps))
        addresses = [r for r in self.references if r.form.means is Means.ADDRESS]
        imports = sorted(
            {m for m in (*self.entries, *(r.meaning for r in addresses)) if isinstance(m, str)}
        )
        named = dynamic.Named(
            imports,
            self.symbols,
            found,
            len(self.entries) + len(addresses),
            self.placed,
            self.constructors,
        )
        image = Image(
            self.machine.page,
            [
                [self.note, *named.parts, self.constants, self.frames_table, self.frames],
                [self.text, self.jump_code],
                [self.constants_with_addresses, self.constructors, named.dynamic, self.table],
                [self.data, self.zeros],
            ],
        )
        self._fill_tables(named)
        for reference in self.references:
            self._patch(reference)
            if reference.form.means is Means.ADDRESS:
                at = reference.part.address + reference.offset
                self._relocate(
                    named, at, self.machine.absolute, reference.meaning, reference.addend
                )
        named.fill(image, self.symbols, self.placed)
        if records:
            content = bytes(self.frames.content)
            where = self.frames.address, self.frames_table.address
            self.frames_table.content[:] = unwinding.table(content, records, *where)
        library = image.write(self.number, named.dynamic, self.note, self.frames_table)
        digest = hashlib.sha1(library, usedforsecurity=False).digest()
        at = self.note.offset + len(_NOTE)
        library[at : at + len(digest)] = digest
        return bytes(library)

    def _address(self, place: Place) -> int:
        part, offset = self.placed[place.file, place.section]
        return part.address + offset + place.offset

    def _entry(self, meaning: Meaning) -> int:
        return self.table.address + _ADDRESS * self.entries[meaning]

    def _jump(self, name: str) -> int:
        return self.jump_code.address + self.machine.jump_size * self.jumps[name]

    def _fill_tables(self, named: dynamic.Named) -> None:
        for meaning in self.entries:
            self._relocate(named, self._entry(meaning), self.machine.entry, meaning, 0)
        code = [self.machine.jump(self._entry(name), self._jump(name)) for name in self.jumps]
        self.jump_code.content[:] = b"".join(code)

    def _relocate(
        self, named: dynamic.Named, at: int, kind: int, meaning: Meaning, addend: int
    ) -> None:
        """Add an address for the dynamic loader to write."""
        if isinstance(meaning, str):
            named.relocate(at, kind, named.numbers[meaning], addend)
        else:
            named.relocate(at, self.machine.relative, 0, self._address(meaning) + addend)

    def _patch(self, reference: _Reference) -> None:
        means, meaning = reference.form.means, reference.meaning
        if means is Means.ENTRY:
            symbol = self._entry(meaning)
        elif isinstance(meaning, Place):
            symbol = self._address(meaning)
        else:
            symbol = 0 if means is Means.ADDRESS else self._jump(meaning)
        value = 0 if means is Means.ADDRESS else symbol + reference.addend
        place = reference.part.address + reference.offset
        reference.form.patch(reference.part.content, reference.offset, value, place)


def _priority(section: Section) -> int:
    """Return the order in which constructors run; other sections come first.

    Raises
    ------
    CannotLink
        The name of a section of constructors is unknown.
    """
    if section.kind != elf.INIT_ARRAY:
        return -1
    if section.name == ".init_array":
        return _LAST
    number = section.name.removeprefix(".init_array.")
    if not number.isdecimal():
        raise CannotLink(f"a section of constructors is called {section.name}")
    return int(number)

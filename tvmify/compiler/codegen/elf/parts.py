"""The parts of a shared library, and their layout in the file and in memory."""

from __future__ import annotations

from collections.abc import Sequence

from tvmify.compiler.codegen.elf import records as elf
from tvmify.compiler.codegen.elf.objects import CannotLink

# Types and flags of segments.
_LOAD, _DYNAMIC, _NOTE = 1, 2, 4
_FRAMES, _STACK, _READ_ONLY_LATER = 0x6474E550, 0x6474E551, 0x6474E552
_EXECUTE, _WRITE, _READ = 1, 2, 4
#: The largest alignment: the smallest size of a page.
_ALIGNMENT = 1 << 12


class Part:
    """A section of the library, made of sections of object files or by the linker.

    Attributes
    ----------
    size
        Bytes in memory; `content` is empty for zero-initialized data.
    address, offset
        Where it is in memory and in the file, after the layout.
    number
        The number of the section.
    link, info, entry
        Further header fields, which some sections use.
    """

    def __init__(self, name: str, kind: int, flags: int, alignment: int = 1) -> None:
        self.name, self.kind, self.flags, self.alignment = name, kind, flags, alignment
        self.content = bytearray()
        self.size = self.address = self.offset = self.number = 0
        self.link: Part | None = None
        self.info = self.entry = 0

    def append(self, content: bytes, size: int, alignment: int) -> int:
        """Add a section, and return its offset."""
        if alignment & (alignment - 1) or alignment > _ALIGNMENT:
            raise CannotLink(f"a section is to be aligned to {alignment} bytes")
        self.alignment = max(self.alignment, alignment)
        start = self.size + -self.size % alignment
        self.size = start + size
        if self.kind != elf.NOBITS:
            self.content += bytes(start - len(self.content)) + content
            self.content += bytes(self.size - len(self.content))
        return start

    def reserve(self, size: int) -> None:
        """Reserve space for content that is written later."""
        self.content, self.size = bytearray(size), size


class Image:
    """The layout of a library.

    Parameters
    ----------
    page
        The largest size of a page, in bytes.
    groups
        Parts grouped by permissions; the third group is read-only once the library is loaded.
    """

    def __init__(self, page: int, groups: Sequence[Sequence[Part]]) -> None:
        self._page = page
        self._groups = [[part for part in group if part.size] for group in groups]
        # And five segments that are not loaded.
        count = sum(map(bool, self._groups)) + 5
        self._headers = elf.HEADER.size + count * elf.SEGMENT.size
        offset = address = self._headers
        for number, group in enumerate(self._groups):
            alignment = max((part.alignment for part in group), default=1)
            if number and group:
                offset += -offset % alignment
                address += -address % page + offset % page
            for part in group:
                gap = -address % part.alignment
                part.address, part.offset = address + gap, offset + gap
                address = part.address + part.size
                offset = part.offset + len(part.content)
        self.parts = [part for group in self._groups for part in group]
        for number, part in enumerate(self.parts):
            part.number = number + 1
        self._end = offset

    def add(self, part: Part) -> None:
        """Add a part that is not loaded."""
        part.offset = self._end + -self._end % part.alignment
        self._end = part.offset + part.size
        self.parts.append(part)
        part.number = len(self.parts)

    def write(self, machine: int, dynamic: Part, note: Part, frames_table: Part) -> bytearray:
        """Return the file."""
        titles, starts = bytearray(b"\0"), {}
        title = Part(".shstrtab", elf.STRTAB, 0)
        for part in (*self.parts, title):
            starts[part.name] = len(titles)
            titles += part.name.encode() + b"\0"
        title.append(bytes(titles), len(titles), 1)
        self.add(title)
        sections = self._end + -self._end % 8
        content = bytearray(sections)
        segments = self._segments(dynamic, note, frames_table)
        elf.HEADER.pack_into(
            content,
            0,
            *(elf.IDENTIFICATION, elf.LIBRARY, machine, 1, 0, elf.HEADER.size, sections, 0),
            *(elf.HEADER.size, elf.SEGMENT.size, len(segments) // elf.SEGMENT.size),
            *(elf.SECTION.size, len(self.parts) + 1, title.number),
        )
        content[elf.HEADER.size : elf.HEADER.size + len(segments)] = segments
        content += elf.SECTION.pack(*[0] * 10)
        for part in self.parts:
            content[part.offset : part.offset + len(part.content)] = part.content
            content += elf.SECTION.pack(
                *(starts[part.name], part.kind, part.flags, part.address, part.offset, part.size),
                *(part.link.number if part.link else 0, part.info, part.alignment, part.entry),
            )
        return content

    def _segments(self, dynamic: Part, note: Part, frames_table: Part) -> bytes:
        read_only = self._groups[2]
        segments = [
            self._segment(_LOAD, group, begins=not number, whole_pages=group is read_only)
            for number, group in enumerate(self._groups)
            if group
        ]
        segments.append(self._segment(_DYNAMIC, [dynamic]))
        segments.append(self._segment(_NOTE, [note]))
        if frames_table.size:
            segments.append(self._segment(_FRAMES, [frames_table]))
        segments.append(elf.SEGMENT.pack(_STACK, _READ | _WRITE, 0, 0, 0, 0, 0, 16))
        segments.append(self._segment(_READ_ONLY_LATER, read_only, whole_pages=True))
        return b"".join(segments)

    def _segment(
        self, kind: int, parts: Sequence[Part], begins: bool = False, whole_pages: bool = False
    ) -> bytes:
        first, last = parts[0], parts[-1]
        offset, address = (0, 0) if begins else (first.offset, first.address)
        in_file = last.offset + len(last.content) - offset
        end = last.address + last.size
        if whole_pages:
            end += -end % self._page
        flags = _READ
        if kind != _READ_ONLY_LATER:
            flags |= _WRITE if first.flags & elf.WRITE else 0
            flags |= _EXECUTE if first.flags & elf.EXECUTE else 0
        alignment = self._page if kind == _LOAD else first.alignment
        size = end - address
        return elf.SEGMENT.pack(kind, flags, offset, address, address, in_file, size, alignment)

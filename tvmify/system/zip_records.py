"""The records of a zip archive, or an error if another reader could see different ones.

A zip file states most facts twice, and readers trust different copies: since 3.12, Python's
`zipfile` takes names from an extra field; PyTorch's reader ignores case and skips records that are
marked as folders; others walk the local headers. This reader accepts only archives with a single
interpretation: the parts follow each other without gaps, both copies of each fact agree, and there
is nothing that our writers never write.
"""

from __future__ import annotations

import os
import stat
import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

_END = struct.Struct("<4s4H2LH")
_LARGE_END = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_HEADER = struct.Struct("<4s5H3L2H")

#: The longest directory that is read, in bytes: that of a million records.
_LONGEST_DIRECTORY = 64 << 20
_CHUNK = 1 << 20
_STORED, _DEFLATED = 0, 8
#: General purpose bits: the sizes come after the content, and the name is UTF-8.
_SIZES_FOLLOW, _UTF8 = 0x0008, 0x0800
#: Extra fields: 64-bit sizes, and PyTorch's padding, which aligns tensors.
_ZIP64, _PADDING = 0x0001, 0x4246
_MAX_16, _MAX_32 = 0xFFFF, 0xFFFFFFFF


class AmbiguousArchive(ValueError):
    """The file is not a zip archive, is damaged, or can be read in more than one way."""


class Record(NamedTuple):
    """Where one record is.

    Attributes
    ----------
    name
        As all readers see it.
    start
        Offset of its content in the file, in bytes.
    stored
        Bytes of its content in the file.
    size
        Bytes of its content when expanded; equal to `stored` unless it is compressed.
    is_compressed
        Whether the content is deflated.
    crc
        CRC-32 of its content.
    """

    name: str
    start: int
    stored: int
    size: int
    is_compressed: bool
    crc: int


def read_records(file: BinaryIO) -> list[Record]:
    """Return the records of an archive, in the order of its directory.

    Parameters
    ----------
    file
        Open for reading; its position changes.

    Raises
    ------
    AmbiguousArchive
        See there.
    """
    start, end, number = _directory(file)
    directory = _bytes(file, start, end - start)
    entries, position = [], 0
    for _ in range(number):
        entry, position = _entry(directory, position)
        entries.append(entry)
    if position != len(directory):
        raise AmbiguousArchive("its directory has more entries than it declares")
    names: set[str] = set()
    for entry in entries:
        # PyTorch's reader ignores the case of ASCII letters in names.
        name = entry.name.encode().lower().decode()
        if name in names:
            raise AmbiguousArchive(f"it has two records of one name: {entry.name}")
        names.add(name)
    records, offset = {}, 0
    for entry in sorted(entries, key=lambda entry: entry.offset):
        if entry.offset != offset:
            raise AmbiguousArchive(f"its record {entry.name} is not where it should be")
        records[entry.name], offset = _located(file, entry)
    if offset != start:
        raise AmbiguousArchive("there is something between its records and its directory")
    return [records[entry.name] for entry in entries]


def content(file: BinaryIO, record: Record) -> Iterator[bytes]:
    """Yield the content of a record in pieces; several threads may do so at once.

    Parameters
    ----------
    file
        Must have a file descriptor; its position does not matter.

    Raises
    ------
    AmbiguousArchive
        It is not as long as the archive says, has another CRC, or cannot be expanded.
    """
    pieces = _pieces(file, record)
    length = crc = 0
    for piece in _expanded(pieces, record.size) if record.is_compressed else pieces:
        length += len(piece)
        crc = zlib.crc32(piece, crc)
        yield piece
    if length != record.size:
        raise AmbiguousArchive(f"its record {record.name} is cut off")
    if crc != record.crc:
        raise AmbiguousArchive(f"its record {record.name} is damaged")


# ------------------------------------------------------------------------------------- directory


def _directory(file: BinaryIO) -> tuple[int, int, int]:
    """Return where the directory starts and ends, and how many records it has."""
    end = file.seek(0, os.SEEK_END) - _END.size
    signature, *small, comment = _unpack(_END, file, end)
    if signature != b"PK\5\6" or comment:
        raise AmbiguousArchive("it does not end as an archive does")
    numbers = small
    if end >= _LOCATOR.size + _LARGE_END.size:  # zip64 archives have a longer end record before it
        mark, disk, place, disks = _unpack(_LOCATOR, file, end - _LOCATOR.size)
        if mark == b"PK\6\7":
            end -= _LOCATOR.size + _LARGE_END.size
            mark, rest, _, _, *numbers = _unpack(_LARGE_END, file, end)
            expected = [
                min(number, limit) for number, limit in zip(numbers, _END_LIMITS, strict=True)
            ]
            if (mark, rest, disk, place, disks) != (b"PK\6\6", 44, 0, end, 1) or small != expected:
                raise AmbiguousArchive("its directory is not where it should be")
    disk, other_disk, here, number, length, start = numbers
    if disk or other_disk or here != number or start + length != end:
        raise AmbiguousArchive("its directory is not where it should be")
    if length > _LONGEST_DIRECTORY:
        raise AmbiguousArchive(f"its directory has {length} bytes")
    return start, end, number


_END_LIMITS = (_MAX_16, _MAX_16, _MAX_16, _MAX_16, _MAX_32, _MAX_32)


class _Entry(NamedTuple):
    """What the directory says of a record."""

    name: str
    raw_name: bytes
    flags: int
    method: int
    crc: int
    stored: int
    size: int
    offset: int


def _entry(directory: bytes, position: int) -> tuple[_Entry, int]:
    end = position + _ENTRY.size
    if end > len(directory):
        raise AmbiguousArchive("its directory is cut off")
    fields = _ENTRY.unpack_from(directory, position)
    signature, _, _, flags, method, _, _, crc, stored, size = fields[:10]
    name_length, extra_length, comment, disk, _, attributes, offset = fields[10:]
    raw_name = directory[end : end + name_length]
    extra = directory[end + name_length : end + name_length + extra_length]
    if signature != b"PK\1\2" or len(raw_name) + len(extra) != name_length + extra_length:
        raise AmbiguousArchive("its directory is damaged")
    name = _name(raw_name, flags)
    if method not in (_STORED, _DEFLATED):
        raise AmbiguousArchive(f"its record {name!r} is compressed by an unsupported method")
    if comment or disk or flags & ~(_SIZES_FOLLOW | _UTF8):
        raise AmbiguousArchive(f"its record {name!r} is encrypted, or has unexpected flags")
    # PyTorch's reader treats a record with the DOS folder attribute as a folder, without content.
    if attributes & _MAX_16 or stat.S_IFMT(attributes >> 16) not in (0, stat.S_IFREG):
        raise AmbiguousArchive(f"its record {name!r} is not a plain file")
    size, stored, offset = _large((size, stored, offset), _extras(extra, name), name)
    if method == _STORED and stored != size:
        raise AmbiguousArchive(f"its record {name!r} has two sizes")
    entry = _Entry(name, raw_name, flags, method, crc, stored, size, offset)
    return entry, end + name_length + extra_length


def _name(raw_name: bytes, flags: int) -> str:
    try:
        name = raw_name.decode("utf-8" if flags & _UTF8 else "ascii")
    except UnicodeDecodeError as error:
        raise AmbiguousArchive(
            f"its record {raw_name!r} has a name in an unknown encoding"
        ) from error
    if not name or "\0" in name or name.endswith("/"):
        raise AmbiguousArchive(f"its record {name!r} is not named like a file")
    return name


def _extras(extra: bytes, name: str) -> dict[int, bytes]:
    fields: dict[int, bytes] = {}
    position = 0
    while position < len(extra):
        if position + 4 > len(extra):
            raise AmbiguousArchive(f"its record {name!r} has a damaged extra field")
        kind, length = struct.unpack_from("<2H", extra, position)
        field = extra[position + 4 : position + 4 + length]
        if kind not in (_ZIP64, _PADDING) or kind in fields or len(field) != length:
            raise AmbiguousArchive(f"its record {name!r} has an unexpected extra field")
        fields[kind] = field
        position += 4 + length
    return fields


def _large(numbers: tuple[int, ...], extras: dict[int, bytes], name: str) -> Iterator[int]:
    """Return the numbers, taking those that need 64 bits from an extra field, in this order."""
    missing = sum(number == _MAX_32 for number in numbers)
    field = extras.get(_ZIP64, b"")
    if len(field) != 8 * missing:
        raise AmbiguousArchive(f"its record {name!r} has unexpected 64-bit sizes")
    large = iter(struct.unpack(f"<{missing}Q", field))
    return (next(large) if number == _MAX_32 else number for number in numbers)


# --------------------------------------------------------------------------------------- records


def _located(file: BinaryIO, entry: _Entry) -> tuple[Record, int]:
    """Compare a local header with the directory; return the record, and where the next begins."""
    header = _unpack(_HEADER, file, entry.offset)
    signature, _, flags, method, _, _, crc, stored, size, name_length, extra_length = header
    tail = _bytes(file, entry.offset + _HEADER.size, name_length + extra_length)
    raw_name = tail[:name_length]
    expected = (b"PK\3\4", entry.flags, entry.method, entry.raw_name)
    if (signature, flags, method, raw_name) != expected:
        raise AmbiguousArchive(f"its record {entry.name!r} is described in two ways")
    extras = _extras(tail[name_length:], entry.name)
    start = entry.offset + _HEADER.size + len(tail)
    end = start + entry.stored
    sizes = (entry.crc, entry.stored, entry.size)
    if entry.flags & _SIZES_FOLLOW:
        end = _past_descriptor(file, end, sizes, entry.name)
        is_right = (crc, stored, size) in ((0, 0, 0), sizes) or _MAX_32 in (stored, size)
    else:
        if _MAX_32 in (stored, size):
            field = extras.get(_ZIP64, b"")
            size, stored = struct.unpack("<2Q", field) if len(field) == 16 else (size, stored)
        is_right = (crc, stored, size) == sizes
    if not is_right:
        raise AmbiguousArchive(f"its record {entry.name!r} has two sizes")
    is_compressed = entry.method == _DEFLATED
    return Record(entry.name, start, entry.stored, entry.size, is_compressed, entry.crc), end


def _past_descriptor(file: BinaryIO, place: int, sizes: tuple[int, ...], name: str) -> int:
    """Check the sizes behind a record against the directory; return where they end."""
    for layout in ("<4s3L", "<4sL2Q"):
        following = struct.Struct(layout)
        with_room = file.seek(0, os.SEEK_END) >= place + following.size
        if with_room and _unpack(following, file, place) == (b"PK\7\10", *sizes):
            return place + following.size
    raise AmbiguousArchive(f"its record {name!r} has two sizes")


def _pieces(file: BinaryIO, record: Record) -> Iterator[bytes]:
    end = record.start + record.stored
    for offset in range(record.start, end, _CHUNK):
        yield os.pread(file.fileno(), min(_CHUNK, end - offset), offset)


def _expanded(pieces: Iterator[bytes], size: int) -> Iterator[bytes]:
    """Inflate, and stop soon after the expected size."""
    inflate, total = zlib.decompressobj(-zlib.MAX_WBITS), 0
    try:
        for piece in pieces:
            while piece and not inflate.eof and total <= size:
                part = inflate.decompress(piece, _CHUNK)
                total += len(part)
                yield part
                piece = inflate.unconsumed_tail
    except zlib.error as error:
        raise AmbiguousArchive(f"a record cannot be expanded ({error})") from error


def _unpack(layout: struct.Struct, file: BinaryIO, place: int) -> tuple:
    return layout.unpack(_bytes(file, place, layout.size))


def _bytes(file: BinaryIO, place: int, length: int) -> bytes:
    if place < 0:
        raise AmbiguousArchive("it is too short for an archive")
    file.seek(place)
    found = file.read(length)
    if len(found) != length:
        raise AmbiguousArchive("it is cut off")
    return found

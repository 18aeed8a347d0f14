"""The ``.eh_frame_hdr`` table, by which debuggers, profilers and exceptions unwind the stack."""

from __future__ import annotations

import struct

from tvmify.compiler.codegen.elf.objects import CannotLink

#: Encodings of 32-bit distances: from their own place, and from the table.
_FROM_HERE, _FROM_TABLE, _COUNT = 0x1B, 0x3B, 0x03
_ENTRY = struct.Struct("<ii")


def functions(frames: bytes) -> list[int]:
    """Return the offsets in ``.eh_frame`` of the records of functions.

    Raises
    ------
    CannotLink
        They are of an unsupported kind.
    """
    try:
        return _functions(frames)
    except (struct.error, IndexError, ValueError) as error:
        raise CannotLink("an object file ends within a frame record") from error


def _functions(frames: bytes) -> list[int]:
    found, at = [], 0
    while at < len(frames):
        length, common = struct.unpack_from("<II", frames, at)
        if not 4 <= length < 0xFFFFFFF0 or length % 4 or at + 4 + length > len(frames):
            raise CannotLink(f"an object file has a frame record of {length} bytes")
        if common:
            found.append(at)
        elif _encoding(frames, at + 8) != _FROM_HERE:
            raise CannotLink("an object file has frame records with unsupported addresses")
        at += 4 + length
    return found


def _encoding(frames: bytes, at: int) -> int:
    """Return the encoding of function addresses, from a common information entry."""
    end = frames.index(b"\0", at + 1)
    if frames[at + 1 : end] != b"zR":
        raise CannotLink("an object file has frame records with unsupported data")
    at = end + 1
    # Alignment of code and of data, the register of the return address, the size of what follows.
    for _ in range(4):
        while frames[at] & 0x80:
            at += 1
        at += 1
    return frames[at]


def table_size(count: int) -> int:
    """Return the size of the table for a number of functions."""
    return 12 + _ENTRY.size * count


def table(frames: bytes, records: list[int], frames_at: int, at: int) -> bytes:
    """Return the content of ``.eh_frame_hdr``.

    Parameters
    ----------
    frames
        The content of ``.eh_frame``, relocated.
    records
        The result of `functions`.
    frames_at, at
        The addresses of both sections.
    """
    entries = []
    for record in records:
        (distance,) = struct.unpack_from("<i", frames, record + 8)
        entries.append((frames_at + record + 8 + distance - at, frames_at + record - at))
    head = struct.pack(
        "<BBBBiI", 1, _FROM_HERE, _COUNT, _FROM_TABLE, frames_at - at - 4, len(records)
    )
    return head + b"".join(_ENTRY.pack(*entry) for entry in sorted(entries))

"""Relocations of AArch64, against instructions as the manual encodes them."""

from __future__ import annotations

import struct

import pytest

from tvmify.compiler.codegen.elf import CannotLink, records
from tvmify.compiler.codegen.elf.machines import machine_of

# Relocation, instruction with an empty field, value, place, instruction with the field written.
PATCHED = [
    ("adrp x0, one page on", 275, 0x90000000, 0x1000, 0x10, 0xB0000000),
    ("adrp x0, one page back", 275, 0x90000000, 0x0FFF, 0x1000, 0xF0FFFFE0),
    ("add x0, x0, #0x123", 277, 0x91000000, 0x5123, 0, 0x91048C00),
    ("ldrb w0, [x0, #1]", 278, 0x39400000, 0x1001, 0, 0x39400400),
    ("ldrh w0, [x0, #2]", 284, 0x79400000, 0x1002, 0, 0x79400400),
    ("ldr w0, [x0, #4]", 285, 0xB9400000, 0x1004, 0, 0xB9400400),
    ("ldr x0, [x0, #8]", 286, 0xF9400000, 0x1008, 0, 0xF9400400),
    ("ldr q0, [x0, #16]", 299, 0x3DC00000, 0x1010, 0, 0x3DC00400),
    ("bl, two on", 283, 0x94000000, 0x1008, 0x1000, 0x94000002),
    ("b, one back", 282, 0x14000000, 0x0FFC, 0x1000, 0x17FFFFFF),
    ("adrp x8, an entry", 311, 0x90000008, 0x3FF8, 0x1000, 0xD0000008),
    ("ldr x8, [x8, an entry]", 312, 0xF9400108, 0x3FF8, 0x1000, 0xF947FD08),
]


@pytest.mark.parametrize(("number", "before", "value", "place", "after"), [p[1:] for p in PATCHED])
def test_instructions(number: int, before: int, value: int, place: int, after: int) -> None:
    form = machine_of(records.AARCH64).forms[number]
    # A field that is not empty is overwritten.
    for content in (bytearray(struct.pack("<I", before)), bytearray(struct.pack("<I", after))):
        form.patch(content, 0, value, place)
        assert struct.unpack("<I", content) == (after,)


@pytest.mark.parametrize(
    ("number", "value"),
    [
        (275, 1 << 33),
        (283, 1 << 27),
        (283, 2),
        (284, 1),
        (285, 2),
        (286, 4),
        (299, 8),
        (261, 1 << 31),
    ],
)
def test_relocation_overflow_is_an_error(number: int, value: int) -> None:
    with pytest.raises((ValueError, struct.error)):
        machine_of(records.AARCH64).forms[number].patch(bytearray(8), 0, value, 0)


def test_a_jump_loads_its_entry() -> None:
    adrp, ldr, br, _ = struct.unpack("<IIII", machine_of(records.AARCH64).jump(0x3FF8, 0x1000))
    assert (adrp, ldr, br) == (0xD0000010, 0xF947FE11, 0xD61F0220)


def test_another_processor_is_refused() -> None:
    with pytest.raises(CannotLink, match="243"):
        machine_of(243)

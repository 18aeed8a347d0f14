"""What depends on the processor: relocations, and calls to other libraries."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from tvmify.compiler.codegen.elf import records as elf
from tvmify.compiler.codegen.elf.objects import CannotLink

#: Writes a value at an offset; the last argument is the address of that place.
Patch = Callable[[bytearray, int, int, int], None]


class Means(Enum):
    """What a relocation against a symbol refers to."""

    #: The symbol itself, relative to the place.
    SYMBOL = auto()
    #: The same, or code that jumps to it if another library defines it.
    CALL = auto()
    #: A GOT entry with the symbol's address.
    ENTRY = auto()
    #: The symbol's absolute address, known to the dynamic loader only.
    ADDRESS = auto()


@dataclass(frozen=True)
class Form:
    """A type of relocation."""

    means: Means
    patch: Patch


@dataclass(frozen=True)
class Machine:
    """The parameters of linking for a processor.

    Attributes
    ----------
    page
        The largest size of a page, in bytes.
    relative, entry, absolute
        The types of the dynamic loader's relocations: the library's own address plus a number,
        an entry of the GOT, the address of a symbol plus a number.
    forms
        By the type of relocation.
    jump
        Code that jumps to the address in an entry, from the address of both.
    jump_size
        Its size in bytes.
    """

    page: int
    relative: int
    entry: int
    absolute: int
    forms: Mapping[int, Form]
    jump: Callable[[int, int], bytes]
    jump_size: int


def _distance(form: str) -> Patch:
    def patch(content: bytearray, at: int, value: int, place: int) -> None:
        struct.pack_into(form, content, at, value - place)

    return patch


def _address(content: bytearray, at: int, value: int, place: int) -> None:
    struct.pack_into("<Q", content, at, value)


def _x86_jump(entry: int, place: int) -> bytes:
    # jmp *entry(%rip), and a nop of two bytes.
    return b"\xff\x25" + struct.pack("<i", entry - place - 6) + b"\x66\x90"


def _change(content: bytearray, at: int, clear: int, bits: int) -> None:
    (instruction,) = struct.unpack_from("<I", content, at)
    struct.pack_into("<I", content, at, instruction & ~clear | bits)


def _page_bits(value: int, place: int) -> int:
    pages = (value >> 12) - (place >> 12)
    if not -(1 << 20) <= pages < 1 << 20:
        raise ValueError(f"{pages} pages are too far")
    return (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5


def _page(content: bytearray, at: int, value: int, place: int) -> None:
    _change(content, at, 3 << 29 | 0x7FFFF << 5, _page_bits(value, place))


def _in_page(scale: int) -> Patch:
    def patch(content: bytearray, at: int, value: int, place: int) -> None:
        if value % (1 << scale):
            raise ValueError(f"{value:#x} is not aligned to {1 << scale} bytes")
        _change(content, at, 0xFFF << 10, (value & 0xFFF) >> scale << 10)

    return patch


def _branch(content: bytearray, at: int, value: int, place: int) -> None:
    words = (value - place) >> 2
    if (value - place) % 4 or not -(1 << 25) <= words < 1 << 25:
        raise ValueError(f"{value - place} bytes are out of range of a branch")
    _change(content, at, 0x3FFFFFF, words & 0x3FFFFFF)


def _arm_jump(entry: int, place: int) -> bytes:
    return struct.pack(
        "<IIII",
        0x90000010 | _page_bits(entry, place),  # adrp x16, entry
        0xF9400211 | (entry & 0xFFF) >> 3 << 10,  # ldr x17, [x16, entry]
        0xD61F0220,  # br x17
        0xD503201F,  # nop
    )


_X86_64 = Machine(
    page=1 << 12,
    relative=8,
    entry=6,
    absolute=1,
    forms={
        1: Form(Means.ADDRESS, _address),  # R_X86_64_64
        2: Form(Means.SYMBOL, _distance("<i")),  # R_X86_64_PC32
        4: Form(Means.CALL, _distance("<i")),  # R_X86_64_PLT32
        9: Form(Means.ENTRY, _distance("<i")),  # R_X86_64_GOTPCREL
        24: Form(Means.SYMBOL, _distance("<q")),  # R_X86_64_PC64
        41: Form(Means.ENTRY, _distance("<i")),  # R_X86_64_GOTPCRELX
        42: Form(Means.ENTRY, _distance("<i")),  # R_X86_64_REX_GOTPCRELX
    },
    jump=_x86_jump,
    jump_size=8,
)

_AARCH64 = Machine(
    page=1 << 16,
    relative=1027,
    entry=1025,
    absolute=257,
    forms={
        257: Form(Means.ADDRESS, _address),  # R_AARCH64_ABS64
        260: Form(Means.SYMBOL, _distance("<q")),  # R_AARCH64_PREL64
        261: Form(Means.SYMBOL, _distance("<i")),  # R_AARCH64_PREL32
        275: Form(Means.SYMBOL, _page),  # R_AARCH64_ADR_PREL_PG_HI21
        277: Form(Means.SYMBOL, _in_page(0)),  # R_AARCH64_ADD_ABS_LO12_NC
        278: Form(Means.SYMBOL, _in_page(0)),  # R_AARCH64_LDST8_ABS_LO12_NC
        282: Form(Means.CALL, _branch),  # R_AARCH64_JUMP26
        283: Form(Means.CALL, _branch),  # R_AARCH64_CALL26
        284: Form(Means.SYMBOL, _in_page(1)),  # R_AARCH64_LDST16_ABS_LO12_NC
        285: Form(Means.SYMBOL, _in_page(2)),  # R_AARCH64_LDST32_ABS_LO12_NC
        286: Form(Means.SYMBOL, _in_page(3)),  # R_AARCH64_LDST64_ABS_LO12_NC
        299: Form(Means.SYMBOL, _in_page(4)),  # R_AARCH64_LDST128_ABS_LO12_NC
        311: Form(Means.ENTRY, _page),  # R_AARCH64_ADR_GOT_PAGE
        312: Form(Means.ENTRY, _in_page(3)),  # R_AARCH64_LD64_GOT_LO12_NC
    },
    jump=_arm_jump,
    jump_size=16,
)

_MACHINES = {elf.X86_64: _X86_64, elf.AARCH64: _AARCH64}
#: By `platform.machine`.
NUMBERS = {"x86_64": elf.X86_64, "aarch64": elf.AARCH64}


def machine_of(number: int) -> Machine:
    """Return the linking parameters of an architecture.

    Raises
    ------
    CannotLink
        It is not supported.
    """
    if number not in _MACHINES:
        raise CannotLink(f"object files are for the ELF machine {number}")
    return _MACHINES[number]

"""Records and constants of little-endian 64-bit ELF files."""

from __future__ import annotations

import struct

#: The header: identification, type, machine, version, entry, offsets of the segment and section
#: tables, flags, sizes and counts, and the section with the section names.
HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
#: Name, type, flags, address, offset, size, link, info, alignment, size of an entry.
SECTION = struct.Struct("<IIQQQQIIQQ")
#: Type, flags, offset, address twice, size in the file and in memory, alignment.
SEGMENT = struct.Struct("<IIQQQQQQ")
#: Name, type and binding, visibility, section, value, size.
SYMBOL = struct.Struct("<IBBHQQ")
#: Offset, symbol and type, addend.
RELA = struct.Struct("<QQq")
DYNAMIC = struct.Struct("<QQ")

IDENTIFICATION = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
RELOCATABLE, LIBRARY = 1, 3
X86_64, AARCH64 = 62, 183

# Types of sections.
PROGBITS, SYMTAB, STRTAB, RELA_SECTION, HASH, DYNAMIC_SECTION = 1, 2, 3, 4, 5, 6
NOTE, NOBITS, REL_SECTION, DYNSYM, INIT_ARRAY, GROUP, SYMTAB_INDICES = 7, 8, 9, 11, 14, 17, 18
VERDEF, VERNEED, VERSYM, X86_64_UNWIND = 0x6FFFFFFD, 0x6FFFFFFE, 0x6FFFFFFF, 0x70000001

# Flags of sections: writable, loaded, code, mergeable, strings, `info` is a section.
WRITE, ALLOC, EXECUTE, MERGE, STRINGS, INFO_LINK = 1, 2, 4, 16, 32, 64

# Special section numbers: undefined; from here on, absolute values and the like.
UNDEFINED, RESERVED = 0, 0xFF00

# Bindings, types and the visibility of symbols.
LOCAL, GLOBAL, WEAK = 0, 1, 2
NOTYPE, OBJECT, FUNCTION, IN_SECTION, IN_FILE = 0, 1, 2, 3, 4
DEFAULT = 0


def text_at(table: bytes, offset: int) -> str:
    """Return a name in a string table.

    Raises
    ------
    ValueError
        It does not end with a zero byte.
    """
    return table[offset : table.index(b"\0", offset)].decode()

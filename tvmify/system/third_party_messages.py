"""Facts that are read from the messages of other libraries' errors.

PyTorch, LLVM, the C++ library and the dynamic loader state them in words only, in exceptions of
unspecific types, and so does our own C++ once its errors have crossed TorchScript.
This is the only place where the words of a message decide anything.
"""

from __future__ import annotations

import enum
import errno
import os

#: Numbers of ``errno`` that C++ spells out in a message.
_NAMED = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EMFILE,
    errno.ENFILE,
)


class Shortage(enum.Enum):
    """What a process lacked, by the words of the messages that say so."""

    # `native/library.cpp`
    FILE_IN_MEMORY = ("there is no place for a compiled library", "writing a compiled library to")
    MEMORY = ("can't allocate memory", "cannot allocate memory", "bad_alloc", "out of memory")
    # The loader, also if memory is short, which the end of its message then says.
    EXECUTABLE_MEMORY = ("failed to map segment from shared object",)
    THREADS = ("can't start new thread", "resource temporarily unavailable")


def shortage(error: BaseException) -> Shortage | None:
    """Return what the process lacked, if the message of an error says that."""
    text = str(error).lower()
    first_line = text.strip().partition("\n")[0]
    for found in Shortage:
        # Traces of C++ come after the first line, and with them where memory was wanted.
        searched = text if found is Shortage.MEMORY else first_line
        if any(words in searched for words in found.value):
            return found
    return None


def system_error_number(error: BaseException) -> int | None:
    """Return the number of ``errno`` that the first line of a message spells out, if it does."""
    first_line = str(error).strip().partition("\n")[0].lower()
    return next((code for code in _NAMED if os.strerror(code).lower() in first_line), None)


def words(error: BaseException) -> list[str]:
    """Return the words of a message: PyTorch names a class that it does not know among them."""
    return str(error).split()

"""Opening files that another user may have created."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO


class NotRegular(OSError):
    """It is a pipe, a device, a directory or a socket."""


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading, without blocking as opening a pipe would.

    Raises
    ------
    NotRegular
        It is something else.
    OSError
        It cannot be opened.
    """
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise NotRegular(f"{path} is not a regular file")
    return os.fdopen(file, "rb")

"""Files that are replaced at once: readers see the old one or the new one, never a part of it."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file, which takes its place when it is complete; an error leaves the old one.

    It has the mode of a file that it replaces.

    Raises
    ------
    OSError
        The file cannot be written, or its place is taken by a device or a pipe, such as /dev/null.
    """
    mode = None
    with contextlib.suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode) or stat.S_ISDIR(mode)):
            raise OSError(errno.EINVAL, "not a regular file, so it is not replaced", str(path))
    # Not derived from its name, which may be as long as the file system allows.
    temporary = path.with_name(f".tvmify-{secrets.token_hex(8)}")
    try:
        with temporary.open("x+b") as file:
            if mode is not None and stat.S_ISREG(mode):  # a file closed to others stays so
                os.fchmod(file.fileno(), stat.S_IMODE(mode) & 0o777)
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if error.filename != str(temporary):
            raise
        # The caller does not know that name.
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)

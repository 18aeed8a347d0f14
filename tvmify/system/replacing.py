"""Files that are replaced at once: readers see the old one or the new one, never a part of it."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file, which takes its place when it is complete; an error leaves the old one.

    Raises
    ------
    OSError
        The file cannot be written.
    """
    # Not derived from its name, which may be as long as the file system allows.
    temporary = path.with_name(f".tvmify-{secrets.token_hex(8)}")
    try:
        with temporary.open("x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)

"""A temporary directory with room for the files of a build."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tvmify.errors import BuildError

#: Tried after the directory for temporary files and those of the caller.
_OTHERS = ("/dev/shm", "/var/tmp", "/tmp")
#: Errors of file systems that cannot reserve space; then only writing shows whether there is any.
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


@contextlib.contextmanager
def folder(needed: int, others: Sequence[Path] = ()) -> Iterator[Path]:
    """Make a private directory with room for some bytes, and remove it afterwards.

    Parameters
    ----------
    others
        Directories to use if the one for temporary files (``TMPDIR``) is full.

    Raises
    ------
    BuildError
        There is no room anywhere.
    """
    problems = []
    for directory in _directories(others):
        try:
            made = tempfile.TemporaryDirectory(
                prefix="tvmify-", dir=directory, ignore_cleanup_errors=True
            )
        except OSError as error:
            problems.append(f"{directory}: {error.strerror}")
            continue
        with made as path:
            try:
                _reserve(Path(path, "room"), needed)
            except OSError as error:
                problems.append(f"{directory}: {error.strerror}")
                continue
            yield Path(path)
            return
    raise BuildError(
        f"no directory can take the {needed / 1e6:.1f} MB of temporary files of a build "
        f"({'; '.join(problems)})",
        "Free some space, or set TMPDIR to a directory that has some, and call refresh().",
    )


def _directories(others: Sequence[Path]) -> list[str]:
    usual = [os.environ.get("TMPDIR", "")]
    with contextlib.suppress(OSError):  # no directory is writable
        usual.append(tempfile.gettempdir())
    # A relative one may be gone with the working directory.
    everything = [*usual, *map(str, others), *_OTHERS]
    return list(dict.fromkeys(p for p in everything if Path(p).is_absolute()))


def _reserve(path: Path, needed: int) -> None:
    """Reserve space for a moment, which also respects quotas and limits.

    Raises
    ------
    OSError
        There is not enough.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(file, 0, needed)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
    finally:
        os.close(file)
        path.unlink()

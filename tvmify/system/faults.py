"""Recognizes errors that the environment causes, and says what the user can do about each."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import tempfile
from collections.abc import Iterator

import torch

from tvmify.errors import BuildError, NotCompiled, TvmifyError, TvmifyWarning, described, headline
from tvmify.system.third_party_messages import Shortage, shortage, system_error_number

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)


def environment_fault(error: BaseException, doing: str) -> BuildError | None:
    """Return the reason for an error caused by memory, disk, permissions or limits.

    None if the program or tvmify caused it.

    Parameters
    ----------
    doing
        What failed, e.g. ``"building"``.
    """
    if isinstance(error, NotCompiled):
        return None
    if isinstance(error, MemoryError):
        return _out_of_memory(doing)
    if isinstance(error, RecursionError):
        return BuildError(
            f"{doing} needs a deeper stack than Python's limit of {sys.getrecursionlimit()} calls",
            "Raise it (sys.setrecursionlimit), or make the first call in a function that is less "
            "deeply nested, and call refresh().",
        )
    if isinstance(error, ImportError):
        return BuildError(
            f"{doing} could not import a package: {described(error)}",
            "Run `tvmify doctor` to see what is missing, then call refresh().",
        )
    if isinstance(error, OSError) and error.errno is not None:
        return _of_the_system(error, doing)
    text = headline(error)
    lacking = shortage(error)
    if lacking is Shortage.EXECUTABLE_MEMORY:
        return BuildError(
            f"{doing} failed: {text}",
            "Allow the process to execute memory, or set TMPDIR to a directory that is not mounted "
            "noexec, and call refresh().",
        )
    if (code := system_error_number(error)) is not None:
        return _of_the_system(OSError(code, text), doing)
    if lacking is Shortage.FILE_IN_MEMORY:
        return BuildError(
            f"{doing} failed: {text}",
            "Check the limits for files (ulimit -f, ulimit -n) and memory, and call refresh().",
        )
    if lacking is Shortage.MEMORY:
        return _out_of_memory(doing)
    if lacking is Shortage.THREADS:
        return _no_processes(doing)
    return _of_the_system(error, doing) if isinstance(error, OSError) else None


@contextlib.contextmanager
def as_build_error(doing: str) -> Iterator[None]:
    """Turn any error into a reason to run in eager.

    Not errors of tvmify and of the GPU, nor warnings that the user's filters turn into errors.

    Parameters
    ----------
    doing
        What fails, as the beginning of a sentence: "compiling it".

    Raises
    ------
    BuildError
        In place of the error, which is its cause.
    """
    try:
        yield
    except (TvmifyError, TvmifyWarning, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # any error: eager can still run the call
        raise environment_fault(error, doing) or BuildError(
            f"{doing} failed: {described(error)}",
            "Report it together with the module; strict=True raises it with its traceback.",
        ) from error


def check_temporary_directory() -> None:
    """Check that there is a directory for temporary files, which importing ``torch.export`` needs.

    Without one, the import would fail and leave PyTorch half imported.

    Raises
    ------
    BuildError
        There is none.
    """
    try:
        tempfile.gettempdir()
    except OSError as error:
        raise _unwritable() or BuildError(
            "no directory for temporary files is writable (TMPDIR, /tmp, /var/tmp), and "
            "torch.export cannot be imported without one",
            "Set TMPDIR to a writable directory, and call refresh().",
        ) from error


def _unwritable() -> BuildError | None:
    """Return why no temporary file can be written, if that is not for want of a directory."""
    try:
        with tempfile.TemporaryFile(dir=os.environ.get("TMPDIR") or "/tmp", buffering=0) as file:
            file.write(b".")
    except OSError as error:
        if error.errno in (*_NO_ROOM, *_TOO_MANY_FILES, errno.EFBIG):
            return _of_the_system(error, "importing torch.export")
    return None


def _of_the_system(error: OSError, doing: str) -> BuildError:
    place = f" ({error.filename})" if error.filename else ""
    said = f"{error.strerror or error}{place}"
    if error.errno in _NO_ROOM:
        return BuildError(
            f"{doing} ran out of disk space: {said}",
            "Free some space, or set TMPDIR to a directory that has some, and call refresh().",
        )
    if error.errno == errno.EFBIG:
        return BuildError(
            f"{doing} hit the limit for file sizes: {said}",
            "Raise it (ulimit -f, LimitFSIZE= of systemd), and call refresh().",
        )
    if error.errno in _FORBIDDEN:
        return BuildError(
            f"{doing} was not permitted: {said}",
            "Grant this user the permission, or set TMPDIR to another directory, and call "
            "refresh().",
        )
    if error.errno in _TOO_MANY_FILES:
        return BuildError(
            f"{doing} hit the limit for open files: {said}",
            "Raise it (ulimit -n) or close some files, and call refresh().",
        )
    if error.errno == errno.ENOMEM:
        return _out_of_memory(doing)
    if error.errno == errno.EAGAIN:
        return _no_processes(doing)
    return BuildError(
        f"{doing} failed with a system error: {type(error).__name__}: {said}",
        "Fix that, and call refresh().",
    )


def _out_of_memory(doing: str) -> BuildError:
    return BuildError(
        f"{doing} ran out of memory",
        "Free memory or raise the limit, and call refresh(); a program compiled on a larger "
        "machine can be copied here with `tvmify export`.",
    )


def _no_processes(doing: str) -> BuildError:
    return BuildError(
        f"{doing} could not start another thread or process",
        "Raise the limit (ulimit -u, pids of the container), and call refresh().",
    )

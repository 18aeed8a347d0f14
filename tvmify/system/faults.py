"""Which errors are faults of the environment, and what a person can do about each."""

from __future__ import annotations

import contextlib
import errno
import tempfile
from collections.abc import Iterator

import torch

from tvmify.errors import BuildError, NotCompiled, TvmifyError, described
from tvmify.system.third_party_messages import Shortage, shortage, system_error_number

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)


def environment_fault(error: BaseException, doing: str) -> BuildError | None:
    """Return the reason for an error that memory, disk, permissions or limits led to.

    None if it is the program, or tvmify, that is at fault.

    Parameters
    ----------
    doing
        What failed, e.g. ``"building"``.
    """
    if isinstance(error, NotCompiled):
        return None
    if isinstance(error, MemoryError):
        return _out_of_memory(doing)
    if isinstance(error, ImportError):
        return BuildError(
            f"{doing} could not import a package: {described(error)}",
            "Run `tvmify doctor` to see what is missing, then call refresh().",
        )
    if isinstance(error, OSError):
        return _of_the_system(error, doing)
    text = (str(error).strip().splitlines() or [""])[0][:300]
    lacking = shortage(error)
    if lacking is Shortage.EXECUTABLE_MEMORY:
        return BuildError(
            f"{doing} failed: {text}",
            "Let the process execute memory, or TMPDIR name a directory that is not mounted "
            "noexec, and call refresh().",
        )
    if (code := system_error_number(error)) is not None:
        return _of_the_system(OSError(code, text), doing)
    if lacking is Shortage.FILE_IN_MEMORY:
        return BuildError(
            f"{doing} failed: {text}",
            "Look at the limits for files (ulimit -f, ulimit -n) and memory, and call refresh().",
        )
    if lacking is Shortage.MEMORY:
        return _out_of_memory(doing)
    if lacking is Shortage.THREADS:
        return _no_processes(doing)
    return None


@contextlib.contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turn any error into a reason to run in eager, but for those of options and of the GPU.

    Raises
    ------
    BuildError
        In place of an error that is none of tvmify's own.
    """
    try:
        yield
    except (TvmifyError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # of any kind: the call has a result, from eager
        raise environment_fault(error, doing) or BuildError(
            f"{doing} failed: {described(error)}",
            "Report it, with the module; the cause of the error with strict=True shows where.",
        ) from error


def check_temporary_directory() -> None:
    """Refuse to import what PyTorch cannot import without such a directory.

    It would stay half imported.

    Raises
    ------
    BuildError
        There is none.
    """
    try:
        tempfile.gettempdir()
    except OSError as error:
        raise BuildError(
            "no directory for temporary files can be written to (TMPDIR, /tmp, /var/tmp), and "
            "torch.export is not imported without",
            "Let TMPDIR name one, and call refresh().",
        ) from error


def _of_the_system(error: OSError, doing: str) -> BuildError:
    place = f" ({error.filename})" if error.filename else ""
    said = f"{error.strerror or error}{place}"
    if error.errno in _NO_ROOM:
        return BuildError(
            f"{doing} found no room on a disk: {said}",
            "Free some space, or let TMPDIR name a directory that has some, and call refresh().",
        )
    if error.errno == errno.EFBIG:
        return BuildError(
            f"{doing} met the limit for the size of a file: {said}",
            "Raise it (ulimit -f, LimitFSIZE= of systemd), and call refresh().",
        )
    if error.errno in _FORBIDDEN:
        return BuildError(
            f"{doing} was not permitted: {said}",
            "Give this user the permission, or let TMPDIR name another directory, and call "
            "refresh().",
        )
    if error.errno in _TOO_MANY_FILES:
        return BuildError(
            f"{doing} met the limit for open files: {said}",
            "Raise it (ulimit -n) or close some, and call refresh().",
        )
    if error.errno == errno.ENOMEM:
        return _out_of_memory(doing)
    if error.errno == errno.EAGAIN:
        return _no_processes(doing)
    return BuildError(
        f"{doing} failed for a reason of the system: {type(error).__name__}: {said}",
        "Mend that, and call refresh().",
    )


def _out_of_memory(doing: str) -> BuildError:
    return BuildError(
        f"{doing} ran out of memory",
        "Free some or raise the limit, and call refresh(); a program compiled on a larger machine "
        "can be brought here with `tvmify export`.",
    )


def _no_processes(doing: str) -> BuildError:
    return BuildError(
        f"{doing} could not start another thread or process",
        "Raise the limit (ulimit -u, pids of the container), and call refresh().",
    )

"""The cache directory is private, or it is not used; and nothing in it is opened by surprise."""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from tvmify.errors import CacheError

_ANOTHER = (
    "Let TVMIFY_CACHE_DIR name a directory, one that is there or is to be made; to keep nothing on "
    "disk, use the option cache=False."
)
_ELSEWHERE = "Or let TVMIFY_CACHE_DIR name a directory that only you can write to."
#: As Linux follows at most.
_MOST_LINKS = 40
#: What opening a thing of another kind than the one that was asked for ends with.
_WRONG_KIND = (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.ENODEV)


def is_there(directory: Path) -> bool:
    """Whether a cache directory exists.

    Raises
    ------
    CacheError
        It does, and others than the user may read it, write to it, or put another in its place.
    """
    try:
        status = directory.lstat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise CacheError(
            f"{directory} cannot be looked at: {error.strerror}. {_ANOTHER}"
        ) from error
    _check_parents(directory)
    if stat.S_ISLNK(status.st_mode):
        raise CacheError(
            f"{directory} is a symbolic link. Name instead what it leads to: {_resolved(directory)}"
        )
    if not stat.S_ISDIR(status.st_mode):
        raise CacheError(f"{directory} is {_kind(status.st_mode)}, not a directory. {_ANOTHER}")
    if status.st_uid != os.geteuid():
        raise CacheError(
            f"{directory} belongs to user {status.st_uid}, and this process runs as user "
            f"{os.geteuid()}. Run it as that user. {_ELSEWHERE}"
        )
    if status.st_mode & 0o077:
        raise CacheError(
            f"{directory} is open to others (mode {stat.S_IMODE(status.st_mode):04o}), and what is "
            f"in it gets executed. Run: chmod 700 {directory}. {_ELSEWHERE}"
        )
    return True


def ensure(directory: Path) -> None:
    """Make a cache directory, unless it exists.

    Raises
    ------
    CacheError
        It would not be private: see `is_there`.
    OSError
        It cannot be made.
    """
    _check_parents(directory)  # before anything is left in a place that is not used then
    _make(directory)
    is_there(directory)


def _make(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700)
    except FileNotFoundError:
        _make(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        return  # of whatever kind: `is_there` looks


def _check_parents(directory: Path) -> None:
    """Refuse a path that another user could lead elsewhere, as OpenSSH does for its keys.

    Every directory and link on the way has to belong to root or to the user, those that a link
    leads through, too; and nobody else may write to a directory on it.
    """
    current, rest = Path("/"), [*reversed(directory.absolute().parent.parts[1:])]
    links = 0
    _check_above(current)
    while rest:
        name = rest.pop()
        if name == "..":
            current = current.parent
            continue
        try:
            is_link = _check_above(current / name)
        except FileNotFoundError:
            return  # and so is all below it: we make it
        if not is_link:
            current /= name
            continue
        links += 1
        if links > _MOST_LINKS:
            raise CacheError(f"{directory} leads through too many symbolic links. {_ELSEWHERE}")
        target = (current / name).readlink()
        current = Path("/") if target.is_absolute() else current
        rest += [part for part in reversed(target.parts) if part != "/"]


def _check_above(path: Path) -> bool:
    """Return whether a part of the way is a link.

    Raises
    ------
    CacheError
        Another user may put something else in its place, or in it.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CacheError(f"{path} cannot be looked at: {error.strerror}") from error
    if status.st_uid not in (0, os.geteuid()):
        raise CacheError(
            f"{path} belongs to user {status.st_uid}, who may replace what is in it, and this "
            f"process runs as user {os.geteuid()}. {_ELSEWHERE}"
        )
    if stat.S_ISLNK(status.st_mode):
        return True
    if not stat.S_ISDIR(status.st_mode):
        raise CacheError(f"{path} is {_kind(status.st_mode)}, not a directory. {_ANOTHER}")
    if _others_may_replace(status):
        raise CacheError(
            f"others may replace what is in {path} (mode {stat.S_IMODE(status.st_mode):04o}). "
            f"Run: chmod go-w {path}. {_ELSEWHERE}"
        )
    return False


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFREG: "a file",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")


def _resolved(path: Path) -> Path:
    return Path(os.path.realpath(path))  # Path.resolve raises where links lead in a circle


def _others_may_replace(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_ISVTX:  # as of /tmp: each user may rename their own files only
        return False
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_own_group(status.st_gid)


def _is_own_group(group: int) -> bool:
    """Whether a group has the user as its only member: many systems then let it write."""
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return user.pw_gid == group and found.gr_name == user.pw_name and not found.gr_mem


@contextlib.contextmanager
def opened(path: str | Path, within: int | None = None, kind: int = 0) -> Iterator[int]:
    """Open a file of the user, or a directory with ``kind=os.O_DIRECTORY``, for reading.

    Parameters
    ----------
    within
        The open directory that the path starts from.

    Raises
    ------
    CacheError
        It is a link, a pipe, a device, or somebody else may write to it.
    OSError
        It cannot be opened.
    """
    try:
        # A pipe would block; a terminal would become the one of this process.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        file = os.open(path, flags | kind, dir_fd=within)
    except OSError as error:
        if error.errno in _WRONG_KIND:
            raise CacheError(f"{path} is no plain file or directory") from error
        raise
    try:
        status = os.fstat(file)
        is_right = stat.S_ISDIR if kind & os.O_DIRECTORY else stat.S_ISREG
        if not is_right(status.st_mode):
            raise CacheError(f"{path} is no plain file or directory")
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise CacheError(f"{path} may be written to by others")
        yield file
    finally:
        os.close(file)


def read(file: int, largest: int) -> bytes:
    """Return what an open file holds.

    Raises
    ------
    CacheError
        That is more than `largest` bytes.
    """
    with open(file, "rb", closefd=False) as stream:
        size = os.fstat(file).st_size
        content = stream.read(min(size, largest) + 1)  # not more, should it grow meanwhile
    if len(content) > largest:
        raise CacheError(f"a file of {size} bytes is too large")
    return content


def write(path: Path, content: bytes) -> None:
    """Write a new file, and wait until the disk has it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "wb") as file:  # noqa: PTH123
        file.write(content)
        file.flush()
        # Without it a power cut can leave a renamed entry with empty files.
        os.fsync(file.fileno())


def remove(path: Path) -> None:
    """Remove a file, or a directory with all that is in it, as far as that can be done."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()

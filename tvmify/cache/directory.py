"""Access to the cache directory, which must be private; links and special files are refused."""

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
    "Set TVMIFY_CACHE_DIR to an existing or new directory; to keep nothing on disk, use the option "
    "cache=False."
)
_ELSEWHERE = "Or set TVMIFY_CACHE_DIR to a directory that only you can write to."
#: The most symbolic links that Linux follows in a path.
_MOST_LINKS = 40
#: Errors from opening something of another kind than requested.
_WRONG_KIND = (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.ENODEV)


def is_there(directory: Path) -> bool:
    """Whether a cache directory exists.

    Raises
    ------
    CacheError
        It exists, and other users may read it, write to it, or replace it.
    """
    try:
        status = directory.lstat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise CacheError(f"{directory} cannot be accessed: {error.strerror}. {_ANOTHER}") from error
    _check_parents(directory)
    if stat.S_ISLNK(status.st_mode):
        raise CacheError(
            f"{directory} is a symbolic link. Use its target instead: {_resolved(directory)}"
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
            f"in it is executed. If nothing else uses it, run: chmod 700 {directory}. {_ELSEWHERE}"
        )
    return True


def ensure(directory: Path) -> None:
    """Create a cache directory, unless it exists.

    Raises
    ------
    CacheError
        It would not be private: see `is_there`.
    OSError
        It cannot be created.
    """
    _check_parents(directory)  # first, so that nothing is created in a place that is then refused
    _make(directory)
    is_there(directory)


def _make(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700)
    except FileNotFoundError:
        _make(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        return  # `is_there` checks its kind


def _check_parents(directory: Path) -> None:
    """Refuse a path that another user could redirect, as OpenSSH does for its keys.

    Every directory and link along the path, including those that a link resolves to, must belong
    to root or to the user, and no other user may write to any of these directories.
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
            return  # it and all below it do not exist yet: we create them
        if not is_link:
            current /= name
            continue
        links += 1
        if links > _MOST_LINKS:
            raise CacheError(f"{directory} has too many levels of symbolic links. {_ELSEWHERE}")
        target = (current / name).readlink()
        current = Path("/") if target.is_absolute() else current
        rest += [part for part in reversed(target.parts) if part != "/"]


def _check_above(path: Path) -> bool:
    """Check one component of a path, and return whether it is a link.

    Raises
    ------
    CacheError
        Another user may replace it or what is in it.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CacheError(f"{path} cannot be accessed: {error.strerror}") from error
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
            f"If nobody else needs to write there, run: chmod go-w {path}. {_ELSEWHERE}"
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
    return Path(os.path.realpath(path))  # Path.resolve raises on a symlink loop


def _others_may_replace(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_ISVTX:  # like /tmp: users may rename only their own files
        return False
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_own_group(status.st_gid)


def _is_own_group(group: int) -> bool:
    """Whether the user is the group's only member: many systems then make files group-writable."""
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return user.pw_gid == group and found.gr_name == user.pw_name and not found.gr_mem


@contextlib.contextmanager
def opened(path: str | Path, within: int | None = None, kind: int = 0) -> Iterator[int]:
    """Open a file that belongs to the user for reading; ``kind=os.O_DIRECTORY`` for a directory.

    Parameters
    ----------
    within
        The open directory that the path is relative to.

    Raises
    ------
    CacheError
        It is a link, a pipe or a device, or another user may write to it.
    OSError
        It cannot be opened.
    """
    try:
        # Opening a pipe would block; a terminal would become this process's controlling terminal.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        file = os.open(path, flags | kind, dir_fd=within)
    except OSError as error:
        if error.errno in _WRONG_KIND:
            raise CacheError(f"{path} is not a regular file or directory") from error
        raise
    try:
        status = os.fstat(file)
        is_right = stat.S_ISDIR if kind & os.O_DIRECTORY else stat.S_ISREG
        if not is_right(status.st_mode):
            raise CacheError(f"{path} is not a regular file or directory")
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise CacheError(f"{path} may be written to by others")
        yield file
    finally:
        os.close(file)


def read(file: int, largest: int) -> bytes:
    """Return the contents of an open file.

    Raises
    ------
    CacheError
        It has more than `largest` bytes.
    """
    with open(file, "rb", closefd=False) as stream:
        size = os.fstat(file).st_size
        content = stream.read(min(size, largest) + 1)  # bounded, in case it is growing
    if len(content) > largest:
        raise CacheError(f"a file of {size} bytes is too large")
    return content


def write(path: Path, content: bytes) -> None:
    """Write a new file and sync it to disk."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "wb") as file:  # noqa: PTH123
        file.write(content)
        file.flush()
        # Otherwise a power failure can leave a renamed entry with empty files.
        os.fsync(file.fileno())


def remove(path: Path) -> None:
    """Remove a file or a directory tree, ignoring errors."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()

"""The ``TVMIFY_*`` environment variables."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from pathlib import Path
from typing import NamedTuple

import platformdirs

from tvmify.errors import OptionError, warn

#: The environment variables that tvmify reads.
VARIABLES = (
    "TVMIFY_CACHE_DIR",
    "TVMIFY_CACHE_SIZE",
    "TVMIFY_CACHE_URL",
    "TVMIFY_COMPARE",
    "TVMIFY_DISABLE",
    "TVMIFY_RECORD",
    "TVMIFY_STRICT_COMPILER",
    "TVMIFY_SYSTEM_LINKER",
)

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}


class Limits(NamedTuple):
    """How much a cache directory may hold; None for no limit."""

    bytes: int | None = 10 * 10**9
    entries: int | None = None


def environment() -> dict[str, str]:
    """Return all ``TVMIFY_*`` variables that are set, including ones not in `VARIABLES`."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith("TVMIFY_")}


def disabled() -> bool:
    """Whether ``TVMIFY_DISABLE`` is set to anything but 0, so that every call runs in eager."""
    return _flag("TVMIFY_DISABLE", False)


def system_linker() -> bool:
    """Whether ``TVMIFY_SYSTEM_LINKER`` has the system's C++ compiler link compiled code."""
    return _flag("TVMIFY_SYSTEM_LINKER", False)


def strict_compiler() -> bool:
    """Whether ``TVMIFY_STRICT_COMPILER`` makes failing converters and schedule rules errors."""
    return _flag("TVMIFY_STRICT_COMPILER", False)


def may_compare() -> bool:
    """Whether compiled code may be timed against eager: not with ``TVMIFY_COMPARE=0``."""
    return _flag("TVMIFY_COMPARE", True)


def cache_directory() -> Path | None:
    """Return ``TVMIFY_CACHE_DIR``, or tvmify's folder in the user's cache directory.

    Warn and return None for a user who has no home directory.
    """
    chosen = os.environ.get("TVMIFY_CACHE_DIR")
    try:
        return expanded(chosen or platformdirs.user_cache_dir("tvmify"))
    except RuntimeError:  # older versions of platformdirs leave the "~"
        return expanded("~/.cache/tvmify")


def cache_limits() -> Limits:
    """Return the limits of the disk cache."""
    text = os.environ.get("TVMIFY_CACHE_SIZE", "")
    return read_limits(text, "TVMIFY_CACHE_SIZE") if text.strip() else Limits()


def cache_url() -> str | None:
    """Return the URL of the shared cache for all modules, or None."""
    return os.environ.get("TVMIFY_CACHE_URL") or None


def record_file() -> str | None:
    """Return the file to which all modules append their signatures, or None."""
    return os.environ.get("TVMIFY_RECORD") or None


def read_limits(text: str, name: str) -> Limits:
    """Parse the limits of a cache directory; there is none that the text does not name.

    Parameters
    ----------
    text
        A size, a number of entries, or both, separated by a comma.
    name
        Name of the variable or option, for the message.

    Raises
    ------
    OptionError
        The text is none of these.
    """
    limits: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", part.strip())
        unit = match[2].upper() if match else ""
        if match and unit in _UNITS:
            limits["bytes"] = int(float(match[1]) * _UNITS[unit])
        elif match and unit in ("ENTRY", "ENTRIES"):
            limits["entries"] = int(float(match[1]))
        else:
            raise OptionError(
                f"{name} is {text!r}: expected, for example, '20GB', '500 entries', or both "
                "separated by a comma"
            )
    return Limits(limits.get("bytes"), limits.get("entries"))


def expanded(path: str | os.PathLike[str]) -> Path | None:
    """Return an absolute path: expand a leading ``~``, and keep what a relative one first meant.

    Warn and return None for a user who has no home directory.
    """
    # Path.expanduser would raise for a "~" that cannot be resolved, which platformdirs may return.
    text = os.path.expanduser(path)  # noqa: PTH111
    if not text.startswith("~"):
        return fixed(text)
    _warn_of_no_home(text)
    return None


def fixed(text: str) -> Path:
    """Return an absolute path: a relative one keeps what it first meant in this process."""
    with contextlib.suppress(FileNotFoundError):  # the working directory was deleted
        return _absolute(text)
    return Path(text)


@functools.cache  # so that a process may change its working directory
def _absolute(text: str) -> Path:
    return Path(text).absolute()


@functools.cache  # warns only once
def _warn_of_no_home(place: str) -> None:
    warn(
        "compiled programs are kept in memory only: this user has no home directory, so there is "
        f"no {place}. Set TVMIFY_CACHE_DIR."
    )


def _flag(variable: str, default: bool) -> bool:
    value = os.environ.get(variable)
    return default if value is None else value not in ("", "0")

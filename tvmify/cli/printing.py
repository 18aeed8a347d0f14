"""What the commands share: how they print, how they fail, and which cache they look at."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import filesize
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tvmify.cache import DiskCache, StoredEntry
from tvmify.errors import CacheError, OptionError
from tvmify.options import default_cache_directory

#: Exit codes beside 0: something is damaged or not there; the command is used wrongly.
FAILED, USAGE = 1, 2

#: Digits of a digest that a listing shows; commands take any number that tells entries apart.
SHOWN_DIGITS = 12

CacheDirectory = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        help="The cache directory: that of the environment if left out.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def cache_at(directory: Path | None) -> DiskCache:
    """Return the cache that ``--cache`` names.

    Raises
    ------
    typer.Exit
        There is no directory of that name.
    """
    if directory is None:
        directory = default_cache_directory()
        if directory is None:
            raise fail("this user has no home: give --cache, or set TVMIFY_CACHE_DIR", USAGE)
    elif not directory.is_dir():
        raise fail(f"{directory} is not a directory: give --cache the one of a cache", USAGE)
    return DiskCache(directory)


@contextmanager
def failures() -> Iterator[None]:
    """Turn what a cache raises into a message and an exit code."""
    try:
        yield
    except OptionError as error:
        raise fail(error, USAGE) from error
    except (CacheError, OSError) as error:
        raise fail(error, FAILED) from error


def fail(error: Exception | str, code: int) -> typer.Exit:
    """Say what went wrong, and return what is to be raised."""
    typer.echo(printable(f"tvmify: {error}"), err=True)
    return typer.Exit(code)


def entry_of(cache: DiskCache, prefix: str) -> StoredEntry:
    """Return the one entry whose digest begins so.

    Raises
    ------
    typer.Exit
        There is none, or several.
    """
    found = [entry for entry in cache.entries() if entry.digest.startswith(prefix.lower())]
    if not found:
        raise fail(f"no entry begins with {prefix!r} in {cache.directory}: see tvmify list", FAILED)
    if len(found) > 1:
        some = ", ".join(entry.digest[:SHOWN_DIGITS] for entry in found[:4])
        raise fail(f"{len(found)} entries begin with {prefix!r} ({some} …): give more", USAGE)
    return found[0]


def facts_of(entry: StoredEntry) -> dict[str, Any]:
    """Return what a listing says of an entry in JSON."""
    return {
        "digest": entry.digest,
        "path": str(entry.path),
        "bytes": entry.bytes,
        "used": entry.used,
    }


def print_json(value: Any) -> None:
    """Print JSON; in ASCII, because texts of a file may hold what a terminal obeys."""
    typer.echo(json.dumps(value, indent=2, sort_keys=True))


def print_all(*parts: Any) -> None:
    """Print texts and tables."""
    console = Console()
    if not console.is_terminal:
        console.width = 1000  # whoever searches the text wants its lines whole
    console.print(*parts, sep="\n")


def summary(facts: dict[str, Any]) -> Table:
    """Return names and values in two columns."""
    table = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        table.add_row(text(f"{name}:"), text(value))
    return table


def text(value: Any) -> Text:
    """Return a text of a file for a table: neither markup nor control characters."""
    return Text(printable(str(value)))


def printable(value: str) -> str:
    """Escape what a terminal would obey: whoever wrote a file chose its texts."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in value)


def size(count: Any) -> str:
    """Return a number of bytes for a person."""
    return filesize.decimal(count) if isinstance(count, int) else "?"


def date(seconds: float) -> str:
    """Return a time since the epoch for a person, to the minute."""
    try:
        return datetime.fromtimestamp(seconds).isoformat(" ", "minutes")
    except (ValueError, OverflowError, OSError):  # a date of no calendar
        return "?"

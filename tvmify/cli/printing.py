"""Printing, errors and the cache directory, for all commands."""

from __future__ import annotations

import json
import os
import signal
import sys
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
from tvmify.system import variables

#: Exit codes besides 0: something is damaged or missing; usage error.
FAILED, USAGE = 1, 2

#: Digits of a digest in a listing; commands accept any unambiguous number of digits.
SHOWN_DIGITS = 12


def _expanded(directory: Path | None) -> Path | None:
    return directory and variables.expanded(directory)


CacheDirectory = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        callback=_expanded,
        help="The cache directory; by default, the one that tvmify uses.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def cache_at(directory: Path | None) -> DiskCache:
    """Return the cache that ``--cache`` names.

    Raises
    ------
    typer.Exit
        There is no such directory.
    """
    if directory is None:
        directory = variables.cache_directory()
        if directory is None:
            raise fail(
                "this user has no home directory: give --cache, or set TVMIFY_CACHE_DIR", USAGE
            )
    elif not directory.is_dir():
        raise fail(f"{directory} is not a directory: give --cache a cache directory", USAGE)
    return DiskCache(directory)


@contextmanager
def failures() -> Iterator[None]:
    """Turn errors of the cache into a message and an exit code."""
    try:
        yield
    except OptionError as error:
        raise fail(error, USAGE) from error
    except (CacheError, OSError) as error:
        raise fail(error, FAILED) from error


@contextmanager
def output_failures() -> Iterator[None]:
    """End as other commands do if the output cannot be written.

    If nobody reads it any more, as with ``tvmify list | head -1``, that is by a signal; if there is
    no room for it, with a message and code 1.
    """
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # it may be closed
                sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as end:
        # Rich turns the former into the latter when it prints help and usage errors.
        if isinstance(end, SystemExit) and not isinstance(end.__context__, BrokenPipeError):
            raise
        _discard_output()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPIPE])
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)
    except OSError as error:
        _discard_output()
        typer.echo(printable(f"tvmify: {error.strerror or error}"), err=True)
        raise SystemExit(FAILED) from error


def _discard_output() -> None:
    """Discard what is left to write: Python would try again at its end, and print a traceback."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # for `output_failures`


def fail(error: Exception | str, code: int) -> typer.Exit:
    """Print an error message, and return the exception to raise."""
    if isinstance(error, OSError) and error.filename is not None:
        error = f"{error.filename}: {error.strerror}"
    typer.echo(printable(f"tvmify: {error}"), err=True)
    return typer.Exit(code)


def entry_of(cache: DiskCache, prefix: str) -> StoredEntry:
    """Return the only entry whose digest has this prefix.

    Raises
    ------
    typer.Exit
        There is none, or more than one.
    """
    found = [entry for entry in cache.entries() if entry.digest.startswith(prefix.lower())]
    if not found:
        raise fail(f"no entry begins with {prefix!r} in {cache.directory}: see tvmify list", FAILED)
    if len(found) > 1:
        some = ", ".join(entry.digest[:SHOWN_DIGITS] for entry in found[:4])
        raise fail(f"{len(found)} entries begin with {prefix!r} ({some} …): add digits", USAGE)
    return found[0]


def facts_of(entry: StoredEntry) -> dict[str, Any]:
    """Return the JSON fields of an entry in a listing."""
    return {
        "digest": entry.digest,
        "path": str(entry.path),
        "bytes": entry.bytes,
        "used": entry.used,
    }


def print_json(value: Any) -> None:
    """Print JSON in ASCII, since texts from a file may contain terminal escapes."""
    typer.echo(json.dumps(value, indent=2, sort_keys=True))


def print_all(*parts: Any) -> None:
    """Print texts and tables."""
    console = _Console()
    if not console.is_terminal:
        console.width = 1000  # do not wrap lines in redirected output
    console.print(*parts, sep="\n")


def summary(facts: dict[str, Any]) -> Table:
    """Return names and values in two columns."""
    table = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        table.add_row(text(f"{name}:"), text(value))
    return table


def text(value: Any) -> Text:
    """Return a text from a file for a table, without markup and control characters."""
    return Text(printable(str(value)))


def printable(value: str) -> str:
    """Escape terminal control characters in a text, which may come from an untrusted file."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in value)


def size(count: Any) -> str:
    """Return a readable number of bytes."""
    return filesize.decimal(count) if isinstance(count, int) else "?"


def date(seconds: float) -> str:
    """Return a readable time, to the minute, from seconds since the epoch."""
    try:
        return datetime.fromtimestamp(seconds).isoformat(" ", "minutes")
    except (ValueError, OverflowError, OSError):  # not a valid date
        return "?"

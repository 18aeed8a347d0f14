"""``tvmify verify``, ``prune`` and ``clear``, which remove entries."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tvmify.cache import Limits
from tvmify.cache.disk import QUARANTINE
from tvmify.cli.printing import (
    FAILED,
    USAGE,
    AsJson,
    CacheDirectory,
    cache_at,
    fail,
    failures,
    print_all,
    print_json,
    size,
    text,
)
from tvmify.system import variables


def verify(directory: CacheDirectory = None, as_json: AsJson = False) -> None:
    """Check every byte of every entry; damaged entries are quarantined and will be rebuilt.

    Exit codes: 0, all are intact; 1, some are damaged, or the directory cannot be used; 2, usage
    error.
    """
    with failures():
        cache = cache_at(directory)
        count = len(cache.entries())
        damaged = cache.verify()
    if as_json:
        problems = [{"digest": digest, "problem": problem} for digest, problem in damaged.items()]
        print_json({"directory": str(cache.directory), "checked": count, "damaged": problems})
    else:
        lines = [f"{digest}: {problem}" for digest, problem in damaged.items()]
        aside = f", see {cache.directory / QUARANTINE}" if damaged else ""
        lines.append(f"{cache.directory}: {count} entries checked, {len(damaged)} damaged{aside}")
        print_all(text("\n".join(lines)))
    if damaged:
        raise typer.Exit(FAILED)


def prune(
    directory: CacheDirectory = None,
    most_bytes: Annotated[
        str | None,
        typer.Option("--size", help="Keep at most this much, e.g. 5GB.", show_default=False),
    ] = None,
    most_entries: Annotated[
        int | None,
        typer.Option("--entries", min=0, help="Keep at most this many.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Remove the least recently used entries until the limits hold.

    Without options, the limits are those of the library (TVMIFY_CACHE_SIZE).

    Exit codes: 0; 1, the directory cannot be used; 2, usage error.
    """
    with failures():
        cache = cache_at(directory)
        removed = cache.prune(_limits(most_bytes, most_entries))
        left = cache.entries()
    taken, kept = (sum(entry.bytes for entry in part) for part in (removed, left))
    if as_json:
        facts = {"removed": [entry.digest for entry in removed], "bytes": taken}
        print_json({"directory": str(cache.directory), "entries": len(left)} | facts)
        return
    message = f"removed {len(removed)} entries, {size(taken)}; {len(left)} left, {size(kept)}"
    print_all(text(f"{cache.directory}: {message}"))


def _limits(most_bytes: str | None, most_entries: int | None) -> Limits:
    if most_bytes is None and most_entries is None:
        return variables.cache_limits()
    no_limits = Limits(None, None)
    limits = no_limits if most_bytes is None else variables.read_limits(most_bytes, "--size")
    return limits if most_entries is None else limits._replace(entries=most_entries)


def clear(
    directory: CacheDirectory = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove all entries, including damaged ones; tuning measurements are kept.

    Exit codes: 0; 1, the directory cannot be used, or the answer was no; 2, usage error.
    """
    with failures():
        cache = cache_at(directory)
        entries = cache.entries()
        if entries and not yes:
            _ask(f"Remove {len(entries)} entries from {cache.directory}?")
        count = cache.clear()
    if as_json:
        print_json({"directory": str(cache.directory), "removed": count})
    else:
        print_all(text(f"{cache.directory}: removed {count} entries"))


def _ask(question: str) -> None:
    if not at_terminal():
        raise fail("cannot ask without a terminal: add --yes to remove the entries", USAGE)
    if not typer.confirm(question, err=True):
        raise typer.Exit(FAILED)


def at_terminal() -> bool:
    """Whether there is a terminal on which a user can answer."""
    return sys.stdin.isatty()

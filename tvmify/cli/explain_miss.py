"""``tvmify explain-miss``: why a program was compiled although a similar one was cached."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from tvmify.cache import DiskCache, Key, nearest
from tvmify.cli.printing import (
    FAILED,
    AsJson,
    CacheDirectory,
    cache_at,
    entry_of,
    fail,
    failures,
    print_all,
    print_json,
    text,
)
from tvmify.errors import CacheError


def explain_miss(
    prefix: Annotated[
        str | None,
        typer.Argument(
            metavar="[DIGEST]",
            help="The first digits of an entry's digest; the latest entry if left out.",
            show_default=False,
        ),
    ] = None,
    directory: CacheDirectory = None,
    as_json: AsJson = False,
) -> None:
    """Show how an entry differs from the most similar other entry.

    Exit codes: 0; 1, there is no such entry, or it is damaged; 2, usage error.
    """
    with failures():
        cache = cache_at(directory)
        if prefix is not None:
            entry = entry_of(cache, prefix)
        else:
            entry = max(cache.entries(), key=lambda entry: entry.stored, default=None)
        if entry is None:
            raise fail(f"there are no entries in {cache.directory}", FAILED)
        key = entry.manifest().key
    found = nearest(key, _others(cache, entry.digest))
    other, lines = (found.key.digest, found.differences) if found else (None, [])
    if as_json:
        print_json({"entry": entry.digest, "nearest": other, "differences": lines})
    elif other is None:
        print_all(text(f"{entry.digest} is the only entry in {cache.directory}"))
    else:
        print_all(
            text(f"entry    {entry.digest}"),
            text(f"nearest  {other}"),
            text("\n".join(["differs (entry → nearest):", *(f"  {line}" for line in lines)])),
        )


def _others(cache: DiskCache, digest: str) -> Iterator[Key]:
    for entry in cache.entries():
        if entry.digest != digest:
            try:
                yield entry.manifest().key
            except CacheError:  # damaged: `tvmify verify` reports it
                continue

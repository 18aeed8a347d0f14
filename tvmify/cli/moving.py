"""``tvmify export`` and ``tvmify import``: cache entries as one file."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer

from tvmify.cache import export, import_
from tvmify.cli.printing import (
    FAILED,
    AsJson,
    CacheDirectory,
    cache_at,
    failures,
    print_all,
    print_json,
    printable,
    size,
    text,
)
from tvmify.errors import TvmifyWarning


def export_entries(
    path: Annotated[Path, typer.Argument(help="The archive to write.", show_default=False)],
    digests: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DIGEST]...",
            help="The first digits of the digests of entries; all entries if left out.",
            show_default=False,
        ),
    ] = None,
    directory: CacheDirectory = None,
    as_json: AsJson = False,
) -> None:
    """Write entries to an archive, for another machine or a container image.

    Exit codes: 0; 1, there is no such entry, a damaged one was skipped, or the archive cannot be
    written; 2, usage error.
    """
    cache = cache_at(directory)
    with failures(), warnings.catch_warnings(record=True) as left_out:
        warnings.simplefilter("always", TvmifyWarning)
        written = export(path, digests or None, directory=cache.directory)
        count = path.stat().st_size
    for warning in left_out:
        typer.echo(printable(f"tvmify: {warning.message}"), err=True)
    if as_json:
        print_json({"path": str(path), "bytes": count, "entries": written})
    else:
        print_all(text(f"{path}: {len(written)} entries, {size(count)}"))
    if left_out:
        raise typer.Exit(FAILED)


def import_entries(
    path: Annotated[Path, typer.Argument(help="An archive that export wrote.", show_default=False)],
    directory: CacheDirectory = None,
    as_json: AsJson = False,
) -> None:
    """Store the entries of an archive; they are code, so import only from sources that you trust.

    Exit codes: 0; 1, some entries were refused, or the file is not an archive; 2, usage error.
    """
    with failures(), warnings.catch_warnings():
        warnings.simplefilter("ignore", TvmifyWarning)  # the output below says the same
        found = import_(path, directory=directory)
    if as_json:
        print_json({"path": str(path)} | found._asdict())
    else:
        counts = f"{len(found.stored)} stored, {len(found.present)} already there"
        lines = [f"{digest}: refused: {reason}" for digest, reason in found.refused.items()]
        print_all(text("\n".join([*lines, f"{path}: {counts}, {len(found.refused)} refused"])))
    if found.refused:
        raise typer.Exit(FAILED)

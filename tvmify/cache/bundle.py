"""Export cache entries to one file, for a container image or a machine without a network."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from tvmify.cache import packed
from tvmify.cache.disk import DiskCache
from tvmify.cache.listing import named_cache
from tvmify.cache.stored import EntryFiles
from tvmify.errors import CacheError, warn
from tvmify.system.regular_files import NotRegular, open_regular
from tvmify.system.replacing import replacing

#: The most refused entries that a message names.
_MOST_REASONS = 5


class Imported(NamedTuple):
    """What happened to the entries of an archive.

    Attributes
    ----------
    stored
        Digests of the entries that were added.
    present
        Digests of the entries that the cache already had; they are unchanged.
    refused
        Digests of the entries that are not in the cache, each with the reason.
    """

    stored: list[str]
    present: list[str]
    refused: dict[str, str]


def export(
    path: str | os.PathLike[str],
    digests: str | Collection[str] | None = None,
    *,
    since: float | None = None,
    directory: str | os.PathLike[str] | None = None,
) -> list[str]:
    """Write entries of the cache to an archive, which `import_` reads on another machine.

    The file is written atomically and replaces an existing one. Damaged entries are skipped with a
    warning.

    Parameters
    ----------
    path
        The archive to write, a zip file.
    digests
        Digests of the entries to export, or prefixes of them; None for all.
    since
        Export only entries stored or loaded since this time, in seconds as returned by
        ``time.time()``. Taken before a program runs, it selects what the program needs.
    directory
        The cache directory; None for the user's.

    Returns
    -------
    list
        The digests of the entries in the archive.

    Raises
    ------
    CacheError
        No entry matches.
    OSError
        The archive cannot be written.

    Examples
    --------
    >>> begin = time.time()
    >>> serve_some_requests()
    >>> tvmify.cache.export("programs.zip", since=begin)  # what the requests needed
    """
    path, cache = Path(path), named_cache(directory, may_be_new=True)
    entries = cache.entries()
    digests = [digests] if isinstance(digests, str) else digests
    for start in digests or ():
        if not any(entry.digest.startswith(start) for entry in entries):
            raise CacheError(f"{cache.directory} has no entry {start}")
    chosen = sorted(
        entry.digest
        for entry in entries
        if (digests is None or entry.digest.startswith(tuple(digests)))
        and (since is None or entry.used >= since)
    )
    with replacing(path) as file:
        written = packed.write(file, _read(cache, chosen))
        if not written:
            which = "such entries" if entries else "entries"
            raise CacheError(f"nothing to export: {cache.directory} has no {which}")
    return written


def import_(
    path: str | os.PathLike[str], *, directory: str | os.PathLike[str] | None = None
) -> Imported:
    """Store the entries of an archive that `export` wrote.

    Every entry is checked like one on disk, and stored as if it had been built here. Importing the
    same archive again changes nothing. Entries contain native code that will run: import only from
    sources that you trust.

    Parameters
    ----------
    path
        The archive to read.
    directory
        The cache directory; None for the user's.

    Returns
    -------
    Imported
        What was stored and what was not. Refused entries also cause a warning: they are damaged,
        come from another version of tvmify, or do not fit on the disk.

    Raises
    ------
    CacheError
        The file is not such an archive, or none of its entries can be used; nothing was stored.
    FileNotFoundError
        The file does not exist.

    Examples
    --------
    >>> assert not tvmify.cache.import_("programs.zip").refused
    """
    cache = named_cache(directory, may_be_new=True)
    cache.entries()  # raises if the directory is not private; `store` would only warn
    stored, present, refused = [], [], {}
    with contextlib.ExitStack() as stack:
        try:
            archive = packed.Reader(stack.enter_context(open_regular(Path(path))))
        except (CacheError, NotRegular) as error:
            raise CacheError(f"{path} cannot be imported: {error}") from error
        for digest in archive.digests:
            try:
                entry = archive.read(digest)
            except CacheError as error:
                refused[digest] = str(error)
                continue
            if cache.load(entry.key) is not None:
                present.append(digest)
            else:
                cache.store(entry.key, entry.artifact)
                stored.append(digest)
    # `store` never raises, and a full cache has evicted some of the entries again.
    kept = {entry.digest for entry in cache.entries()}
    refused |= dict.fromkeys({*stored, *present} - kept, "the cache has no room for it")
    if refused:
        first = list(refused.items())[:_MOST_REASONS]
        reasons = "; ".join(f"{digest}: {reason}" for digest, reason in first)
        message = (
            f"{len(refused)} of {len(archive.digests)} entries of {path} were refused: {reasons}"
        )
        if len(refused) == len(archive.digests):
            raise CacheError(message)
        warn(message)
    return Imported([d for d in stored if d in kept], [d for d in present if d in kept], refused)


def _read(cache: DiskCache, digests: Collection[str]) -> Iterator[EntryFiles]:
    for digest in digests:
        try:
            yield cache.read(digest)
        except FileNotFoundError:
            continue  # another process has evicted it
        except CacheError as error:
            warn(f"the entry {digest} was not exported: {error}")

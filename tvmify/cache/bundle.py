"""Entries of a cache as one file: into a container image, or to machines without a network."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from tvmify.cache import packed
from tvmify.cache.disk import DiskCache
from tvmify.cache.manifest import Manifest
from tvmify.cache.stored import Limits
from tvmify.errors import CacheError, warn
from tvmify.options import CompileOptions
from tvmify.regular_files import NotRegular, open_regular

#: How many refused entries a message names.
_MOST_REASONS = 5


class Imported(NamedTuple):
    """What became of the entries of an archive.

    Attributes
    ----------
    stored
        Digests of those that are in the cache now, and were not before.
    present
        Digests of those that were there already, and stayed as they were.
    refused
        Digests of those that are not in the cache, with the reason of each.
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

    The file appears whole or not at all; one that exists is replaced. An entry that is damaged is
    left out, with a warning.

    Parameters
    ----------
    path
        Of the archive, a zip file.
    digests
        Those entries whose digests are, or begin with, one of these; None for all.
    since
        Only entries that were stored or loaded since then, in seconds as ``time.time()`` counts
        them: what a program needs is what was used while it ran.
    directory
        Of the cache; None for the user's.

    Returns
    -------
    list
        The digests of the entries in the archive.

    Raises
    ------
    CacheError
        There is no such entry.
    OSError
        The archive cannot be written.
    """
    path, cache = Path(path), _cache(directory)
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
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            written = packed.write(file, _read(cache, chosen))
            file.flush()
            os.fsync(file.fileno())
        if not written:
            raise CacheError(f"nothing to export: {cache.directory} has no such entries")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return written


def import_(
    path: str | os.PathLike[str], *, directory: str | os.PathLike[str] | None = None
) -> Imported:
    """Store the entries of an archive that `export` wrote.

    Every entry is checked as one on disk is before it is used, and stored as one that was built
    here. Doing it again changes nothing. Entries are native code, which will run: import only what
    comes from somebody you trust.

    Parameters
    ----------
    path
        Of the archive.
    directory
        Of the cache; None for the user's.

    Returns
    -------
    Imported
        If entries were refused, there is a warning, too: they are damaged, of another version of
        tvmify, or the disk has no place for them.

    Raises
    ------
    CacheError
        The file is not such an archive, or none of its entries can be used; nothing was stored.
    FileNotFoundError
        There is no such file.
    """
    cache = _cache(directory)
    cache.entries()  # an error, if the directory is not private, before it is a warning
    stored, present, refused = [], [], {}
    with contextlib.ExitStack() as stack:
        try:
            archive = packed.Reader(stack.enter_context(open_regular(Path(path))))
        except (CacheError, NotRegular) as error:
            raise CacheError(f"{path} cannot be imported: {error}") from error
        for digest in archive.digests:
            try:
                key, artifact = archive.read(digest)
            except CacheError as error:
                refused[digest] = str(error)
                continue
            if cache.load(key) is not None:
                present.append(digest)
            else:
                cache.store(key, artifact)
                stored.append(digest)
    # Storing raises nothing, and where the cache is full the least recently used entries are gone.
    kept = {entry.digest for entry in cache.entries()}
    refused |= dict.fromkeys({*stored, *present} - kept, "the cache has no place for it")
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


def _cache(directory: str | os.PathLike[str] | None) -> DiskCache:
    options = CompileOptions(cache=True if directory is None else Path(directory))
    place = options.cache_directory()
    if place is None:
        raise CacheError("this user has no cache directory: set TVMIFY_CACHE_DIR")
    return DiskCache(place, Limits(*options.cache_limits()))


def _read(cache: DiskCache, digests: Collection[str]) -> Iterator[tuple[Manifest, bytes]]:
    for digest in digests:
        try:
            yield cache.read(digest)
        except FileNotFoundError:
            continue  # another process needed its place
        except CacheError as error:
            warn(f"the entry {digest} is not exported: {error}")

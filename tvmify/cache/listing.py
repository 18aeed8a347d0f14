"""What a cache directory holds, and how to empty it: `tvmify list` and `tvmify clear`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvmify.artifact.shapes import shape_lines
from tvmify.artifact.verdicts import VerdictKey
from tvmify.cache.differences import leaves_of
from tvmify.cache.disk import DiskCache
from tvmify.cache.manifest import Manifest
from tvmify.cache.stored import StoredEntry
from tvmify.errors import CacheError
from tvmify.options import CompileOptions
from tvmify.system import variables


@dataclass(frozen=True)
class ListedEntry(StoredEntry):
    """A compiled program in a cache directory.

    Attributes
    ----------
    digest, path, bytes, used
        Digest of its key, its directory, its size in bytes, and when it was last stored or loaded,
        in seconds since the epoch.
    inputs
        Shapes, dtypes and devices of the inputs it was compiled for.
    shapes
        Which sizes it serves, if several.
    target
        The processor it was compiled for.
    verdict
        How fast it was, next to eager PyTorch.
    torch, tvm
        The versions it was compiled with.
    damaged
        Why its manifest cannot be read; the fields from ``inputs`` on are empty then.
    """

    inputs: str = ""
    shapes: tuple[str, ...] = ()
    target: str = ""
    verdict: str = ""
    torch: str = ""
    tvm: str = ""
    damaged: str = ""


def list_entries(directory: str | os.PathLike[str] | None = None) -> list[ListedEntry]:
    """List the compiled programs in the cache, most recently used first.

    Parameters
    ----------
    directory
        The cache directory; None for the user's.

    Returns
    -------
    list of ListedEntry
        Damaged entries are among them.

    Raises
    ------
    CacheError
        The directory does not exist, or others may read it or write to it; the message says what
        to do. The user's own directory may be missing: it is made when a program is stored.

    Examples
    --------
    >>> sum(entry.bytes for entry in tvmify.cache.list())
    """
    return entries_of(named_cache(directory))


def entries_of(cache: DiskCache) -> list[ListedEntry]:
    """List the programs in a cache, most recently used first."""
    return [_listed(entry) for entry in cache.entries()[::-1]]


def clear(directory: str | os.PathLike[str] | None = None) -> int:
    """Remove all compiled programs from the cache, including damaged ones.

    Programs that this process has loaded stay usable, and so do measurements of kernels.

    Parameters
    ----------
    directory
        The cache directory; None for the user's.

    Returns
    -------
    int
        How many entries were removed.

    Raises
    ------
    CacheError
        As for `list`.

    Examples
    --------
    >>> tvmify.cache.clear("/var/cache/tvmify")  # the number of programs that were there
    """
    return named_cache(directory).clear()


def named_cache(directory: str | os.PathLike[str] | None, *, may_be_new: bool = False) -> DiskCache:
    """Return the disk cache in a directory, None for the user's.

    Raises
    ------
    CacheError
        The user has none; or the directory does not exist, and may not be new.
    """
    options = CompileOptions(cache=True if directory is None else Path(directory))
    place = options.cache_directory()
    if place is None:
        raise CacheError("this user has no cache directory: set TVMIFY_CACHE_DIR")
    if directory is not None and not may_be_new and not place.is_dir():
        raise CacheError(f"{place} is not a directory: name a cache directory, or None")
    return DiskCache(place, variables.cache_limits())


def _listed(entry: StoredEntry) -> ListedEntry:
    stored = entry.digest, entry.path, entry.bytes, entry.used
    try:
        manifest = entry.manifest()
    except CacheError as error:
        return ListedEntry(*stored, damaged=str(error))
    key = manifest.key.entries
    return ListedEntry(
        *stored,
        inputs=", ".join(leaves_of(manifest.key)),
        shapes=tuple(shape_lines(manifest.artifact)),
        target=_target(key.get("target", "")),
        verdict=verdict_of(manifest),
        torch=key.get("torch", ""),
        tvm=key.get("tvm", ""),
    )


def _target(described: str) -> str:
    """Summarize the instruction set by its widest vector feature."""
    try:
        target = json.loads(described)
        features = {str(name) for name in target.get("mattr", ())}
        widest = next((f for f in ("+avx512f", "+avx2", "+avx", "+neon") if f in features), "")
        return f"{target.get('mcpu', target.get('kind'))} {widest}".rstrip()
    except (ValueError, RecursionError, AttributeError, TypeError):
        return described


def verdict_of(manifest: Manifest) -> str:
    """Say how compiled code compared with eager PyTorch, for each way to run it."""
    artifact: Mapping[str, Any] = manifest.artifact
    verdicts = artifact.get("verdicts")
    if not isinstance(verdicts, Mapping):
        return ""
    texts = []
    for text, pair in verdicts.items():
        how = VerdictKey.from_json(text) or text
        try:
            compiled, eager = (f"{1e3 * seconds:.3g}" for seconds in pair)
            texts.append(f"{how}: {compiled} ms, eager {eager} ms")
        except (TypeError, ValueError):  # written by another version
            texts.append(f"{how}: ?")
    return "; ".join(texts)

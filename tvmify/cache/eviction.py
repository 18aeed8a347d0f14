"""Which entries a full cache evicts."""

from __future__ import annotations

from collections.abc import Sequence

from tvmify.cache.stored import StoredEntry
from tvmify.system.variables import Limits


def surplus(entries: Sequence[StoredEntry], limits: Limits) -> list[StoredEntry]:
    """Return the entries to evict so that the limits hold.

    Parameters
    ----------
    entries
        Least recently used first.
    """
    size = sum(entry.bytes for entry in entries)
    for number, entry in enumerate(entries):
        fits = limits.bytes is None or size <= limits.bytes
        if fits and (limits.entries is None or len(entries) - number <= limits.entries):
            return list(entries[:number])
        size -= entry.bytes
    return list(entries)

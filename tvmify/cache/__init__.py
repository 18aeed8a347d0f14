"""The cache: what a compiled program is known by, and where it is kept.

Nothing in here knows torch or TVM: a key is named texts, an entry is bytes and a description.
"""

from tvmify.cache.disk import DiskCache
from tvmify.cache.key import Key
from tvmify.cache.measurements import Measurements
from tvmify.cache.memory import MemoryCache
from tvmify.cache.stored import Limits, StoredEntry

__all__ = ["DiskCache", "Key", "Limits", "Measurements", "MemoryCache", "StoredEntry"]

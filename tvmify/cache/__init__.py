"""The cache: what a compiled program is known by, and where it is kept.

Nothing in here knows torch or TVM: a key is named texts, an entry is bytes and a description.
"""

from tvmify.cache.bundle import Imported, export, import_
from tvmify.cache.differences import differences, nearest
from tvmify.cache.disk import DiskCache, disk_at
from tvmify.cache.key import Key
from tvmify.cache.levels import TwoLevels
from tvmify.cache.measurements import Measurements
from tvmify.cache.memory import MemoryCache
from tvmify.cache.neighbours import Neighbours
from tvmify.cache.remote import RemoteCache, remote_at
from tvmify.cache.stored import Limits, StoredEntry

__all__ = [
    "DiskCache",
    "Imported",
    "Key",
    "Limits",
    "Measurements",
    "MemoryCache",
    "Neighbours",
    "RemoteCache",
    "StoredEntry",
    "TwoLevels",
    "differences",
    "disk_at",
    "export",
    "import_",
    "nearest",
    "remote_at",
]

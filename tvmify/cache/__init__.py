"""The cache: how compiled programs are identified, and where they are stored.

Nothing here depends on torch or TVM: a key is a set of named texts, an entry is bytes and a
manifest.
"""

from tvmify.cache.bundle import Imported, export, import_
from tvmify.cache.differences import differences, nearest
from tvmify.cache.disk import DiskCache, disk_at
from tvmify.cache.key import ANY_TORCH, Key
from tvmify.cache.levels import TwoLevels
from tvmify.cache.listing import ListedEntry, clear
from tvmify.cache.listing import list_entries as list
from tvmify.cache.measurements import Measurements
from tvmify.cache.memory import MemoryCache
from tvmify.cache.neighbours import Neighbours
from tvmify.cache.protocol import Cache
from tvmify.cache.remote import RemoteCache, remote_at
from tvmify.cache.stored import StoredEntry
from tvmify.system.variables import Limits

__all__ = [
    "ANY_TORCH",
    "Cache",
    "DiskCache",
    "Imported",
    "Key",
    "Limits",
    "ListedEntry",
    "Measurements",
    "MemoryCache",
    "Neighbours",
    "RemoteCache",
    "StoredEntry",
    "TwoLevels",
    "clear",
    "differences",
    "disk_at",
    "export",
    "import_",
    "list",
    "nearest",
    "remote_at",
]

"""What the search for a program ends with."""

from __future__ import annotations

import enum
from typing import NamedTuple

from tvmify.runtime import Executor


class Source(enum.Enum):
    """Where the code of a program came from; the values are what ``explain()`` says."""

    SHARED = "shared with another module of this process"
    LOADED = "loaded from disk"
    BUILT = "built"
    KEPT = "kept in memory"


class Found(NamedTuple):
    """An executor, without weights yet, and where its code came from."""

    executor: Executor
    source: Source

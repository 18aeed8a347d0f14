"""A program that was found in a cache, or built."""

from __future__ import annotations

import enum
from typing import NamedTuple

from tvmify.cache import Key
from tvmify.runtime import Executor


class Source(enum.Enum):
    """Where the code of a program came from, in the words of ``explain()``."""

    SHARED = "shared with another module of this process"
    LOADED = "loaded from disk"
    BUILT = "built"
    KEPT = "kept in memory"


class Found(NamedTuple):
    """A program that can be bound to weights.

    Attributes
    ----------
    key
        What it is stored under.
    executor
        Runs it; without weights yet.
    source
        Where its code came from.
    """

    key: Key
    executor: Executor
    source: Source

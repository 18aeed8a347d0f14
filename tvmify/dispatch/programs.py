"""The programs that a dispatcher has captured, loaded or built."""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from tvmify.artifact import Artifact
from tvmify.cache import Key, MemoryCache
from tvmify.capture import Program
from tvmify.errors import NotCompiled
from tvmify.runtime import Executor

#: What tells programs of a dispatcher apart: the number of the module's state, a signature, torch's
#: modes, the target, and the symbolic sizes.
ProgramPlace: TypeAlias = Hashable


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


@dataclass(frozen=True)
class Captured:
    """How a program was captured.

    Attributes
    ----------
    method, not_scripted
        ``Program.method``, and ``Program.reason``.
    may_draw
        Whether it may draw random numbers.
    asks_for_layout
        Whether it reads strides, so that it is valid for contiguous arguments only.
    """

    method: str
    not_scripted: str | None
    may_draw: bool
    asks_for_layout: bool

    @classmethod
    def of(cls, program: Program) -> Captured:
        """Describe a program."""
        return cls(program.method, program.reason, program.may_draw, program.asks_for_layout)


@dataclass(frozen=True)
class Made:
    """A program that was loaded or built before, and how it was captured."""

    key: Key
    artifact: Artifact
    captured: Captured


class Programs:
    """Captured, loaded and built programs; they outlive the executors in the memory cache.

    Attributes
    ----------
    made
        Programs, or the reasons why there are none.
    recorded
        Captured programs that are needed again: those being built in the background, and those
        with symbolic sizes, from which the programs of all classes of sizes are built.
    """

    def __init__(self, cache_size: int) -> None:
        self.made: MemoryCache[Made | NotCompiled] = MemoryCache(4 * cache_size)
        self.recorded: MemoryCache[Program] = MemoryCache(cache_size)

    def clear(self) -> None:
        """Forget all programs."""
        self.made.clear()
        self.recorded.clear()

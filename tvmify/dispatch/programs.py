"""The programs that a dispatcher has captured, loaded or built."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeAlias

from tvmify.artifact import Artifact
from tvmify.cache import Key, MemoryCache
from tvmify.capture import Program
from tvmify.errors import NotCompiled

#: The number of a module's state, a signature, torch's modes, the target, and the symbolic sizes.
Place: TypeAlias = Hashable


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

"""What was captured and made for the calls of one dispatcher."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeAlias

from tvmify.artifact import Artifact
from tvmify.cache import Key, MemoryCache
from tvmify.capture import Program
from tvmify.errors import NotCompiled

#: The number of a module's state, a signature, torch's modes, and a target.
Place: TypeAlias = Hashable


@dataclass(frozen=True)
class Captured:
    """How a program was captured.

    Attributes
    ----------
    method, not_scripted
        ``Program.method``, and ``Program.reason``.
    may_draw
        It may draw random numbers.
    asks_for_layout
        It asks for strides, and holds for contiguous arguments alone.
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
    """A program that was found or built before, and how it was captured."""

    key: Key
    artifact: Artifact
    captured: Captured


class Programs:
    """What was captured and made; it outlives the executors in the memory cache.

    Attributes
    ----------
    made
        What was costly to make, or the reason why nothing was made.
    recorded
        What was captured for signatures that are being built in the background, or for any sizes:
        programs for other classes of sizes are made of the same recording.
    """

    def __init__(self, cache_size: int) -> None:
        self.made: MemoryCache[Made | NotCompiled] = MemoryCache(4 * cache_size)
        self.recorded: MemoryCache[Program] = MemoryCache(cache_size)

    def clear(self) -> None:
        """Forget all of it."""
        self.made.clear()
        self.recorded.clear()

"""What an artifact says about how its code compared with eager PyTorch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

_GRAPHS = " with CUDA graphs"
_TEXT = re.compile(rf"([0-9]{{1,9}})({_GRAPHS})?")


class Seconds(NamedTuple):
    """The shortest time of a call on each side."""

    compiled: float
    eager: float


@dataclass(frozen=True)
class VerdictKey:
    """How the calls of a comparison ran.

    Attributes
    ----------
    threads
        The number of threads.
    graphs
        Whether compiled code ran as CUDA graphs.
    """

    threads: int
    graphs: bool = False

    def __str__(self) -> str:
        return f"{self.threads} threads" + _GRAPHS * self.graphs

    def to_json(self) -> str:
        """Return it as a key of a JSON object."""
        return f"{self.threads}" + _GRAPHS * self.graphs

    @classmethod
    def from_json(cls, text: str) -> VerdictKey | None:
        """Return what `to_json` wrote; None if it is of another version."""
        found = _TEXT.fullmatch(text)
        return found and cls(int(found[1]), found[2] is not None)

"""How FuseOps may fuse a function with others."""

from __future__ import annotations

from enum import IntEnum

from tvm import tirx

#: Attribute of a function: its `Pattern`.
_PATTERN = "op_pattern"


class Pattern(IntEnum):
    """TVM's ``OpPatternKind``."""

    ELEMENTWISE = 0
    BROADCAST = 1
    INJECTIVE = 2
    #: Element-wise functions may follow in the same kernel.
    FUSIBLE = 4
    #: It is not fused.
    OPAQUE = 8

    @property
    def attributes(self) -> dict[str, int]:
        """The attributes of a function that FuseOps treats so."""
        return {_PATTERN: int(self)}


def pattern_of(function: tirx.PrimFunc) -> int | None:
    """Return how FuseOps treats a function: a `Pattern`, or another of TVM's; None if unset."""
    return None if (found := (function.attrs or {}).get(_PATTERN)) is None else int(found)

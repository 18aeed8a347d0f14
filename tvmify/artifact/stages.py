"""The names of the stages of a miss."""

from __future__ import annotations

from typing import Literal

#: In their usual order; ``"wait"`` is for another process that builds the same program.
Stage = Literal[
    "capture",
    "load",
    "wait",
    "export",
    "decompose",
    "import",
    "tune",
    "lower",
    "schedule",
    "build",
    "link",
    "release",
    "store",
    "try",
    "bind",
    "compare",
]

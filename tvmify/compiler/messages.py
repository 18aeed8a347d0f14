"""Shortens error messages of TVM."""

from __future__ import annotations

#: Longer lines are cut: TVM prints whole programs.
LONGEST = 300


def first_line(error: BaseException) -> str:
    """Return the type of an error, and the first meaningful line of its message. TVM surrounds it
    with its own stack frames and with excerpts of the program.
    """
    lines = [line.strip() for line in str(error).splitlines()]
    frames = ("Traceback", "File ", "^", "#", "@")
    said = [line for line in lines if line and not line.startswith(frames)]
    kind = type(error).__name__
    return f"{kind}: {said[0][:LONGEST]}" if said else kind

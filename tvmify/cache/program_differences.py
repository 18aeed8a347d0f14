"""The operations and operands in which two program texts differ.

Values are numbered in such a text, so one more operation changes the numbers in every line after
it. Lines are therefore aligned without the numbers; numbers are compared only where the lines that
define them were aligned.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import NamedTuple

_VALUE = re.compile(r"%\d+")
_OPERATION = re.compile(r"(?P<results>[^=]*)= (?P<name>[^\s(]+)\((?P<operands>.*)")
# Lines that begin or end a block, which the operation before them already implies.
_BLOCK = re.compile(r"\s*(block\(|yield)")
# The most lines to align, since aligning takes quadratic time.
_MOST_LINES = 3000


class _Line(NamedTuple):
    """A line of a program, and the number of operations before it."""

    text: str
    place: int

    @property
    def shape(self) -> str:
        """The line without the numbers of its values."""
        return _VALUE.sub("%", self.text)


class Difference(NamedTuple):
    """One difference between two texts.

    Attributes
    ----------
    place
        Where it is: an operation, such as ``"op 17 aten::conv2d: "``, or the name of a field.
    ours, other
        The texts there; empty if that side has nothing there.
    """

    place: str
    ours: str
    other: str


def program_differences(ours: str, other: str) -> Iterator[Difference]:
    """Yield the differences between two texts of `tvmify.capture`, in program order.

    Weights are left out: their names and aliases have a separate entry in the key.
    """
    left, right = _lines(ours), _lines(other)
    ours_of: dict[str, str] = {}  # from values of the other program to ours
    other_of: dict[str, str] = {}
    for mine, its in _aligned(left, right):
        if mine is None or its is None:
            line = mine or its
            assert line is not None
            if not _BLOCK.match(line.text):
                place = f"op {line.place + 1} " if _operation(line.text) else ""
                texts = (_what(each.text) if each else "" for each in (mine, its))
                yield Difference(place, *texts)
            continue
        # The first line with a number defines it.
        for a, b in zip(_VALUE.findall(mine.text), _VALUE.findall(its.text), strict=False):
            if a not in other_of and b not in ours_of:
                other_of[a], ours_of[b] = b, a
        text = _VALUE.sub(lambda found: ours_of.get(found[0], found[0]), its.text)
        if mine.shape == its.shape and not _wired_otherwise(mine.text, its.text, other_of, ours_of):
            continue
        yield _change(mine, text)


def numbered(program: str) -> str:
    """Return a program with its operations numbered as in `program_differences`."""
    return "\n".join(
        f"{'' if _operation(line.text) is None else line.place + 1:>5}  {line.text}"
        for line in _lines(program)
    )


def _lines(program: str) -> list[_Line]:
    lines = []
    count = 0
    for text in program.split("\n"):
        if not text.startswith("weight "):
            lines.append(_Line(text, count))
            count += _operation(text) is not None
    return lines


def _operation(text: str) -> re.Match[str] | None:
    return None if text.lstrip().startswith("argument ") else _OPERATION.match(text)


def _aligned(left: list[_Line], right: list[_Line]) -> Iterator[tuple[_Line | None, _Line | None]]:
    shapes, others = [line.shape for line in left], [line.shape for line in right]
    same = 0
    while same < min(len(shapes), len(others)) and shapes[same] == others[same]:
        same += 1
    end = 0
    while end < min(len(shapes), len(others)) - same and shapes[-1 - end] == others[-1 - end]:
        end += 1
    yield from zip(left[:same], right[:same], strict=True)
    middle = left[same : len(left) - end][:_MOST_LINES]
    between = right[same : len(right) - end][:_MOST_LINES]
    matcher = SequenceMatcher(None, [m.shape for m in middle], [b.shape for b in between])
    for _, i, i_end, j, j_end in matcher.get_opcodes():
        yield from zip_longest(middle[i:i_end], between[j:j_end])
    yield from zip(left[len(left) - end :], right[len(right) - end :], strict=True)


def _wired_otherwise(
    mine: str, its: str, other_of: dict[str, str], ours_of: dict[str, str]
) -> bool:
    """Whether a value that both programs have is used in different places."""
    pairs = zip(_VALUE.findall(mine), _VALUE.findall(its), strict=True)
    return any(a in other_of and b in ours_of and other_of[a] != b for a, b in pairs)


def _change(mine: _Line, its: str) -> Difference:
    here, there = _operation(mine.text), _operation(its)
    if here is None or there is None:
        return Difference("", _what(mine.text), _what(its))
    place = f"op {mine.place + 1} "
    if here["name"] != there["name"]:
        return Difference(place, here["name"], there["name"])
    place += f"{here['name']}: "
    operands, others = _split(here["operands"]), _split(there["operands"])
    if operands == others:
        return Difference(place, here["results"].strip(), there["results"].strip())
    if len(operands) == len(others):
        changed = [(a, b) for a, b in zip(operands, others, strict=True) if a != b]
        operands, others = map(list, zip(*changed, strict=True))
    return Difference(place, ", ".join(operands), ", ".join(others))


def _what(line: str) -> str:
    """Return what identifies a line: the name of its operation, or the line without numbers."""
    found = _operation(line)
    return found["name"] if found else re.sub(r"%\d+ ?", "", line).strip()


def _split(operands: str) -> list[str]:
    """Split the operands at commas outside brackets and strings."""
    parts, depth, quote, start = [], 0, "", 0
    for place, character in enumerate(operands):
        if quote:
            if character == quote and operands[place - 1] != "\\":
                quote = ""
        elif character in "'\"":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(operands[start:place].strip())
            start = place + 1
    return [*parts, operands[start:].strip().removesuffix(")")]

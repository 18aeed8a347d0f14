"""Describe how two keys differ, and find the stored key that is most similar to one."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from tvmify.cache.key import Key
from tvmify.cache.program_differences import Difference, program_differences

#: Shown for the side that lacks something.
ABSENT = "(not there)"

#: The most lines that `differences` prints for one entry of the keys.
_MOST_LINES = 6
_LONGEST_VALUE = 80
# Entries that a person is most likely to have changed come first, long ones last.
_ORDER = ("inputs", "options", "modes", "target", "tuned for", "tvmify", "torch", "tvm", "tvm-ffi")
_LAST = ("unpacked", "weights", "program")
_HASH = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{28,}\b")
_TENSOR = re.compile(r"(?P<dtype>\w+)(?P<shape>\[[^\]]*\]) (?P<device>\S+)(?: is (?P<alias>.*))?")
_NUMBERED = re.compile(r"(\d+): (.*)")


def differences(ours: Key, other: Key) -> list[str]:
    """Describe how two keys differ, in lines of the form ``field: ours → other``.

    Parameters
    ----------
    ours
        The requested key: the left side of each arrow.
    other
        A stored key: the right side.

    Returns
    -------
    list of str
        At least one line, and at most a few, for each entry that `Key.differences` names; empty if
        it names none. Line breaks inside values are escaped. Other characters are not,
        and a stored key is untrusted input.
    """
    lines = []
    for name in sorted(ours.differences(other), key=_place):
        compare = _KINDS.get(name, _compare_plain)
        mine, its = ours.entries.get(name, ""), other.entries.get(name, "")
        found = (_one_line(f"{name}{line}") for line in compare(mine, its))
        shown = list(islice(found, _MOST_LINES))
        left = sum(1 for _ in found)
        # Texts that cannot be parsed still differ.
        lines += shown or [f"{name}: the texts differ; `tvmify show` prints both"]
        if left:
            lines.append(f"{name}: and {left} more")
    return lines


class Nearest(NamedTuple):
    """The stored key that is most similar to a key, and their `differences`."""

    key: Key
    differences: list[str]


def nearest(key: Key, stored: Iterable[Key]) -> Nearest | None:
    """Return the stored key that is most similar to a key.

    Keys with the same program, or with weights of the same names, rank first; then those that
    differ in the fewest entries; then those whose entries differ in the fewest lines.

    Parameters
    ----------
    key
        The requested key; a stored key equal to it is skipped.
    stored
        Any number of keys, iterated once and not kept.
    """
    rank = _Rank(key)
    others = (other for other in stored if other != key)
    best = min(others, key=lambda other: (*rank(other), other.digest), default=None)
    return None if best is None else Nearest(best, differences(key, best))


def leaves_of(key: Key) -> list[str]:
    """Return the texts of the arguments in a key."""
    return list(_leaves(key.entries.get("inputs", ""))[0].values())


class _Rank:
    """Ranks keys by their distance from one key, which is parsed only once."""

    def __init__(self, key: Key) -> None:
        self._key = key
        self._names = _names_of_weights(key)
        self._lines: dict[str, Counter[str]] = {}

    def __call__(self, other: Key) -> tuple[bool, int, int]:
        names = self._key.differences(other)
        has_names = bool(self._names) and _names_of_weights(other) == self._names
        is_related = "program" not in names or has_names
        return not is_related, len(names), sum(self._distance(name, other) for name in names)

    def _distance(self, name: str, other: Key) -> int:
        if name not in self._lines:
            self._lines[name] = _parts(name, self._key.entries.get(name, ""))
        mine, its = self._lines[name], _parts(name, other.entries.get(name, ""))
        return (mine - its).total() + (its - mine).total()


def _parts(name: str, text: str) -> Counter[str]:
    if name == "program":
        text = re.sub(r"%\d+", "%", text)
    return Counter(text.split(", " if name == "target" else "\n"))


def _names_of_weights(key: Key) -> list[str]:
    return list(_fields(key.entries.get("weights", "")))


# ------------------------------------------------------------------ one function per kind of entry
# Each yields the differences between two texts, beginning with the punctuation after the name.


def _compare_plain(ours: str, other: str) -> Iterator[str]:
    yield f": {_arrow(ours, other)}"


def _compare_fields(ours: str, other: str, separator: str = ": ") -> Iterator[str]:
    for found in _changed(_fields(ours, separator), _fields(other, separator)):
        yield f".{found.place}: {_arrow(found.ours, found.other)}"


def _compare_options(ours: str, other: str) -> Iterator[str]:
    return _compare_fields(ours, other, "=")


def _compare_names(ours: str, other: str) -> Iterator[str]:
    mine, its = (dict.fromkeys(text.split("\n")) if text else {} for text in (ours, other))
    yield from _only(": ", mine, its)


def _compare_target(ours: str, other: str) -> Iterator[str]:
    try:
        left, right = json.loads(ours), json.loads(other)
    except (ValueError, RecursionError):
        left = right = None
    if not isinstance(left, dict) or not isinstance(right, dict):
        yield from _compare_plain(ours, other)
        return
    for name in sorted({*left, *right}):
        mine, its = left.get(name, ""), right.get(name, "")
        if isinstance(mine, list) and isinstance(its, list):
            yield from _only(
                f".{name}: ", dict.fromkeys(map(str, mine)), dict.fromkeys(map(str, its))
            )
        elif mine != its:
            yield f".{name}: {_arrow(str(mine), str(its))}"


def _compare_inputs(ours: str, other: str) -> Iterator[str]:
    (mine, structure), (its, other_structure) = _leaves(ours), _leaves(other)
    for found in _changed(mine, its):
        yield f" {found.place}: {_tensor_change(found.ours, found.other)}"
    if structure != other_structure:
        yield f": structure {_arrow(structure, other_structure)}"


def _compare_weights(ours: str, other: str) -> Iterator[str]:
    for found in _changed(_fields(ours), _fields(other)):
        yield f": {found.place} {_tensor_change(found.ours, found.other)}"


def _compare_program(ours: str, other: str) -> Iterator[str]:
    for found in program_differences(ours, other):
        yield f": {found.place}{_arrow(found.ours, found.other)}"


_KINDS: Mapping[str, Callable[[str, str], Iterator[str]]] = {
    "inputs": _compare_inputs,
    "modes": _compare_fields,
    "options": _compare_options,
    "program": _compare_program,
    "target": _compare_target,
    "tvmify": _compare_fields,
    "unpacked": _compare_names,
    "weights": _compare_weights,
}


def _fields(text: str, separator: str = ": ") -> dict[str, str]:
    pairs = (line.partition(separator) for line in text.split("\n") if line)
    return {name: value for name, _, value in pairs}


def _leaves(text: str) -> tuple[dict[str, str], str]:
    """Return the leaves of the arguments by number, and the text of their structure."""
    lines = text.split("\n")
    leaves: dict[str, str] = {}
    for line in lines:
        found = _NUMBERED.fullmatch(line)
        if found is None:
            break
        leaves[found[1]] = found[2]
    return leaves, " ".join(map(str.strip, lines[len(leaves) :]))


def _changed(ours: dict[str, str], other: dict[str, str]) -> Iterator[Difference]:
    for name in dict.fromkeys([*ours, *other]):
        mine, its = ours.get(name, ""), other.get(name, "")
        if mine != its:
            yield Difference(name, mine, its)


def _only(prefix: str, ours: dict[str, None], other: dict[str, None]) -> Iterator[str]:
    mine = ", ".join(name for name in ours if name not in other)
    its = ", ".join(name for name in other if name not in ours)
    if mine:
        yield f"{prefix}{_short(mine)} → {ABSENT}"
    if its:
        yield f"{prefix}{ABSENT} → {_short(its)}"


def _tensor_change(ours: str, other: str) -> str:
    """Name the properties in which two tensors differ; show both sides if one is a plain value."""
    mine, its = _TENSOR.fullmatch(ours), _TENSOR.fullmatch(other)
    if mine is None or its is None:
        return _arrow(ours, other)
    changes = []
    for part in ("dtype", "shape", "device", "alias"):
        if mine[part] != its[part]:
            title = "same as" if part == "alias" else part
            changes.append(f"{title} {_arrow(mine[part] or '', its[part] or '')}")
    return ", ".join(changes)


def _arrow(ours: str, other: str) -> str:
    """Show two texts; long ones from shortly before the first difference."""
    ours, other = (_HASH.sub(r"\1…", text) for text in (ours, other))
    start = 0
    if max(len(ours), len(other)) > _LONGEST_VALUE:
        pairs = enumerate(zip(ours, other, strict=False))
        parting = next((place for place, (a, b) in pairs if a != b), min(len(ours), len(other)))
        start = max(0, parting - 20)
    return f"{_short(ours, start)} → {_short(other, start)}"


def _short(text: str, start: int = 0) -> str:
    shown = text[start : start + _LONGEST_VALUE]
    before, after = "…" * (start > 0), "…" * (start + _LONGEST_VALUE < len(text))
    return f"{before}{shown}{after}" if text else ABSENT


def _one_line(text: str) -> str:
    return text.replace("\r", "\\r").replace("\n", "\\n")


def _place(name: str) -> tuple[int, str]:
    if name in _ORDER:
        return _ORDER.index(name), ""
    return len(_ORDER) + 1 + (_LAST.index(name) + 1 if name in _LAST else 0), name

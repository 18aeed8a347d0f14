"""Mutations of entries: damage, as from a bad disk, and forgery with right checksums."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tvmify.cache.stored import LIBRARY, MANIFEST

Chance = random.Random

# ----------------------------------------------------------------------------------------- damage


def _change(change: Callable[[bytes, Chance], bytes]) -> Callable[[Path, Path, Chance], None]:
    def mutate(entry: Path, _other: Path, chance: Chance) -> None:
        path = entry / chance.choice((MANIFEST, LIBRARY))
        path.write_bytes(change(path.read_bytes(), chance))

    return mutate


def _flip(data: bytes, chance: Chance) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 3, 30))):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _digit(data: bytes, chance: Chance) -> bytes:
    places = [i for i, byte in enumerate(data) if byte in b"0123456789"] or [0]
    place = chance.choice(places)
    return data[:place] + str(chance.randrange(10)).encode() + data[place + 1 :]


def _truncate(data: bytes, chance: Chance) -> bytes:
    return data[: chance.randrange(len(data))]


def _extend(data: bytes, chance: Chance) -> bytes:
    return data + chance.randbytes(chance.choice((1, 100, 5000)))


def _overwrite(data: bytes, chance: Chance) -> bytes:
    start = chance.randrange(len(data))
    return (data[:start] + bytes(chance.choice((1, 8, 512))) + data[start:])[: len(data)]


def _swap_files(entry: Path, other: Path, chance: Chance) -> None:
    name = chance.choice((MANIFEST, LIBRARY))
    shutil.copyfile(other / name, entry / name)


def _swap_entries(entry: Path, other: Path, chance: Chance) -> None:
    shutil.rmtree(entry)
    shutil.copytree(other, entry)


def _cross_files(entry: Path, _other: Path, _chance: Chance) -> None:
    (entry / MANIFEST).rename(entry / "x")
    (entry / LIBRARY).rename(entry / MANIFEST)
    (entry / "x").rename(entry / LIBRARY)


def _replace_by(make: Callable[[Path, Path], object]) -> Callable[[Path, Path, Chance], None]:
    def mutate(entry: Path, other: Path, chance: Chance) -> None:
        name = chance.choice((MANIFEST, LIBRARY))
        (entry / name).unlink()
        make(entry / name, other / name)

    return mutate


def _replace_entry(make: Callable[[Path, Path], object]) -> Callable[[Path, Path, Chance], None]:
    def mutate(entry: Path, other: Path, _chance: Chance) -> None:
        shutil.rmtree(entry)
        make(entry, other)

    return mutate


def _open_to_others(entry: Path, _other: Path, chance: Chance) -> None:
    chance.choice((entry, entry / MANIFEST, entry / LIBRARY)).chmod(0o777)


DAMAGE = {
    **{f.__name__[1:]: _change(f) for f in (_flip, _digit, _truncate, _extend, _overwrite)},
    "swap_files": _swap_files,
    "swap_entries": _swap_entries,
    "cross_files": _cross_files,
    "lose_file": _replace_by(lambda path, other: None),
    "link_file": _replace_by(lambda path, other: path.symlink_to(other)),
    "pipe_for_file": _replace_by(lambda path, other: os.mkfifo(path)),
    "directory_for_file": _replace_by(lambda path, other: path.mkdir()),
    "device_for_file": _replace_by(lambda path, other: path.symlink_to("/dev/zero")),
    "empty_entry": _replace_entry(lambda path, other: path.mkdir()),
    "link_entry": _replace_entry(lambda path, other: path.symlink_to(other)),
    "file_for_entry": _replace_entry(lambda path, other: path.write_bytes(b"{}")),
    "pipe_for_entry": _replace_entry(lambda path, other: os.mkfifo(path)),
    "open_to_others": _open_to_others,
}

# ---------------------------------------------------------------------------------------- forgery

#: Values that replace others.
_HOSTILE: list[Any] = [
    *(None, True, -1, 0, 1, 2, 7, 1 << 31, 1 << 63, 1 << 64, 10**400, -(1 << 63)),
    *(0.5, 1e300, float("inf"), float("nan"), "", "x", "../../../etc/passwd", "/etc/passwd"),
    *("\ud800", "a\0b", "__class__.__init__", "x" * 100_000, [], {}, [[]], {"..": ".."}),
    *(["computed", 9], ["view", ["computed", 0], [1 << 40], [1], 0], ["repeated", 0]),
    *(["argument", 99], ["view", ["argument", 0], [2, 2], [1 << 40, 1], -5], ["state", 0]),
    *([["state", 0], ["computed", 0]], [["state", 3], ["computed", 1]], ["state", 3], "argument"),
]


def forge(entry: Path, chance: Chance) -> str:
    """Change values in a manifest, and update its checksum; return which values."""
    document = json.loads((entry / MANIFEST).read_bytes())
    del document["sha256"]
    changed = []
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        # Mostly in the description of the program: a different key is refused at once.
        places = _places(document.get("artifact")) + [(document, name) for name in document]
        parent, name = chance.choice(places)
        changed.append(f"{name}")
        what = chance.randrange(8)
        if what == 0:
            del parent[name]
        elif what == 1 and isinstance(parent, list):
            chance.shuffle(parent)
        elif what == 2 and isinstance(parent, list):
            parent.append(_hostile(chance))
        elif what == 3 and type(parent[name]) is int:
            parent[name] += chance.choice((-1, 1))
        elif what == 4 and isinstance(parent, dict):
            parent[chance.choice(("more", "..", "library"))] = _hostile(chance)
        else:
            parent[name] = _hostile(chance)
    if chance.random() < 0.1:
        library = chance.choice((b"", b"no library", chance.randbytes(1000)))
        (entry / LIBRARY).write_bytes(library)
        document["library"] = {"sha256": hashlib.sha256(library).hexdigest(), "size": len(library)}
        changed.append("library")
    seal(entry, json.dumps(document, indent=1, sort_keys=True))
    return " ".join(changed)


def _hostile(chance: Chance) -> Any:
    return copy.deepcopy(chance.choice(_HOSTILE))


def bury(entry: Path, chance: Chance) -> None:
    """Write a manifest that is valid in form but expensive to read."""
    depth = chance.choice((100, 10_000, 1_000_000))
    text = chance.choice(
        (
            '{"format": ' + "[" * depth + "]" * depth + "\n}",
            '{"artifact": ' * depth + "1" + "}" * (depth - 1) + "\n}",
            '{"format": ' + "9" * depth + "\n}",
            '{"format": 6, "format": ' + "-" * depth + "\n}",
            "{" + ",".join(f'"{i}": {{}}' for i in range(depth)) + "\n}",
            " " * depth + "\n}",
        )
    )
    seal(entry, text)


def seal(entry: Path, text: str) -> None:
    """Write a manifest with the checksum of its contents."""
    sealed = text.removesuffix("\n}").encode("utf-8", "surrogatepass")
    digest = hashlib.sha256(sealed).hexdigest()
    (entry / MANIFEST).write_bytes(sealed + f',\n "sha256": "{digest}"\n}}\n'.encode())


def _places(value: Any) -> list[tuple[Any, Any]]:
    """List all containers in a document, each with the name or index of an item."""
    found: list[tuple[Any, Any]] = []
    names = value if isinstance(value, dict) else range(len(value)) if _is_list(value) else ()
    for name in names:
        found.append((value, name))
        found += _places(value[name])
    return found


def _is_list(value: Any) -> bool:
    return isinstance(value, list)

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.caches import ENTRIES, add
from tvmify.cache import Key, Neighbours, neighbours
from tvmify.cache.stored import MANIFEST


def test_the_nearest_of_the_older_entries(tmp_path: Path) -> None:
    add(tmp_path, 90, torch="1", options="")
    old = add(tmp_path, 60, torch="1")
    built = add(tmp_path, 30)
    add(tmp_path, 0, tvm="1")  # is as near, but was not there before
    assert Neighbours(tmp_path).lines(built) == [
        f"nearest older entry: {old.digest}, differs (here → there):",
        "torch: 2.13.0 → 1",
    ]


def test_program_removed_from_disk(tmp_path: Path) -> None:
    other = add(tmp_path)
    lines = Neighbours(tmp_path).lines(Key(ENTRIES | {"torch": "1"}))
    assert other.digest in lines[0] and lines[1:] == ["torch: 1 → 2.13.0"]


def test_no_neighbour(tmp_path: Path) -> None:
    key = add(tmp_path)
    assert Neighbours(tmp_path).lines(key) == []
    assert Neighbours(tmp_path / "none").lines(key) == []
    assert Neighbours(None).lines(key) == []
    (tmp_path / key.digest / MANIFEST).write_text("")
    assert Neighbours(tmp_path).lines(Key({"torch": "1"})) == []
    tmp_path.chmod(0o777)
    assert Neighbours(tmp_path).lines(Key({"torch": "1"})) == []


def test_its_work_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "_MOST_ENTRIES", 2)
    monkeypatch.setattr(neighbours, "_MOST_PROGRAMS", 2)
    for number, torch in enumerate(["near", "far", "far"]):
        add(tmp_path, 100 - number, tvm=str(number), torch=torch)
    known = Neighbours(tmp_path)
    key = Key(ENTRIES | {"torch": "near"})
    assert [bool(known.lines(key)) for _ in range(3)] == [True, True, False]
    assert "torch: near → far" in Neighbours(tmp_path).lines(key)  # the oldest is ignored


def test_an_entry_of_another_module_explains_nothing(tmp_path: Path) -> None:
    weights = "\n".join(f"layer.{number}: float32[4] cpu" for number in range(9))
    add(tmp_path, weights=weights)
    assert Neighbours(tmp_path).lines(Key(ENTRIES)) == []

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tvmify
from tests.cli.caches import add, run
from tvmify.cache.key import Key
from tvmify.cache.listing import verdict_of
from tvmify.cache.manifest import Manifest
from tvmify.cache.stored import MANIFEST
from tvmify.errors import CacheError


def test_the_newest_entry_is_first_and_described(cache_directory: Path) -> None:
    assert tvmify.cache.list() == []
    old = add(cache_directory, 60)
    new = add(cache_directory, 0, inputs="0: int64[7] cpu\nT", torch="2.14.0")
    first, second = tvmify.cache.list()
    assert (first.digest, second.digest) == (new.digest, old.digest)
    assert first.inputs == "int64[7] cpu"
    assert (first.target, first.torch, first.damaged) == ("x86-64 +avx2", "2.14.0", "")
    assert second.verdict == "2 threads: 1 ms, eager 2 ms"
    assert first.path.is_dir() and first.bytes > 0 and first.used > second.used


def test_verdicts_of_all_ways_to_run_are_listed() -> None:
    times = [0.003, 0.004]
    verdicts = {"2": times, "2 with CUDA graphs": times, "on a moon": times, "4": "?"}
    listed = verdict_of(Manifest(Key({}), {"verdicts": verdicts}, "", 0))
    assert listed.split("; ") == [
        "2 threads: 3 ms, eager 4 ms",
        "2 threads with CUDA graphs: 3 ms, eager 4 ms",
        "on a moon: 3 ms, eager 4 ms",
        "4 threads: ?",
    ]


def test_the_command_lists_the_same(tmp_path: Path) -> None:
    add(tmp_path)
    (entry,) = tvmify.cache.list(tmp_path)
    (fact,) = json.loads(run("list", "--json", "--cache", tmp_path).output)["entries"]
    assert {name: getattr(entry, name) for name in fact} == fact | {
        "path": entry.path,
        "shapes": (),
    }


def test_a_damaged_entry(tmp_path: Path) -> None:
    key = add(tmp_path)
    (tmp_path / key.digest / MANIFEST).write_text("{}")
    (entry,) = tvmify.cache.list(tmp_path)
    assert "manifest" in entry.damaged and entry.inputs == ""
    assert tvmify.cache.clear(tmp_path) == 1
    assert tvmify.cache.list(tmp_path) == []


def test_clear_is_about_one_directory(tmp_path: Path, cache_directory: Path) -> None:
    (tmp_path / "other").mkdir(mode=0o700)
    add(cache_directory)
    add(tmp_path / "other")
    assert tvmify.cache.clear() == 1
    assert len(tvmify.cache.list(str(tmp_path / "other"))) == 1
    assert tvmify.cache.clear() == 0


@pytest.mark.parametrize("function", [tvmify.cache.list, tvmify.cache.clear])
def test_wrong_directories(function: object, tmp_path: Path) -> None:
    assert callable(function)
    with pytest.raises(CacheError, match="nowhere is not a directory"):
        function(tmp_path / "nowhere")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(CacheError, match="chmod 700"):
        function(tmp_path / "open")

from __future__ import annotations

import json
import os
import stat
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cache.entries import KEY, artifact
from tests.cache.mutations import seal
from tests.cache.programs import artifact_of, key_of
from tvmify import CacheError, TvmifyWarning
from tvmify.artifact import Seconds, VerdictKey
from tvmify.cache import DiskCache, Key, Limits, stored
from tvmify.cache.directory import opened, read
from tvmify.cache.disk import LIBRARY, MANIFEST, QUARANTINE
from tvmify.cache.manifest import Manifest, library_file


def test_entry_directory_is_private(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    DiskCache(directory).store(KEY, artifact())
    assert [path.name for path in directory.iterdir()] == [KEY.digest]
    names = sorted(path.name for path in (directory / KEY.digest).iterdir())
    assert names == [MANIFEST, LIBRARY]
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_the_manifest_names_its_key(tmp_path: Path) -> None:
    DiskCache(tmp_path).store(KEY, artifact())
    manifest = json.loads((tmp_path / KEY.digest / MANIFEST).read_text())
    assert manifest["key"] == KEY.entries


def truncate(entry: Path) -> None:
    (entry / LIBRARY).write_bytes(b"co")


def flip(entry: Path) -> None:
    (entry / LIBRARY).write_bytes(b"cOde")


def lose_library(entry: Path) -> None:
    (entry / LIBRARY).unlink()
    (entry / LIBRARY).mkdir()


def garble(entry: Path) -> None:
    (entry / MANIFEST).write_bytes(b"\xff{")


def make_foreign(entry: Path) -> None:
    text = (entry / MANIFEST).read_text()
    (entry / MANIFEST).write_text(text.replace("relu", "gelu"))


def make_old(entry: Path) -> None:
    text = (entry / MANIFEST).read_text()
    (entry / MANIFEST).write_text(text.replace('"format": ', '"format": 1000'))


def lose_field(entry: Path) -> None:
    manifest = json.loads((entry / MANIFEST).read_text())
    del manifest["artifact"]["outputs"]
    (entry / MANIFEST).write_text(json.dumps(manifest))


def make_list(entry: Path) -> None:
    (entry / MANIFEST).write_text("[]")


@pytest.mark.parametrize(
    "damage",
    [truncate, flip, lose_library, garble, make_foreign, make_old, lose_field, make_list],
)
def test_a_damaged_entry_is_a_miss_and_is_replaced(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    cache = DiskCache(tmp_path)
    cache.store(KEY, artifact())
    damage(tmp_path / KEY.digest)
    with pytest.warns(TvmifyWarning, match="built again"):
        assert cache.load(KEY) is None
    cache.store(KEY, artifact())
    assert cache.load(KEY) == artifact()
    assert {path.name for path in tmp_path.iterdir()} == {KEY.digest, QUARANTINE}
    assert len(cache.quarantined()) == 1
    assert cache.counts["quarantined"] == 1


def test_failing_mkdir_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = DiskCache(tmp_path / "file" / "cache")
    with pytest.warns(TvmifyWarning, match="in memory only"):
        cache.store(KEY, artifact())


def flip_a_digit(entry: Path) -> None:
    text = (entry / MANIFEST).read_text()
    assert '"number": 0' in text
    (entry / MANIFEST).write_text(text.replace('"number": 0', '"number": 1'))


def test_a_digit_of_the_description_is_not_changed_unnoticed(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    cache.store(key_of(0), artifact_of(0))
    flip_a_digit(tmp_path / key_of(0).digest)
    with pytest.warns(TvmifyWarning, match="manifest is damaged"):
        assert cache.load(key_of(0)) is None


def test_damaged_entry_warns_once(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    for _ in range(3):
        cache.store(key_of(0), artifact_of(0))
        flip(tmp_path / key_of(0).digest)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert cache.load(key_of(0)) is None
        assert len(said) == (cache.counts["quarantined"] == 1)
    assert cache.counts["quarantined"] == 3


def test_few_damaged_entries_are_kept(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    for number in range(12):
        cache.store(key_of(number), artifact_of(number))
        flip(tmp_path / key_of(number).digest)
    assert set(cache.verify()) == {key_of(n).digest for n in range(12)}
    assert len(cache.quarantined()) == 8
    assert cache.entries() == [] and cache.verify() == {}
    assert cache.clear() == 0
    assert cache.quarantined() == []


def test_verdict_rewrites_only_the_manifest(tmp_path: Path) -> None:
    cache, entry = DiskCache(tmp_path), tmp_path / key_of(0).digest
    cache.store(key_of(0), artifact_of(0))
    places = entry, entry / LIBRARY
    before = [place.stat().st_ino for place in places]
    judged = artifact_of(0)
    judged.verdicts[VerdictKey(8)] = Seconds(1.0, 2.0)
    cache.store(key_of(0), judged)
    assert [place.stat().st_ino for place in places] == before
    assert cache.load(key_of(0)) == judged


def test_intact_entry_is_kept(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    cache.store(KEY, artifact(b"of this process"))
    cache.store(KEY, artifact(b"of another"))
    assert cache.load(KEY) == artifact(b"of this process")
    flip(tmp_path / KEY.digest)
    cache.store(KEY, artifact(b"of another"))
    assert cache.load(KEY) == artifact(b"of another")


def test_open_reader_survives_removal(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    cache.store(key_of(0), artifact_of(0))
    with (
        opened(tmp_path / key_of(0).digest, kind=os.O_DIRECTORY) as entry,
        opened(LIBRARY, entry) as library,
        opened(MANIFEST, entry) as manifest,
    ):
        assert cache.clear() == 1
        assert read(library, 10**6) == library_file(key_of(0), artifact_of(0))
        assert Manifest.from_json(read(manifest, 10**6)).key == key_of(0)
    assert cache.load(key_of(0)) is None
    assert cache.counts["quarantined"] == 0


# --------------------------------------------------------------------------------------- eviction


def used_in_order(cache: DiskCache, *numbers: int) -> None:
    for second, number in enumerate(numbers):
        path = cache.directory / key_of(number).digest / MANIFEST
        os.utime(path, (second, second))


def kept(cache: DiskCache) -> list[int]:
    return [
        json.loads((entry.path / MANIFEST).read_text())["artifact"]["report"]["number"]
        for entry in cache.entries()
    ]


def test_eviction_leaves_room_for_the_next_entry(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, Limits(bytes=None, entries=4))
    for number in range(5):
        cache.store(key_of(number), artifact_of(number))
    assert len(cache.entries()) == 3
    assert cache.counts == {"stored": 5, "evicted": 2}


def test_bytes_count_and_the_latest_stays(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, Limits(bytes=1000, entries=None))
    cache.store(KEY, artifact(b"x" * 5000))
    assert len(cache.entries()) == 1
    assert cache.entries()[0].bytes > 5000
    cache.store(key_of(0), artifact_of(0))
    assert kept(cache) == [0]


def test_prune_enforces_limits_and_reports_removals(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    for number in range(5):
        cache.store(key_of(number), artifact_of(number))
    used_in_order(cache, 4, 3, 2, 1, 0)
    assert cache.prune(Limits(None, None)) == []
    removed = cache.prune(Limits(None, 3))
    assert [entry.digest for entry in removed] == [key_of(4).digest, key_of(3).digest]
    size = sum(entry.bytes for entry in cache.entries())
    assert [e.digest for e in cache.prune(Limits(size - 1, None))] == [key_of(2).digest]
    assert len(cache.prune(Limits(0, None))) == 2
    assert cache.entries() == []


def test_entry_used_after_listing_is_kept(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    cache.store(key_of(0), artifact_of(0))
    used_in_order(cache, 0)
    (entry,) = cache.entries()
    assert cache.load(key_of(0)) is not None
    assert not cache._remove(entry)
    assert cache.load(key_of(0)) is not None


def test_leftovers_are_swept_after_an_hour(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    for name, age in ((".new-a", 4000), (".old-b", 4000), (".new-c", 3000), ("mine", 4000)):
        (tmp_path / name / "entry").mkdir(parents=True)
        before = time.time() - age
        os.utime(tmp_path / name, (before, before))
    cache.store(key_of(0), artifact_of(0))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {".new-c", "mine", key_of(0).digest}


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, Limits(None, 0))
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "0123").mkdir()
    cache.store(key_of(0), artifact_of(0))
    cache.store(key_of(1), artifact_of(1))
    assert cache.clear() == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0123", "notes.txt"]


@pytest.mark.parametrize("name", ["..", "../" + "0" * 64, "", "0" * 63, "0" * 64 + "\n", "A" * 64])
def test_only_digests_are_entry_names(tmp_path: Path, name: str) -> None:
    cache = DiskCache(tmp_path / "cache")
    cache.store(key_of(0), artifact_of(0))
    with pytest.raises(FileNotFoundError):
        cache.read(name)
    assert cache.read(key_of(0).digest).manifest.key == key_of(0)


def test_an_entry_under_the_digest_of_another_is_damaged(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    cache.store(key_of(0), artifact_of(0))
    (tmp_path / key_of(0).digest).rename(tmp_path / key_of(1).digest)
    with pytest.raises(CacheError, match="another key"):
        cache.read(key_of(1).digest)
    assert list(cache.verify()) == [key_of(1).digest]


@pytest.mark.parametrize("part", ["artifact", "key"])
def test_manifest_cannot_override_its_key(tmp_path: Path, part: str) -> None:
    cache = DiskCache(tmp_path)
    cache.store(key_of(0), artifact_of(0))
    entry = tmp_path / key_of(0).digest
    document = json.loads((entry / MANIFEST).read_text())
    del document["sha256"]
    if part == "artifact":
        document["artifact"]["weights"].reverse()  # code would read past the end of a weight
    else:
        document["key"] = dict(key_of(1).entries)
        entry = entry.rename(tmp_path / key_of(1).digest)
    seal(entry, json.dumps(document, indent=1, sort_keys=True))
    with pytest.warns(TvmifyWarning, match="not the one that its library was built with"):
        assert cache.load(key_of(int(part == "key"))) is None


def test_a_manifest_is_bounded_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DiskCache(tmp_path)
    cache.store(key_of(0), artifact_of(0))
    path = tmp_path / key_of(0).digest / "manifest.json"
    path.write_bytes(path.read_bytes().rjust(stored.LONGEST_MANIFEST + 1))
    monkeypatch.setattr(json, "loads", lambda *_: pytest.fail("it was parsed"))
    with pytest.warns(TvmifyWarning, match="bytes is too large"):
        assert cache.load(key_of(0)) is None


def test_unreadable_manifest_is_not_stored(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    large = Key({"program": "x" * stored.LONGEST_MANIFEST})
    with pytest.warns(TvmifyWarning, match="a manifest of .* bytes is not stored"):
        cache.store(large, artifact_of(0))
    assert cache.entries() == []

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tvmify import TvmifyWarning
from tvmify.artifact import Artifact
from tvmify.cache import DiskCache, Key
from tvmify.cache.disk import LIBRARY, MANIFEST, QUARANTINE

KEY = Key({"program": "relu", "target": "llvm"})


def artifact(library: bytes = b"code") -> Artifact:
    return Artifact(
        library=library,
        target='{"kind": "llvm"}',
        inputs=(0,),
        weights=("weight",),
        packed=("weight as it is",),
        outputs=(("tensor", 0), ("constant", None)),
        output_structure="[1]",
        report={"kernels": {"relu": "elementwise"}},
    )


def test_an_entry_comes_back_equal(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache")
    assert cache.load(KEY) is None
    cache.store(KEY, artifact())
    assert DiskCache(tmp_path / "cache").load(KEY) == artifact()


def test_keys_do_not_meet(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    cache.store(KEY, artifact())
    assert cache.load(Key({"program": "relu", "target": "cuda"})) is None


def test_an_entry_is_one_directory_that_only_the_user_reads(tmp_path: Path) -> None:
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


def test_a_digest_that_collides_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Key, "digest", "0" * 64)
    cache = DiskCache(tmp_path)
    cache.store(Key(KEY.entries), artifact())
    with pytest.warns(TvmifyWarning, match="another key"):
        assert cache.load(Key({"program": "gelu", "target": "llvm"})) is None


def test_a_directory_that_cannot_be_made_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = DiskCache(tmp_path / "file" / "cache")
    with pytest.warns(TvmifyWarning, match="in memory only"):
        cache.store(KEY, artifact())

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cache.programs import Cheap, artifact_of
from tests.cache.test_locks import holder
from tvmify.artifact import Artifact
from tvmify.cache import DiskCache
from tvmify.dispatch import work
from tvmify.dispatch.programs import Found, Source
from tvmify.dispatch.progress import Stages


def make(number: int, disk: DiskCache, build: object = pytest.fail) -> Found:
    return Cheap(number, disk, build).make(Stages("", False))  # type: ignore[arg-type]


def test_build_is_stored_under_the_lock(tmp_path: Path) -> None:
    disk = DiskCache(tmp_path)

    def build() -> Artifact:
        key = Cheap(0, disk, pytest.fail).key
        assert disk.load(key) is None
        assert (tmp_path / "locks" / f"{key.digest[:3]}.lock").exists()
        return artifact_of(0)

    built, loaded = make(0, disk, build), make(0, disk)
    assert (built.executor.artifact, built.source) == (artifact_of(0), Source.BUILT)
    assert (loaded.executor.artifact, loaded.source) == (artifact_of(0), Source.LOADED)
    assert built.key == loaded.key


def test_what_another_process_has_built_meanwhile_is_loaded(tmp_path: Path) -> None:
    disk = DiskCache(tmp_path)
    late = Cheap(0, disk, pytest.fail)
    assert late.load() is None
    make(0, disk, lambda: artifact_of(0))
    assert late.make(Stages("", False)).source is Source.LOADED


def test_lock_timeout_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "_LONGEST_WAIT", 1)
    (tmp_path / "locks").mkdir(mode=0o700)
    job = Cheap(0, DiskCache(tmp_path), lambda: artifact_of(0))
    with holder(tmp_path / "locks" / f"{job.key.digest[:3]}.lock") as process:
        stages = Stages("", False)
        assert job.make(stages).source is Source.BUILT
        assert stages.seconds["wait"] >= 0.9
        process.kill()


def test_failed_build_leaves_no_entry_and_no_lock(tmp_path: Path) -> None:
    def fail() -> Artifact:
        raise ValueError("of the build")

    disk = DiskCache(tmp_path)
    job = Cheap(0, disk, fail)
    with pytest.raises(ValueError, match="of the build"):
        job.make(Stages("", False))
    with disk.building(job.key.digest, 0) as is_mine:
        assert is_mine
    assert disk.entries() == []

from __future__ import annotations

import io
import os
import stat
import zipfile
from pathlib import Path

import pytest

from tests.cache.entries import KEY, OTHER, artifact
from tvmify import CacheError, TvmifyWarning
from tvmify import cache as tvmify_cache
from tvmify.cache import DiskCache, Key, export, import_, packed
from tvmify.cache.disk import LIBRARY
from tvmify.cache.manifest import Manifest, library_file
from tvmify.cache.stored import EntryFiles

THIRD = Key({"program": "tanh", "target": "llvm"})
ALL = sorted(key.digest for key in (KEY, OTHER, THIRD))


@pytest.fixture
def full(cache_directory: Path) -> DiskCache:
    """The user's cache, with three entries."""
    cache = DiskCache(cache_directory)
    for key in (KEY, OTHER, THIRD):
        cache.store(key, artifact(key.entries["program"].encode()))
    return cache


def test_a_set_of_entries_moves(full: DiskCache, tmp_path: Path) -> None:
    path = tmp_path / "cache.zip"
    assert tvmify_cache.export(path) == ALL
    imported = tvmify_cache.import_(path, directory=tmp_path / "other")
    assert imported == (ALL, [], {})
    other = DiskCache(tmp_path / "other")
    for key in (KEY, OTHER, THIRD):
        assert other.load(key) == full.load(key) == artifact(key.entries["program"].encode())


def test_import_is_idempotent(full: DiskCache, tmp_path: Path) -> None:
    path, other = tmp_path / "cache.zip", DiskCache(tmp_path / "other")
    export(path, KEY.digest)
    other.store(OTHER, artifact(b"as it is"))
    assert import_(path, directory=other.directory) == ([KEY.digest], [], {})
    export(path)
    assert import_(path, directory=other.directory).stored == [THIRD.digest]
    before = {p: p.stat().st_ino for p in other.directory.rglob("*")}
    assert import_(path, directory=other.directory) == ([], ALL, {})
    assert {p: p.stat().st_ino for p in other.directory.rglob("*")} == before
    assert other.load(OTHER) == artifact(b"as it is")


def test_entries_are_selected_by_digest(full: DiskCache, tmp_path: Path) -> None:
    path = tmp_path / "cache.zip"
    assert export(path, KEY.digest) == [KEY.digest]
    assert export(path, [KEY.digest[:12], OTHER.digest]) == sorted([KEY.digest, OTHER.digest])
    with pytest.raises(CacheError, match="has no entry 0123"):
        export(path, [KEY.digest, "0123"])
    with path.open("rb") as file:  # the previous one
        assert packed.Reader(file).digests == sorted([KEY.digest, OTHER.digest])


def test_entries_are_selected_by_their_last_use(full: DiskCache, tmp_path: Path) -> None:
    for entry in full.entries():
        os.utime(entry.path / "manifest.json", (1000, 1000))
    begin = full.entries()[0].used + 1
    full.load(OTHER)
    assert export(tmp_path / "cache.zip", since=begin) == [OTHER.digest]


def test_empty_export_is_refused(cache_directory: Path, tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="nothing to export"):
        export(tmp_path / "cache.zip")
    assert list(tmp_path.iterdir()) == []


def test_damaged_entries_are_not_exported(full: DiskCache, tmp_path: Path) -> None:
    (full.directory / KEY.digest / LIBRARY).write_bytes(b"rElu")
    with pytest.warns(TvmifyWarning, match=f"{KEY.digest} was not exported"):
        written = export(tmp_path / "cache.zip")
    assert written == sorted([OTHER.digest, THIRD.digest])


def test_archive_is_written_atomically(
    full: DiskCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cache.zip"
    path.write_bytes(b"what was there")

    def interrupted(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(OSError, match="No space left"):
        export(path)
    assert path.read_bytes() == b"what was there"
    assert {p.name for p in tmp_path.iterdir()} == {"cache", "cache.zip"}
    monkeypatch.undo()
    export(path, directory=full.directory)
    assert import_(path, directory=tmp_path / "other").stored == ALL


def test_equal_entries_are_equal_archives(full: DiskCache, tmp_path: Path) -> None:
    export(tmp_path / "one.zip")
    import_(tmp_path / "one.zip", directory=tmp_path / "other")
    export(tmp_path / "two.zip", directory=tmp_path / "other")
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()


# ------------------------------------------------------------------------------ hostile archives


def bundle(path: Path, *entries: tuple[Key, bytes]) -> bytes:
    file = io.BytesIO()
    made = [(key, artifact(code)) for key, code in entries]
    packed.write(file, [EntryFiles(Manifest.of(key, a), library_file(key, a)) for key, a in made])
    path.write_bytes(file.getvalue())
    return file.getvalue()


def test_partial_import_reports_rejected_entries(tmp_path: Path) -> None:
    path, cache = tmp_path / "cache.zip", DiskCache(tmp_path / "c")
    whole = bundle(path, (KEY, b"relu code"), (OTHER, b"gelu code"))
    path.write_bytes(whole.replace(b"gelu code", b"gelu cOde"))
    with pytest.warns(TvmifyWarning, match=f"1 of 2 entries .* refused: {OTHER.digest}"):
        imported = import_(path, directory=cache.directory)
    assert imported.stored == [KEY.digest]
    assert list(imported.refused) == [OTHER.digest]
    assert [entry.digest for entry in cache.entries()] == [KEY.digest]


def test_fully_unusable_archive_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "cache.zip"
    path.write_bytes(bundle(path, (KEY, b"relu code")).replace(b"relu code", b"relu cOde"))
    with pytest.raises(
        CacheError, match=rf"1 of 1 entries of .*cache.zip were refused: {KEY.digest}"
    ):
        import_(path, directory=tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", f"{KEY.digest}/../../evil"])
def test_names_in_an_archive_are_not_paths(tmp_path: Path, name: str) -> None:
    path = tmp_path / "in" / "cache.zip"
    path.parent.mkdir()
    bundle(path, (KEY, b"code"))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, b"evil")
    with pytest.raises(CacheError, match="evil' is not a file of a cache entry"):
        import_(path, directory=tmp_path / "in" / "c" / "d")
    assert [p.name for p in tmp_path.rglob("*")] == ["in", "cache.zip"]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "cache.zip"
    link = zipfile.ZipInfo(f"{KEY.digest}/module.so")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{KEY.digest}/manifest.json", b"{}")
        archive.writestr(link, b"/etc/passwd")
    with pytest.raises(CacheError, match="not a plain file"):
        import_(path, directory=tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CacheError, match="not a regular file"):
        import_(tmp_path / "pipe", directory=tmp_path / "c")


def test_a_cut_archive_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "cache.zip"
    whole = bundle(path, (KEY, b"code"), (OTHER, b"code"))
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        with pytest.raises(CacheError, match=r"cache.zip cannot be imported"):
            import_(path, directory=tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_shared_directory_is_an_error(full: DiskCache, tmp_path: Path) -> None:
    path = tmp_path / "cache.zip"
    export(path)
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(CacheError, match="open to others"):
        import_(path, directory=tmp_path / "open")
    assert list((tmp_path / "open").iterdir()) == []


def test_entries_without_room_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cache.zip"
    bundle(path, (KEY, b"relu"), (OTHER, b"gelu"), (THIRD, b"tanh"))
    monkeypatch.setenv("TVMIFY_CACHE_SIZE", "2 entries")
    with pytest.warns(TvmifyWarning, match="the cache has no room for it"):
        imported = import_(path, directory=tmp_path / "c")
    kept = {entry.digest for entry in DiskCache(tmp_path / "c").entries()}
    assert kept == set(imported.stored)
    assert kept | set(imported.refused) == set(ALL)
    assert THIRD.digest in kept

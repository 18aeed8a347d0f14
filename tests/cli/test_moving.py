from __future__ import annotations

import json
from pathlib import Path

from tests.cli.caches import add, run
from tvmify.cache import DiskCache
from tvmify.cache.stored import LIBRARY


def digests(directory: Path) -> set[str]:
    return {entry.digest for entry in DiskCache(directory).entries()}


def test_there_and_back(tmp_path: Path) -> None:
    here, there, archive = tmp_path / "here", tmp_path / "there", tmp_path / "some.zip"
    keys = [add(here, torch=str(number)) for number in range(2)]
    result = run("export", archive, "--cache", here)
    assert result.exit_code == 0 and "2 entries" in result.output
    result = run("import", archive, "--cache", there)
    assert result.exit_code == 0, result.output
    assert "2 stored, 0 already there, 0 refused" in result.output
    assert digests(there) == {key.digest for key in keys}
    document = json.loads(run("import", archive, "--json", "--cache", there).output)
    assert (len(document["stored"]), len(document["present"])) == (0, 2)


def test_some_entries(tmp_path: Path, cache_directory: Path) -> None:
    first, archive = add(cache_directory), tmp_path / "some.zip"
    add(cache_directory, torch="1")
    document = json.loads(run("export", archive, first.digest[:9], "--json").output)
    assert document["entries"] == [first.digest]
    assert document["bytes"] == archive.stat().st_size
    result = run("export", archive, "nothing")
    assert result.exit_code == 1 and "nothing" in result.stderr


def test_damaged_entries_stay(tmp_path: Path) -> None:
    whole, damaged = add(tmp_path / "cache"), add(tmp_path / "cache", torch="1")
    (tmp_path / "cache" / damaged.digest / LIBRARY).write_bytes(b"")
    archive = tmp_path / "some.zip"
    result = run("export", archive, "--json", "--cache", tmp_path / "cache")
    assert result.exit_code == 1 and damaged.digest in result.stderr
    assert json.loads(result.stdout)["entries"] == [whole.digest]


def test_no_archive(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    for path in (tmp_path / "text", tmp_path / "none"):
        result = run("import", path, "--cache", tmp_path / "cache")
        assert result.exit_code == 1 and path.name in result.stderr and not result.stdout
    assert run("export").exit_code == run("import").exit_code == 2


def test_damage_on_the_way(tmp_path: Path) -> None:
    archive = tmp_path / "some.zip"
    add(tmp_path / "here", library=b"first entry")
    add(tmp_path / "here", library=b"other entry", torch="1")
    run("export", archive, "--cache", tmp_path / "here")
    archive.write_bytes(archive.read_bytes().replace(b"other entry", b"0ther entry"))
    result = run("import", archive, "--cache", tmp_path / "there")
    assert result.exit_code == 1
    assert "1 stored, 0 already there, 1 refused" in result.output

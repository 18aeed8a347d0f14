from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.caches import add, run
from tvmify.cache import DiskCache
from tvmify.cache.stored import LIBRARY


def test_verify_moves_damaged_entries_aside(tmp_path: Path) -> None:
    whole, damaged = add(tmp_path), add(tmp_path, torch="1")
    assert run("verify", "--cache", tmp_path).exit_code == 0
    (tmp_path / damaged.digest / LIBRARY).write_bytes(b"cOde")
    result = run("verify", "--json", "--cache", tmp_path)
    assert result.exit_code == 1
    document = json.loads(result.output)
    assert document["checked"] == 2
    assert [problem["digest"] for problem in document["damaged"]] == [damaged.digest]
    result = run("verify", "--cache", tmp_path)
    assert result.exit_code == 0 and "1 entries checked, 0 damaged" in result.output
    assert [entry.digest for entry in DiskCache(tmp_path).entries()] == [whole.digest]


def test_prune_keeps_recent_entries(tmp_path: Path) -> None:
    keys = [add(tmp_path, 100 - number, torch=str(number)) for number in range(4)]
    result = run("prune", "--entries", 3, "--json", "--cache", tmp_path)
    assert result.exit_code == 0
    assert json.loads(result.output)["removed"] == [keys[0].digest]
    total = sum(entry.bytes for entry in DiskCache(tmp_path).entries())
    output = run("prune", "--cache", tmp_path).output
    assert output.endswith(f"3 left, {total / 1000:.1f} kB\n")
    assert run("prune", "--size", f"{total // 2}B", "--cache", tmp_path).exit_code == 0
    assert [entry.digest for entry in DiskCache(tmp_path).entries()] == [keys[3].digest]
    assert run("prune", "--size", "1 entries", "--cache", tmp_path).exit_code == 0
    result = run("prune", "--size", "many", "--cache", tmp_path)
    assert result.exit_code == 2 and "--size is 'many'" in result.stderr
    assert run("prune", "--entries", "-1", "--cache", tmp_path).exit_code == 2


def test_prune_holds_the_limits_of_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        add(tmp_path, torch=str(number))
    monkeypatch.setenv("TVMIFY_CACHE_SIZE", "1 entry")
    assert "2 entries" in run("prune", "--cache", tmp_path).output
    assert len(DiskCache(tmp_path).entries()) == 1


def test_clear_asks_only_at_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(tmp_path)
    result = run("clear", "--cache", tmp_path)
    assert result.exit_code == 2 and "add --yes" in result.stderr
    monkeypatch.setattr("tvmify.cli.removing.at_terminal", lambda: True)
    assert run("clear", "--cache", tmp_path, input="n\n").exit_code == 1
    assert len(DiskCache(tmp_path).entries()) == 1
    assert run("clear", "--cache", tmp_path, input="y\n").exit_code == 0
    assert DiskCache(tmp_path).entries() == []
    assert run("clear", "--cache", tmp_path).exit_code == 0  # there is nothing to ask about


def test_clear_with_yes(tmp_path: Path) -> None:
    add(tmp_path)
    result = run("clear", "--yes", "--json", "--cache", tmp_path)
    assert json.loads(result.output)["removed"] == 1

"""The disk cache under load, with killed processes and with a bad disk.

By default this runs about a thirtieth of ``make soak``; TVMIFY_SOAK is the fraction.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.cache import mutations
from tests.cache.programs import artifact_of, key_of
from tvmify import TvmifyWarning
from tvmify.cache import DiskCache

PART = float(os.environ.get("TVMIFY_SOAK", "0.03"))


def part(count: int) -> int:
    return max(1, round(count * PART))


def process(module: str, *arguments: object) -> str:
    command = [sys.executable, "-m", f"tests.cache.{module}", *map(str, arguments)]
    root = Path(__file__).parents[3]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=3600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def crowds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return json.loads(process("crowds", tmp_path_factory.mktemp("crowds"), max(PART, 0.02)))


def test_concurrent_processes_build_each_key_once(crowds: dict[str, Any]) -> None:
    result = crowds["race"]
    assert result == {"failed": [], "damaged": {}, "keys": result["keys"], "most": 1}
    assert result["keys"] >= 100 * PART


def test_eviction_under_readers(crowds: dict[str, Any]) -> None:
    result = crowds["evict"]
    assert result["failed"] == result["left"] == [] and result["damaged"] == {}
    assert result["kept"] <= 10
    assert result["builds"] < result["gets"]


def test_killed_builders_leave_no_partial_entries(crowds: dict[str, Any]) -> None:
    result = crowds["kill"]
    assert result["lost"] == result["blocked"] == result["left"] == []
    assert result["whole"] >= 20 * PART


@pytest.mark.parametrize("damage", mutations.DAMAGE)
def test_damage_is_a_miss(tmp_path: Path, damage: str) -> None:
    cache = DiskCache(tmp_path)
    for seed in range(part(2500) // len(mutations.DAMAGE) + 1):
        chance = random.Random(seed)
        for number in (0, 1):
            cache.store(key_of(number), artifact_of(number))
        entry, other = (tmp_path / key_of(number).digest for number in (0, 1))
        mutations.DAMAGE[damage](entry, other, chance)
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            loaded = DiskCache(tmp_path).load(key_of(0))
        assert loaded in (None, artifact_of(0))
        assert DiskCache(tmp_path).load(key_of(1)) == artifact_of(1)


def test_forged_entry_is_a_miss_or_harmless(tmp_path: Path) -> None:
    right = dataclasses.replace(artifact_of(0), verdicts={}, report={})
    entry = tmp_path / key_of(0).digest
    for seed in range(part(2000)):
        chance = random.Random(seed)
        cache = DiskCache(tmp_path)
        cache.store(key_of(0), artifact_of(0))
        mutations.forge(entry, chance)
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            loaded = cache.load(key_of(0))
            cache.entries()
            cache.verify()
        assert loaded is None or dataclasses.replace(loaded, verdicts={}, report={}) == right


def test_malformed_manifest_is_a_miss(tmp_path: Path) -> None:
    for seed in range(part(200)):
        cache = DiskCache(tmp_path)
        cache.store(key_of(0), artifact_of(0))
        mutations.bury(tmp_path / key_of(0).digest, random.Random(seed))
        with pytest.warns(TvmifyWarning, match="built again"):
            assert cache.load(key_of(0)) is None


def test_mutated_entries_never_crash_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process("calls", "build", tmp_path)
    count = part(500)
    outcomes = json.loads(process("calls", "call", tmp_path, 0, count))
    assert set(outcomes["damage"]) | set(outcomes["forgery"]) <= {"right", "miss"}
    assert outcomes["damage"]["miss"] + outcomes["forgery"]["miss"] > count // 2

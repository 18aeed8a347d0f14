"""The contract of all caches, with a test class for each cache.

The class of a cache inherits its tests from mixins, as in cachetools.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from fsspec.core import url_to_fs
from fsspec.implementations.memory import MemoryFileSystem

from tests.cache.entries import KEY, OTHER, artifact
from tests.cache.programs import key_of
from tvmify import TvmifyWarning
from tvmify.artifact import Artifact, Seconds, VerdictKey
from tvmify.cache import Cache, DiskCache, Key, Limits, MemoryCache, RemoteCache, TwoLevels
from tvmify.cache.disk import LIBRARY


class Clock:
    """Returns a later second each time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


class CacheContract:
    """Tests for every cache."""

    def make(self, place: Path) -> Cache[Key, Artifact]:
        """Return a cache at a path; empty at first."""
        raise NotImplementedError

    def test_unknown_key_is_a_miss(self, tmp_path: Path) -> None:
        cache = self.make(tmp_path)
        assert cache.load(KEY) is None
        cache.store(OTHER, artifact())
        assert cache.load(KEY) is None

    def test_stored_value_round_trips(self, tmp_path: Path) -> None:
        cache = self.make(tmp_path)
        cache.store(KEY, artifact())
        cache.store(OTHER, artifact(b"gelu"))
        for _ in range(2):
            assert cache.load(Key(KEY.entries)) == artifact()
            assert cache.load(OTHER) == artifact(b"gelu")

    def test_every_text_of_a_key_counts(self, tmp_path: Path) -> None:
        cache = self.make(tmp_path)
        keys = [Key({"program": "relu", "target": target}) for target in ("avx2", "avx512")]
        for key in keys:
            cache.store(key, artifact(key.entries["target"].encode()))
        for key in keys:
            assert cache.load(key) == artifact(key.entries["target"].encode())

    def test_a_later_verdict_replaces_the_one_before(self, tmp_path: Path) -> None:
        cache = self.make(tmp_path)
        judged = replace(artifact(), verdicts={VerdictKey(8): Seconds(1.0, 2.0)})
        cache.store(KEY, artifact())
        assert cache.load(KEY) == artifact()
        cache.store(KEY, judged)
        assert cache.load(KEY) == judged

    def test_digest_collision_is_a_miss(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            Key, "__post_init__", lambda key: object.__setattr__(key, "digest", "0" * 64)
        )
        cache = self.make(tmp_path)
        cache.store(Key(OTHER.entries), artifact(b"gelu"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TvmifyWarning)  # caches that keep files warn
            assert cache.load(Key(KEY.entries)) is None

    def test_threads_get_the_value_of_their_key(self, tmp_path: Path) -> None:
        cache = self.make(tmp_path)

        def work(seed: int) -> None:
            for i in range(8):
                number = (3 * seed + i) % 4
                found = cache.load(key_of(number))
                assert found is None or found == artifact(b"%d" % number)
                if found is None:
                    cache.store(key_of(number), artifact(b"%d" % number))

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(work, range(4)))
        for number in range(4):
            assert cache.load(key_of(number)) == artifact(b"%d" % number)


class BoundedContract:
    """Tests for a cache with a limit: a full one evicts the least recently used entries first."""

    def of_four(self, place: Path) -> Cache[Key, Artifact]:
        """Return a cache for four entries, with a clock that always advances."""
        raise NotImplementedError

    def test_the_least_recently_used_leaves_first(self, tmp_path: Path) -> None:
        cache = self.of_four(tmp_path)
        for number in range(4):
            cache.store(key_of(number), artifact())
        assert cache.load(key_of(0)) is not None
        cache.store(key_of(4), artifact())
        assert cache.load(key_of(1)) is None
        for number in (0, 3, 4):
            assert cache.load(key_of(number)) is not None

    def test_second_store_replaces_the_first(self, tmp_path: Path) -> None:
        cache = self.of_four(tmp_path)
        for number in (0, 1, 2, 3, 0, 4):
            cache.store(key_of(number), artifact())
        assert cache.load(key_of(1)) is None
        assert cache.load(key_of(0)) is not None

    def test_latest_entry_is_never_evicted(self, tmp_path: Path) -> None:
        cache = self.of_four(tmp_path)
        for number in range(10):
            cache.store(key_of(number), artifact())
            assert cache.load(key_of(number)) is not None
        assert sum(cache.load(key_of(number)) is not None for number in range(10)) <= 4


class StoredContract:
    """Tests for a cache that outlives its process."""

    def make(self, place: Path) -> Cache[Key, Artifact]:
        """Return a cache at a path."""
        raise NotImplementedError

    def damage(self, place: Path, key: Key) -> None:
        """Change the files of an entry behind the cache's back."""
        raise NotImplementedError

    def test_another_process_gets_it(self, tmp_path: Path) -> None:
        self.make(tmp_path).store(KEY, artifact())
        assert self.make(tmp_path).load(KEY) == artifact()

    def test_a_damaged_entry_is_a_miss_and_is_replaced(self, tmp_path: Path) -> None:
        cache = self.make(tmp_path)
        cache.store(KEY, artifact())
        cache.store(OTHER, artifact(b"gelu"))
        self.damage(tmp_path, KEY)
        with pytest.warns(TvmifyWarning, match="is not used"):
            assert cache.load(KEY) is None
        assert cache.load(OTHER) == artifact(b"gelu")
        cache.store(KEY, artifact(b"again"))
        assert cache.load(KEY) == artifact(b"again")


def _damage_file(place: Path, key: Key) -> None:
    (place / key.digest / LIBRARY).write_bytes(b"cOde")


def _damage_object(url: str, key: Key) -> None:
    files, root = url_to_fs(url)
    path = f"{root}/{key.digest}.zip"
    files.pipe_file(path, files.cat_file(path)[:-30])


class TestMemoryCache(CacheContract, BoundedContract):
    """The cache in front of all others."""

    def make(self, place: Path) -> Cache[Key, Artifact]:
        return MemoryCache(8)

    def of_four(self, place: Path) -> Cache[Key, Artifact]:
        return MemoryCache(4)


class TestDiskCache(CacheContract, BoundedContract, StoredContract):
    """One user's directory."""

    def make(self, place: Path) -> Cache[Key, Artifact]:
        return DiskCache(place)

    def of_four(self, place: Path) -> Cache[Key, Artifact]:
        return DiskCache(place, Limits(bytes=None, entries=4), Clock())

    def damage(self, place: Path, key: Key) -> None:
        _damage_file(place, key)


class TestRemoteFolder(CacheContract, StoredContract):
    """A folder that machines share."""

    def make(self, place: Path) -> Cache[Key, Artifact]:
        return RemoteCache(f"file://{place}/shared")

    def damage(self, place: Path, key: Key) -> None:
        _damage_object(f"file://{place}/shared", key)


class TestRemoteObjects(CacheContract, StoredContract):
    """A bucket of objects."""

    @pytest.fixture(autouse=True)
    def _empty(self) -> Iterator[None]:
        MemoryFileSystem.store.clear()
        yield
        MemoryFileSystem.store.clear()

    def make(self, place: Path) -> Cache[Key, Artifact]:
        return RemoteCache("memory://bucket/x")

    def damage(self, place: Path, key: Key) -> None:
        _damage_object("memory://bucket/x", key)


class TestTwoLevels(CacheContract, StoredContract):
    """A directory in front of a shared folder; damage affects both."""

    def make(self, place: Path) -> Cache[Key, Artifact]:
        return TwoLevels(DiskCache(place / "near"), RemoteCache(f"file://{place}/far"))

    def damage(self, place: Path, key: Key) -> None:
        _damage_file(place / "near", key)
        _damage_object(f"file://{place}/far", key)


class TestNothingNear(CacheContract, StoredContract):
    """Two levels, of which only the second keeps its entries."""

    def make(self, place: Path) -> Cache[Key, Artifact]:
        near = DiskCache(place / "near")
        near.clear()
        return TwoLevels(near, RemoteCache(f"file://{place}/far"))

    def damage(self, place: Path, key: Key) -> None:
        DiskCache(place / "near").clear()
        _damage_object(f"file://{place}/far", key)

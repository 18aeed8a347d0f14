from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tvmify.cache import MemoryCache


def test_counts_hits_and_misses_but_not_peeks() -> None:
    cache: MemoryCache[str] = MemoryCache(2)
    assert cache.load("a") is None
    cache.store("a", "A")
    assert cache.load("a") == "A"
    assert cache.peek("a") == "A"
    assert cache.peek("b") is None
    assert (cache.hits, cache.misses, len(cache)) == (1, 1, 1)


def test_clear_keeps_the_counts() -> None:
    cache: MemoryCache[str] = MemoryCache(2)
    cache.store("a", "A")
    cache.load("a")
    cache.clear()
    assert (len(cache), cache.hits) == (0, 1)


def test_threads_do_not_break_the_order() -> None:
    cache: MemoryCache[int] = MemoryCache(8)

    def work(seed: int) -> None:
        for i in range(2000):
            key = (seed * 7 + i) % 16
            if cache.load(key) is None:
                cache.store(key, key)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert 0 < cache.hits + cache.misses <= 16000
    assert len(cache) == 8


def test_evicted_value_is_a_miss() -> None:
    cache: MemoryCache[str] = MemoryCache(1)
    cache.store("a", "A")
    assert cache.load("a") == "A"
    cache.store("b", "B")
    assert cache.load("a") is None
    assert cache.load("b") == "B"
    cache.store("b", "C")
    assert cache.load("b") == "C"
    cache.clear()
    assert cache.load("b") is None


def test_alias_lives_as_long_as_its_value() -> None:
    cache: MemoryCache[str] = MemoryCache(2)
    cache.store("general", "value")
    cache.alias("exact", "general")
    assert (cache.load("exact"), cache.peek("exact")) == ("value", "value")
    assert (cache.hits, cache.misses, len(cache), cache.values()) == (1, 0, 1, ["value"])
    cache.store("general", "another")
    assert cache.load("exact") == "another"
    cache.discard("general")
    assert (cache.load("exact"), cache.misses) == (None, 1)
    cache.store("general", "value")
    cache.clear()
    cache.store("general", "value")
    assert cache.load("exact") is None


def test_hit_counts_as_use() -> None:
    cache: MemoryCache[str] = MemoryCache(3)
    for key in "abc":
        cache.store(key, key.upper())
    assert [cache.load(key) for key in "abcbbaa"] == list("ABCBBAA")
    assert cache.values() == ["A", "B", "C"]
    assert [cache.load(key) for key in "aaa"] == list("AAA")
    assert cache.store("d", "D") == ["b"]
    assert (cache.load("b"), cache.load("a")) == (None, "A")


def test_more_keys_than_are_kept_at_hand_are_found() -> None:
    cache: MemoryCache[int] = MemoryCache(200)
    for key in range(200):
        cache.store(key, key + 1)
    for _ in range(2):
        assert [cache.load(key) for key in range(200)] == list(range(1, 201))
    assert (cache.hits, cache.misses) == (400, 0)


def test_retargeted_alias_is_followed() -> None:
    cache: MemoryCache[str] = MemoryCache(2)
    cache.store("a", "A")
    cache.store("b", "B")
    cache.alias("exact", "a")
    assert cache.load("exact") == "A"
    cache.alias("exact", "b")
    assert cache.load("exact") == "B"

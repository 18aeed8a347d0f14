from __future__ import annotations

from tvmify.cache import Key

ENTRIES = {"program": "x - y", "inputs": "float32[2]", "target": "llvm"}


def test_digest_ignores_entry_order() -> None:
    key, same = Key(ENTRIES), Key(dict(reversed(ENTRIES.items())))
    assert key == same
    assert key.digest == same.digest
    assert len(key.digest) == 64


def test_every_entry_counts() -> None:
    key = Key(ENTRIES)
    for name in ENTRIES:
        other = Key(ENTRIES | {name: "other"})
        assert other.digest != key.digest
        assert other != key
        assert other.differences(key) == [name]


def test_text_cannot_move_between_entries() -> None:
    assert Key({"a": "1", "b": ""}).digest != Key({"a": "", "b": "1"}).digest
    assert Key({"a": "1\nb 2"}).digest != Key({"a": "1", "b": "2"}).digest


def test_missing_entries_differ() -> None:
    assert Key({"a": "1"}).differences(Key({"a": "1", "b": "2"})) == ["b"]

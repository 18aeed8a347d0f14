from __future__ import annotations

import io
import json
import random
import stat
import zipfile
from collections.abc import Callable, Iterable

import pytest

from tests.cache.entries import KEY, OTHER, artifact
from tvmify.artifact import Artifact
from tvmify.cache import Key, packed
from tvmify.cache.manifest import Manifest, library_file
from tvmify.cache.stored import EntryFiles
from tvmify.errors import CacheError

MANIFEST, LIBRARY = f"{KEY.digest}/manifest.json", f"{KEY.digest}/module.so"


def archive(members: Iterable[tuple[str | zipfile.ZipInfo, bytes]], method: int = 0) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as new:
        for name, content in members:
            new.writestr(name, content)
    return file.getvalue()


def members() -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(packed.pack(KEY, artifact()))) as whole:
        return {name: whole.read(name) for name in whole.namelist()}


def test_entry_round_trips() -> None:
    content = packed.pack(KEY, artifact())
    assert packed.unpack(content) == (KEY, artifact())
    assert content == packed.pack(KEY, artifact())


def test_entries_come_back_in_their_order() -> None:
    file = io.BytesIO()
    pairs = [(OTHER, artifact(b"gelu")), (KEY, artifact(b"relu"))]
    digests = packed.write(
        file, [EntryFiles(Manifest.of(key, a), library_file(key, a)) for key, a in pairs]
    )
    reader = packed.Reader(file)
    assert digests == reader.digests == [OTHER.digest, KEY.digest]
    assert [reader.read(digest) for digest in digests] == pairs
    with pytest.raises(CacheError, match="2 entries"):
        packed.unpack(file.getvalue())


@pytest.mark.parametrize(
    "name",
    [
        "../evil",
        f"../{MANIFEST}",
        f"/{MANIFEST}",
        f"{KEY.digest}/../../module.so",
        f"{KEY.digest}\\module.so",
        f"{KEY.digest.upper()}/module.so",
        f"{KEY.digest}/",
        f"{LIBRARY}\n",
        f"{LIBRARY}.py",
        "x/module.so",
    ],
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(
        CacheError, match=r"is not a file of a cache entry|not named like a file|one name"
    ):
        packed.unpack(archive([*members().items(), (name, b"x")]))


def test_a_name_cannot_end_at_a_zero() -> None:
    content = archive([*members().items(), (f"{OTHER.digest}/module.so#../x", b"x")])
    with pytest.raises(CacheError):
        packed.unpack(content.replace(b"#../x", b"\0../x"))


def test_duplicate_members_are_refused() -> None:
    with pytest.warns(UserWarning, match="Duplicate"):
        content = archive([*members().items(), (LIBRARY, b"other")])
    with pytest.raises(CacheError, match=r"two records of one name: .*module.so"):
        packed.unpack(content)


def test_missing_members_are_named() -> None:
    for name in (MANIFEST, LIBRARY):
        kept = [(n, content) for n, content in members().items() if n != name]
        with pytest.raises(CacheError, match=f"{name}' is missing"):
            packed.unpack(archive(kept))


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFDIR, stat.S_IFCHR])
def test_links_and_devices_are_refused(kind: int) -> None:
    link = zipfile.ZipInfo(LIBRARY)
    link.external_attr = (kind | 0o777) << 16
    with pytest.raises(CacheError, match="not a plain file"):
        packed.unpack(archive([(MANIFEST, members()[MANIFEST]), (link, b"/etc/passwd")]))


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_bomb_is_refused_before_it_is_read(method: int) -> None:
    bomb = archive([(MANIFEST, members()[MANIFEST]), (LIBRARY, bytes(10 << 20))], method)
    assert len(bomb) < 1 << 17
    with pytest.raises(CacheError, match="compressed"):
        packed.unpack(bomb)


def test_sizes_are_not_believed() -> None:
    whole = archive([(MANIFEST, members()[MANIFEST]), (LIBRARY, b"c" * 0x1234)])
    size = (0x1234).to_bytes(4, "little")
    for claimed in (0x7FFFFFFF, 0x3FFFFFFF, 0x12345):
        larger = claimed.to_bytes(4, "little")
        with pytest.raises(CacheError, match=r"where it should be|cut off|between its records"):
            packed.unpack(whole.replace(size, larger))
        with pytest.raises(CacheError):  # in the table of contents alone
            packed.unpack(whole[:-200] + whole[-200:].replace(size, larger))


def test_entry_must_match_its_key() -> None:
    with pytest.raises(CacheError, match="is that of"):
        packed.unpack(
            archive((n.replace(KEY.digest, OTHER.digest), c) for n, c in members().items())
        )


def flip(manifest: dict) -> None:
    manifest["library"]["sha256"] = "0" * 64


def age(manifest: dict) -> None:
    manifest["format"] = 1


def empty(manifest: dict) -> None:
    manifest.clear()


@pytest.mark.parametrize("change", [flip, age, empty])
def test_a_manifest_of_another_kind_is_refused(change: Callable[[dict], None]) -> None:
    manifest = json.loads(members()[MANIFEST])
    change(manifest)
    with pytest.raises(CacheError):
        packed.unpack(archive([(MANIFEST, json.dumps(manifest).encode()), (LIBRARY, b"code")]))


@pytest.mark.parametrize("text", [b"[" * 100_000, b"\xff", b"", b"[]", b"1" * 10_000, b'"\\ud800"'])
def test_invalid_manifest_is_refused(text: bytes) -> None:
    with pytest.raises(CacheError):
        packed.unpack(archive([(MANIFEST, text), (LIBRARY, b"code")]))


@pytest.mark.parametrize("content", [b"", b"PK\x05\x06", b"code" * 100, b"\x1f\x8b" + bytes(100)])
def test_invalid_archive_is_refused(content: bytes) -> None:
    with pytest.raises(CacheError, match="not an archive"):
        packed.unpack(content)


def test_empty_archive_is_refused() -> None:
    with pytest.raises(CacheError, match="no entries"):
        packed.unpack(archive([]))


def test_no_damage_passes() -> None:
    """After any change, reading gives an error or the original contents."""
    original = packed.pack(KEY, artifact(b"code" * 50))
    expected = KEY, artifact(b"code" * 50)
    generator = random.Random(0)
    refused = 0
    for _ in range(1500):
        content = bytearray(original)
        match generator.randrange(4):
            case 0:
                content = content[: generator.randrange(len(content))]
            case 1:
                content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
            case 2:
                start = generator.randrange(len(content))
                content[start : start + 8] = generator.randbytes(8)
            case 3:
                start, end = sorted(generator.sample(range(len(content)), 2))
                del content[start:end]
        read: tuple[Key, Artifact] | None = None
        try:
            read = packed.unpack(bytes(content))
        except CacheError:
            refused += 1
        assert read in (None, expected)
    assert refused > 1000

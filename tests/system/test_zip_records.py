"""An archive that two readers could read differently is refused; others are read alike."""

from __future__ import annotations

import io
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tvmify.system.zip_records import AmbiguousArchive, content, read_records

CONTENTS = {"a/data.pkl": b"weights", "a/data/0": bytes(range(64)), "a/code/m.py": b"x = 1\n" * 99}
UNICODE_PATH = 0x7075


def as_torch_writes(contents: dict[str, bytes]) -> bytes:
    """Return an archive by PyTorch's writer, which adds padding, and sizes after the contents."""
    file = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(file)
    for name, data in contents.items():
        writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    return file.getvalue()


def as_python_writes(contents: dict[str, bytes] = CONTENTS) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in contents.items():
            method = zipfile.ZIP_DEFLATED if name.endswith(".py") else zipfile.ZIP_STORED
            archive.writestr(zipfile.ZipInfo(name), data, method)
    return file.getvalue()


def both() -> bytes:
    """Return an archive like a saved file: PyTorch's, with records added by `zipfile`."""
    file = io.BytesIO(as_torch_writes({"data/0": bytes(640), "data.pkl": b"weights"}))
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("archive/extra/manifest", b"{}")
    return file.getvalue()


def ours(data: bytes, path: Path) -> dict[str, bytes]:
    path.write_bytes(data)
    with path.open("rb") as file:
        return {record.name: b"".join(content(file, record)) for record in read_records(file)}


def pythons(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def torchs(data: bytes) -> dict[str, bytes]:
    reader = torch._C.PyTorchFileReader(io.BytesIO(data))
    root = next(iter(pythons(data))).partition("/")[0]
    return {f"{root}/{name}": reader.get_record(name) for name in reader.get_all_records()}


@pytest.mark.parametrize("write", [as_python_writes, both, lambda: as_torch_writes({"x": b"y"})])
def test_records_match_other_readers(tmp_path: Path, write: Callable[[], bytes]) -> None:
    data = write()
    assert ours(data, tmp_path / "archive") == pythons(data)


def test_sizes_of_64_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 50)
    data = as_python_writes()
    assert b"PK\6\7" in data
    assert ours(data, tmp_path / "archive") == CONTENTS


# ------------------------------------------------------------------------------- two readings


def entry_of(data: bytes, name: bytes) -> int:
    """Return the position of a record's entry in the directory."""
    return data.index(name, data.index(b"PK\1\2")) - 46


def patched(data: bytes, place: int, new: bytes) -> bytes:
    return data[:place] + new + data[place + len(new) :]


def with_extra(data: bytes, name: bytes, extra: bytes) -> bytes:
    """Add an extra field to the directory's entry of a record."""
    place = entry_of(data, name)
    data = patched(data, place + 30, struct.pack("<H", len(extra)))
    end = place + 46 + len(name)
    length, start = struct.unpack("<2L", data[-10:-2])
    data = data[:end] + extra + data[end:]
    return data[:-10] + struct.pack("<2L", length + len(extra), start) + data[-2:]


def renamed_by_extra_field(data: bytes) -> bytes:
    """Exchange two records for readers of Info-ZIP's Unicode Path field, such as Python 3.12."""
    for name, other in ((b"a/data.pkl", b"a/data/0"), (b"a/data/0", b"a/data.pkl")):
        path = struct.pack("<BL", 1, zlib.crc32(name)) + other
        data = with_extra(data, name, struct.pack("<2H", UNICODE_PATH, len(path)) + path)
    return data


def in_local_header(data: bytes) -> bytes:
    return data.replace(b"a/data.pkl", b"a/data.pkk", 1)


def in_directory(data: bytes) -> bytes:
    return patched(data, entry_of(data, b"a/data.pkl") + 46, b"a/data.pkk")


def marked_as_folder(data: bytes) -> bytes:
    return patched(data, entry_of(data, b"a/data.pkl") + 38, b"\x10")


def encrypted(data: bytes) -> bytes:
    return patched(data, entry_of(data, b"a/data.pkl") + 8, b"\1")


def with_another_offset(data: bytes) -> bytes:
    other = data[entry_of(data, b"a/data/0") + 42 :][:4]
    return patched(data, entry_of(data, b"a/data.pkl") + 42, other)


def with_fewer_records(data: bytes) -> bytes:
    return data[:-14] + struct.pack("<2H", 2, 2) + data[-10:]


def with_a_comment(data: bytes) -> bytes:
    return data[:-2] + struct.pack("<H", 22) + data[-22:]


def behind_something(data: bytes) -> bytes:
    return b"MZ" + data


def behind_something_that_counts(data: bytes) -> bytes:
    start = struct.unpack("<L", data[-6:-2])[0]
    return b"MZ" + data[:-6] + struct.pack("<L", start + 2) + data[-2:]


def with_another_size(data: bytes) -> bytes:
    return patched(data, entry_of(data, b"a/data/0") + 24, struct.pack("<L", 63))


def compressed_otherwise(data: bytes) -> bytes:
    return patched(data, entry_of(data, b"a/data/0") + 10, b"\x0c")


@pytest.mark.parametrize(
    "change",
    [
        *(renamed_by_extra_field, in_local_header, in_directory, marked_as_folder, encrypted),
        *(with_another_offset, with_fewer_records, with_a_comment, behind_something),
        *(behind_something_that_counts, with_another_size, compressed_otherwise),
    ],
)
def test_an_archive_with_two_readings_is_refused(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    data = as_python_writes()
    assert change(data) != data
    with pytest.raises(AmbiguousArchive):
        ours(change(data), tmp_path / "archive")


@pytest.mark.parametrize("names", [("a/Net.py", "a/net.py"), ("a/x\0y", "a/z"), ("a/", "a/b")])
def test_ambiguous_names_are_refused(tmp_path: Path, names: tuple[str, str]) -> None:
    data = as_python_writes(dict.fromkeys((name.replace("\0", "#") for name in names), b"1"))
    with pytest.raises(AmbiguousArchive):
        ours(data.replace(b"x#y", b"x\0y"), tmp_path / "archive")


def test_wrong_uncompressed_size_is_refused(tmp_path: Path) -> None:
    data = as_python_writes()
    size = struct.pack("<L", len(CONTENTS["a/code/m.py"]))
    for other in (1, 10_000):
        with pytest.raises(AmbiguousArchive, match="cut off"):
            ours(data.replace(size, struct.pack("<L", other)), tmp_path / "archive")


@pytest.mark.parametrize("write", [as_python_writes, both])
def test_no_damage_shows_two_readers_different_records(
    tmp_path: Path, write: Callable[[], bytes]
) -> None:
    data, chance = write(), random.Random(0)
    directory, accepted = data.index(b"PK\1\2"), 0
    for _ in range(1500):
        changed = bytearray(data)
        for _ in range(chance.choice((1, 1, 2, 4))):
            place = chance.choice(
                (chance.randrange(len(data)), chance.randrange(directory, len(data)))
            )
            changed[place] = chance.choice(
                (0, 1, 8, 0x10, 0xFF, changed[place] ^ (1 << chance.randrange(8)))
            )
        try:
            found = ours(bytes(changed), tmp_path / "archive")
        except AmbiguousArchive:
            continue
        accepted += 1
        for reader in (pythons, torchs):
            try:
                theirs = reader(bytes(changed))
            except (zipfile.BadZipFile, RuntimeError, UnicodeDecodeError, zlib.error):
                continue  # a reader that refuses it reads nothing else
            assert theirs == found, reader
    assert accepted

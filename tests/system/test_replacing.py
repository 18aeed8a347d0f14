"""A file is replaced completely, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tvmify.system.replacing import replacing


def test_errors_leave_only_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 255)  # the longest possible name
    with replacing(path) as file:
        file.write(b"old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as file:
        file.write(b"a part")
        assert path.read_bytes() == b"old"
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert [*tmp_path.iterdir()] == [path]
    with replacing(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"


def test_a_file_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch(0o600)
    with replacing(path) as file:
        file.write(b"new")
    assert path.stat().st_mode & 0o777 == 0o600


def test_devices_and_pipes_stay(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/null")):
        with pytest.raises(OSError, match=f"not a regular file.*{path.name}"), replacing(path):
            pass
    assert pipe.is_fifo() and [*tmp_path.iterdir()] == [pipe]


def test_errors_name_the_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "file"):
        with pytest.raises(OSError, match=f"directory: '{path}'$"), replacing(path):
            pass

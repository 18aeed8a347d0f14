"""A file is replaced at once, or stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from tvmify.system.replacing import replacing


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 255)  # the longest name there is
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

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tvmify import OptionError
from tvmify.system import variables


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), ("", False)])
def test_disabled_reads_the_environment(
    monkeypatch: pytest.MonkeyPatch, value: str, expected: bool
) -> None:
    monkeypatch.setenv("TVMIFY_DISABLE", value)
    assert variables.disabled() is expected


def test_all_variables_are_listed() -> None:
    source = Path(variables.__file__).read_text("utf-8")
    assert set(re.findall(r"TVMIFY_[A-Z_]+", source)) == set(variables.VARIABLES)


def test_a_relative_cache_directory_does_not_follow_chdir(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TVMIFY_CACHE_DIR", f"cache of {tmp_path.name}")
    monkeypatch.chdir(tmp_path)
    before = variables.cache_directory()
    monkeypatch.chdir("/")
    assert before == variables.cache_directory() == tmp_path / f"cache of {tmp_path.name}"


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("", (10**10, None)),
        ("20GB", (20 * 10**9, None)),
        ("1.5 gib", (3 << 29, None)),
        ("500 entries", (None, 500)),
        ("1 entry, 7 B", (7, 1)),
        ("0 B", (0, None)),
    ],
)
def test_the_size_of_the_cache_is_bytes_or_entries(
    monkeypatch: pytest.MonkeyPatch, text: str, limits: tuple[int | None, int | None]
) -> None:
    monkeypatch.setenv("TVMIFY_CACHE_SIZE", text)
    assert variables.cache_limits() == limits


@pytest.mark.parametrize("text", ["much", "20 XB", "-1 GB", "1e3", "5 GB and more", ","])
def test_another_size_of_the_cache_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("TVMIFY_CACHE_SIZE", text)
    with pytest.raises(OptionError, match=f"TVMIFY_CACHE_SIZE is '{text}'.*500 entries"):
        variables.cache_limits()

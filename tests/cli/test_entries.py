from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.caches import ENTRIES, add, run
from tvmify.artifact.expressions import Condition, Term
from tvmify.artifact.shapes import Shapes, Symbol
from tvmify.cache.stored import LIBRARY, MANIFEST


def test_listing_is_sorted_by_last_use(tmp_path: Path) -> None:
    old = add(tmp_path, 60)
    new = add(tmp_path, 0, inputs="0: int64[7] cpu\nT", torch="2.14.0")
    result = run("list", "--cache", tmp_path)
    assert result.exit_code == 0
    first, second = (result.output.index(key.digest[:12]) for key in (new, old))
    assert first < second
    for text in ("2 entries", "int64[7] cpu", "x86-64 +avx2", "1 ms, eager 2 ms"):
        assert text in result.output
    entries = json.loads(run("list", "--cache", tmp_path, "--json").output)["entries"]
    assert [entry["digest"] for entry in entries] == [new.digest, old.digest]
    assert entries[0]["torch"] == "2.14.0"


def test_the_directory_of_the_environment(cache_directory: Path) -> None:
    result = run("list")
    assert result.exit_code == 0 and "0 entries" in result.output
    key = add(cache_directory)
    assert key.digest[:12] in run("list").output
    assert run("show", key.digest[:6]).exit_code == 0


def test_listing_names_damaged_entries(tmp_path: Path) -> None:
    key = add(tmp_path)
    (tmp_path / key.digest / MANIFEST).write_text("{}")
    result = run("list", "--cache", tmp_path)
    assert result.exit_code == 0 and "damaged: its manifest" in result.output
    (entry,) = json.loads(run("list", "--json", "--cache", tmp_path).output)["entries"]
    assert "manifest" in entry["damaged"]


def test_all_of_an_entry(tmp_path: Path) -> None:
    key = add(tmp_path, weights="fc.weight: float32[3, 4] cpu")
    result = run("show", key.digest[:8], "--cache", tmp_path)
    assert result.exit_code == 0, result.output
    for text in (
        key.digest,
        "intact",
        "2 threads: 1 ms, eager 2 ms",
        "fc.weight: float32[3, 4] cpu",
        "accuracy='default'",
        "fused_relu  elementwise",
        "aten.relu.default",
        "    1  %1: Tensor = aten::relu(%0)",
    ):
        assert text in result.output
    document = json.loads(run("show", key.digest, "--json", "--cache", tmp_path).output)
    assert document["key"] == key.entries
    assert document["artifact"]["report"]["kernels"] == {"fused_relu": "elementwise"}


def test_served_shapes_are_listed(tmp_path: Path) -> None:
    even = Condition("==", (Term("%", ("s0", 2)), 0))
    shapes = Shapes((Symbol("s0", 2, 512),), {0: (1, "s0")}, (even,), (48,))
    key = add(tmp_path, inputs="0: float32[1, s0] cpu\nT", shapes=shapes)
    lines = ["2 <= s0 <= 512, tuned for 48", "s0 % 2 == 0"]
    listed, shown = run("list", "--cache", tmp_path), run("show", key.digest, "--cache", tmp_path)
    assert f"float32[1, s0] cpu; {'; '.join(lines)}" in listed.output
    assert "\n".join(lines) in shown.output
    document = json.loads(run("show", key.digest, "--json", "--cache", tmp_path).output)
    assert Shapes.from_json(document["artifact"]["shapes"]) == shapes
    (entry,) = json.loads(run("list", "--json", "--cache", tmp_path).output)["entries"]
    assert entry["shapes"] == lines


def test_which_entry_is_meant(tmp_path: Path) -> None:
    add(tmp_path)
    add(tmp_path, torch="1")
    none = run("show", "nothing", "--cache", tmp_path)
    assert none.exit_code == 1 and "tvmify list" in none.stderr and not none.stdout
    several = run("show", "", "--cache", tmp_path)
    assert several.exit_code == 2 and "2 entries begin with ''" in several.stderr
    assert run("show").exit_code == 2


def test_a_damaged_entry_is_not_shown(tmp_path: Path) -> None:
    key = add(tmp_path)
    (tmp_path / key.digest / LIBRARY).write_bytes(b"cOde")
    result = run("show", key.digest, "--cache", tmp_path)
    assert result.exit_code == 1 and "SHA-256" in result.stderr and not result.stdout


@pytest.mark.parametrize("command", [["list"], ["show", "00"], ["verify"], ["prune"], ["clear"]])
def test_unusable_directory_is_an_error(tmp_path: Path, command: list[str]) -> None:
    result = run(*command, "--cache", tmp_path / "none")
    assert result.exit_code == 2 and "is not a directory" in result.stderr
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    result = run(*command, "--cache", tmp_path / "open")
    assert result.exit_code == 1 and "chmod 700" in result.stderr


EVIL = "\x1b[2J[link=x]y[/link]\u202e"


def test_escape_sequences_in_entries_are_neutralized(tmp_path: Path) -> None:
    names = ("program", "inputs", "target", "options", "torch", "weights", "flavour")
    add(tmp_path)
    add(
        tmp_path,
        -60,
        report={EVIL: {EVIL: EVIL}, "kernels": EVIL},
        **dict.fromkeys(names, f"{EVIL}: {EVIL}\n{EVIL}"),
    )
    digest = json.loads(run("list", "--cache", tmp_path, "--json").output)["entries"][0]["digest"]
    for command in (["list"], ["show", digest], ["explain-miss"], ["explain-miss", digest]):
        for form in ([], ["--json"]):
            result = run(*command, *form, "--cache", tmp_path)
            assert result.exit_code == 0, result.output
            assert "\x1b" not in result.output and "\u202e" not in result.output
            assert form or "[link=x]" in result.output or command == ["list"]


def test_reports_of_any_form_are_shown(tmp_path: Path) -> None:
    for report in ({}, {"kernels": 3}, {"kernels": {"a": [1, {}]}, "x": None}):
        key = add(tmp_path, report=report)
        assert run("show", key.digest, "--cache", tmp_path).exit_code == 0
        (tmp_path / key.digest / MANIFEST).unlink()


def test_why_the_latest_was_built(tmp_path: Path) -> None:
    old = add(tmp_path, 60)
    far = add(tmp_path, 90, torch="1", options="", program="return")
    new = add(tmp_path, 0, inputs=ENTRIES["inputs"].replace("[1", "[2"))
    result = run("explain-miss", "--cache", tmp_path)
    assert result.exit_code == 0
    assert old.digest in result.output and new.digest in result.output
    assert "  inputs 0: shape [2, 3] → [1, 3]\n" in result.output
    document = json.loads(run("explain-miss", far.digest, "--json", "--cache", tmp_path).output)
    assert document["entry"] == far.digest
    assert document["nearest"] in (old.digest, new.digest)
    assert "torch: 1 → 2.13.0" in document["differences"]


def test_nothing_to_explain(tmp_path: Path) -> None:
    result = run("explain-miss", "--cache", tmp_path)
    assert result.exit_code == 1 and "no entries" in result.stderr
    key = add(tmp_path)
    broken = add(tmp_path, 5, torch="1")
    (tmp_path / broken.digest / MANIFEST).write_text("")
    result = run("explain-miss", "--cache", tmp_path)
    assert result.exit_code == 0 and "only entry" in result.output
    document = json.loads(run("explain-miss", "--json", "--cache", tmp_path).output)
    assert document == {"entry": key.digest, "nearest": None, "differences": []}
    assert run("explain-miss", broken.digest, "--cache", tmp_path).exit_code == 1


def test_a_directory_may_be_relative_or_below_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(tmp_path / "cache")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for directory in ("~/cache", "cache"):
        result = run("list", "--cache", directory)
        assert result.stdout.startswith(f"{tmp_path / 'cache'}: 1 entries")

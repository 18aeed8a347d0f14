"""Contenders that run passes: their arguments, and the printed table."""

from __future__ import annotations

import sys

import pytest

from benchmarks import passes


def main() -> None:
    """Run as a contender that counts its passes, or cannot run."""
    name = sys.argv[2]
    if name == "broken":
        raise RuntimeError("there is no such thing")
    made: list[int] = []
    passes.work(lambda: passes.Pass(lambda: made.append(1), lambda: len(made)))


def test_each_contender_makes_its_passes_and_a_broken_one_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    passes.compare("tests.benchmarks.test_passes", ["first", "broken", "second"], [], rounds=2)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["first", "broken", "first", "second"]
    assert "no such thing" in " ".join(lines[1])
    assert [line[-1] for line in lines[2:]] == ["1", "1"]  # after the first pass


if __name__ == "__main__":
    main()

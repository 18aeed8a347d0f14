"""When a thread runs its loops alone, with a fake clock."""

from __future__ import annotations

import subprocess
from itertools import groupby
from pathlib import Path

import pytest

import tvmify

#: Reads the wait of each loop if it forked, in microseconds; every loop has 200 of work for one
#: thread. Writes 1 for each loop that ran alone.
PROGRAM = """
#include <iostream>

#include "backoff.h"

int main() {
  using std::chrono::microseconds;
  tvmify::Backoff backoff;
  tvmify::Clock::time_point now{};
  for (int waited; std::cin >> waited;) {
    const bool alone = backoff.alone(now);
    const auto done = now + microseconds(alone ? 200 : 100);
    const auto joined = done + microseconds(alone ? 0 : waited);
    if (!alone) backoff.add(now, now, done, joined, /*tasks=*/2, /*own=*/1);
    std::cout << alone;
    now = joined;
  }
}
"""
#: Loops that run alone in the shortest pause, of 10 ms, and in the longest, of a second.
SHORTEST, LONGEST = 50, 5000


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backoff")
    source, program = folder / "backoff.cpp", folder / "backoff"
    source.write_text(PROGRAM)
    native = Path(tvmify.__file__).parent / "native"
    subprocess.run(["g++", "-std=c++17", f"-I{native}", source, "-o", program], check=True)
    return program


def pauses(program: Path, waits: list[int]) -> list[int]:
    """Return how many loops ran alone in each pause."""
    text = " ".join(map(str, waits))
    result = subprocess.run([program], input=text, capture_output=True, text=True, check=True)
    return [len(list(loops)) for alone, loops in groupby(result.stdout) if alone == "1"]


def test_pauses_grow_across_consecutive_waits(program: Path):
    found = pauses(program, [5000] * 30_000)
    assert found[:8] == [min(SHORTEST * 2**i, LONGEST) for i in range(8)]
    assert found[8] == LONGEST


def test_one_wait_is_one_short_pause(program: Path):
    assert pauses(program, [10] * 1000 + [8000] + [10] * 1000) == [SHORTEST]


@pytest.mark.parametrize("calm", [200, 1000])  # loops, of 0.1 ms: less, and more, than the pause
def test_pauses_reset_after_recovery(program: Path, calm: int):
    trouble = [5000] * (1 + SHORTEST + 1 + 2 * SHORTEST + 1 + 4 * SHORTEST)
    found = pauses(program, [*trouble, *[10] * calm, 8000, *[10] * 1000])
    assert found == [SHORTEST, 2 * SHORTEST, 4 * SHORTEST, SHORTEST]


def test_waits_that_help_makes_up_for_are_none(program: Path):
    assert pauses(program, [90] * 100_000) == []

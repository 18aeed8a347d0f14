"""Runs the operators in shards, each in its own process, which may crash or hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from conformance import records
from conformance.operators import CRASHED, DEFAULT_DTYPES, Case, Result, operators


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes
    ----------
    folder
        Where results are appended; cases that have one there do not run again.
    shards
        The number of parts that the operators are divided into.
    samples
        The number of samples per operator and dtype, from the first; 0 for all.
    only
        Names of operators; empty for all.
    limit
        Seconds for one case, after which its process counts as hanging.
    dtypes
        Names of dtypes.
    """

    folder: Path
    shards: int
    samples: int
    only: frozenset[str]
    limit: float
    dtypes: tuple[str, ...] = DEFAULT_DTYPES

    def results(self, shard: int) -> Path:
        """Return the file to which a shard appends its results."""
        return self.folder / f"shard-{shard}.jsonl"

    def current(self, shard: int) -> Path:
        """Return the file in which a shard names its current case."""
        return self.folder / f"shard-{shard}.case"


def work(plan: Plan, shard: int, say: Callable[[Case, Result], object]) -> None:
    """Run, in this process, the cases of a shard that have no result yet."""
    torch.set_num_threads(1)  # as many shards as cores run at once
    done = records.read(plan.folder)
    for operator in operators(plan.only, plan.dtypes)[shard :: plan.shards]:
        for number, (case, arguments) in enumerate(operator.samples()):
            if plan.samples and number >= plan.samples:
                break
            if case not in done:
                plan.current(shard).write_text(str(case), encoding="utf-8")
                result = operator.run(arguments)
                records.append(plan.results(shard), case, result)
                say(case, result)


def run(plan: Plan, jobs: int, command: list[str], say: Callable[[Case, Result], object]) -> None:
    """Run all shards, some at a time.

    Parameters
    ----------
    plan
        What to run.
    jobs
        The number of processes at a time.
    command
        Runs `work` for the shard whose number is appended.
    say
        Called for each crash; the processes report their other results themselves.

    Raises
    ------
    RuntimeError
        A process ended before its first case.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        shards = [
            pool.submit(_supervise, plan, shard, [*command, str(shard)], say)
            for shard in range(plan.shards)
        ]
        for shard in shards:
            shard.result()


def _supervise(
    plan: Plan, shard: int, command: list[str], say: Callable[[Case, Result], object]
) -> None:
    current = plan.current(shard)
    while True:
        current.unlink(missing_ok=True)
        ended = _watched(command, current, plan.limit)
        if not ended:
            current.unlink(missing_ok=True)
            return
        if not current.exists():
            raise RuntimeError(f"{' '.join(command)}: {ended} before its first case")
        case = Case.parse(current.read_text(encoding="utf-8"))
        crash = Result(CRASHED, reason=ended)
        records.append(plan.results(shard), case, crash)
        say(case, crash)


def _watched(command: list[str], current: Path, limit: float) -> str:
    """Run a process; return how it failed, empty if it succeeded."""
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True) as process:
        changed, since = 0.0, time.monotonic()
        try:
            while process.poll() is None:
                time.sleep(0.2)
                stamp = current.stat().st_mtime if current.exists() else 0.0
                if stamp != changed:
                    changed, since = stamp, time.monotonic()
                elif time.monotonic() - since > limit:
                    return f"no end within {limit:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    if code < 0:
        return f"the process died: {signal.Signals(-code).name}"
    return f"the process ended with {code}" if code else ""


def this_module(arguments: list[str]) -> list[str]:
    """Return the command line that calls ``conformance.opinfo`` with these arguments."""
    return [sys.executable, "-m", "conformance.opinfo", *arguments]

"""Networks of transformers and of other libraries through the decorator, compared with eager.

    python -m conformance.models run [--table libraries] [--only "bert gpt*"] [--jobs 1]
    python -m conformance.models report [--table libraries]

Each network runs in its own process, so that a crash is a result like any other. Results are kept
in ``build/models`` or ``build/libraries``; the next run tries the missing networks, or those that
``--only`` names. ``report`` prints the table and writes it into ``docs/coverage.md``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

from rich.console import Console
from rich.table import Table

from conformance.architectures import ARCHITECTURES
from conformance.document import replace_section
from conformance.libraries import LIBRARIES
from conformance.trial import SIZES, Subject, Trial, attempt

#: The tables, by the name of their section in the document.
TABLES: dict[str, Mapping[str, Subject]] = {"models": ARCHITECTURES, "libraries": LIBRARIES}
RECORDS = "trials.jsonl"
PATIENCE = 900  # seconds for one network


def main() -> None:
    """Run an action; the processes of ``run`` use ``one``."""
    parser = argparse.ArgumentParser(description="Networks against eager")
    parser.add_argument("step", choices=["run", "report", "one"])
    parser.add_argument("--only", default="", help="names or patterns, such as 'bert gpt*'")
    parser.add_argument("--jobs", type=int, default=1, help="how many run at a time")
    parser.add_argument("--table", choices=list(TABLES), default="models")
    given = parser.parse_args()
    if given.step == "one":
        trial = attempt(given.only, TABLES[given.table][given.only])
        sys.stdout.write(json.dumps(dataclasses.asdict(trial)))
        return
    folder = Path("build", given.table)
    folder.mkdir(parents=True, exist_ok=True)
    if given.step == "run":
        run(given.table, given.only.split(), given.jobs, folder)
    trials = read(folder, TABLES[given.table])
    show(trials.values())
    if given.step == "report":
        replace_section(given.table, document(trials.values()))


def run(table: str, only: list[str], jobs: int, folder: Path) -> None:
    """Try the named networks, or those not tried before; write each result at once."""
    known = read(folder, TABLES[table])
    console = Console(highlight=False)
    names = [
        name
        for name in TABLES[table]
        if (any(fnmatch(name, pattern) for pattern in only) if only else name not in known)
    ]
    with ThreadPoolExecutor(jobs) as pool, (folder / RECORDS).open("a") as records:
        for trial in pool.map(lambda name: _in_a_process(table, name, folder), names):
            records.write(json.dumps(dataclasses.asdict(trial)) + "\n")
            records.flush()
            line = f"{trial.name}: {_verdict(trial)}, {how_it_ran(trial)}"
            console.print(line, style="" if trial.right else "red", markup=False, soft_wrap=True)


def _in_a_process(table: str, name: str, folder: Path) -> Trial:
    log = folder / f"{name}.log"
    steps = ["one", "--table", table, "--only", name]
    command = [sys.executable, "-m", "conformance.models", *steps]
    kind = TABLES[table][name].kind
    try:
        with log.open("w") as errors:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
                timeout=PATIENCE,
                text=True,
                check=False,
            )
    except subprocess.TimeoutExpired:
        return Trial(name, kind, difference=f"no end after {PATIENCE} s")
    if done.returncode < 0:
        name_of_signal = signal.Signals(-done.returncode).name
        return Trial(name, kind, difference=f"the process died: {name_of_signal}")
    if done.returncode > 0:
        lines = log.read_text(errors="replace").strip().splitlines()
        return Trial(name, kind, difference=lines[-1] if lines else "the process failed")
    return Trial(**json.loads(done.stdout.splitlines()[-1]))


def read(folder: Path, table: Mapping[str, Subject]) -> dict[str, Trial]:
    """Return the last result of each network, in the order of the table."""
    path = folder / RECORDS
    lines = path.read_text().splitlines() if path.exists() else []
    trials = {trial.name: trial for trial in (Trial(**json.loads(line)) for line in lines)}
    return {name: trials[name] for name in table if name in trials}


def show(trials: Iterable[Trial]) -> None:
    """Print a table, and the number of correct networks."""
    trials = list(trials)
    table = Table("network", "kind", "right", "ran", "sizes", "error", "eager's", box=None)
    for trial in trials:
        table.add_row(*_row(trial), style="" if trial.right else "red")
    console = Console()
    console.print(table)
    console.print(summary(trials), markup=False)


def summary(trials: Iterable[Trial]) -> str:
    """Say how many are correct and how many ran compiled."""
    trials = list(trials)
    right = sum(trial.right for trial in trials)
    compiled = sum(trial.right and trial.compiled for trial in trials)
    whole = sum(trial.right and trial.compiled and not trial.bridged for trial in trials)
    return (
        f"{right} of {len(trials)} networks are right; {compiled} are one compiled program, "
        f"{whole} of them without a call of PyTorch's."
    )


def document(trials: Iterable[Trial]) -> str:
    """Return the section of the document: the summary and a table in Markdown."""
    trials = list(trials)
    lines = [
        summary(trials),
        "",
        f"Each is called with {len(set(SIZES))} pairs of a batch and, where there is text, a "
        "length; the column says whether one program, or one for each class, serves all pairs "
        "after the first. Error is the largest against float64 over the largest output, of the "
        "tensor where ours is largest; beside it eager PyTorch's of the same tensor.",
        "",
        "| network | kind | right | ran | sizes | error | eager's |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join(lines + [f"| {' | '.join(_row(trial))} |" for trial in trials])


def how_it_ran(trial: Trial) -> str:
    """Say whether all of it was compiled, and what was not."""
    if not trial.compiled:
        # leave out where packages are installed
        reason = re.sub(r"/\S+/site-packages/", "", trial.reason)
        return ": ".join(filter(None, ["in parts" if trial.programs else "eager", reason]))
    if trial.bridged:
        called = ", ".join(f"{count} × {name}" for name, count in sorted(trial.bridged.items()))
        return f"compiled, bridged {called}"
    return "compiled"


def _verdict(trial: Trial) -> str:
    return "right" if trial.right else f"wrong: {trial.difference}"


def _sizes(trial: Trial) -> str:
    if not trial.compiled:
        return ""
    if trial.one_shape:
        return f"a program each: {trial.one_shape}"
    return f"any, {trial.programs} programs"


def _row(trial: Trial) -> list[str]:
    ran = trial.compiled or bool(trial.reason)
    return [
        trial.name,
        trial.kind,
        "yes" if trial.right else f"no: {trial.difference}",
        how_it_ran(trial),
        _sizes(trial),
        f"{trial.error:.1e}" if ran and trial.right else "",
        f"{trial.eager_error:.1e}" if ran and trial.right else "",
    ]


if __name__ == "__main__":
    main()

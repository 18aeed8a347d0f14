"""Networks of transformers and of other libraries, compiled and compared with eager.

    python -m conformance.models run [--table libraries] [--only "bert gpt*"] [--jobs 1]
    python -m conformance.models report [--table libraries]

Each network is compiled by the decorator, and by ``torch.compile(network, backend="tvmify")``. Each
such trial runs in its own process, so that a crash is a result like any other. Results are kept in
``build/models`` or ``build/libraries``; the next run makes the missing trials, or those of the
networks that ``--only`` names. ``report`` prints the table and writes it into ``docs/coverage.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from fnmatch import fnmatch
from pathlib import Path

from rich.console import Console
from rich.table import Table

from conformance.architectures import ARCHITECTURES
from conformance.document import replace_section
from conformance.libraries import LIBRARIES
from conformance.trial import SIZES, WAYS, Subject, Trial, attempt

#: The tables, by the name of their section in the document.
TABLES: dict[str, Mapping[str, Subject]] = {"models": ARCHITECTURES, "libraries": LIBRARIES}
RECORDS = "trials.jsonl"
PATIENCE = 900  # seconds for one trial
_COLUMNS = ["network", "kind", "right", "ran", "sizes", "error", "eager's", "torch.compile"]


def main() -> None:
    """Run an action; the processes of ``run`` use ``one``."""
    parser = argparse.ArgumentParser(description="Networks against eager")
    parser.add_argument("step", choices=["run", "report", "one"])
    parser.add_argument("--only", default="", help="names or patterns, such as 'bert gpt*'")
    parser.add_argument("--jobs", type=int, default=1, help="how many run at a time")
    parser.add_argument("--way", choices=list(WAYS), default="decorator", help="for 'one'")
    parser.add_argument("--table", choices=list(TABLES), default="models")
    given = parser.parse_args()
    if given.step == "one":
        trial = attempt(given.only, TABLES[given.table][given.only], way=given.way)
        sys.stdout.write(json.dumps(asdict(trial)))
        return
    folder = Path("build", given.table)
    folder.mkdir(parents=True, exist_ok=True)
    if given.step == "run":
        run(given.table, given.only.split(), given.jobs, folder)
    decorated, compiled = (read(folder, TABLES[given.table], way) for way in WAYS)
    show(decorated, compiled)
    if given.step == "report":
        replace_section(given.table, document(decorated, compiled))


def run(table: str, only: list[str], jobs: int, folder: Path) -> None:
    """Try the named networks, or those not tried before; write each result at once."""
    known = {way: read(folder, TABLES[table], way) for way in WAYS}
    console = Console(highlight=False)
    todo = [
        (name, way)
        for name in TABLES[table]
        for way in WAYS
        if (any(fnmatch(name, pattern) for pattern in only) if only else name not in known[way])
    ]
    with ThreadPoolExecutor(jobs) as pool, (folder / RECORDS).open("a") as records:
        for trial in pool.map(lambda each: _in_a_process(table, each[0], each[1], folder), todo):
            records.write(json.dumps(asdict(trial)) + "\n")
            records.flush()
            line = f"{trial.name}, {trial.way}: {_verdict(trial)}, {how_it_ran(trial)}"
            console.print(line, style="" if trial.right else "red", markup=False, soft_wrap=True)


def _in_a_process(table: str, name: str, way: str, folder: Path) -> Trial:
    log = folder / f"{name}.{way}.log"
    steps = ["one", "--table", table, "--only", name, "--way", way]
    command = [sys.executable, "-m", "conformance.models", *steps]
    trial = Trial(name, TABLES[table][name].kind, way=way)
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
        return replace(trial, difference=f"no end after {PATIENCE} s")
    if done.returncode < 0:
        name_of_signal = signal.Signals(-done.returncode).name
        return replace(trial, difference=f"the process died: {name_of_signal}")
    if done.returncode > 0:
        lines = log.read_text(errors="replace").strip().splitlines()
        return replace(trial, difference=lines[-1] if lines else "the process failed")
    return Trial(**json.loads(done.stdout.splitlines()[-1]))


def read(folder: Path, table: Mapping[str, Subject], way: str) -> dict[str, Trial]:
    """Return the last result of each network by one way, in the order of the table."""
    path = folder / RECORDS
    lines = path.read_text().splitlines() if path.exists() else []
    all_trials = [Trial(**json.loads(line)) for line in lines]
    trials = {trial.name: trial for trial in all_trials if trial.way == way}
    return {name: trials[name] for name in table if name in trials}


def show(decorated: Mapping[str, Trial], compiled: Mapping[str, Trial]) -> None:
    """Print a table, and the number of correct networks."""
    table = Table(*_COLUMNS, box=None)
    for name, trial in decorated.items():
        other = compiled.get(name)
        is_right = trial.right and (other is None or other.right)
        table.add_row(*_row(trial, other), style="" if is_right else "red")
    console = Console()
    console.print(table)
    console.print(summary(decorated.values(), compiled.values()), markup=False)


def summary(decorated: Iterable[Trial], compiled: Iterable[Trial]) -> str:
    """Say how many are correct and how many ran compiled, by each way."""
    decorated, compiled = list(decorated), list(compiled)
    programs = [trial for trial in decorated if trial.right and trial.compiled]
    return (
        f"{_right(decorated)} networks are right; {len(programs)} are one compiled program, "
        f"{sum(not trial.bridged for trial in programs)} of them without a call of PyTorch's. "
        f"Through `torch.compile`, {_right(compiled)} are right; "
        f"{sum(trial.right and trial.compiled for trial in compiled)} are one graph, all of it "
        "compiled."
    )


def _right(trials: Sequence[Trial]) -> str:
    return f"{sum(trial.right for trial in trials)} of {len(trials)}"


def document(decorated: Mapping[str, Trial], compiled: Mapping[str, Trial]) -> str:
    """Return the section of the document: the summary and a table in Markdown."""
    lines = [
        summary(decorated.values(), compiled.values()),
        "",
        f"Each is called with {len(set(SIZES))} pairs of a batch and, where there is text, a "
        "length; the column says whether one program, or one for each class, serves all pairs "
        "after the first. Error is the largest against float64 over the largest output, of the "
        "tensor where ours is largest; beside it eager PyTorch's of the same tensor. The last "
        'column is how it ran through `torch.compile(network, backend="tvmify")`, with the same '
        "calls and comparisons.",
        "",
    ]
    rows = [_COLUMNS, ["---"] * len(_COLUMNS)]
    rows += [_row(trial, compiled.get(name)) for name, trial in decorated.items()]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def how_it_ran(trial: Trial) -> str:
    """Say whether all of it was compiled, and what was not."""
    if not trial.compiled:
        # leave out where packages are installed
        reason = re.sub(r"/\S+/site-packages/", "", trial.reason)
        if trial.graphs:
            how = f"{trial.graphs} graphs, {trial.eager_graphs} in eager"
        else:
            how = "in parts" if trial.programs else "eager"
        return ": ".join(filter(None, [how, reason]))
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


def _through_torch_compile(trial: Trial | None) -> str:
    if trial is None:
        return ""
    if not trial.right:
        return f"no: {trial.difference}"
    return f"{how_it_ran(trial)}; {trial.programs} programs"


def _row(trial: Trial, compiled: Trial | None) -> list[str]:
    ran = trial.compiled or bool(trial.reason)
    return [
        trial.name,
        trial.kind,
        "yes" if trial.right else f"no: {trial.difference}",
        how_it_ran(trial),
        _sizes(trial),
        f"{trial.error:.1e}" if ran and trial.right else "",
        f"{trial.eager_error:.1e}" if ran and trial.right else "",
        _through_torch_compile(compiled),
    ]


if __name__ == "__main__":
    main()

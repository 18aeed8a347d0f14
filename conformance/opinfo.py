"""PyTorch's operator database through the decorator.

    python -m conformance.opinfo run [--shards 64] [--jobs 2] [--samples 0] [--only add,mul]
                                   [--dtypes float32,int64]
    python -m conformance.opinfo report

Each sample on the CPU has to agree with eager PyTorch, or raise the same error. An interrupted run
continues where it stopped. `run --again` repeats what deviated or crashed, or with `--only` all
samples of those operators. The report goes into docs/coverage.md, which is about float32 and int64:
give other dtypes a `--folder` of their own.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from conformance import records, shards
from conformance.operators import CRASHED, DEFAULT_DTYPES, DTYPES, WRONG, Case, Result
from conformance.opinfo_report import show, write

FOLDER = Path(__file__).parents[1] / "build" / "opinfo"
_CONSOLE = Console(width=160, soft_wrap=True)


def main(arguments: list[str] | None = None) -> None:
    """Run cases, or write the report."""
    given = _parser().parse_args(arguments)
    if given.action == "report":
        found = records.read(given.folder)
        show(Console(), found)
        write(found)
        return
    plan = shards.Plan(
        given.folder,
        given.shards,
        given.samples,
        frozenset(given.only.split(",")) - {""},
        given.limit,
        given.dtypes,
    )
    if given.action == "work":
        shards.work(plan, given.shard, _say)
        return
    if given.again:
        records.forget(
            plan.folder,
            lambda case, result: (
                case.operator in plan.only if plan.only else result.outcome in (WRONG, CRASHED)
            ),
        )
    options = [
        f"--{name}={getattr(given, name)}" for name in ("folder", "shards", "samples", "only")
    ]
    options.append(f"--dtypes={','.join(given.dtypes)}")
    shards.run(plan, given.jobs, shards.this_module(["work", *options]), _say)


def _say(case: Case, result: Result) -> None:
    if result.outcome in (WRONG, CRASHED):
        _CONSOLE.print(f"{case}: {result.outcome}: {result.reason}", markup=False, highlight=False)


def _dtypes(names: str) -> tuple[str, ...]:
    given = tuple(names.split(","))
    if unknown := ", ".join(set(given) - DTYPES.keys()):
        raise argparse.ArgumentTypeError(f"unknown: {unknown}; known: {', '.join(DTYPES)}")
    return given


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="PyTorch's operator samples through tvmify.")
    actions = parser.add_subparsers(dest="action", required=True)
    run = actions.add_parser("run", help="run the cases that have no result yet")
    work = actions.add_parser("work", help="one shard of a run, in this process")
    report = actions.add_parser("report", help="print the table and write docs/coverage.md")
    for action in (run, work, report):
        action.add_argument("--folder", type=Path, default=FOLDER)
    for action in (run, work):
        action.add_argument("--shards", type=int, default=64)
        action.add_argument("--samples", type=int, default=0, help="samples per operator (0: all)")
        action.add_argument("--only", default="", help="names of operators, separated by commas")
        action.add_argument(
            "--dtypes",
            type=_dtypes,
            default=DEFAULT_DTYPES,
            help=f"of {', '.join(DTYPES)}, separated by commas",
        )
        action.add_argument("--limit", type=float, default=180, help="seconds for one case")
    run.add_argument("--jobs", type=int, default=2, help="processes at a time")
    run.add_argument("--again", action="store_true", help="repeat deviations, or all of --only")
    work.add_argument("shard", type=int)
    return parser


if __name__ == "__main__":
    main()

"""The printed tables of the benchmark."""

from __future__ import annotations

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from benchmarks.contenders import CONTENDERS, OURS
from benchmarks.goals import Goal
from benchmarks.results import Result, Row

LINES = ("median ms", "minimum ms", "first call s", "peak MiB", "error")


def show(console: Console, rows: list[Row], goals: list[Goal], machine: str) -> None:
    """Print the measurements, the reasons for blanks, and the goals."""
    names = [name for name in CONTENDERS if any(name in row.results for row in rows)]
    console.print(measurements(rows, names, machine))
    for row in rows:
        for result in row.results.values():
            for text in filter(None, (result.reason, result.remark)):
                title = CONTENDERS[result.contender].title
                console.print(f"{row.model}, {title}: {text}", style="dim", markup=False)
    if any(row.to_best_peer is not None for row in rows):
        console.print()
        console.print(goal_table(goals))


def measurements(rows: list[Row], names: list[str], machine: str) -> Table:
    """Return the table of all models and contenders.

    Parameters
    ----------
    rows
        One for each model and number of threads.
    names
        The contenders to show, in order.
    machine
        A line about the machine, for the title.
    """
    table = Table(
        title=machine, title_justify="left", title_style="", box=None, padding=(0, 1, 1, 1)
    )
    table.add_column("model")
    table.add_column()
    for name in names:
        table.add_column(CONTENDERS[name].title, justify="right")
    table.add_column("tvmify /\nbest peer", justify="right")
    table.add_column("tvmify /\neager", justify="right")
    several = len({row.threads for row in rows}) > 1
    for row in rows:
        model = f"{row.model}\n{row.threads} threads" if several else row.model
        labels = Text("\n".join(LINES), style="dim")
        cells = [_cell(row.results.get(name), name == row.best_peer) for name in names]
        ratios = [_ratio(row.to_best_peer), _ratio(row.to_eager)]
        table.add_row(Text(model, style="bold"), labels, *cells, *ratios, end_section=True)
    return table


def _cell(result: Result | None, best: bool) -> Group | str:
    if result is None or result.reason:
        return ""
    style = "bold cyan" if result.contender == OURS else "bold" if best else ""
    in_eager = " *" if result.contender == OURS and result.remark else ""
    numbers = (
        _number(result.minimum_ms),
        _number(result.first_call_s),
        "" if result.peak_mib is None else f"{result.peak_mib:.0f}",
        "" if result.error is None else f"{result.error:.1e}",
    )
    median = Text(_number(result.median_ms) + in_eager, style=style)
    return Group(median, *(Text(number, style="dim") for number in numbers))


def goal_table(goals: list[Goal]) -> Table:
    """Return the table of goals, met and not met."""
    table = Table(title="Goals (2 threads)", title_justify="left", title_style="", box=None)
    for title in ("", "ratio", "goal", "reached", ""):
        table.add_column(title, justify="right" if title in ("goal", "reached") else "left")
    for goal in goals:
        verdict = "met" if goal.met else "not measured" if goal.reached is None else "not met"
        style = "green" if goal.met else "" if goal.reached is None else "red"
        reached = "" if goal.reached is None else f"{goal.reached:.2f}"
        table.add_row(
            goal.subject,
            goal.measure,
            f"≤ {goal.bound:.2f}",
            Text(reached, style=style),
            Text(verdict, style=style),
        )
    return table


def _ratio(ratio: float | None) -> Text:
    if ratio is None:
        return Text("")
    return Text(f"{ratio:.2f}", style="bold green" if ratio <= 1 else "bold red")


def _number(value: float | None) -> str:
    """Format three significant digits: 0.0123, 0.123, 1.23, 12.3, 123."""
    if value is None:
        return ""
    digits = next((d for d, least in enumerate((100, 10, 1, 0.1)) if value >= least), 4)
    return f"{value:.{digits}f}"

"""``tvmify warmup``: building ahead of time what a service calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import filesize
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tvmify.errors import OptionError, WarmUpError
from tvmify.recording import dtype_of
from tvmify.signature import TensorSpec
from tvmify.target import check
from tvmify.warming import EAGER, Outcome, Warmed, warm_cache

INCOMPLETE, USAGE, INTERRUPTED = 1, 2, 130


def warmup(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="PACKAGE.MODULE:ATTRIBUTE",
            help="A module or decorated function, or what makes one when it is called.",
            show_default=False,
        ),
    ],
    file: Annotated[
        Path | None,
        typer.Option("--from", help="Signatures that TVMIFY_RECORD wrote.", show_default=False),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="A call with a tensor of this shape, 1,3,224,224; several tensors with spaces "
            "between. May be given several times.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="Of the tensors of each shape, or of all.", show_default="float32"),
    ] = None,
    device: Annotated[str, typer.Option(help="Of the tensors of shapes.")] = "cpu",
    method: Annotated[
        str | None, typer.Option(help="The method that is called.", show_default=False)
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Processes; by default as many as there are processors."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="What to build for: llvm, or TVM's attributes in JSON."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Build what a service will call into the disk cache; what is there is not built again.

    Exit codes: 0, there is compiled code for all signatures; 1, not for all; 2, the command is
    used wrongly; 130, it was interrupted, and what was done until then stays.
    """
    shown: list[Outcome] = []
    try:
        calls = _calls(shape or [], dtype or ["float32"], device)
        with _progress(shown) as (on_begin, on_outcome):
            warmed = warm_cache(
                subject,
                *calls,
                file=file,
                device=device,
                method=method,
                target=_target(target),
                jobs=jobs,
                on_begin=on_begin,
                on_outcome=on_outcome,
            )
    except (WarmUpError, OptionError, OSError) as error:
        typer.echo(f"tvmify: {error}", err=True)
        raise typer.Exit(USAGE) from error
    except KeyboardInterrupt as error:
        _print(Warmed(shown, ["interrupted: what is done stays"]), as_json)
        raise typer.Exit(INTERRUPTED) from error
    _print(warmed, as_json)
    if not warmed.is_complete:
        raise typer.Exit(INCOMPLETE)


def _calls(shapes: list[str], dtypes: list[str], device: str) -> list[list[TensorSpec]]:
    if len(dtypes) not in (1, max(len(shapes), 1)):
        raise WarmUpError(f"there are {len(shapes)} --shape and {len(dtypes)} --dtype")
    calls = []
    for i, text in enumerate(shapes):
        names = dtypes[i if len(dtypes) > 1 else 0].split()
        tensors = text.split()
        if len(names) not in (1, len(tensors)):
            raise WarmUpError(f"--shape {text!r} has {len(tensors)} tensors, not {len(names)}")
        try:
            kinds = [dtype_of(name) for name in names * (len(tensors) // len(names))]
            sizes = [tuple(int(size) for size in t.split(",") if size) for t in tensors]
            calls.append(
                [TensorSpec(s, kind, device) for s, kind in zip(sizes, kinds, strict=True)]  # type: ignore[arg-type]
            )
        except (ValueError, RuntimeError) as error:
            raise WarmUpError(f"--shape {text!r}: {error}") from error
    return calls


def _target(text: str | None) -> Any:
    if text is None or not text.startswith("{"):
        return check(text)
    try:
        return check(json.loads(text))
    except ValueError as error:
        raise OptionError(f"--target is no JSON: {error}") from error


@contextmanager
def _progress(shown: list[Outcome]) -> Iterator[tuple[Any, Any]]:
    """Show how far it is on standard error: a bar on a terminal, else a line for each signature."""
    console = Console(stderr=True)
    columns = TextColumn("warming up"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    bar = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
    task = bar.add_task("", total=None)

    def on_begin(total: int, notes: list[str]) -> None:
        bar.update(task, total=total)
        for note in notes:
            console.print(Text(f"tvmify: {note}"), soft_wrap=True)

    def on_outcome(outcome: Outcome) -> None:
        shown.append(outcome)
        bar.advance(task)
        if not console.is_terminal:
            line = f"{outcome.signature}: {_source(outcome)}, {outcome.seconds:.1f} s"
            console.print(Text(line), soft_wrap=True)

    with bar:
        yield on_begin, on_outcome


def _source(outcome: Outcome) -> str:
    return f"{outcome.source} ({outcome.reason})" if outcome.reason else outcome.source


def _print(warmed: Warmed, as_json: bool) -> None:
    if as_json:
        outcomes = [outcome._asdict() for outcome in warmed.outcomes]
        typer.echo(json.dumps({"outcomes": outcomes, "notes": warmed.notes}, indent=2))
        return
    table = Table("signature", "source", "seconds", "size", box=None)
    for outcome in warmed.outcomes:
        size = filesize.decimal(outcome.bytes) if outcome.bytes else ""
        cells = outcome.signature, _source(outcome), f"{outcome.seconds:.1f}", size
        style = "yellow" if outcome.source == EAGER else ""
        table.add_row(*(Text(cell) for cell in cells), style=style)
    console = Console()
    if not console.is_terminal:
        console.width = 1000  # whoever searches the text wants its lines whole
    console.print(table)
    counts = {o.source: 0 for o in warmed.outcomes}
    for outcome in warmed.outcomes:
        counts[outcome.source] += 1
    console.print(", ".join(f"{count} {source}" for source, count in counts.items()))

"""``tvmify warmup``: builds the programs of a service ahead of time."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tvmify.cli.printing import FAILED, USAGE, AsJson, fail, print_all, print_json, size, text
from tvmify.errors import OptionError, WarmUpError
from tvmify.target import check

if TYPE_CHECKING:
    from tvmify.signature import TensorSpec
    from tvmify.warming import Outcome, Warmed

#: Exit code after an interrupt.
INTERRUPTED = 130


def warmup(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="PACKAGE.MODULE:ATTRIBUTE",
            help="A module or decorated function, or a callable that returns one.",
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
            help="A call with a tensor of this shape, e.g. 1,3,224,224, or rows=2..64,128 for all "
            "sizes from 2 to 64; separate several tensors "
            "with spaces. May be given several times.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="Dtype for each --shape, or for all.", show_default="float32"),
    ] = None,
    device: Annotated[str, typer.Option(help="Device of the tensors.")] = "cpu",
    method: Annotated[
        str | None, typer.Option(help="The method to call.", show_default=False)
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Number of processes; by default one per processor."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="What to build for: llvm, or TVM's target attributes in JSON."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Build the programs of a service into the disk cache, unless they are there already.

    Exit codes: 0, all signatures have compiled code; 1, some do not; 2, usage error; 130,
    interrupted, and the programs built so far are kept.
    """
    from tvmify.warming import Warmed, warm_cache

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
        raise fail(error, USAGE) from error
    except KeyboardInterrupt as error:
        _print(Warmed(shown, ["interrupted: finished programs are kept"]), as_json)
        raise typer.Exit(INTERRUPTED) from error
    _print(warmed, as_json)
    if not warmed.is_complete:
        raise typer.Exit(FAILED)


def _calls(shapes: list[str], dtypes: list[str], device: str) -> list[list[TensorSpec]]:
    import torch

    from tvmify.dispatch.recording.trees import dtype_of
    from tvmify.signature import TensorSpec

    if len(dtypes) not in (1, max(len(shapes), 1)):
        raise WarmUpError(
            f"there are {len(shapes)} --shape and {len(dtypes)} --dtype: give one --dtype for all "
            "shapes, or one for each"
        )
    calls = []
    for i, shape in enumerate(shapes):
        names = dtypes[i if len(dtypes) > 1 else 0].split()
        tensors = shape.split()
        if len(names) not in (1, len(tensors)):
            raise WarmUpError(
                f"--shape {shape!r} has {len(tensors)} tensors, and its --dtype {len(names)} "
                "dtypes: give one for all, or one for each"
            )
        try:
            kinds = [dtype_of(name) for name in names * (len(tensors) // len(names))]
            sizes = [tuple(_size(n) for n in tensor.split(",") if n) for tensor in tensors]
            place = torch.device(device)
            calls.append([TensorSpec(s, d, place) for s, d in zip(sizes, kinds, strict=True)])
        except (ValueError, RuntimeError) as error:
            raise WarmUpError(f"--shape {shape!r}: {error}") from error
    return calls


def _size(given: str) -> Any:
    """Read ``8``, or ``rows=2..64``, whose name and limits are optional."""
    limited = re.fullmatch(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<least>\d*)\.\.(?P<most>\d*)", given)
    if limited is None and given.isdecimal():
        return int(given)
    if limited is None:
        raise ValueError(f"{given!r} is not a size: expected a number, or rows=2..64")
    # Imported here because the import takes as long as the rest of the command.
    from torch.export import Dim

    limits = {"min": limited["least"], "max": limited["most"]}
    numbers = {limit: int(text) for limit, text in limits.items() if text}
    least, most = numbers.get("min", 2), numbers.get("max")
    if most is not None and most < max(least, 2):
        raise ValueError(f"{given!r} allows no size of 2 or more")
    return Dim(limited["name"], **numbers) if limited["name"] else Dim.AUTO(**numbers)


def _target(given: str | None) -> Any:
    if given is None or not given.startswith("{"):
        return check(given)
    try:
        return check(json.loads(given))
    except ValueError as error:
        raise OptionError(f"--target is not valid JSON: {error}") from error


@contextmanager
def _progress(shown: list[Outcome]) -> Iterator[tuple[Any, Any]]:
    """Show progress on standard error: a bar on a terminal, otherwise a line per signature."""
    console = Console(stderr=True)
    columns = TextColumn("warming up"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    bar = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
    task = bar.add_task("", total=None)

    def on_begin(total: int, notes: list[str]) -> None:
        bar.update(task, total=total)
        for note in notes:
            console.print(text(f"tvmify: {note}"), soft_wrap=True)

    def on_outcome(outcome: Outcome) -> None:
        shown.append(outcome)
        bar.advance(task)
        if not console.is_terminal:
            line = f"{outcome.signature}: {_source(outcome)}, {outcome.seconds:.1f} s"
            console.print(text(line), soft_wrap=True)

    with bar:
        yield on_begin, on_outcome


def _source(outcome: Outcome) -> str:
    return f"{outcome.source} ({outcome.reason})" if outcome.reason else outcome.source


def _print(warmed: Warmed, as_json: bool) -> None:
    if as_json:
        outcomes = [outcome._asdict() for outcome in warmed.outcomes]
        print_json({"outcomes": outcomes, "notes": warmed.notes})
        return
    table = Table("signature", "source", "seconds", "size", box=None)
    for outcome in warmed.outcomes:
        taken = size(outcome.bytes) if outcome.bytes else ""
        cells = outcome.signature, _source(outcome), f"{outcome.seconds:.1f}", taken
        table.add_row(*map(text, cells), style="" if outcome.is_compiled else "yellow")
    counts = Counter(outcome.source for outcome in warmed.outcomes)
    print_all(table, text(", ".join(f"{count} {source}" for source, count in counts.items())))

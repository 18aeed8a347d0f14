"""The command ``tvmify``, with one file per subcommand or group of similar ones.

Commands import torch only when they need it, so that help and listings are fast.
"""

from __future__ import annotations

from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tvmify.cli.doctor import doctor
from tvmify.cli.entries import list_entries, show
from tvmify.cli.explain_miss import explain_miss
from tvmify.cli.inspect import inspect
from tvmify.cli.moving import export_entries, import_entries
from tvmify.cli.printing import output_failures
from tvmify.cli.removing import clear, prune, verify
from tvmify.cli.warmup import warmup


class _Commands(TyperGroup):
    def main(self, *args: Any, **options: Any) -> Any:
        with output_failures():
            return super().main(*args, **options)

    # Typer itself ends with code 1 if nobody reads what these print.

    def make_context(self, *args: Any, **options: Any) -> Any:
        with output_failures():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with output_failures():
            return super().invoke(ctx)


app = typer.Typer(
    name="tvmify",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"tvmify {metadata.version('tvmify')}")
        raise typer.Exit


@app.callback()
def tvmify(
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Inspect and manage compiled programs."""


app.command("list")(list_entries)
app.command()(show)
app.command()(explain_miss)
app.command()(verify)
app.command()(prune)
app.command()(clear)
app.command("export")(export_entries)
app.command("import")(import_entries)
app.command()(inspect)
app.command()(doctor)
app.command()(warmup)


__all__ = ["app"]

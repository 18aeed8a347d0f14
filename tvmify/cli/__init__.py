"""The command ``tvmify``; each of its subcommands is a file here."""

from __future__ import annotations

import typer

from tvmify.cli.inspect import inspect

app = typer.Typer(
    name="tvmify",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Look at what tvmify made.",
)
app.command()(inspect)


# With a callback, Typer keeps the name of a single subcommand.
@app.callback()
def _commands() -> None: ...


__all__ = ["app"]

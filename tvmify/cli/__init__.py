"""The command ``tvmify``, with one file per subcommand or group of similar ones."""

from __future__ import annotations

import typer

from tvmify.cli.doctor import doctor
from tvmify.cli.entries import list_entries, show
from tvmify.cli.explain_miss import explain_miss
from tvmify.cli.inspect import inspect
from tvmify.cli.moving import export_entries, import_entries
from tvmify.cli.removing import clear, prune, verify
from tvmify.cli.warmup import warmup

app = typer.Typer(
    name="tvmify",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Inspect and manage compiled programs.",
)
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

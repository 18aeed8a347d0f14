"""``python -m tvmify``."""

from tvmify.cli import app

app(prog_name="tvmify")

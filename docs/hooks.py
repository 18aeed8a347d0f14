"""Fills pages whose text is elsewhere: the help of the commands, and files at the root."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace ``<!-- commands -->`` by the help of ``tvmify``, ``<!-- include X -->`` by file X."""
    if "<!-- commands -->" in markdown:
        markdown = markdown.replace("<!-- commands -->", _help())
    return re.sub(r"<!-- include (\S+) -->", lambda match: _included(match[1]), markdown)


def _help() -> str:
    command = [sys.executable, "-m", "typer", "tvmify.cli", "utils", "docs", "--name", "tvmify"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.partition("\n")[2]  # the page has its own title


def _included(name: str) -> str:
    # Files at the root link into docs/, where these pages are.
    return (
        (_ROOT / name)
        .read_text(encoding="utf-8")
        .replace("](docs/", "](")
        .replace("](SECURITY.md)", "](security.md)")
    )

"""``tvmify doctor``: checks the installation, and says how to fix problems."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer
from rich.text import Text

from tvmify.cli import findings
from tvmify.cli.findings import ERROR, OK, WARNING, Finding
from tvmify.cli.printing import FAILED, AsJson, CacheDirectory, print_all, print_json, printable
from tvmify.errors import NativeLibraryError

_STYLES = {OK: "green", WARNING: "yellow", ERROR: "bold red"}


def doctor(
    directory: CacheDirectory = None,
    quick: Annotated[bool, typer.Option("--quick", help="Do not compile anything.")] = False,
    timeout: Annotated[
        float, typer.Option(min=1, help="Time limit in seconds for each of the two test processes.")
    ] = 300,
    as_json: AsJson = False,
) -> None:
    """Check the installation, the machine and the cache, and say how to fix each problem.

    Exit codes: 0, it works, maybe with warnings; 1, something does not work; 2, usage error.
    """
    parts = [
        findings.versions(),
        findings.native_library(),
        findings.processor(),
        findings.linker(),
        findings.gpus(),
        findings.cache(directory),
        findings.environment(),
    ]
    if not quick:
        parts.append(findings.round_trip(timeout))
    found = []
    for part in parts:
        # The other checks need the native library.
        with contextlib.suppress(NativeLibraryError):
            for finding in part:
                found.append(finding)
                if not as_json:
                    _print(finding)
    if as_json:
        print_json({"ok": not _errors(found), "findings": [finding._asdict() for finding in found]})
    elif errors := _errors(found):
        print_all(Text(f"{errors} of {len(found)} findings are errors"))
    if _errors(found):
        raise typer.Exit(FAILED)


def _errors(found: list[Finding]) -> int:
    return sum(finding.status == ERROR for finding in found)


def _print(finding: Finding) -> None:
    status, subject, detail, advice = finding
    line = Text.assemble((f"{status:8}", _STYLES[status]), printable(f"{subject}: {detail}"))
    print_all(line, *([Text(" " * 8 + printable(advice))] if advice else []))

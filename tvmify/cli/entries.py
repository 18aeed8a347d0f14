"""``tvmify list`` and ``tvmify show``: the contents of a cache directory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.table import Table

from tvmify.artifact.shapes import shape_lines
from tvmify.cache.listing import entries_of, verdict_of
from tvmify.cache.program_differences import numbered
from tvmify.cli.printing import (
    SHOWN_DIGITS,
    AsJson,
    CacheDirectory,
    cache_at,
    date,
    entry_of,
    facts_of,
    failures,
    print_all,
    print_json,
    size,
    summary,
    text,
)

#: The JSON fields of an intact entry in a listing.
_FACTS = ("inputs", "shapes", "target", "verdict", "torch", "tvm")


def list_entries(directory: CacheDirectory = None, as_json: AsJson = False) -> None:
    """List the compiled programs in a cache, most recently used first.

    Exit codes: 0; 1, the directory cannot be used; 2, usage error.
    """
    with failures():
        cache = cache_at(directory)
        entries = entries_of(cache)
    rows, facts = Table("entry", "used", "size", "inputs", "target", "calls", box=None), []
    for entry in entries:
        if entry.damaged:
            shown = f"damaged: {entry.damaged}"
            facts.append(facts_of(entry) | {"damaged": entry.damaged})
        else:
            shown = "; ".join([entry.inputs, *entry.shapes])
            facts.append(facts_of(entry) | {name: getattr(entry, name) for name in _FACTS})
        cells = entry.digest[:SHOWN_DIGITS], date(entry.used), size(entry.bytes)
        rows.add_row(*map(text, (*cells, shown, entry.target, entry.verdict)))
    if as_json:
        print_json({"directory": str(cache.directory), "entries": facts})
        return
    total = size(sum(entry.bytes for entry in entries))
    print_all(text(f"{cache.directory}: {len(entries)} entries, {total}"))
    if facts:
        print_all(rows)


def show(
    prefix: Annotated[
        str,
        typer.Argument(
            metavar="DIGEST", help="The first digits of an entry's digest.", show_default=False
        ),
    ],
    directory: CacheDirectory = None,
    as_json: AsJson = False,
) -> None:
    """Check an entry and print everything except the machine code; no code is loaded.

    Exit codes: 0, the entry is intact; 1, it is damaged or missing; 2, usage error.
    """
    with failures():
        cache = cache_at(directory)
        entry = entry_of(cache, prefix)
        manifest, library = cache.read(entry.digest)
    facts = facts_of(entry)
    if as_json:
        library_facts = {"sha256": manifest.library_sha256, "size": len(library)}
        key, artifact = dict(manifest.key.entries), manifest.artifact
        print_json(facts | {"key": key, "artifact": artifact, "library": library_facts})
        return
    artifact, key = manifest.artifact, dict(manifest.key.entries)
    program = key.pop("program", "")
    print_all(
        summary(
            {
                "entry": entry.digest,
                "directory": entry.path,
                "size": f"{size(entry.bytes)}, {size(len(library))} of them code, intact",
                "used": date(entry.used),
                "calls": verdict_of(manifest) or "not compared with eager PyTorch",
                "writes to": artifact.get("writes") or "nothing",
            }
        ),
        *(_titled("shapes", text("\n".join(shapes))) if (shapes := shape_lines(artifact)) else []),
        *_titled("key", summary(key)),
        *_report(artifact.get("report")),
        *_titled("program", text(numbered(program))),
    )


def _report(report: Any) -> list[Any]:
    if not isinstance(report, Mapping):
        return []
    parts: list[Any] = []
    for name, found in report.items():
        if isinstance(found, Mapping) and found:
            rows = Table.grid(padding=(0, 2))
            for row in found.items():
                rows.add_row(*map(text, row))
            parts += _titled(name, rows)
        elif not isinstance(found, Mapping):
            parts += ["", text(f"{name}: {found}")]
    return parts


def _titled(title: str, content: Any) -> list[Any]:
    return ["", text(title), content]

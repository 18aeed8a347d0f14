"""``tvmify list`` and ``tvmify show``: what a cache directory holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.table import Table

from tvmify.cache.differences import leaves_of
from tvmify.cache.manifest import Manifest
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
    shape_lines,
    size,
    summary,
    text,
)
from tvmify.errors import CacheError


def list_entries(directory: CacheDirectory = None, as_json: AsJson = False) -> None:
    """List the compiled programs in a cache, most recently used first.

    Exit codes: 0; 1, the directory cannot be used; 2, usage error.
    """
    with failures():
        cache = cache_at(directory)
        entries = cache.entries()[::-1]
    rows, facts = Table("entry", "used", "size", "inputs", "target", "calls", box=None), []
    for entry in entries:
        try:
            known = _overview(entry.manifest())
            inputs = "; ".join([known["inputs"], *known["shapes"]])
            shown = inputs, known["target"], known["verdict"]
        except CacheError as error:
            known = {"damaged": str(error)}
            shown = f"damaged: {error}", "", ""
        facts.append(facts_of(entry) | known)
        cells = entry.digest[:SHOWN_DIGITS], date(entry.used), size(entry.bytes), *shown
        rows.add_row(*map(text, cells))
    if as_json:
        print_json({"directory": str(cache.directory), "entries": facts})
        return
    total = size(sum(entry.bytes for entry in entries))
    print_all(text(f"{cache.directory}: {len(entries)} entries, {total}"), *[rows] * bool(facts))


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
                "size": f"{size(entry.bytes)}, {size(len(library))} of them code, whole",
                "used": date(entry.used),
                "calls": _verdict(artifact) or "not compared with eager PyTorch",
                "writes to": artifact.get("writes") or "nothing",
            }
        ),
        *(_titled("shapes", text("\n".join(shapes))) if (shapes := shape_lines(artifact)) else []),
        *_titled("key", summary(key)),
        *_report(artifact.get("report")),
        *_titled("program", text(numbered(program))),
    )


def _overview(manifest: Manifest) -> dict[str, Any]:
    entries = manifest.key.entries
    return {
        "inputs": ", ".join(leaves_of(manifest.key)),
        "shapes": shape_lines(manifest.artifact),
        "target": _target(entries.get("target", "")),
        "verdict": _verdict(manifest.artifact),
        "torch": entries.get("torch", ""),
        "tvm": entries.get("tvm", ""),
    }


def _target(described: str) -> str:
    """Summarise the instruction set by its widest vector feature."""
    try:
        target = json.loads(described)
        features = {str(name) for name in target.get("mattr", ())}
        widest = next((f for f in ("+avx512f", "+avx2", "+avx", "+neon") if f in features), "")
        return f"{target.get('mcpu', target.get('kind'))} {widest}".rstrip()
    except (ValueError, RecursionError, AttributeError, TypeError):
        return described


def _verdict(artifact: Mapping[str, Any]) -> str:
    """Say how compiled code compared with eager PyTorch, for each number of threads."""
    verdicts = artifact.get("verdicts")
    if not isinstance(verdicts, Mapping):
        return ""
    texts = []
    for threads, pair in verdicts.items():
        try:
            compiled, eager = (f"{1e3 * seconds:.3g}" for seconds in pair)
            texts.append(f"{threads} threads: {compiled} ms, eager {eager} ms")
        except (TypeError, ValueError):  # written by another version
            texts.append(f"{threads} threads: ?")
    return "; ".join(texts)


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

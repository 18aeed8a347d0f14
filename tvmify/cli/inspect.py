"""``tvmify inspect``: what a saved file holds, and whether it is whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import filesize
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tvmify.errors import ArchiveError
from tvmify.runtime import inspect as read

DAMAGED, USAGE = 1, 2


def inspect(
    path: Annotated[
        Path, typer.Argument(help="A file that tvmify.save wrote.", show_default=False)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False,
    key_file: Annotated[
        Path | None,
        typer.Option(help="Check the signature: an Ed25519 public key in PEM, or an HMAC secret."),
    ] = None,
) -> None:
    """Check a saved model and print what it holds; none of its code is loaded.

    Exit codes: 0, the file is whole (and signed with the key, if one is given); 1, it is not;
    2, the command is used wrongly.
    """
    try:
        key = None if key_file is None else _key(key_file)
        manifest = read(path, key=key)
    except (OSError, ImportError, ValueError) as error:
        raise _exit(error, USAGE) from error
    except ArchiveError as error:
        raise _exit(error, DAMAGED) from error
    if as_json:
        # ASCII: the texts of a file may hold what a terminal obeys.
        typer.echo(json.dumps(manifest, indent=2, sort_keys=True))
    else:
        _print(manifest, path, key is not None)


def _exit(error: Exception, code: int) -> typer.Exit:
    typer.echo(_printable(f"tvmify: {error}"), err=True)
    return typer.Exit(code)


def _key(path: Path) -> Any:
    """Read a key; a secret may end in a newline, which editors add."""
    data = path.read_bytes()
    if not data.startswith(b"-----BEGIN"):
        secret = data.removesuffix(b"\n")
        if not secret:
            raise ValueError(f"{path} is empty, and so no key")
        return secret
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ImportError as error:
        raise ImportError(f"{path} is an Ed25519 key: pip install 'tvmify[sign]'") from error
    try:
        key = load_pem_public_key(data)
    except ValueError as error:
        raise ValueError(f"{path} is no public key: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError(f"{path} is a public key of another kind than Ed25519")
    return key


def _print(manifest: dict[str, Any], path: Path, checked: bool) -> None:
    records = manifest["records"].values()
    signed = "signed with this key" if checked else "signed, not checked: give --key-file"
    versions = ", ".join(f"{name} {version}" for name, version in manifest["versions"].items())
    tensors = manifest["tensors"]
    facts = {
        "file": f"{path}, {filesize.decimal(sum(record['size'] for record in records))}, whole",
        "signature": signed if manifest["signed"] else "not signed",
        "model": manifest["model"],
        "saved by": versions,
        "format": manifest["format"],
        "weights": f"{tensors.get('number')} tensors, {_size(tensors.get('bytes'))}",
    }
    summary = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        summary.add_row(f"{name}:", _text(value))
    code = Table(
        "arguments", "target", "needs", "size", title="compiled code", title_justify="left"
    )
    for signature in manifest["signatures"]:
        target = signature.get("target")
        shown = target.get("mcpu", target.get("kind")) if isinstance(target, dict) else target
        needs = " ".join(signature["needs"])
        code.add_row(*map(_text, (signature["arguments"], shown, needs, _size(signature["bytes"]))))
    console = Console()
    if not console.is_terminal:
        console.width = 1000  # whoever searches the text wants its lines whole
    console.print(summary, code, sep="\n")


def _size(count: Any) -> str:
    return filesize.decimal(count) if isinstance(count, int) else "?"


def _text(value: Any) -> Text:
    # Neither markup nor control characters: whoever wrote the file chose the text.
    return Text(_printable(str(value)))


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)

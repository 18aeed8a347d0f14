"""``tvmify inspect``: the contents of a saved file, and whether it is intact."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich import filesize
from rich.table import Table

from tvmify.artifact.shapes import Shapes, shape_lines
from tvmify.cli.printing import (
    FAILED,
    USAGE,
    AsJson,
    fail,
    print_all,
    print_json,
    size,
    summary,
    text,
)
from tvmify.errors import ArchiveError


def inspect(
    path: Annotated[
        Path, typer.Argument(help="A file that tvmify.save wrote.", show_default=False)
    ],
    as_json: AsJson = False,
    key_file: Annotated[
        Path | None,
        typer.Option(help="Check the signature: an Ed25519 public key in PEM, or an HMAC secret."),
    ] = None,
) -> None:
    """Check a saved model and print what it contains; none of its code is loaded.

    Exit codes: 0, the file is intact (and signed with the key, if one is given); 1, it is not;
    2, usage error.
    """
    from tvmify.runtime import inspect as read

    try:
        key = None if key_file is None else _key(key_file)
        manifest = read(path, key=key)
    except (OSError, ImportError, ValueError) as error:
        raise fail(error, USAGE) from error
    except ArchiveError as error:
        raise fail(error, FAILED) from error
    if as_json:
        print_json(manifest)
    else:
        _print(manifest, path, key is not None)


def _key(path: Path) -> Any:
    """Read a key; the newline that editors add after a secret is ignored."""
    data = path.read_bytes()
    if not data.startswith(b"-----BEGIN"):
        secret = data.removesuffix(b"\n")
        if not secret:
            raise ValueError(f"{path} is empty, not a key")
        return secret
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ImportError as error:
        raise ImportError(f"{path} is an Ed25519 key: pip install 'tvmify[sign]'") from error
    try:
        key = load_pem_public_key(data)
    except ValueError as error:
        raise ValueError(f"{path} is not a public key: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError(f"{path} is a public key, but not an Ed25519 one")
    return key


def _print(manifest: dict[str, Any], path: Path, checked: bool) -> None:
    records = manifest["records"].values()
    signed = "signed with this key" if checked else "signed, but not checked: give --key-file"
    versions = ", ".join(f"{name} {version}" for name, version in manifest["versions"].items())
    tensors = manifest["tensors"]
    facts = {
        "file": f"{path}, {filesize.decimal(sum(record['size'] for record in records))}, intact",
        "signature": signed if manifest["signed"] else "not signed",
        "model": manifest["model"],
        "saved by": versions,
        "format": manifest["format"],
        "weights": f"{tensors.get('number')} tensors, {size(tensors.get('bytes'))}",
    }
    code = Table(
        "arguments", "target", "needs", "size", title="compiled code", title_justify="left"
    )
    for signature in manifest["signatures"]:
        target = signature.get("target")
        shown = target.get("mcpu", target.get("kind")) if isinstance(target, dict) else target
        needs = " ".join(signature["needs"])
        serves = "\n".join([signature["arguments"], *shape_lines(signature, _all_of)])
        code.add_row(*map(text, (serves, shown, needs, size(signature["bytes"]))))
    print_all(summary(facts), code)


def _all_of(shapes: Shapes) -> list[str]:
    return shapes.key_text().splitlines()

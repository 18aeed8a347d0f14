from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from typer.testing import CliRunner, Result

from tvmify.artifact.expressions import Condition, Term
from tvmify.artifact.shapes import Shapes, Symbol
from tvmify.cli import app
from tvmify.runtime import archive

DESCRIPTION: dict[str, Any] = {
    "model": "Net[bold]",
    "versions": {"tvmify": "0.1.0", "torch": "2.13.0"},
    "tensors": {"number": 4, "bytes": 3348},
    "signatures": [
        {
            "arguments": "(float32[1, 3, 8, 8])",
            "target": {"kind": "llvm", "mcpu": "x86-64"},
            "needs": ["avx2", "fma"],
            "bytes": 26392,
        }
    ],
}


def saved(path: Path, key: Any = None, **changed: Any) -> Path:
    module = torch.jit.script(torch.nn.Linear(2, 2))
    archive.write(module, path / "model.pt", DESCRIPTION | changed, key)
    return path / "model.pt"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def test_served_shapes_are_printed(tmp_path):
    even = Condition("==", (Term("%", ("s0", 2)), 0))
    shapes = Shapes((Symbol("s0", 2, 512),), {0: ("s0", 8)}, (even,), (48,))
    signature = DESCRIPTION["signatures"][0] | {"arguments": "(float32[_, _])"}
    signature["shapes"] = shapes.to_json()
    file = saved(tmp_path, signatures=[signature])
    output = run(file).output
    for text in ("leaf 0: [s0, 8]", "2 <= s0 <= 512, tuned for 48", "s0 % 2 == 0"):
        assert text in output
    (described,) = json.loads(run(file, "--json").output)["signatures"]
    assert Shapes.from_json(described["shapes"]) == shapes
    signature["shapes"] = {"symbols": 1}
    assert "shapes that cannot be read" in run(saved(tmp_path, signatures=[signature])).output


def test_contents_of_a_file_are_printed(tmp_path):
    result = run(saved(tmp_path))
    assert result.exit_code == 0, result.output
    for text in (
        "Net[bold]",
        "torch 2.13.0, tvmify 0.1.0",
        "4 tensors, 3.3 kB",
        "(float32[1, 3, 8, 8])",
        "x86-64",
        "avx2 fma",
        "26.4 kB",
        "not signed",
        "intact",
    ):
        assert text in result.output
    assert "\x1b" not in result.output


def test_json_is_the_manifest(tmp_path):
    path = saved(tmp_path)
    result = run("--json", path)
    assert result.exit_code == 0
    assert json.loads(result.output) == archive.inspect(path)


def test_a_damaged_file(tmp_path):
    path = saved(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"archive/version", b"archive/venison"))
    result = run(path)
    assert result.exit_code == 1
    assert "is not loaded" in result.stderr
    assert not result.stdout


def test_no_file(tmp_path):
    result = run(tmp_path / "nothing.pt")
    assert result.exit_code == 2
    assert "nothing.pt" in result.stderr
    assert CliRunner().invoke(app, ["inspect"]).exit_code == 2


def test_the_key_of_an_hmac(tmp_path):
    path, key = saved(tmp_path, key="secret"), tmp_path / "key"
    assert "not checked" in run(path).output
    key.write_text("secret\n")
    assert "signed with this key" in run(path, "--key-file", key).output
    key.write_text("other")
    result = run(path, "--key-file", key)
    assert result.exit_code == 1
    assert "does not match the key" in result.stderr
    key.write_text("\n")
    assert run(path, "--key-file", key).exit_code == 2
    assert run(path, "--key-file", tmp_path / "none").exit_code == 2


def test_a_public_key(tmp_path):
    private, key = Ed25519PrivateKey.generate(), tmp_path / "key.pem"
    path = saved(tmp_path, key=private)
    pem = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    key.write_bytes(pem)
    assert "signed with this key" in run(path, "--key-file", key).output
    key.write_bytes(pem[:60])
    result = run(path, "--key-file", key)
    assert result.exit_code == 2
    assert "not a public key" in result.stderr


@pytest.mark.parametrize("model", ["\x1b[2Jgone", "[link=x]y[/link]", "\ud800\u202e"])
def test_escape_sequences_in_files_are_neutralized(tmp_path, model):
    path = saved(tmp_path, model=model)
    for options in ([], ["--json"]):
        result = run(path, *options)
        assert result.exit_code == 0, result.output
        assert "\x1b" not in result.output and "\u202e" not in result.output
    assert model.isascii() is False or "\x1b" in model or model in run(path).output


def test_it_is_a_program(tmp_path):
    # Without a terminal, and with one narrower than the table.
    path = saved(tmp_path)
    code = "import sys; from tvmify.cli import app; sys.exit(app())"
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, "inspect", str(path)],
        check=True,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={"COLUMNS": "20", "PATH": "", "PYTHONPATH": str(Path.cwd())},
    )
    assert "(float32[1, 3, 8, 8])" in child.stdout

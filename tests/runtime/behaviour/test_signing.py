"""Signed files: keys, signatures, and checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import tvmify
from tests.runtime import mutants
from tests.runtime.mutants import MANIFEST
from tvmify import ArchiveError
from tvmify.runtime import archive

X = torch.ones(1, 3, 8, 8)
SIGNATURE = "archive/extra/tvmify/signature"


@pytest.fixture(params=["hmac", "ed25519"])
def keys(request: pytest.FixtureRequest) -> tuple[Any, Any, Any]:
    """A key to sign with, the matching key to check with, and another one."""
    if request.param == "hmac":
        return "secret", b"secret", "another"
    private = Ed25519PrivateKey.generate()
    return private, private.public_key(), Ed25519PrivateKey.generate().public_key()


@pytest.fixture
def signed(small: Path, tmp_path: Path, keys: Any) -> Path:
    path = tmp_path / "signed.pt"
    description = {
        name: value
        for name, value in tvmify.inspect(small).items()
        if name not in ("format", "records", "signed")
    }
    archive.write(torch.jit.load(str(small)), path, description, keys[0])
    return path


def test_a_signed_file_is_loaded_with_its_key(signed, small, keys):
    assert torch.equal(tvmify.load(signed, key=keys[1])(X), tvmify.load(small)(X))
    assert tvmify.inspect(signed, key=keys[1])["signed"]
    # Without a key the signature cannot be checked; the digests are.
    assert torch.equal(tvmify.load(signed)(X), tvmify.load(small)(X))


def test_another_key_does_not_open_it(signed, keys):
    with pytest.raises(ArchiveError, match="does not match the key"):
        tvmify.load(signed, key=keys[2])
    with pytest.raises(ArchiveError, match="does not match the key"):
        tvmify.load(signed, key=Ed25519PrivateKey.generate().public_key())
    with pytest.raises(ArchiveError, match="does not match the key"):
        tvmify.load(signed, key="other")
    with pytest.raises(TypeError, match="a key must be"):
        tvmify.load(signed, key=7)


def test_a_forged_file_has_no_signature(signed, small, keys, tmp_path):
    contents = mutants.records(signed.read_bytes())
    forged = tmp_path / "forged.pt"
    for change, reason in [
        ({"archive/data/0": bytes(432)}, "does not match the key"),
        ({SIGNATURE: contents[SIGNATURE][:-1]}, "does not match the key"),
        ({SIGNATURE: b""}, "does not match the key"),
        ({SIGNATURE: b"x" * 2000}, "claims 2000 bytes, which is too many"),
        ({MANIFEST: mutants.records(small.read_bytes())[MANIFEST]}, "does not match the key"),
    ]:
        forged.write_bytes(mutants.archive(contents | change, forged=MANIFEST not in change))
        with pytest.raises(ArchiveError, match=reason):
            tvmify.load(forged, key=keys[1])
    with pytest.raises(ArchiveError, match="not signed, and a key was given"):
        tvmify.load(small, key=keys[1])


def test_mutated_signed_file_is_rejected_or_equivalent(signed, keys, tmp_path):
    data, path = signed.read_bytes(), tmp_path / "mutant.pt"
    expected = tvmify.load(signed)(X)
    turned_away = 0
    for seed in range(100):
        path.write_bytes(mutants.forged(data, seed))
        try:
            assert torch.equal(tvmify.load(path, key=keys[1])(X), expected)
        except ArchiveError:
            turned_away += 1
    assert turned_away > 90

"""The manifest of a saved file: the digests of its records, and an optional signature.

A saved file is a zip file written by ``torch.jit.save``, with two more records:
``extra/tvmify/manifest.json`` describes the contents and has the SHA-256 of every other record;
``extra/tvmify/signature``, if present, signs the manifest and thereby the whole file.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from tvmify.errors import ArchiveError, SaveError
from tvmify.system.workers import Workers
from tvmify.system.zip_records import AmbiguousArchive, Record, content, read_records

FORMAT = 1

_MANIFEST = "extra/tvmify/manifest.json"
_SIGNATURE = "extra/tvmify/signature"
#: Bytes of the longest manifest, and of all compressed records (source code) after expansion. Real
#: files are far smaller; the limits protect against files that try to exhaust memory.
_LONGEST_MANIFEST = 8 << 20
_MOST_EXPANDED = 256 << 20
#: Threads that compare records with their digests.
_READERS = 4


def seal(file: BinaryIO, description: Mapping[str, Any], key: Any = None) -> None:
    """Add the manifest to an archive, and a signature if there is a key.

    Parameters
    ----------
    file
        The archive, open for reading and writing.
    description
        Fields of the manifest besides format and digests, as JSON values.
    key
        Bytes or text (HMAC), or an ``Ed25519PrivateKey``.

    Raises
    ------
    AmbiguousArchive
        Readers could disagree about its contents: two names differ only in case.
    SaveError
        It has too many records.
    """
    records = read_records(file)
    root = _root([record.name for record in records])
    contents = {
        record.name: {"sha256": _sha256(content(file, record)), "size": record.size}
        for record in sorted(records)
    }
    document = {"format": FORMAT, **description, "records": contents}
    manifest = json.dumps(document, indent=1, sort_keys=True).encode()
    if len(manifest) > _LONGEST_MANIFEST:
        raise SaveError(f"the manifest of a saved file with {len(records)} records is too long")
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr(root + _MANIFEST, manifest)
        if key is not None:
            archive.writestr(root + _SIGNATURE, _sign(manifest, key))


def check(file: BinaryIO, path: Path, key: Any = None) -> dict[str, Any]:
    """Check every record of an archive against its manifest, and return the manifest.

    Parameters
    ----------
    file
        The archive, open for reading.
    path
        For messages.
    key
        Bytes or text, or an ``Ed25519PublicKey``; None to ignore a signature.

    Raises
    ------
    ArchiveError
        It is not such an archive, is damaged, or is not signed with the key.
    """
    try:
        return _checked(file, key)
    except ArchiveError as error:
        raise ArchiveError(f"{path} is not loaded: {error}") from error
    except (AmbiguousArchive, OSError, MemoryError) as error:
        raise ArchiveError(
            f"{path} is not loaded: it is not a complete archive ({error}). Copy it again, or "
            "save the model again."
        ) from error


def _checked(file: BinaryIO, key: Any) -> dict[str, Any]:
    records = {record.name: record for record in read_records(file)}
    root = _root([*records])
    if sum(record.size for record in records.values() if record.is_compressed) > _MOST_EXPANDED:
        raise ArchiveError(f"its records claim to expand to more than {_MOST_EXPANDED} bytes")
    if root + _MANIFEST not in records:
        raise ArchiveError(
            "it has no manifest of tvmify. If torch.jit.save wrote it, torch.jit.load reads it; "
            "torch.export.load reads .pt2 files"
        )
    manifest = _read(file, records[root + _MANIFEST], _LONGEST_MANIFEST)
    if key is not None:
        if root + _SIGNATURE not in records:
            raise ArchiveError("it is not signed, and a key was given")
        _check_signature(manifest, _read(file, records[root + _SIGNATURE], 1024), key)
    document = _parsed(manifest)
    expected = set(document["records"]) | {root + _MANIFEST}
    if set(records) - {root + _SIGNATURE} != expected:
        odd = sorted((set(records) - {root + _SIGNATURE}) ^ expected)
        raise ArchiveError(f"its records are not those that were saved: {', '.join(odd[:3])}")
    # Hashing releases the GIL, so threads hash several records in parallel.
    listed = [records[name] for name in document["records"]]
    digests = Workers(_READERS).map(lambda record: _sha256(content(file, record)), listed)
    for record, entry, digest in zip(listed, document["records"].values(), digests, strict=True):
        if entry != {"sha256": digest, "size": record.size}:
            raise ArchiveError(f"its record {record.name} is damaged: copy the file again")
    return document | {"signed": root + _SIGNATURE in records}


_KINDS = {"model": str, "versions": dict, "tensors": dict, "signatures": list, "records": dict}


def _parsed(manifest: bytes) -> dict[str, Any]:
    try:
        document = json.loads(manifest)
        if document["format"] != FORMAT:
            raise ArchiveError(
                f"it has format {document['format']!r}, and this version of tvmify reads {FORMAT}: "
                "torch.jit.load runs it, perhaps without compiled code"
            )
        wrong = [name for name, kind in _KINDS.items() if not isinstance(document[name], kind)]
        for signature in document["signatures"]:
            text, needs, size = (signature[name] for name in ("arguments", "needs", "bytes"))
            if not (isinstance(size, int) and all(isinstance(t, str) for t in [text, *needs])):
                wrong.append("signatures")
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ArchiveError(f"its manifest cannot be read ({error!r})") from error
    if wrong:
        raise ArchiveError(f"its manifest has an invalid value for {wrong[0]!r}")
    return document


def _root(names: list[str]) -> str:
    """Return the folder that contains all records of a TorchScript archive."""
    root = names[0].partition("/")[0] + "/" if names else ""
    if len(root) < 2 or not all(name.startswith(root) for name in names):
        raise ArchiveError("it is not a TorchScript archive")
    return root


def _read(file: BinaryIO, record: Record, most: int) -> bytes:
    if record.size > most:
        raise ArchiveError(
            f"its record {record.name} claims {record.size} bytes, which is too many"
        )
    return b"".join(content(file, record))


def _sha256(chunks: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


# --------------------------------------------------------------------------------------- signing


def _sign(manifest: bytes, key: Any) -> bytes:
    if isinstance(key, (bytes, str)):
        return b"hmac-sha256 " + _hmac(manifest, key)
    if hasattr(key, "sign"):
        return b"ed25519 " + key.sign(manifest)
    raise TypeError(f"a key must be bytes, text or an Ed25519PrivateKey, not {type(key).__name__}")


def _check_signature(manifest: bytes, signature: bytes, key: Any) -> None:
    kind, _, value = signature.partition(b" ")
    if isinstance(key, (bytes, str)):
        valid = kind == b"hmac-sha256" and hmac.compare_digest(value, _hmac(manifest, key))
    elif hasattr(key, "verify"):
        # Anyone with such a key has installed this package.
        from cryptography.exceptions import InvalidSignature

        try:
            key.verify(value, manifest)
            valid = kind == b"ed25519"
        except InvalidSignature:
            valid = False
    else:
        raise TypeError(
            f"a key must be bytes, text or an Ed25519PublicKey, not {type(key).__name__}"
        )
    if not valid:
        raise ArchiveError("its signature does not match the key")


def _hmac(manifest: bytes, key: bytes | str) -> bytes:
    secret = key.encode() if isinstance(key, str) else key
    return hmac.digest(secret, manifest, "sha256")

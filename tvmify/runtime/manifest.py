"""The manifest of a saved file: under it every record is checked, and all may be signed.

A saved file is a zip file as ``torch.jit.save`` writes it, with two more records:
``extra/tvmify/manifest.json`` describes the contents and has the SHA-256 of every other record;
``extra/tvmify/signature`` may sign the manifest, and thereby everything.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from tvmify.errors import ArchiveError

FORMAT = 1

_MANIFEST = "extra/tvmify/manifest.json"
_SIGNATURE = "extra/tvmify/signature"
#: Bytes of the longest manifest that is read, and how far all compressed records (source code) may
#: expand: neither is ever near it, unless somebody wants to exhaust our memory.
_LONGEST_MANIFEST = 64 << 20
_LARGEST_COMPRESSED = 256 << 20
_CHUNK = 1 << 20
#: Threads that compare records with their digests.
_READERS = 4


def seal(file: BinaryIO, description: Mapping[str, Any], key: Any = None) -> None:
    """Add the manifest to an archive, and a signature if there is a key.

    Parameters
    ----------
    file
        The archive, open for reading and writing.
    description
        What the manifest says besides format and digests; values that JSON can hold.
    key
        Bytes or a text (HMAC), or an ``Ed25519PrivateKey``.
    """
    with zipfile.ZipFile(file, "a") as archive:
        root = _root(archive)
        records = {
            name: {"sha256": _sha256(_read(archive, name)), "size": archive.getinfo(name).file_size}
            for name in sorted(archive.namelist())
        }
        document = {"format": FORMAT, **description, "records": records}
        manifest = json.dumps(document, indent=1, sort_keys=True).encode()
        archive.writestr(root + _MANIFEST, manifest)
        if key is not None:
            archive.writestr(root + _SIGNATURE, _sign(manifest, key))


def check(file: BinaryIO, path: Path, key: Any = None) -> dict[str, Any]:
    """Compare every record of an archive with its manifest, and return that.

    Parameters
    ----------
    file
        The archive, open for reading.
    path
        For messages.
    key
        Bytes or a text, or an ``Ed25519PublicKey``; None leaves a signature unread.

    Raises
    ------
    ArchiveError
        It is no such archive, is damaged, or is not signed with the key.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            _check_directory(file, archive)
            return _checked(file, archive, key)
    except ArchiveError as error:
        raise ArchiveError(f"{path} is not loaded: {error}") from error
    except _UNREADABLE as error:
        raise ArchiveError(
            f"{path} is not loaded: it is no whole archive ({error}). Copy it again, or save the "
            "model again."
        ) from error


#: What `zipfile` raises for archives that it cannot read; RuntimeError if they are encrypted.
_UNREADABLE = (
    *(zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError, ValueError),
    *(RuntimeError, LookupError, ArithmeticError, MemoryError),
)


def _check_directory(file: BinaryIO, archive: zipfile.ZipFile) -> None:
    """Make sure that PyTorch's reader sees the records that `zipfile` sees.

    The two look for the list of records in different ways. They agree where it lies right before
    the end, as every writer puts it; elsewhere a file could show each of them another list.
    """
    end = file.seek(-22, os.SEEK_END)
    signature, length, start, comment = struct.unpack("<4s8x2LH", file.read(22))
    if signature != b"PK\5\6" or comment:
        raise ArchiveError("something follows the end of the archive")
    if end >= 76:  # of large files (zip64) there is a longer end in front of that
        file.seek(end - 76)
        large, rest, *span, locator, disk, offset, disks = struct.unpack(
            "<4sQ28x2Q4sLQL", file.read(76)
        )
        if locator == b"PK\6\7":
            end -= 76
            if (large, rest, disk, offset, disks) != (b"PK\6\6", 44, 0, end, 1):
                raise ArchiveError("its directory is not where it should be")
            length, start = span
    if not archive.start_dir == start == end - length:
        raise ArchiveError("its directory is not where it should be")


def _checked(file: BinaryIO, archive: zipfile.ZipFile, key: Any) -> dict[str, Any]:
    root = _root(archive)
    _check_claims(archive)
    names = archive.namelist()
    if len(set(names)) != len(names):
        raise ArchiveError("it has two records of one name")
    if root + _MANIFEST not in names:
        raise ArchiveError(
            "it has no manifest of tvmify. If torch.jit.save wrote it, torch.jit.load reads it"
        )
    manifest = b"".join(_read(archive, root + _MANIFEST, _LONGEST_MANIFEST))
    if key is not None:
        if root + _SIGNATURE not in names:
            raise ArchiveError("it is not signed, and a key was given")
        _check_signature(manifest, b"".join(_read(archive, root + _SIGNATURE, 1024)), key)
    document = _parsed(manifest)
    expected = set(document["records"]) | {root + _MANIFEST}
    if set(names) - {root + _SIGNATURE} != expected:
        odd = sorted((set(names) - {root + _SIGNATURE}) ^ expected)
        raise ArchiveError(f"its records are not those that were saved: {', '.join(odd[:3])}")
    # Python lets go of its lock while it hashes, so that several records are hashed at once.
    with ThreadPoolExecutor(_READERS) as readers:
        infos = [archive.getinfo(name) for name in document["records"]]
        digests = readers.map(lambda info: _sha256(_content(file, archive, info)), infos)
        for (name, record), info, digest in zip(
            document["records"].items(), infos, digests, strict=True
        ):
            if record != {"sha256": digest, "size": info.file_size}:
                raise ArchiveError(f"its record {name} is damaged: copy the file again")
    return document | {"signed": root + _SIGNATURE in names}


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
        raise ArchiveError(f"its manifest has something else for its {wrong[0]}")
    return document


def _root(archive: zipfile.ZipFile) -> str:
    """Return the folder that all records of a TorchScript archive are in."""
    names = archive.namelist()
    root = names[0].partition("/")[0] + "/" if names else ""
    if len(root) < 2 or not all(name.startswith(root) for name in names):
        raise ArchiveError("it is no TorchScript archive")
    return root


def _check_claims(archive: zipfile.ZipFile) -> None:
    # Records that are stored as they are cannot be longer than the file; others can.
    expanded = 0
    for info in archive.infolist():
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ArchiveError(f"its record {info.filename} is compressed in another way")
        if info.compress_type == zipfile.ZIP_DEFLATED:
            expanded += info.file_size
        elif info.file_size != info.compress_size:
            raise ArchiveError(f"its record {info.filename} has two sizes")
        if expanded > _LARGEST_COMPRESSED:
            raise ArchiveError(f"its record {info.filename} says that it has {expanded} bytes")


def _read(archive: zipfile.ZipFile, name: str, most: int | None = None) -> Iterator[bytes]:
    size = archive.getinfo(name).file_size
    if most is not None and size > most:
        raise ArchiveError(f"its record {name} says that it has {size} bytes")
    with archive.open(name) as record:
        while chunk := record.read(_CHUNK):
            yield chunk


def _content(file: BinaryIO, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Iterator[bytes]:
    """Read a record; one that is stored as it is directly, from several threads at once.

    `zipfile` would take a lock for each read, and as long for its CRC as the digest takes.
    """
    if info.compress_type != zipfile.ZIP_STORED:
        yield from _read(archive, info.filename)
        return
    head = os.pread(file.fileno(), 30, info.header_offset)
    signature, name, extra = struct.unpack("<4s22x2H", head)
    if signature != b"PK\3\4":
        raise ArchiveError(f"its record {info.filename} is not where it should be")
    start = info.header_offset + 30 + name + extra
    for offset in range(start, start + info.file_size, _CHUNK):
        yield os.pread(file.fileno(), min(_CHUNK, start + info.file_size - offset), offset)


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
    raise TypeError(f"a key is bytes, a text or an Ed25519PrivateKey, not {type(key).__name__}")


def _check_signature(manifest: bytes, signature: bytes, key: Any) -> None:
    kind, _, value = signature.partition(b" ")
    if isinstance(key, (bytes, str)):
        valid = kind == b"hmac-sha256" and hmac.compare_digest(value, _hmac(manifest, key))
    elif hasattr(key, "verify"):
        # Only whoever holds such a key has the library.
        from cryptography.exceptions import InvalidSignature

        try:
            key.verify(value, manifest)
            valid = kind == b"ed25519"
        except InvalidSignature:
            valid = False
    else:
        raise TypeError(f"a key is bytes, a text or an Ed25519PublicKey, not {type(key).__name__}")
    if not valid:
        raise ArchiveError("its signature is not that of the key")


def _hmac(manifest: bytes, key: bytes | str) -> bytes:
    secret = key.encode() if isinstance(key, str) else key
    return hmac.digest(secret, manifest, "sha256")

"""Saved files: TorchScript archives with a manifest under which every record is checked.

An archive is a zip file as ``torch.jit.save`` writes it, and `torch.jit.load` reads it as it is.
``extra/tvmify/manifest.json`` in it describes the contents and has the SHA-256 of every other
record; ``extra/tvmify/signature`` may sign the manifest, and thereby everything.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
import struct
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.jit import _recursive

from tvmify.errors import ArchiveError, SaveError

# Importing it registers the classes that archives hold, too.
from tvmify.runtime.native import with_method_renamed

FORMAT = 1
#: The method that a saved module keeps the forward in which it came with.
ORIGINAL = "_tvmify_eager"

_MANIFEST = "extra/tvmify/manifest.json"
_SIGNATURE = "extra/tvmify/signature"
#: Bytes of the longest manifest that is read, and how far all compressed records (source code) may
#: expand: neither is ever near it, unless somebody wants to exhaust our memory.
_LONGEST_MANIFEST = 64 << 20
_LARGEST_COMPRESSED = 256 << 20
_CHUNK = 1 << 20


def write(
    module: torch.jit.ScriptModule, path: Path, description: Mapping[str, Any], key: Any = None
) -> None:
    """Write a module and its manifest; the file appears whole or not at all.

    Parameters
    ----------
    module
        What ``torch.jit.load`` is to return.
    path
        Of the file; one that exists is replaced.
    description
        What the manifest says besides format and digests; values that JSON can hold.
    key
        Signs the manifest, see `tvmify.save`.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w+b") as file:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that TorchScript is deprecated
                torch.jit.save(module, file)
            with zipfile.ZipFile(file, "a") as archive:
                root = _root(archive)
                records = {
                    name: {
                        "sha256": _sha256(archive, name),
                        "size": archive.getinfo(name).file_size,
                    }
                    for name in sorted(archive.namelist())
                }
                document = {"format": FORMAT, **description, "records": records}
                manifest = json.dumps(document, indent=1, sort_keys=True).encode()
                archive.writestr(root + _MANIFEST, manifest)
                if key is not None:
                    archive.writestr(root + _SIGNATURE, _sign(manifest, key))
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def load(path: str | os.PathLike[str], *, key: Any = None, strict: bool | None = None) -> Any:
    """Load a file that `tvmify.save` wrote, after checking every byte of it.

    ``torch.jit.load`` reads the same file, with fewer checks: only compiled code is checked, when
    it is first used.

    Loading runs the compiled code that the file holds: load only what comes from somebody you
    trust. A damaged file is noticed; a forged one only if it was signed, and ``key`` is given.

    Parameters
    ----------
    path
        Of the file.
    key
        Check the signature with it: the bytes or text that the file was saved with, or the
        ``Ed25519PublicKey`` of the private one.
    strict
        Raise, instead of running the original in PyTorch, where no compiled code serves a call.
        None for what the file was saved with.

    Returns
    -------
    torch.jit.ScriptModule
        It may be called, put inside of other modules, scripted, traced, and saved again. Its
        parameters and buffers are the file's own, under the original names, and require no
        gradients. ``load_state_dict`` takes effect with the next call that begins after it; calls
        on other threads meanwhile see all of the old weights, unless with ``assign=True``.

    Raises
    ------
    ArchiveError
        The file is not one that `tvmify.save` wrote, is damaged, or has not the signature.
    FileNotFoundError
        There is no such file.
    """
    path = Path(path)
    with _opened(path) as file:
        _check(file, path, key)
        file.seek(0)
        # The file that was checked, even if another has taken its name meanwhile.
        checked = f"/proc/self/fd/{file.fileno()}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that TorchScript is deprecated
                module = torch.jit.load(checked if Path(checked).exists() else file)
            native = module._tvmify
        except Exception as error:  # PyTorch's reader raises many kinds for what was forged
            raise ArchiveError(f"{path} cannot be loaded: {error}") from error
    if strict is not None:
        native.set_strict(strict)
    # While `load_state_dict` writes to the weights one by one, calls use copies of them. The
    # methods that add hooks are not there for TorchScript, the hooks are.
    module._load_state_dict_pre_hooks[id(native)] = lambda *_: native.hold_weights()
    module._load_state_dict_post_hooks[id(native)] = lambda *_: native.release_weights()
    return module


def inspect(path: str | os.PathLike[str], *, key: Any = None) -> dict[str, Any]:
    """Return the manifest of a saved file, having checked every byte; none of its code is loaded.

    Parameters
    ----------
    path, key
        As for `load`.

    Returns
    -------
    dict
        ``format``; ``versions`` of what saved it; ``model``; ``signatures``: for each program its
        ``arguments``, ``target``, ``needs`` (instruction sets) and ``bytes``; ``tensors``: their
        ``number`` and ``bytes``; ``signed``; ``records``: the parts of the file, each with its
        ``size`` and ``sha256``.

    Raises
    ------
    ArchiveError
        As `load`.
    """
    path = Path(path)
    with _opened(path) as file:
        return _check(file, path, key)


def original(module: torch.jit.ScriptModule) -> Any:
    """Return what a loaded module was before it was saved; another module as it is.

    The two share the memory of their tensors.

    Raises
    ------
    SaveError
        It was not scripted, and the file holds a record for its shapes only.
    """
    if not hasattr(module, "_tvmify"):
        return module
    if not module._tvmify.interprets_all():
        raise SaveError(
            f"{module.original_name} was saved without being scripted: decorate, or save, the "
            "model that the file was made of"
        )
    return _recursive.wrap_cpp_module(with_method_renamed(module, ORIGINAL, "forward"))


# -------------------------------------------------------------------------------------- checking


def _opened(path: Path) -> BinaryIO:
    # Without waiting: a named pipe would stay silent for ever.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ArchiveError(f"{path} is not loaded: it is no regular file")
    return os.fdopen(handle, "rb")


def _check(file: BinaryIO, path: Path, key: Any) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(file) as archive:
            _check_directory(file, archive)
            return _checked(archive, key)
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


def _checked(archive: zipfile.ZipFile, key: Any) -> dict[str, Any]:
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
    for name, record in document["records"].items():
        found = {"sha256": _sha256(archive, name), "size": archive.getinfo(name).file_size}
        if found != record:
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


def _sha256(archive: zipfile.ZipFile, name: str) -> str:
    digest = hashlib.sha256()
    for chunk in _read(archive, name):
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


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

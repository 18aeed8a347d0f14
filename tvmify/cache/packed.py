"""Packed entries: one archive of manifests and libraries, as entries travel between machines.

It is a zip archive whose members, all uncompressed, are ``<digest>/manifest.json`` and
``<digest>/module.so``. Its names pair the two, and decide nothing else: nothing is extracted, an
entry is stored under the digest of the key in its manifest.
"""

from __future__ import annotations

import io
import re
import stat
import struct
import zipfile
from collections import Counter
from collections.abc import Iterable
from typing import BinaryIO

from tvmify.artifact import Artifact
from tvmify.cache.key import Key
from tvmify.cache.manifest import LARGEST_LIBRARY, Manifest, library_file
from tvmify.cache.stored import LIBRARY, LONGEST_MANIFEST, MANIFEST
from tvmify.errors import CacheError

_MEMBER = re.compile(rf"([0-9a-f]{{64}})/({re.escape(MANIFEST)}|{re.escape(LIBRARY)})")
#: The largest members that are read: what is read of an entry on disk.
_LIMITS = {MANIFEST: LONGEST_MANIFEST, LIBRARY: LARGEST_LIBRARY}
_ENCRYPTED = 1
# What zipfile raises for archives that are damaged or forged.
_UNREADABLE = (
    zipfile.BadZipFile,
    EOFError,
    OSError,
    RuntimeError,  # of which NotImplementedError is one: features that it does not know
    ValueError,
    OverflowError,
    struct.error,
)


def write(file: BinaryIO, entries: Iterable[tuple[Manifest, bytes]]) -> list[str]:
    """Write an archive of entries and return their digests.

    Parameters
    ----------
    file
        Open for writing.
    entries
        Manifests and libraries; one pair is in memory at a time, if this is a generator.
    """
    digests = []
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for manifest, library in entries:
            digests.append(manifest.key.digest)
            for name, content in (MANIFEST, manifest.to_json().encode()), (LIBRARY, library):
                # Without a time: the archive of equal entries is the same, byte for byte.
                member = zipfile.ZipInfo(f"{digests[-1]}/{name}")
                member.external_attr = (stat.S_IFREG | 0o644) << 16
                archive.writestr(member, content)
    return digests


def pack(key: Key, artifact: Artifact) -> bytes:
    """Return the archive of one entry."""
    file = io.BytesIO()
    write(file, [(Manifest.of(key, artifact), library_file(key, artifact))])
    return file.getvalue()


class Reader:
    """Reads an archive, of which nothing is believed.

    Parameters
    ----------
    file
        Open for reading, and left open.

    Attributes
    ----------
    digests
        Of the entries that it claims to hold, in its order.

    Raises
    ------
    CacheError
        It is not an archive as `write` writes it: the message names the member.
    """

    def __init__(self, file: BinaryIO) -> None:
        try:
            size = file.seek(0, io.SEEK_END)
            self._archive = zipfile.ZipFile(file)
        except _UNREADABLE as error:
            raise CacheError(f"not an archive, or cut off: {error}") from error
        members = self._archive.infolist()
        for member in members:
            _check(member)
        names = Counter(member.filename for member in members)
        for name, times in names.items():
            if times > 1:
                raise CacheError(f"member {name!r} is there {times} times")
        # Members that share bytes, or say that they are larger than they are, end here.
        if sum(member.file_size for member in members) > size:
            raise CacheError(f"its members are larger than the archive of {size} bytes")
        self.digests = list(dict.fromkeys(name.partition("/")[0] for name in names))
        if not self.digests:
            raise CacheError("it has no entries")
        for digest in self.digests:
            for name in (MANIFEST, LIBRARY):
                if f"{digest}/{name}" not in names:
                    raise CacheError(f"member '{digest}/{name}' is missing")

    def read(self, digest: str) -> tuple[Key, Artifact]:
        """Return an entry, checked as one on disk is before it is used.

        Raises
        ------
        CacheError
            It is damaged, of another format version, or belongs to another key.
        """
        try:
            manifest = Manifest.from_json(self._archive.read(f"{digest}/{MANIFEST}"))
            library = self._archive.read(f"{digest}/{LIBRARY}")
        except _UNREADABLE as error:
            raise CacheError(f"unreadable: {error}") from error
        if manifest.key.digest != digest:
            raise CacheError(f"its manifest is that of {manifest.key.digest}")
        return manifest.key, manifest.artifact_of(library)


def unpack(content: bytes) -> tuple[Key, Artifact]:
    """Return the entry of an archive of one; the inverse of `pack`.

    Raises
    ------
    CacheError
        As `Reader`.
    """
    reader = Reader(io.BytesIO(content))
    if len(reader.digests) != 1:
        raise CacheError(f"it has {len(reader.digests)} entries, not one")
    return reader.read(reader.digests[0])


def _check(member: zipfile.ZipInfo) -> None:
    # zipfile shortens a name at a zero; `orig_filename` is what the archive says.
    match = _MEMBER.fullmatch(member.orig_filename)
    if match is None:
        raise CacheError(f"member {member.orig_filename!r} is not a file of a cache entry")
    if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG):
        raise CacheError(f"member {member.filename!r} is not a plain file")
    if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & _ENCRYPTED:
        raise CacheError(f"member {member.filename!r} is compressed or encrypted")
    if member.file_size > _LIMITS[match[2]] or member.file_size != member.compress_size:
        raise CacheError(f"member {member.filename!r} cannot have {member.file_size} bytes")

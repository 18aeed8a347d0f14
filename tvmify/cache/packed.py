"""Packed entries: the archive format in which entries move between machines.

A zip archive whose members, all uncompressed, are ``<digest>/manifest.json`` and
``<digest>/module.so``. The names only pair the two files: nothing is extracted, and an entry is
stored under the digest of the key in its manifest.
"""

from __future__ import annotations

import io
import re
import stat
import zipfile
from collections.abc import Iterable
from typing import BinaryIO, NamedTuple

from tvmify.artifact import Artifact
from tvmify.cache.key import Key
from tvmify.cache.manifest import LARGEST_LIBRARY, Manifest, library_file
from tvmify.cache.stored import LIBRARY, LONGEST_MANIFEST, MANIFEST, EntryFiles
from tvmify.errors import CacheError
from tvmify.system.zip_records import AmbiguousArchive, Record, read_records

_MEMBER = re.compile(rf"([0-9a-f]{{64}})/({re.escape(MANIFEST)}|{re.escape(LIBRARY)})")
#: The largest members that are read, as for an entry on disk.
_LIMITS = {MANIFEST: LONGEST_MANIFEST, LIBRARY: LARGEST_LIBRARY}


class Entry(NamedTuple):
    """An entry that was read from an archive."""

    key: Key
    artifact: Artifact


def write(file: BinaryIO, entries: Iterable[EntryFiles]) -> list[str]:
    """Write an archive of entries and return their digests.

    Parameters
    ----------
    file
        Open for writing.
    entries
        From a generator, only one is in memory at a time.
    """
    digests = []
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for manifest, library in entries:
            digests.append(manifest.key.digest)
            for name, content in (MANIFEST, manifest.to_json().encode()), (LIBRARY, library):
                # No timestamp: equal entries give byte-identical archives.
                member = zipfile.ZipInfo(f"{digests[-1]}/{name}")
                member.external_attr = (stat.S_IFREG | 0o644) << 16
                archive.writestr(member, content)
    return digests


def pack(key: Key, artifact: Artifact) -> bytes:
    """Return the archive of one entry."""
    file = io.BytesIO()
    write(file, [EntryFiles(Manifest.of(key, artifact), library_file(key, artifact))])
    return file.getvalue()


class Reader:
    """Reads an untrusted archive.

    Parameters
    ----------
    file
        Open for reading; left open.

    Attributes
    ----------
    digests
        Digests of the entries that it claims to hold, in the order of the archive.

    Raises
    ------
    CacheError
        It is not an archive that `write` wrote; the message names the member.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        try:
            self._members = {record.name: record for record in read_records(file)}
        except (AmbiguousArchive, OSError) as error:
            raise CacheError(f"not an archive, or cut off: {error}") from error
        for member in self._members.values():
            _check(member)
        self.digests = list(dict.fromkeys(name.partition("/")[0] for name in self._members))
        if not self.digests:
            raise CacheError("it has no entries")
        for digest in self.digests:
            for name in (MANIFEST, LIBRARY):
                if f"{digest}/{name}" not in self._members:
                    raise CacheError(f"member '{digest}/{name}' is missing")

    def read(self, digest: str) -> Entry:
        """Return an entry, checked like one on disk.

        Raises
        ------
        CacheError
            It is damaged, of another format version, or belongs to another key.
        """
        manifest = Manifest.from_json(self._read(f"{digest}/{MANIFEST}"))
        library = self._read(f"{digest}/{LIBRARY}")
        if manifest.key.digest != digest:
            raise CacheError(f"its manifest is that of {manifest.key.digest}")
        return Entry(manifest.key, manifest.artifact_of(library))

    def _read(self, name: str) -> bytes:
        member = self._members[name]
        try:
            self._file.seek(member.start)
            return self._file.read(member.size)  # a truncated member fails the digest check
        except OSError as error:
            raise CacheError(f"unreadable: {error}") from error


def unpack(content: bytes) -> Entry:
    """Return the entry of an archive with a single one; the inverse of `pack`.

    Raises
    ------
    CacheError
        As `Reader`.
    """
    reader = Reader(io.BytesIO(content))
    if len(reader.digests) != 1:
        raise CacheError(f"it has {len(reader.digests)} entries, not one")
    return reader.read(reader.digests[0])


def _check(member: Record) -> None:
    match = _MEMBER.fullmatch(member.name)
    if match is None:
        raise CacheError(f"member {member.name!r} is not a file of a cache entry")
    if member.is_compressed:
        raise CacheError(f"member {member.name!r} is compressed")
    if member.size > _LIMITS[match[2]]:
        raise CacheError(f"member {member.name!r} cannot have {member.size} bytes")

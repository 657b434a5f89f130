"""Read entries of a torch archive, an untrusted zip file."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

from modelsummary.errors import ModelFileError

__all__ = ["Archive"]

_KINDS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_LARGEST_UNPACKED = 64 * 2**20  # bytes of all compressed entries together: torch compresses code alone


class Archive:
    """Entries of a zip file by name, without the folder that contains all of them.

    Raises:
        ModelFileError: the file is not a zip file, or is broken; entries declare impossible sizes; or torch could read
            them differently, because two have the same name or they are in several folders.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
            size = path.stat().st_size
        except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile):
            raise ModelFileError(f"{str(path)!r} is not a torch archive, or is truncated") from None
        entries = self._zip.infolist()
        if any(entry.compress_type not in _KINDS for entry in entries):  # torch reads no others
            raise ModelFileError(f"{str(path)!r} has an entry that is packed as torch packs none")
        stored = sum(each.file_size for each in entries if each.compress_type == zipfile.ZIP_STORED)
        packed = sum(each.file_size for each in entries if each.compress_type != zipfile.ZIP_STORED)
        if stored > size or packed > _LARGEST_UNPACKED:
            raise ModelFileError(f"{str(path)!r}: an entry declares more bytes than the file can hold")
        if len({each.filename.lower() for each in entries}) < len(entries):  # torch ignores case
            raise ModelFileError(f"{str(path)!r} has two entries with the same name")
        if len({each.filename.partition("/")[0] for each in entries if "/" in each.filename}) > 1:
            raise ModelFileError(f"{str(path)!r} has entries in several folders; torch writes one")
        self._entries = {each.filename.partition("/")[2] or each.filename: each for each in entries}

    @property
    def names(self) -> list[str]:
        """Names of the entries."""
        return list(self._entries)

    def size(self, name: str) -> int:
        """Return the number of bytes of an entry; 0 if it is missing."""
        entry = self._entries.get(name)
        return 0 if entry is None else entry.file_size

    def packed_size(self, name: str) -> int:
        """Return the number of bytes that an entry takes in the file."""
        return self._entries[name].compress_size

    def read(self, name: str) -> bytes:
        """Return the bytes of an entry; raise ``ModelFileError`` if it is missing or damaged."""
        try:
            return self._zip.read(self._entries[name])
        except KeyError:
            raise ModelFileError(f"{str(self.path)!r} has no entry {name!r}") from None
        except Exception as error:  # zlib's errors, bad checksums, encrypted entries
            raise ModelFileError(f"{str(self.path)!r}: entry {name!r} cannot be read: {error}") from None

    def read_json(self, name: str) -> Any:
        """Return the value of a JSON entry; raise ``ModelFileError`` if it is not JSON."""
        try:
            return json.loads(self.read(name))
        except (ValueError, RecursionError) as error:
            raise ModelFileError(f"{str(self.path)!r}: entry {name!r} is not JSON: {error}") from None

"""Read entries of a torch archive, an untrusted zip file."""

from __future__ import annotations

import io
import json
import weakref
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelsummary.errors import ModelFileError
from modelsummary.files.program import Stored

__all__ = ["Archive"]

_KINDS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_LARGEST_DATA = 32 * 2**20  # bytes of a pickle or of JSON: what it becomes takes ten times as many
_LARGEST_UNPACKED = 64 * 2**20  # bytes of all compressed entries together: torch compresses code alone
_LARGEST_DIRECTORY = 8 * 2**20  # bytes of the list of entries, which takes ten times as many when it is read
# The number at the begin of a file that torch.save(_use_new_zipfile_serialization=False) writes, as a pickle.
_LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19"
_CONVERT = (
    "convert it: torch.save(torch.load(path, weights_only=True), 'new.pt'), with weights_only=False if it holds more "
    "than tensors and you trust it"
)


class Archive:
    """Entries of a zip file by name, without the folder that contains all of them.

    Raises:
        ModelFileError: the file is not a zip file, or is broken; entries declare impossible sizes; or torch could read
            them differently, because two have the same name or they are in several folders.
    """

    def __init__(self, path: Path) -> None:
        try:
            file = _WithSmallDirectory(path)
            weakref.finalize(self, file.close)
            self._zip = zipfile.ZipFile(file)
            file.longest_read = None
            size = path.stat().st_size
        except ModelFileError:  # a ValueError, too
            raise
        except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile):
            if _begin_of(path) == _LEGACY:
                raise ModelFileError(
                    f"it is a checkpoint in torch's format before 1.6, which is not read; {_CONVERT}"
                ) from None
            raise ModelFileError("it is not a torch archive, or is truncated") from None
        entries = self._zip.infolist()
        if any(entry.compress_type not in _KINDS for entry in entries):  # torch reads no others
            raise ModelFileError("it has an entry that is packed as torch packs none")
        stored = sum(entry.file_size for entry in entries if entry.compress_type == zipfile.ZIP_STORED)
        packed = sum(entry.file_size for entry in entries if entry.compress_type != zipfile.ZIP_STORED)
        if stored > size or packed > _LARGEST_UNPACKED:
            raise ModelFileError("an entry declares more bytes than the file can hold")
        if len({entry.filename.lower() for entry in entries}) < len(entries):  # torch ignores case
            raise ModelFileError("it has two entries with the same name")
        if len({entry.filename.partition("/")[0] for entry in entries if "/" in entry.filename}) > 1:
            raise ModelFileError("it has entries in several folders; torch writes one")
        self._entries = {entry.filename.partition("/")[2] or entry.filename: entry for entry in entries}

    @property
    def names(self) -> list[str]:
        """Names of the entries."""
        return list(self._entries)

    def size(self, name: str) -> int:
        """Return the number of bytes of an entry; 0 if it is missing."""
        entry = self._entries.get(name)
        return 0 if entry is None else entry.file_size

    def stored(self, itemsizes: Mapping[str, int]) -> Stored:
        """Return the elements and bytes of entries that hold tensors, each once: name -> bytes of an element."""
        sizes = {name: self.size(name) for name in itemsizes}
        return Stored(sum(size // itemsizes[name] for name, size in sizes.items()), sum(sizes.values()))

    def packed_size(self, name: str) -> int:
        """Return the number of bytes that an entry takes in the file."""
        return self._entries[name].compress_size

    def read_data(self, name: str) -> bytes:
        """Return the bytes of a pickle or JSON; raise ``ModelFileError`` if it is missing, damaged or too large."""
        if self.size(name) > _LARGEST_DATA:
            raise ModelFileError(f"{name[:80]} has {self.size(name):,} bytes; more than {_LARGEST_DATA:,} are not read")
        return self.read(name)

    def read(self, name: str) -> bytes:
        """Return the bytes of an entry; raise ``ModelFileError`` if it is missing or damaged."""
        try:
            return self._zip.read(self._entries[name])
        except KeyError:
            raise ModelFileError(f"it has no entry {name!r}") from None
        except Exception as error:  # zlib's errors, bad checksums, encrypted entries
            raise ModelFileError(f"entry {name!r} cannot be read: {error}") from None

    def read_json(self, name: str) -> Any:
        """Return the value of a JSON entry; raise ``ModelFileError`` if it is not JSON."""
        try:
            return json.loads(self.read_data(name))
        except ModelFileError:  # a ValueError, too
            raise
        except (ValueError, RecursionError) as error:
            raise ModelFileError(f"entry {name!r} is not JSON: {error}") from None


def _begin_of(path: Path) -> bytes:
    """Return the first bytes of a file, as many as the number of the legacy format has."""
    with path.open("rb") as file:
        return file.read(len(_LEGACY))


class _WithSmallDirectory(io.FileIO):
    """A file whose reads are limited while ``zipfile`` looks for the directory, which it reads at once.

    Attributes:
        longest_read: the largest number of bytes that one read may take; None for no limit.
    """

    longest_read: int | None = _LARGEST_DIRECTORY

    def read(self, size: int | None = -1) -> bytes:
        """Return the next bytes; raise ``ModelFileError`` if they are too many."""
        if self.longest_read is not None and (size or 0) > self.longest_read:
            raise ModelFileError(
                f"it lists its entries in {size:,} bytes; more than {self.longest_read:,} are not read"
            )
        return super().read(-1 if size is None else size) or b""

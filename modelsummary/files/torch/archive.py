"""The parts of a torch archive, a zip file that nobody vouches for."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

from modelsummary.errors import ModelFileError

__all__ = ["Archive"]


class Archive:
    """Entries of a zip file by name, without the folder that all of them are in.

    Raises:
        ModelFileError: this is no zip file, or a broken one; torch compresses nothing, so an entry that is larger
            than the file is refused.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
            size = path.stat().st_size
        except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile):
            raise ModelFileError(f"{str(path)!r} is no archive of torch, or a truncated one") from None
        self._entries = {each.filename.partition("/")[2] or each.filename: each for each in self._zip.infolist()}
        if any(each.file_size > size for each in self._zip.infolist()):
            raise ModelFileError(f"{str(path)!r}: an entry says that it is larger than the file")

    @property
    def names(self) -> list[str]:
        """Names of the entries."""
        return list(self._entries)

    def read(self, name: str) -> bytes:
        """An entry's bytes; raises ``ModelFileError`` if they are not there or damaged."""
        try:
            return self._zip.read(self._entries[name])
        except KeyError:
            raise ModelFileError(f"{str(self.path)!r} has no entry {name!r}") from None
        except Exception as error:  # zlib's errors, bad checksums, encrypted entries
            raise ModelFileError(f"{str(self.path)!r}: entry {name!r} cannot be read: {error}") from None

    def read_json(self, name: str) -> Any:
        """An entry that is JSON."""
        try:
            return json.loads(self.read(name))
        except (ValueError, RecursionError) as error:
            raise ModelFileError(f"{str(self.path)!r}: entry {name!r} is no JSON: {error}") from None

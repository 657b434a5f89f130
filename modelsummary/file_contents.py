"""Contents of files: texts and bytes that are written, TOML that is read. An unusable path is an ``InputError``."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any

from modelsummary.errors import InputError

__all__ = ["packaged", "read_toml", "saved", "toml_text"]


def saved(content: str | bytes, path: str | PathLike[str]) -> Path:
    """Write a text, or bytes, to a file and return its path.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        target = Path(path)
        target.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace"))
    except (OSError, TypeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        name = str(path) if isinstance(path, PathLike) else path
        raise InputError(
            f"path={name!r:.200} cannot be written: {reason}; pass a file in a folder that exists"
        ) from error
    return target


def packaged(package: str, name: str) -> dict[str, Any]:
    """Return the values of a JSON file that a package of this library has beside its modules.

    >>> list(packaged("modelsummary.devices", "kernel_fits.json"))[:2]
    ['date', 'sources']
    """
    values: dict[str, Any] = json.loads(files(package).joinpath(name).read_text(encoding="utf-8"))
    return values


def read_toml(path: str | PathLike[str]) -> dict[str, Any]:
    """Return the values of a TOML file.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, TypeError, ValueError) as error:
        raise InputError(f"path={str(path)!r:.200} is not a readable TOML file: {error}") from error


def toml_text(values: Mapping[str, Any]) -> str:
    """Return values as the text of a TOML file; None is left out, and dtypes have their names.

    >>> print(toml_text({"device": {"name": "A100"}, "nodes": 2, "name": None}), end="")
    nodes = 2
    <BLANKLINE>
    [device]
    name = "A100"
    """
    return "\n".join(_lines(values)) + "\n"


def _lines(values: Mapping[str, Any], table: str = "") -> Iterator[str]:
    """Yield the lines of a TOML file: first the values, then tables of values."""
    for name, value in values.items():
        if not isinstance(value, Mapping) and value is not None:
            yield f"{name} = {json.dumps(value)}"
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield f"\n[{table}{name}]"
            keys = {str(key).removeprefix("torch."): entry for key, entry in value.items()}
            yield from _lines(keys, f"{table}{name}.")

"""Conversion of a tree to a JSON document, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any

from modelsummary.errors import InputError
from modelsummary.layer_info import LayerInfo, Sizes

__all__ = ["FORMAT", "VERSION", "read_document", "rows_of", "tree_of"]

_REMEDY = "pass a file of to_json(), or of modelsummary ... --format json"
FORMAT = "modelsummary"
VERSION = 1
_SIZES = ("input_size", "output_size")
_LARGEST = 256 * 2**20  # bytes of a file: what it becomes takes ten times as many
_MOST_DIGITS = 38  # of an integer: floats hold larger ones, but no model has them
_DEEPEST, _DEEPEST_SIZE = 200, 50  # rows below rows, and containers in a size: views go through them recursively
_OPTIONAL = ("findings", "values")  # only where a call filled them
_LINKS = ("module", "parent_info", "children")
_FACTS = tuple(field.name for field in fields(LayerInfo) if field.name not in _LINKS)
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "str": (str,),
    "int | None": (int, type(None)),
    "float | None": (int, float, type(None)),
    "list[int]": (list,),
    "dict[str, list[int] | None]": (dict,),
    "dict[str, int]": (dict,),
    "str | None": (str, type(None)),
    "dict[str, float] | None": (dict, type(None)),
}
_KINDS = {
    field.name: _PYTHON_TYPES[str(field.type)]
    for field in fields(LayerInfo)
    if field.name in _FACTS and str(field.type) in _PYTHON_TYPES
}


def rows_of(root: LayerInfo) -> list[dict[str, Any]]:
    """Return all facts of all rows, in printed order; ``parent`` is the number of the row above, None for the model.

    A list of integers is a tensor's shape. ``{"items": [...]}`` and ``{"fields": {...}}`` are containers of shapes. The
    ``layer_id`` is a running number instead of the module's ``id()``.

    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> root = Statistics(nn.Sequential(nn.Linear(2, 3)), (1, 2)).root
    >>> [(row["parent"], row["class_name"], row["output_size"]) for row in rows_of(root)]
    [(None, 'Sequential', [1, 3]), (0, 'Linear', [1, 3])]
    """
    rows = list(root.walk())
    numbers = {id(row): index for index, row in enumerate(rows)}
    layers: dict[int, int] = {}
    records = []
    for row in rows:
        record = {name: getattr(row, name) for name in _FACTS}
        record = {name: fact for name, fact in record.items() if fact is not None or name not in _OPTIONAL}
        record |= {name: _packed(record[name]) for name in _SIZES}
        record["layer_id"] = layers.setdefault(row.layer_id, len(layers))
        records.append({"parent": None if row is root else numbers[id(row.parent_info)], **record})
    return records


def _packed(sizes: Sizes) -> Any:
    if isinstance(sizes, tuple):
        return {"items": [_packed(inner) for inner in sizes]}
    if isinstance(sizes, Mapping):
        return {"fields": {key: _packed(inner) for key, inner in sizes.items()}}
    return sizes


def _unpacked(value: Any, depth: int = 0) -> Sizes:
    if depth > _DEEPEST_SIZE:
        raise TypeError(f"containers of shapes are nested more than {_DEEPEST_SIZE} deep")
    if isinstance(value, dict):
        if "items" in value:
            return tuple(_unpacked(inner, depth + 1) for inner in value["items"])
        return {key: _unpacked(inner, depth + 1) for key, inner in value["fields"].items()}
    dims = value if isinstance(value, list) else []
    if not isinstance(value, (list, str, type(None))) or not all(type(dim) in (int, str) for dim in dims):
        raise TypeError(f"expected a shape, got {value!r:.40}")
    sizes: Sizes = value
    return sizes


def read_document(source: str | PathLike[str]) -> dict[str, Any]:
    """Read and check a document, and return its facts.

    Args:
        source: JSON text, or the path of a JSON file.

    Raises:
        InputError: the text is not a document of modelsummary, or has another version.
    """
    if not isinstance(source, (str, PathLike)) or not str(source):
        raise InputError(
            "source must be JSON text or the path of a JSON file, got "
            f"{type(source).__name__}: {source!r:.80}; {_REMEDY}"
        )
    is_text = isinstance(source, str) and source.lstrip("\ufeff \t\r\n").startswith(("{", "["))
    try:
        text = str(source) if is_text else _text_of(Path(source))
        facts = json.loads(text.lstrip("\ufeff"), parse_int=_integer, parse_float=_finite, parse_constant=_finite)
    except InputError:  # a ValueError, too
        raise
    except OSError as error:
        raise InputError(f"{str(source)!r:.200} cannot be read: {error.strerror or error}; {_REMEDY}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{str(source)!r:.80} is not UTF-8 text: {error}; {_REMEDY}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{str(source)!r:.80} is not valid JSON: {error}; {_REMEDY}") from None
    _check(facts)
    checked: dict[str, Any] = facts
    return checked


def _text_of(path: Path) -> str:
    """Return the text of a file; a pipe or device would never end."""
    if path.exists() and not path.is_file():
        raise InputError(f"{str(path)!r:.80} is not a file")
    size = path.stat().st_size
    if size > _LARGEST:
        raise InputError(f"{str(path)!r:.80} has {size:,} bytes; a document has at most {_LARGEST:,}")
    return path.read_text(encoding="utf-8-sig")


def _integer(text: str) -> int:
    if len(text.lstrip("-")) > _MOST_DIGITS:
        raise InputError(f"the document has the number {text:.40}...; integers have at most {_MOST_DIGITS} digits")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise InputError(f"the document has the number {text:.40}, which is not finite")
    return number


def _check(document: Any) -> None:
    """Raise ``InputError`` unless this version can read the document."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise InputError(
            f"this is not a document of modelsummary: expected an object with format={FORMAT!r}, got "
            f"{type(document).__name__}: {document!r:.80}; {_REMEDY}"
        )
    version = document.get("version")
    if type(version) is not int or version != VERSION:
        raise InputError(f"the document has version {version!r:.40}; this release reads version {VERSION}")
    execution, batch_dim = document.get("execution"), document.get("batch_dim")
    is_index = batch_dim is None or (type(batch_dim) is int and abs(batch_dim) < 2**31)
    if execution not in ("shape", "real", "file", "none") or not is_index:
        raise InputError(
            f"the document has execution={execution!r:.40} and batch_dim={batch_dim!r:.40}; expected 'shape', 'real', "
            "'file' or 'none', and an integer or null"
        )
    if not isinstance(document.get("rows"), list) or not document["rows"]:
        raise InputError("the document has no rows")


def tree_of(records: Sequence[Mapping[str, Any]]) -> LayerInfo:
    """Return the tree that ``rows_of`` wrote; its rows have no live modules.

    Raises:
        InputError: a row is incomplete, or a value has the wrong type.
    """
    rows: list[LayerInfo] = []
    depths: list[int] = []
    try:
        for record in records:
            facts: dict[str, Any] = {name: record[name] for name in _FACTS if name not in _OPTIONAL}
            facts |= {name: record.get(name) for name in _OPTIONAL}
            facts |= {name: _unpacked(facts[name]) for name in _SIZES}
            for name, kinds in _KINDS.items():
                if not isinstance(facts[name], kinds):
                    raise InputError(f"row {len(rows)} of the document has {name}={facts[name]!r:.40}")
            if not 0 <= facts["depth"] <= len(rows):
                raise InputError(f"row {len(rows)} of the document has depth={facts['depth']!r:.40}")
            parent = rows[record["parent"]] if rows else None
            depths.append(0 if parent is None else depths[record["parent"]] + 1)
            if depths[-1] > _DEEPEST:
                raise InputError(f"rows of the document are nested more than {_DEEPEST} deep")
            rows.append(LayerInfo(module=None, parent_info=parent, **facts))
            if parent is not None:
                parent.children.append(rows[-1])
        return rows[0]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__} {error}"
        raise InputError(f"row {len(rows)} of the document is incomplete: {why[:200]}") from None

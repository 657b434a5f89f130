"""The tree as data (records, CSV, data frames) and as tables for documents (Markdown, LaTeX, HTML)."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from importlib import resources
from os import PathLike
from typing import TYPE_CHECKING, Any

from modelsummary.errors import harmless
from modelsummary.extras import data_frame
from modelsummary.file_contents import saved
from modelsummary.layer_info import LayerInfo
from modelsummary.units import PREFIXES, symbol
from modelsummary.views.cells import TableOptions, lay_out, rows_shown
from modelsummary.views.columns import COLUMNS, Column, find_columns

if TYPE_CHECKING:
    import pandas

__all__ = [
    "FACTS",
    "Texts",
    "in_script",
    "static",
    "to_csv",
    "to_document",
    "to_pandas",
    "to_records",
    "written",
]

# Records have parameters and MACs of a row both alone and with its descendants. They leave out the columns of printed
# tables that show one or the other, depending on the rows below.
_PRINTED = ("num_params", "params_percent", "mult_adds")
_FORMULAS = frozenset("=+-@|%＝＋－＠")  # of spreadsheets, in any width
_IDENTITY = ("fqn", "name", "class_name", "depth", "depth_index", "call_index", "executed")
FACTS = (*_IDENTITY, *(name for name in COLUMNS if name not in (*_IDENTITY, *_PRINTED)))


def to_records(root: LayerInfo, options: TableOptions) -> list[dict[str, Any]]:
    """Return one dict per row: column name -> raw value; counts and bytes are divided by the prefix ``options.units``.

    Without ``options.columns`` the dicts have the measured columns of ``FACTS``.

    Raises:
        InputError: a column is unknown.

    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> root = Statistics(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), (1, 2)).root
    >>> to_records(root, TableOptions(columns=["fqn", "macs"]))
    [{'fqn': '', 'macs': 6}, {'fqn': '0', 'macs': 6}, {'fqn': '1', 'macs': 0}]
    """
    names = options.columns
    rows = rows_shown(root, options)
    columns = find_columns(FACTS if names is None else names, root, executed=True)
    if names is None:
        columns = [
            (name, column) for name, column in columns if any(column.value(shown.row) is not None for shown in rows)
        ]
    keys = [_key(name, column, options.units) for name, column in columns]
    return [
        {
            key: _scaled(column.of(row, row.depth == options.level and bool(row.children)), column, options.units)
            for key, (_, column) in zip(keys, columns, strict=True)
        }
        for row, *_ in rows
    ]


def _key(name: str, column: Column, units: str | None) -> str:
    if not units or column.kind not in ("count", "bytes"):
        return name
    return f"{name} ({symbol(units, 'B' if column.kind == 'bytes' else '')})"


def _scaled(value: Any, column: Column, units: str | None) -> Any:
    return value / PREFIXES[units] if units and value is not None and column.kind in ("count", "bytes") else value


def to_csv(root: LayerInfo, options: TableOptions) -> str:
    """Return the records as comma-separated values (RFC 4180) with a header line; shapes as Python prints them.

    A spreadsheet runs texts that begin like a formula: they get an apostrophe in front. Numbers stay numbers.
    """
    records = [{key: _inert(value) for key, value in record.items()} for record in to_records(root, options)]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]))
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def _inert(value: Any) -> Any:
    """Return a text that no spreadsheet takes for a formula, and any other value as it is.

    The mark for no value, two dashes, is not a formula.

    >>> [_inert(value) for value in ("=1+1", " @x", "--", -1.5)]
    ["'=1+1", "' @x", '--', -1.5]
    """
    if not isinstance(value, str):
        return value
    return harmless(f"'{value}" if value.lstrip()[:1] in _FORMULAS and value.strip("-") else value)


def to_pandas(root: LayerInfo, options: TableOptions) -> pandas.DataFrame:
    """Return the records as a data frame. Raises ``MissingExtraError`` without pandas."""
    return data_frame(to_records(root, options))


def to_document(root: LayerInfo, options: TableOptions, form: str, *, executed: bool, batch_dim: int | None) -> str:
    """Return a table for a document: ``"markdown"`` of GitHub, ``"latex"`` for booktabs, or ``"html"``.

    LaTeX has FQNs instead of branches; HTML is a ``<table>`` without style or script.
    """
    if form == "latex":
        options = replace(options, branching=False, ascii_only=True)
    return lay_out(root, options, executed=executed, batch_dim=batch_dim).document(form)


def written(content: str, path: str | PathLike[str] | None) -> str:
    """Return a text, and write it to ``path`` if one is given. Raise ``InputError`` if it cannot be written."""
    if path is not None:
        saved(content, path)
    return content


class Texts:
    """Texts by their position in a list, each stored once.

    >>> texts = Texts()
    >>> texts.places(["a", "b", "a"]), texts.every
    ([0, 1, 0], ['a', 'b'])
    """

    def __init__(self, *texts: str) -> None:
        self._place = {text: index for index, text in enumerate(texts)}

    @property
    def every(self) -> list[str]:
        """All texts."""
        return list(self._place)

    def place(self, text: str) -> int:
        """Return the position of a text, which is added if it is new."""
        return self._place.setdefault(text, len(self._place))

    def places(self, texts: Iterable[str]) -> list[int]:
        """Return the position of each text."""
        return [self.place(text) for text in texts]


@cache
def static(name: str) -> str:
    """Return the text of a file of the front end, by its path below ``static``."""
    return (resources.files("modelsummary.views") / "static" / name).read_text(encoding="utf-8")


def in_script(text: str) -> str:
    """Return JSON that cannot end the ``<script>`` that holds it, whatever the names in it are."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")

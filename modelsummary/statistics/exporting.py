"""How ``ModelStatistics`` leaves Python: as data, as tables for documents, and as HTML for notebooks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from modelsummary.errors import MissingExtraError
from modelsummary.layer_info import LayerInfo
from modelsummary.statistics.measuring import Measuring
from modelsummary.views import document, export
from modelsummary.views.cells import TableOptions
from modelsummary.views.html import to_notebook
from modelsummary.views.text import footer

if TYPE_CHECKING:
    import pandas

__all__ = ["Exporting"]

Path_ = str | PathLike[str] | None


class Exporting(Measuring):
    """The part of ``ModelStatistics`` that writes it in other formats.

    All methods but ``to_dict`` and ``to_json`` take ``columns`` (names of ``modelsummary.views.columns.COLUMNS``),
    ``depth`` (the deepest level shown; None: all; default: that of ``Statistics``) and ``units`` (a prefix such as
    ``"M"`` for counts and bytes), and raise ``InputError`` for an unusable one.
    """

    root: LayerInfo
    execution: str
    fallback_reason: str | None
    options: TableOptions

    def to_records(
        self,
        columns: Sequence[str] | None = None,
        depth: int | EllipsisType | None = ...,
        units: str | None = None,
    ) -> list[dict[str, Any]]:
        """One dict a row, column name -> raw value: numbers, shapes as lists, None for what was not measured.

        By default all facts that the rows have. With ``units`` counts and bytes are divided, and their names tell so:
        ``"macs (M)"``.
        """
        return export.to_records(self.root, self._options(columns, depth, units))

    def to_dict(self) -> dict[str, Any]:
        """Everything that is known, as plain data for JSON; ``ModelStatistics.from_json`` reads it.

        The key ``"version"`` changes whenever the meaning of another one does.
        """
        overhead = self.latency_overhead
        return {
            "format": document.FORMAT,
            "version": document.VERSION,
            "execution": self.execution,
            "fallback_reason": self.fallback_reason,
            "batch_dim": self.batch_dim,
            "options": asdict(self.options),
            "latency_overhead": None if overhead is None else overhead.to_dict(),
            "rows": document.rows_of(self.root),
        }

    def to_json(self, path: Path_ = None, *, indent: int | None = None) -> str:
        """``to_dict()`` as JSON text, written to ``path`` if one is given."""
        return _written(json.dumps(self.to_dict(), indent=indent), path)

    def to_csv(
        self,
        path: Path_ = None,
        columns: Sequence[str] | None = None,
        depth: int | EllipsisType | None = ...,
        units: str | None = None,
    ) -> str:
        """The records as comma-separated values with a header line, written to ``path`` if one is given."""
        return _written(export.to_csv(self.root, self._options(columns, depth, units)), path)

    def to_pandas(
        self,
        columns: Sequence[str] | None = None,
        depth: int | EllipsisType | None = ...,
        units: str | None = None,
    ) -> pandas.DataFrame:
        """The records as a ``pandas.DataFrame``, a row each.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise MissingExtraError("pandas", "pandas") from error
        frame: pandas.DataFrame = pandas.DataFrame(self.to_records(columns, depth, units))
        return frame

    def to_markdown(
        self,
        path: Path_ = None,
        columns: Sequence[str] | None = None,
        depth: int | EllipsisType | None = ...,
        units: str | None = None,
    ) -> str:
        """The table in GitHub's Markdown, written to ``path`` if one is given."""
        return _written(export.to_markdown(self.root, self._options(columns, depth, units), **self._ran()), path)

    def to_latex(
        self,
        path: Path_ = None,
        columns: Sequence[str] | None = None,
        depth: int | EllipsisType | None = ...,
        units: str | None = None,
    ) -> str:
        """The table as a LaTeX ``tabular`` for the package booktabs, written to ``path`` if one is given."""
        return _written(export.to_latex(self.root, self._options(columns, depth, units), **self._ran()), path)

    def to_html(
        self,
        path: Path_ = None,
        columns: Sequence[str] | None = None,
        depth: int | EllipsisType | None = ...,
        units: str | None = None,
        *,
        foldable: bool = False,
    ) -> str:
        """The table in HTML, written to ``path`` if one is given.

        Args:
            foldable: the tree that notebooks show, with its style and script; else a plain ``<table>``.
        """
        options = self._options(columns, depth, units)
        if not foldable:
            return _written(export.to_html(self.root, options, **self._ran()), path)
        remarks = [] if self.latency_overhead is None else [str(self.latency_overhead)]
        said = footer(self.root, execution=self.execution, fallback_reason=self.fallback_reason, remarks=remarks)
        lines = [line for section in said for line in section]
        return _written(to_notebook(self.root, options, lines, **self._ran()), path)

    def _repr_html_(self) -> str:
        return self.to_html(foldable=True)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self._repr_html_()}

    def _ran(self) -> dict[str, Any]:
        return {"executed": self.execution != "none", "batch_dim": self.batch_dim}

    def _options(
        self, columns: Sequence[str] | None, depth: int | EllipsisType | None, units: str | None
    ) -> TableOptions:
        level = self.options.depth if isinstance(depth, EllipsisType) else depth
        return TableOptions(columns=columns, depth=level, branching=self.options.branching, units=units)


def _written(text: str, path: Path_) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8", errors="backslashreplace", newline="")
    return text

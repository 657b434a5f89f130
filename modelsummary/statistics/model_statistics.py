"""``ModelStatistics``: the facts about a model as data, and every view of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal

from modelsummary.devices.device_spec import DeviceSpec, Precision
from modelsummary.devices.roofline import Roofline, dtype_of, estimate, roofline
from modelsummary.errors import InputError, NotLiveError
from modelsummary.latency.measure import LatencyOverhead
from modelsummary.layer_info import LayerInfo
from modelsummary.memory.estimate import MemoryEstimate
from modelsummary.statistics.explorable import ExplorableTree
from modelsummary.statistics.hints import is_live, meant
from modelsummary.views import document, export, text
from modelsummary.views.amounts import find_amounts
from modelsummary.views.cells import TableOptions
from modelsummary.views.html import to_notebook
from modelsummary.views.labels import check_depth
from modelsummary.views.reports import latency_lines, profile_report
from modelsummary.views.terminal import shows_colours

if TYPE_CHECKING:  # imported on first use
    import pandas


__all__ = ["ModelStatistics"]

Path_ = str | PathLike[str] | None
Columns = Sequence[str] | None
Depth = int | Literal["auto"] | EllipsisType | None
Prefix = str | None


class ModelStatistics(ExplorableTree):
    """The facts about a model as data: a tree of ``LayerInfo``, its totals, and views of it.

    ``load``, ``from_json`` and ``Profiler`` return this; ``Statistics`` adds methods that run the live model again.

    ``table`` and the exports of tables take ``columns`` (names of ``modelsummary.views.columns.COLUMNS``), ``depth``
    (the deepest level shown; None: all; default: as passed to ``Statistics``) and ``units`` (a prefix such as ``"M"``
    for counts and bytes). They raise ``InputError`` for an unusable argument. With ``path``, they also write the text
    to that file. ``fold=True`` shows equal siblings once, with their number.

    Statistics can be pickled; the rows of the copy have no live module.

    Args:
        root: the row of the model.
        execution: source of the numbers: ``"shape"``, ``"real"``, ``"file"`` (a graph was read), or ``"none"`` without
            a forward.
        fallback_reason: why shape-only execution fell back to real execution, or None.
        batch_dim: dimension that views print as -1, or None.
        options: options of the printed table.

    Attributes:
        latency_overhead: cost of measuring latency; None before a measurement.
        remarks: lines to print below the table.
    """

    latency_overhead: LatencyOverhead | None = None
    remarks: Sequence[str] = ()

    def __init__(
        self,
        root: LayerInfo,
        *,
        execution: str = "none",
        fallback_reason: str | None = None,
        batch_dim: int | None = None,
        options: TableOptions | None = None,
    ) -> None:
        super().__init__(root)
        self.execution = execution
        self.fallback_reason = fallback_reason
        self.batch_dim = batch_dim
        self.options = options or TableOptions()

    @staticmethod
    def from_json(source: str | PathLike[str]) -> ModelStatistics:
        """Return the statistics that ``to_json`` wrote; rows have no live modules.

        Args:
            source: the JSON text, or the path of a file with it.

        Raises:
            InputError: the text is not such a document, or has another version.
        """
        facts = document.read_document(source)
        root = document.tree_of(facts["rows"])
        try:
            names = ("execution", "fallback_reason", "batch_dim")
            options = TableOptions(**facts["options"])
            stats = ModelStatistics(root, **{name: facts[name] for name in names}, options=options)
            stats.remarks = [str(each) for each in facts.get("remarks", ())]
            if facts["latency_overhead"] is not None:
                stats.latency_overhead = LatencyOverhead.from_dict(facts["latency_overhead"])
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(f"the document is incomplete: {type(error).__name__} {error}") from None
        return stats

    if not TYPE_CHECKING:  # type checkers see only the attributes that exist

        def __getattr__(self, name: str) -> Any:
            if is_live(name):
                raise NotLiveError(self._not_live(name))
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{meant(type(self), name)}")

    def _not_live(self, name: str) -> str:
        return (
            f"{name} needs the live model and an input: pass input_data to Statistics; statistics that were pickled, "
            "loaded from a file or cut short by an error have none"
        )

    # -------------------------------------------------------------------------------------------- views

    def table(
        self,
        columns: Columns = None,
        depth: Depth = ...,
        *,
        branching: bool | None = None,
        var_names: bool = False,
        ascii_only: bool = False,
        hide_recursive: bool = False,
        all_shapes: bool = False,
        units: Prefix = None,
        fold: bool | None = None,
        sort: str | None = None,
    ) -> str:
        """Return the table as text; see ``modelsummary.views.cells.TableOptions`` for the arguments.

        ``depth`` and ``branching`` default to the arguments of ``Statistics``. A table of more than 100 rows folds
        equal siblings and shows as many levels as fit on a screen; ``depth=None, fold=False`` shows every row.
        ``sort="macs"`` lists the rows with the most multiply-adds first; it takes any amount that ``top`` takes.
        """
        shown: dict[str, Any] = {"ascii_only": ascii_only, "hide_recursive": hide_recursive, "all_shapes": all_shapes}
        shown |= {"fold": fold, "sort": sort}
        options = self._options(columns, depth, units, branching, var_names=var_names, **shown)
        return text.render(self.root, options, **self._facts(), remarks=self._remarks())

    def top(self, n: int = 10, by: str = "macs") -> list[LayerInfo]:
        """Return the ``n`` rows with the largest own amount, largest first, without rows that have none.

        Args:
            by: an amount that adds up over modules: ``"macs"``, ``"params"``, ``"flops"``, ``"bytes_read"``,
                ``"bytes_written"``, ``"activation_bytes"``, ``"latency"`` ... (names of ``split(by=...)``, columns and
                plots).

        Raises:
            InputError: the amount is unknown, was not measured, or the model has none of it.

        >>> from torch import nn
        >>> from modelsummary import Statistics
        >>> stats = Statistics(nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 4)), (1, 2))
        >>> [(row.fqn, row.self_macs) for row in stats.top(2)]
        [('1', 32), ('0', 16)]
        """
        own = find_amounts(self.root, by).own
        ranked = sorted((row for row in own if own[row]), key=lambda row: -own[row])
        return ranked[:n]

    def __str__(self) -> str:
        return self.printed()

    __repr__ = __str__

    def printed(self, *, colours: bool = False) -> str:
        """Return what ``print`` shows.

        Args:
            colours: for a terminal: add a bar for each row's share of the multiply-adds. Rows that make up 10 % of them
                or more are red, 3 % yellow, and rows without any are dim.
        """
        return text.render(self.root, self.options, **self._facts(), remarks=self._remarks(), colours=colours)

    def show(self) -> None:
        """Print the table, with colours if the output is a terminal and ``NO_COLOR`` is not set."""
        print(self.printed(colours=shows_colours(sys.stdout)))

    def _facts(self) -> dict[str, Any]:
        names = ("execution", "fallback_reason", "batch_dim")
        return {name: getattr(self, name) for name in names}

    def _remarks(self) -> list[str]:
        return [*self.remarks, *([] if self.latency_overhead is None else [str(self.latency_overhead)])]

    # ------------------------------------------------------------------------------------------ exports

    def to_records(self, columns: Columns = None, depth: Depth = ..., units: Prefix = None) -> list[dict[str, Any]]:
        """Return one dict per row, column name -> raw value: numbers, shapes as lists, None if not measured.

        ``columns`` defaults to all facts. With ``units``, counts and bytes are divided, and the names say so:
        ``"macs (M)"``.

        >>> from torch import nn
        >>> from modelsummary import Statistics
        >>> Statistics(nn.Linear(2, 8), (1, 2)).to_records(["class_name", "macs", "output_size"])
        [{'class_name': 'Linear', 'macs': 16, 'output_size': [1, 8]}]
        """
        return export.to_records(self.root, self._options(columns, depth, units))

    def to_dict(self) -> dict[str, Any]:
        """Return all facts as plain data for JSON, which ``ModelStatistics.from_json`` reads.

        The value of ``"version"`` changes whenever the meaning of another key does.
        """
        overhead = self.latency_overhead
        return {
            "format": document.FORMAT,
            "version": document.VERSION,
            **self._facts(),
            "options": asdict(self.options),
            "latency_overhead": None if overhead is None else overhead.to_dict(),
            "remarks": list(self.remarks),
            "rows": document.rows_of(self.root),
        }

    def to_json(self, path: Path_ = None, *, indent: int | None = None) -> str:
        """Return ``to_dict()`` as JSON text."""
        return export.written(json.dumps(self.to_dict(), indent=indent), path)

    def to_csv(self, path: Path_ = None, columns: Columns = None, depth: Depth = ..., units: Prefix = None) -> str:
        """Return the records as comma-separated values with a header line."""
        return export.written(export.to_csv(self.root, self._options(columns, depth, units)), path)

    def to_pandas(self, columns: Columns = None, depth: Depth = ..., units: Prefix = None) -> pandas.DataFrame:
        """Return the records as a ``pandas.DataFrame``.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return export.to_pandas(self.root, self._options(columns, depth, units))

    def to_markdown(
        self,
        path: Path_ = None,
        columns: Columns = None,
        depth: Depth = ...,
        units: Prefix = None,
        *,
        fold: bool = False,
    ) -> str:
        """Return the table in GitHub's Markdown."""
        options = self._options(columns, depth, units, fold=fold)
        return export.written(export.to_markdown(self.root, options, **self._ran()), path)

    def to_latex(
        self,
        path: Path_ = None,
        columns: Columns = None,
        depth: Depth = ...,
        units: Prefix = None,
        *,
        fold: bool = False,
    ) -> str:
        """Return the table as a LaTeX ``tabular`` for the package booktabs."""
        options = self._options(columns, depth, units, fold=fold)
        return export.written(export.to_latex(self.root, options, **self._ran()), path)

    def to_html(
        self,
        path: Path_ = None,
        columns: Columns = None,
        depth: Depth = ...,
        units: Prefix = None,
        *,
        fold: bool | None = None,
        foldable: bool = False,
    ) -> str:
        """Return the table in HTML.

        Args:
            fold: show equal siblings once. None: in trees of more than 100 rows; a plain table has every row.
            foldable: return the tree that notebooks show, with its style and script; else a plain ``<table>``.
        """
        options = self._options(columns, depth, units, fold=fold)
        if not foldable:
            return export.written(export.to_html(self.root, options, **self._ran()), path)
        facts: dict[str, Any] = {"execution": self.execution, "fallback_reason": self.fallback_reason}
        said = text.footer(self.root, **facts, remarks=self._remarks())
        lines = [line for section in said for line in section]
        return export.written(to_notebook(self.root, options, lines, **self._ran()), path)

    def _repr_html_(self) -> str:
        return self.to_html(foldable=True)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": self.printed(colours=shows_colours(sys.stdout)), "text/html": self._repr_html_()}

    def _ran(self) -> dict[str, Any]:
        return {"executed": self.execution != "none", "batch_dim": self.batch_dim}

    def _options(
        self, columns: Columns, depth: Depth, units: Prefix, branching: bool | None = None, **shown: Any
    ) -> TableOptions:
        level = self.options.depth if isinstance(depth, EllipsisType) else depth
        branching = self.options.branching if branching is None else branching
        return TableOptions(columns=columns, depth=level, branching=branching, units=units, **shown)

    # ------------------------------------------------------------------------------- pictures and reports

    def to_chrome_trace(self, path: str | PathLike[str], *, memory: MemoryEstimate | None = None) -> Path:
        """Write the measured latency as trace events, for ui.perfetto.dev or ``chrome://tracing``.

        Every timed call is a bar with its facts, nested as the calls are, with one track for the forward and one for
        the backward. The bars are medians laid end to end, not a recording of one run.

        Args:
            path: path of the JSON file.
            memory: result of ``memory()``: its timeline is drawn as counters, in bytes by category, under the modules
                that it belongs to. An operator of an untimed module takes one microsecond.

        Returns:
            The path.

        Raises:
            InputError: nothing was measured and ``memory`` is None, ``memory`` is from another model, or the file
                cannot be written.
        """
        from modelsummary.views.chrome_trace import write_trace

        return write_trace(self.root, path, memory)

    def estimate_latency(self, device: DeviceSpec | str, *, dtype: Precision | None = None) -> float:
        """Return the least milliseconds of a forward on a device, by its roofline.

        Fills ``estimated_latency_ms`` of every row; ``split(by="latency")`` and ``plan(by="latency")`` use it if
        nothing was measured. For a live model, ``Statistics`` predicts the time of kernels and of the backward instead.

        Args:
            device: a spec, or its name in the table of accelerators.
            dtype: dtype of the computation, ``"tf32"`` for float32 with TF32 products; default: the parameters' dtype.

        Raises:
            InputError: the device or its peak with this dtype is unknown.
        """
        return estimate(self.root, _device_spec(device), dtype or dtype_of(self.root))

    def roofline(self, spec: DeviceSpec | str, dtype: Precision | None = None, *, depth: int | None = None) -> Roofline:
        """Return every called module down to ``depth`` with its bound on a device, its limit, and the part reached.

        Args:
            spec, dtype: as ``device`` and ``dtype`` of ``estimate_latency``, whose predictions are shown, too.
            depth: deepest level; None: all.

        Raises:
            InputError: the device or its peak with this dtype is unknown.
        """
        return roofline(self.root, _device_spec(spec), dtype or dtype_of(self.root), check_depth(depth))

    def latency_report(self, *, depth: int | None = None, output_file: str | PathLike[str] | None = None) -> str:
        """Return one tab-indented line per call: parameters, latency, share, shapes; also write ``output_file``."""
        return export.written(latency_lines(self.root, check_depth(depth)) + "\n", output_file)[:-1]

    def profile_report(
        self,
        *,
        top_modules: int = 1,
        module_depth: int | None = None,
        detailed: bool = True,
        output_file: str | PathLike[str] | None = None,
    ) -> str:
        """Return totals, the most expensive classes per depth, and the model's repr with figures, as DeepSpeed does.

        Args:
            top_modules: number of classes per depth.
            module_depth: the deepest level shown; None: all.
            detailed: include the repr.
            output_file: path of a file to write as well.
        """
        options: dict[str, Any] = {"top_modules": top_modules, "module_depth": module_depth, "detailed": detailed}
        device = self.latency_overhead.device if self.latency_overhead is not None else ""
        return export.written(profile_report(self.root, **options, device=device) + "\n", output_file)[:-1]


def _device_spec(spec: DeviceSpec | str) -> DeviceSpec:
    return spec if isinstance(spec, DeviceSpec) else DeviceSpec.of(spec)

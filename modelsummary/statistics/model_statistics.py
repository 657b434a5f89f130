"""``ModelStatistics``: what is known of a model as data, and every view of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal

from modelsummary.costs.devices import DeviceSpec, Precision
from modelsummary.costs.roofline import Roofline, dtype_of, estimate, roofline
from modelsummary.errors import InputError, NotLiveError, close_to
from modelsummary.latency.measure import LatencyOverhead
from modelsummary.layer_info import LayerInfo
from modelsummary.memory.estimate import MemoryEstimate
from modelsummary.statistics.layer_tree import LayerTree
from modelsummary.views import document, export, text
from modelsummary.views.amounts import find_amounts
from modelsummary.views.cells import TableOptions
from modelsummary.views.html import to_notebook
from modelsummary.views.labels import check_depth
from modelsummary.views.reports import latency_lines, profile_report

if TYPE_CHECKING:  # what few ask for is imported for them only
    import pandas

    from modelsummary.views.diff import ModelDiff
    from modelsummary.views.plot import Pictures

__all__ = ["ModelStatistics"]

Path_ = str | PathLike[str] | None
Columns = Sequence[str] | None
Depth = int | Literal["auto"] | EllipsisType | None
Prefix = str | None
_LIVE = frozenset(
    "live measure_latency kernels calibrate memory measure_memory suggest_checkpoint max_batch_size"
    " split plan graph graph_module nodes_of".split()
)


_MEANT = {  # names that people try
    "flops": "total_flops",
    "macs": "total_macs",
    "params": "total_params",
    "num_params": "total_params",
    "parameters": "total_params",
    "layers": "summary_list",
    "summary": "print(stats), or table()",
}


class ModelStatistics(LayerTree):
    """What is known of a model, as data: a tree of ``LayerInfo``, its totals, and views of it.

    ``load``, ``from_json`` and ``Profiler`` give this; ``Statistics`` adds what runs the live model again.

    ``table`` and the exports of tables take ``columns`` (names of ``modelsummary.views.columns.COLUMNS``), ``depth``
    (the deepest level shown; None: all; default: that of ``Statistics``) and ``units`` (a prefix such as ``"M"`` for
    counts and bytes), and raise ``InputError`` for an unusable one. With ``path``, the text is also written to that
    file.

    It pickles; the rows then have no live module.

    Args:
        root: the row of the model.
        execution: how the numbers came about: ``"shape"``, ``"real"``, ``"file"`` (a graph was read), or ``"none"``
            without a forward.
        fallback_reason: why shape-only execution gave way to real execution, or None.
        batch_dim: dimension that views print as -1, or None.
        options: how ``print`` renders the table.

    Attributes:
        latency_overhead: what measuring cost; None before something was measured.
    """

    latency_overhead: LatencyOverhead | None = None

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
        """Return what ``to_json`` wrote; rows have no live modules.

        Args:
            source: the JSON text, or the path of a file with it.

        Raises:
            InputError: this is no such document, or one of another version.
        """
        facts = document.read_document(source)
        root = document.tree_of(facts["rows"])
        try:
            names = ("execution", "fallback_reason", "batch_dim")
            options = TableOptions(**facts["options"])
            stats = ModelStatistics(root, **{name: facts[name] for name in names}, options=options)
            if facts["latency_overhead"] is not None:
                stats.latency_overhead = LatencyOverhead.from_dict(facts["latency_overhead"])
        except (KeyError, TypeError) as error:
            raise InputError(f"the document is incomplete: {type(error).__name__} {error}") from None
        return stats

    if not TYPE_CHECKING:  # a type checker knows that there are no such attributes

        def __getattr__(self, name: str) -> Any:
            if name in _LIVE:
                raise NotLiveError(self._not_live(name))
            known = [] if name.startswith("_") else [each for each in dir(type(self)) if not each.startswith("_")]
            meant = _MEANT.get(name)
            hint = f"; did you mean {meant}?" if meant else close_to(name, known)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    def _not_live(self, name: str) -> str:
        return (
            f"{name} needs the live model and an input: pass input_data to Statistics; what was pickled, loaded or "
            "cut short by an error has none"
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
    ) -> str:
        """Return the table as text; see ``modelsummary.views.cells.TableOptions`` for the arguments.

        ``depth`` and ``branching`` default to what ``Statistics`` was given. A table of more than 100 rows shows equal
        siblings once, and as many levels as fit on a screen; ``depth=None, fold=False`` shows every row.
        """
        shown = {"ascii_only": ascii_only, "hide_recursive": hide_recursive, "all_shapes": all_shapes, "fold": fold}
        options = self._options(columns, depth, units, branching, var_names=var_names, **shown)
        return text.render(self.root, options, **self._facts(), remarks=self._remarks())

    def top(self, n: int = 10, by: str = "macs") -> list[LayerInfo]:
        """Return the ``n`` rows with most of an amount of their own, largest first; rows with none are left out.

        Args:
            by: what adds up over modules: ``"macs"``, ``"params"``, ``"flops"``, ``"bytes_read"``, ``"bytes_written"``,
                ``"activation_bytes"``, ``"latency"`` ... (names of ``split(by=...)``, columns and plots).

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
        return text.render(self.root, self.options, **self._facts(), remarks=self._remarks())

    __repr__ = __str__

    def _facts(self) -> dict[str, Any]:
        names = ("execution", "fallback_reason", "batch_dim")
        return {name: getattr(self, name) for name in names}

    def _remarks(self) -> list[str]:
        return [] if self.latency_overhead is None else [str(self.latency_overhead)]

    # ------------------------------------------------------------------------------------------ exports

    def to_records(self, columns: Columns = None, depth: Depth = ..., units: Prefix = None) -> list[dict[str, Any]]:
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
            **self._facts(),
            "options": asdict(self.options),
            "latency_overhead": None if overhead is None else overhead.to_dict(),
            "rows": document.rows_of(self.root),
        }

    def to_json(self, path: Path_ = None, *, indent: int | None = None) -> str:
        """``to_dict()`` as JSON text."""
        return _written(json.dumps(self.to_dict(), indent=indent), path)

    def to_csv(self, path: Path_ = None, columns: Columns = None, depth: Depth = ..., units: Prefix = None) -> str:
        """The records as comma-separated values with a header line."""
        return _written(export.to_csv(self.root, self._options(columns, depth, units)), path)

    def to_pandas(self, columns: Columns = None, depth: Depth = ..., units: Prefix = None) -> pandas.DataFrame:
        """The records as a ``pandas.DataFrame``, a row each.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return export.to_pandas(self.root, self._options(columns, depth, units))

    def to_markdown(self, path: Path_ = None, columns: Columns = None, depth: Depth = ..., units: Prefix = None) -> str:
        """The table in GitHub's Markdown."""
        return _written(export.to_markdown(self.root, self._options(columns, depth, units), **self._ran()), path)

    def to_latex(self, path: Path_ = None, columns: Columns = None, depth: Depth = ..., units: Prefix = None) -> str:
        """The table as a LaTeX ``tabular`` for the package booktabs."""
        return _written(export.to_latex(self.root, self._options(columns, depth, units), **self._ran()), path)

    def to_html(
        self,
        path: Path_ = None,
        columns: Columns = None,
        depth: Depth = ...,
        units: Prefix = None,
        *,
        foldable: bool = False,
    ) -> str:
        """The table in HTML.

        Args:
            foldable: the tree that notebooks show, with its style and script; else a plain ``<table>``.
        """
        options = self._options(columns, depth, units)
        if not foldable:
            return _written(export.to_html(self.root, options, **self._ran()), path)
        facts: dict[str, Any] = {"execution": self.execution, "fallback_reason": self.fallback_reason}
        said = text.footer(self.root, **facts, remarks=self._remarks())
        lines = [line for section in said for line in section]
        return _written(to_notebook(self.root, options, lines, **self._ran()), path)

    def _repr_html_(self) -> str:
        return self.to_html(foldable=True)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self._repr_html_()}

    def _ran(self) -> dict[str, Any]:
        return {"executed": self.execution != "none", "batch_dim": self.batch_dim}

    def _options(
        self, columns: Columns, depth: Depth, units: Prefix, branching: bool | None = None, **shown: Any
    ) -> TableOptions:
        level = self.options.depth if isinstance(depth, EllipsisType) else depth
        branching = self.options.branching if branching is None else branching
        return TableOptions(columns=columns, depth=level, branching=branching, units=units, **shown)

    # ------------------------------------------------------------------------------- pictures and reports

    @property
    def plot(self) -> Pictures:
        """Pictures with matplotlib: ``stats.plot.treemap(by="macs")``; see ``Pictures`` for all of them."""
        from modelsummary.views.plot import Pictures

        return Pictures(self.root, lambda: dtype_of(self.root))

    def to_chrome_trace(self, path: str | PathLike[str], *, memory: MemoryEstimate | None = None) -> Path:
        """Write the measured latency as trace events, for ui.perfetto.dev or ``chrome://tracing``.

        A bar for each call that was timed, nested as the calls are, with its facts; forward and backward on tracks of
        their own. The bars are medians laid end to end, no recording of one run.

        Args:
            path: of the JSON file.
            memory: what ``memory()`` returned: its timeline is drawn as counters, in bytes by category, where the
                modules run that need it; what was not timed takes a microsecond an operator.

        Returns:
            The path.

        Raises:
            InputError: nothing was measured and no ``memory`` is given, it is that of another model, or the file cannot
                be written.
        """
        from modelsummary.views.chrome_trace import write_trace

        return write_trace(self.root, path, memory)

    def diff(self, other: ModelStatistics) -> ModelDiff:
        """What differs in another model: modules added, removed, renamed and changed, with their figures.

        Figures are of each module without what the modules in it have, so they add up to the totals. Times are shown
        where both were measured, and are no difference. Without an input, MACs and shapes are not compared.

        Args:
            other: statistics of the model to compare with; taken as the later one.

        Returns:
            The differences: they print as a table, and are true if there are any.

        Raises:
            InputError: ``other`` is no ``ModelStatistics``.
        """
        from modelsummary.views.diff import diff_trees

        if not isinstance(other, ModelStatistics):
            raise InputError(f"expected the Statistics of another model, got {type(other).__name__}: {other!r:.80}")
        return diff_trees(self.root, other.root)

    def estimate_latency(self, device: DeviceSpec | str, *, dtype: Precision | None = None) -> float:
        """Return the least milliseconds of a forward on a device, by its roofline.

        ``Statistics`` of a live model predicts what the device really takes, and the backward. Fills
        ``estimated_latency_ms`` of every row; ``split(by="latency")`` and ``plan(by="latency")`` use it where
        nothing was measured.

        Args:
            device: a spec, or its name in the table of accelerators.
            dtype: of the computation; default: that of most parameters. ``"tf32"`` for float32 with TF32 products.

        Raises:
            InputError: the device or its peak with this dtype is unknown.
        """
        return estimate(self.root, _device_spec(device), dtype or dtype_of(self.root))

    def roofline(self, spec: DeviceSpec | str, dtype: Precision | None = None, *, depth: int | None = None) -> Roofline:
        """Every called module down to ``depth`` against the roof of a device: bound, what limits it, part reached.

        Args:
            spec, dtype: as for ``estimate_latency``, whose prediction, where there is one, stands beside the bound.

        Raises:
            InputError: the device or its peak with this dtype is unknown.
        """
        return roofline(self.root, _device_spec(spec), dtype or dtype_of(self.root), check_depth(depth))

    def latency_report(self, *, depth: int | None = None, output_file: str | PathLike[str] | None = None) -> str:
        """Return a tab-indented line per call: parameters, latency and its share, shapes; also into ``output_file``."""
        return _written(latency_lines(self.root, check_depth(depth)) + "\n", output_file)[:-1]

    def profile_report(
        self,
        *,
        top_modules: int = 1,
        module_depth: int | None = None,
        detailed: bool = True,
        output_file: str | PathLike[str] | None = None,
    ) -> str:
        """Totals, the classes that cost most at each depth, and the model's repr with figures, as DeepSpeed shows them.

        Args:
            top_modules: how many classes.
            module_depth: the deepest level shown; None: all.
            detailed: with the repr.
            output_file: where to write it, too.
        """
        options: dict[str, Any] = {"top_modules": top_modules, "module_depth": module_depth, "detailed": detailed}
        device = self.latency_overhead.device if self.latency_overhead is not None else ""
        return _written(profile_report(self.root, **options, device=device) + "\n", output_file)[:-1]


def _device_spec(spec: DeviceSpec | str) -> DeviceSpec:
    return spec if isinstance(spec, DeviceSpec) else DeviceSpec.of(spec)


def _written(content: str, path: Path_) -> str:
    if path is not None:
        Path(path).write_text(content, encoding="utf-8", errors="backslashreplace", newline="")
    return content

"""``ModelStatistics``: the facts about a model as data, and every view of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from modelsummary.devices.device_spec import DeviceSpec, Precision
from modelsummary.devices.roofline import Roofline, bounds_ms, roofline
from modelsummary.errors import InputError, LayerNotFoundError, NotLiveError, check_integers, close_to
from modelsummary.keywords import methods_take_keywords, nearest
from modelsummary.latency.measure import LatencyOverhead
from modelsummary.latency.row_times import show, with_inner
from modelsummary.layer_info import LayerInfo, leaf_output_bytes, ledger
from modelsummary.memory.estimate import MemoryEstimate
from modelsummary.subject import dtype_of
from modelsummary.units import ReadableNumbers
from modelsummary.views import document, export, text
from modelsummary.views.amounts import Ranking, find_amounts
from modelsummary.views.cells import TableOptions
from modelsummary.views.html import to_notebook
from modelsummary.views.labels import check_depth
from modelsummary.views.reports import latency_lines, profile_report
from modelsummary.views.terminal import shows_colours

if TYPE_CHECKING:  # imported on first use
    import pandas

    from modelsummary.parallel.plan import ParallelPlan
    from modelsummary.split import Stages
    from modelsummary.views.diff import ModelDiff
    from modelsummary.views.explorer.page import Page
    from modelsummary.views.flow import Dataflow
    from modelsummary.views.plot import Pictures

__all__ = ["ModelStatistics"]

Path_ = str | PathLike[str] | None
Columns = Sequence[str] | None
Depth = int | Literal["auto"] | EllipsisType | None
Prefix = str | None

_MEANT = {  # names that people try
    "flops": "total_flops",
    "flop": "total_flops",
    "mac": "total_macs",
    "memory_usage": "memory()",
    "latency": "measure_latency(), or estimate_latency(device)",
    "macs": "total_macs",
    "params": "total_params",
    "num_params": "total_params",
    "parameters": "total_params",
    "layers": "summary_list",
    "summary": "print(stats), or table()",
}


@methods_take_keywords
class ModelStatistics(ReadableNumbers):
    """The facts about a model as data: a tree of ``LayerInfo``, its totals, and views of it.

    Iterating yields the rows in printed order without the root, as does ``summary_list``.
    ``stats["layer1.conv"]`` is the first call of a module.

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

    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> stats = Statistics(nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 4)), (1, 2))
    >>> [row.fqn for row in stats], stats["0"].macs, stats.total_macs, stats.total_params
    (['0', '1'], 16, 48, 60)
    """

    latency_overhead: LatencyOverhead | None = None
    remarks: Sequence[str] = ()
    _of_live: ClassVar[frozenset[str]] = frozenset()  # what ``Statistics`` adds

    def __init__(
        self,
        root: LayerInfo,
        *,
        execution: str = "none",
        fallback_reason: str | None = None,
        batch_dim: int | None = None,
        options: TableOptions | None = None,
    ) -> None:
        self.root = root
        rows = list(root.walk())
        self.summary_list = rows[1:]
        self._index: dict[str, list[LayerInfo]] = {}
        for row in rows:
            self._index.setdefault(row.fqn, []).append(row)
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
            stats.remarks = [str(line) for line in facts.get("remarks", ())]
            if facts["latency_overhead"] is not None:
                stats.latency_overhead = LatencyOverhead.from_dict(facts["latency_overhead"])
        except (KeyError, TypeError, AttributeError) as error:
            why = f"{type(error).__name__} {error}"
            raise InputError(f"the document is incomplete: {why[:200]}") from None
        return stats

    if not TYPE_CHECKING:  # type checkers see only the attributes that exist

        def __getattr__(self, name: str) -> Any:
            if name in self._of_live:
                raise NotLiveError(self._not_live(name))
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{_meant(type(self), name)}")

    def _not_live(self, name: str) -> str:
        return (
            f"{name} needs the live model and an input: pass input_data to Statistics; statistics that were pickled, "
            "loaded from a file or cut short by an error have none"
        )

    # --------------------------------------------------------------------------------------------- rows

    def __iter__(self) -> Iterator[LayerInfo]:
        return iter(self.summary_list)

    def __len__(self) -> int:
        return len(self.summary_list)

    def __getitem__(self, fqn: str) -> LayerInfo:
        """Return the first call of the module ``fqn`` (``""``: the model). Raise ``LayerNotFoundError``, a KeyError."""
        return self.calls(fqn)[0]

    def calls(self, fqn: str) -> list[LayerInfo]:
        """Return all calls of the module ``fqn`` in printed order; one row if it was not called.

        Raises:
            InputError: ``fqn`` is not a string.
            LayerNotFoundError: the model has no such module.

        >>> from torch import nn
        >>> from modelsummary import Statistics
        >>> relu = nn.ReLU()
        >>> stats = Statistics(nn.Sequential(nn.Linear(2, 8), relu, nn.Linear(8, 8), relu), (1, 2))
        >>> len(stats.calls("1"))
        2
        """
        if not isinstance(fqn, str):
            raise InputError(f"fqn must be a fully qualified name such as 'layer1.0.conv1', got {fqn!r}")
        rows = self._index.get(fqn) or self._index.get(self._first_path(fqn))
        if rows is not None:
            return list(rows)
        raise LayerNotFoundError(f"no layer named {fqn!r} in {self.root.class_name}{nearest(fqn, self._index)}")

    def _first_path(self, fqn: str) -> str:
        """Return the FQN in the tree for another path to the same module, if live modules are there to follow it."""
        module = self.root.module
        for name in fqn.split("."):
            module = module._modules.get(name) if module is not None else None
        return next((row.fqn for row in self.root.walk() if module is not None and row.module is module), fqn)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self._index)

    # ------------------------------------------------------------------------------------------- totals

    @property
    def total_params(self) -> int:
        """The number of elements of all parameters; a tied parameter counts once."""
        return self.root.num_params

    @property
    def trainable_params(self) -> int:
        """The number of elements of the parameters with ``requires_grad``."""
        return self.root.trainable_params

    @property
    def total_mult_adds(self) -> int:
        """The MACs of one forward of the batch that was passed. Raises ``InputError`` if no forward ran."""
        return self._of_forward("total_mult_adds").macs

    total_macs = total_mult_adds

    @property
    def total_flops(self) -> int:
        """2 x ``total_mult_adds``."""
        return self._of_forward("total_flops").flops

    @property
    def total_param_bytes(self) -> int:
        """The bytes of all parameters in their own dtypes."""
        return self.root.params_bytes

    @property
    def total_buffer_bytes(self) -> int:
        """The bytes of all buffers (and packed quantised weights) in their own dtypes."""
        return self.root.buffer_bytes

    @property
    def total_input_bytes(self) -> int:
        """The bytes of the model's inputs."""
        return self._of_forward("total_input_bytes").input_bytes

    @property
    def total_output_bytes(self) -> int:
        """The bytes of the outputs of all leaf calls: the forward's activations, as seen from modules."""
        return leaf_output_bytes(self._of_forward("total_output_bytes"))

    @property
    def uncounted_ops(self) -> dict[str, int]:
        """The ledger: names of operators that look like matrix products and have no MAC formula -> number of runs."""
        return ledger(self.root)

    def _of_forward(self, name: str) -> LayerInfo:
        """Return the root. Raise ``InputError`` if no forward ran."""
        if not self.root.executed:
            raise InputError(f"{name} needs a forward, and none was run; pass an input: Statistics(model, input_data)")
        return self.root

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

        The result is a list of ``LayerInfo``, which prints as a table.

        Args:
            by: an amount that adds up over modules: ``"macs"``, ``"params"``, ``"flops"``, ``"bytes_read"``,
                ``"bytes_written"``, ``"activation_bytes"``, ``"latency"`` ... (names of ``split(by=...)``, columns and
                plots).

        Raises:
            InputError: ``n`` is not an integer >= 1; the amount is unknown, was not measured, or the model has none of
                it.

        >>> from torch import nn
        >>> from modelsummary import Statistics
        >>> stats = Statistics(nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 4)), (1, 2))
        >>> [(row.fqn, row.self_macs) for row in stats.top(2)]
        [('1', 32), ('0', 16)]
        >>> print(stats.top(1))
        Layer    Class       Multiply-adds    Share
        1        Linear                 32    66.7%
        """
        check_integers(n=n)
        amounts = find_amounts(self.root, by)
        self_amount = amounts.self_amount
        ranked = sorted((row for row in self_amount if self_amount[row]), key=lambda row: -self_amount[row])
        return Ranking(ranked[:n], amounts)

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
        return export.written(export.to_document(self.root, options, "markdown", **self._ran()), path)

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
        return export.written(export.to_document(self.root, options, "latex", **self._ran()), path)

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
            return export.written(export.to_document(self.root, options, "html", **self._ran()), path)
        facts: dict[str, Any] = {"execution": self.execution, "fallback_reason": self.fallback_reason}
        sections = text.footer(self.root, **facts, remarks=self._remarks())
        lines = [line for section in sections for line in section]
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

        Fills ``estimated_latency_ms`` of every row; ``split(by="latency")`` uses it if nothing was measured. For a live
        model, ``Statistics`` predicts the time of kernels and of the backward instead.

        Args:
            device: a spec, or its name in the table of accelerators.
            dtype: dtype of the computation, ``"tf32"`` for float32 with TF32 products; default: the parameters' dtype.

        Raises:
            InputError: the device or its peak with this dtype is unknown.
        """
        root = self._of_forward("estimate_latency")
        self_ms = bounds_ms(root, _device_spec(device), dtype or dtype_of(root.module))
        times_ms = with_inner(root, self_ms)
        show(root, {"estimated_latency_ms": times_ms, "self_estimated_latency_ms": self_ms})
        return times_ms[root.key]

    def roofline(self, spec: DeviceSpec | str, dtype: Precision | None = None, *, depth: int | None = None) -> Roofline:
        """Return every called module down to ``depth`` with its bound on a device, its limit, and the part reached.

        Args:
            spec, dtype: as ``device`` and ``dtype`` of ``estimate_latency``, whose predictions are shown, too.
            depth: deepest level; None: all.

        Raises:
            InputError: the device or its peak with this dtype is unknown.
        """
        root = self._of_forward("roofline")
        return roofline(root, _device_spec(spec), dtype or dtype_of(root.module), check_depth(depth))

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

    # ------------------------------------------------------------------------------ explorer and comparison

    def explore(
        self,
        path: str | PathLike[str] | None = None,
        *,
        compare: ModelStatistics | None = None,
        memory: MemoryEstimate | None = None,
        stages: Stages | None = None,
        plan: ParallelPlan | None = None,
    ) -> Page:
        """Return one HTML page to look at the model: it needs no network, and opens from disk.

        The page has the tree with search, the graph by levels (modules open down to operators; equal blocks are one
        with a multiplier), the facts of what is selected, and the same selection as treemap, icicle, roofline and
        memory timeline, coloured by any figure. A notebook shows it in a frame; ``open()`` shows it in the browser.

        The graph has edges where the dataflow is known: for live models, which are recorded again as for ``split``,
        and for ONNX and ``.pt2`` files. For others, it shows the modules of each level.

        Args:
            path: path of a file to write the page to as well.
            compare: statistics of another model, taken as the later one, shown beside this one with differences
                marked.
            memory: result of ``memory()`` of this model, for the timeline.
            stages: result of ``split`` on this model; nodes have the colours of their stages.
            plan: result of ``parallel_plan`` on this model; modules have the colours of their sharding.

        Raises:
            InputError: an argument is unusable or belongs to another model, or the file cannot be written.

        >>> from torch import nn
        >>> from modelsummary import Statistics
        >>> Statistics(nn.Sequential(nn.Linear(2, 8), nn.ReLU()), (1, 2)).explore().html[:15]
        '<!DOCTYPE html>'
        """
        from modelsummary.capture.run import no_collection
        from modelsummary.views.explorer.data import VERSION, Explored, diff_data, model_data
        from modelsummary.views.explorer.page import page_of

        if compare is not None:
            _check_statistics(compare, "compare")
        with no_collection():  # which takes a third of the time
            models = [Explored(self.root, self._dataflow(stages), memory=memory, plan=plan)]
            difference = None
            if compare is not None:
                models.append(Explored(compare.root, compare._dataflow()))
                difference = diff_data(*models)
            data = {"version": VERSION, "models": [model_data(model) for model in models], "diff": difference}
            page = page_of(data, " and ".join(model.root.class_name for model in models))
        if path is not None:
            page.save(path)
        return page

    def to_model_explorer(self, path: str | PathLike[str]) -> list[Path]:
        """Write files for Google's Model Explorer: the graph, and beside it one file of node data per figure.

        Nodes are operators and the smallest calls of modules, with edges as in ``explore``; namespaces are the modules
        around them. ``net.json`` comes with ``net.macs.json``, ``net.params.json`` and so on; open them by
        ``model-explorer net.json --node_data_paths net.macs.json``.

        Returns:
            The paths, the graph first.

        Raises:
            InputError: a file cannot be written.
        """
        from modelsummary.views.explorer.data import Explored
        from modelsummary.views.model_explorer import write_files

        return write_files(Explored(self.root, self._dataflow()), path)

    @property
    def plot(self) -> Pictures:
        """The plots with matplotlib, such as ``stats.plot.treemap(by="macs")``; see ``Pictures`` for all of them."""
        from modelsummary.views.plot import Pictures

        return Pictures(self.root, lambda: dtype_of(self.root.module))

    def diff(self, other: ModelStatistics) -> ModelDiff:
        """Return the differences to another model: modules added, removed, renamed and changed, with their figures.

        Figures are a module's own, without its submodules, so they add up to the totals. Times are shown if both models
        were measured, and do not count as a difference. Without an input, MACs and shapes are not compared.

        Args:
            other: statistics of the other model, taken as the later one.

        Returns:
            The differences: they print as a table, and are true if there are any.

        Raises:
            InputError: ``other`` is not a ``ModelStatistics``.
        """
        from modelsummary.views.diff import diff_trees

        _check_statistics(other, "other")
        return diff_trees(self.root, other.root)

    def _dataflow(self, stages: Stages | None = None) -> Dataflow:
        """Return what is known of the dataflow."""
        from modelsummary.views.flow import Dataflow

        if stages is not None:
            raise InputError("stages need the live model that was split; pass them to the explore of its Statistics")
        return Dataflow()


def _device_spec(spec: DeviceSpec | str) -> DeviceSpec:
    return spec if isinstance(spec, DeviceSpec) else DeviceSpec.of(spec)


def _meant(owner: type, name: str) -> str:
    """Return a suggestion to append to a message; empty if no attribute is close.

    >>> _meant(ModelStatistics, "flops"), _meant(ModelStatistics, "tabel")
    ('; did you mean total_flops?', "; did you mean 'table'?")
    """
    public = [] if name.startswith("_") else [attribute for attribute in dir(owner) if not attribute.startswith("_")]
    return f"; did you mean {_MEANT[name]}?" if name in _MEANT else close_to(name, public)


def _check_statistics(value: object, name: str) -> None:
    """Raise ``InputError`` for anything but statistics."""
    if not isinstance(value, ModelStatistics):
        raise InputError(
            f"{name} must be the Statistics of a model, got {type(value).__name__}: {value!r:.80}; "
            "pass Statistics(model, input_data), modelsummary.load(file), or ModelStatistics.from_json(file)"
        )

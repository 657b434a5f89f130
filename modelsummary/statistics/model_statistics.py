"""``ModelStatistics``: the tree of a model, and everything made from it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from types import EllipsisType
from typing import Any

from modelsummary.capture.inputs import CallArguments
from modelsummary.errors import InputError, LayerNotFoundError, close_to
from modelsummary.latency.measure import LatencyOverhead
from modelsummary.layer_info import LayerInfo, leaf_output_bytes, ledger
from modelsummary.statistics.exporting import Exporting
from modelsummary.statistics.graphing import Graphing
from modelsummary.statistics.sizing import Sizing
from modelsummary.statistics.splitting import Splitting
from modelsummary.statistics.viewing import Viewing
from modelsummary.units import ReadableNumbers
from modelsummary.views.cells import TableOptions
from modelsummary.views.document import check_document, tree_of
from modelsummary.views.text import render

__all__ = ["ModelStatistics"]


class ModelStatistics(Exporting, Viewing, Sizing, Splitting, Graphing, ReadableNumbers):
    """What is known of a model: a tree of ``LayerInfo``, its totals, and views of it.

    Iterating gives the rows in printed order without the root (``summary_list``); ``stats["layer1.conv"]``
    is the first call of a module. It pickles; the rows then have no live module.

    Args:
        root: the row of the model.
        execution: how the numbers came about: ``"shape"``, ``"real"``, ``"file"`` (a graph was read), or ``"none"``
            without a forward.
        fallback_reason: why shape-only execution gave way to real execution, or None.
        batch_dim: dimension that views print as -1, or None.
        options: how ``print`` renders the table.
        call: how the model is called, for what runs it again.

    Attributes:
        reused_calls: module calls that were not run, as a provably equal one had been; see ``Statistics(reuse=...)``.
    """

    def __init__(
        self,
        root: LayerInfo,
        *,
        execution: str = "none",
        fallback_reason: str | None = None,
        batch_dim: int | None = None,
        options: TableOptions | None = None,
        call: CallArguments | None = None,
    ) -> None:
        self.root = root
        self.execution = execution
        self.fallback_reason = fallback_reason
        self.reused_calls = 0
        self.batch_dim = batch_dim
        self.options = options or TableOptions()
        self.summary_list = [row for row in root.walk() if row is not root]
        self._call = call
        self._index: dict[str, list[LayerInfo]] = {}
        for row in root.walk():
            self._index.setdefault(row.fqn, []).append(row)

    @staticmethod
    def from_json(source: str | PathLike[str]) -> ModelStatistics:
        """What ``to_json`` wrote; rows have no live modules.

        Args:
            source: the JSON text, or the path of a file with it.

        Raises:
            InputError: this is no such document, or one of another version.
        """
        if not isinstance(source, (str, PathLike)) or not str(source):
            raise InputError(f"source={source!r:.80}; expected JSON text, or the path of a file with it")
        is_text = isinstance(source, str) and source.lstrip("\ufeff \t\r\n").startswith(("{", "["))
        try:
            text = str(source) if is_text else Path(source).read_text(encoding="utf-8-sig")
            facts = json.loads(text.lstrip("\ufeff"))
        except UnicodeDecodeError as error:
            raise InputError(f"{source!r:.80} is no text in UTF-8: {error}") from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"{source!r:.40} is no JSON: {error}") from None
        check_document(facts)
        root = tree_of(facts["rows"])
        try:
            names = ("execution", "fallback_reason", "batch_dim")
            options = TableOptions(**facts["options"])
            stats = ModelStatistics(root, **{name: facts[name] for name in names}, options=options)
            if facts["latency_overhead"] is not None:
                stats.latency_overhead = LatencyOverhead.from_dict(facts["latency_overhead"])
        except (KeyError, TypeError) as error:
            raise InputError(f"the document is incomplete: {type(error).__name__} {error}") from None
        return stats

    # ------------------------------------------------------------------------------------------- access

    def __iter__(self) -> Iterator[LayerInfo]:
        return iter(self.summary_list)

    def __len__(self) -> int:
        return len(self.summary_list)

    def __getitem__(self, fqn: str) -> LayerInfo:
        """First call of the module ``fqn``; ``""`` is the model. Raises ``LayerNotFoundError`` (a KeyError)."""
        return self.calls(fqn)[0]

    def calls(self, fqn: str) -> list[LayerInfo]:
        """All calls of the module ``fqn`` in printed order; one row if it was not called."""
        if not isinstance(fqn, str):
            raise InputError(f"expected a fully qualified name such as 'layer1.0.conv1', got {fqn!r}")
        rows = self._index.get(fqn) or self._index.get(self._first_path(fqn))
        if rows is not None:
            return list(rows)
        raise LayerNotFoundError(f"no layer named {fqn!r} in {self.root.class_name}{close_to(fqn, self._index)}")

    def _first_path(self, fqn: str) -> str:
        """The FQN of the module that another path leads to; needs the live modules."""
        module = self.root.module
        for name in fqn.split("."):
            module = module._modules.get(name) if module is not None else None
        return next((row.fqn for row in self.root.walk() if module is not None and row.module is module), fqn)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self._index)

    # ------------------------------------------------------------------------------------------- totals

    @property
    def total_params(self) -> int:
        """Elements of all parameters, a tied one counted once."""
        return self.root.num_params

    @property
    def trainable_params(self) -> int:
        """Elements of the parameters with ``requires_grad``."""
        return self.root.trainable_params

    @property
    def total_mult_adds(self) -> int:
        """MACs of one forward of the batch that was passed."""
        return self.root.macs

    @property
    def total_flops(self) -> int:
        """2 x ``total_mult_adds``."""
        return self.root.flops

    @property
    def total_param_bytes(self) -> int:
        """Bytes of all parameters by their dtype."""
        return self.root.params_bytes

    @property
    def total_buffer_bytes(self) -> int:
        """Bytes of all buffers (and packed quantised weights) by their dtype."""
        return self.root.buffer_bytes

    @property
    def total_input_bytes(self) -> int:
        """Bytes of the model's inputs."""
        return self.root.input_bytes

    @property
    def total_output_bytes(self) -> int:
        """Bytes of the outputs of all leaf calls: the forward's activations as modules see them."""
        return leaf_output_bytes(self.root)

    @property
    def uncounted_ops(self) -> dict[str, int]:
        """Operators that look like matrix products and have no MAC formula -> how often each ran."""
        return ledger(self.root)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_call": None, "_called": None, "_cut": None}

    # -------------------------------------------------------------------------------------------- views

    def table(
        self,
        columns: Sequence[str] | None = None,
        depth: int | EllipsisType | None = ...,
        *,
        branching: bool | None = None,
        var_names: bool = False,
        ascii_only: bool = False,
        hide_recursive: bool = False,
        all_shapes: bool = False,
        units: str | None = None,
    ) -> str:
        """The table as text; see ``modelsummary.views.cells.TableOptions`` for the arguments.

        ``depth`` and ``branching`` default to what ``Statistics`` was given; ``depth=None`` shows all levels.
        """
        options = TableOptions(
            columns=columns,
            depth=self.options.depth if isinstance(depth, EllipsisType) else depth,
            branching=self.options.branching if branching is None else branching,
            var_names=var_names,
            ascii_only=ascii_only,
            hide_recursive=hide_recursive,
            all_shapes=all_shapes,
            units=units,
        )
        return self._render(options)

    def __str__(self) -> str:
        return self._render(self.options)

    __repr__ = __str__

    def _render(self, options: TableOptions) -> str:
        return render(
            self.root,
            options,
            execution=self.execution,
            fallback_reason=self.fallback_reason,
            batch_dim=self.batch_dim,
            remarks=[] if self.latency_overhead is None else [str(self.latency_overhead)],
        )

"""What ``ModelStatistics`` shows beyond the table: pictures, the dataflow, a trace, what differs from another model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING

from modelsummary.capture.exclusive import exclusive
from modelsummary.errors import InputError
from modelsummary.memory.estimate import MemoryEstimate
from modelsummary.statistics.measuring import Measuring
from modelsummary.views.rows import check_depth

if TYPE_CHECKING:  # what few ask for is imported for them only
    from modelsummary.split import Stages
    from modelsummary.views.diff import ModelDiff
    from modelsummary.views.graph import Graph
    from modelsummary.views.plot import Pictures

__all__ = ["Viewing"]


class Viewing(Measuring):
    """The part of ``ModelStatistics`` that shows."""

    execution: str

    @property
    def plot(self) -> Pictures:
        """Pictures with matplotlib: ``stats.plot.treemap(by="macs")``; see ``Pictures`` for all of them."""
        from modelsummary.views.plot import Pictures

        return Pictures(self.root, self._dtype)

    @exclusive
    def graph(self, depth: int | EllipsisType | None = ..., *, stages: Stages | None = None) -> Graph:
        """The dataflow: which module's output goes to which module's input, through which functions.

        The forward is recorded once more, as for ``split``. Edges have the shapes of the tensors,
        nodes parameters and multiply-adds; a module whose calls are shown one by one is a group.

        Args:
            depth: levels of nested calls that are shown: 1 has the modules that the model calls as nodes; None: all.
                Default: as many as give no more than 60 nodes. Containers that are never called, such as
                ``nn.ModuleList``, are no level.
            stages: of a split of this model; nodes then have the colours of their stages, and modules that are cut
                are shown one by one.

        Raises:
            InputError: an argument is unusable, or there is no live model with an input.
            SplitError: a parameter is not initialised yet, or the stages were pickled.
        """
        from modelsummary.record.runs import record_once
        from modelsummary.split import Stages, check_initialized
        from modelsummary.views.graph import dataflow_graph

        if not isinstance(depth, EllipsisType):
            check_depth(depth, least=1)
        model, call = self._live("a graph of the dataflow")
        if stages is not None and (not isinstance(stages, Stages) or stages.model is not model):
            raise InputError(f"stages={stages!r:.80} are no stages of this model; pass what split() returned")
        check_initialized(model)
        record = stages.record if stages is not None else None
        return dataflow_graph(
            self.root,
            record or record_once(model, call, self.execution),
            None if isinstance(depth, EllipsisType) else depth,
            stages.calls if stages is not None else (),
            readable=isinstance(depth, EllipsisType),
        )

    def to_chrome_trace(self, path: str | os.PathLike[str], *, memory: MemoryEstimate | None = None) -> Path:
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
        from modelsummary.views.chrome_trace import trace_events

        if memory is not None and not isinstance(memory, MemoryEstimate):
            raise InputError(f"memory={memory!r:.80} is no MemoryEstimate; pass what memory() returned")
        known = {None, *(row.fqn for row in self.root.walk())}
        strange = [point.fqn for point in (memory.timeline if memory is not None else ()) if point.fqn not in known]
        if strange:
            raise InputError(f"memory is that of another model: this one has no module {strange[0]!r}")
        if memory is None and self.root.latency_ms is None:
            raise InputError("there is nothing to trace: call measure_latency() first, or pass memory=stats.memory()")
        text = json.dumps({"traceEvents": trace_events(self.root, memory), "displayTimeUnit": "ms"})
        try:
            target = Path(path)
            target.write_text(text, encoding="utf-8")
        except (OSError, TypeError) as error:
            raise InputError(f"path={path!r} cannot be written: {error}") from error
        return target

    def diff(self, other: Viewing) -> ModelDiff:
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

        if not isinstance(other, Viewing):
            raise InputError(f"expected the Statistics of another model, got {type(other).__name__}: {other!r:.80}")
        return diff_trees(self.root, other.root)

"""What ``ModelStatistics`` shows beyond the table: pictures, the dataflow, a trace, what differs from another model."""

from __future__ import annotations

from types import EllipsisType

from modelsummary.errors import InputError
from modelsummary.measuring import Measuring
from modelsummary.split import Stages
from modelsummary.splitting import Splitting
from modelsummary.views.graph import Graph, dataflow_graph
from modelsummary.views.plot import Pictures
from modelsummary.views.rows import check_depth

__all__ = ["Viewing"]


class Viewing(Measuring, Splitting):
    """The part of ``ModelStatistics`` that shows."""

    @property
    def plot(self) -> Pictures:
        """Pictures with matplotlib: ``stats.plot.treemap(by="macs")``; see ``Pictures`` for all of them."""
        return Pictures(self.root, self._dtype)

    def graph(self, depth: int | EllipsisType | None = ..., *, stages: Stages | None = None) -> Graph:
        """The dataflow: which module's output goes to which module's input, through which functions.

        Made from a record of the forward, which is also what ``split`` cuts. Edges have the shapes of the tensors,
        nodes parameters and multiply-adds; a module whose calls are shown one by one is a group.

        Args:
            depth: levels of nested calls that are shown: 1 has the modules that the model calls as nodes; None: all.
                Default: as many as give no more than 60 nodes. Containers that are never called, such as
                ``nn.ModuleList``, are no level.
            stages: of a split of this model; nodes then have the colours of their stages, and modules that are cut
                are shown one by one.

        Raises:
            InputError: an argument is unusable, or there is no live model with an input.
            SplitError: the forward cannot be recorded, or the stages were pickled.
        """
        if not isinstance(depth, EllipsisType):
            check_depth(depth, least=1)
        model, _ = self._live("a graph of the dataflow")
        record = self._splitter().record
        if stages is not None:
            if not isinstance(stages, Stages) or stages.model is not model:
                raise InputError(f"stages={stages!r:.80} are no stages of this model; pass what split() returned")
            record = stages.record or record
        calls = stages.calls if stages is not None else ()
        readable = isinstance(depth, EllipsisType)
        return dataflow_graph(
            self.root, record, None if isinstance(depth, EllipsisType) else depth, calls, readable=readable
        )

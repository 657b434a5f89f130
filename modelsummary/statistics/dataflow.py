"""The dataflow graph of a live model."""

from __future__ import annotations

from types import EllipsisType

from modelsummary.capture.live import LiveModel
from modelsummary.errors import InputError
from modelsummary.layer_info import LayerInfo
from modelsummary.record.failing import explained
from modelsummary.record.runs import record_once
from modelsummary.split import Stages, check_initialized
from modelsummary.views.graph import Graph, dataflow_graph
from modelsummary.views.labels import check_depth

__all__ = ["dataflow"]


def dataflow(live: LiveModel, root: LayerInfo, depth: int | EllipsisType | None, stages: Stages | None) -> Graph:
    """Return the dataflow graph of a model; see ``Statistics.graph`` for the arguments."""
    if not isinstance(depth, EllipsisType):
        check_depth(depth, least=1)
    if stages is not None and (not isinstance(stages, Stages) or stages.model is not live.model):
        raise InputError(f"stages must be the result of split() on this model, got {stages!r:.80}")
    check_initialized(live.model)
    record = stages.record if stages is not None else None
    if record is None:
        with explained(live.model):
            record = record_once(live.model, live.call, live.execution)
    return dataflow_graph(
        root,
        record,
        None if isinstance(depth, EllipsisType) else depth,
        stages.calls if stages is not None else (),
        readable=isinstance(depth, EllipsisType),
    )

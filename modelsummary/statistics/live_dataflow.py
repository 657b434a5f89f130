"""The dataflow graph of a live model."""

from __future__ import annotations

from types import EllipsisType

from modelsummary.capture.live import LiveModel
from modelsummary.errors import InputError, ModelSummaryError
from modelsummary.layer_info import LayerInfo
from modelsummary.record.events import Record
from modelsummary.record.recording_error import as_forward_error
from modelsummary.record.runs import record_of
from modelsummary.split import Stages, check_initialized
from modelsummary.views.flow import Dataflow, steps_of_record
from modelsummary.views.graph import Graph
from modelsummary.views.graph_building import dataflow_graph
from modelsummary.views.labels import check_depth

__all__ = ["dataflow", "explored_dataflow"]


def dataflow(
    live: LiveModel,
    root: LayerInfo,
    depth: int | EllipsisType | None,
    stages: Stages | None,
    fold: bool | None,
) -> Graph:
    """Return the dataflow graph of a model; see ``Statistics.graph`` for the arguments."""
    if not isinstance(depth, EllipsisType):
        check_depth(depth, least=1)
    _check_stages(stages, live)
    check_initialized(live.model)
    record = stages.record if stages is not None else None
    if record is None:
        record = _recorded(live)
    return dataflow_graph(
        root,
        record,
        None if isinstance(depth, EllipsisType) else depth,
        stages.calls if stages is not None else (),
        readable=isinstance(depth, EllipsisType),
        fold=fold,
    )


def explored_dataflow(live: LiveModel, root: LayerInfo, stages: Stages | None) -> Dataflow:
    """Return the dataflow of a model for the explorer; a remark says why, if it cannot be recorded."""
    _check_stages(stages, live)
    try:
        check_initialized(live.model)
        record = None if stages is None else stages.record
        record = record or _recorded(live)
    except ModelSummaryError as error:
        return Dataflow(remarks=(f"The dataflow is not known: {error}",))
    return Dataflow(steps_of_record(root, record, () if stages is None else stages.calls))


def _recorded(live: LiveModel) -> Record:
    with as_forward_error(live.model):
        return record_of(live)


def _check_stages(stages: Stages | None, live: LiveModel) -> None:
    if stages is not None and (not isinstance(stages, Stages) or stages.model is not live.model):
        raise InputError(f"stages must be the result of split() on this model, got {stages!r:.80}")

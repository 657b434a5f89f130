"""The dataflow graph of a live model."""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType

from modelsummary.capture.live import LiveModel
from modelsummary.errors import InputError, ModelSummaryError, SplitError
from modelsummary.layer_info import LayerInfo
from modelsummary.record.events import Event, Record
from modelsummary.record.runs import record_of
from modelsummary.split import Stages
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
    readable = isinstance(depth, EllipsisType)
    level = None if isinstance(depth, EllipsisType) else check_depth(depth, least=1)
    _check_stages(stages, live)
    record = _record(live, stages)
    return dataflow_graph(root, record, level, _calls(stages), readable=readable, fold=fold)


def explored_dataflow(live: LiveModel, root: LayerInfo, stages: Stages | None) -> Dataflow:
    """Return the dataflow of a model for the explorer; a remark says why, if it cannot be recorded."""
    _check_stages(stages, live)
    try:
        return Dataflow(steps_of_record(root, _record(live, stages), _calls(stages)))
    except ModelSummaryError as error:
        return Dataflow(remarks=(f"The dataflow is not known: {error}",))


def _record(live: LiveModel, stages: Stages | None) -> Record:
    """Return the record that stages were cut from; without stages, or after pickling, the model's."""
    if live.uninitialized is not None:
        raise SplitError(f"{live.uninitialized}; run the model once")
    return (None if stages is None else stages.record) or record_of(live)


def _calls(stages: Stages | None) -> Sequence[Sequence[Event]]:
    return [] if stages is None else stages.calls


def _check_stages(stages: Stages | None, live: LiveModel) -> None:
    if stages is not None and (not isinstance(stages, Stages) or stages.model is not live.model):
        raise InputError(f"stages must be the result of split() on this model, got {stages!r:.80}")

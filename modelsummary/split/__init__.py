"""Cut a recorded model into stages that run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from modelsummary.dataflow import Record, Value, leaves_of, values_in
from modelsummary.errors import SplitError
from modelsummary.layer_info import LayerInfo
from modelsummary.split.analyse import CallSequence, analyse
from modelsummary.split.build import Part, build, inputs_of, parts_of
from modelsummary.split.choose import Wishes, choose_cuts
from modelsummary.split.costs import By, CallCosts, call_costs
from modelsummary.split.partition import bottleneck_of
from modelsummary.split.stages import StageFacts, Stages

__all__ = ["By", "Stages", "Wishes", "check_initialized", "split"]


def split(
    model: nn.Module, records: Sequence[Record], rows: Sequence[LayerInfo], by: By, wishes: Wishes
) -> Stages:
    """Cut ``model`` as ``ModelStatistics.split`` says.

    Args:
        records: of its forward; the first that allows it is used.
        rows: of its tree.
    """
    sequence = _first_that_opens(records)
    costs = call_costs(by, sequence, model, rows)
    cuts = choose_cuts(sequence, costs, wishes, model)
    parts = parts_of(sequence, cuts)
    inputs = inputs_of(model, sequence, parts)
    stages = build(model, sequence, parts, inputs)
    crossing = [*(part.takes for part in parts), parts[-1].gives]
    return Stages(
        model,
        stages,
        _facts(sequence, costs, cuts, parts, stages),
        inputs,
        by=costs.name,
        ideal=max(sum(costs.costs) / len(parts), *costs.costs) * costs.unit,
        crossing=[[_meta(value) for value in values] for values in crossing],
        record=sequence.record,
    )


def check_initialized(model: nn.Module) -> None:
    """Raise ``SplitError`` if a parameter has no shape yet."""
    lazy = next((fqn for fqn, parameter in model.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None:
        raise SplitError(f"parameter {lazy!r} is not initialised; run the model once, then split it")


def _first_that_opens(records: Sequence[Record]) -> CallSequence:
    """The best record that can be cut; if none can, the reason of the first, which says most."""
    first_error: SplitError | None = None
    for record in records:
        try:
            return analyse(record)
        except SplitError as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


def _meta(value: Value) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _facts(
    sequence: CallSequence, costs: CallCosts, cuts: Sequence[int], parts: Sequence[Part], stages: Sequence[nn.Sequential]
) -> list[StageFacts]:
    bounds = [0, *cuts, len(sequence.calls)]
    total = sum(costs.costs)
    facts = []
    for number, (part, stage) in enumerate(zip(parts, stages, strict=True)):
        begin, end = bounds[number : number + 2]
        cost = sum(costs.costs[begin:end])
        parameters, buffers = list(stage.parameters()), list(stage.buffers())
        crossing = part.gives if number < len(parts) - 1 else []
        facts.append(
            StageFacts(
                first=part.events[0].name,
                last=part.events[-1].name,
                calls=len(part.events),
                params=sum(each.numel() for each in parameters),
                param_bytes=sum(each.nbytes for each in parameters),
                buffer_bytes=sum(each.nbytes for each in buffers),
                macs=sum(call.macs for call in sequence.calls[begin:end]),
                cost=cost if costs.unit == 1.0 else cost * costs.unit,
                share=cost / total,
                crossing_bytes=sum(value.nbytes for value in crossing),
                crossing_tensors=len(crossing),
                activation_bytes=sum(map(sequence.activation_bytes, range(begin, end))),
            )
        )
    return facts

"""Make a plan from what a model does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from modelsummary.capture.live import LiveModel
from modelsummary.errors import InputError
from modelsummary.layer_info import LayerInfo
from modelsummary.memory.checkpointing import blocks_of
from modelsummary.parallel.applying import ties_of
from modelsummary.parallel.calls import Calls
from modelsummary.parallel.derive import Derivation, Layer, derive
from modelsummary.parallel.inputs import PreparedInput, prepared_inputs
from modelsummary.parallel.local_check import Attribute, check_locally
from modelsummary.parallel.plan import Collective, LayerPlan, ParallelPlan
from modelsummary.parallel.units import fsdp_units
from modelsummary.record.events import Event, Value, values_in
from modelsummary.record.failing import explained
from modelsummary.record.runs import record_once

__all__ = ["block_boundaries", "make_plan"]


def make_plan(
    live: LiveModel,
    root: LayerInfo,
    *,
    tensor: int = 1,
    data: int = 1,
    shard: int = 1,
    pipeline: int = 1,
    stages: Any = None,
    checkpoint: Sequence[str] | str | None = None,
    precision: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    offload: bool = False,
) -> ParallelPlan:
    """Return a plan as ``Statistics.parallel_plan`` says.

    Args:
        root: of the model's tree.
        stages: of the model, where it has several; the cuts are between blocks.
    """
    _check_sizes(tensor=tensor, data=data, shard=shard, pipeline=pipeline)
    if precision is not None and not (isinstance(precision, torch.dtype) and precision.is_floating_point):
        raise InputError(f"precision={precision!r}; expected a floating point torch.dtype or None")
    model = live.model
    layers: list[LayerPlan] = []
    attributes: list[Attribute] = []
    reasons: dict[str, str] = {}
    if tensor > 1:
        derivation, attributes = _derived(live, tensor)
        layers, reasons = _layer_plans(derivation, tensor), derivation.reasons
        if not layers:
            raise InputError(
                f"tensor={tensor}: no layer of {type(model).__name__} can be split over {tensor} ranks"
                f"{''.join(f'; {fqn}: {why}' for fqn, why in list(reasons.items())[:1])}"
            )
    units = fsdp_units(model, root) if shard > 1 or data > 1 else []
    return ParallelPlan(
        model_class=type(model).__name__,
        tensor=tensor,
        data=data,
        shard=shard,
        pipeline=pipeline,
        layers=tuple(layers),
        attributes=tuple(attributes),
        ties=tuple(map(tuple, ties_of(model))),
        units=tuple(map(tuple, units)),
        reshard_after_forward=reshard_after_forward,
        precision=None if precision is None else str(precision).removeprefix("torch."),
        offload=offload,
        checkpoint=_checkpoint(checkpoint, root),
        boundaries=() if stages is None else tuple(block_boundaries(root, stages.calls)),
        replicated={fqn: why for fqn, why in reasons.items() if fqn not in {each.fqn for each in layers}},
        params=sum(each.numel() for each in model.parameters()),
        params_per_rank=_params_per_rank(model, layers, tensor, shard, stages),
        _live=live,
        _stages=stages,
    )


def block_boundaries(root: LayerInfo, calls: Sequence[Sequence[Event]]) -> list[str]:
    """Return with which modules the second and each later stage begins, moved back to the begin of a block.

    A stage that begins with a block cuts nothing that is sharded.

    Args:
        calls: of each stage.

    Raises:
        InputError: two stages would begin with the same block.
    """
    blocks = [row.fqn for row in blocks_of(root)]
    begins: list[str] = []
    for part in calls[1:]:
        inside = (block for call in part for block in blocks if f"{call.fqn}.".startswith(f"{block}."))
        begins.append(next(inside, "") or next(call.fqn for call in part if call.is_module))
    if len(set(begins)) < len(begins):
        raise InputError(f"pipeline={len(calls)}: a stage would be smaller than the block {begins[0]!r}; use fewer")
    return begins


def _check_sizes(**sizes: Any) -> None:
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise InputError(f"{name}={size!r}; expected an integer >= 1")


def _checkpoint(checkpoint: Sequence[str] | str | None, root: LayerInfo) -> tuple[str, ...]:
    if checkpoint == "every":
        return tuple(row.fqn for row in blocks_of(root))
    if checkpoint is None or isinstance(checkpoint, (list, tuple)):
        return tuple(checkpoint or ())
    raise InputError(f"checkpoint={checkpoint!r}; expected 'every', a list of names, or None")


def _params_per_rank(model: nn.Module, layers: Sequence[LayerPlan], tensor: int, shard: int, stages: Any) -> int:
    """Elements of the parameters of the first rank of the largest stage; FSDP deals rows, the first rank has most."""
    cut = {f"{layer.fqn}.{name}": dim for layer in layers for name, dim in layer.shards.items() if dim is not None}
    dims = {id(each): cut[name] for name, each in model.named_parameters(remove_duplicate=False) if name in cut}

    def elements(parameter: nn.Parameter) -> int:
        shape = [size // tensor if dim == dims.get(id(parameter)) else size for dim, size in enumerate(parameter.shape)]
        return math.prod([-(-shape[0] // shard), *shape[1:]]) if shape else 1

    return max(sum(map(elements, part.parameters())) for part in ([model] if stages is None else stages))


# ---------------------------------------------------------------------------------------- tensor parallel


def _derived(live: LiveModel, n_ranks: int) -> tuple[Derivation, list[Attribute]]:
    with explained(live.model):
        record = record_once(live.model, live.call, live.execution)
    calls = Calls(live.model, record)
    derivation = derive(calls)
    _check_divides(derivation, n_ranks)
    attributes = check_locally(live, derivation, n_ranks)
    attributes += [Attribute(fqn, "inplace", True, False) for fqn in derivation.in_place]
    return derivation, attributes


def _check_divides(derivation: Derivation, n_ranks: int) -> None:
    """Refuse a number of ranks that does not divide heads or widths.

    A region in which only smaller extents do not divide (heads of keys and values) is gathered instead. Raises
    ``InputError`` with the numbers that would work.
    """
    works = math.gcd(*(math.gcd(*region.sizes) for region in derivation.regions))
    for region in list(derivation.regions):
        wrong = [size for size in region.sizes if size % n_ranks]
        if not wrong:
            continue
        fqn, (fewer, more) = region.columns[0], region.groups
        if more and more % n_ranks == 0 and wrong == [fewer]:
            derivation.gather(region)
            reason = f"{fewer} heads of keys and values do not divide by {n_ranks}"
            derivation.reasons |= dict.fromkeys(region.fqns, reason)
            continue
        number = more if more % n_ranks else min(wrong)
        what = "features" if region.sizes == {number} else "heads or features"
        divisors = ", ".join(str(each) for each in range(1, works + 1) if works % each == 0)
        raise InputError(
            f"tensor={n_ranks} does not divide the {number} {what} of {fqn}; pass one of {divisors}, which divide all"
        )
    for layer in list(derivation.layers.values()):
        weight: Any = derivation.calls.modules[layer.fqn]._parameters.get("weight")
        size = 0 if layer.role == "norm" or weight is None else int(weight.shape[layer.role == "row"])
        if size % n_ranks:
            derivation.drop(layer.fqn, f"its {size} rows do not divide by {n_ranks}")


_STYLES = {
    "column": "ColwiseParallel",
    "row": "RowwiseParallel",
    "embedding": "RowwiseParallel",
    "head": "ColwiseParallel",
    "norm": "SequenceParallel",
}


def _layer_plans(derivation: Derivation, n_ranks: int) -> list[LayerPlan]:
    """Return how torch's styles say what the layers do, in the order of their calls."""
    calls = derivation.calls
    prepared = prepared_inputs(calls, derivation.layers)
    of_column = {fqn: each for each in prepared for fqn in each.columns}
    plans: list[LayerPlan] = []
    done: set[str] = set()
    for layer in derivation.in_order():
        around = of_column.get(layer.fqn)
        if around is not None and around.fqn not in done:
            done.add(around.fqn)
            plans.append(_input_plan(around))
        plans.append(_layer_plan(derivation, layer, n_ranks, is_prepared=around is not None))
    return plans


def _input_plan(prepared: PreparedInput) -> LayerPlan:
    options = prepared.options("Replicate()", "Replicate()")
    collectives = _collectives("all_reduce", "backward", [each for each in prepared.values if each.requires_grad])
    return LayerPlan(prepared.fqn, "PrepareModuleInput", options, "input", {}, 0, collectives)


def _layer_plan(derivation: Derivation, layer: Layer, n_ranks: int, *, is_prepared: bool) -> LayerPlan:
    calls = derivation.calls
    module = calls.modules[layer.fqn]
    events = [calls.events[place] for place in calls.places.get(layer.fqn, ())]
    given = [value for event in events for value in values_in(event.args)]
    made = [value for event in events for value in values_in(event.result)]
    differentiable = [value for value in given if value.requires_grad]
    shards: dict[str, int | None] = {name: None for name, each in module._parameters.items() if each is not None}
    options: dict[str, Any] = {}
    collectives: tuple[Collective, ...] = ()
    if layer.role == "norm":
        options = {"sequence_dim": layer.dim, "use_local_output": True}
    elif layer.role in ("column", "head"):
        is_table = isinstance(module, nn.Embedding)
        shards = dict.fromkeys(shards, 1 if is_table else 0)
        if layer.gathers:
            options = {"output_layouts": "Replicate()"}
            collectives = _collectives("all_gather", "forward", made)
        if not is_prepared and not is_table:
            collectives += _collectives("all_reduce", "backward", differentiable)
    else:
        shards["weight"] = 1 if layer.role == "row" else 0
        collectives = _collectives("all_reduce", "forward", made)
        if layer.role == "embedding" or layer.gathers:
            options = {"input_layouts": "Replicate()"}
            collectives += _collectives("all_gather", "backward", differentiable)
    params = sum(module.get_parameter(name).numel() // (1 if dim is None else n_ranks) for name, dim in shards.items())
    reason = derivation.reasons.get(layer.fqn, "") if layer.gathers and layer.role != "head" else ""
    return LayerPlan(layer.fqn, _STYLES[layer.role], options, layer.role, shards, params, collectives, reason)


def _collectives(operation: str, phase: str, values: Sequence[Value]) -> tuple[Collective, ...]:
    return (Collective(operation, phase, len(values), sum(each.nbytes for each in values)),) if values else ()

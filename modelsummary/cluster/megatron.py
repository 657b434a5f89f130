"""Megatron's layers, as changes of a parallel plan: what ``Recipe(sequence="megatron")`` costs.

Layers compute with local tensors, and heads return shards of the logits, which the loss takes. With sequence
parallelism (Korthikanti et al. 2022) each rank holds its share of the tokens from the first block to the last:
column-parallel layers gather it, row-parallel layers scatter their result. Unlike ``parallel_plan(sequence=True)``,
which follows where tokens go, this goes by the blocks alone. In Megatron, tokens need no copies for that, and in the
backward they are gathered again instead of kept (``parts``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from typing import Any

from torch import nn

from modelsummary.errors import InputError
from modelsummary.operators.collective_calls import collective_of
from modelsummary.operators.kernels import StepOperator
from modelsummary.operators.operator_calls import OperatorCall
from modelsummary.parallel.layer_plans import attention_inputs
from modelsummary.parallel.placements import Shard
from modelsummary.parallel.plan import LayerPlan, ParallelPlan
from modelsummary.parallel.record_calls import Calls
from modelsummary.parallel.redistributions import Redistribution, prepared_inputs, redistribution_plan, results_of
from modelsummary.record.events import Event, Value, values_in

__all__ = ["tokens_first", "with_local_layers", "with_sharded_logits", "with_shared_tokens"]

_JOINS, _WHOLE, _CHUNK = "aten.cat", "Replicate()", "Shard({})"
# Roles of entries beside the one that says how a module is split.
_AROUND = ("input", "output", "gradient", "copy", "sizes")


def with_local_layers(plan: ParallelPlan, model: nn.Module, *, like_dtensor: bool) -> ParallelPlan:
    """Return a plan whose linear layers compute with local tensors, for which ``DTensor`` takes several times as long.

    Args:
        plan: the plan.
        model: the model.
        like_dtensor: only layers whose kernels are the same. ``DTensor`` divides the bias of a row-parallel layer by
            the ranks, and makes gradients of all rows of an embedding; Megatron's layers do not.
    """

    def local(layer: LayerPlan) -> LayerPlan:
        if layer.style not in ("ColwiseParallel", "RowwiseParallel"):
            return layer
        shards = {name: f"Shard({dim})" for name, dim in layer.shards.items() if dim is not None}
        bias = next((name for name, dim in layer.shards.items() if dim is None), "")
        is_table = isinstance(model.get_submodule(layer.fqn), nn.Embedding)
        if like_dtensor and (is_table or bias):
            return layer
        if layer.role == "embedding":
            return replace(layer, style="LocalParallel", options={"shards": shards, "sums_result": True})
        if is_table:
            return layer
        by_rows = {"by_rows": True, "bias": bias} if layer.role == "row" else {}
        return replace(layer, style="LinearParallel", options={"shards": shards, **by_rows, **layer.options})

    return replace(plan, layers=tuple(map(local, plan.layers)))


def with_sharded_logits(plan: ParallelPlan) -> ParallelPlan:
    """Return a plan whose heads return what a rank computes of the logits."""

    def sharded(layer: LayerPlan) -> LayerPlan:
        options = {name: value for name, value in layer.options.items() if name != "output_layouts"}
        return replace(layer, options=options) if layer.role == "head" else layer

    return replace(plan, layers=tuple(map(sharded, plan.layers)))


def with_shared_tokens(
    plan: ParallelPlan, calls: Calls, blocks: Sequence[str], shape_of: Callable[[Value], Sequence[int]]
) -> ParallelPlan:
    """Return a plan in which each rank holds a share of the tokens between the split layers of the blocks.

    Args:
        plan: made without ``sequence=True``.
        calls: of the model.
        blocks: FQNs of its blocks, in the order of their calls.
        shape_of: returns the shape that a recorded tensor has in the step.

    Raises:
        InputError: modules sum what is made of whole sequences, or the tokens cannot be shared out.
    """
    _check_sums(plan)
    if not blocks:
        return plan
    events = {event.fqn: event for event in (*calls.events, *calls.entered) if event.is_module}
    first, last = events[blocks[0]], events[blocks[-1]]
    key, hidden = _hidden(first)
    dim, n_tokens = _dim_of_tokens(hidden, shape_of, plan.tensor), _tokens(hidden)
    chunk, (begin, _), (_, end) = _CHUNK.format(dim), calls.span(first), calls.span(last)

    def layout(value: Any) -> str:
        return chunk if _tokens(value) == n_tokens else _WHOLE

    def is_inside(fqn: str) -> bool:
        return fqn in events and begin <= calls.span(events[fqn])[0] < end

    def shared(layer: LayerPlan) -> LayerPlan:
        if not is_inside(layer.fqn):
            return layer
        event, options = events[layer.fqn], dict(layer.options)
        taken, result = (next(iter(values_in(part)), None) for part in ((event.args, event.kwargs), event.result))
        if layer.role in ("column", "head") and layer.fqn not in prepared and layer.fqn in calls.linears:
            options["input_layouts"] = layout(taken)
        elif layer.role == "heads":
            options["input_layouts"] = tuple(map(layout, attention_inputs(event)))
        if layer.role in ("row", "embedding", "heads", "output"):
            options["output_layouts"] = layout(result)
        return replace(layer, options=options)

    split: Any = {layer.fqn: layer for layer in plan.layers if layer.role not in _AROUND}
    inputs = prepared_inputs(calls, split, least=1)
    prepared = set(chain(*inputs.values()))
    layers = [redistribution_plan(calls, Redistribution(first.fqn, True, key, None, Shard(dim)))]
    for taken in inputs:
        is_chunk = is_inside(taken.fqn) and layout(taken.tensor(calls.spans[taken.fqn][0][0])) == chunk
        change = taken._replace(before=Shard(dim) if is_chunk else None)
        layers.append(redistribution_plan(calls, change, is_local=False))
    layers += [shared(layer) for layer in plan.layers if layer.role != "input"]
    for position, result in enumerate(results_of(last)):
        if isinstance(result, Value) and result.dtype.is_floating_point and layout(result) == chunk:
            layers.append(redistribution_plan(calls, Redistribution(last.fqn, False, position, Shard(dim), None)))
    return replace(plan, layers=tuple(layers))


def _check_sums(plan: ParallelPlan) -> None:
    """Refuse modules that sum what is made of whole sequences."""
    for layer in plan.layers:
        if layer.role == "gradient" or layer.options.get("sums_result"):
            raise InputError(
                f"sequence=True is not costed for {layer.fqn} ({layer.style}), which takes the tokens of all ranks; "
                "use sequence=False"
            )


def _hidden(block: Event) -> tuple[int | str, Any]:
    """Return the position or name of the tensor that a block passes on, and the tensor; None if it takes none.

    It is the first one with a gradient, or behind frozen layers the first one.
    """
    taken = [
        (key, value)
        for key, value in (*enumerate(block.args), *block.kwargs.items())
        if isinstance(value, Value) and value.dtype.is_floating_point and len(value.shape) > 1
    ]
    return next((pair for pair in taken if pair[1].requires_grad), taken[0] if taken else (0, None))


def _dim_of_tokens(hidden: Any, shape_of: Callable[[Value], Sequence[int]], n_ranks: int) -> int:
    """Return the last dimension of tokens that the ranks divide. Raises ``InputError`` if there is none."""
    shape = None if hidden is None else tuple(shape_of(hidden))
    dims = [dim for dim, size in enumerate((shape or ())[:-1]) if size % n_ranks == 0]
    if not dims:
        why = f"the tokens of a block's input {shape} do not divide by {n_ranks}"
        why = "a block takes no tensor, whose tokens could be shared out" if shape is None else why
        raise InputError(f"sequence=True: {why}; use sequence=False")
    return dims[-1]


def _tokens(value: Any) -> int:
    """Return the number of tokens of a tensor; 0 for anything else."""
    return prod(value.shape[:-1]) if isinstance(value, Value) else 0


def tokens_first(operators: Sequence[StepOperator]) -> tuple[frozenset[int], frozenset[int]]:
    """Return the operators that copy tokens for the sake of collectives alone, and the ones that gather tokens.

    Collectives join and cut tensors along their first dimension. Elsewhere chunks are copied in front of a
    reduce-scatter, or behind an all-gather; with the sequence in front, as in Megatron, they need not be.

    Returns:
        The indices of the operators.
    """
    made: dict[int, int] = {}  # storage -> operator that made it
    copies: set[int] = set()
    gathered: set[int] = set()
    for index, operator in enumerate(operators):
        run, call = operator.run, operator.run.call
        collective = collective_of(call)
        sources = {made[key] for key in run.reads if key in made}
        if collective is not None and collective.operation == "all_gather":
            gathered.add(index)
        elif collective is not None and collective.operation == "reduce_scatter":
            copies |= {source for source in sources if operators[source].run.call.name == _JOINS}
        elif call.name == _JOINS and sources and sources <= gathered and _keeps_features(call):
            copies.add(index)
            gathered.add(index)
        made |= {key: index for key in run.makes if key not in run.reads}
    return frozenset(copies), frozenset(gathered)


def _keeps_features(call: OperatorCall) -> bool:
    return call.outputs[0].shape[-1] == call.tensors[0].shape[-1]

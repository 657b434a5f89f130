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
from math import prod
from typing import Any

from torch import nn

from modelsummary.errors import InputError
from modelsummary.operators.collective_calls import collective_of
from modelsummary.operators.kernels import StepOperator
from modelsummary.operators.operator_calls import OperatorCall
from modelsummary.parallel.layer_plans import prepare_options, redistribution_plan
from modelsummary.parallel.placements import Shard
from modelsummary.parallel.plan import LayerPlan, ParallelPlan
from modelsummary.parallel.prepared_inputs import prepared_inputs
from modelsummary.parallel.record_calls import Calls
from modelsummary.parallel.stream import Redistribution, results_of
from modelsummary.record.events import Event, Value, values_in

__all__ = ["tokens_first", "with_local_layers", "with_shared_tokens"]

_JOINS = "aten.cat"
_AROUND = (
    "input",
    "output",
    "gradient",
    "copy",
    "sizes",
)  # roles of entries beside the one that says how a module is split


def with_local_layers(plan: ParallelPlan, calls: Calls, *, shards_logits: bool) -> ParallelPlan:
    """Return a plan whose linear layers and embeddings compute with local tensors, as Megatron's do.

    ``DTensor`` divides the bias of a row-parallel layer by the ranks, and makes gradients of all rows of an embedding.

    Args:
        plan: the plan.
        calls: of the model.
        shards_logits: heads return what a rank computes of the logits.
    """

    def local(layer: LayerPlan) -> LayerPlan:
        is_whole = layer.role != "head" or not shards_logits
        options = {name: value for name, value in layer.options.items() if name == "input_layouts" or is_whole}
        if layer.style not in ("ColwiseParallel", "RowwiseParallel"):
            return replace(layer, options=options) if layer.role == "head" else layer
        shards = {name: f"Shard({dim})" for name, dim in layer.shards.items() if dim is not None}
        if layer.role == "embedding":
            return replace(layer, style="LocalParallel", options={"shards": shards, "sums_result": True})
        if isinstance(calls.modules[layer.fqn], nn.Embedding):
            return layer
        options.pop("use_local_output", None)
        bias = next((name for name, dim in layer.shards.items() if dim is None), "")
        by_rows = {"by_rows": True, "bias": bias} if layer.role == "row" else {}
        return replace(layer, style="LinearParallel", options={"shards": shards, **by_rows, **options})

    return replace(plan, layers=tuple(map(local, plan.layers)))


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
    for layer in plan.layers:
        if layer.role == "gradient" or layer.options.get("sums_result"):
            raise InputError(
                f"sequence=True is not costed for {layer.fqn} ({layer.style}), which takes the tokens of all ranks; "
                "use sequence=False"
            )
    if not blocks:
        return plan
    events = {event.fqn: event for event in (*calls.events, *calls.entered) if event.is_module}
    first, last = events[blocks[0]], events[blocks[-1]]
    key, hidden = _hidden(first)
    shape = tuple(shape_of(hidden)) if isinstance(hidden, Value) else None
    dims = [dim for dim, size in enumerate((shape or ())[:-1]) if size % plan.tensor == 0]
    if shape is None or not dims:
        raise InputError(
            f"sequence=True: the tokens of a block's input {shape} do not divide by {plan.tensor}; use sequence=False"
        )
    dim, n_tokens = dims[-1], _tokens(hidden)
    (begin, _), (_, end) = _span(calls, first), _span(calls, last)
    chunk = f"Shard({dim})"

    def takes_share(event: Event) -> bool:
        """Return True for a call between the first block and the last that takes, or returns, all tokens."""
        inside = begin <= _span(calls, event)[0] < end
        return inside and any(_tokens(value) == n_tokens for value in values_in((event.args, event.result))[:1])

    def shared(layer: LayerPlan) -> LayerPlan:
        if layer.fqn not in events or not takes_share(events[layer.fqn]):
            return layer
        options = dict(layer.options)
        is_table = isinstance(calls.modules[layer.fqn], nn.Embedding)
        if layer.role in ("column", "head") and not is_table and layer.fqn not in prepared:
            options["input_layouts"] = chunk
        if layer.role in ("row", "embedding", "heads"):
            options["output_layouts"] = chunk
        if layer.role == "heads":
            options["input_layouts"] = (chunk,) * 3
        if layer.role == "output":
            options["output_layouts"] = chunk
        return replace(layer, options=options)

    split = {layer.fqn: layer for layer in plan.layers if layer.role not in _AROUND}
    inputs = prepared_inputs(calls, split, least=1)  # type: ignore[arg-type]
    prepared = {fqn for prepared_input in inputs for fqn in prepared_input.columns}
    layers = [redistribution_plan(calls, Redistribution(first.fqn, True, key, Shard(dim), False))]
    for prepared_input in inputs:
        is_share = takes_share(events[prepared_input.fqn]) and _tokens(prepared_input.values[0]) == n_tokens
        before = chunk if is_share else "Replicate()"
        options = prepare_options("input", prepared_input.position, prepared_input.n_positional, before, "Replicate()")
        layers.append(LayerPlan(prepared_input.fqn, "PrepareModuleInput", options, "input", {}, 0))
    layers += [shared(layer) for layer in plan.layers if layer.role != "input"]
    for position, result in enumerate(results_of(last)):
        if isinstance(result, Value) and result.requires_grad and _tokens(result) == n_tokens:
            layers.append(redistribution_plan(calls, Redistribution(last.fqn, False, position, Shard(dim), True)))
    return replace(plan, layers=tuple(layers))


def _hidden(block: Event) -> tuple[int | str, Any]:
    """Return the first argument of a block that is a tensor with a gradient, and its position or name."""
    arguments = (*enumerate(block.args), *block.kwargs.items())
    return next(
        (
            (key, value)
            for key, value in arguments
            if isinstance(value, Value) and value.requires_grad and len(value.shape) > 1
        ),
        (0, None),
    )


def _tokens(value: Value) -> int:
    return prod(value.shape[:-1])


def _span(calls: Calls, event: Event) -> tuple[int, int]:
    """Return the positions of what a call of a module calls."""
    return calls.entered.get(event) or (calls.position[event], calls.position[event] + 1)


def tokens_first(operators: Sequence[StepOperator]) -> tuple[frozenset[int], frozenset[int]]:
    """Return the operators that copy tokens for the sake of collectives alone, and those that return gathered tokens.

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

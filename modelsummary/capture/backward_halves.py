"""The two halves of a backward, as zero-bubble schedules run them: first inputs, later weights.

The nodes of the graph from which an input is reached are on the way. The first half runs these, and keeps what each one
takes. Where the gradient of a weight branches off at one such node alone, the second half runs that node again, for the
weight. Other weights, which several nodes use or which no input meets, get their gradients in the first half.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from modelsummary.operators.tensor_bytes import is_distributed

__all__ = ["DeferredNode", "backward_of_inputs", "backward_of_weights", "has_halves"]

# Autograd nodes that compute the gradients of their parameters inside, or run once.
_RUNS_WHOLE = frozenset({"CheckpointFunctionBackward", "CompiledFunctionBackward"})


class DeferredNode(NamedTuple):
    """A node that the second half runs, with the gradients that it takes, for these weights."""

    node: Any
    gradients: Sequence[Tensor | None]
    weights: Sequence[nn.Parameter]


class _Graph(NamedTuple):
    """The nodes behind some results: node -> nodes whose backward runs before, and the leaves -> their tensors."""

    roots: Sequence[Any]
    before: Mapping[Any, Sequence[Any]]
    leaves: Mapping[Any, Tensor]


def _graph(outputs: Sequence[Any]) -> _Graph:
    roots = [output.node if isinstance(output, GradientEdge) else get_gradient_edge(output).node for output in outputs]
    before: dict[Any, list[Any]] = {root: [] for root in roots}
    leaves: dict[Any, Tensor] = {}
    pending = [*before]
    while pending:
        node = pending.pop()
        if hasattr(node, "variable"):
            leaves[node] = node.variable
        for next_node, _ in node.next_functions:
            if next_node is not None:
                if next_node not in before:
                    before[next_node] = []
                    pending.append(next_node)
                before[next_node].append(node)
    return _Graph(roots, before, leaves)


def differentiable(outputs: Sequence[Any]) -> list[int]:
    """Return the positions of the results that need a gradient: tensors, or the edges that the engine keeps."""
    return [
        position
        for position, output in enumerate(outputs)
        if output is not None and (not isinstance(output, Tensor) or output.requires_grad)
    ]


def has_halves(outputs: Sequence[Any], inputs: Sequence[Any], weights: Sequence[nn.Parameter]) -> bool:
    """Return True if each leaf of the graph is an input, or a parameter that the stage has now.

    FSDP that frees parameters after the forward leaves others. A hook of a parameter would not be called.
    """
    if any(getattr(weight, "_post_accumulate_grad_hooks", None) for weight in weights):
        return False
    graph = _graph([outputs[position] for position in differentiable(outputs)])
    names = (node.name().removeprefix("torch::autograd::") for node in graph.before)
    ids = {*map(id, weights), *(id(tensor) for tensor in inputs if isinstance(tensor, Tensor))}
    return all(id(leaf) in ids for leaf in graph.leaves.values()) and _RUNS_WHOLE.isdisjoint(names)


def backward_of_inputs(
    outputs: Sequence[Any], gradients: Sequence[Any] | None, inputs: Sequence[Any], weights: Sequence[nn.Parameter]
) -> tuple[tuple[Tensor | None, ...], list[DeferredNode]]:
    """Return the gradients of the inputs, and what the second half has to do.

    Args:
        gradients: of the outputs; None for a loss.
    """
    positions = differentiable(outputs)
    graph = _graph([outputs[position] for position in positions])
    wanted = {id(tensor): tensor for tensor in inputs if isinstance(tensor, Tensor) and tensor.requires_grad}
    on_the_way = {node for node, leaf in graph.leaves.items() if id(leaf) in wanted}
    pending = [*on_the_way]
    while pending:
        for node in graph.before[pending.pop()]:
            if node not in on_the_way:
                on_the_way.add(node)
                pending.append(node)
    weight_ids = set(map(id, weights))
    later: dict[Any, list[Any]] = defaultdict(list)
    now: list[Any] = []
    for node, leaf in graph.leaves.items():
        if id(leaf) in weight_ids and node not in on_the_way:
            branches, is_apart = _branches(graph, node, on_the_way)
            if len(branches) == 1 and is_apart:
                later[branches.pop()].append(leaf)
            else:
                now.append(leaf)
    kept: dict[Any, Any] = {}

    def keep(node: Any) -> Any:
        return lambda grad_outputs: kept.__setitem__(node, grad_outputs)

    handles = [node.register_prehook(keep(node)) for node in later]
    try:
        grads = (
            torch.autograd.grad(
                [outputs[position] for position in positions],
                [*wanted.values(), *now],
                None if gradients is None else [gradients[position] for position in positions],
                retain_graph=True,
                allow_unused=True,
            )
            if positions and (wanted or now)
            else ()
        )
    finally:
        for handle in handles:
            handle.remove()
    by_id = dict(zip(wanted, grads, strict=False))
    for weight, grad in zip(now, grads[len(wanted) :], strict=False):
        _add(weight, grad)
    others = [DeferredNode(node, kept[node], leaves) for node, leaves in later.items() if node in kept]
    return tuple(by_id.get(id(value)) for value in inputs), others


def _branches(graph: _Graph, leaf: Any, on_the_way: set[Any]) -> tuple[set[Any], bool]:
    """Return the nodes on the way from which a leaf is reached beside it, and False if a result is such a node."""
    branches, seen, pending = set(), {leaf}, [leaf]
    while pending:
        for node in graph.before[pending.pop()]:
            if node in on_the_way:
                branches.add(node)
            elif node not in seen:
                seen.add(node)
                pending.append(node)
    return branches, seen.isdisjoint(graph.roots)


def backward_of_weights(later: Sequence[DeferredNode]) -> None:
    """Add the gradients of the weights that the first half left out."""
    for node, grad_outputs, weights in later:
        edges = [
            (GradientEdge(node, position), grad_output)
            for position, grad_output in enumerate(grad_outputs)
            if grad_output is not None
        ]
        if edges:
            ends, gradients = zip(*edges, strict=True)
            grads = torch.autograd.grad(ends, weights, gradients, retain_graph=True, allow_unused=True)
            for weight, grad in zip(weights, grads, strict=True):
                _add(weight, grad)


@torch.no_grad()
def _add(weight: Any, gradient: Tensor | None) -> None:
    if gradient is not None:
        # Nodes hand the same memory to several weights, or one element as many.
        total = gradient.clone() if weight.grad is None else weight.grad + gradient
        weight.grad = _in_order_of(weight, total)


def _in_order_of(weight: Any, gradient: Tensor) -> Tensor:
    """Return a gradient that lies in memory as its parameter does, as fused optimizers read it."""
    if is_distributed(type(gradient)):  # its placements may differ from the parameter's
        return gradient.clone(memory_format=torch.contiguous_format)
    return gradient if gradient.stride() == weight.stride() else torch.empty_like(weight).copy_(gradient)

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

__all__ = ["Later", "backward_of_inputs", "backward_of_weights", "has_halves"]

# Autograd nodes that compute the gradients of their parameters inside, or run once.
_RUNS_WHOLE = frozenset({"CheckpointFunctionBackward", "CompiledFunctionBackward"})


class Later(NamedTuple):
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
    roots = [each.node if isinstance(each, GradientEdge) else get_gradient_edge(each).node for each in outputs]
    before: dict[Any, list[Any]] = {root: [] for root in roots}
    leaves: dict[Any, Tensor] = {}
    pending = [*before]
    while pending:
        node = pending.pop()
        if hasattr(node, "variable"):
            leaves[node] = node.variable
        for following, _ in node.next_functions:
            if following is not None:
                if following not in before:
                    before[following] = []
                    pending.append(following)
                before[following].append(node)
    return _Graph(roots, before, leaves)


def differentiable(outputs: Sequence[Any]) -> list[int]:
    """Return the positions of the results that need a gradient: tensors, or the edges that the engine keeps."""
    return [
        place
        for place, each in enumerate(outputs)
        if each is not None and (not isinstance(each, Tensor) or each.requires_grad)
    ]


def has_halves(outputs: Sequence[Any], inputs: Sequence[Any], weights: Sequence[nn.Parameter]) -> bool:
    """Return True if each leaf of the graph is an input, or a parameter that the stage has now.

    FSDP that frees parameters after the forward leaves others. A hook of a parameter would not be called.
    """
    if any(getattr(each, "_post_accumulate_grad_hooks", None) for each in weights):
        return False
    graph = _graph([outputs[place] for place in differentiable(outputs)])
    names = (node.name().removeprefix("torch::autograd::") for node in graph.before)
    known = {*map(id, weights), *(id(each) for each in inputs if isinstance(each, Tensor))}
    return all(id(each) in known for each in graph.leaves.values()) and _RUNS_WHOLE.isdisjoint(names)


def backward_of_inputs(
    outputs: Sequence[Any], gradients: Sequence[Any] | None, inputs: Sequence[Any], weights: Sequence[nn.Parameter]
) -> tuple[tuple[Tensor | None, ...], list[Later]]:
    """Return the gradients of the inputs, and what the second half has to do.

    Args:
        gradients: of the outputs; None for a loss.
    """
    places = differentiable(outputs)
    graph = _graph([outputs[place] for place in places])
    wanted = {id(each): each for each in inputs if isinstance(each, Tensor) and each.requires_grad}
    on_the_way = {node for node, leaf in graph.leaves.items() if id(leaf) in wanted}
    pending = [*on_the_way]
    while pending:
        for node in graph.before[pending.pop()]:
            if node not in on_the_way:
                on_the_way.add(node)
                pending.append(node)
    own = set(map(id, weights))
    later: dict[Any, list[Any]] = defaultdict(list)
    now: list[Any] = []
    for node, leaf in graph.leaves.items():
        if id(leaf) in own and node not in on_the_way:
            branches, is_apart = _branches(graph, node, on_the_way)
            if len(branches) == 1 and is_apart:
                later[branches.pop()].append(leaf)
            else:
                now.append(leaf)
    kept: dict[Any, Any] = {}

    def keep(node: Any) -> Any:
        return lambda taken: kept.__setitem__(node, taken)

    handles = [node.register_prehook(keep(node)) for node in later]
    try:
        found = (
            torch.autograd.grad(
                [outputs[place] for place in places],
                [*wanted.values(), *now],
                None if gradients is None else [gradients[place] for place in places],
                retain_graph=True,
                allow_unused=True,
            )
            if places and (wanted or now)
            else ()
        )
    finally:
        for handle in handles:
            handle.remove()
    by_id = dict(zip(wanted, found, strict=False))
    for weight, gradient in zip(now, found[len(wanted) :], strict=False):
        _add(weight, gradient)
    others = [Later(node, kept[node], leaves) for node, leaves in later.items() if node in kept]
    return tuple(by_id.get(id(each)) for each in inputs), others


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


def backward_of_weights(later: Sequence[Later]) -> None:
    """Add the gradients of the weights that the first half left out."""
    for node, taken, weights in later:
        edges = [(GradientEdge(node, place), each) for place, each in enumerate(taken) if each is not None]
        if edges:
            ends, gradients = zip(*edges, strict=True)
            found = torch.autograd.grad(ends, weights, gradients, retain_graph=True, allow_unused=True)
            for weight, gradient in zip(weights, found, strict=True):
                _add(weight, gradient)


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

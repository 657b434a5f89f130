"""Graphs whose nodes are linked to the rows of a model's tree."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.fx import GraphModule, Node

from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.live import LiveModel
from modelsummary.fx.meta_info import info_of
from modelsummary.fx.profiling import profile_call
from modelsummary.fx.tracing import graph_call, trace_call
from modelsummary.layer_info import LayerInfo

__all__ = ["graph_module", "nodes_of"]


def graph_module(
    live: LiveModel,
    rows_of: Callable[[str], list[LayerInfo]],
    *,
    trace_act_ckpt: bool = False,
    bias_addition_split: bool = False,
    device: torch.device | str | None = None,
) -> GraphModule:
    """Trace and profile a model with the input it was summarised with; each node has its row in ``meta["layer_info"]``.

    Args:
        live: the model and its input.
        rows_of: function from an FQN to the rows of all calls of that module.
        trace_act_ckpt, bias_addition_split: as for ``symbolic_trace``.
        device: device whose kernels are assumed, as for ``symbolic_profile``.
    """
    call = live.call
    names = dict(_names(live.model, call))
    options = {"marks": trace_act_ckpt, "splits_bias": bias_addition_split}
    graph = trace_call(live.model, call, names, **options, execution=live.execution)
    profile_call(graph, graph_call(call, names), device)
    for node in graph.graph.nodes:
        info = info_of(node)
        node.meta["layer_info"] = rows_of(info.fqn)[info.call_index]
    return graph


def nodes_of(graph: GraphModule, fqn: str) -> list[Node]:
    """Return the nodes of a module: its call, the functions that it calls, and the nodes of its submodules."""
    prefix = f"{fqn}." if fqn else ""
    return [node for node in graph.graph.nodes if f"{info_of(node).fqn}.".startswith(prefix)]


def _names(model: nn.Module, call: CallArguments) -> Iterator[tuple[int | str, str]]:
    """Yield the position or name of each argument that holds tensors, and its name in the graph."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    for position, value in enumerate(call.args):
        if CallArguments((value,), {}, None).shapes():
            parameter = parameters[min(position, len(parameters) - 1)]
            is_many = parameter.kind is parameter.VAR_POSITIONAL
            yield position, f"{parameter.name}_{position}" if is_many else parameter.name
    for name, value in call.kwargs.items():
        if CallArguments((value,), {}, None).shapes():
            yield name, name

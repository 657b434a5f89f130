"""What ``ModelStatistics`` gives as a ``torch.fx`` graph."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import torch
from torch import nn
from torch.fx import GraphModule, Node

from modelsummary.capture.inputs import CallArguments
from modelsummary.layer_info import LayerInfo
from modelsummary.statistics.live import Live

__all__ = ["Graphing"]


class Graphing(Live):
    """The part of ``ModelStatistics`` that makes graphs."""

    def calls(self, fqn: str) -> list[LayerInfo]:
        """The rows of a module."""
        raise NotImplementedError

    def graph_module(
        self,
        *,
        trace_act_ckpt: bool = False,
        bias_addition_split: bool = False,
        device: torch.device | str | None = None,
    ) -> GraphModule:
        """The model as a ``torch.fx`` graph, traced and profiled as it was summarised.

        ``node.meta["info"]`` is what is known of a node, ``node.meta["layer_info"]`` the row of the call that it is, or
        that it belongs to; ``nodes_of`` leads back.

        Args:
            trace_act_ckpt, bias_addition_split: as for ``symbolic_trace``.
            device: whose kernels are assumed, as for ``symbolic_profile``.

        Raises:
            InputError: there is no live model with an input.
            TraceError: the forward cannot be written as a graph; says why.
        """
        from modelsummary.fx.profiling import profile_call
        from modelsummary.fx.tracing import trace_call

        model, call = self._live("a graph module")
        names = dict(_names(model, call))
        graph = trace_call(model, call, names, marks=trace_act_ckpt, splits_bias=bias_addition_split)
        given = {name: call.args[key] if isinstance(key, int) else call.kwargs[key] for key, name in names.items()}
        profile_call(graph, CallArguments((), given, call.device), device)
        for node in graph.graph.nodes:
            info = node.meta["info"]
            node.meta["layer_info"] = self.calls(info.fqn)[info.call_index]
        return graph

    def nodes_of(self, graph: GraphModule, fqn: str) -> list[Node]:
        """The nodes of a graph of this model that a module calls, is, or has within.

        Raises:
            LayerNotFoundError: the model has no such module.
        """
        from modelsummary.fx.meta_info import MetaInfo

        self.calls(fqn)
        infos = ((node, node.meta.get("info")) for node in graph.graph.nodes)
        prefix = f"{fqn}." if fqn else ""
        return [node for node, info in infos if isinstance(info, MetaInfo) and f"{info.fqn}.".startswith(prefix)]


def _names(model: nn.Module, call: CallArguments) -> Iterator[tuple[int | str, str]]:
    """Position or name of each argument that holds tensors, and how the graph calls it."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    for position, value in enumerate(call.args):
        if CallArguments((value,), {}, None).shapes():
            parameter = parameters[min(position, len(parameters) - 1)]
            is_many = parameter.kind is parameter.VAR_POSITIONAL
            yield position, f"{parameter.name}_{position}" if is_many else parameter.name
    for name, value in call.kwargs.items():
        if CallArguments((value,), {}, None).shapes():
            yield name, name

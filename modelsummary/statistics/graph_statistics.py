"""``GraphStatistics``: the graphs of a live model."""

from __future__ import annotations

from types import EllipsisType
from typing import TYPE_CHECKING, Any

import torch

from modelsummary.capture.exclusive import exclusive
from modelsummary.statistics.formula_statistics import FormulaStatistics

if TYPE_CHECKING:  # imported on first use
    from torch.fx import GraphModule, Node

    from modelsummary.split import Stages
    from modelsummary.views.flow import Dataflow
    from modelsummary.views.graph import Graph

__all__ = ["GraphStatistics"]


class GraphStatistics(FormulaStatistics):
    """Statistics with a live model, which draw its dataflow and trace it; ``Statistics`` adds stages and plans."""

    @exclusive
    def graph(
        self, depth: int | EllipsisType | None = ..., *, stages: Stages | None = None, fold: bool | None = None
    ) -> Graph:
        """Return the dataflow graph: the modules and functions that pass tensors to each other.

        The forward is recorded again, as for ``split``. Edges have the shapes of the tensors; nodes have parameters and
        multiply-adds. A module whose calls are shown one by one is a group.

        Args:
            depth: levels of nested calls that are shown: 1 shows the modules that the model calls; None: all. Default:
                as many as give at most 60 nodes. Containers that are never called, such as ``nn.ModuleList``, do not
                count as a level.
            stages: result of ``split`` on this model; nodes get the colours of their stages, and modules that are cut
                are shown as groups.
            fold: draw equal consecutive modules as one, with their number. None: if the graph has more than 60 nodes.

        Raises:
            InputError: an argument is unusable, or the statistics have no live model with an input.
            SplitError: a parameter is not initialised yet, or the stages were pickled.

        >>> from torch import nn
        >>> from modelsummary import Statistics
        >>> stats = Statistics(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4)), (1, 2))
        >>> [node.name for node in stats.graph().nodes]
        ['input', '0', '1', '2', 'output']
        """
        from modelsummary.statistics.live_dataflow import dataflow

        return dataflow(self._live_for("a graph of the dataflow"), self.root, depth, stages, fold)

    @exclusive
    def _dataflow(self, stages: Stages | None = None) -> Dataflow:
        from modelsummary.statistics.live_dataflow import explored_dataflow

        return super()._dataflow(stages) if self._live is None else explored_dataflow(self._live, self.root, stages)

    def graph_module(
        self,
        *,
        trace_act_ckpt: bool = False,
        bias_addition_split: bool = False,
        device: torch.device | str | None = None,
    ) -> GraphModule:
        """Return the model as a ``torch.fx`` graph, traced and profiled with the recorded input.

        ``node.meta["info"]`` holds the facts about a node, ``node.meta["layer_info"]`` the row of the call that it is
        or belongs to. ``nodes_of`` returns the nodes of a module.

        Args:
            trace_act_ckpt, bias_addition_split: as for ``symbolic_trace``.
            device: device whose kernels are assumed, as for ``symbolic_profile``.

        Raises:
            InputError: the statistics have no live model with an input.
            TraceError: the forward cannot be written as a graph; the message gives the reason.
        """
        from modelsummary.fx.layer_nodes import graph_module

        options: dict[str, Any] = {"trace_act_ckpt": trace_act_ckpt, "bias_addition_split": bias_addition_split}
        return graph_module(self._live_for("a graph module"), self.calls, **options, device=device)

    def nodes_of(self, graph: GraphModule, fqn: str) -> list[Node]:
        """Return the nodes of a graph of this model that belong to a module or to modules in it.

        Args:
            graph: result of ``graph_module``.
            fqn: name of the module.

        Raises:
            LayerNotFoundError: the model has no such module.
        """
        from modelsummary.fx.layer_nodes import nodes_of

        self.calls(fqn)
        return nodes_of(graph, fqn)

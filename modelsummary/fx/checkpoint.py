"""Run parts of a graph under activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count

from torch.fx import GraphModule, Node

from modelsummary.capture.checkpoints import segment_of
from modelsummary.errors import InputError
from modelsummary.fx.codegen import MARK, CheckpointCodeGen, region_of
from modelsummary.fx.meta_info import info_of
from modelsummary.fx.shape_prop import checked
from modelsummary.memory.checkpointing import CheckpointPlan

__all__ = ["checkpoint_graph"]


def checkpoint_graph(gm: GraphModule, fqns: CheckpointPlan | Iterable[str]) -> GraphModule:
    """Run modules of a traced model under activation checkpointing in its graph; gradients stay the same.

    The nodes of each module become a region: ``node.meta["activation_checkpoint"]`` is ``(number,)``, and the code
    calls them in a function ``checkpoint_<number>``.

    Args:
        gm: graph of ``symbolic_trace``; changed in place and recompiled.
        fqns: plan of ``stats.suggest_checkpoint(...)``, or module names as ``apply_checkpoint`` takes them.

    Returns:
        ``gm``.

    Raises:
        InputError: the plan keeps results of operators, no node belongs to a name, or a node is already in a region.
            The graph is unchanged then.

    >>> import torch
    >>> from modelsummary.fx import symbolic_trace
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    >>> gm = checkpoint_graph(symbolic_trace(model, meta_args={"input": torch.rand(4, 8)}), ["0", "1"])
    >>> [(node.name, node.meta["activation_checkpoint"]) for node in gm.graph.nodes if region_of(node)]
    [('_0', (0,)), ('_1', (1,))]
    """
    checked(gm)
    if isinstance(fqns, str):
        raise InputError(f"fqns must be a list of module names, got one name; pass [{fqns!r}]")
    if isinstance(fqns, CheckpointPlan) and fqns.kept:
        raise InputError(
            "the plan keeps results inside its modules, and a region of a graph keeps none; pass a plan of "
            "suggest_checkpoint, or memory_plan(granularity='block')"
        )
    names = list(dict.fromkeys(fqns.fqns if isinstance(fqns, CheckpointPlan) else fqns))
    unknown = next((name for name in names if not isinstance(name, str)), None)
    if unknown is not None:
        raise InputError(f"fqns must be names of modules, got {type(unknown).__name__}: {unknown!r:.80}")
    taken = {region_of(node)[0] for node in gm.graph.nodes if region_of(node)}
    numbers = (region for region in count() if region not in taken)
    marks: dict[Node, int] = {}
    for name in names:
        runs = list(_runs(gm, name))
        if not runs:
            raise InputError(
                f"no node of the graph belongs to {name!r}; pass the name of a module that the model calls"
            )
        for run in runs:
            mark = next(numbers)
            for node in run:
                if region_of(node) or node in marks:
                    raise InputError(f"{name!r} has the node {node.name!r}, which is already in a region; leave it out")
                marks[node] = mark
    for node, mark in marks.items():
        node.meta[MARK] = (mark,)
    if not isinstance(gm.graph._codegen, CheckpointCodeGen):
        gm.graph.set_codegen(CheckpointCodeGen())
    gm.recompile()
    return gm


def _runs(gm: GraphModule, name: str) -> Iterator[list[Node]]:
    """Yield the nodes of a module, or of a segment of one, in contiguous runs."""
    container, segment = segment_of(name)
    paths = [name]
    if segment is not None:
        children = [child for child, _ in gm.get_submodule(container).named_children()]
        paths = [f"{container}.{child}" if container else child for child in children[segment.start : segment.stop]]
    run: list[Node] = []
    for node in gm.graph.nodes:
        is_inside = any(f"{info_of(node).fqn}.".startswith(f"{path}.") for path in paths)
        if is_inside and node.op not in ("placeholder", "output"):
            run.append(node)
        elif run and node.op != "get_attr":
            yield run
            run = []
    if run:
        yield run

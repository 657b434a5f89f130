"""Mark parts of a graph, so that they run under activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count

from torch.fx import GraphModule, Node

from modelsummary.errors import InputError
from modelsummary.fx.codegen import MARK, CheckpointCodeGen, region_of
from modelsummary.fx.meta_info import MetaInfo
from modelsummary.fx.shape_prop import checked
from modelsummary.memory.checkpointing import CheckpointPlan, segment_of

__all__ = ["checkpoint_graph"]


def checkpoint_graph(gm: GraphModule, fqns: CheckpointPlan | Iterable[str]) -> GraphModule:
    """Run modules of the traced model under activation checkpointing in its graph; gradients stay the same.

    The nodes of each become a region: ``node.meta["activation_checkpoint"] = (number,)``, and the code has a function
    ``checkpoint_<number>``.

    Args:
        gm: of ``symbolic_trace``; it is changed and recompiled.
        fqns: a plan of ``stats.checkpoint_plan(...)``, or names of modules as ``apply_checkpoint`` takes them.

    Returns:
        ``gm``.

    Raises:
        InputError: no node belongs to a name, or one is in a region already; nothing was changed then.
    """
    checked(gm)
    if isinstance(fqns, str):
        raise InputError(f"fqns={fqns!r} is one name; pass a list: [{fqns!r}]")
    names = list(dict.fromkeys(fqns.fqns if isinstance(fqns, CheckpointPlan) else fqns))
    unknown = next((name for name in names if not isinstance(name, str)), None)
    if unknown is not None:
        raise InputError(f"fqns: expected names of modules, got {type(unknown).__name__}: {unknown!r:.80}")
    taken = {region_of(node)[0] for node in gm.graph.nodes if region_of(node)}
    numbers = (number for number in count() if number not in taken)
    marks: dict[Node, int] = {}
    for name in names:
        found = list(_runs(gm, name))
        if not found:
            raise InputError(
                f"no node of the graph belongs to {name!r}; names are those of called modules of the model"
            )
        for run in found:
            number = next(numbers)
            for node in run:
                if region_of(node) or node in marks:
                    raise InputError(f"{name!r} has the node {node.name!r}, which is in a region already")
                marks[node] = number
    for node, number in marks.items():
        node.meta[MARK] = (number,)
    if not isinstance(gm.graph._codegen, CheckpointCodeGen):
        gm.graph.set_codegen(CheckpointCodeGen())
    gm.recompile()
    return gm


def _runs(gm: GraphModule, name: str) -> Iterator[list[Node]]:
    """The nodes of a module, or of a segment of one, in runs without others between."""
    container, segment = segment_of(name)
    paths = [name]
    if segment is not None:
        children = [child for child, _ in gm.get_submodule(container).named_children()]
        paths = [f"{container}.{child}" if container else child for child in children[segment.start : segment.stop]]
    run: list[Node] = []
    for node in gm.graph.nodes:
        info = node.meta.get("info")
        fqn = info.fqn if isinstance(info, MetaInfo) else ""
        is_inside = any(f"{fqn}.".startswith(f"{path}.") for path in paths)
        if is_inside and node.op not in ("placeholder", "output"):
            run.append(node)
        elif run and node.op != "get_attr":
            yield run
            run = []
    if run:
        yield run

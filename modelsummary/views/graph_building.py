"""Building of a dataflow graph: the calls of a record down to a level, and the tensors that they pass to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from modelsummary.equality import kinds_of
from modelsummary.layer_info import LayerInfo
from modelsummary.record.events import Event, Record
from modelsummary.units import scaled
from modelsummary.views.flow import FlowStep, stage_of_calls, steps_of_record
from modelsummary.views.graph import Graph
from modelsummary.views.graph_fold import GraphCall, folded
from modelsummary.views.graph_nodes import Edge, Group, Node
from modelsummary.views.labels import one_line

__all__ = ["dataflow_graph"]

_READABLE = 60  # nodes: a larger graph is folded, and its depth is chosen so that it is not larger


def dataflow_graph(
    root: LayerInfo,
    record: Record,
    depth: int | None,
    stages: Sequence[Sequence[Event]] = (),
    *,
    readable: bool = False,
    fold: bool | None = None,
) -> Graph:
    """Return the graph of a recorded forward.

    Args:
        root: root of the tree, for parameters and multiply-adds.
        record: record of the forward.
        depth: level of nested calls down to which modules are opened; None: all levels.
        stages: calls of each stage; a module whose calls are in several stages is always opened.
        readable: ignore ``depth`` and choose the deepest level whose graph has at most 60 nodes.
        fold: draw equal consecutive modules as one; None: if the graph has more than 60 nodes.
    """
    kinds = kinds_of(root)
    stage_of = stage_of_calls(stages)

    def opens(event: Event, level: int, depth: int | None) -> bool:
        inner = [call for call in event.walk() if call is not event]
        if not event.is_module or not inner:
            return False
        if stage_of and len({stage_of[call] for call in inner if call in stage_of}) > 1:
            return True
        return (depth is None or level < depth) and any(call.is_module for call in inner)

    def built(depth: int | None, fold: bool | None) -> tuple[Graph, int]:
        """Return the graph as it is shown, and the number of nodes without folding."""
        steps = steps_of_record(root, record, stages, lambda event, level: opens(event, level, depth))
        folds = len(steps) > _READABLE if fold is None else fold
        graph, called = _graph(root, steps, kinds)
        return folded(graph, called) if folds else graph, len(steps)

    graph, size = built(None if readable else depth, fold)
    if not readable or len(graph.nodes) <= _READABLE:
        return graph
    level, shown = 1, 0
    while shown < size:  # the last level is reached when all nodes are there
        deeper, shown = built(level, fold is not False)
        if level > 1 and len(deeper.nodes) > _READABLE:
            break
        graph, level = deeper, level + 1
    return graph


def _graph(root: LayerInfo, steps: Sequence[FlowStep], kinds: Mapping[int, int]) -> tuple[Graph, dict[str, GraphCall]]:
    """Return the graph of the steps, and what each of its nodes and groups calls."""
    model = Group("model", one_line(root.class_name))
    groups: dict[int, Group] = {}
    called: dict[str, GraphCall] = {}

    def note(key: str, event: Event, row: LayerInfo | None, lines: Sequence[str] = ()) -> None:
        kind = tuple(lines[:1]) if row is None else kinds[id(row)]
        called[key] = GraphCall(kind, _name(event), "" if row is None else row.class_name)

    for step in steps:
        items = model.items
        for opened in step.around:
            if opened.node_id not in groups:
                label = _name(opened.event) + (f": {opened.row.class_name}" if opened.row is not None else "")
                group = groups[opened.node_id] = Group(f"gn{opened.node_id}", label)
                note(group.key, opened.event, opened.row)
                items.append(group)
            items = groups[opened.node_id].items
        node = _node(step)
        if step.event is not None:
            note(node.key, step.event, _row(step), node.lines)
        items.append(node)
    edges = [
        Edge(_key(steps[source]), _key(step), tuple(tuple(map(int, tensor.shape or ())) for tensor in tensors))
        for step in steps
        for source, tensors in step.takes.items()
    ]
    return Graph(model, edges), called


def _key(step: FlowStep) -> str:
    return f"n{step.node_id}"


def _row(step: FlowStep) -> LayerInfo | None:
    """Return the row of the call itself; None for a function, and for a module without a row."""
    event = step.event
    return step.inside if event is not None and event.is_module and event.key == step.inside.key else None


def _node(step: FlowStep) -> Node:
    event, row = step.event, _row(step)
    if event is None:
        return Node(_key(step), step.kind, step.name, (step.name,))
    lines = [_name(event)] if event.name else []
    lines += [row.class_name] if row is not None else step.uses
    params, macs = (0, event.macs) if row is None else (row.num_params, row.macs)
    figures = [f"{scaled(count)} {unit}" for count, unit in ((params, "params"), (macs, "MACs")) if count]
    lines += [", ".join(figures)] if figures else []
    lines += [f"stage {step.stage}"] if step.stage is not None else []
    return Node(_key(step), "module" if event.is_module else "function", event.name, tuple(lines), step.stage)


def _name(event: Event) -> str:
    return f"{event.name} (call {event.call_index + 1})" if event.is_module and event.call_index else event.name

"""Building of a dataflow graph: the calls of a record down to a level, and the tensors that they pass to each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from modelsummary.layer_info import LayerInfo
from modelsummary.record.events import Event, Record, Value, attributes_in, values_in
from modelsummary.units import scaled
from modelsummary.views.folding import kinds_of
from modelsummary.views.graph import Edge, Graph, Group, Node
from modelsummary.views.graph_fold import GraphCall, folded
from modelsummary.views.labels import one_line
from modelsummary.views.producers import Producers

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
    rows = {(row.fqn, row.call_index): row for row in root.walk()}
    kinds = kinds_of(root)

    def built(level: int | None, fold: bool | None) -> tuple[Graph, int]:
        """Return the graph as it is shown, and the number of nodes without folding."""
        building = _Building(rows, record, level, stages, kinds)
        graph = building.graph()
        size = len(graph.nodes)
        folds = size > _READABLE if fold is None else fold
        return folded(graph, building.called) if folds else graph, size

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


class _Building:
    """Builder of a graph, which follows the values of one record."""

    def __init__(
        self,
        rows: Mapping[tuple[str, int], LayerInfo],
        record: Record,
        depth: int | None,
        stages: Sequence[Sequence[Event]],
        kinds: Mapping[int, int],
    ) -> None:
        self.called: dict[str, GraphCall] = {}
        self._rows, self._root, self._depth, self._kinds = rows, record.root, depth, kinds
        self._stage = {inner: number for number, calls in enumerate(stages) for call in calls for inner in call.walk()}
        self._producers: Producers[str] = Producers()
        self._crossing: dict[tuple[str, str], list[Value]] = {}
        self._n_keys = 0

    def graph(self) -> Graph:
        root = self._root
        given = {f"input {place}": each for place, each in enumerate(root.args)} | root.kwargs
        if len(given) == 1:
            given = {"input": next(iter(given.values()))}
        items: list[Node | Group] = []
        for name, template in given.items():
            if values := values_in(template):
                node = Node(self._key(), "input", name, (name,))
                items.append(node)
                self._producers.add(node.key, values)
        model_row = self._rows["", 0]
        is_opaque = not root.children or isinstance(model_row.module, torch.jit.ScriptModule)
        items += [self._node(root)] if is_opaque else self._items(root, 1)
        output = Node(self._key(), "output", "output", ("output",))
        self._takes(output.key, self._producers.of(root.result))
        model = Group("model", one_line(model_row.class_name), [*items, output])
        return self._without_dead_ends(model)

    def _key(self) -> str:
        self._n_keys += 1
        return f"n{self._n_keys}"

    def _items(self, event: Event, level: int) -> list[Node | Group]:
        items: list[Node | Group] = []
        for child in event.children:
            if self._is_open(child, level):
                row = self._rows.get((child.fqn, child.call_index))
                label = f"{_name(child)}: {row.class_name}" if row is not None else _name(child)
                group = Group(f"g{self._key()}", label, self._items(child, level + 1))
                self._note(group.key, child, row)
                items.append(group)
                last = list(group.nodes())[-1:]
                if last:
                    self._producers.add_missing(last[0].key, child.result)
            else:
                items.append(self._node(child))
        return items

    def _is_open(self, event: Event, level: int) -> bool:
        inner = [each for each in event.walk() if each is not event]
        if not event.is_module or not inner:
            return False
        if self._stage and len({self._stage[each] for each in inner if each in self._stage}) > 1:
            return True
        return (self._depth is None or level < self._depth) and any(each.is_module for each in inner)

    def _node(self, event: Event) -> Node:
        stage = next((self._stage[each] for each in event.walk() if each in self._stage), None)
        lines = [_name(event)] if event.name else []
        row = self._rows.get((event.fqn, event.call_index)) if event.is_module else None
        if row is not None:
            lines.append(row.class_name)
        else:
            lines += [attribute.fqn for attribute in attributes_in((event.args, event.kwargs))]
        counts = ((row.num_params if row is not None else 0, "params"), (row.macs if row else event.macs, "MACs"))
        figures = [f"{scaled(count)} {unit}" for count, unit in counts if count]
        lines += [", ".join(figures)] if figures else []
        lines += [f"stage {stage}"] if stage is not None else []
        kind = "module" if event.is_module else "function"
        node = Node(self._key(), kind, event.name, tuple(lines), stage)
        self._note(node.key, event, row, lines)
        self._takes(node.key, self._producers.call(node.key, event))
        return node

    def _note(self, key: str, event: Event, row: LayerInfo | None, lines: Sequence[str] = ()) -> None:
        if row is not None:
            self.called[key] = GraphCall(self._kinds[id(row)], _name(event), row.class_name)
        else:
            self.called[key] = GraphCall(tuple(lines[:1]), _name(event), "")

    def _takes(self, key: str, taken: Sequence[tuple[str, Value]]) -> None:
        for source, value in taken:
            self._crossing.setdefault((source, key), []).append(value)

    def _without_dead_ends(self, model: Group) -> Graph:
        """Return the graph without functions whose results no module or output uses, such as checks of sizes."""
        sources: defaultdict[str, list[str]] = defaultdict(list)
        for source, target in self._crossing:
            sources[target].append(source)
        pending = [node.key for node in model.nodes() if node.kind != "function"]
        alive: set[str] = set()
        while pending:
            key = pending.pop()
            if key not in alive:
                alive.add(key)
                pending += sources[key]
        edges = [
            Edge(source, target, tuple(value.shape for value in values))
            for (source, target), values in self._crossing.items()
            if target in alive
        ]
        return Graph(_pruned(model, alive), edges)


def _pruned(group: Group, alive: set[str]) -> Group:
    items = [_pruned(item, alive) if isinstance(item, Group) else item for item in group.items]
    return Group(
        group.key,
        group.label,
        [item for item in items if (item.items if isinstance(item, Group) else item.key in alive)],
    )


def _name(event: Event) -> str:
    return f"{event.name} (call {event.call_index + 1})" if event.is_module and event.call_index else event.name

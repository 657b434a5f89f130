"""Folding of a dataflow graph: equal consecutive modules are one node or group with their number."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from modelsummary.views.graph import Graph
from modelsummary.views.graph_nodes import Edge, Group, Node
from modelsummary.views.labels import name_range

__all__ = ["GraphCall", "folded"]

_Item = Node | Group


class GraphCall(NamedTuple):
    """What a node or group calls.

    Attributes:
        kind: what equal modules have in common, as the table folds them; the name of a function.
        name: shown name.
        class_name: class of the module; empty for a function.
    """

    kind: Hashable
    name: str
    class_name: str


def folded(graph: Graph, called: Mapping[str, GraphCall]) -> Graph:
    """Return the graph with only the first of equal consecutive modules, drawn as one with their number.

    Modules are equal if their rows and the nodes inside them are. Edges from one of them to another are left out; edges
    to and from the others lead to the first.

    Args:
        graph: the graph.
        called: key of each node and group of a call -> what it calls.
    """
    return _GraphFolding(called).graph(graph)


class _GraphFolding:
    """The nodes of a graph, and which of them represent others."""

    def __init__(self, called: Mapping[str, GraphCall]) -> None:
        self._called = called
        self._first: dict[str, str] = {}  # key of a node -> the node that represents it
        self._place: dict[str, dict[str, int]] = {}  # key of a node -> key of a run around it -> position in the run

    def graph(self, graph: Graph) -> Graph:
        for node in graph.nodes:
            self._first[node.key], self._place[node.key] = node.key, {}
        model = replace(graph.model, items=self._items(graph.model.items))
        shapes: dict[tuple[str, str], tuple[tuple[int, ...], ...]] = {}
        for edge in graph.edges:
            if not self._is_between_equals(edge):
                ends = self._first[edge.source], self._first[edge.target]
                before = shapes.get(ends, ())
                shapes[ends] = before + tuple(shape for shape in edge.shapes if shape not in before)
        return Graph(model, [Edge(*ends, all_shapes) for ends, all_shapes in shapes.items()])

    def _items(self, items: Sequence[_Item]) -> list[_Item]:
        shown: list[_Item] = []
        for _, run in groupby(items, key=self._kind):
            first, *others = run
            inside = replace(first, items=self._items(first.items)) if isinstance(first, Group) else first
            shown.append(self._repeated(inside, others))
            self._note(first, others)
        return shown

    def _kind(self, item: _Item) -> Hashable:
        """Return what equal modules have in common; functions, inputs and the output are never equal."""
        call = self._called.get(item.key)
        return self._shape(item) if call is not None and call.class_name else item.key

    def _shape(self, item: _Item) -> Hashable:
        kind = self._called[item.key].kind if item.key in self._called else item.key
        if isinstance(item, Node):
            return kind, item.stage
        return kind, tuple(map(self._shape, item.items))

    def _repeated(self, shown: _Item, others: Sequence[_Item]) -> _Item:
        if not others:
            return shown
        first, last = self._called[shown.key], self._called[others[-1].key]
        times = 1 + len(others)
        name, class_name = name_range(first.name, last.name), f"{times} x {first.class_name}"
        if isinstance(shown, Group):
            return replace(shown, label=f"{name}: {class_name}")
        return replace(shown, lines=(name, class_name, *shown.lines[2:]), times=times)

    def _note(self, first: _Item, others: Sequence[_Item]) -> None:
        """Note which nodes of the first module represent the nodes of the others."""
        for other in others:
            for node, same in zip(_nodes(other), _nodes(first), strict=True):
                self._first[node.key] = self._first[same.key]
                self._place[node.key] = dict(self._place[same.key])
        for position, item in enumerate((first, *others) if others else ()):
            for node in _nodes(item):
                self._place[node.key][first.key] = position

    def _is_between_equals(self, edge: Edge) -> bool:
        places = self._place[edge.target]
        return any(places.get(run, position) != position for run, position in self._place[edge.source].items())


def _nodes(item: _Item) -> Iterator[Node]:
    return item.nodes() if isinstance(item, Group) else iter([item])

"""The nodes that the explorer shows: rows of the tree, and between them the functions, inputs and the output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from modelsummary.layer_info import LayerInfo
from modelsummary.views.explorer.flow import FlowStep
from modelsummary.views.folding import signature
from modelsummary.views.labels import one_line

__all__ = ["MOST_CHILDREN", "ExplorerNode", "nodes_of"]

MOST_CHILDREN = 200  # of one node, equal neighbours counted once; more are put into ranges, so that levels stay small


@dataclass(eq=False, slots=True)
class ExplorerNode:
    """A node of the explorer.

    Attributes:
        kind: ``"module"``; ``"function"``, ``"input"`` or ``"output"``; ``"range"`` for consecutive nodes of a level
            that has too many.
        name: shown name.
        type: class of the module or operator, empty if the name says it.
        row: the row of a module or operator, else None.
        step: its own step in the dataflow; None if it has none, as a module that is opened.
        children: nodes inside, in the order in which they first ran.
        order: number of the first step inside, or of an earlier neighbour if none ran.
        equal: number that consecutive nodes have in common if they and everything inside them are equal.
        number: position among all nodes in depth-first order, the model first.
    """

    kind: str
    name: str
    type: str = ""
    row: LayerInfo | None = None
    step: FlowStep | None = None
    children: list[ExplorerNode] = field(default_factory=list)
    order: int = 0
    equal: int = 0
    number: int = 0

    def walk(self) -> Iterator[ExplorerNode]:
        """Yield this node and everything inside it, depth first."""
        pending = [self]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(reversed(node.children))


def nodes_of(root: LayerInfo, steps: Sequence[FlowStep] = ()) -> list[ExplorerNode]:
    """Return the nodes of a model in depth-first order, numbered.

    Args:
        root: root of the tree.
        steps: the dataflow of the same model; empty if it is not known.

    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> layers = [nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU()]
    >>> [(node.name, node.equal) for node in nodes_of(Statistics(nn.Sequential(*layers), (1, 2)).root)]
    [('Sequential', 2), ('0', 1), ('1', 1), ('2', 0)]
    """
    node_of = {row: _node(row) for row in root.walk()}
    rows = list(node_of)
    functions: dict[LayerInfo, list[ExplorerNode]] = {}
    first: dict[LayerInfo, int] = {}
    for number, step in enumerate(steps):
        if step.kind == "module":
            node_of[step.inside].step = step
        else:
            functions.setdefault(step.inside, []).append(
                ExplorerNode(step.kind, one_line(step.name), step=step, order=number)
            )
        first.setdefault(step.inside, number)
    for row in reversed(rows):  # children before their parents
        for child in row.children:
            if child in first:
                first[row] = min(first.get(row, len(steps)), first[child])
    for row, node in node_of.items():
        node.order = first.get(row, 0)
        node.children = _in_order([node_of[child] for child in row.children], functions.get(row, []), first)
    _mark_equal(node_of[root])
    for node in list(node_of[root].walk()):
        node.children = _in_ranges(node.children)
    nodes = list(node_of[root].walk())
    for number, node in enumerate(nodes):
        node.number = number
    return nodes


def _node(row: LayerInfo) -> ExplorerNode:
    name = row.name if row.parent_info is not None and row.name else row.class_name
    again = f" (call {row.call_index + 1})" if row.call_index else ""
    return ExplorerNode("module", one_line(f"{name}{again}"), one_line(row.class_name), row)


def _in_order(
    modules: Sequence[ExplorerNode], functions: Sequence[ExplorerNode], first: dict[LayerInfo, int]
) -> list[ExplorerNode]:
    """Return the calls of one module in the order in which they ran; modules that did not run keep their place."""
    at = -1
    for node in modules:
        if node.row in first:
            at = first[node.row]
        node.order = at
    return sorted([*modules, *functions], key=lambda node: node.order)


def _mark_equal(root: ExplorerNode) -> None:
    numbers: dict[Any, int] = {}
    for node in reversed(list(root.walk())):
        if node.row is not None:
            own: tuple[Any, ...] = signature(node.row)
        else:
            own = (node.kind, node.name, node.step and (node.step.macs, node.step.result))
        key = (own, node.step and node.step.stage, tuple(child.equal for child in node.children))
        node.equal = numbers.setdefault(key, len(numbers))


def _in_ranges(nodes: list[ExplorerNode]) -> list[ExplorerNode]:
    """Return the nodes, or if they are too many, ranges of consecutive ones; none has too many children."""
    folded = [list(group) for _, group in groupby(nodes, key=lambda node: node.equal)]
    if len(folded) <= MOST_CHILDREN:
        return nodes
    size = max(round(len(folded) ** 0.5), -(-len(folded) // MOST_CHILDREN))
    ranges = []
    for start in range(0, len(folded), size):
        inside = [node for group in folded[start : start + size] for node in group]
        node = ExplorerNode("range", f"{inside[0].name} … {inside[-1].name}", f"{len(inside)} nodes")
        node.children = _in_ranges(inside)
        node.order, node.equal = inside[0].order, -start - 1  # ranges are never equal
        ranges.append(node)
    return ranges

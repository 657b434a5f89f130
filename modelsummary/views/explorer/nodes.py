"""The nodes that the explorer shows: rows of the tree, and between them the functions, inputs and the output."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from modelsummary.equality import looks_equal, patterns, signature
from modelsummary.layer_info import LayerInfo
from modelsummary.views.flow import FlowStep
from modelsummary.views.labels import call_label, one_line

__all__ = ["MOST_CHILDREN", "ExplorerNode", "nodes_of", "split_equal"]

MOST_CHILDREN = 200  # of one node, a repeated pattern counted once; more are grouped into ranges to keep levels small
_FEW_SOURCES = 3


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
        index: position among all nodes in depth-first order, the model first.
    """

    kind: str
    name: str
    type: str = ""
    row: LayerInfo | None = None
    step: FlowStep | None = None
    children: list[ExplorerNode] = field(default_factory=list)
    order: int = 0
    equal: int = 0
    index: int = 0

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
    for index, step in enumerate(steps):
        if step.kind == "module":
            node_of[step.inside].step = step
        else:
            functions.setdefault(step.inside, []).append(
                ExplorerNode(step.kind, one_line(step.name), step=step, order=index)
            )
        first.setdefault(step.inside, index)
    for row in reversed(rows):  # children before their parents
        for child in row.children:
            if child in first:
                first[row] = min(first.get(row, len(steps)), first[child])
    for row, node in node_of.items():
        node.order = first.get(row, 0)
        node.children = _in_order([node_of[child] for child in row.children], functions.get(row, []), first)
    all_nodes = list(node_of[root].walk())
    kinds = looks_equal(all_nodes, _facts)
    for node in all_nodes:
        node.equal = kinds[id(node)]
    for node in all_nodes:
        node.children = _in_ranges(node.children)
    nodes = list(node_of[root].walk())
    for index, node in enumerate(nodes):
        node.index = index
    return nodes


def _node(row: LayerInfo) -> ExplorerNode:
    name = row.name if row.parent_info is not None and row.name else row.class_name
    return ExplorerNode("module", call_label(one_line(name), row.call_index), one_line(row.class_name), row)


def _in_order(
    modules: Sequence[ExplorerNode], functions: Sequence[ExplorerNode], first: dict[LayerInfo, int]
) -> list[ExplorerNode]:
    """Return the calls of one module in the order in which they ran; modules that did not run keep their place."""
    order = -1
    for node in modules:
        if node.row in first:
            order = first[node.row]
        node.order = order
    return sorted([*modules, *functions], key=lambda node: node.order)


def _facts(node: ExplorerNode) -> Hashable:
    """Return what two nodes must have in common to look equal."""
    stage = node.step and node.step.stage
    if node.row is not None:
        return signature(node.row), stage
    return node.kind, node.name, node.step and (node.step.macs, node.step.result), stage


def _in_ranges(nodes: list[ExplorerNode]) -> list[ExplorerNode]:
    """Return the nodes, or if the page would show too many of them, ranges of consecutive ones.

    Consecutive nodes that take no tensor, as constants in files, become a range if there are more than a few.
    """
    if sum(period for _, period, _ in patterns([node.equal for node in nodes])) <= MOST_CHILDREN:
        return list(_sources_in_ranges(nodes))
    folded = [list(group) for _, group in groupby(nodes, key=lambda node: node.equal)]
    size = max(round(len(folded) ** 0.5), -(-len(folded) // MOST_CHILDREN))
    starts = range(0, len(folded), size)
    return [
        _range([node for group in folded[start : start + size] for node in group], start, "nodes") for start in starts
    ]


def _sources_in_ranges(nodes: list[ExplorerNode]) -> Iterator[ExplorerNode]:
    start = 0
    sources = {node for node in nodes if node.kind in ("module", "function") and node.step and not node.step.takes}
    for is_source, group in groupby(nodes, key=sources.__contains__):
        run = list(group)
        if is_source and _FEW_SOURCES < len(run) < len(nodes):
            yield _range(run, start, "nodes without inputs")
        else:
            yield from run
        start += len(run)


def _range(inside: list[ExplorerNode], start: int, unit: str) -> ExplorerNode:
    node = ExplorerNode("range", f"{inside[0].name} … {inside[-1].name}", f"{len(inside)} {unit}")
    node.children = _in_ranges(inside)
    node.order, node.equal = inside[0].order, -start - 1  # ranges of one level are never equal
    return node


def split_equal(nodes: Sequence[ExplorerNode], changes: Mapping[int, Hashable]) -> None:
    """Let only nodes be equal that differ from the other model in the same way, inside too.

    Args:
        nodes: all nodes in depth-first order.
        changes: index of a node that differs -> how.
    """
    kinds: dict[Any, int] = {}
    is_changed = [node.index in changes for node in nodes]
    for node in reversed(nodes):  # what is inside a node comes before it
        if is_changed[node.index] or any(is_changed[child.index] for child in node.children):
            is_changed[node.index] = True
            key = (node.equal, changes.get(node.index), tuple(child.equal for child in node.children))
            node.equal = kinds.setdefault(key, -len(nodes) - node.index)

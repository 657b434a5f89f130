"""The dataflow between modules as a graph, for Mermaid and Graphviz."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from modelsummary.errors import InputError
from modelsummary.layer_info import LayerInfo
from modelsummary.record.events import Event, Record, Value, attributes_in, values_in
from modelsummary.units import scaled
from modelsummary.views.followed import Makers
from modelsummary.views.labels import one_line

__all__ = ["Edge", "Graph", "Group", "Node", "dataflow_graph"]

_READABLE = 60  # largest number of nodes of a graph whose depth is chosen automatically
_SHAPES_SHOWN = 3
_STAGE_COLOURS = ("#cfe2f3", "#fde2c4", "#d4ecd2", "#f6cfcf", "#e0d5ee", "#e8dad4", "#f7d9ec", "#eeeec2")
_FUNCTION_COLOUR = "#eeeeee"


@dataclass(frozen=True)
class Node:
    """A call of a module or a function, an input, or the output.

    Attributes:
        key: name that is unique in the graph.
        kind: ``"module"``, ``"function"``, ``"input"`` or ``"output"``.
        name: FQN of the module, or name of the function.
        lines: lines of text in the node.
        stage: number of the stage that calls it; None without stages.
    """

    key: str
    kind: str
    name: str
    lines: tuple[str, ...]
    stage: int | None = None


@dataclass(frozen=True)
class Edge:
    """The tensors that one node produces and another consumes.

    Attributes:
        source, target: keys of the producing and the consuming node.
        shapes: shape of each tensor.
    """

    source: str
    target: str
    shapes: tuple[tuple[int, ...], ...]

    @property
    def label(self) -> str:
        """The shapes; if there are many, the first of them and the number of the others."""
        more = len(self.shapes) - _SHAPES_SHOWN
        shown = ", ".join(str(list(shape)) for shape in self.shapes[:_SHAPES_SHOWN])
        return f"{shown} and {more} more" if more > 0 else shown


@dataclass(frozen=True)
class Group:
    """A module that is opened: the calls inside it are shown one by one."""

    key: str
    label: str
    items: list[Node | Group] = field(default_factory=list)

    def nodes(self) -> Iterator[Node]:
        """Yield all nodes inside, at any depth."""
        for item in self.items:
            yield from item.nodes() if isinstance(item, Group) else [item]


@dataclass(frozen=True, repr=False)
class Graph:
    """The dataflow of a forward: modules, functions between them, and the tensors passed from one to the next.

    A notebook shows it as a picture, which ``save("graph.svg")`` writes. ``str`` returns Mermaid, which GitHub and
    GitLab draw; ``to_dot`` returns DOT for Graphviz.

    Attributes:
        model: the model as a group of nodes and groups.
        edges: the tensors between nodes.

    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> graph = Statistics(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), (1, 2)).graph()
    >>> [node.name for node in graph.nodes]
    ['input', '0', '1', 'output']
    >>> [edge.label for edge in graph.edges]
    ['[1, 2]', '[1, 3]', '[1, 3]']
    """

    model: Group
    edges: list[Edge]

    @property
    def nodes(self) -> list[Node]:
        """All nodes in the order of the calls."""
        return list(self.model.nodes())

    def to_mermaid(self) -> str:
        """Return a Mermaid flowchart; by default Mermaid draws at most 500 edges and 50,000 characters."""
        lines = ["flowchart TD", *_mermaid_items(self.model, "  ")]
        lines += [f'  {edge.source} -->|"{_for_mermaid(edge.label)}"| {edge.target}' for edge in self.edges]
        classes = {_class_of(node): _colour_of(node) for node in self.nodes if _colour_of(node)}
        lines += [f"  classDef {name} fill:{colour},color:#000" for name, colour in classes.items()]
        return "\n".join(lines)

    def to_dot(self) -> str:
        """Return the graph in Graphviz' DOT language."""
        lines = [
            f"digraph {_for_dot(self.model.label)} {{",
            '  node [shape=box, style="rounded,filled", fillcolor=white]',
        ]
        lines += _dot_items(self.model, "  ")
        lines += [f"  {edge.source} -> {edge.target} [label={_for_dot(edge.label)}]" for edge in self.edges]
        return "\n".join([*lines, "}"])

    def to_svg(self) -> str:
        """Return the graph as SVG, drawn without other programs."""
        from modelsummary.views.graph_svg import to_svg

        return to_svg(self, {node.key: _colour_of(node) for node in self.nodes})

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the graph to a file, in the format of its ending: ``.svg``, ``.dot``, ``.gv``, ``.mmd``.

        Returns:
            The path.

        Raises:
            InputError: the ending is another one.
        """
        place = Path(path)
        writers = {".svg": self.to_svg, ".dot": self.to_dot, ".gv": self.to_dot, ".mmd": self.to_mermaid}
        if place.suffix.lower() not in writers:
            raise InputError(
                f"path must end in {', '.join(writers)}, got {str(place)!r}; for other formats, run Graphviz: "
                "dot -Tpdf graph.dot"
            )
        place.write_text(writers[place.suffix.lower()]() + "\n", encoding="utf-8")
        return place

    __str__ = to_mermaid

    def __repr__(self) -> str:
        return f"<graph of {self.model.label}: {len(self.nodes)} nodes, {len(self.edges)} edges>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:  # noqa: ARG002
        return {"text/plain": repr(self), "image/svg+xml": self.to_svg()}


# --------------------------------------------------------------------------------------------- writing


def _for_mermaid(text: str) -> str:
    """Return ``text`` with each character that Mermaid or HTML may interpret as its character code."""
    return re.sub(r"[^\w .,:()\[\]-]", lambda found: f"#{ord(found[0])};", one_line(text))


def _for_dot(*lines: str) -> str:
    """Return a quoted string; Graphviz interprets backslashes and ampersands as escapes."""
    text = "\n".join(map(one_line, lines)).replace("\\", r"\\").replace('"', r"\"").replace("&", "&amp;")
    return '"' + text.replace("\n", r"\n") + '"'


def _class_of(node: Node) -> str:
    return node.kind if node.stage is None else f"stage{node.stage}"


def _colour_of(node: Node) -> str:
    if node.stage is not None:
        return _STAGE_COLOURS[node.stage % len(_STAGE_COLOURS)]
    return _FUNCTION_COLOUR if node.kind == "function" else ""


def _mermaid_items(group: Group, indent: str) -> Iterator[str]:
    for item in group.items:
        if isinstance(item, Group):
            yield f'{indent}subgraph {item.key}["{_for_mermaid(item.label)}"]'
            yield from _mermaid_items(item, indent + "  ")
            yield f"{indent}end"
        else:
            opening, closing = "[]" if item.kind == "module" else ("([", "])")
            styled = f":::{_class_of(item)}" if _colour_of(item) else ""
            yield f'{indent}{item.key}{opening}"{"<br/>".join(map(_for_mermaid, item.lines))}"{closing}{styled}'


def _dot_items(group: Group, indent: str) -> Iterator[str]:
    for item in group.items:
        if isinstance(item, Group):
            yield f"{indent}subgraph cluster_{item.key} {{"
            yield f"{indent}  label={_for_dot(item.label)}"
            yield from _dot_items(item, indent + "  ")
            yield f"{indent}}}"
        else:
            shape = "" if item.kind == "module" else ", shape=oval"
            fill = f', fillcolor="{_colour_of(item)}"' if _colour_of(item) else ""
            yield f"{indent}{item.key} [label={_for_dot(*item.lines)}{shape}{fill}]"


# -------------------------------------------------------------------------------------------- building


def dataflow_graph(
    root: LayerInfo,
    record: Record,
    depth: int | None,
    stages: Sequence[Sequence[Event]] = (),
    *,
    readable: bool = False,
) -> Graph:
    """Return the graph of a recorded forward.

    Args:
        root: root of the tree, for parameters and multiply-adds.
        record: record of the forward.
        depth: level of nested calls down to which modules are opened; None: all levels.
        stages: calls of each stage; a module whose calls are in several stages is always opened.
        readable: ignore ``depth`` and choose the deepest level whose graph has at most 60 nodes.
    """
    rows = {(row.fqn, row.call_index): row for row in root.walk()}
    if not readable:
        return _Building(rows, record, depth, stages).graph()
    shallow = _Building(rows, record, 1, stages).graph()
    for level in range(2, 100):
        deeper = _Building(rows, record, level, stages).graph()
        if not len(shallow.nodes) < len(deeper.nodes) <= _READABLE:
            break
        shallow = deeper
    return shallow


class _Building:
    """Builder of a graph, which follows the values of one record."""

    def __init__(
        self,
        rows: Mapping[tuple[str, int], LayerInfo],
        record: Record,
        depth: int | None,
        stages: Sequence[Sequence[Event]],
    ) -> None:
        self._rows, self._root, self._depth = rows, record.root, depth
        self._stage = {inner: number for number, calls in enumerate(stages) for call in calls for inner in call.walk()}
        self._makers: Makers[str] = Makers()
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
                self._makers.add(node.key, values)
        model_row = self._rows["", 0]
        is_opaque = not root.children or isinstance(model_row.module, torch.jit.ScriptModule)
        items += [self._node(root)] if is_opaque else self._items(root, 1)
        output = Node(self._key(), "output", "output", ("output",))
        self._takes(output.key, self._makers.of(root.result))
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
                items.append(group)
                last = list(group.nodes())[-1:]
                if last:
                    self._makers.add_missing(last[0].key, child.result)
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
        self._takes(node.key, self._makers.call(node.key, event))
        return node

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

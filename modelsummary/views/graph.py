"""The dataflow between modules as a graph, for Mermaid and Graphviz."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from modelsummary.errors import InputError
from modelsummary.file_contents import saved
from modelsummary.views.graph_nodes import Edge, Group, Node
from modelsummary.views.graph_svg import to_svg
from modelsummary.views.labels import one_line

__all__ = ["Graph"]

_STAGE_COLOURS = ("#cfe2f3", "#fde2c4", "#d4ecd2", "#f6cfcf", "#e0d5ee", "#e8dad4", "#f7d9ec", "#eeeec2")
_FUNCTION_COLOUR = "#eeeeee"


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
        return to_svg(self.model, self.edges, {node.key: _colour_of(node) for node in self.nodes})

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the graph to a file, in the format of its ending: ``.svg``, ``.dot``, ``.gv``, ``.mmd``.

        Returns:
            The path.

        Raises:
            InputError: the ending is another one, or the file cannot be written.
        """
        target = Path(path)
        writers = {".svg": self.to_svg, ".dot": self.to_dot, ".gv": self.to_dot, ".mmd": self.to_mermaid}
        if target.suffix.lower() not in writers:
            raise InputError(
                f"path must end in {', '.join(writers)}, got {str(target)!r}; for other formats, run Graphviz: "
                "dot -Tpdf graph.dot"
            )
        return saved(writers[target.suffix.lower()]() + "\n", target)

    __str__ = to_mermaid

    def __repr__(self) -> str:
        return f"<graph of {self.model.label}: {len(self.nodes)} nodes, {len(self.edges)} edges>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:  # noqa: ARG002
        return {"text/plain": repr(self), "image/svg+xml": self.to_svg()}


# --------------------------------------------------------------------------------------------- writing


def _for_mermaid(text: str) -> str:
    """Return ``text`` with each character that Mermaid or HTML may interpret as its character code."""
    return re.sub(r"[^\w .,:()\[\]-]", lambda match: f"#{ord(match[0])};", one_line(text))


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

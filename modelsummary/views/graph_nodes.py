"""The parts of a dataflow graph: nodes, groups of them, and the edges between nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["Edge", "Group", "Node"]

_SHAPES_SHOWN = 3


@dataclass(frozen=True)
class Node:
    """A call of a module or a function, an input, or the output.

    Attributes:
        key: name that is unique in the graph.
        kind: ``"module"``, ``"function"``, ``"input"`` or ``"output"``.
        name: FQN of the module, or name of the function.
        lines: lines of text in the node.
        stage: number of the stage that calls it; None without stages.
        times: number of equal modules that are drawn as this one; the figures are of one of them.
    """

    key: str
    kind: str
    name: str
    lines: tuple[str, ...]
    stage: int | None = None
    times: int = 1


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

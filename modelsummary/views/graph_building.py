"""Building of a dataflow graph: the calls of a record down to a level, and the tensors that they pass to each other.

Equal consecutive modules can be drawn as one, with their number: those whose rows and the calls inside them are equal.
Edges from one of them to another are left out; edges to and from the others lead to the first.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from modelsummary.equality import kinds_of, looks_equal
from modelsummary.layer_info import LayerInfo
from modelsummary.record.events import Event, Record
from modelsummary.tables import name_range
from modelsummary.units import scaled
from modelsummary.views.flow import FlowStep, stage_of_calls, steps_of_record
from modelsummary.views.graph import Graph
from modelsummary.views.graph_nodes import Edge, Group, Node
from modelsummary.views.labels import call_label, one_line

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
        return _Building(root, steps, kinds if folds else None).graph, len(steps)

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


@dataclass(eq=False)
class _Part:
    """A step, or a call that is opened.

    Attributes:
        key: name that is unique in the graph.
        event: the call; None for an input and the output.
        row: its row; None for a function, and for a module without a row.
        step: the step; None for a call that is opened.
        children: the parts inside a call that is opened.
        shown: key of the node or group that represents the part.
        position: key of the first of equal parts around the part, or the part -> which of them it is in.
    """

    key: str
    event: Event | None
    row: LayerInfo | None
    step: FlowStep | None = None
    children: list[_Part] = field(default_factory=list)
    shown: str = ""
    position: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The shown name of a call."""
        assert self.event is not None
        return call_label(self.event.name, self.event.call_index if self.event.is_module else 0)

    def walk(self) -> Iterator[_Part]:
        """Yield this part and the parts inside it."""
        yield self
        for child in self.children:
            yield from child.walk()


class _Building:
    """Builder of a graph.

    Args:
        root: root of the tree.
        steps: the dataflow.
        kinds: id of a row -> number that equal rows have; None: the graph is not folded.
    """

    def __init__(self, root: LayerInfo, steps: Sequence[FlowStep], kinds: dict[int, int] | None) -> None:
        whole, parts = _nested(steps)
        self._equal = None if kinds is None else looks_equal(list(whole.walk()), lambda part: _facts(part, kinds))
        model = Group("model", one_line(root.class_name), self._items(whole.children))
        shapes: dict[tuple[str, str], list[tuple[int, ...]]] = {}
        for step, part in zip(steps, parts, strict=True):
            for source, tensors in step.takes.items():
                if _between_equals(parts[source], part):
                    continue
                before = shapes.setdefault((parts[source].shown, part.shown), [])
                passed = [tuple(map(int, tensor.shape or ())) for tensor in tensors]
                before += [shape for shape in passed if kinds is None or shape not in before[:]]
        self.graph = Graph(model, [Edge(*ends, tuple(passed)) for ends, passed in shapes.items()])

    def _items(self, parts: Sequence[_Part]) -> list[Node | Group]:
        return [self._item(list(run)) for _, run in groupby(parts, key=self._kind)]

    def _kind(self, part: _Part) -> Hashable:
        """Return what equal modules have in common; functions, inputs and the output are never equal."""
        return part.key if self._equal is None or part.row is None else self._equal[id(part)]

    def _item(self, equal: Sequence[_Part]) -> Node | Group:
        """Return the node or group that represents equal parts."""
        first, times = equal[0], len(equal)
        lines = list(_lines(first))
        if times > 1:
            lines[:2] = [name_range(first.name, equal[-1].name), f"{times} x {lines[1]}"]
        items = self._items(first.children)
        for index, part in enumerate(equal):
            for inside, same in zip(part.walk(), first.walk(), strict=True):
                inside.shown = inside.key if part is first and not inside.shown else same.shown
                inside.position = {**same.position, **({first.key: index} if times > 1 else {})}
        if first.step is None:
            return Group(first.key, ": ".join(lines), items)
        event, step = first.event, first.step
        kind = step.kind if event is None else "module" if event.is_module else "function"
        return Node(first.key, kind, step.name if event is None else event.name, tuple(lines), step.stage, times)


def _nested(steps: Sequence[FlowStep]) -> tuple[_Part, list[_Part]]:
    """Return the model as a part with the others inside, and the part of each step."""
    whole = _Part("", None, None)
    opened_parts: dict[int, _Part] = {}
    parts = []
    for step in steps:
        around = whole
        for opened in step.around:
            if opened.node_id not in opened_parts:
                opened_parts[opened.node_id] = _Part(f"gn{opened.node_id}", opened.event, opened.row)
                around.children.append(opened_parts[opened.node_id])
            around = opened_parts[opened.node_id]
        event = step.event
        is_call = event is not None and event.is_module and event.key == step.inside.key
        parts.append(_Part(f"n{step.node_id}", event, step.inside if is_call else None, step))
        around.children.append(parts[-1])
    return whole, parts


def _facts(part: _Part, kinds: dict[int, int]) -> Hashable:
    """Return what two parts must have in common to be equal, apart from the parts inside."""
    if part.event is None:
        return part.key
    kind = kinds[id(part.row)] if part.row is not None else next(_lines(part), "")
    return kind, None if part.step is None else part.step.stage


def _between_equals(source: _Part, target: _Part) -> bool:
    """Return True if equal parts around two steps are different ones."""
    return any(target.position.get(first, index) != index for first, index in source.position.items())


def _lines(part: _Part) -> Iterator[str]:
    """Yield the lines of text in a node, or the parts of the label of a group."""
    event, row, step = part.event, part.row, part.step
    if event is None:
        yield from [] if step is None else [step.name]
        return
    if event.name or step is None:
        yield part.name
    if row is not None:
        yield row.class_name
    if step is None:
        return
    if row is None:
        yield from step.uses
    params, macs = (0, event.macs) if row is None else (row.num_params, row.macs)
    figures = [f"{scaled(count)} {unit}" for count, unit in ((params, "params"), (macs, "MACs")) if count]
    if figures:
        yield ", ".join(figures)
    if step.stage is not None:
        yield f"stage {step.stage}"

"""The data of an explorer page as plain JSON: one list per fact with one entry per node, and each text stored once."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch

from modelsummary.devices.device_spec import DeviceSpec
from modelsummary.devices.device_table import TABLE
from modelsummary.devices.sustained import clock_of
from modelsummary.equality import patterns
from modelsummary.errors import InputError
from modelsummary.layer_info import LayerInfo, Sizes
from modelsummary.memory.estimate import CATEGORIES, MemoryEstimate
from modelsummary.subject import dtype_of
from modelsummary.views.amounts import ADDITIVE
from modelsummary.views.columns import COLUMNS, STATISTICS
from modelsummary.views.diff import diff_trees
from modelsummary.views.explorer.kinds import kind_of
from modelsummary.views.explorer.nodes import ExplorerNode, nodes_of, split_equal
from modelsummary.views.export import Texts
from modelsummary.views.flow import Dataflow
from modelsummary.views.labels import one_line, settings, sizes_label

__all__ = ["VERSION", "Explored", "diff_data", "model_data"]

VERSION = 1
_MOST_TEXT = 400  # characters of one fact
_UNKNOWN = Dataflow()
_LEFT_OUT = ("flops",)  # twice the multiply-adds
_NOT_CALLED, _CALLED, _CONTAINER = 0, 1, 2  # whether a node ran, or only nodes inside it


class Explored:
    """A model as it is explored.

    Args:
        root: root of the tree.
        flow: its dataflow, as far as it is known.
        memory: result of ``memory()``, whose timeline is shown.
        plan: result of ``parallel_plan``; anything with its ``layers``.

    Raises:
        InputError: ``memory`` or ``plan`` belongs to another model.
    """

    def __init__(
        self,
        root: LayerInfo,
        flow: Dataflow = _UNKNOWN,
        *,
        memory: MemoryEstimate | None = None,
        plan: Any = None,
    ) -> None:
        self.root, self.flow, self.memory = root, flow, memory
        self.nodes = nodes_of(root, flow.steps)
        self.by_fqn: dict[str, int] = {}
        for node in self.nodes:
            if node.row is not None:
                self.by_fqn.setdefault(node.row.fqn, node.index)
        if memory is not None and not isinstance(memory, MemoryEstimate):
            raise InputError(f"memory must be a MemoryEstimate, as memory() returns it, got {memory!r:.80}")
        self._check("memory", [point.fqn for point in memory.timeline if point.fqn is not None] if memory else [])
        if plan is not None and not hasattr(plan, "layers"):
            raise InputError(f"plan must be a ParallelPlan, as parallel_plan() returns it, got {plan!r:.80}")
        self.styles = {layer.fqn: layer.style for layer in plan.layers} if plan is not None else {}
        for fqn in self.by_fqn:  # a list of experts is not called itself
            owner = fqn.rpartition(".")[0]
            if owner in self.styles and owner not in self.by_fqn:
                self.styles.setdefault(fqn, self.styles[owner])
        self._check("plan", [fqn for fqn in self.styles if not self._is_list(fqn)])

    def _is_list(self, fqn: str) -> bool:
        """Return True for a module that holds others and is not called itself."""
        return fqn not in self.by_fqn and any(name.startswith(f"{fqn}.") for name in self.by_fqn)

    def _check(self, name: str, fqns: Iterable[str]) -> None:
        unknown = next((fqn for fqn in fqns if fqn not in self.by_fqn), None)
        if unknown is not None:
            raise InputError(f"{name} belongs to another model: {self.root.class_name} has no module {unknown!r}")


def model_data(model: Explored) -> dict[str, Any]:
    """Return everything that the page shows of one model, as plain data for JSON.

    ``texts`` holds each text once; columns of texts hold positions in it, 0 for none.

    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> data = model_data(Explored(Statistics(nn.Sequential(nn.Linear(2, 3)), (1, 2)).root))
    >>> data["nodes"]["parent"], [data["texts"][index] for index in data["nodes"]["type"]]
    ([-1, 0], ['Sequential', 'Linear'])
    >>> [(figure["name"], figure["own"]) for figure in data["figures"]][:2]
    [('macs', [0, 6]), ('params', [0, 9])]
    """
    texts = Texts("")
    nodes = model.nodes
    parents = [-1] * len(nodes)
    for node in nodes:
        for child in node.children:
            parents[child.index] = node.index
    called = [_called(node) if model.root.executed else _CALLED for node in nodes]
    return {
        "title": one_line(model.root.class_name),
        "executed": model.root.executed,
        "remarks": list(model.flow.remarks),
        "nodes": {
            "parent": parents,
            "kind": texts.places(node.kind for node in nodes),
            "name": texts.places(node.name for node in nodes),
            "type": texts.places(node.type for node in nodes),
            "called": called,
            "order": [node.order for node in nodes],
        },
        "runs": _runs(nodes, called),
        "facts": _columns(texts, nodes, _facts(model)),
        "groups": _columns(texts, nodes, _groups(model)),
        "edges": _edges(model, texts),
        "figures": _figures(nodes),
        "memory": None if model.memory is None else _timeline(model, model.memory, texts),
        "devices": _devices(model.root),
        "texts": texts.every,
    }


def _called(node: ExplorerNode) -> int:
    if node.row is None or node.row.executed:
        return _CALLED
    return _CONTAINER if any(row.executed for row in node.row.walk()) else _NOT_CALLED


def _runs(nodes: Sequence[ExplorerNode], called: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the patterns that repeat in a level: index of the first node, nodes of the pattern, times that it comes.

    The children of a container that nothing calls, such as a ModuleList, belong to the level around it.
    """
    runs: list[tuple[int, int, int]] = []
    for node in nodes:
        level: list[ExplorerNode] = []
        pending = list(node.children) if not node.index or called[node.index] != _CONTAINER else []
        while pending:
            child = pending.pop()
            if called[child.index] == _CONTAINER:
                pending += child.children
            else:
                level.append(child)
        level.sort(key=lambda child: (child.order, child.index))
        spans = patterns([child.equal for child in level])
        runs += [(level[start].index, period, times) for start, period, times in spans if times > 1]
    return runs


def _columns(texts: Texts, nodes: Sequence[ExplorerNode], facts: Iterable[_Fact]) -> dict[str, list[int]]:
    """Return the places of the texts of each fact that any node has, by its title."""
    columns = {title: texts.places(text(node) for node in nodes) for title, text in facts}
    return {title: places for title, places in columns.items() if any(places)}


# ---------------------------------------------------------------------------------------------- facts


_Fact = tuple[str, Callable[[ExplorerNode], str]]  # title, and the text of a node


def _facts(model: Explored) -> list[_Fact]:
    """Return the texts shown about a node, by their titles."""

    def of_row(fact: Callable[[LayerInfo], str]) -> Callable[[ExplorerNode], str]:
        return lambda node: "" if node.row is None else fact(node.row)

    def output(node: ExplorerNode) -> str:
        if node.row is not None:
            return _sizes(node.row.output_size)
        return "" if node.step is None or node.kind == "output" else node.step.result

    stages: dict[int, set[int]] = defaultdict(set)
    for node in model.nodes:
        if node.row is not None and node.row.num_params and node.step is not None and node.step.stage is not None:
            stages[node.row.layer_id].add(node.step.stage)

    def shared(row: LayerInfo) -> str:
        users = sorted(stages.get(row.layer_id, ()))
        return f"the parameters are in stages {', '.join(map(str, users))}" if len(users) > 1 else ""

    return [
        ("FQN", of_row(lambda row: one_line(row.fqn))),
        ("Call", of_row(lambda row: str(row.call_index + 1) if row.call_index else "")),
        ("Input", of_row(lambda row: _sizes(row.input_size))),
        ("Output", output),
        ("Parameters", of_row(_parameters)),
        ("Uses", lambda node: "" if node.step is None else one_line(", ".join(node.step.uses))),
        ("Settings", of_row(lambda row: model.flow.settings.get(row, "") or _settings(row))),
        ("Trainable", of_row(lambda row: "" if row.trainable in ("--", "True") else row.trainable)),
        ("Not called", of_row(lambda row: "" if row.executed or not model.root.executed else "no call of its own")),
        ("Shared", of_row(shared)),
        ("Repeated", of_row(lambda row: "its parameters are in an earlier row" if row.is_recursive else "")),
        ("Not counted", of_row(lambda row: ", ".join(f"{name} ({n}x)" for name, n in row.uncounted_ops.items()))),
        ("Note", of_row(lambda row: one_line(row.note))),
    ]


def _groups(model: Explored) -> list[_Fact]:
    """Return the texts that nodes can be coloured by, by their titles."""

    def stage(node: ExplorerNode) -> str:
        index = None if node.step is None else node.step.stage
        return "" if index is None else f"stage {index}"

    return [
        ("Kind", kind_of),
        ("Stage", stage),
        ("Sharding", lambda node: "" if node.row is None else model.styles.get(node.row.fqn, "")),
        ("Findings", lambda node: "" if node.row is None else node.row.findings or ""),
    ]


def _sizes(sizes: Sizes) -> str:
    return "" if sizes is None else _short(sizes_label(sizes))


def _parameters(row: LayerInfo) -> str:
    return _short(", ".join(f"{name} {'?' if size is None else size}" for name, size in row.inner_layers.items()))


def _settings(row: LayerInfo) -> str:
    try:
        return "" if row.children else _short(settings(row) or "")
    except Exception:  # whatever a model's code raises; the text is not needed
        return ""


def _short(text: str) -> str:
    text = one_line(text)
    return text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 2]} …"


# --------------------------------------------------------------------------------------------- figures


def _figures(nodes: Sequence[ExplorerNode]) -> list[dict[str, Any]]:
    """Return the figures of all nodes: own parts, which add up over the nodes inside, then figures that do not add up.

    The multiply-adds of a function are taken out of the own ones of the module that calls it.
    """
    figures: list[dict[str, Any]] = []
    names: dict[tuple[str, str, str], str] = {}
    for name, facts in ADDITIVE.items():
        names.setdefault(facts, name)  # the first one of each
    for (title, kind, attribute), name in sorted(names.items(), key=lambda item: item[1] != "macs"):
        if name in _LEFT_OUT:
            continue
        amounts = [None if node.row is None else getattr(node.row, attribute) for node in nodes]
        if name == "macs":
            amounts = _with_functions(nodes, amounts)
        if any(amounts):
            values = [_rounded(value or 0) for value in amounts]
            figures.append({"name": name, "title": title, "unit": kind, "adds": True, "own": values})
    for name, title, figure in (
        ("output_bytes", "Size of outputs", _output_bytes),
        ("peak_bytes", "Peak of memory", lambda node: 0 if node.row is None else node.row.peak_bytes or 0),
    ):
        amounts = [figure(node) for node in nodes]
        if any(amounts):
            figures.append({"name": name, "title": title, "unit": "bytes", "adds": False, "own": amounts})
    for name in STATISTICS:
        rows = [node.row for node in nodes]
        sizes = [0.0 if row is None or row.values is None else abs(row.values.get(name, 0.0)) for row in rows]
        if any(sizes):
            values, title = list(map(_rounded, sizes)), COLUMNS[name].header
            title = f"{title} (absolute)" if name.endswith("_mean") else title
            figures.append({"name": name, "title": title, "unit": "figure", "adds": False, "own": values})
    return figures


def _with_functions(nodes: Sequence[ExplorerNode], self_figures: list[int | None]) -> list[int | None]:
    amounts = list(self_figures)
    for node in nodes:
        functions = [child for child in node.children if child.kind == "function" and child.step is not None]
        counts = [child.step.macs for child in functions if child.step is not None]
        total = self_figures[node.index]
        if total is not None and 0 < sum(counts) <= total:
            amounts[node.index] = total - sum(counts)
            for child, count in zip(functions, counts, strict=True):
                amounts[child.index] = count
    return amounts


def _output_bytes(node: ExplorerNode) -> int:
    if node.row is not None:
        return node.row.output_bytes
    return 0 if node.step is None else node.step.result_bytes


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _devices(root: LayerInfo) -> list[dict[str, Any]]:
    """Return the accelerators whose peak with the dtype of the model is known, for the roofline."""
    dtype = dtype_of(root.module) if root.executed else torch.float32
    name = str(dtype).removeprefix("torch.")
    return [
        {"name": spec.name, "dtype": name, "peak": spec.peak(dtype) * clock_of(spec), "bandwidth": spec.bandwidth}
        for spec in map(DeviceSpec, TABLE)
        if spec.has(dtype)
    ]


# -------------------------------------------------------------------------------------- edges, memory


def _edges(model: Explored, texts: Texts) -> dict[str, list[int]]:
    index_of = {id(node.step): node.index for node in model.nodes if node.step is not None}
    edges = [
        (index_of[id(model.flow.steps[source])], index_of[id(step)], texts.place(", ".join(map(str, tensors))))
        for step in model.flow.steps
        for source, tensors in step.takes.items()
        if id(step) in index_of and id(model.flow.steps[source]) in index_of
    ]
    sources, targets, tensors = map(list, zip(*edges, strict=True)) if edges else ([], [], [])
    return {"source": sources, "target": targets, "tensors": tensors}


def _timeline(model: Explored, memory: MemoryEstimate, texts: Texts) -> dict[str, Any]:
    """Return the timeline; the bytes of a category are the first value, then the changes from point to point."""
    points = memory.timeline
    held = {name: [point.held[index] for point in points] for index, name in enumerate(CATEGORIES)}
    return {
        "mode": memory.mode,
        "peak": memory.peak,
        "operator": texts.places(one_line(point.operator) for point in points),
        "phase": texts.places(point.phase for point in points),
        "node": [-1 if point.fqn is None else model.by_fqn[point.fqn] for point in points],
        "held": {
            name.replace("_", " "): [values[0], *(after - before for before, after in pairwise(values))]
            for name, values in held.items()
            if any(values)
        },
    }


def diff_data(before: Explored, after: Explored) -> dict[str, Any]:
    """Return the differences between two models, with the indices of the nodes; -1 where a model lacks the module.

    From then on, only nodes of either model that differ in the same way are equal.
    """
    diff = diff_trees(before.root, after.root)
    rows: list[dict[str, Any]] = []
    for row in diff.rows:
        if row.status == "same":
            continue
        sides = [
            -1 if side is None else model.by_fqn.get(side.fqn, -1)
            for side, model in ((row.before, before), (row.after, after))
        ]
        rows.append(
            {
                "status": "shape" if row.follows else row.status,
                "nodes": sides,
                "differs": list(row.differs),
                "changes": {name: list(row.change(name)) for name in ("params", "macs", "params_bytes")},
            }
        )
    for side, model in enumerate((before, after)):
        changed = {row["nodes"][side]: row for row in rows if row["nodes"][side] >= 0}
        changes = {node: json.dumps(row | {"nodes": []}) for node, row in changed.items() if row["status"] != "shape"}
        split_equal(model.nodes, changes)
    pairs = [
        [before.by_fqn[row.before.fqn], after.by_fqn[row.after.fqn]]
        for row in diff.rows
        if row.before is not None and row.after is not None
    ]
    totals = {name: list(change) for name, change in diff.totals.items() if change[2] is not None}
    return {"rows": rows, "pairs": pairs, "totals": totals, "models": list(diff.models)}

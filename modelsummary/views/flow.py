"""The dataflow of a run as steps: its calls down to a level, and the tensors that each takes from earlier ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, signature
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from modelsummary.layer_info import LayerInfo
from modelsummary.record.events import Event, Record, Value, attributes_in, values_in

__all__ = ["Dataflow", "FlowStep", "FlowTensor", "OpenedCall", "stage_of_calls", "steps_of_record"]

_POSITIONAL, _KEYWORD = Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD
Kind = Literal["input", "module", "function", "output"]


class FlowTensor(NamedTuple):
    """A tensor that a step takes.

    Attributes:
        shape: its sizes, names of open dimensions included; None if they are not known.
        dtype: its dtype, without ``torch.``.

    >>> str(FlowTensor((1, 64), "float32"))
    '[1, 64] float32'
    """

    shape: tuple[int | str, ...] | None
    dtype: str

    def __str__(self) -> str:
        sizes = "?" if self.shape is None else f"[{', '.join(map(str, self.shape))}]"
        return f"{sizes} {self.dtype}"


class OpenedCall(NamedTuple):
    """A call of a module that is opened.

    Attributes:
        node_id: running number among steps and opened calls, those without use included.
        event: the call.
        row: its row in the tree; None if it has none.
    """

    node_id: int
    event: Event
    row: LayerInfo | None


@dataclass(eq=False, slots=True)
class FlowStep:
    """An input, the output, or a call that is not opened: of a module, of a function or operator.

    Attributes:
        kind: ``"input"``, ``"module"``, ``"function"`` or ``"output"``.
        name: of the input or the function; empty for a module, whose row has the name.
        inside: row of the module whose forward makes the call; for a module that has a row, that row.
        takes: position of an earlier step -> the tensors taken from it.
        macs: multiply-adds of a function, which are a part of the own ones of ``inside``.
        result: the tensors that it returns, as text.
        result_bytes: their bytes.
        uses: FQNs of parameters and buffers that a function takes.
        stage: number of the pipeline stage that makes the call; None without stages.
        event: the recorded call; None for an input, the output and an operator of a file.
        around: the opened calls that make it, outermost first, without the model's own.
        node_id: running number among steps and opened calls, those without use included.
    """

    kind: Kind
    name: str
    inside: LayerInfo
    takes: dict[int, list[FlowTensor]] = field(default_factory=dict)
    macs: int = 0
    result: str = ""
    result_bytes: int = 0
    uses: tuple[str, ...] = ()
    stage: int | None = None
    event: Event | None = None
    around: tuple[OpenedCall, ...] = ()
    node_id: int = 0


class Dataflow(NamedTuple):
    """What is known of the dataflow of a model.

    Attributes:
        steps: its smallest calls in the order in which they ran; empty if they are not known.
        settings: row of an operator -> its attributes as text.
        remarks: why something is not known.
    """

    steps: Sequence[FlowStep] = ()
    settings: Mapping[LayerInfo, str] = MappingProxyType({})
    remarks: tuple[str, ...] = ()


def steps_of_record(
    root: LayerInfo,
    record: Record,
    stages: Sequence[Sequence[Event]] = (),
    opens: Callable[[Event, int], bool] | None = None,
) -> list[FlowStep]:
    """Return the steps of a recorded forward, in the order in which they ran.

    Functions whose results nothing uses, such as checks of sizes, are left out.

    Args:
        root: root of the tree of the same model.
        record: record of the forward.
        stages: calls of each pipeline stage.
        opens: returns whether to open a call at a level, 1 for calls of the model; None: every call of a module
            that makes calls is opened.

    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> from modelsummary.record.runs import record_once
    >>> live = Statistics(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), (1, 2))
    >>> steps = steps_of_record(live.root, record_once(live.live.model, live.live.call, "shape"))
    >>> [(step.kind, step.inside.fqn, [str(*tensors) for tensors in step.takes.values()]) for step in steps][1:3]
    [('module', '0', ['[1, 2] float32']), ('module', '1', ['[1, 3] float32'])]
    """
    return _Following(root, stages, opens or (lambda event, _: event.is_module and bool(event.children))).steps(record)


def stage_of_calls(stages: Sequence[Sequence[Event]]) -> dict[Event, int]:
    """Return the number of the stage of each call, those inside the calls of a stage included."""
    return {inner: stage for stage, calls in enumerate(stages) for call in calls for inner in call.walk()}


class _Following:
    """Builder of the steps, which follows the values of one record."""

    def __init__(self, root: LayerInfo, stages: Sequence[Sequence[Event]], opens: Callable[[Event, int], bool]) -> None:
        self._rows = {row.key: row for row in root.walk()}
        self._root, self._opens = root, opens
        self._stage = stage_of_calls(stages)
        self._producers = _Producers()
        self._steps: list[FlowStep] = []
        self._n_calls = 0

    def steps(self, record: Record) -> list[FlowStep]:
        event = record.root
        for name, template in _inputs(self._root.module, event).items():
            if values := values_in(template):
                step = FlowStep("input", name, self._root)
                step.result, step.result_bytes = _described(values)
                self._producers.add(self._added(step), values)
        if event.children and not isinstance(self._root.module, torch.jit.ScriptModule):
            self._open(event, self._root, ())
        else:
            self._call(event, FlowStep("function", self._root.class_name, self._root, macs=event.macs))
        output = FlowStep("output", "output", self._root)
        self._take(output, self._producers.of(event.result))
        output.result, output.result_bytes = _described(values_in(event.result))
        self._added(output)
        return _without_dead_ends(self._steps)

    def _numbered(self) -> int:
        self._n_calls += 1
        return self._n_calls

    def _added(self, step: FlowStep) -> int:
        step.node_id = self._numbered()
        self._steps.append(step)
        return len(self._steps) - 1

    def _open(self, event: Event, inside: LayerInfo, around: tuple[OpenedCall, ...]) -> None:
        for child in event.children:
            row = self._rows.get(child.key) if child.is_module else None
            if self._opens(child, len(around) + 1):
                before = len(self._steps)
                self._open(child, row or inside, (*around, OpenedCall(self._numbered(), child, row)))
                if len(self._steps) > before:
                    self._producers.add_missing(len(self._steps) - 1, child.result)
            elif row is not None:
                self._call(child, FlowStep("module", "", row, around=around))
            else:
                uses = tuple(attribute.fqn for attribute in attributes_in((child.args, child.kwargs)))
                step = FlowStep("function", child.name, inside, macs=child.macs, uses=uses, around=around)
                self._call(child, step)

    def _call(self, event: Event, step: FlowStep) -> None:
        step.event = event
        step.stage = next((self._stage[inner] for inner in event.walk() if inner in self._stage), None)
        self._take(step, self._producers.call(self._added(step), event))
        step.result, step.result_bytes = _described(values_in(event.result))

    @staticmethod
    def _take(step: FlowStep, taken: Sequence[tuple[int, Value]]) -> None:
        for source, value in taken:
            step.takes.setdefault(source, []).append(_tensor(value))


class _Producers:
    """The step that made each value; calls are passed in the order in which they ran."""

    def __init__(self) -> None:
        self._producer: dict[Value, int] = {}
        self._in_storage: defaultdict[int, list[Value]] = defaultdict(list)

    def of(self, template: Any) -> list[tuple[int, Value]]:
        """Return the values in a template whose producer is known, each with its producer."""
        return [(self._producer[value], value) for value in values_in(template) if value in self._producer]

    def add(self, step: int, values: Sequence[Value]) -> None:
        """Note that a step made these values, or wrote into them."""
        for value in values:
            if value not in self._producer:
                self._in_storage[value.storages[0]].append(value)
            self._producer[value] = step

    def add_missing(self, step: int, template: Any) -> None:
        """Note the producer of the values in a template without one: a call that is not shown made them."""
        for value in values_in(template):
            self._producer.setdefault(value, step)

    def call(self, step: int, event: Event) -> list[tuple[int, Value]]:
        """Note what a call makes that is shown whole, and return what it takes."""
        taken = self.of((event.args, event.kwargs))
        for inner in event.walk():  # a tensor that leaves the call other than by its result
            for value in values_in(inner.result) if inner is not event else ():
                if value not in self._producer:
                    self.add(step, [value])
        written = event.writes[0] if event.writes else frozenset()
        self.add(step, [value for storage in written for value in self._in_storage.get(storage, ())])
        self.add(step, values_in(event.result))
        return taken


def _inputs(module: nn.Module | None, event: Event) -> dict[str, Any]:
    """Return the arguments of the model by name; a sole positional one is ``input``."""
    if len(event.args) == 1 and not event.kwargs:
        return {"input": event.args[0]}
    try:
        parameters = list(signature((module or nn.Module()).forward).parameters.values())
    except (TypeError, ValueError):  # a forward without a signature
        parameters = []
    names = [parameter.name for parameter in parameters if parameter.kind in (_POSITIONAL, _KEYWORD)]
    names += [f"input {index}" for index in range(len(names), len(event.args))]
    return {**dict(zip(names, event.args, strict=False)), **event.kwargs}


def _tensor(value: Value) -> FlowTensor:
    return FlowTensor(tuple(value.shape), str(value.dtype).removeprefix("torch."))


def _described(values: Sequence[Value]) -> tuple[str, int]:
    return ", ".join(str(_tensor(value)) for value in values), sum(value.nbytes for value in values)


def _without_dead_ends(steps: Sequence[FlowStep]) -> list[FlowStep]:
    """Return the steps without functions whose results no module or output uses; positions are adapted."""
    alive: set[int] = set()
    for position in range(len(steps) - 1, -1, -1):  # a step takes from earlier ones only
        step = steps[position]
        if step.kind != "function" or (step.event is not None and step.event.is_module) or position in alive:
            alive.add(position)
            alive.update(step.takes)
    new_position: dict[int, int] = {}
    kept: list[FlowStep] = []
    for position in sorted(alive):
        new_position[position] = len(kept)
        kept.append(steps[position])
        steps[position].takes = {new_position[source]: tensors for source, tensors in steps[position].takes.items()}
    return kept

"""The dataflow of a run as steps: its smallest calls, and the tensors that each takes from earlier ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch

from modelsummary.layer_info import LayerInfo
from modelsummary.record.events import Event, Record, Value, attributes_in, values_in
from modelsummary.views.producers import Producers

__all__ = ["Dataflow", "FlowStep", "steps_of_record"]

Kind = Literal["input", "module", "function", "output"]


@dataclass(eq=False, slots=True)
class FlowStep:
    """An input, the output, or the smallest known call: of a module that is not opened, of a function or operator.

    Attributes:
        kind: ``"input"``, ``"module"``, ``"function"`` or ``"output"``.
        name: of the input or the function; empty for a module, whose row has the name.
        inside: row of the module whose forward makes the call; for a module that has a row, that row.
        takes: number of an earlier step -> the tensors taken from it, as text such as ``"[1, 64] float32"``.
        macs: multiply-adds of a function, which are a part of the own ones of ``inside``.
        result: the tensors that it returns, as text.
        result_bytes: their bytes.
        uses: FQNs of parameters and buffers that a function takes.
        stage: number of the pipeline stage that makes the call; None without stages.
    """

    kind: Kind
    name: str
    inside: LayerInfo
    takes: dict[int, list[str]] = field(default_factory=dict)
    macs: int = 0
    result: str = ""
    result_bytes: int = 0
    uses: tuple[str, ...] = ()
    stage: int | None = None


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


def steps_of_record(root: LayerInfo, record: Record, stages: Sequence[Sequence[Event]] = ()) -> list[FlowStep]:
    """Return the steps of a recorded forward, in the order in which they ran.

    Functions whose results nothing uses, such as checks of sizes, are left out.

    Args:
        root: root of the tree of the same model.
        record: record of the forward.
        stages: calls of each pipeline stage.

    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> from modelsummary.record.runs import record_once
    >>> live = Statistics(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), (1, 2))
    >>> steps = steps_of_record(live.root, record_once(live.live.model, live.live.call, "shape"))
    >>> [(step.kind, step.inside.fqn, step.takes) for step in steps][1:3]
    [('module', '0', {0: ['[1, 2] float32']}), ('module', '1', {1: ['[1, 3] float32']})]
    """
    return _Following(root, stages).steps(record)


class _Following:
    """Builder of the steps, which follows the values of one record."""

    def __init__(self, root: LayerInfo, stages: Sequence[Sequence[Event]]) -> None:
        self._rows = {(row.fqn, row.call_index): row for row in root.walk()}
        self._root = root
        self._stage = {inner: number for number, calls in enumerate(stages) for call in calls for inner in call.walk()}
        self._producers: Producers[int] = Producers()
        self._steps: list[FlowStep] = []

    def steps(self, record: Record) -> list[FlowStep]:
        event = record.root
        named = {f"input {place}": each for place, each in enumerate(event.args)} | event.kwargs
        given = {name: values for name, each in named.items() if (values := values_in(each))}
        for name, values in given.items():
            step = FlowStep("input", name if len(given) > 1 else "input", self._root)
            step.result, step.result_bytes = _described(values)
            self._producers.add(self._added(step), values)
        if event.children and not isinstance(self._root.module, torch.jit.ScriptModule):
            self._open(event, self._root)
        else:
            self._call(event, FlowStep("function", self._root.class_name, self._root, macs=event.macs))
        output = FlowStep("output", "output", self._root)
        self._take(output, self._producers.of(event.result))
        output.result, output.result_bytes = _described(values_in(event.result))
        self._added(output)
        return _without_dead_ends(self._steps)

    def _added(self, step: FlowStep) -> int:
        self._steps.append(step)
        return len(self._steps) - 1

    def _open(self, event: Event, inside: LayerInfo) -> None:
        for child in event.children:
            row = self._rows.get((child.fqn, child.call_index)) if child.is_module else None
            if child.is_module and child.children:
                before = len(self._steps)
                self._open(child, row or inside)
                if len(self._steps) > before:
                    self._producers.add_missing(len(self._steps) - 1, child.result)
            elif row is not None:
                self._call(child, FlowStep("module", "", row))
            else:
                uses = tuple(attribute.fqn for attribute in attributes_in((child.args, child.kwargs)))
                self._call(child, FlowStep("function", child.name, inside, macs=child.macs, uses=uses))

    def _call(self, event: Event, step: FlowStep) -> None:
        step.stage = next((self._stage[each] for each in event.walk() if each in self._stage), None)
        self._take(step, self._producers.call(self._added(step), event))
        step.result, step.result_bytes = _described(values_in(event.result))

    @staticmethod
    def _take(step: FlowStep, taken: Sequence[tuple[int, Value]]) -> None:
        for source, value in taken:
            step.takes.setdefault(source, []).append(_text(value))


def _text(value: Value) -> str:
    return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def _described(values: Sequence[Value]) -> tuple[str, int]:
    return ", ".join(map(_text, values)), sum(value.nbytes for value in values)


def _without_dead_ends(steps: Sequence[FlowStep]) -> list[FlowStep]:
    """Return the steps without functions whose results no module or output uses; numbers of steps are adapted."""
    alive: set[int] = set()
    for number in range(len(steps) - 1, -1, -1):  # a step takes from earlier ones only
        if steps[number].kind != "function" or number in alive:
            alive.add(number)
            alive.update(steps[number].takes)
    new_number: dict[Any, int] = {}
    kept: list[FlowStep] = []
    for number in sorted(alive):
        new_number[number] = len(kept)
        kept.append(steps[number])
        steps[number].takes = {new_number[source]: tensors for source, tensors in steps[number].takes.items()}
    return kept

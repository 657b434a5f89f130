"""Where two models differ: run both on one batch, and compare the calls that match."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from modelsummary.capture import capture
from modelsummary.capture.calls import Call, Watch
from modelsummary.capture.containers import map_tensors, tensors_of
from modelsummary.capture.devices import device_of
from modelsummary.capture.input_data import call_arguments
from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.modules import ModelParts, unwrap
from modelsummary.capture.operator_mode import Operators
from modelsummary.capture.run import running
from modelsummary.capture.step_error import as_step_error
from modelsummary.errors import InputError
from modelsummary.extras import Records
from modelsummary.keywords import nearest
from modelsummary.layer_info import CallKey, CallKeys
from modelsummary.tables import Printed, Report
from modelsummary.units import number_of
from modelsummary.values.tensor_statistics import Readings, norm_of_finite, unseen, widened
from modelsummary.views.diff import diff_trees

__all__ = ["CallDifference", "Divergence", "compare_values"]

_ROUNDING = 4  # units of the last place that one call may differ by
_SUMMING = 2  # times the error of a sum, in another order of its terms
_UNIT_OF_SUMS = torch.finfo(torch.float32).eps  # products in half precision are added up in float32
_GROWTH = 8  # factor by which a call may increase the differences before it


@dataclass
class CallDifference:
    """How much the inputs and results of two calls differ.

    A difference is the 2-norm of the difference of two tensors over the larger of their norms, and the largest of all
    tensors; of integers and booleans, the share of elements that differ; Inf where shapes, NaN or numbers of tensors
    differ.

    Attributes:
        fqn_a, fqn_b, call_index: of the calls.
        class_name: class of the module in the second model.
        inputs, outputs: the differences.
        allowed: what rounding explains in the result: four units of the last place of its dtype, twice the error of a
            sum of as many products as an element takes, and eight times the largest difference that was allowed before.
        where: ``"inputs"`` or ``"outputs"`` if this is the first of the call that differs by more; empty if none does.
    """

    fqn_a: str
    fqn_b: str
    call_index: int
    class_name: str
    inputs: float
    outputs: float = 0.0
    allowed: float = 0.0
    where: str = ""


@dataclass(repr=False)
class Divergence(Printed, Records):
    """The differences of two models, call by call, printed as a table; true if they differ by more than rounding.

    Attributes:
        rows: calls that match, in the order of the second model.
        first: the first that differs by more than its dtype allows; None if none does.
        parent: FQN, in the second model, of the module around the first: if its inputs differ, but no earlier result
            does, the code of this module between its calls makes the difference.
        parameters: names of the parameters and buffers of its module that differ.
        unmatched: FQNs of modules that ran in one model only.
    """

    rows: list[CallDifference]
    first: CallDifference | None
    parent: str
    parameters: list[str] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return self.first is not None

    @property
    def place(self) -> str:
        """Where the first difference is made; empty without one."""
        if self.first is None:
            return ""
        module = f"{self.first.fqn_b or '(model)'} ({self.first.class_name})"
        if self.first.where == "inputs":
            return f"in the forward of {self.parent or '(model)'}, before {module} is called"
        return f"in the forward of {module}"

    def to_records(self) -> list[dict[str, Any]]:
        """Return one flat dict per call."""
        return [dict(vars(row)) for row in self.rows]

    def _report(self) -> Report:
        rows = [
            [
                row.fqn_b or "(model)",
                row.fqn_a if row.fqn_a != row.fqn_b else "",
                *(f"{difference:.2g}" for difference in (row.inputs, row.outputs, row.allowed)),
                f"<- first, {row.where}" if row is self.first else "",
            ]
            for row in self.rows
        ]
        below = ["no call differs by more than its dtype allows"]
        if self.first is not None:
            below = [f"The first difference is made {self.place}"]
            if self.parameters:
                below.append(f"its parameters differ: {', '.join(self.parameters)}")
        if self.unmatched:
            shown = ", ".join(name or "(model)" for name in self.unmatched[:5])
            below.append(f"{number_of(len(self.unmatched), 'module')} of one model only, such as {shown}")
        return Report(rows, ["Call", "In model_a", "inputs", "outputs", "allowed", ""], "llrrrl", below=below)


def compare_values(
    model_a: nn.Module, model_b: nn.Module, batch: Any, mapping: Mapping[str, str] | None = None
) -> Divergence:
    """Run two models on one batch, and find the first call where they differ by more than their dtypes allow.

    Modules match as in ``stats.diff``: by name and structure, then by structure alone, then by name. Both run without
    gradients, in their own modes and with the same random numbers; the results of the first are kept until the second
    has run. Floating point inputs are cast to the dtype of each model. Both models stay untouched.

    Args:
        model_a, model_b: the models; they may differ in class, dtype and device.
        batch: the inputs, as ``input_data`` of ``Statistics``.
        mapping: FQN in ``model_a`` -> FQN in ``model_b``, for modules that should match otherwise.

    Raises:
        InputError: an argument is unusable.
        StepError: the forward of a model raised.

    >>> import torch
    >>> from torch import nn
    >>> import modelsummary
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    >>> other = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, eps=1e-3), nn.Linear(4, 2))
    >>> _ = other.load_state_dict(model.state_dict())
    >>> modelsummary.compare_values(model, other, torch.randn(8, 4)).first.fqn_b
    '1'
    """
    if mapping is not None and not isinstance(mapping, Mapping):
        raise InputError(f"mapping must be a dict of FQNs in model_a and in model_b, or None, got {mapping!r:.80}")
    sides = [_Side(name, model, batch) for name, model in (("model_a", model_a), ("model_b", model_b))]
    pairs = _pairs(sides[0], sides[1], mapping or {})
    recorded: dict[CallKey, _Recorded] = {}
    sides[0].run(
        lambda key, call, values: recorded.__setitem__(key, _Recorded(call, values)),
        lambda key, values: setattr(recorded[key], "outputs", values),
    )
    comparison = _Comparison(recorded, pairs, {row.key: row.self_macs for row in sides[1].root.walk()})
    sides[1].run(comparison.began, comparison.ended)
    rows = [comparison.rows[key] for key in comparison.rows]
    first, parent, parameters = comparison.first, "", []
    if first is not None:
        modules = [dict(zip(side.parts.names.values(), side.parts.modules, strict=True)) for side in sides]
        parent = comparison.parent
        parameters = _different_tensors(modules[0][first.fqn_a], modules[1][first.fqn_b])
    matched = {row.fqn_a for row in rows} | {row.fqn_b for row in rows}
    unmatched = [fqn for fqn in dict.fromkeys([*(key[0] for key in recorded), *comparison.seen]) if fqn not in matched]
    return Divergence(rows, first, parent, parameters, unmatched)


@dataclass
class _Recorded:
    call: Call
    inputs: list[Tensor]
    outputs: list[Tensor] = field(default_factory=list)


class _Side:
    """One of the two models."""

    def __init__(self, name: str, model: Any, batch: Any) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"{name} must be a torch.nn.Module, got {type(model).__name__}: {model!r:.80}")
        self.name, self.model = name, unwrap(model)
        self.parts = ModelParts.of(self.model)
        tensors = self.parts.tensors
        if self.parts.are_on_meta:
            raise InputError(f"comparing values needs values, but {name} has tensors on meta")
        dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)
        device = device_of(tensors)

        def as_taken(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype if tensor.is_floating_point() else None)

        call = call_arguments(self.parts, map_tensors(as_taken, batch), (), {})
        if call is None or call.size_dtypes:
            raise InputError(f"batch must hold tensors with values, got {batch!r:.80}; pass a tensor")
        self.call: CallArguments = call
        self.fqns = self.parts.names
        recording = capture(self.parts, self.call, "auto")
        with as_step_error(lambda: "forward", {}, name):
            if recording.error is not None:
                raise recording.error
        self.root = recording.root

    def run(
        self,
        began: Callable[[CallKey, Call, list[Tensor]], object],
        ended: Callable[[CallKey, list[Tensor]], object],
    ) -> None:
        """Run the model; pass copies of the inputs and results of each call of a named module."""
        keys: dict[Call, CallKey] = {}
        numbers, copies = CallKeys(), Readings(_copied)

        def copies_of(value: Any) -> list[Tensor]:
            return [copy for tensor in tensors_of(value) if (copy := copies.of(tensor)) is not None]

        def begin(call: Call, arguments: Any) -> None:
            fqn = self.fqns.get(id(call.module))
            if fqn is not None:
                keys[call] = numbers.next_of(fqn)
                began(keys[call], call, copies_of(arguments))

        def end(call: Call, output: Any) -> None:
            if call in keys:
                ended(keys[call], copies_of(output))

        with (
            as_step_error(lambda: "forward", {}, self.name),
            running(self.parts.modules, self.call, on_shapes=False, grad=False) as (execution, args, kwargs),
            Operators(execution),
        ):
            Watch(self.model, began=begin, ended=end).call(args, kwargs)


def _copied(plain: Tensor) -> Tensor:
    with unseen():
        return plain.detach().clone()


def _pairs(a: _Side, b: _Side, mapping: Mapping[str, str]) -> dict[str, str]:
    """Return FQNs of the second model -> FQNs of the first."""
    rows = diff_trees(a.root, b.root).rows
    pairs = {row.after.fqn: row.before.fqn for row in rows if row.before is not None and row.after is not None}
    names = set(a.fqns.values()), set(b.fqns.values())
    for fqn_a, fqn_b in mapping.items():
        for fqn, fqns, name in ((fqn_a, names[0], "model_a"), (fqn_b, names[1], "model_b")):
            if fqn not in fqns:
                raise InputError(f"mapping names {fqn!r}, but {name} has no such module{nearest(fqn, fqns)}")
        pairs = {after: before for after, before in pairs.items() if before != fqn_a}
        pairs[fqn_b] = fqn_a
    return {"": "", **pairs}


class _Comparison:
    """The differences of the calls of the second model, in the order in which they are known.

    Args:
        pairs: FQNs of the second model -> FQNs of the first.
        macs: call of the second model -> multiply-adds of its own operators.
    """

    def __init__(
        self, recorded: Mapping[CallKey, _Recorded], pairs: Mapping[str, str], macs: Mapping[CallKey, int]
    ) -> None:
        self._recorded, self._pairs, self._macs = recorded, pairs, macs
        self._largest = 0.0  # allowed difference so far
        self._parents: list[str] = []
        self.rows: dict[CallKey, CallDifference] = {}
        self.first: CallDifference | None = None
        self.parent = ""
        self.seen: list[str] = []

    def began(self, key: CallKey, call: Call, inputs: list[Tensor]) -> None:
        """Compare the inputs of a call."""
        self.seen.append(key[0])
        self._parents.append(key[0])
        earlier = self._match(key)
        if earlier is None:
            return
        difference, rounding = _difference(earlier.inputs, inputs)
        row = CallDifference(self._pairs[key[0]], key[0], key[1], type(call.module).__name__, difference)
        self.rows[key] = row
        self._judge(row, "inputs", difference, rounding)

    def ended(self, key: CallKey, outputs: list[Tensor]) -> None:
        """Compare the results of a call."""
        self._parents.pop()
        earlier, row = self._match(key), self.rows.get(key)
        if earlier is not None and row is not None:
            row.outputs, rounding = _difference(earlier.outputs, outputs)
            terms = self._macs.get(key, 0) / max(1, sum(tensor.numel() for tensor in outputs))
            self._judge(row, "outputs", row.outputs, rounding, terms)

    def _match(self, key: CallKey) -> _Recorded | None:
        fqn = self._pairs.get(key[0])
        return None if fqn is None else self._recorded.get((fqn, key[1]))

    def _judge(self, row: CallDifference, where: str, difference: float, rounding: float, terms: float = 0.0) -> None:
        row.allowed = _ROUNDING * rounding + _SUMMING * _error_of_sum(terms, rounding) + _GROWTH * self._largest
        if difference <= row.allowed:
            self._largest = max(self._largest, difference if self.first is None else 0.0)
        elif self.first is None:
            row.where = where
            self.first = row
            self.parent = self._parents[-2] if where == "inputs" and len(self._parents) > 1 else ""


def _error_of_sum(terms: float, unit: float) -> float:
    """Return the relative error of a sum of terms of random signs, which is kept in float32 or wider.

    Added one by one, the partial sum of i terms is about sqrt(i), and its rounding, with a variance of a twelfth of its
    unit squared, adds up to unit * sqrt(terms / 24) of the result.

    >>> _error_of_sum(24, 1e-7), _error_of_sum(96, 1e-16)
    (1e-07, 2e-16)
    """
    return min(unit, _UNIT_OF_SUMS) * sqrt(terms / 24)


def _difference(before: list[Tensor], after: list[Tensor]) -> tuple[float, float]:
    """Return the largest difference of tensors, and the unit in the last place of the coarsest dtype."""
    if len(before) != len(after):
        return inf, 0.0
    with unseen():
        pairs = [_of_two(a, b.to(a.device)) for a, b in zip(before, after, strict=True)]
    return max((difference for difference, _ in pairs), default=0.0), max((unit for _, unit in pairs), default=0.0)


def _of_two(a: Tensor, b: Tensor) -> tuple[float, float]:
    if a.shape != b.shape:
        return inf, 0.0
    inexact = [tensor.dtype for tensor in (a, b) if tensor.is_floating_point() or tensor.is_complex()]
    if len(inexact) < 2:
        return float((a != b).double().mean()) if a.numel() else 0.0, 0.0
    unit = max(torch.finfo(dtype).eps for dtype in inexact)
    if a.is_complex() != b.is_complex():
        a, b = a + 0j, b + 0j
    a, b = widened(a), widened(b)
    alike = (a == b) | (a.isnan() & b.isnan())
    apart = float(torch.where(alike, 0, a - b).norm())
    if not isfinite(apart):
        return inf, unit
    return apart / max(float(norm_of_finite(x)) for x in (a, b)) if apart else 0.0, unit


def _different_tensors(before: nn.Module, after: nn.Module) -> list[str]:
    """Return the names of a module's own parameters and buffers that differ by more than rounding."""
    tensors = [{**module._parameters, **module._buffers} for module in (before, after)]
    names = []
    for name in dict.fromkeys([*tensors[0], *tensors[1]]):
        a, b = (held.get(name) for held in tensors)
        if a is None or b is None:
            names += [name] if a is not b else []
            continue
        difference, unit = _difference([a.detach()], [b.detach()])
        names += [name] if difference > _ROUNDING * unit else []
    return names

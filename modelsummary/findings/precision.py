"""Operators in a wider dtype than the model, and casts that do nothing or repeat."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch

from modelsummary.findings.evidence import Evidence
from modelsummary.findings.ruleset import Defect, rule
from modelsummary.findings.tensor_cores import is_weight, places_in_parts
from modelsummary.layer_info import CallKey
from modelsummary.operators.operator_calls import Line, OperatorCall

_OF_VECTORS = frozenset({"aten.mv", "aten.dot", "aten.addmv"})  # products that tensor cores do not speed up


@rule("D401", "float64", is_priced=True)
def float64(evidence: Evidence) -> Iterator[Defect]:
    """Yield places where tensors become float64 in a model whose parameters are not, and what follows in float64."""
    if any(parameter.dtype is torch.float64 for parameter in evidence.parameters.values()):
        return
    origins: dict[int, int] = {}  # storage -> operator at which its values became float64
    indices: defaultdict[int, list[int]] = defaultdict(list)
    for index, call in evidence.forward():
        run = evidence.run(index)
        if not any(spec.dtype is torch.float64 and spec.numel > 1 for spec in (*call.tensors, *call.outputs)):
            continue
        origin = next((origins[storage] for storage in run.reads if storage in origins), index)
        indices[origin].append(index)
        origins.update(dict.fromkeys(run.makes, origin))
    for origin, members in indices.items():
        results = [spec for member in members for spec in evidence.call(member).outputs]
        nbytes = sum(spec.nbytes // 2 for spec in results if spec.dtype is torch.float64)
        seconds = sum(evidence.seconds(member) for member in members)
        what = "becomes float64, which most devices compute at a fraction of their speed"
        yield Defect(what, "make it float32", evidence.row(origin), evidence.line(origin), nbytes, seconds)


@rule("D402", "float32-product", is_priced=True)
def float32_product(evidence: Evidence) -> Iterator[Defect]:
    """Yield products, convolutions and attention in float32 in a half-precision model or under autocast.

    The cost is the time beyond the one in half precision, and of the casts around it. Sums and norms in float32 are
    left alone: they need its accuracy.
    """
    half = evidence.half
    if half is None:
        return
    of_torch = places_in_parts(evidence)
    for index, call in evidence.forward():
        run = evidence.run(index)
        if not call.cost.macs or not call.outputs or call.outputs[0].dtype is not torch.float32:
            continue
        if evidence.place(index) in of_torch and not any(is_weight(evidence, index)):
            continue
        if call.name in _OF_VECTORS:
            continue
        casts = {
            position
            for storage in run.reads
            for position in [evidence.maker.get(storage)]
            if position is not None and _is_widening(evidence.call(position))
        }
        casts |= {use for use in evidence.readers[run.makes[0]] if evidence.call(use).rule.facts.casts}
        seconds = evidence.seconds(index) - evidence.seconds_in(call, half) + sum(map(evidence.seconds, casts))
        name = str(half).removeprefix("torch.")
        if seconds > 0:
            what = f"computes a product in float32 in a {name} run"
            nbytes = sum(spec.nbytes // 2 for spec in call.outputs)
            remedy = "cast its operands to the dtype of the model; check autocast(enabled=False) and float()"
            yield Defect(what, remedy, evidence.row(index), run.line, nbytes, seconds)


def _is_widening(call: OperatorCall) -> bool:
    return call.rule.facts.casts and call.outputs[0].dtype.itemsize > call.tensors[0].dtype.itemsize


@rule("D403", "cast-and-back", is_priced=True)
def cast_and_back(evidence: Evidence) -> Iterator[Defect]:
    """Yield casts whose results are only cast back.

    A cast of floating point numbers to integers, or to 8 bits, rounds on purpose and is left out.
    """
    of_torch = places_in_parts(evidence)
    for index, call in evidence.forward():
        if not call.rule.facts.casts or not evidence.run(index).makes or not evidence.is_of_model(index):
            continue
        copy = evidence.run(index).makes[0]
        uses = evidence.readers[copy]
        before, after = call.tensors[0].dtype, call.outputs[0].dtype
        rounds = before.is_floating_point and not (after.is_floating_point and after.itemsize > 1)
        if before is after or rounds or not uses or evidence.is_held(copy) or evidence.place(index) in of_torch:
            continue
        if all(evidence.call(use).rule.facts.casts and evidence.call(use).outputs[0].dtype is before for use in uses):
            dtype = str(after).removeprefix("torch.")
            seconds = sum(map(evidence.seconds, (index, *uses)))
            nbytes = call.outputs[0].nbytes + sum(evidence.call(use).outputs[0].nbytes for use in uses)
            what = f"casts to {dtype} and back, with nothing in between"
            yield Defect(what, "leave out both casts", evidence.row(index), evidence.line(index), nbytes, seconds)


@rule("D404", "weight-cast-in-each-call", is_priced=True)
def weight_cast_in_each_call(evidence: Evidence) -> Iterator[Defect]:
    """Yield weights that the forward casts to another dtype each time, apart from autocast and vectors, as of norms."""
    if evidence.plan.autocast is not None:
        return
    casts: defaultdict[tuple[CallKey | None, Line | None, str], list[int]] = defaultdict(list)
    for index, call in evidence.forward():
        if not call.rule.facts.casts or not call.tensors[0].is_param or call.outputs[0].dtype is call.tensors[0].dtype:
            continue
        if len(call.tensors[0].shape) < 2:  # norms compute in float32 with reason
            continue
        if not evidence.is_of_model(index):  # the model's own autocast
            continue
        before, after = (str(dtype).removeprefix("torch.") for dtype in (call.tensors[0].dtype, call.outputs[0].dtype))
        casts[evidence.row(index), evidence.line(index), f"from {before} to {after}"].append(index)
    for (row, line, dtypes), indices in casts.items():
        nbytes = sum(evidence.call(index).outputs[0].nbytes for index in indices)
        seconds = sum(map(evidence.seconds, indices))
        what = f"casts a weight {dtypes} in each call"
        yield Defect(what, "keep the weight in that dtype", row, line, nbytes, seconds)

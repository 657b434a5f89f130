"""Work that is done twice, or that the next operator undoes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from modelsummary.findings.evidence import Evidence
from modelsummary.findings.ruleset import Defect, rule
from modelsummary.findings.tensor_cores import is_fused_attention, places_in_parts
from modelsummary.findings.unused import by_origin
from modelsummary.operators.operator_calls import OperatorCall, TensorSpec


@rule("R301", "computed-twice", is_priced=True)
def computed_twice(evidence: Evidence) -> Iterator[Defect]:
    """Yield operators that compute what an earlier one of the forward computed from the same values.

    Operators are followed from the inputs on, so that a mask that each layer makes anew counts as one.
    """
    fused = {evidence.place(index) for index, call in evidence.forward() if is_fused_attention(call)}
    places = places_in_parts(evidence) | fused  # the mask that attention makes, or copies for its kernel, is torch's
    casts_anew = evidence.plan.autocast is not None  # what it gets each time

    def is_of_torch(index: int) -> bool:
        is_cast = casts_anew and evidence.call(index).rule.facts.casts
        return is_cast or evidence.place(index) in places or _is_copy_for_product(evidence, index)

    for origin in by_origin(evidence, _repeated(evidence)):
        of_model = [index for index in origin.indices if not is_of_torch(index)]
        if of_model and (origin.is_call or evidence.is_of_model(of_model[0])):
            whole = origin if origin.is_call else origin._replace(indices=of_model)
            yield from whole.defects(evidence, "repeats", "of values as before", "compute it once and pass it on")


def _is_copy_for_product(evidence: Evidence, index: int) -> bool:
    """Return True for a copy that only products of the same line read, as ``einsum`` makes of its operands."""
    uses = evidence.readers[evidence.run(index).makes[0]]
    return evidence.call(index).rule.facts.copies and all(
        evidence.call(use).rule.facts.multiplies and evidence.place(use) == evidence.place(index) for use in uses
    )


def _repeated(evidence: Evidence) -> list[int]:
    """Return the operators that repeat an earlier one.

    Two storages have the same value if equal operators made them from arguments of the same values, at the same
    offsets. An operator that writes in place makes a new value. Constants, which follow from sizes alone, have the same
    value only if the same line made them in several calls: within one call, sizes may be equal by chance, as the height
    and the width of an image.
    """
    values: dict[int, Any] = {}
    constants: set[int] = set()
    makers: dict[Any, int] = {}
    repeated = []
    for index, call in evidence.forward():
        run, rule = evidence.run(index), call.rule
        if not rule.launches_kernel and not rule.writes:  # an allocation: its elements are arbitrary
            continue
        key: Any = index
        is_pure = _is_pure(call)
        operands = {*run.reads}
        if rule.overwrites:  # copy_() reads what it copies, and zeros_like() a shape alone
            operands = operands.difference(run.writes) if run.writes else set()
        is_constant = is_pure and constants.issuperset(operands)
        if is_constant:
            constants.update(run.makes)
        else:
            constants.difference_update(run.writes)
        if is_pure:
            arguments = tuple(
                (values.get(storage, storage), offset) for storage, offset in zip(run.reads, run.offsets, strict=True)
            )
            key = hash((id(call), arguments, evidence.line(index) if is_constant else None))
        first = makers.setdefault(key, index)
        for position, storage in enumerate((*run.makes, *run.writes)):
            values[storage] = key, position
        is_by_chance = constants.issuperset(run.makes) and evidence.row(first) == evidence.row(index)
        if first != index and run.makes and not run.writes and not is_by_chance:
            results = (*run.makes, *evidence.run(first).makes)
            if not any(evidence.writers[storage] for storage in results):
                repeated.append(index)
    return repeated


def _is_pure(call: OperatorCall) -> bool:
    """Return True for an operator whose result follows from its arguments, all of which are noted."""
    rule = call.rule
    if rule.is_random or rule.is_collective or rule.needs_values or rule.facts.writes_in_training:
        return False
    return rule.is_builtin or rule.name.startswith("aten.")


@rule("R302", "copy-not-needed", is_priced=True)
def copy_not_needed(evidence: Evidence) -> Iterator[Defect]:
    """Yield copies of a tensor that is never written afterwards, and of matrices that products read as they are."""
    for index, call in evidence.forward():
        run = evidence.run(index)
        if not call.rule.facts.copies or not run.reads or not run.makes or not evidence.is_of_model(index):
            continue
        source, copy = run.reads[0], run.makes[0]
        is_written = evidence.writers[copy] or any(writer > index for writer in evidence.writers[source])
        if is_written or evidence.is_held(copy) or not evidence.readers[copy]:
            continue
        is_inner = call.bound.get("memory_format") is not None  # of another function, such as repeat_interleave()
        is_alike = call.tensors[0].stride == call.outputs[0].stride and not is_inner
        if is_alike and evidence.storages[source].kind != "inputs":
            what, remedy = "copies a tensor, and neither is written later", "leave out clone()"
        elif _is_transposed(call.tensors[0]) and all(
            _multiplies(evidence, use, copy) for use in evidence.readers[copy]
        ):
            what, remedy = "copies a transposed matrix for a product, which reads both orders", "leave out contiguous()"
        else:
            continue
        yield Defect(what, remedy, evidence.row(index), run.line, call.outputs[0].nbytes, evidence.seconds(index))


def _is_transposed(spec: TensorSpec) -> bool:
    """Return True for a matrix, or a batch of matrices, whose columns are contiguous."""
    if len(spec.shape) not in (2, 3):
        return False
    rows, step = spec.shape[-2], spec.stride[-1]
    return spec.stride[-2] == 1 and step >= rows > 1 and spec.shape[-1] > 1


def _multiplies(evidence: Evidence, index: int, matrix: int) -> bool:
    """Return True for a product that takes a matrix, or a batch of them, as it is, and not as another view of it."""
    run, copy = evidence.run(index), evidence.call(evidence.maker[matrix]).outputs[0]
    views = [spec for spec, storage in zip(run.call.tensors, run.reads, strict=False) if storage == matrix]
    shapes = (copy.shape, (*copy.shape[:-2], copy.shape[-1], copy.shape[-2]))
    return bool(run.call.rule.facts.multiplies) and all(view.shape in shapes for view in views)

"""The bytes that each part of a model keeps for the backward.

In eager mode these are the tensors that autograd saves. A compiled model keeps less: what element-wise work makes again
from other kept tensors is not kept if only fused kernels of the backward read it, as by the partitioner of AOTAutograd
(``min_cut_rematerialization_partition`` in torch/_functorch/partitioners.py). What a product of the backward reads must
be in memory anyway, so it is kept.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from modelsummary.capture.trace import Storage
from modelsummary.operators.kernels import StepOperator
from modelsummary.operators.operator_work import POINTWISE, work_of

__all__ = ["KeptStorage", "keepers", "kept_storages", "recomputed"]

_REDUCES = frozenset({"norm", "softmax", "reduction"})  # they fuse with element-wise operators


def keepers(
    operators: Sequence[StepOperator], saved: Sequence[Storage], part_names: Sequence[str], before: str
) -> list[str]:
    """Return the part that keeps each storage: the one whose backward reads it.

    Args:
        operators: operators of the step.
        saved: storages that autograd keeps.
        part_names: part that each operator belongs to.
        before: part of what is made before the first operator.
    """
    by_row: dict[Any, str] = {}
    for operator, part_name in zip(operators, part_names, strict=True):
        if operator.phase == "forward":
            by_row.setdefault(operator.row, part_name)
    return [by_row.get(storage.row, _maker(storage, part_names) or before) for storage in saved]


def _maker(storage: Storage, part_names: Sequence[str]) -> str | None:
    """Return the part that makes a storage; None for one that is made before the first operator."""
    return part_names[storage.born] if 0 <= storage.born < len(part_names) else None


class KeptStorage(NamedTuple):
    """A storage that a part keeps for the backward.

    Attributes:
        part_name: the part.
        identity: of the storage.
        nbytes: its bytes on the rank.
        is_core: the core of attention makes it.
    """

    part_name: str
    identity: int
    nbytes: int
    is_core: bool


def kept_storages(
    operators: Sequence[StepOperator],
    saved: Sequence[Storage],
    part_names: Sequence[str],
    kept_by: Sequence[str],
    core: Collection[int],
    shares: Mapping[int, float],
    *,
    compiled: bool,
) -> list[KeptStorage]:
    """Return the storages that the parts keep.

    Args:
        operators: operators of the step.
        saved: storages that autograd keeps.
        part_names: part that each operator belongs to.
        kept_by: part that keeps each storage, as ``keepers`` returns them.
        core: indices of the operators between the scores and the context of attention.
        shares: index of an operator -> what a rank keeps of its result, relative to all of it.
        compiled: forward and backward are compiled.
    """
    last_core = {part_names[index]: index for index in sorted(core)}
    again = recomputed(operators, {storage.identity for storage in saved}) if compiled else frozenset()
    kept = []
    for storage, part_name in zip(saved, kept_by, strict=True):
        if storage.identity in again:
            continue
        made_in = _maker(storage, part_names)
        is_core = storage.born in core and made_in is not None and storage.born != last_core.get(made_in)
        if is_core:  # a copy of what enters is kept instead of it
            is_core = not operators[storage.born].run.call.rule.facts.copies
        nbytes = int(storage.nbytes * shares.get(storage.born, 1))
        kept.append(KeptStorage(part_name, storage.identity, nbytes, is_core))
    return kept


def recomputed(operators: Sequence[StepOperator], saved: Collection[int]) -> frozenset[int]:
    """Return the storages among ``saved`` that a compiled backward makes again by element-wise work."""
    forward = [operator for operator in operators if operator.phase == "forward"]
    outputs = {key for operator in forward for key in operator.run.makes}
    products = {
        key
        for operator in operators
        if operator.phase == "backward" and not _fuses(operator) and operator.run.call.rule.launches_kernel
        for key in operator.run.reads
    }
    lacking = set(outputs)  # storages that are neither kept nor made again from kept ones
    remade = set()
    for operator in forward:
        results = set(operator.run.makes) - set(operator.run.reads)
        if not results or operator.run.call.rule.is_view:
            continue
        again = _fuses(operator) and not operator.run.call.rule.is_random and lacking.isdisjoint(operator.run.reads)
        first = operator.run.makes[0]
        for key in results:
            if again and key == first and key not in products:
                remade.add(key)
            if key in saved or (again and key == first):
                lacking.discard(key)
    return frozenset(remade & set(saved))


def _fuses(operator: StepOperator) -> bool:
    """Return True if an operator joins fused kernels."""
    works = work_of(operator.run.call)
    return bool(works) and all(work.op_class in POINTWISE or work.op_class in _REDUCES for work in works)

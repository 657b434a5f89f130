"""The bytes that each part of a model keeps for the backward.

In eager mode these are the tensors that autograd saves. A compiled model keeps less: what element-wise work makes again
from other kept tensors is not kept if only fused kernels of the backward read it, as by the partitioner of AOTAutograd
(``min_cut_rematerialization_partition`` in torch/_functorch/partitioners.py). What a product of the backward reads must
be in memory anyway, so it is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from modelsummary.capture.trace import Storage
from modelsummary.operators.kernels import StepOperator
from modelsummary.operators.operator_work import POINTWISE, is_free, work_of

__all__ = ["kept_bytes", "recomputed"]

_GATHERED = "_c10d_functional.all_gather_into_tensor"
_REDUCES = frozenset({"norm", "softmax", "reduction"})  # they fuse with element-wise operators


def kept_bytes(
    operators: Sequence[StepOperator],
    saved: Sequence[Storage],
    places: Sequence[str],
    core: Collection[int],
    ranks: int,
    *,
    compiled: bool,
    before: str,
) -> tuple[Counter[str], Counter[str]]:
    """Return the bytes that each part keeps, and the bytes among them that the core of attention makes.

    Args:
        operators: operators of the step.
        saved: storages that autograd keeps.
        places: part that each operator belongs to.
        core: numbers of the operators between the scores and the context of attention.
        ranks: ranks of tensor parallelism; what is gathered for a column-parallel layer is kept in shares.
        compiled: forward and backward are compiled.
        before: part of what is made before the first operator.
    """
    by_row: dict[Any, str] = {}
    for each, place in zip(operators, places, strict=True):
        if each.phase == "forward":
            by_row.setdefault(each.row, place)
    last_core = {places[number]: number for number in sorted(core)}
    again = recomputed(operators, {each.identity for each in saved}) if compiled else frozenset()
    kept: Counter[str] = Counter()
    made_in_core: Counter[str] = Counter()
    for tensor in saved:
        if tensor.identity in again:
            continue
        is_made = 0 <= tensor.born < len(places)
        made_in = places[tensor.born] if is_made else before
        place = by_row.get(tensor.row, made_in)
        nbytes = tensor.nbytes
        if is_made:
            name = operators[tensor.born].run.call.name
            nbytes = nbytes // ranks if name == _GATHERED else nbytes
            is_core = tensor.born in core and tensor.born != last_core.get(made_in)
            if is_core and name != "aten.clone":  # a copy of what enters is kept instead of it
                made_in_core[place] += nbytes
        kept[place] += nbytes
    return kept, made_in_core


def recomputed(operators: Sequence[StepOperator], saved: Collection[int]) -> frozenset[int]:
    """Return the storages among ``saved`` that a compiled backward makes again by element-wise work."""
    forward = [each for each in operators if each.phase == "forward"]
    made = {key for each in forward for key in each.run.makes}
    products = {
        key
        for each in operators
        if each.phase == "backward" and not _fuses(each) and not is_free(each.run.call)
        for key in each.run.reads
    }
    lacking = set(made)  # storages that are neither kept nor made again from kept ones
    found = set()
    for each in forward:
        results = set(each.run.makes) - set(each.run.reads)
        if not results or each.run.call.rule.is_view:
            continue
        again = _fuses(each) and not each.run.call.rule.is_random and lacking.isdisjoint(each.run.reads)
        first = each.run.makes[0]
        for key in results:
            if again and key == first and key not in products:
                found.add(key)
            if key in saved or (again and key == first):
                lacking.discard(key)
    return frozenset(found & set(saved))


def _fuses(operator: StepOperator) -> bool:
    """Return True if an operator joins fused kernels."""
    works = work_of(operator.run.call)
    return bool(works) and all(work.op_class in POINTWISE or work.op_class in _REDUCES for work in works)

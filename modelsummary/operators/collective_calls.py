"""What collectives move, read off the calls of their operators: all figures of communication follow from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from modelsummary.operators.kernels import StepOperator
from modelsummary.operators.operator_calls import OperatorCall

__all__ = ["OPERATIONS", "Collective", "CollectiveCall", "collective_of", "collectives_of"]

_OPERATION_OF = {
    "_c10d_functional.all_reduce": "all_reduce",
    "_c10d_functional.all_reduce_": "all_reduce",
    "_c10d_functional.all_gather_into_tensor": "all_gather",
    "_c10d_functional.reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional.all_to_all_single": "all_to_all",
    "c10d.allreduce_": "all_reduce",
    "c10d._allgather_base_": "all_gather",
    "c10d.allgather_single_": "all_gather",
    "c10d._reduce_scatter_base_": "reduce_scatter",
    "c10d.reduce_scatter_single_": "reduce_scatter",
    "c10d.alltoall_base_": "all_to_all",
}
OPERATIONS = tuple(dict.fromkeys(_OPERATION_OF.values()))


class CollectiveCall(NamedTuple):
    """A collective of one rank.

    Attributes:
        operation: one of ``OPERATIONS``.
        group: name of the process group.
        dtype: of what is moved.
        nbytes: bytes of the whole tensor: what an all-reduce or reduce-scatter takes on each rank, and an all-gather
            gives; of an all-to-all, what a rank gets in a forward and sends in a backward, which is the same on all
            ranks where they share out rows.
    """

    operation: str
    group: str
    dtype: torch.dtype
    nbytes: int


@dataclass(frozen=True)
class Collective:
    """A collective that runs on a rank in the calls of one module, in one step.

    Attributes:
        operation: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"`` or ``"all_to_all"``.
        phase: ``"forward"``, ``"backward"``, or ``"loss"`` if that is computed from the model's results.
        count: how often it runs.
        nbytes: bytes of the whole tensors, over all runs: what an all-reduce takes, an all-gather gives, and a
            reduce-scatter takes on each rank. Of an all-to-all, what a rank gets in a forward and sends in a backward.
        fqn: of the module whose call, or the backward of whose call, runs it; empty for the model and outside of it.
        group: what the ranks that take part share out: a dimension of the mesh.
        dtype: of what is moved, as ``"float32"``.
    """

    operation: str
    phase: str
    count: int
    nbytes: int
    fqn: str = ""
    group: str = "tensor"
    dtype: str = "float32"


def collective_of(call: OperatorCall, phase: str = "forward") -> CollectiveCall | None:
    """Return what a collective of a phase moves; None for another operator."""
    operation = _OPERATION_OF.get(call.name)
    if operation is None:
        return None
    bound = call.bound
    if operation == "all_to_all":
        whole = bound["input"] if phase == "backward" else bound.get("output", call.outputs[0])
    else:
        whole = max((*call.tensors, *call.outputs), key=lambda spec: spec.nbytes)
    group = bound["process_group" if call.name.startswith("c10d.") else "group_name"]
    return CollectiveCall(operation, str(group), whole.dtype, whole.nbytes)


def collectives_of(
    operators: Iterable[StepOperator], groups: Mapping[str, str], unit_groups: Mapping[str, str] | None = None
) -> tuple[Collective, ...]:
    """Return the collectives of a step: equal ones in the calls of one module as one.

    Args:
        operators: the operators of the step. Those of a forward that belong to no module compute the loss.
        groups: name of a process group -> dimension of the mesh.
        unit_groups: the same for what FSDP communicates, by operators of ``c10d``; its group may have the ranks of
            another dimension. Default: ``groups``.
    """
    counts: Counter[tuple[str, str, str, str, str]] = Counter()
    nbytes: Counter[tuple[str, str, str, str, str]] = Counter()
    for operator in operators:
        call = collective_of(operator.run.call, operator.phase)
        if call is not None:
            phase = "loss" if operator.phase == "forward" and operator.row is None else operator.phase
            fqn = "" if operator.row is None else operator.row[0]
            is_of_unit = operator.run.call.name.startswith("c10d.")
            names = unit_groups if is_of_unit and unit_groups is not None else groups
            key = call.operation, phase, fqn, names[call.group], str(call.dtype).removeprefix("torch.")
            counts[key] += 1
            nbytes[key] += call.nbytes
    return tuple(
        Collective(operation, phase, counts[key], nbytes[key], fqn, group, dtype)
        for key in counts
        for operation, phase, fqn, group, dtype in [key]
    )

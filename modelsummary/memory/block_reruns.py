"""What a checkpoint around a block keeps of the inputs of the block, frees, and runs again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from modelsummary.capture.trace import Storage, Trace, TracedCall
from modelsummary.memory.checkpointing import block_of
from modelsummary.memory.estimate import MemoryEstimate
from modelsummary.memory.saved import PERSISTENT
from modelsummary.memory.timeline import is_held, recomputed_operators

__all__ = ["DETACH", "BlockInput", "BlockRerun", "kept_only_by_checkpoint", "reruns_of"]

DETACH = torch.ops.aten.detach.default  # a checkpoint adds some of its own, and numbers none


class BlockInput(NamedTuple):
    """A storage from before a block that a checkpoint around the block keeps.

    Attributes:
        identity: its number in the step without checkpoints.
        reader: the operator of the block that reads it first, by its number in the block; None if none does, as of an
            argument that is passed on.
        argument: number of the argument in which it is read.
    """

    identity: int
    reader: int | None
    argument: int = 0


class BlockRerun(NamedTuple):
    """What a step shows of a block that runs again in it.

    Attributes:
        trace: the step; other blocks may run again in it, too.
        again: numbers of the operators that run again, without ``DETACH``.
        held: number of each operator of the block, forward and backward -> bytes alive while it runs, as if no other
            block ran again.
        inputs: what the checkpoint keeps of the inputs of the block.
        input_bytes: bytes among them that a step without checkpoints does not keep.
        saving: bytes that are not kept for the backward, without what is kept of the inputs.
        kept_by_others: storages that only the checkpoints of other blocks keep.
    """

    trace: Trace
    again: Sequence[int]
    held: Mapping[int, int]
    inputs: Sequence[BlockInput]
    input_bytes: int
    saving: int
    kept_by_others: Collection[int]


def reruns_of(
    plain: Trace, plain_estimate: MemoryEstimate, planned: Trace, estimate: MemoryEstimate, fqns: Sequence[str]
) -> dict[str, BlockRerun] | None:
    """Return how each of some blocks ran in a step with checkpoints around them; None if they cannot be told apart.

    Args:
        plain, plain_estimate: a step without checkpoints.
        planned, estimate: the same step with checkpoints around these blocks, perhaps without the optimizer.
        fqns: names of the blocks.
    """
    state = plain_estimate.optimizer_state - estimate.optimizer_state
    numbers = {fqn: number for number, fqn in enumerate(fqns)}
    again: list[list[int]] = [[] for _ in fqns]
    for index in recomputed_operators(planned):
        run, _, row = planned.operators[index]
        number = 0 if len(fqns) == 1 else block_of(None if row is None else row[0], numbers)
        if number is None:
            return None
        if run.call.func is not DETACH:
            again[number].append(index)
    twins = _twins(plain, planned)
    readers = {fqn: _readers(plain, plain.first_call(fqn)) for fqn in fqns}
    inputs_by_block: dict[str, list[BlockInput]] = {}
    kept_by_block: dict[str, dict[int, int]] = {}
    for fqn in fqns:
        read_by_others = {storage for other in fqns if other != fqn for storage in readers[other]}
        inputs_by_block[fqn] = _inputs_of(plain, planned, fqn, twins, readers[fqn], read_by_others)
        kept_by_block[fqn] = kept_only_by_checkpoint(plain, fqn, inputs_by_block[fqn])
    kept_by_any = {storage: nbytes for kept in kept_by_block.values() for storage, nbytes in kept.items()}
    twins_kept = {twins[storage].identity for storage in kept_by_any}  # perhaps made by another one of the blocks
    reruns: dict[str, BlockRerun] = {}
    for fqn, of_block in zip(fqns, again, strict=True):
        nbytes = sum(kept_by_block[fqn].values())
        first, second = plain.first_call(fqn), planned.first_call(fqn)
        forward, backward = (
            state + _outside(plain, first, begin) - _outside(planned, second, other)
            for begin, other in (
                (first.begin, second.begin),
                (_first_backward(plain, fqn), _first_backward(planned, fqn)),
            )
        )
        held = {
            index: point.total + (forward if index < planned.end_of_forward else backward + nbytes)
            for index, point in enumerate(estimate.timeline)
            if f"{point.fqn}.".startswith(f"{fqn}.")
        }
        saving = _kept_inside(plain, first) - _kept_inside(planned, second, twins_kept)
        reruns[fqn] = BlockRerun(planned, of_block, held, inputs_by_block[fqn], nbytes, saving, twins_kept)
    freed = plain_estimate.held_after_forward - estimate.held_after_forward - state + sum(kept_by_any.values())
    if len(fqns) == 1:
        return {fqn: rerun._replace(saving=freed) for fqn, rerun in reruns.items()}
    return reruns if freed == sum(rerun.saving for rerun in reruns.values()) else None


def kept_only_by_checkpoint(plain: Trace, fqn: str, inputs: Sequence[BlockInput]) -> dict[int, int]:
    """Return the storages, with their bytes, that a checkpoint keeps and that a step without it does not keep.

    Args:
        plain: the step without checkpoints.
        fqn: name of a block that equals the one of ``inputs``.
        inputs: what its checkpoint keeps.
    """
    begin = plain.first_call(fqn).begin
    storages = plain.storages_by_identity
    kept = {}
    for entry in inputs:
        identity = entry.identity
        if entry.reader is not None:
            identity = plain.operators[begin + entry.reader].run.reads[entry.argument]
        if identity in storages and not is_held(storages[identity], plain):
            kept[identity] = storages[identity].nbytes
    return kept


def _inputs_of(
    plain: Trace,
    planned: Trace,
    fqn: str,
    twins: Mapping[int, Storage],
    readers: Mapping[int, tuple[int, int]],
    read_by_others: Collection[int],
) -> list[BlockInput]:
    """Return what a checkpoint keeps of the inputs of a block.

    Args:
        plain, planned, fqn: as for ``reruns_of``, and one of the blocks.
        twins: storage of the step without checkpoints -> the same storage of the other step.
        readers: storage -> where the block reads it first.
        read_by_others: storages that other blocks read whose checkpoints may keep them.
    """
    return [
        BlockInput(storage.identity, *readers.get(storage.identity, (None, 0)))
        for storage in _before(plain, plain.first_call(fqn))
        if storage.identity in twins
        and is_held(twins[storage.identity], planned)
        and (storage.identity in readers or not (is_held(storage, plain) or storage.identity in read_by_others))
    ]


def _readers(plain: Trace, call: TracedCall) -> dict[int, tuple[int, int]]:
    """Return the storages that a call reads -> number of the operator in the call that reads it first, and argument."""
    readers: dict[int, tuple[int, int]] = {}
    for index in range(call.begin, call.end):
        for argument, storage in enumerate(plain.operators[index].run.reads):
            readers.setdefault(storage, (index - call.begin, argument))
    return readers


def _twins(plain: Trace, planned: Trace) -> dict[int, Storage]:
    """Return storages of the inputs and the forward of a step -> the same storages of the step with checkpoints."""
    pairs = list(zip(*(_inputs(trace) for trace in (plain, planned)), strict=False))
    forwards = (
        [run for run, *_ in trace.operators[: trace.end_of_forward] if run.call.func is not DETACH]
        for trace in (plain, planned)
    )
    for run, other in zip(*forwards, strict=False):
        if run.call.func is not other.call.func:
            break
        pairs += zip(run.makes, other.makes, strict=False)
    storages = planned.storages_by_identity
    return {first: storages[second] for first, second in pairs if second in storages}


def _inputs(trace: Trace) -> list[int]:
    return [storage.identity for storage in trace.storages if storage.kind == "inputs"]


def _before(trace: Trace, call: TracedCall) -> list[Storage]:
    """Return the storages that are there when a call begins, without weights and what the optimizer keeps."""
    return [
        storage
        for storage in trace.storages
        if (storage.kind == "inputs" or storage.born < call.begin)
        and (storage.died is None or storage.died > call.begin)
        and storage.kind not in PERSISTENT - {"inputs"}
    ]


def _made(trace: Trace, call: TracedCall, *, inside: bool) -> list[Storage]:
    """Return the storages that the forward of a call makes, or all others that the step makes."""
    return [
        storage
        for storage in trace.storages
        if storage.kind not in PERSISTENT and (call.begin <= storage.born < call.end) == inside
    ]


def _outside(trace: Trace, call: TracedCall, before: int) -> int:
    """Return the bytes that the step has made before an operator, and that are alive, outside of a call's forward."""
    return sum(
        storage.nbytes
        for storage in _made(trace, call, inside=False)
        if storage.born < before and (storage.died is None or storage.died > before)
    )


def _kept_inside(trace: Trace, call: TracedCall, without: Collection[int] = ()) -> int:
    """Return the bytes from the forward of a call that are alive when the forward of the model has ended.

    Args:
        trace, call: the step and the call.
        without: storages that do not count.
    """
    storages = (storage for storage in _made(trace, call, inside=True) if is_held(storage, trace))
    return sum(storage.nbytes for storage in storages if storage.identity not in without)


def _first_backward(trace: Trace, fqn: str) -> int:
    """Return the number of the first operator of a block in the backward; without one, of the first one there."""
    numbers = range(trace.end_of_forward, len(trace.operators))
    rows = ((index, trace.operators[index].row) for index in numbers)
    inside = (index for index, row in rows if row is not None and f"{row[0]}.".startswith(f"{fqn}."))
    return next(inside, trace.end_of_forward)

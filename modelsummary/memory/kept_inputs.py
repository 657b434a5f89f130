"""What a checkpoint around a block keeps of the inputs of the block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from modelsummary.capture.trace import Storage, Trace, TracedCall
from modelsummary.memory.timeline import is_held

__all__ = ["BlockInput", "inputs_of", "kept_only_by_checkpoint"]


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


def inputs_of(plain: Trace, planned: Trace, fqn: str) -> list[BlockInput]:
    """Return what a checkpoint keeps of the inputs of a block.

    Args:
        plain: a step without checkpoints.
        planned: the same step with a checkpoint around this block alone.
        fqn: name of the block.
    """
    call, again = plain.first_call(fqn), planned.first_call(fqn)
    readers: dict[int, tuple[int, int]] = {}
    for index in range(call.begin, call.end):
        for argument, storage in enumerate(plain.operators[index].run.reads):
            readers.setdefault(storage, (index - call.begin, argument))
    pairs = zip(_before(plain, call), _before(planned, again), strict=False)
    return [
        BlockInput(storage.identity, *readers.get(storage.identity, (None, 0)))
        for storage, kept in pairs
        if is_held(kept, planned) and (storage.identity in readers or not is_held(storage, plain))
    ]


def kept_only_by_checkpoint(plain: Trace, fqn: str, inputs: Sequence[BlockInput]) -> dict[int, int]:
    """Return the storages, with their bytes, that a checkpoint keeps and that a step without it does not keep.

    Args:
        plain: the step without checkpoints.
        fqn: name of a block that equals the one of ``inputs``.
        inputs: see ``inputs_of``.
    """
    begin = plain.first_call(fqn).begin
    storages = {storage.identity: storage for storage in plain.storages}
    kept = {}
    for entry in inputs:
        identity = entry.identity
        if entry.reader is not None:
            identity = plain.operators[begin + entry.reader].run.reads[entry.argument]
        if identity in storages and not is_held(storages[identity], plain):
            kept[identity] = storages[identity].nbytes
    return kept


def _before(trace: Trace, call: TracedCall) -> list[Storage]:
    """Return the storages that are there when a call begins, without weights and what the optimizer keeps."""
    return [
        storage
        for storage in trace.storages
        if (storage.kind == "inputs" or storage.born < call.begin)
        and (storage.died is None or storage.died > call.begin)
        and storage.kind not in ("params", "buffers", "optimizer_state")
    ]

"""``Trace``: one observed run as plain data, of which every answer is a function."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from modelsummary.capture.calls import Call, keys_of
from modelsummary.capture.observer import Allocation, Level
from modelsummary.layer_info import CallKey, Sizes
from modelsummary.operators.kernels import StepOperator

__all__ = ["BEFORE_THE_STEP", "Storage", "Trace", "TracedCall", "TracedSave", "bytes_alive", "storages_of"]


class TracedCall(NamedTuple):
    """One call of a module.

    Attributes:
        key: FQN and call index.
        parent: key of the call around it; None for the model.
        begin, end: numbers of its first operator, and of the first operator after its forward.
        input_size, output_size: sizes of its arguments and of its result.
        input_bytes, output_bytes: bytes of the tensors in them.
        training: mode of the module.
        finished: whether it returned; False if it raised.
    """

    key: CallKey
    parent: CallKey | None
    begin: int
    end: int
    input_size: Sizes
    output_size: Sizes
    input_bytes: int
    output_bytes: int
    training: bool
    finished: bool

    @classmethod
    def all_of(
        cls, calls: Sequence[Call], names: Mapping[int, str], first: int
    ) -> tuple[dict[Call, CallKey], list[TracedCall]]:
        """Return the key of each call, and the calls of modules that have a name (id of a module -> FQN).

        Operators count from ``first``.
        """
        keys = keys_of(calls, names)
        return keys, [
            cls(
                keys[call],
                None if call.parent is None else keys[call.parent],
                call.begin - first,
                call.end - first,
                call.input_size,
                call.output_size,
                call.input_bytes,
                call.output_bytes,
                call.training,
                call.finished,
            )
            for call in calls
            if id(call.module) in names
        ]


class TracedSave(NamedTuple):
    """A tensor that autograd saves.

    Attributes:
        row: key of the module call in which it is saved; None outside of the model.
        storage: the identity of its storage; -1 if it is not followed.
        at: number of the operator that runs next.
    """

    row: CallKey | None
    storage: int
    at: int


class Storage(NamedTuple):
    """A storage.

    Attributes:
        identity: the number by which ``reads`` and ``makes`` of an ``OperatorRun`` name it.
        nbytes: size in bytes.
        kind: ``"params"``, ``"buffers"``, ``"inputs"``, ``"grads"``, ``"optimizer_state"``; ``"activations"`` for what
            is kept for the backward, ``"temporary"`` for the rest.
        born: number of the operator that made it, below 0 if it was made before the step.
        died: number of the operator before which it was freed; None if it outlived the step.
        is_saved: whether it is kept for the backward.
        row: key of the module call that saved it first, not of the one that made it; None outside of the model.
    """

    identity: int
    nbytes: int
    kind: str
    born: int
    died: int | None
    is_saved: bool
    row: CallKey | None


def storages_of(allocations: Iterable[Allocation], keys: Mapping[Call, CallKey], begin: int) -> list[Storage]:
    """Return allocations as plain data; operators count from ``begin``."""
    return [
        Storage(
            id(allocation),
            allocation.nbytes,
            allocation.category,
            allocation.born - begin,
            None if allocation.died is None else allocation.died - begin,
            allocation.is_saved,
            None if allocation.saved_in is None else keys[allocation.saved_in],
        )
        for allocation in allocations
    ]


BEFORE_THE_STEP = ("params", "buffers", "inputs")  # kinds of what exists before the first operator


def bytes_alive(storages: Iterable[Storage | Allocation], n_operators: int) -> list[int]:
    """Return the number of bytes alive while each operator runs, its results included."""
    changes = [0] * (n_operators + 1)
    for storage in storages:
        changes[max(storage.born, 0)] += storage.nbytes
        if storage.died is not None:
            changes[max(storage.died, 0)] -= storage.nbytes
    return list(accumulate(changes))[:n_operators]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One observed step.

    Attributes:
        train: whether it has a backward.
        device: device whose kernels were chosen.
        execution: ``"shape"`` or ``"real"``.
        notes: assumptions.
        calls: module calls of the last forward, in the order in which they began.
        operators: runs of the operators, each with its phase and the call it belongs to.
        level: what was noted of operators: see ``Level``.
        phases: name and number of the first operator of each phase.
        storages: empty if they were not followed.
        clones: number of an operator -> bytes of the matrices that it copies.
        held_after_forward: bytes alive at the end of the forward.
        optimizer: class name of the optimizer, or None.
        failed: the innermost call that raised and the calls around it, innermost first; empty if none did.
        n_in_other_threads: calls of modules in other threads, whose operators were not observed.
        tensors: name of each parameter and buffer, tied ones under all their names -> identity of its storage; empty if
            storages were not followed.
        results: identities of the storages of the model's result, likewise.
        read: identities of the storages whose elements Python got without an operator, as ``tolist()`` does, likewise.
        without_gradient: names of the trained parameters that got no gradient.
        graphs: numbers of the first operator of each compiled graph of the forward, and of the first one after it; None
            if the model is not compiled.
        fused: the same of the compiled graphs of forward and backward, whose operators the compiler fuses.
        recomputed: numbers of the operators of compiled backwards that their forwards have, too.
        saves: the tensors that autograd saves and that stay on the device, in order.
        offloaded: bytes of saved tensors that were moved to the host.
        noted: result of the function ``note`` of ``observe``.
    """

    train: bool
    device: str
    execution: str
    notes: Sequence[str]
    calls: Sequence[TracedCall]
    operators: Sequence[StepOperator]
    phases: Sequence[tuple[str, int]]
    level: Level
    storages: Sequence[Storage] = ()
    clones: Mapping[int, int] = field(default_factory=dict)
    held_after_forward: int = 0
    optimizer: str | None = None
    failed: Sequence[CallKey] = ()
    n_in_other_threads: int = 0
    tensors: Mapping[str, int] = field(default_factory=dict)
    results: frozenset[int] = frozenset()
    read: frozenset[int] = frozenset()
    without_gradient: Sequence[str] = ()
    graphs: Sequence[tuple[int, int]] | None = None
    fused: Sequence[tuple[int, int]] = ()
    recomputed: frozenset[int] = frozenset()
    saves: Sequence[TracedSave] = ()
    offloaded: int = 0
    noted: Any = None

    @cached_property
    def end_of_forward(self) -> int:
        """Number of the first operator after forward and loss."""
        return next((begin for name, begin in self.phases if name != "forward"), len(self.operators))

    @cached_property
    def storages_by_identity(self) -> Mapping[int, Storage]:
        """The storages by the number that names them."""
        return {storage.identity: storage for storage in self.storages}

    def first_call(self, fqn: str) -> TracedCall:
        """Return the first call of a module."""
        return next(call for call in self.calls if call.key == (fqn, 0))

    @property
    def saved(self) -> list[Storage]:
        """The storages that are kept for the backward, without parameters, buffers, inputs and empty ones."""
        return [
            storage
            for storage in self.storages
            if storage.is_saved and storage.kind == "activations" and storage.nbytes
        ]

"""The storages that a step keeps for its backward, and what it costs not to keep each: to make it again, or to move it.

Making one again means running the operators that wrote it, and the ones before that wrote what these read, back to
storages that are there anyway: parameters, buffers, inputs, and other storages that are kept.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

from modelsummary.capture.trace import Storage, Trace
from modelsummary.devices.device_spec import DeviceSpec
from modelsummary.devices.target import seconds_of_calls, target_of
from modelsummary.errors import InputError, is_number
from modelsummary.extras import Records
from modelsummary.layer_info import CallKey
from modelsummary.operators.operator_calls import OperatorCall, OperatorRun, TensorSpec
from modelsummary.tables import Printed, Report
from modelsummary.units import NOTHING, duration, number_of, percent, scaled

__all__ = [
    "PERSISTENT",
    "Remaking",
    "SavedStorage",
    "SavedStorages",
    "contents_read",
    "draws_random_numbers",
    "saved_of",
]

PERSISTENT = frozenset({"params", "buffers", "inputs", "optimizer_state"})
_OPTIONAL = ("To host and back", "Idle", "Share", "Written by", "Again")  # columns for wide pages
_NAMED = 2  # operators in a cell


@dataclass(frozen=True)
class SavedStorage:
    """One storage that is kept for the backward.

    Operators are given by their numbers, as in ``MemoryEstimate.timeline``.

    Attributes:
        fqn, call_index: the module call that first saved it; None outside of the model, as in the loss.
        kind: number that equal layers share.
        operator: name of the operator that wrote it last; None if none did, as the state of a generator.
        nbytes: its bytes.
        born, died: the operator that made it, and the one before which it is freed; ``died`` is None if it outlives
            the step.
        last_use, next_use: the last operator of the forward that touches it, and the first one after the forward.
        remade_by: the operators that would make it again.
        is_random: whether some of these draw random numbers, so that the state of the generator has to be kept.
        obstacle: why it cannot be made again; empty if it can.
        seconds: predicted time of ``remade_by``; None without a device, or if it cannot be made again.
        transfer_seconds: time of moving it to the host and back; None without a link.
        idle_seconds: predicted time from the end of ``last_use`` to the beginning of ``next_use``; None without a
            device. A transfer that takes longer delays the step.
    """

    fqn: str | None
    call_index: int | None
    kind: int | None
    operator: str | None
    nbytes: int
    born: int
    died: int | None
    last_use: int
    next_use: int | None
    remade_by: tuple[int, ...]
    is_random: bool
    obstacle: str
    seconds: float | None = None
    transfer_seconds: float | None = None
    idle_seconds: float | None = None


class SavedStorages(Printed, Records, tuple[SavedStorage, ...]):
    """The storages that a step keeps for its backward, in the order in which they are made.

    They print as a table with one line for equal layers.

    Attributes:
        calls: the operator calls of the step, by number.
        device: device of the predicted times; None: there are none.
        subject: the model, the sizes of its inputs and its dtype.

    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 8))
    >>> saved = Statistics(model, (256, 64)).memory().saved
    >>> [(storage.fqn, storage.nbytes, [saved.calls[index].name for index in storage.remade_by]) for storage in saved]
    ... # doctest: +NORMALIZE_WHITESPACE
    [('1', 65536, ['aten.addmm']),
     ('2', 65536, ['aten.empty_like', 'aten.bernoulli_', 'aten.div_']),
     ('3', 65536, ['aten.gelu', 'aten.mul'])]
    >>> [storage.is_random for storage in saved]
    [False, True, False]
    """

    calls: tuple[OperatorCall, ...]
    device: str | None
    subject: str

    @classmethod
    def of(
        cls,
        storages: Iterable[SavedStorage] = (),
        calls: tuple[OperatorCall, ...] = (),
        device: str | None = None,
        subject: str = "",
    ) -> SavedStorages:
        """Return storages with the operator calls of the step."""
        saved = cls(storages)
        saved.calls, saved.device, saved.subject = calls, device, subject
        return saved

    def on(self, device: DeviceSpec | torch.device | str, *, link_bandwidth: float | None = None) -> SavedStorages:
        """Return the storages with predicted times.

        Args:
            device: a ``DeviceSpec``, the name of an accelerator such as ``"A100"``, or this machine as ``calibrate``
                measured it: ``"cpu"`` or ``"cuda"``.
            link_bandwidth: bytes per second of the link to the host, in one direction. Default: no times of transfers.

        Raises:
            InputError: the device is unknown, or this machine was not calibrated; the bandwidth is not a number above
                0.

        >>> from torch import nn
        >>> from modelsummary import Statistics
        >>> saved = Statistics(nn.Sequential(nn.Linear(8, 8), nn.GELU()), (4, 8)).memory().saved
        >>> storage = saved.on("A100", link_bandwidth=25e9)[0]
        >>> storage.seconds > storage.transfer_seconds == 2 * storage.nbytes / 25e9
        True
        """
        if link_bandwidth is not None and not (is_number(link_bandwidth) and link_bandwidth > 0):
            raise InputError(f"link_bandwidth must be bytes per second above 0 or None, got {link_bandwidth!r:.80}")
        target = target_of(device)
        seconds_of = seconds_of_calls(target)
        seconds = list(map(seconds_of, self.calls))
        until = [0.0, *accumulate(seconds)]

        def priced(storage: SavedStorage) -> SavedStorage:
            is_idle = storage.next_use is not None
            return replace(
                storage,
                seconds=None if storage.obstacle else sum(seconds[index] for index in storage.remade_by),
                transfer_seconds=None if link_bandwidth is None else 2 * storage.nbytes / link_bandwidth,
                idle_seconds=until[storage.next_use] - until[storage.last_use + 1] if is_idle else None,  # type: ignore[index]
            )

        return SavedStorages.of(map(priced, self), self.calls, target.name, self.subject)

    def to_records(self) -> list[dict[str, Any]]:
        """Return one dict of plain data per storage; ``remade_by`` has the names of the operators."""
        return [
            {**vars(storage), "remade_by": [self.calls[index].name for index in storage.remade_by]} for storage in self
        ]

    def to_json(self) -> str:
        """Return the records and the device as JSON."""
        return json.dumps({"device": self.device, "saved": self.to_records()}, indent=2)

    def _report(self) -> Report:
        lines: defaultdict[Any, list[SavedStorage]] = defaultdict(list)
        for storage in self:
            names = tuple(self.calls[index].name for index in storage.remade_by)
            key = storage.kind, storage.operator, storage.nbytes, names, storage.is_random, storage.obstacle
            lines[key].append(storage)
        total = sum(storage.nbytes for storage in self)
        rows = []
        for (_, operator, nbytes, names, is_random, obstacle), storages in sorted(
            lines.items(), key=lambda line: -line[0][2] * len(line[1])
        ):
            first = storages[0]
            again = ", ".join(name.rpartition(".")[2] for name in names[-_NAMED:])
            again = f"{number_of(len(names) - _NAMED, 'operator')}, {again}" if len(names) > _NAMED else again
            cells = [
                "outside of the model" if first.fqn is None else first.fqn or "the model",
                str(len(storages)),
                operator or NOTHING,
                scaled(nbytes * len(storages), "B"),
                percent(nbytes * len(storages) / total if total else None),
                f"not: {obstacle}" if obstacle else f"{again}{' (random)' if is_random else ''}",
            ]
            if self.device is not None:
                times = (
                    first.seconds,
                    first.transfer_seconds,
                    min((storage.idle_seconds or 0.0) for storage in storages),
                )
                cells += [NOTHING if time is None else duration(1e3 * time) for time in times]
            rows.append(cells)
        headers = ["Saved in", "Places", "Written by", "Bytes", "Share", "Made again by"]
        headers += ["Again", "To host and back", "Idle"] if self.device is not None else []
        title = f"Kept for the backward of {self.subject}: {number_of(len(self), 'storage')}, {scaled(total, 'B')}"
        title += "" if self.device is None else f"; times of one place on {self.device}"
        empty = [name for index, name in enumerate(headers) if rows and all(row[index] == NOTHING for row in rows)]
        report = Report(rows, headers, "lrlrrprrr"[: len(headers)], above=[title], optional=_OPTIONAL)
        return report.leaving_out(0, *empty)


def draws_random_numbers(call: OperatorCall) -> bool:
    """Return True for an operator that draws random numbers, which attention with ``dropout_p=0.0`` does not."""
    return call.rule.is_random and call.bound.get("dropout_p") != 0.0


def saved_of(trace: Trace, kinds: Mapping[CallKey, int], subject: str) -> SavedStorages:
    """Return the storages that a step keeps for its backward.

    Args:
        trace: the step; storages were followed.
        kinds: number of the kind of each module call.
        subject: the model, the sizes of its inputs and its dtype.
    """
    remaking = Remaking(trace)
    return SavedStorages.of(
        (
            _saved_storage(storage, remaking, None if storage.row is None else kinds.get(storage.row))
            for storage in sorted(trace.saved, key=lambda storage: storage.born)
        ),
        tuple(operator.run.call for operator in trace.operators),
        subject=subject,
    )


def _saved_storage(storage: Storage, remaking: Remaking, kind: int | None) -> SavedStorage:
    remade_by, obstacle = remaking.operators_for(storage.identity)
    calls = [remaking.runs[index].call for index in remade_by]
    writer = remaking.written_last.get(storage.identity, remaking.makers.get(storage.identity))
    fqn, call_index = storage.row or (None, None)
    last_use, next_use = remaking.idle(storage)
    return SavedStorage(
        fqn,
        call_index,
        kind,
        None if writer is None else remaking.runs[writer].call.name,
        storage.nbytes,
        storage.born,
        storage.died,
        last_use,
        next_use,
        remade_by,
        any(map(draws_random_numbers, calls)),
        obstacle,
    )


class Remaking:
    """What makes each storage of a forward.

    Args:
        trace: the step; storages were followed.

    Attributes:
        runs: the operators of the step.
        end: number of the first operator after forward and loss.
        makers: storage -> the operator of the forward that made it, without views.
        writers: storage -> the operators of the forward that write into it in place, likewise.
    """

    def __init__(self, trace: Trace) -> None:
        self.runs: Sequence[OperatorRun] = [operator.run for operator in trace.operators]
        self.end = trace.end_of_forward
        self.makers: dict[int, int] = {}
        self.writers: defaultdict[int, list[int]] = defaultdict(list)
        self._kinds = {storage.identity: storage.kind for storage in trace.storages}
        self._kept = {storage.identity for storage in trace.storages if storage.is_saved or storage.kind in PERSISTENT}
        for index, run in enumerate(self.runs[: self.end]):
            if not run.is_view:
                for storage in run.writes:
                    self.writers[storage].append(index)
                for storage in set(run.makes).difference(run.reads):
                    self.makers.setdefault(storage, index)

    @cached_property
    def _touched(self) -> Mapping[int, Sequence[int]]:
        """Storage -> the operators of the step that read or make it, also as a view."""
        touched: defaultdict[int, list[int]] = defaultdict(list)
        for index, run in enumerate(self.runs):
            for storage in {*run.reads, *run.makes}:
                touched[storage].append(index)
        return touched

    def idle(self, storage: Storage) -> tuple[int, int | None]:
        """Return the last operator of the forward that touches a storage, and the first one after the forward."""
        touched = self._touched[storage.identity]
        before = [index for index in touched if index < self.end]
        return max(before, default=max(storage.born, 0)), next((index for index in touched if index >= self.end), None)

    @cached_property
    def written_last(self) -> dict[int, int]:
        """Storage -> the last operator of the forward that writes into it in place."""
        return {storage: indices[-1] for storage, indices in self.writers.items()}

    def operators_for(self, storage: int) -> tuple[tuple[int, ...], str]:
        """Return the operators that would make a storage again, in order, and the obstacle; empty if there is none."""
        chosen: set[int] = set()
        pending = [(storage, self.end)]  # as it is before an operator
        seen = set(pending)
        while pending:
            wanted, before = pending.pop()
            if wanted not in self.makers:
                return (), "no operator makes it" if wanted == storage else "a tensor that it needs is not made again"
            for index in [self.makers[wanted], *self.writers.get(wanted, ())]:
                if index >= before or index in chosen:
                    continue
                obstacle = self.obstacle(index)
                if obstacle:
                    return (), obstacle
                chosen.add(index)
                for read in contents_read(self.runs[index]).difference(self.runs[index].makes, {wanted}):
                    is_there = read in self._kept and self.written_last.get(read, -1) < index
                    if not is_there and (read, index) not in seen:
                        if self._kinds.get(read) in PERSISTENT:
                            return (), f"{self.runs[index].call.name} reads what is written later"
                        seen.add((read, index))
                        pending.append((read, index))
        return tuple(sorted(chosen)), ""

    def obstacle(self, index: int) -> str:
        """Return why an operator of the forward must not run again; empty if it may."""
        run = self.runs[index]
        if run.call.rule.is_collective:
            return f"{run.call.name} communicates"
        written = self.persistent_written(index)
        return f"{run.call.name} writes {' and '.join(sorted(written))}" if written else ""

    def persistent_written(self, index: int) -> Collection[str]:
        """Return the kinds of storages that an operator writes and that outlive the step."""
        return PERSISTENT.intersection(self._kinds.get(storage) for storage in self.runs[index].writes)


def contents_read(run: OperatorRun) -> set[int]:
    """Return the storages whose contents an operator reads; of some arguments, only the shape counts."""
    takes_shape = run.call.rule.overwrites and isinstance(next(iter(run.call.args), None), TensorSpec)
    return set(run.reads[1:] if takes_shape else run.reads)

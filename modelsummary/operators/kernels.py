"""``Kernel``: the kernels that a device runs for the operators of a step, in eager mode and compiled.

Eager: each operator runs its own kernels; views and allocations run none. Attention is one fused kernel if torch's
dispatcher chose one. A recurrent layer of oneDNN or cuDNN is one kernel. The foreach kernels of torch's optimizers
update many tensors at once: on accelerators, equal operators of an optimizer's step are one kernel, also if the model
is compiled, as ``torch.compile(model)`` leaves the optimizer as it is.

Compiled: an element-wise operator, cast, copy, normalisation or reduction joins the Triton kernel that made its input,
if that covers the same number of elements; what follows a reduction row by row joins, too. Intermediate results are
then never written. Products, convolutions and attention stay kernels of their own, as in torch.compile's default mode;
the bias of a convolution is added by the kernel behind it, and images are in channels last where Inductor decides so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import prod
from typing import Any, NamedTuple

import torch

from modelsummary.errors import InputError
from modelsummary.layer_info import CallKey
from modelsummary.operators.inductor import padded, prefers_channels_last
from modelsummary.operators.operator_calls import OperatorCall, OperatorRun, specs_in
from modelsummary.operators.operator_work import POINTWISE, Work, is_innermost, work_of

__all__ = [
    "MODES",
    "Kernel",
    "Launches",
    "StepOperator",
    "Timing",
    "WorkFormats",
    "check_mode",
    "kernels_of",
    "launches_of",
    "one_kernel_of",
    "readers_of",
]

MODES = ("eager", "compiled")
_FUSES = POINTWISE | {"norm", "softmax", "reduction"}
_OPENS = _FUSES | {"pool"}  # a window reads elements several times, so what it reads is written first
_LEAST_ROWS = 256  # Inductor computes a reduction to fewer elements in two kernels, as units would be idle otherwise
Timing = Callable[[Work, OperatorCall | None], tuple[float | None, str]]  # seconds of a kernel, and their source
WorkFormats = Callable[[OperatorCall, tuple[Work, ...]], tuple[Work, ...]]  # of a call: the kernels for other formats
_TENSORS_PER_KERNEL = 48  # of a foreach kernel: as many as fit into the arguments of one launch


def check_mode(mode: str) -> None:
    """Raise ``InputError`` for an unknown mode."""
    if mode not in MODES:
        raise InputError(f"mode must be 'eager' or 'compiled', got {mode!r}")


class StepOperator(NamedTuple):
    """One operator of a step.

    Attributes:
        run: the run of its operator call.
        phase: ``"forward"``, ``"backward"`` or ``"step"``.
        row: FQN and call index of the module call that it belongs to; None outside of the model.
    """

    run: OperatorRun
    phase: str
    row: CallKey | None


@dataclass(frozen=True)
class Kernel:
    """One kernel that a device runs.

    Attributes:
        work: what it computes: operator or fused operators, class, dtype, sizes, operations and bytes.
        phase: ``"forward"``, ``"backward"`` or ``"step"``.
        row: FQN and call index of the module call that it belongs to; None outside of the model.
        n_operators: number of eager operators that it runs; 0 for all but the first kernel of an operator.
        call: the operator call, if this is the first kernel of a single call; else None.
        seconds: predicted or measured time; None without a device.
        source: source of ``seconds``: ``"measured"``, ``"interpolated"`` or ``"fit"``.
    """

    work: Work
    phase: str
    row: CallKey | None
    n_operators: int = 1
    call: OperatorCall | None = None
    seconds: float | None = None
    source: str = ""

    @property
    def fqn(self) -> str | None:
        """The FQN of the module that it belongs to; ``""`` is the model, None outside of the model."""
        return None if self.row is None else self.row[0]

    @property
    def name(self) -> str:
        """The name of the operator and what distinguishes the kernel, or the names of the fused operators."""
        return self.work.name

    @property
    def op_class(self) -> str:
        """The operator class; ``modelsummary.operators.operator_work`` lists them."""
        return self.work.op_class

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which it computes."""
        return self.work.dtype

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of its class, listed in ``modelsummary.operators.operator_work``."""
        return self.work.sizes

    @property
    def flops(self) -> int:
        """Twice its multiply-adds."""
        return self.work.flops

    @property
    def moved_bytes(self) -> int:
        """The bytes that it reads and writes."""
        return self.work.nbytes

    def to_record(self) -> dict[str, Any]:
        """Return the attributes as plain data, with the time in microseconds."""
        fqn, index = self.row or (None, None)
        return {
            "fqn": fqn,
            "call_index": index,
            "phase": self.phase,
            "name": self.name,
            "op_class": self.op_class,
            "dtype": str(self.dtype).removeprefix("torch."),
            "sizes": list(self.sizes),
            "flops": self.flops,
            "moved_bytes": self.moved_bytes,
            "n_operators": self.n_operators,
            "microseconds": None if self.seconds is None else 1e6 * self.seconds,
            "source": self.source,
        }


def one_kernel_of(call: OperatorCall) -> Work:
    """Return the work of an operator call as one kernel, as on a CPU, with the class of its largest part."""
    parts = work_of(call)
    if len(parts) < 2:
        return parts[0] if parts else Work(call.name, "other", torch.float32, (0,), 0, 0)
    largest = max(parts, key=lambda part: (part.flops, part.nbytes))
    cost = call.cost
    moved = cost.bytes_read + cost.bytes_written
    flops = sum(part.flops for part in parts)
    return Work(
        call.name, largest.op_class, largest.dtype, largest.sizes, flops, moved, is_backward=largest.is_backward
    )


def kernels_of(
    operators: Sequence[StepOperator],
    mode: str = "eager",
    *,
    foreach: bool = False,
    whole_calls: bool = False,
    timing: Timing | None = None,
    formats: WorkFormats | None = None,
) -> list[Kernel]:
    """Return the kernels of a step in the order in which they run.

    Args:
        mode: ``"eager"``; ``"compiled"``, as by ``torch.compile``; or ``"fused"``, as in Megatron: chains of
            element-wise operators are one kernel each, and so is the backward of a softmax.
        foreach: equal operators of the optimizer's step share kernels, as on accelerators.
        whole_calls: each operator call is one kernel, as on a CPU.
        timing: function that returns the seconds of a kernel and their source, from its work, and its operator call if
            it is the first kernel of one. Default: kernels without a time.
        formats: returns the kernels of an operator call as they are for tensors that are stored in another form, from
            its kernels for tensors as they are.

    Raises:
        InputError: the mode is unknown.
    """
    if mode != "fused":
        check_mode(mode)
    works: dict[int, tuple[Work, ...]] = {}
    main = [operator for operator in operators if not (foreach and operator.phase == "step")]
    for operator in operators:
        if id(operator.run.call) not in works:
            call = operator.run.call
            whole = (one_kernel_of(call),) if whole_calls and call.rule.launches_kernel else work_of(call)
            works[id(call)] = whole if formats is None else formats(call, whole)
    timing = timing or (lambda *_: (None, ""))
    if mode == "eager":
        kernels = _eager(main, works, timing)
    else:
        kernels = _fused(main, works, timing, as_inductor=mode == "compiled")
    if foreach:
        kernels += _foreach([operator for operator in operators if operator.phase == "step"], works, timing)
    return kernels


def _kernel(
    work: Work, operator: StepOperator, timing: Timing, n_operators: int = 1, call: OperatorCall | None = None
) -> Kernel:
    return Kernel(work, operator.phase, operator.row, n_operators, call, *timing(work, call))


def _kernels(operator: StepOperator, works: Iterable[Work], timing: Timing) -> list[Kernel]:
    """Return the kernels of one operator; the host dispatches the first one."""
    return [
        _kernel(work, operator, timing, 0) if index else _kernel(work, operator, timing, 1, operator.run.call)
        for index, work in enumerate(works)
    ]


def _eager(operators: Iterable[StepOperator], works: dict[int, tuple[Work, ...]], timing: Timing) -> list[Kernel]:
    return [kernel for operator in operators for kernel in _kernels(operator, works[id(operator.run.call)], timing)]


def _foreach(operators: Sequence[StepOperator], works: dict[int, tuple[Work, ...]], timing: Timing) -> list[Kernel]:
    """Return one kernel per operator of the optimizer's step, over all tensors."""
    groups: dict[str, list[tuple[Work, StepOperator]]] = {}
    for operator in operators:
        for work in works[id(operator.run.call)]:
            if sum(work.sizes) > 1:  # step counters stay on the host
                groups.setdefault(work.name, []).append((work, operator))
    kernels = []
    for name, members in groups.items():
        moved = sum(work.nbytes for work, _ in members)
        lists = [
            specs_in(operator.run.call.args[:1]) for _, operator in members
        ]  # a foreach operator takes many tensors
        numels = [sum(spec.numel for spec in specs) for specs in lists]
        elements = sum(max(*work.sizes, numel) for (work, _), numel in zip(members, numels, strict=True))
        launches = 1 + sum(max(len(specs), 1) for specs in lists) // _TENSORS_PER_KERNEL
        work = Work(f"foreach {name}", "elementwise", members[0][0].dtype, (elements,), 0, moved)
        kernels.append(_kernel(work, members[0][1], timing, launches))
    return kernels


# ------------------------------------------------------------------------------------------------- compiled


class _Group:
    """Operators that become one Triton kernel, with the bytes that it reads and writes, by storage."""

    def __init__(self, operator: StepOperator, elements: int) -> None:
        self.operator, self.elements = operator, elements
        self.names: list[str] = []
        self.classes: Counter[str] = Counter()
        self.reads: dict[int, int] = {}
        self.makes: dict[int, int] = {}
        self.inner: Counter[int] = Counter()  # storage -> operators that read it after another one here made it
        self.outer: Counter[int] = Counter()  # storage -> operators that read it as others made it
        self.rows: set[int] = set()  # elements of the results of its reductions
        self.is_turned = False  # a reduction whose elements are not next to each other has loops of its own
        self.is_sent = False  # a collective waits for it
        self.again = 0  # bytes that a reduction to few elements reads before the rest reads them
        self.dtype = torch.float32
        self.alone = 0  # bytes that the first operator moves if it stays alone
        self.is_backward = False

    def takes(self, operator: StepOperator, work: Work, elements: int) -> bool:
        """Return True if an operator that reads a result of the kernel joins it."""
        covers = elements in self.rows or (elements == self.elements and not self.is_turned)
        return covers and work.op_class in _FUSES and self.operator.phase == operator.phase and not self.is_sent

    def add(self, operator: StepOperator, work: Work) -> None:
        """Add an operator, or the bias of a convolution, to the kernel."""
        run = operator.run
        if not self.names:
            self.dtype, self.alone = work.dtype, work.nbytes
        self.names.append(work.operator.removeprefix("aten."))
        self.classes[work.op_class] += 1
        self.is_backward |= work.is_backward
        if work.op_class == "batch_norm":  # in training, statistics take passes of their own
            self.again += max(work.nbytes - run.call.cost.bytes_read - run.call.cost.bytes_written, 0)
        reads, specs = (run.makes, run.call.outputs) if work.part == "bias" else (run.reads, run.call.tensors)
        for key in set(reads):
            (self.inner if key in self.makes else self.outer)[key] += 1
        for key, spec in zip(reads, specs, strict=False):
            if key not in self.makes:
                self.reads[key] = max(self.reads.get(key, 0), spec.nbytes)
        for key, spec in zip(run.makes, run.call.outputs, strict=False):
            self.makes[key] = max(self.makes.get(key, 0), spec.nbytes)
            if work.op_class == "reduction":
                self.is_turned |= not is_innermost(run.call)
                self.rows.update([spec.numel] if spec.numel >= _LEAST_ROWS else ())

    def absorb(self, earlier: _Group) -> None:
        """Add the operators of an earlier kernel."""
        for key in self.reads.keys() & earlier.makes.keys():
            del self.reads[key]
            self.inner[key] += self.outer.pop(key)
        for mine, others in ((self.reads, earlier.reads), (self.makes, earlier.makes)):
            mine.update({key: max(size, mine.get(key, 0)) for key, size in others.items()})
        self.inner.update(earlier.inner)
        self.outer.update(earlier.outer)
        self.classes.update(earlier.classes)
        self.names = earlier.names + self.names
        self.rows |= earlier.rows
        self.is_turned |= earlier.is_turned
        self.is_backward |= earlier.is_backward
        self.again += earlier.again

    def written(self, readers: Mapping[int, int]) -> list[int]:
        """Return the storages that it writes: other kernels read them, or none, as results of the step.

        Args:
            readers: storage -> operators of the step that read it.
        """
        return [key for key in self.makes if readers[key] > self.inner[key] or not readers[key]]

    def kernel(self, readers: Mapping[int, int], timing: Timing) -> Kernel:
        """Return the kernel.

        Args:
            readers: as for ``written``.
            timing: as for ``kernels_of``.
        """
        needed = self.written(readers)
        moved = sum(self.reads.values()) + sum(self.makes[key] for key in needed)
        moved = min(moved, self.alone) if len(self.names) == 1 else moved + self.again  # one may read only a part
        precedence = ("norm", "batch_norm", "softmax", "reduction", "pool", "elementwise", "copy")
        op_class = next((op_class for op_class in precedence if self.classes[op_class]), "elementwise")
        names = list(dict.fromkeys(self.names))
        work = Work(
            " + ".join(names[:4]) + (" + ..." if len(names) > 4 else ""),
            "elementwise" if op_class in ("batch_norm", "copy") else op_class,
            self.dtype,
            (self.elements,),
            0,
            moved,
            part="triton",
            is_backward=self.is_backward,
        )
        return _kernel(work, self.operator, timing, len(self.names))


def _in_channels_last(work: Work) -> Work:
    is_convolution = work.op_class in ("conv", "depthwise")
    return work._replace(channels_last=True, is_product=False, alignment=16) if is_convolution else work


def _without_passes(parts: tuple[Work, ...]) -> tuple[Work, ...]:
    """Return the kernels of an operator; of several that can be fused, the last, which reads what the first does.

    So the backward of a softmax does not write the product whose sums it subtracts.
    """
    return parts[-1:] if all(part.op_class in _FUSES for part in parts) else parts


class _Launches:
    """The kernels of a compiled step, and which of them wait for which.

    Attributes:
        items: kernels of libraries, and groups; None where a group was absorbed by a later one.
    """

    def __init__(self) -> None:
        self.items: list[_Group | Kernel | None] = []
        self._producers: list[set[int]] = []  # direct ones
        self._first: list[int] = []  # numbers of the first and the last operator
        self._last: list[int] = []
        self._absorbed: dict[int, int] = {}
        self._writers: dict[int, int] = {}  # storage -> the kernel that wrote it last

    def index(self, index: int) -> int:
        """Return the index of the kernel that a kernel was merged into, or its own."""
        while index in self._absorbed:
            index = self._absorbed[index]
        return index

    def writers(self, storages: Iterable[int]) -> set[int]:
        """Return the indices of the kernels that wrote some storages last."""
        return {self.index(self._writers[key]) for key in storages if key in self._writers}

    def add(self, item: _Group | Kernel, number: int) -> int:
        """Add a kernel that begins with the operator of some number, and return its index."""
        self.items.append(item)
        self._producers.append(set())
        self._first.append(number)
        self._last.append(number)
        return len(self.items) - 1

    def note(self, index: int, run: OperatorRun, producers: set[int], number: int) -> None:
        """Note that a kernel runs an operator."""
        self._producers[index] |= producers - {index}
        self._last[index] = number
        self._writers.update(dict.fromkeys(run.makes, index))

    def send(self, run: OperatorRun) -> None:
        """Note a collective: the kernels that write what it reads end before it, and readers of its results wait."""
        producers = self.writers(run.reads)
        for index in producers:
            group = self.items[index]
            if isinstance(group, _Group):
                group.is_sent = True
        if producers:
            self._writers.update(dict.fromkeys(run.makes, max(producers, key=self._last.__getitem__)))

    def group_for(self, operator: StepOperator, work: Work, producers: set[int]) -> int | None:
        """Return the group that an operator joins, after merging all that it reads from; None if it joins none.

        A group that another producer waits for has to end before, so it is left out.
        """
        joined: int | None = None
        for index in sorted(producers, reverse=True):
            group = self.items[index]
            others = producers - {index} | (self._producers[joined] - {index} if joined is not None else set())
            if not isinstance(group, _Group) or not group.takes(operator, work, prod(work.sizes)):
                continue
            if any(self._waits(other, index) for other in others):
                continue
            if joined is None:
                joined = index
            else:
                self._merge(index, joined)
        return joined

    def _waits(self, index: int, producer: int) -> bool:
        """Return True if a kernel needs, directly or not, what another one makes."""
        stack, seen = [index], {index}
        while stack:
            for other in map(self.index, self._producers[stack.pop()]):
                if other == producer:
                    return True
                if other not in seen and self._last[other] > self._first[producer]:
                    seen.add(other)
                    stack.append(other)
        return False

    def _merge(self, index: int, target: int) -> None:
        earlier, later = self.items[index], self.items[target]
        assert isinstance(earlier, _Group)
        assert isinstance(later, _Group)
        later.absorb(earlier)
        self.items[index], self._absorbed[index] = None, target
        self._producers[target] = (self._producers[target] | self._producers[index]) - {index, target}
        self._first[target] = min(self._first[target], self._first[index])

    def in_order(self) -> Iterator[int]:
        """Return the indices of the kernels in an order in which each has what it reads, near to the operators'."""
        waiting = {}
        readers: dict[int, set[int]] = {}
        for index, item in enumerate(self.items):
            if item is not None:
                producers = {self.index(other) for other in self._producers[index]} - {index}
                waiting[index] = len(producers)
                for other in producers:
                    readers.setdefault(other, set()).add(index)
        ready = [index for index, count in waiting.items() if not count]
        while ready:
            index = heappop(ready)
            yield index
            for reader in readers.get(index, ()):
                waiting[reader] -= 1
                if not waiting[reader]:
                    heappush(ready, reader)


class Launches(NamedTuple):
    """The kernels of a compiled graph in the order in which they run.

    Attributes:
        positions: position of the kernel of each operator; of several, of the last one; None if it runs none.
        fused: positions of the kernels that Inductor makes.
        unwritten: storages that are made and read inside of one kernel alone.
    """

    positions: list[int | None]
    fused: frozenset[int]
    unwritten: frozenset[int]


def launches_of(operators: Sequence[StepOperator], readers: Mapping[int, int]) -> Launches:
    """Return the kernels of a compiled graph.

    Args:
        operators: operators of the graph.
        readers: storage -> operators of the step that read it.
    """
    works = {id(operator.run.call): work_of(operator.run.call) for operator in operators}
    launches, indices = _launched(operators, works, lambda *_: (None, ""))
    position_of = {index: position for position, index in enumerate(launches.in_order())}
    groups = {index: item for index, item in enumerate(launches.items) if isinstance(item, _Group)}
    written = {key for group in groups.values() for key in group.written(readers)}
    positions = [None if index is None else position_of[launches.index(index)] for index in indices]
    # An operator of several kernels counts once, so that there are no more positions than operators.
    launched = sorted({position for position in positions if position is not None})
    number_of = {position: number for number, position in enumerate(launched)}
    return Launches(
        [None if position is None else number_of[position] for position in positions],
        frozenset(number_of[position_of[index]] for index in groups if position_of[index] in number_of),
        frozenset(key for group in groups.values() for key in group.makes if key not in written),
    )


def readers_of(operators: Iterable[StepOperator]) -> Counter[int]:
    """Return storage -> operators that read it in a kernel."""
    readers: Counter[int] = Counter()
    for operator in operators:
        if operator.run.call.rule.launches_kernel:
            readers.update(set(operator.run.reads))
    return readers


def _fused(
    operators: Sequence[StepOperator], works: dict[int, tuple[Work, ...]], timing: Timing, *, as_inductor: bool
) -> list[Kernel]:
    readers, (launches, _) = readers_of(operators), _launched(operators, works, timing, as_inductor=as_inductor)
    items = (launches.items[index] for index in launches.in_order())
    return [item.kernel(readers, timing) if isinstance(item, _Group) else item for item in items if item is not None]


def _launched(
    operators: Sequence[StepOperator], works: dict[int, tuple[Work, ...]], timing: Timing, *, as_inductor: bool = True
) -> tuple[_Launches, list[int | None]]:
    """Return the kernels of a step with fused kernels, and the index of the last one of each operator.

    Args:
        as_inductor: norms, softmax, reductions and pools are fused, too, and operands have Inductor's layout.
    """
    if as_inductor:
        works = {key: tuple(map(padded, parts)) for key, parts in works.items()}
    if as_inductor and prefers_channels_last([operator.run.call for operator in operators]):
        works = {key: tuple(map(_in_channels_last, parts)) for key, parts in works.items()}
    works = {key: _without_passes(parts) for key, parts in works.items()}
    opens = _OPENS if as_inductor else POINTWISE
    launches = _Launches()
    indices: list[int | None] = [None] * len(operators)
    for number, operator in enumerate(operators):
        run = operator.run
        if run.call.rule.is_collective:
            launches.send(run)
        is_single = len(works[id(run.call)]) == 1
        for index, work in enumerate(works[id(run.call)]):
            adds_bias = work.part == "bias" and work.op_class == "elementwise"
            producers = launches.writers(run.makes if adds_bias else run.reads)
            if (is_single or adds_bias) and work.op_class in opens:
                launch = launches.group_for(operator, work, producers)
                if launch is None:
                    launch = launches.add(_Group(operator, prod(work.sizes)), number)
                group = launches.items[launch]
                assert isinstance(group, _Group)
                group.add(operator, work)
            else:
                kernel = _kernel(work, operator, timing, int(not index), None if index else run.call)
                launch = launches.add(kernel, number)
            launches.note(launch, run, producers, number)
            indices[number] = launch
    return launches, indices

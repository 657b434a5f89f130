"""``Kernel``: the kernels that a device runs for the operators of a step, in eager mode and compiled.

Eager: each operator runs its own kernels; views and allocations run none. Attention is one fused kernel if torch's
dispatcher chose one. A recurrent layer of oneDNN or cuDNN is one kernel. The foreach kernels of torch's optimizers
update many tensors at once: on accelerators, equal operators of an optimizer's step are one kernel.

Compiled: an element-wise operator, cast, copy or normalisation joins the kernel that made its input, if that kernel is
of these kinds, too, and covers the same number of elements. Intermediate results are then never written. Products,
convolutions and attention stay kernels of their own, as in torch.compile's default mode.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from modelsummary.errors import InputError
from modelsummary.layer_info import CallKey
from modelsummary.operators.operator_calls import OperatorCall, OperatorRun, specs_in
from modelsummary.operators.operator_work import POINTWISE, Work, work_of

__all__ = ["MODES", "Kernel", "StepOperator", "Timing", "check_mode", "kernels_of", "one_kernel_of"]

MODES = ("eager", "compiled")
_FUSES = POINTWISE | {"norm", "softmax", "reduction"}
Timing = Callable[[Work, OperatorCall | None], tuple[float | None, str]]  # seconds of a kernel, and their source
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
) -> list[Kernel]:
    """Return the kernels of a step in the order in which they run.

    Args:
        operators: operators of the step.
        mode: ``"eager"`` or ``"compiled"``.
        foreach: equal operators of the optimizer's step share kernels, as on accelerators.
        whole_calls: each operator call is one kernel, as on a CPU.
        timing: function that returns the seconds of a kernel and their source, from its work, and its operator call if
            it is the first kernel of one. Default: kernels without a time.

    Raises:
        InputError: the mode is unknown.
    """
    check_mode(mode)
    works: dict[int, tuple[Work, ...]] = {}
    main = [operator for operator in operators if not (foreach and operator.phase == "step")]
    for operator in operators:
        if id(operator.run.call) not in works:
            call = operator.run.call
            works[id(call)] = (one_kernel_of(call),) if whole_calls and call.rule.launches_kernel else work_of(call)
    timing = timing or (lambda *_: (None, ""))
    kernels = _fused(main, works, timing) if mode == "compiled" else _eager(main, works, timing)
    if foreach:
        kernels += _foreach([operator for operator in operators if operator.phase == "step"], works, mode, timing)
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


def _foreach(
    operators: Sequence[StepOperator], works: dict[int, tuple[Work, ...]], mode: str, timing: Timing
) -> list[Kernel]:
    """Return one kernel per operator of the optimizer's step, over all tensors; one in total when compiled."""
    groups: dict[str, list[tuple[Work, StepOperator]]] = {}
    for operator in operators:
        for work in works[id(operator.run.call)]:
            if sum(work.sizes) > 1:  # step counters stay on the host
                groups.setdefault("step" if mode == "compiled" else work.name, []).append((work, operator))
    kernels = []
    for name, members in groups.items():
        moved = sum(work.nbytes for work, _ in members)
        if mode == "compiled":  # read gradient, parameter and states once, write all but the gradient
            reads = {
                key: spec.nbytes
                for _, operator in members
                for key, spec in zip(operator.run.reads, operator.run.call.tensors, strict=False)
            }
            moved = min(moved, 2 * sum(reads.values()))
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
    """Operators that become one kernel, with the bytes that it reads and writes, by storage."""

    def __init__(self, operator: StepOperator, elements: int) -> None:
        self.operator, self.elements = operator, elements
        self.names: list[str] = []
        self.classes: Counter[str] = Counter()
        self.reads: dict[int, int] = {}
        self.makes: dict[int, int] = {}
        self.dtype = torch.float32
        self.alone = 0  # bytes that the first operator moves if it stays alone
        self.is_backward = False

    def add(self, operator: StepOperator, work: Work) -> None:
        """Add an operator to the kernel."""
        call = operator.run.call
        if not self.names:
            self.dtype, self.alone = work.dtype, work.nbytes
        self.names.append(call.name.removeprefix("aten."))
        self.classes[work.op_class] += 1
        self.is_backward |= work.is_backward
        for key, spec in zip(operator.run.reads, call.tensors, strict=False):
            if key not in self.makes:
                self.reads[key] = max(self.reads.get(key, 0), spec.nbytes)
        for key, spec in zip(operator.run.makes, call.outputs, strict=False):
            self.makes[key] = max(self.makes.get(key, 0), spec.nbytes)

    def kernel(self, needed: Callable[[int], bool], timing: Timing) -> Kernel:
        """Return the kernel; it writes only the storages that other kernels need."""
        moved = sum(self.reads.values()) + sum(size for key, size in self.makes.items() if needed(key))
        if len(self.names) == 1:  # some operators read only a part of their arguments
            moved = min(moved, self.alone)
        precedence = ("norm", "batch_norm", "softmax", "reduction", "elementwise", "copy")
        op_class = next((op_class for op_class in precedence if self.classes[op_class]), "elementwise")
        names = list(dict.fromkeys(self.names))
        work = Work(
            " + ".join(names[:4]) + (" + ..." if len(names) > 4 else ""),
            "elementwise" if op_class in ("batch_norm", "copy") else op_class,
            self.dtype,
            (self.elements,),
            0,
            moved,
            is_backward=self.is_backward,
        )
        return _kernel(work, self.operator, timing, len(self.names))


def _fused(operators: Sequence[StepOperator], works: dict[int, tuple[Work, ...]], timing: Timing) -> list[Kernel]:
    readers: Counter[int] = Counter()
    for operator in operators:
        if operator.run.call.rule.launches_kernel:
            readers.update(set(operator.run.reads))
    launches: list[_Group | Kernel] = []
    writers: dict[int, int] = {}  # storage -> index of the kernel that wrote it last
    inner_reads: Counter[tuple[int, int]] = Counter()  # (kernel, storage): reads within the kernel
    for operator in operators:
        run = operator.run
        operator_works = works[id(run.call)]
        if not operator_works:
            continue
        first = operator_works[0]
        elements = max((spec.numel for spec in (*run.call.tensors, *run.call.outputs)), default=0)
        last = max((writers[key] for key in run.reads if key in writers), default=-1)
        group = launches[last] if last >= 0 else None
        joins = (
            isinstance(group, _Group)
            and len(operator_works) == 1
            and first.op_class in _FUSES
            and group.elements == elements
            and group.operator.phase == operator.phase
        )
        if not joins:
            if len(operator_works) == 1 and first.op_class in _FUSES:
                last = len(launches)
                launches.append(_Group(operator, elements))
            else:
                launches += _kernels(operator, operator_works, timing)
                last = len(launches) - 1
        joined = launches[last]
        if isinstance(joined, _Group):
            inner_reads.update((last, key) for key in set(run.reads) if key in joined.makes)
            joined.add(operator, first)
        writers.update(dict.fromkeys(run.makes, last))

    def finished(index: int, launch: _Group | Kernel) -> Kernel:
        if isinstance(launch, Kernel):
            return launch
        return launch.kernel(lambda key: readers[key] > inner_reads[index, key] or not readers[key], timing)

    return [finished(index, launch) for index, launch in enumerate(launches)]

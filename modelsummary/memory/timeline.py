"""The memory of an observed step: bytes alive at each operator, what is kept, and the peak of each call.

Operators also allocate for themselves while they run: reordered weights, columns of images, scratch memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from modelsummary.capture.trace import BEFORE_THE_STEP, Storage, Trace, bytes_alive
from modelsummary.devices.kernel_table import table_of
from modelsummary.layer_info import CallKey
from modelsummary.memory.estimate import CATEGORIES, MemoryEstimate, TimelinePoint
from modelsummary.memory.fused_storages import storages_in_time
from modelsummary.operators.kernels import one_kernel_of
from modelsummary.operators.operator_calls import OperatorCall

__all__ = [
    "LibraryWorkspace",
    "RowMemory",
    "Workspaces",
    "by_call",
    "estimate_of",
    "is_held",
    "libraries_of",
    "library_workspaces",
    "recomputed_calls",
    "recomputed_operators",
    "timeline_of",
    "workspace_of_each",
    "workspaces_on",
]

_T = TypeVar("_T")
# torch gives cuBLAS 2 x 4 MiB + 8 x 16 KiB for each handle and stream, on Hopper 32 MiB, and cuBLASLt 1 MiB more; each
# thread has a handle of its own (aten/src/ATen/cuda/CublasHandlePool.cpp, and addmm_out_cuda_impl in
# aten/src/ATen/native/cuda/Blas.cpp).
_CUBLAS_BYTES, _CUBLAS_BYTES_ON_HOPPER, _CUBLASLT_BYTES = 2 * 2**22 + 8 * 2**14, 2**25, 2**20
# Collectives whose whole tensor gloo copies (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp).
_COPIED_BY_GLOO = frozenset(
    {
        "c10d._allgather_base_",
        "c10d._reduce_scatter_base_",
        "_c10d_functional.all_gather_into_tensor",
        "_c10d_functional.reduce_scatter_tensor",
    }
)


class Workspaces(NamedTuple):
    """Bytes that operators take for themselves.

    Attributes:
        of_call: function from an operator call to the bytes that it takes while it runs.
        products: bytes that each library of matrix products gets in a thread at its first product there, and keeps.
    """

    of_call: Callable[[OperatorCall], int]
    products: Mapping[str, int] = {}


class LibraryWorkspace(NamedTuple):
    """A workspace that a library of matrix products keeps.

    Attributes:
        library: its name.
        nbytes: number of bytes.
        begin: number of the first operator that has it.
    """

    library: str
    nbytes: int
    begin: int


@dataclass
class RowMemory:
    """Memory of one call of a module: bytes it first saved for the backward, and the most bytes alive in it."""

    activation_bytes: int = 0
    peak_bytes: int = 0


def timeline_of(trace: Trace, workspaces: Workspaces | None) -> list[TimelinePoint]:
    """Return the bytes alive while each operator of a trace runs."""
    n_operators = len(trace.operators)
    storages_by_kind: dict[str, list[Storage]] = {kind: [] for kind in CATEGORIES[:-1]}
    written, times = storages_in_time(trace)
    for storage in written:
        storages_by_kind[storage.kind].append(storage)
    alive = [
        [nbytes[time] for time in times]
        for nbytes in (bytes_alive(storages, n_operators) for storages in storages_by_kind.values())
    ]
    held = zip(*alive, _all_workspaces(trace, workspaces), strict=True)
    names = _of_each(trace, lambda call: str(call.func))
    return [
        TimelinePoint(name, None if row is None else row[0], phase, nbytes)
        for name, (_, phase, row), nbytes in zip(names, trace.operators, held, strict=True)
    ]


def _of_each(trace: Trace, function: Callable[[OperatorCall], _T]) -> list[_T]:
    """Return what a function returns for each operator of a trace, of which equal ones are one object."""
    calls = {id(run.call): run.call for run, _, _ in trace.operators}
    results = {key: function(call) for key, call in calls.items()}
    return [results[id(run.call)] for run, _, _ in trace.operators]


def _all_workspaces(trace: Trace, workspaces: Workspaces | None) -> list[int]:
    """Return the bytes of workspaces while each operator runs; libraries have theirs since an earlier step."""
    kept = sum(workspace.nbytes for workspace in library_workspaces(trace, workspaces))
    return [nbytes + kept for nbytes in workspace_of_each(trace, workspaces)]


def library_workspaces(trace: Trace, workspaces: Workspaces | None) -> list[LibraryWorkspace]:
    """Return the workspaces that libraries of matrix products keep, in the order in which they get them.

    Autograd runs the backward in a thread of its own, which has its own handles and workspaces.
    """
    if workspaces is None or not workspaces.products:
        return []
    first: dict[tuple[str, bool], int] = {}
    for index, (libraries, (_, phase, _)) in enumerate(
        zip(_of_each(trace, libraries_of), trace.operators, strict=True)
    ):
        for library in libraries:
            first.setdefault((library, phase == "backward"), index)
    return [LibraryWorkspace(library, workspaces.products[library], index) for (library, _), index in first.items()]


def libraries_of(call: OperatorCall) -> tuple[str, ...]:
    """Return the libraries that get a workspace for an operator: cuBLASLt for a product that adds a row, too."""
    if call.func is None or one_kernel_of(call).op_class != "gemm":
        return ()
    bound = call.bound
    if call.rule.facts.multiplies != "matrices" or "mat1" not in bound:
        return ("cuBLAS",)
    row, matrix = bound["self"], bound["mat2"]
    adds_row = row.shape == matrix.shape[1:] and min(matrix.shape) > 1 and bound["beta"] == 1
    return ("cuBLAS", "cuBLASLt") if adds_row else ("cuBLAS",)


def workspace_of_each(trace: Trace, workspaces: Workspaces | None) -> list[int]:
    """Return the bytes that each operator takes while it runs; 0 if they are not known."""
    if workspaces is None:
        return [0] * len(trace.operators)
    spaces = _of_each(trace, workspaces.of_call)
    for index, nbytes in trace.clones.items():
        spaces[index] = max(nbytes, spaces[index])
    return spaces


def estimate_of(trace: Trace, workspaces: Workspaces | None) -> MemoryEstimate:
    """Return the memory of a step."""
    timeline = timeline_of(trace, workspaces)

    def total(kind: str) -> int:
        return sum(storage.nbytes for storage in trace.storages if storage.kind == kind)

    return MemoryEstimate(
        mode="compiled" if trace.graphs is not None else "train" if trace.train else "inference",
        device=trace.device,
        optimizer=trace.optimizer,
        params=total("params"),
        buffers=total("buffers"),
        grads=sum(storage.nbytes for storage in trace.storages if storage.kind == "grads" and storage.died is None),
        optimizer_state=total("optimizer_state"),
        inputs=total("inputs"),
        activations=total("activations"),
        held_after_forward=trace.held_after_forward,
        peak=max((point.total for point in timeline), default=trace.held_after_forward),
        timeline=timeline,
        recomputed_macs=sum(call.cost.macs for call in recomputed_calls(trace)),
        offloaded=trace.offloaded,
        execution=trace.execution,
        notes=list(trace.notes),
        graphs=[
            sum(storage.nbytes for storage in trace.saved if begin <= storage.born < end)
            for begin, end in trace.graphs or ()
        ],
    )


def recomputed_operators(trace: Trace) -> list[int]:
    """Return the numbers of the operators of the forward that run again in the backward, views included.

    A checkpoint stops as soon as it has all that the backward needs, so what follows in its region is not run again.
    """
    if trace.graphs is not None:
        return sorted(trace.recomputed)
    backward = [index for index, operator in enumerate(trace.operators) if operator.phase == "backward"]
    if backward and trace.operators[backward[0]].run.call.name == "aten.ones_like":
        del backward[0]  # the gradient of the loss, made with gradients enabled
    return [index for index in backward if trace.operators[index].run.with_grad]


def recomputed_calls(trace: Trace) -> list[OperatorCall]:
    """Return the operator calls that are made again in the backward, views included."""
    return [trace.operators[index].run.call for index in recomputed_operators(trace)]


def is_held(storage: Storage, trace: Trace) -> bool:
    """Return True for a storage that is alive when the forward and the loss have ended, whatever holds it."""
    end = trace.end_of_forward
    return storage.born < end and (storage.died is None or storage.died > end)


def by_call(trace: Trace, workspaces: Workspaces | None) -> dict[CallKey, RowMemory]:
    """Return the memory of each module call: bytes it saved first, and the most bytes alive in it."""
    saved: defaultdict[CallKey | None, int] = defaultdict(int)
    for storage in trace.saved:
        saved[storage.row] += storage.nbytes
    alive = bytes_alive(trace.storages, len(trace.operators))
    held = [sum(parts) for parts in zip(alive, _all_workspaces(trace, workspaces), strict=True)]
    before = _bytes_before(trace)
    return {
        call.key: RowMemory(saved[call.key], max(held[call.begin : call.end], default=before[call.begin]))
        for call in trace.calls
    }


def _bytes_before(trace: Trace) -> list[int]:
    """Return the bytes that storages take between each operator and the one before it."""
    allocated_bytes = [0] * (len(trace.operators) + 1)
    for storage in trace.storages:
        if storage.born >= 0 and storage.kind not in BEFORE_THE_STEP:
            allocated_bytes[storage.born] += storage.nbytes
    alive = bytes_alive(trace.storages, len(allocated_bytes))
    return [nbytes - new for nbytes, new in zip(alive, allocated_bytes, strict=True)]


# ------------------------------------------------------------------------------------------ workspaces


def workspaces_on(device: torch.device) -> Workspaces:
    """Return the workspaces of operators on a device; 0 where nothing is known.

    On a device of this machine that was calibrated they are measured. On CUDA, matrix products share workspaces that
    torch gives to cuBLAS and cuBLASLt. In a process group, collectives on the CPU have the copies of gloo.
    """
    products = {"cuBLAS": _cublas(device), "cuBLASLt": _CUBLASLT_BYTES} if device.type == "cuda" else {}
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        return Workspaces(lambda _: 0, products)
    table = table_of(device)
    has_gloo = device.type == "cpu" and torch.distributed.is_available() and torch.distributed.is_initialized()
    if not table.entries:
        return Workspaces(_gloo if has_gloo else lambda _: 0, products)

    def workspace(call: OperatorCall) -> int:
        if has_gloo and call.name in _COPIED_BY_GLOO:
            return _gloo(call)
        if call.func is None or not call.rule.launches_kernel:
            return 0
        return table.workspace(call.key, one_kernel_of(call)) or 0

    return Workspaces(workspace, products)


def _gloo(call: OperatorCall) -> int:
    if call.name not in _COPIED_BY_GLOO:
        return 0
    return max(spec.nbytes for spec in (*call.tensors, *call.outputs))


def _cublas(device: torch.device) -> int:
    """Return the bytes that torch gives to cuBLAS; of a device that is not there, the ones of most architectures."""
    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability(device) == (9, 0)
    return _CUBLAS_BYTES_ON_HOPPER if is_hopper else _CUBLAS_BYTES

"""What operators allocate for themselves while they run: reordered weights, columns of images, scratch memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from modelsummary.devices.kernel_table import table_of
from modelsummary.operators.kernels import whole_call
from modelsummary.operators.operator_calls import OperatorCall
from modelsummary.operators.operator_work import is_free

__all__ = ["workspaces_on"]

# torch gives cuBLAS 2 x 4 MiB + 8 x 16 KiB for each handle and stream (aten/src/ATen/cuda/CublasHandlePool.cpp).
_CUBLAS_BYTES = 2 * 2**22 + 8 * 2**14


# Collectives whose whole tensor gloo copies (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp).
_COPIED_BY_GLOO = frozenset(
    {
        "c10d._allgather_base_",
        "c10d._reduce_scatter_base_",
        "_c10d_functional.all_gather_into_tensor",
        "_c10d_functional.reduce_scatter_tensor",
    }
)


def workspaces_on(device: torch.device) -> Callable[[OperatorCall], int]:
    """Return a function from an operator call to the bytes of its workspace, 0 where nothing is known.

    On a device of this machine that was calibrated it is measured; of a CUDA device that is not there, matrix products
    have the workspace that torch gives to cuBLAS. In a process group, collectives on the CPU have the copies of gloo.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        return _cublas
    if device.type not in ("cpu", "cuda"):
        return lambda _: 0
    table = table_of(device)
    has_gloo = device.type == "cpu" and torch.distributed.is_available() and torch.distributed.is_initialized()
    if not table.entries:
        return _gloo if has_gloo else lambda _: 0

    def workspace(call: OperatorCall) -> int:
        if has_gloo and call.name in _COPIED_BY_GLOO:
            return _gloo(call)
        return 0 if call.func is None or is_free(call) else table.workspace(call.key, whole_call(call)) or 0

    return workspace


def _gloo(call: OperatorCall) -> int:
    if call.name not in _COPIED_BY_GLOO:
        return 0
    return max(spec.nbytes for spec in (*call.tensors, *call.outputs))


def _cublas(call: OperatorCall) -> int:
    return _CUBLAS_BYTES if call.func is not None and whole_call(call).op_class == "gemm" else 0

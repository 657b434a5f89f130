"""What operators allocate for themselves while they run: reordered weights, columns of images, scratch memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from modelsummary.costs.kernel_table import table_of
from modelsummary.costs.kernels import whole_call
from modelsummary.costs.operator_calls import OperatorCall
from modelsummary.costs.operator_work import is_free

__all__ = ["workspaces_on"]

# torch gives cuBLAS 2 x 4 MiB + 8 x 16 KiB for each handle and stream (aten/src/ATen/cuda/CublasHandlePool.cpp).
_CUBLAS_BYTES = 2 * 2**22 + 8 * 2**14


def workspaces_on(device: torch.device) -> Callable[[OperatorCall], int] | None:
    """Return what tells the workspace of an operator call in bytes; None where nothing is known.

    On a device of this machine that was calibrated it is measured; of a CUDA device that is not there, matrix products
    have the workspace that torch gives to cuBLAS.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        return _cublas
    if device.type not in ("cpu", "cuda"):
        return None
    table = table_of(device)
    if not table.entries:
        return None

    def workspace(call: OperatorCall) -> int:
        return 0 if call.func is None or is_free(call) else table.workspace(call.key, whole_call(call)) or 0

    return workspace


def _cublas(call: OperatorCall) -> int:
    return _CUBLAS_BYTES if call.func is not None and whole_call(call).op_class == "gemm" else 0

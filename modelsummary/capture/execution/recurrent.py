"""Recurrent layers on shapes as their device runs them.

The CPU runs ``nn.LSTM`` as one fused oneDNN kernel per layer and direction, CUDA all of them as one operator of cuDNN
for all layers. Torch does not choose these kernels for tensors with a Python dispatch. It would run the steps of the
sequence one by one and keep other tensors for the backward. See ``RNN.cpp``, ``mkldnn/RNN.cpp`` and ``cudnn/RNN.cpp``
in ``aten/src/ATen/native``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from modelsummary import _torch
from modelsummary._torch import TorchDispatchMode, disable_current_modes
from modelsummary.capture.execution.shape_tensor import ShapeTensor

__all__ = ["fused_recurrent"]

_KERNEL = torch.ops.aten.mkldnn_rnn_layer.default
_LSTM = 2  # ideep::rnn_kind::LSTM
_PAGE = 4096  # sections of a workspace are rounded up to a multiple of it
_MOST_ELEMENTS = 2**22  # limit for asking the kernel, which has to run, about the workspace of a sequence


_CUDNN = {"rnn_relu": (0, 1), "rnn_tanh": (1, 1), "lstm": (2, 4), "gru": (3, 3)}  # cuDNN's mode, and gates


@contextmanager
def fused_recurrent(*, is_absent: bool = False) -> Iterator[None]:
    """Return a context for a shape-only run in which recurrent layers keep the tensors that their kernels keep.

    Args:
        is_absent: the CPU stands for an absent CUDA device.
    """
    functions = {name: getattr(_torch.VF, name) for name in _CUDNN}

    def lstm(*args: Any) -> Any:
        fused = len(args) == 9 and type(args[0]) is ShapeTensor and _is_fused(*args[:3])
        return _layers(*args) if fused else functions["lstm"](*args)

    with ExitStack() as stack:
        if not is_absent:
            stack.enter_context(_Workspaces())  # type: ignore[no-untyped-call]
            stack.enter_context(_torch.swapped(_torch.VF, "lstm", lstm))
        for name in _CUDNN if is_absent else ():
            stack.enter_context(_torch.swapped(_torch.VF, name, partial(_in_cudnn, name, functions[name])))
        yield


def _in_cudnn(name: str, original: Callable[..., Any], *args: Any) -> Any:
    """Return what a recurrent function returns on CUDA; packed sequences, whose steps are values, run step by step."""
    if type(args[0]) is not ShapeTensor or not isinstance(args[3], bool):
        return original(*args)
    x, states, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first = args
    hx, cx = states if name == "lstm" else (states, None)
    if torch.is_autocast_enabled("cpu"):  # cuDNN's operator runs in the dtype of autocast
        dtype = torch.get_autocast_dtype("cpu")
        x, hx, *weights = (tensor.to(dtype) for tensor in (x, hx, *weights))
        cx = None if cx is None else cx.to(dtype)
    mode, gates = _CUDNN[name]
    hidden = weights[0].shape[0] // gates
    projected = hx.shape[2] if hx.shape[2] != hidden else 0
    n_weights = (4 if has_biases else 2) + bool(projected)
    output, hy, cy, *_ = torch.ops.aten._cudnn_rnn.default(
        x, list(weights), n_weights, None, hx, cx, mode, hidden, projected, num_layers, batch_first, dropout, train,
        bidirectional, [], None,
    )  # fmt: skip
    return (output, hy) if cx is None else (output, hy, cy)


def _is_fused(x: Tensor, states: Sequence[Tensor], weights: Any) -> bool:
    """Return ``use_mkldnn`` of RNN.cpp: False for projections and packed sequences, which run step by step."""
    if not isinstance(weights, (list, tuple)) or not _torch.is_onednn_enabled() or not x.numel():
        return False
    is_supported = x.dtype is torch.float32 or (
        x.dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    on_cpu = all(tensor.device.type == "cpu" for tensor in (x, *states, *weights))
    return is_supported and on_cpu and states[0].size(2) == states[1].size(2)


def _layers(
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, hidden and cell state as ``mkldnn_rnn`` computes them around its kernel."""
    x = (x.transpose(0, 1) if batch_first else x).contiguous()
    n_weights = 4 if has_biases else 2
    directions = 2 if bidirectional else 1
    last: list[tuple[Tensor, Tensor]] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            own_weights = list(weights[index * n_weights : (index + 1) * n_weights])
            own_weights += [torch.zeros_like(weight) for weight in own_weights] if not has_biases else []
            initial_states = [state[index].contiguous() for state in states]
            output, hidden, cell, _ = _KERNEL(
                x, *own_weights, *initial_states, direction == 1, [], _LSTM, states[0].size(2), num_layers, has_biases,
                bidirectional, batch_first, train,
            )  # fmt: skip
            outputs.append(output)
            last.append((hidden, cell))
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and train and layer < num_layers - 1:
            x = torch.dropout(x, dropout, train)
    hiddens, cells = (torch.stack(parts) for parts in zip(*last, strict=True))
    return x.transpose(0, 1) if batch_first else x, hiddens, cells


class _Workspaces(TorchDispatchMode):
    """A mode that gives the kernel's result on shapes the workspace of the real kernel."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not _KERNEL or not torch.is_grad_enabled():
            return out
        length, batch, features = args[0].shape
        nbytes = _workspace_bytes(length, batch, features, args[10], args[0].dtype)
        return (*out[:3], torch.empty(nbytes, dtype=torch.uint8, device=args[0].device))


def _workspace_bytes(length: int, batch: int, features: int, hidden: int, dtype: torch.dtype) -> int:
    """Return the bytes of the kernel's workspace: measured, or extrapolated for long sequences.

    The size is linear in the length except for rounding.
    """
    longest = max(_MOST_ELEMENTS // (batch * (features + 4 * hidden)), 8)
    if length <= longest:
        return _asked(length, batch, features, hidden, dtype)
    few = longest // 8
    less, most = (_asked(steps, batch, features, hidden, dtype) for steps in (few, longest))
    slope = (most - less) / (longest - few)
    return -(-int(most + slope * (length - longest)) // _PAGE) * _PAGE


@lru_cache
def _asked(length: int, batch: int, features: int, hidden: int, dtype: torch.dtype) -> int:
    with disable_current_modes(), _torch.DisableTorchFunction():
        gates = 4 * hidden
        shapes = [(length, batch, features), (gates, features), (gates, hidden), (gates,), (gates,)]
        tensors = [torch.zeros(shape, dtype=dtype) for shape in [*shapes, (batch, hidden), (batch, hidden)]]
        with torch.enable_grad():
            out = _KERNEL(*tensors, False, [], _LSTM, hidden, 1, True, False, False, True)
    workspace: Tensor = out[3]
    return workspace.nbytes

"""Recurrent layers: as one operator of oneDNN or cuDNN, and on accelerators as one kernel of cuDNN per layer call."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor

from modelsummary.layer_info import CallKey
from modelsummary.operators.kernels import Kernel, Timing
from modelsummary.operators.operator_calls import OperatorCall
from modelsummary.operators.operator_rules import op_rule
from modelsummary.operators.operator_work import Work, work
from modelsummary.operators.shape_rules import new_contiguous
from modelsummary.operators.table import Arguments, Count, register

__all__ = ["join_recurrent"]


def _steps(call: Arguments) -> Count:
    return prod(call["input"].shape[:-1])


def _layer(call: Arguments) -> Count:
    """Count one layer in one direction; the input is (time, batch, features), two weights hold all gates."""
    weights = ("weight0", "weight1") if "weight0" in call else ("weight1", "weight2")
    return _steps(call) * sum(call[name].numel() for name in weights)


def _layers(call: Arguments) -> Count:
    """Count all layers and directions: every weight matrix at every time step, without the biases (1-d)."""
    return _steps(call) * sum(weight.numel() for weight in call["weight"] if weight.dim() == 2)


def _kernels(call: OperatorCall, bound: Arguments) -> list[Work]:
    hidden = call.outputs[0].shape[-1] if call.outputs else 1
    steps, batch, features = bound["input"].shape
    return [work(call, "rnn", (steps, batch, features, hidden))]


def _kernels_of_layers(call: OperatorCall, bound: Arguments) -> list[Work]:
    """Return one kernel for all layers and directions, which run their steps one after the other.

    The input is (time, batch, features), (batch, time, features), or packed: (elements of all steps, features).
    """
    *sizes, features = bound["input"].shape
    steps = len(bound["batch_sizes"]) or sizes[int(bound["batch_first"])]
    batch = -(-prod(sizes) // max(steps, 1))
    all_steps = steps * bound["num_layers"] * _directions(bound)
    return [work(call, "rnn", (all_steps, batch, features, bound["hidden_size"]))]


def _directions(call: Arguments) -> int:
    return 2 if call["bidirectional"] else 1


register("aten", "mkldnn_rnn_layer", macs=_layer, kernels=_kernels)
# two products per product of the forward: the kernel always computes all gradients
register("aten", "mkldnn_rnn_layer_backward", macs=lambda call: 2 * _layer(call), kernels=_kernels)
register("aten", "_cudnn_rnn miopen_rnn", macs=_layers, kernels=_kernels_of_layers)


_KEPT = {0: 1, 1: 1, 2: 5, 3: 4}  # by cuDNN's mode: RNN with ReLU or tanh, LSTM, GRU: gates and states of a step


def _of_cudnn(out: Any, *args: Any) -> tuple[Tensor, ...]:
    """Return the results of cuDNN's recurrent layers, with what they keep for the backward.

    The meta kernel keeps nothing. cuDNN keeps the gates and the state of each step of each layer, and what layers pass
    on to the next one. Its buffer of weights takes no bytes: ``nn.RNNBase`` holds its weights on CUDA in one piece.
    """
    call = op_rule(torch.ops.aten._cudnn_rnn.default).signature.bind(args, {})
    result, hidden, cell = out[:3]
    if call["batch_first"] and not call["batch_sizes"]:
        result = result.transpose(0, 1).contiguous().transpose(0, 1)
    reserve = 0
    if call["train"]:
        passed_on = (call["num_layers"] - 1) * result.numel()
        reserve = passed_on + call["num_layers"] * _KEPT[call["mode"]] * _elements_of_states(call, result)
    buffer = call["weight_buf"]
    kept = result.new_empty(reserve * result.element_size(), dtype=torch.uint8)
    return result, hidden, cell, kept, result.new_empty(0) if buffer is None else buffer


def _elements_of_states(call: Arguments, result: Tensor) -> int:
    """Return the number of elements in the states of one layer after all steps, before they are projected."""
    return int(prod(result.shape[:-1]) * _directions(call) * call["hidden_size"])


def _gradients(*args: Any) -> tuple[Any, ...]:
    """Return the gradients of cuDNN's recurrent layers: of the input, the states and the weights."""
    call = op_rule(torch.ops.aten._cudnn_rnn_backward.default).signature.bind(args, {})
    *mask, trains_weights = call["output_mask"]
    wanted = zip(("input", "hx", "cx"), mask, strict=True)
    gradients = [_gradient(call[name]) if is_wanted else None for name, is_wanted in wanted]
    return *gradients, [_gradient(weight) for weight in call["weight"] if trains_weights]


def _gradient(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else new_contiguous(tensor.shape, tensor.dtype)


register("aten", "_cudnn_rnn", overload="default", result=_of_cudnn)
register("aten", "_cudnn_rnn_backward", macs=lambda call: 2 * _layers(call), kernels=_kernels_of_layers)
register("aten", "_cudnn_rnn_backward", overload="default", shape=_gradients)


def join_recurrent(kernels: Iterable[Kernel], layers: Collection[str], timing: Timing) -> list[Kernel]:
    """Join the kernels of each call of a recurrent layer into one, in the forward and in the backward."""
    groups: dict[tuple[str, CallKey], list[Kernel]] = {}
    order: list[Kernel | list[Kernel]] = []
    for kernel in kernels:
        if kernel.row is None or kernel.row[0] not in layers or kernel.phase == "step":
            order.append(kernel)
            continue
        group = groups.setdefault((kernel.phase, kernel.row), [])
        if not group:
            order.append(group)
        group.append(kernel)
    return [_joined(entry, timing) if isinstance(entry, list) else entry for entry in order]


def _joined(group: list[Kernel], timing: Timing) -> Kernel:
    """Return one kernel with the work of a group; it reads weights once instead of at each step."""
    products = [product for product in group if product.op_class in ("gemm", "rnn")]
    largest = max(products or group, key=lambda kernel: kernel.flops)
    moved = sum(product.moved_bytes for product in {product.sizes: product for product in products}.values())
    moved += sum(_written_bytes(product) for product in products)
    steps = sum(product.sizes[0] if product.op_class == "rnn" else 1 for product in products)
    batch, *features = largest.sizes[1:] if largest.op_class == "rnn" else _per_step(products)
    sizes = (steps, batch, *features)
    work = Work("recurrent layer", "rnn", largest.dtype, sizes, sum(kernel.flops for kernel in group), moved)
    seconds, source = timing(work, None)
    return Kernel(work, largest.phase, largest.row, 1, None, seconds, source)


def _written_bytes(kernel: Kernel) -> int:
    if kernel.op_class == "rnn":
        steps, batch, _, hidden = kernel.sizes
        return steps * batch * hidden * kernel.dtype.itemsize
    batch, m, n, _ = kernel.sizes
    return batch * m * n * kernel.dtype.itemsize


def _per_step(products: list[Kernel]) -> tuple[int, int, int]:
    """Return batch, and inputs and outputs of the product that most steps repeat."""
    if not products:
        return 1, 1, 1
    _, m, n, k = min(products, key=lambda product: product.flops).sizes
    return m, k, n

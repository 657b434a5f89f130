"""Recurrent layers: as one operator of oneDNN or cuDNN, and on accelerators as one kernel of cuDNN per layer call."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import prod

from modelsummary.layer_info import CallKey
from modelsummary.operators.kernels import Kernel, Timing
from modelsummary.operators.operator_calls import OperatorCall
from modelsummary.operators.operator_work import Work, work
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


register("aten", "mkldnn_rnn_layer", macs=_layer, kernels=_kernels)
# two products per product of the forward: the kernel always computes all gradients
register("aten", "mkldnn_rnn_layer_backward", macs=lambda call: 2 * _layer(call), kernels=_kernels)
register("aten", "_cudnn_rnn miopen_rnn", macs=_layers, kernels=_kernels)


def join_recurrent(kernels: Iterable[Kernel], layers: Collection[str], timing: Timing) -> list[Kernel]:
    """Join the kernels of each call of a recurrent layer into one, in the forward and in the backward.

    Args:
        kernels: kernels of a step.
        layers: FQNs of the recurrent layers.
        timing: as for ``kernels_of``.
    """
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

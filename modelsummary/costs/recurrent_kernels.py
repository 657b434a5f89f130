"""Recurrent layers as accelerators run them: one kernel of cuDNN per layer call, where the CPU runs each step alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from modelsummary.costs.kernels import Kernel, Timing
from modelsummary.costs.operator_work import Work

__all__ = ["join_recurrent"]


def join_recurrent(kernels: Iterable[Kernel], layers: Collection[str], timing: Timing) -> list[Kernel]:
    """Join the kernels of each call of a recurrent layer into one, in the forward and in the backward.

    Args:
        kernels: kernels of a step.
        layers: FQNs of the recurrent layers.
        timing: as for ``kernels_of``.
    """
    groups: dict[tuple[str, tuple[str, int]], list[Kernel]] = {}
    order: list[Kernel | list[Kernel]] = []
    for kernel in kernels:
        if kernel.row is None or kernel.row[0] not in layers or kernel.phase == "step":
            order.append(kernel)
            continue
        group = groups.setdefault((kernel.phase, kernel.row), [])
        if not group:
            order.append(group)
        group.append(kernel)
    return [_joined(each, timing) if isinstance(each, list) else each for each in order]


def _joined(group: list[Kernel], timing: Timing) -> Kernel:
    """Return one kernel with the work of a group; it reads weights once instead of at each step."""
    products = [each for each in group if each.op_class in ("gemm", "rnn")]
    largest = max(products or group, key=lambda each: each.flops)
    moved = sum(each.moved_bytes for each in {each.sizes: each for each in products}.values())
    moved += sum(_written_bytes(each) for each in products)
    steps = sum(each.sizes[0] if each.op_class == "rnn" else 1 for each in products)
    batch, *features = largest.sizes[1:] if largest.op_class == "rnn" else _per_step(products)
    sizes = (steps, batch, *features)
    work = Work("recurrent layer", "rnn", largest.dtype, sizes, sum(each.flops for each in group), moved)
    seconds, source = timing(work, None)
    return Kernel(*work, largest.phase, largest.row, 1, None, seconds, source)


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
    _, m, n, k = min(products, key=lambda each: each.flops).sizes
    return m, k, n

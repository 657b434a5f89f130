"""The standard grid: some 650 common operator calls, from which the calls of any model are predicted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from modelsummary.operators.operator_calls import OperatorCall, OperatorLog

__all__ = ["standard_grid"]

aten = torch.ops.aten
_CONVOLUTIONS = (  # batch, image, input and output channels, kernel, stride, groups
    *[(b, 112, 32, 64, 1, 1, 1) for b in (1, 8)],
    *[(b, 224, 3, 64, 7, 2, 1) for b in (1, 8)],
    *[(b, 224, 3, 32, 3, 2, 1) for b in (1, 8)],
    *[(b, 224, 3, 96, 4, 4, 1) for b in (1, 8)],
    *[(b, 224, 3, 384, 16, 16, 1) for b in (1, 8)],
    *[(b, s, c, c, 3, 1, 1) for b in (1, 8) for s, c in ((56, 64), (28, 128), (14, 256), (7, 512))],
    *[(b, 2 * s, c, 2 * c, 3, 2, 1) for b in (1, 8) for s, c in ((28, 64), (14, 128), (7, 256))],
    *[(b, s, c, 4 * c, 1, 1, 1) for b in (1, 8) for s, c in ((56, 64), (28, 96), (14, 192), (7, 384))],
    *[(b, s, 4 * c, c, 1, 1, 1) for b in (1, 8) for s, c in ((56, 32), (28, 96), (14, 192), (7, 512))],
    *[(b, s, c, c, k, 1, c) for b in (1, 8) for k in (3, 5, 7) for s, c in ((56, 96), (28, 192), (14, 384), (7, 768))],
    *[(b, s, c, c, 3, 2, c) for b in (1, 8) for s, c in ((112, 64), (56, 128), (28, 240))],
    *[(b, s, c, c, 3, 1, c // 32) for b in (1, 8) for s, c in ((28, 256), (14, 512))],
    *[(b, s, c, 3 * c, 1, 1, 1) for b in (1, 8) for s, c in ((112, 16), (56, 24), (28, 40), (14, 80), (7, 160))],
    *[(b, s, 3 * c, c, 1, 1, 1) for b in (1, 8) for s, c in ((56, 16), (28, 24), (14, 64), (7, 112))],
    *[(b, s, c, c, k, 1, c) for b in (1, 8) for k in (3, 5) for s, c in ((112, 16), (56, 32), (28, 64), (14, 96))],
    *[(b, s, c, c, 3, 1, 1) for b in (1, 8) for s, c in ((56, 16), (28, 32), (14, 64), (7, 128))],
    *[(b, 1, c, c // 4, 1, 1, 1) for b in (1, 8) for c in (96, 480, 1152)],
    *[(b, 1, c // 4, c, 1, 1, 1) for b in (1, 8) for c in (96, 480, 1152)],
)
_LINEARS = (  # rows, inputs, outputs
    *[(m, k, n) for m in (1, 8) for k, n in ((512, 1000), (768, 768), (1280, 1000), (2048, 1000), (4096, 4096))],
    *[
        (m, k, n)
        for m in (64, 197, 512, 1576)
        for k, n in ((192, 768), (384, 384), (768, 768), (768, 3072), (3072, 768))
    ],
    *[(m, k, n) for m in (49, 196, 784) for k, n in ((64, 64), (64, 256), (256, 64), (256, 256))],
    *[(m, k, n) for m in (3136, 25088) for k, n in ((96, 96), (96, 384), (384, 96), (64, 64))],
)
_BATCHED = [
    (b, m, n, k)
    for b in (4, 12, 96)
    for m, n, k in ((64, 64, 64), (197, 197, 64), (197, 64, 197), (49, 49, 32), (16, 16, 32))
]
_ATTENTION = [
    (b, h, s, d) for b in (1, 8) for h, s, d in ((12, 128, 64), (12, 197, 64), (6, 784, 32), (3, 49, 32), (16, 512, 64))
]
_IMAGES = [(b, c, s, s) for b in (1, 8) for c, s in ((64, 112), (64, 56), (256, 28), (512, 14), (1024, 7))]
_SMALL = [(b, c, s, s) for b in (1, 8) for c, s in ((16, 112), (24, 56), (40, 28), (96, 14), (160, 7), (240, 1))]
_TOKENS = [(b, s, c) for b in (1, 8) for s, c in ((128, 768), (197, 384), (197, 3072), (784, 192), (3136, 96))]


def standard_grid() -> list[OperatorCall]:
    """Return the calls of the grid: forwards in float32.

    >>> len(standard_grid()) > 250
    True
    """
    log = OperatorLog(lambda tensor: int(getattr(tensor, "_is_weight", False)), params={1})
    for func, args in _calls():
        out = func(*args)
        log.note(func, args, {}, out)
    return list({run.call.key: run.call for run in log.runs}.values())


def _weight(*shape: int) -> Tensor:
    weight = torch.empty(shape, device="meta")
    weight._is_weight = True  # type: ignore[attr-defined]
    return weight


def _x(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def _calls() -> Iterator[tuple[Any, tuple[Any, ...]]]:
    for b, s, c, n, k, stride, groups in _CONVOLUTIONS:
        pad = k // 2 if stride != k else 0
        weight = _weight(n, c // groups, k, k)
        yield (
            aten.convolution.default,
            (_x(b, c, s, s), weight, None, [stride] * 2, [pad] * 2, [1, 1], False, [0, 0], groups),
        )
    for m, k, n in _LINEARS:
        transposed = _weight(n, k).t()
        transposed._is_weight = True  # type: ignore[attr-defined]
        yield aten.addmm.default, (_weight(n), _x(m, k), transposed)
        if m < 1000:
            yield aten.mm.default, (_x(m, k), transposed)
    for b, m, n, k in _BATCHED:
        yield aten.bmm.default, (_x(b, m, k), _x(b, k, n))
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    for b, h, s, d in _ATTENTION:
        yield attention, tuple(_x(b, h, s, d) for _ in range(3))
    for shape in _IMAGES:
        x, weight, statistic = _x(*shape), _weight(shape[1]), _x(shape[1])
        yield aten.native_batch_norm.default, (x, weight, weight, statistic, statistic, False, 0.1, 1e-5)
        for func in (aten.relu.default, aten.relu_.default, aten.silu.default, aten.hardswish.default):
            yield func, (x,)
        yield aten.add.Tensor, (x, _x(*shape))
        yield aten.add_.Tensor, (x, _x(*shape))
        yield aten.mul.Tensor, (x, _x(*shape[:2], 1, 1))
        yield aten.mean.dim, (x, [-1, -2], True)
        yield aten.cat.default, ([x, _x(*shape)], 1)
        yield aten.max_pool2d_with_indices.default, (x, [3, 3], [2, 2], [1, 1])
        yield aten.avg_pool2d.default, (x, [2, 2], [2, 2])
    yield from _calls_on_small_images()
    for tokens in _TOKENS:
        x, weight = _x(*tokens), _weight(tokens[-1])
        yield aten.native_layer_norm.default, (x, [tokens[-1]], weight, weight, 1e-5)
        yield aten.gelu.default, (x,)
        yield aten.add.Tensor, (x, _x(*tokens))
        yield aten.mul.Tensor, (x, _x(*tokens))
        yield aten.clone.default, (x.transpose(1, 2),)
        yield aten.tanh.default, (x,)
        yield aten.roll.default, (x, [1], [1])
        yield aten.pow.Tensor_Scalar, (x, 2)
        yield aten.mean.dim, (x, [-1], True)
    for b, h, s in ((1, 12, 128), (8, 12, 197), (8, 3, 784), (64, 3, 49)):
        yield aten._softmax.default, (_x(b, h, s, s), -1, False)
        yield aten.masked_fill.Scalar, (_x(b, h, s, s), torch.empty(s, s, dtype=torch.bool, device="meta"), 0.0)
    for rows, words, width in ((128, 30522, 768), (1024, 50257, 768), (512, 1000, 64)):
        yield aten.embedding.default, (_weight(words, width), torch.empty(rows, dtype=torch.long, device="meta"))


def _calls_on_small_images() -> Iterator[tuple[Any, tuple[Any, ...]]]:
    for shape in _SMALL:
        x, weight, statistic = _x(*shape), _weight(shape[1]), _x(shape[1])
        yield aten.native_batch_norm.default, (x, weight, weight, statistic, statistic, False, 0.1, 1e-5)
        for func in (aten.relu_.default, aten.silu_.default, aten.hardswish_.default, aten.hardtanh_.default):
            yield func, (x,)
        for func in (aten.sigmoid.default, aten.hardsigmoid.default, aten.gelu.default):
            yield func, (x,)
        for func in (aten.add.Tensor, aten.add_.Tensor, aten.mul.Tensor):
            yield func, (x, _x(*shape))
        yield aten.div.Tensor, (x, 2.0)
        yield aten.mean.dim, (x, [-1, -2], True)
        yield aten.cat.default, ([x, _x(*shape)], 1)
        yield aten.clone.default, (x.view(shape[0], 2, -1, *shape[2:]).transpose(1, 2),)
        yield aten.upsample_nearest2d.default, (x, [2 * shape[2]] * 2)

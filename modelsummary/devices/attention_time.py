"""Time of fused attention: blocks of threads, one per tile of queries, work through the keys in waves over the units.

The kernels have generations. FlashAttention-1, of frameworks before mid-2023 and torch 2.0 and 2.1, has much work
beside products. FlashAttention-2, of torch since 2.2, was written for the instructions of the Ampere generation, which
reach about two thirds of the peak of a newer device. FlashAttention-3 is for Hopper alone, and comes with frameworks
such as Megatron's Transformer Engine, not with torch. cuDNN has kernels for Hopper and for the Blackwell of data
centers, which torch 2.10 and later prefer there (``check_prefer_cudnn_attention`` in
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).

The shares of the peak hold for large causal attention with heads of 128: on an A100 of NVIDIA's aiconfigurator
(https://github.com/ai-dynamo/aiconfigurator), on an H100 of FlashAttention-3 (Shah et al. 2024,
https://arxiv.org/abs/2407.08608, figures 5 and 6, which also show FlashAttention-2 and cuDNN), on a B200 of
FlashAttention's own benchmarks (https://github.com/Dao-AILab/flash-attention, issue 1589 and pull request 2280).
FlashAttention-1 reaches 30 to 50 % of the peak of an A100 in the forward, and 25 to 35 % in the backward (Dao 2023,
https://arxiv.org/abs/2307.08691, section 1). Its shares are the values in these ranges that half of llm-foundry's runs
on A100s ask for. They also ask for the same speed with heads of 64 as with heads of 128: its warps wait for what they
exchange through shared memory, which grows with the head. On an H100 it runs the same instructions as FlashAttention-2,
and is taken to be as much slower as on an A100. The share of FlashAttention-3 is an estimate, too: 1.07 times the
speed of cuDNN's kernels with 8,192 tokens.

Where torch runs neither FlashAttention nor cuDNN, it takes the memory-efficient kernel of xFormers: for float32, and on
devices without cuDNN's kernel for masks and for values with heads of another size. Its float32 products are three TF32
products each (``OpMultiplyAddFastF32`` in gemm_kernel_utils.h), whatever ``allow_tf32`` is. On an A100 and 160 heads of
128 with 4,096 tokens, it reached 181 TFLOP/s in float16 and 47 in float32
(https://github.com/facebookresearch/xformers/pull/587). With torch 2.11, an H100 reaches 39 in float32, with 16 heads
of 128 and 4,096 tokens: the instructions of the Ampere generation run at a fraction of the rate of its own.

There, cuDNN's kernels take 1.6 times as long with a mask, forward and backward, and 2.1 times with dropout, in the
forward alone. Its causal kernels leave out fewer tiles than FlashAttention's: with 512, 1,024, 2,048 and 4,096 tokens
they take 0.95, 0.75, 0.66 and 0.58 of the time without a causal mask.
"""

from __future__ import annotations

from math import ceil

from modelsummary.operators.operator_work import Work

__all__ = [
    "EFFICIENT",
    "KERNELS",
    "MOST_OF_TF32",
    "attention_seconds",
    "diagonal_of",
    "efficient_share_of_tf32",
    "preferred_kernel",
    "share_of_options",
    "share_of_peak",
]

KERNELS = ("flash1", "flash2", "flash3", "cudnn", "efficient")
_TILE = 128  # queries, or keys, of one block of threads
_START = 64  # keys that a block takes as long to begin with as to work through
# FlashAttention-2 on an A100 reaches 190 TFLOP/s with heads of 64, and 225 with heads of 128 (Dao 2023,
# https://arxiv.org/abs/2307.08691, figures 4 to 6): the exponentials take as long as 26 more elements of a head.
_EXPONENTIALS, _MEASURED_HEAD = 26, 128
_BACKWARD, _BACKWARD_OF_FLASH1 = 0.86, 0.61  # of the forward's speed: A100, H100 and B200, of the sources above
# Heads above 128 leave room for smaller tiles only. Latent attention (192 for scores, 128 for values) reaches these
# shares of the speed with heads of 128, forward and backward, on an A100 with 16 to 64 heads
# (configs/system/a100_pcie.json of https://github.com/MooreThreads/SimuMax); on its B200 they are 0.81 and 0.79.
_OF_WIDE_HEADS = {False: 0.90, True: 0.81}
EFFICIENT = 0.85  # speed of the memory-efficient kernel in half precision, compared with FlashAttention-2
_OF_MASKED, _OF_DROPPING = 0.61, 0.47  # speed of cuDNN's kernels
_DIAGONAL = {"hopper": 384}  # of cuDNN's kernels
_OF_TF32 = {"ampere": 0.3, "hopper": 0.079}  # share of the TF32 peak that large float32 attention reaches
# The A100's 47 TFLOP/s are this share of the 124 that TF32 products sustain there, limited by power; it is more than a
# third, as the measurement was short.
MOST_OF_TF32 = 0.378
_SHARES = {
    "flash1": {"ampere": 0.45, "hopper": 0.24},
    "flash2": {"ampere": 0.66, "hopper": 0.35, "blackwell": 0.18},
    "flash3": {"hopper": 0.61},
    "cudnn": {"hopper": 0.59, "blackwell": 0.62},
}
_SHARES["efficient"] = {generation: EFFICIENT * share for generation, share in _SHARES["flash2"].items()}


def preferred_kernel(generation: str) -> str:
    """Return the kernels that torch prefers on devices other than GeForce cards: ``"cudnn"`` or ``"flash2"``.

    >>> preferred_kernel("hopper"), preferred_kernel("ampere")
    ('cudnn', 'flash2')
    """
    return "cudnn" if generation in _SHARES["cudnn"] else "flash2"


def share_of_peak(generation: str, kernel: str) -> float | None:
    """Return the share of the peak that large attention with heads of 128 reaches; None if it was not measured.

    >>> share_of_peak("hopper", "cudnn")
    0.59
    """
    return _SHARES[kernel].get(generation)


def efficient_share_of_tf32(generation: str) -> float | None:
    """Return the share of the TF32 peak that large float32 attention reaches; None before the Ampere generation.

    A device of a newer generation has the share of Hopper, in proportion to what FlashAttention-2 reaches.

    >>> round(156 * efficient_share_of_tf32("ampere"), 1)  # an A100, in TFLOP/s
    46.8
    """
    measured = _OF_TF32.get("ampere" if generation in ("ada", "rtx blackwell") else generation)
    if measured is None and generation in _SHARES["flash2"]:
        return _OF_TF32["hopper"] * _SHARES["flash2"][generation] / _SHARES["flash2"]["hopper"]
    return measured


def diagonal_of(generation: str) -> int | None:
    """Return the size of the tiles on the diagonal of cuDNN's causal kernels; None where it was not measured.

    >>> diagonal_of("hopper")
    384
    """
    return _DIAGONAL.get(generation)


def share_of_options(work: Work) -> float:
    """Return the share of their speed that cuDNN's kernels reach with a mask and with dropout.

    >>> import torch
    >>> share_of_options(Work("", "attention", torch.float16, (64, 512, 512, 64), 1, 0, is_masked=True))
    0.61
    """
    return (_OF_MASKED if work.is_masked else 1.0) * (_OF_DROPPING if work.drops and not work.is_backward else 1.0)


def attention_seconds(
    work: Work, rate: float, units: int, kernel: str = "flash2", diagonal: int | None = None
) -> float:
    """Return the seconds of fused attention.

    A causal kernel leaves out the tiles above the diagonal. The exponentials take as long for small heads as for large
    ones, except in FlashAttention-1, which waits for other work; heads above 128 have smaller tiles.

    Args:
        work: the kernel; its sizes are batch x heads, queries, keys, head size, and its operations are those without
            a causal mask.
        rate: operations per second of large attention with heads of 128 in the forward.
        units: units that run blocks at the same time.
        kernel: one of ``KERNELS``.
        diagonal: size of the tiles on the diagonal, of which a causal kernel computes all. Default: of the usual tiles.

    >>> from math import prod
    >>> import torch
    >>> sizes = [(64, n, n, 128) for n in (2048, 4096)]
    >>> works = [Work("", "attention", torch.float16, size, 4 * prod(size), 0) for size in sizes]
    >>> long, longer = (attention_seconds(work, 2e14, 64) for work in works)
    >>> round(longer / long, 2)  # 4 * (4096 + 64) / 4096 * 2048 / (2048 + 64)
    3.94
    """
    outer, queries, keys, head = (max(size, 1) for size in work.sizes)
    flops: float = work.flops
    length = max(queries, keys)
    pair_flops = flops / (outer * queries * keys)
    start_flops = pair_flops * min(queries, _TILE) * min(keys, _TILE) * _START / _TILE
    if work.is_causal:
        flops *= min(1.0, 0.5 + (diagonal or _TILE) / (2 * keys))
    if kernel != "flash1":
        rate *= (1 + _EXPONENTIALS / _MEASURED_HEAD) / (1 + _EXPONENTIALS / min(head, _MEASURED_HEAD))
    if head > _MEASURED_HEAD:
        rate *= _OF_WIDE_HEADS[work.is_backward]
    if work.is_backward:
        rate *= _BACKWARD_OF_FLASH1 if kernel == "flash1" else _BACKWARD
    blocks = outer * ceil(length / _TILE)
    block_flops = flops / (outer * length) * min(length, _TILE) + start_flops
    return ceil(blocks / units) * units * block_flops / rate

"""Attention, dropout and RMS norms as CUDA runs them, without a CUDA device.

Which kernel runs is what ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` says. Bytes are derived by hand: the
kernels keep query, key, value, their result, the sums of exponentials (float32, of the memory-efficient kernel for
multiples of 32 queries) and the mask that they get; blocks of memory have 512 bytes.
"""

from __future__ import annotations

from threading import Thread

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from modelsummary import Statistics
from modelsummary.capture.execution.cuda_kernels import cuda_kernels
from tests.untouched import untouched

BATCH, HEADS, LENGTH, HEAD = 2, 4, 64, 16
FLASH, EFFICIENT = ("aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_efficient_attention")
MATH = "products"


class Attention(nn.Module):
    """Attention of ``length`` positions, with a parameter as its mask if the mask learns."""

    def __init__(self, mask=None, *, learns=False, head=HEAD, of_value=None, keys=HEADS, **options):
        super().__init__()
        self.query, self.key = nn.Linear(8, HEADS * head, bias=False), nn.Linear(8, keys * head, bias=False)
        self.value = nn.Linear(8, keys * (of_value or head), bias=False)
        self.mask = nn.Parameter(mask) if learns else mask
        self.keys = keys
        self.options = options | ({"enable_gqa": True} if keys != HEADS else {})

    def forward(self, x):
        layers = ((self.query, HEADS), (self.key, self.keys), (self.value, self.keys))
        query, key, value = (layer(x).unflatten(-1, (heads, -1)).transpose(1, 2) for layer, heads in layers)
        return F.scaled_dot_product_attention(query, key, value, self.mask, **self.options)


def statistics(dtype, length=LENGTH, **options):
    mask = options.pop("mask", None)
    mask = mask.to(dtype) if mask is not None and mask.is_floating_point() else mask
    return Statistics(Attention(mask, **options).to(dtype), torch.empty(BATCH, length, 8, dtype=dtype))


def kernel_of(stats):
    kernels = [each for each in stats.kernels("A100", backward=True) if each.op_class == "attention"]
    if not kernels:
        return MATH
    forward, backward = kernels
    assert backward.name.partition(" ")[0] == forward.name.partition(" ")[0] + "_backward"
    return forward.name.partition(" ")[0]


SQUARE = torch.zeros(LENGTH, LENGTH)
KERNELS = {
    "plain": ({}, EFFICIENT, FLASH),
    "causal": ({"is_causal": True}, EFFICIENT, FLASH),
    "dropout": ({"dropout_p": 0.1}, EFFICIENT, FLASH),
    "mask of bool": ({"mask": SQUARE == 0}, EFFICIENT, EFFICIENT),
    "mask": ({"mask": SQUARE}, EFFICIENT, EFFICIENT),
    "broadcast mask": ({"mask": torch.zeros(BATCH, 1, 1, LENGTH)}, EFFICIENT, EFFICIENT),
    "mask with a gradient": ({"mask": SQUARE, "learns": True}, EFFICIENT, EFFICIENT),
    "heads of other values": ({"of_value": 8}, EFFICIENT, EFFICIENT),
    "heads of 12": ({"head": 12}, EFFICIENT, FLASH),  # 12 floats are 48 bytes; FlashAttention's heads are padded
    "heads of 6": ({"head": 6}, MATH, FLASH),
    "heads of 6 with a mask": ({"head": 6, "mask": SQUARE}, MATH, MATH),
    "heads of 264": ({"head": 264}, EFFICIENT, EFFICIENT),
}


@pytest.mark.parametrize("name", KERNELS)
def test_the_kernel_that_cuda_chooses(name):
    options, of_float, of_half = KERNELS[name]
    for dtype, expected in ((torch.float32, of_float), (torch.bfloat16, of_half), (torch.float64, MATH)):
        assert kernel_of(statistics(dtype, **options)) == expected


def test_groups_of_heads():
    assert kernel_of(statistics(torch.bfloat16, keys=2)) == FLASH
    expected = EFFICIENT if torch.__version__ >= "2.15" else MATH
    assert kernel_of(statistics(torch.float32, keys=2)) == expected


def blocks(nbytes):
    return -(-nbytes // 512) * 512


def kept(stats):
    return stats.memory(device="cuda").activations


def test_bytes_that_fused_kernels_keep():
    heads = BATCH * HEADS * LENGTH * HEAD
    # two counters of the random generator, each in a block
    efficient = blocks(4 * BATCH * HEADS * LENGTH) + 2 * 512
    assert kept(statistics(torch.float32)) == 4 * 4 * heads + efficient
    assert kept(statistics(torch.bfloat16, is_causal=True)) == 4 * 2 * heads + efficient
    # FlashAttention pads heads of 12 to 16; the result is cut back, so all it keeps is padded
    assert kept(statistics(torch.bfloat16, head=12)) == 4 * 2 * heads + efficient


@pytest.mark.parametrize("shape", [(LENGTH, LENGTH), (BATCH, 1, 1, LENGTH), (BATCH, HEADS, LENGTH, LENGTH)])
def test_bytes_of_masks(shape):
    plain = kept(statistics(torch.bfloat16, of_value=8))
    mask = torch.zeros(shape)
    # a float mask is the model's own; a mask of bool becomes a float mask
    assert kept(statistics(torch.bfloat16, of_value=8, mask=mask)) == plain
    assert kept(statistics(torch.bfloat16, of_value=8, mask=mask == 0)) == plain + blocks(2 * mask.numel())


def test_a_mask_whose_rows_are_not_aligned_is_copied_for_each_head():
    length, of_row = 50, 64  # rows of multiples of 16 elements
    plain = kept(statistics(torch.float32, length))
    for mask in (torch.zeros(length, length), torch.ones(length, length, dtype=torch.bool)):
        copied = 4 * BATCH * HEADS * length * of_row
        assert kept(statistics(torch.float32, length, mask=mask)) == plain + blocks(copied)


def test_dropout_keeps_a_byte_for_each_element():
    def kept_by(p, dtype=torch.float32, **options):
        model = nn.Sequential(nn.Linear(32, 32), nn.Dropout(p, **options), nn.Tanh()).to(dtype)
        stats = Statistics(model, torch.empty(16, 32, dtype=dtype))
        stats.memory(device="cuda")
        return stats["1"].activation_bytes

    assert kept_by(0.5) == kept_by(0.5, torch.bfloat16) == 16 * 32
    assert kept_by(0.0) == 0
    assert kept_by(0.5, torch.bfloat16, inplace=True) == 2 * 16 * 32  # no fused kernel


@pytest.mark.skipif(torch.__version__ < "2.9", reason="operators of their own before")
def test_rms_norm_keeps_its_input():
    def kept_by(weights, inputs):
        model = nn.Sequential(nn.Linear(32, 32, dtype=inputs), nn.RMSNorm(32, dtype=weights))
        stats = Statistics(model, torch.empty(16, 32, dtype=inputs))
        stats.memory(device="cuda", block_bytes=1)
        return stats["1"].activation_bytes

    rows = 2 * 4 * 16  # in float32: the scale, and a mean that the kernel on CUDA does not keep
    assert kept_by(torch.float32, torch.float32) == 4 * 16 * 32 + rows
    assert kept_by(torch.float32, torch.bfloat16) > 2 * 4 * 16 * 32  # one kernel takes one dtype


def test_attention_in_other_threads_and_after_the_context_is_as_usual():
    x = torch.rand(1, 2, 8, 4, dtype=torch.float32, requires_grad=True)
    names = []

    def note():
        names.append(type(F.scaled_dot_product_attention(x, x, x).grad_fn).__name__)

    note()
    with cuda_kernels():
        thread = Thread(target=note)
        thread.start()
        thread.join()
    note()
    assert len(set(names)) == 1
    model = Attention(SQUARE, learns=True)
    stats = Statistics(model, torch.empty(BATCH, LENGTH, 8))
    with untouched(model):
        stats.memory(device="cuda")


def test_masks_whose_rows_are_not_dense_fall_back_to_products():
    class Biased(nn.Module):
        """Attention with a bias per head, which an embedding has innermost."""

        def __init__(self, *, is_dense):
            super().__init__()
            self.bias, self.is_dense = nn.Embedding(16, 4), is_dense

        def forward(self, x):
            steps = torch.arange(16)
            bias = self.bias((steps[:, None] - steps).abs()).permute(2, 0, 1)[None].to(x.dtype)
            mask = bias.contiguous() if self.is_dense else bias
            return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    for is_dense in (True, False):
        stats = Statistics(Biased(is_dense=is_dense), torch.empty(2, 4, 16, 8, dtype=torch.bfloat16))
        names = [kernel.name for kernel in stats.kernels("H100")]
        assert any("efficient_attention" in name for name in names) is is_dense
        assert any("bmm" in name for name in names) is not is_dense

"""A shape rule gives the very shapes, strides and dtypes of torch's meta kernel, or abstains."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelsummary.capture.shape_rules import SHAPE_RULES

aten = torch.ops.aten
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=5)


def check(func, *args):
    ours = SHAPE_RULES[func](*args)
    if ours is None:
        return False
    kernels = func(*args)
    assert [(t.shape, t.stride(), t.dtype, t.device) for t in ours] == [
        (t.shape, t.stride(), t.dtype, t.device) for t in kernels
    ]
    return True


def tensor(shape, dtype, order=None):
    made = torch.empty(shape, dtype=dtype, device="meta")
    return made if order is None else made.permute([dim for dim in order if dim < len(shape)])


def is_canonical(x):
    """Contiguous, also in the strides of dimensions of size 1."""
    return x.stride() == torch.empty(x.shape, device="meta").stride()


@given(SHAPES, DTYPES, DTYPES, st.permutations(range(5)), st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_batch_norm(shape, dtype, weight_dtype, order, training, affine, tracked):
    x = tensor(shape, dtype, order)
    if x.dim() < 2 or not (training or tracked):
        return
    own = [tensor((x.shape[1],), weight_dtype)] * 2 if affine else [None, None]
    running = [tensor((x.shape[1],), weight_dtype)] * 2 if tracked else [None, None]
    used = check(aten.native_batch_norm.default, x, *own, *running, training, 0.1, 1e-5)
    assert used or dtype != torch.float32 or weight_dtype != dtype or not is_canonical(x) or x.numel() == x.shape[1]


@given(SHAPES, DTYPES, DTYPES, st.permutations(range(5)), st.integers(1, 3), st.booleans())
@settings(max_examples=200, deadline=None)
def test_layer_norm(shape, dtype, weight_dtype, order, dims, affine):
    x = tensor(shape, dtype, order)
    normalized = list(x.shape[-dims:])
    own = [tensor(normalized, weight_dtype)] * 2 if affine else [None, None]
    used = check(aten.native_layer_norm.default, x, normalized, *own, 1e-5)
    assert used or dtype != torch.float32 or affine or dims >= x.dim() or not is_canonical(x)

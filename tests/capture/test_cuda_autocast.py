"""Autocast as on CUDA, without a CUDA device. Torch's registry of kernels and its documentation are the truth."""

from __future__ import annotations

import re
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from modelsummary import Statistics
from modelsummary.capture.execution import cuda_autocast as module
from modelsummary.capture.execution.cuda_autocast import cuda_autocast

HALF = torch.float16
# Autocast on CUDA refuses binary_cross_entropy; on shapes no operator of cuDNN runs.
NOT_ON_SHAPES = {"binary_cross_entropy", "_cudnn_rnn", "cudnn_convolution", "cudnn_convolution_transpose"}
X, WEIGHT = torch.linspace(0.1, 1.0, 64, dtype=HALF).view(8, 8), torch.ones(8, 8)


def registered(key):
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    own = {name.removeprefix("aten::") for name in names if name.startswith("aten::")}
    return {name for name in own if not re.search(r"\.([Dd]imname|names_|.*_Dimname)", name)}  # of named tensors


def test_the_lists_are_the_operators_that_torch_casts_on_cuda_alone():
    listed = set(" ".join((module._IN_HALF, module._IN_FLOAT32, module._TO_FLOAT32, module._IN_WIDEST)).split())
    assert registered("AutocastCUDA") - registered("AutocastCPU") - NOT_ON_SHAPES <= listed
    assert listed <= registered("AutocastCUDA") | {"rms_norm"}  # which torch 2.11 lacks


# What "Autocast Op Reference" in torch's documentation says of CUDA.
IN_FLOAT32 = {
    "softmax": lambda: X.softmax(0),
    "log_softmax": lambda: F.log_softmax(X, -1),
    "layer_norm": lambda: F.layer_norm(X, (8,)),
    "group_norm": lambda: F.group_norm(X.view(1, 8, 8), 2),
    "exp": X.exp,
    "rsqrt": lambda: torch.rsqrt(X),
    "pow": lambda: X**2,
    "sum": X.sum,
    "sum over a dimension": lambda: X.sum(0),
    "cumsum": lambda: X.cumsum(0),
    "norm": lambda: torch.norm(X),
    "cosine_similarity": lambda: F.cosine_similarity(X, X),
    "softplus": lambda: F.softplus(X),
    "cross_entropy": lambda: F.cross_entropy(X, torch.zeros(8, dtype=torch.long)),
    "widest of addcmul": lambda: torch.addcmul(X, X, WEIGHT),
    "float64 stays": lambda: X.double().softmax(0).float(),
}
IN_HALF = {
    "linear": lambda: F.linear(X.float(), WEIGHT),
    "mv": lambda: torch.mv(WEIGHT, WEIGHT[0]),
    "lstm_cell": lambda: nn.LSTMCell(8, 8)(WEIGHT)[0],
    "attention": lambda: F.scaled_dot_product_attention(*3 * [WEIGHT.view(1, 1, 8, 8)]),
    "gelu is not cast": lambda: F.gelu(X),
    "a given dtype holds": lambda: X.float().sum(dtype=HALF),
}


@pytest.mark.parametrize("name", [*IN_FLOAT32, *IN_HALF])
def test_operators_run_in_the_dtype_of_cuda(name):
    run = IN_FLOAT32.get(name) or IN_HALF[name]
    with torch.autocast("cpu", HALF), cuda_autocast():
        assert run().dtype is (torch.float32 if name in IN_FLOAT32 else HALF)


@pytest.mark.parametrize("fails", [False, True])
def test_the_cpu_has_its_own_lists_again(fails):
    x = torch.ones(4, dtype=torch.bfloat16)
    found = {}

    def elsewhere():
        with torch.autocast("cpu", torch.bfloat16):
            found["other thread"] = x.softmax(0).dtype

    with torch.autocast("cpu", torch.bfloat16):
        before = x.softmax(0).dtype, x.exp().dtype
        try:
            with cuda_autocast():
                thread = threading.Thread(target=elsewhere)
                thread.start()
                thread.join()
                if fails:
                    raise KeyError
        except KeyError:
            pass
        assert (x.softmax(0).dtype, x.exp().dtype) == before == (torch.bfloat16, torch.bfloat16)
    assert found == {"other thread": torch.bfloat16}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device casts by itself")
def test_a_step_on_shapes():
    """On CUDA a layer norm computes in float32, so the product behind it casts its result."""
    stats = Statistics(nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4), nn.Softmax(-1)), (2, 8))
    kernels = stats.kernels("A100", autocast=HALF).to_records()
    found = [(each["op_class"], each["dtype"]) for each in kernels if each["op_class"] in ("gemm", "norm", "softmax")]
    assert found == [("gemm", "float16"), ("norm", "float32"), ("gemm", "float16"), ("softmax", "float16")]
    # saved: x in half (2 x 8), the second weight in half (16 x 4), the input of the norm in float32 (2 x 16), its mean
    # and reciprocal deviation (2 x 2), its result in half (2 x 16), and the result of softmax in float32 (2 x 4)
    memory = stats.memory(device="cuda", autocast=HALF, block_bytes=1)
    assert memory.activations == 32 + 128 + 128 + 16 + 64 + 32

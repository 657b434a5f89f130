"""What Inductor decides, compared with Inductor: the layout of convolutions, and which operators share a kernel."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from modelsummary import Statistics
from modelsummary.capture.observe import observed
from modelsummary.latency import time_plan
from modelsummary.operators.inductor import padded, prefers_channels_last
from modelsummary.operators.operator_work import Work


def layers(*shapes):
    """Return convolutions in a row: input channels, output channels, groups, size of the kernel."""
    return nn.Sequential(*(nn.Conv2d(i, o, k, padding=k // 2, groups=g) for i, o, g, k in shapes))


MODELS = {
    "plain": layers((3, 64, 1, 3), (64, 128, 1, 3), (128, 128, 1, 1)),
    "small": layers((3, 32, 1, 3), (32, 64, 1, 3)),
    "depthwise": layers((3, 96, 1, 3), (96, 96, 96, 3), (96, 192, 1, 1)),
    "grouped": layers((4, 128, 1, 3), (128, 128, 4, 3)),
    "a little grouped": layers((3, 256, 1, 7), (256, 256, 1, 7), (256, 256, 4, 1)),
    "narrowing": layers((3, 256, 1, 3), (256, 64, 1, 3)),
    "no convolution": nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 4)),
}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_layout_is_the_one_that_inductor_chooses(name, train):
    if torch.__version__ < "2.7" and name != "no convolution":
        pytest.skip("Inductor of torch 2.6 reads the sizes of weights, which make_fx does not note there")
    graph = pytest.importorskip("torch._inductor.graph")
    model = MODELS[name].train(train)
    x = torch.randn(2, 4 if name == "grouped" else 3, 8, 8)
    graph_module = make_fx(model, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    with patch.object(torch.backends.mkldnn, "is_available", lambda: False):  # with it, always channels last on a CPU
        decided = graph.GraphLowering.decide_layout_opt(graph_module, is_inference=not train)
    stats = Statistics(model, x)
    operators = observed(stats.live, time_plan(train, None, {}, stats.root, "A100")).operators
    assert prefers_channels_last([operator.run.call for operator in operators]) == decided


def test_compiled_convolutions_have_the_layout_and_no_bias_of_their_own():
    stats = Statistics(nn.Sequential(MODELS["plain"], nn.ReLU()).eval(), (2, 3, 8, 8))
    kernels = stats.kernels("A100", "compiled")
    assert [kernel.op_class for kernel in kernels] == ["conv", "elementwise"] * 3
    assert all("channels last" in kernel.name for kernel in kernels[::2])
    # the last one adds the bias and runs the activation: 2 x 128 x 8 x 8 floats in, as many out
    assert kernels[-1].moved_bytes == 2 * 4 * 2 * 128 * 64
    assert "channels last" not in stats.kernels("A100")[0].name


@given(st.tuples(*[st.integers(1, 5000)] * 3))
def test_products_are_padded_that_inductor_would_measure_on_an_a100(sizes):
    pad_mm = pytest.importorskip("torch._inductor.fx_passes.pad_mm")
    m, n, k = sizes
    with (
        patch.object(pad_mm.utils, "get_device_tflops", lambda dtype: 312),
        patch.object(pad_mm.utils, "get_gpu_dram_gbps", lambda: 1560),  # 200 FLOPs per byte
        patch.object(torch.cuda, "get_device_capability", lambda: (9, 0)),  # no rule for large k
    ):
        measured = pad_mm.is_mm_compute_bound(m, k, n, torch.bfloat16)
    work = Work("aten.mm", "gemm", torch.bfloat16, (1, m, n, k), 0, 0, alignment=2)
    assert padded(work).alignment == (16 if measured else 2)


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return F.softmax((x + self.narrow(F.gelu(self.wide(self.norm(x * 2))))).float(), -1)


class Centred(nn.Module):
    def forward(self, x):
        y = x.relu()
        return y - y.mean(1, keepdim=True)  # over elements that are not next to each other


FUSED = {
    "RMS norm, written out": (RMSNorm(), (512, 64)),
    "block": (Block(), (512, 64)),
    "chain": (nn.Sequential(nn.ReLU(), nn.Sigmoid(), nn.Linear(64, 64), nn.ReLU(), nn.Tanh()), (512, 64)),
    "mean over rows": (Centred(), (8, 512, 64)),
}


def groups_of_inductor(model, x):
    """Return how many kernels Inductor generates on a CPU, those of libraries left out; nothing is compiled."""
    scheduler = pytest.importorskip("torch._inductor.scheduler")
    counts = []

    class StopError(Exception):
        pass

    def codegen(self):
        counts.append(sum(not node.is_extern() for node in self.nodes))
        raise StopError

    torch._dynamo.reset()
    stopped = pytest.raises(Exception, match="StopError")  # dynamo raises an error of its own
    with patch.object(scheduler.Scheduler, "codegen", codegen), torch.no_grad(), stopped:
        torch.compile(model)(x)
    return counts[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", FUSED)
def test_as_many_kernels_are_generated_as_by_inductor(name):
    model, shape = FUSED[name]
    generated = [work for work in Statistics(model.eval(), shape).kernels("A100", "compiled") if "triton" in work.name]
    assert len(generated) == groups_of_inductor(model.eval(), torch.rand(shape))


class Shortcut(nn.Module):
    def __init__(self, *, waits):
        super().__init__()
        self.first, self.second = (nn.Conv2d(8, 8, 1, bias=False) for _ in range(2))
        self.waits = waits

    def forward(self, x):
        y = self.first(x).relu()
        return y + self.second(y if self.waits else x).relu()


@pytest.mark.parametrize(("waits", "generated"), [(False, 1), (True, 2)])
def test_branches_that_meet_share_a_kernel_unless_one_waits_for_the_other(waits, generated):
    kernels = Statistics(Shortcut(waits=waits).eval(), (2, 8, 4, 4)).kernels("A100", "compiled")
    triton = [kernel for kernel in kernels if "triton" in kernel.name]
    assert len(triton) == generated
    # reads both results of convolutions (2 x 8 x 16 floats each), writes the sum; or writes y as well, and reads it
    assert sum(kernel.moved_bytes for kernel in triton) == 4 * 256 * (5 if waits else 3)
    assert sum(kernel.n_operators for kernel in kernels) == 5
    assert [kernel.op_class for kernel in kernels][-1] == "elementwise"

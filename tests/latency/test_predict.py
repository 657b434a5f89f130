"""Predicted kernels and times; the models are small, and nothing depends on how fast this machine is."""

from __future__ import annotations

import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn

from modelsummary import DeviceSpec, InputError, Statistics
from modelsummary.capture.observe import observed
from modelsummary.devices.kernel_table import Entry, KernelTable, machine_of
from modelsummary.errors import NotLiveError
from modelsummary.latency import time_plan
from modelsummary.latency.grid import standard_grid
from tests.untouched import untouched


def block():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1, bias=False)
    )


def statistics():
    return Statistics(block().eval(), (2, 3, 16, 16))


def test_eager_kernels_are_those_of_the_operators():
    kernels = statistics().kernels("A100")
    assert [(each.fqn, each.op_class) for each in kernels] == [
        ("0", "conv"),
        ("1", "batch_norm"),
        ("2", "elementwise"),
        ("3", "conv"),
    ]
    assert all(each.seconds > 0 and each.source == "fit" for each in kernels)


def test_compiled_kernels_join_elementwise_work():
    eager, compiled = statistics().kernels("A100"), statistics().kernels("A100", "compiled")
    assert [each.op_class for each in compiled] == ["conv", "elementwise", "conv"]
    # reads the 2 x 8 x 16 x 16 results of the convolution and 4 x 8 figures of the norm, writes what the next one takes
    assert compiled[1].moved_bytes == 4 * (2 * 4096 + 4 * 8)
    assert compiled[1].n_operators == 2
    assert compiled.seconds < eager.seconds


class Rearranged(nn.Module):
    """An element-wise operator on each side of operators without kernels: of an allocation, and of a copy's view."""

    def forward(self, x):
        y = x * 2
        return (y + torch.empty_like(y).fill_(3)).t().reshape(-1) + 1


def test_operators_without_kernels_do_not_end_a_compiled_kernel():
    (kernel,) = Statistics(Rearranged(), (4, 8)).kernels("A100", "compiled")
    assert kernel.n_operators == 5  # mul, fill_, add, clone, add


def test_compiled_softmax_has_one_kernel_in_the_backward():
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Softmax(-1), nn.Linear(16, 4))

    def softmax_kernels(mode):
        kernels = Statistics(model, (64, 8)).kernels("A100", mode, backward=True)
        return [kernel for kernel in kernels if kernel.fqn == "1" and kernel.phase == "backward"]

    # torch writes the product of gradient and result first (aten/src/ATen/native/cuda/SoftMax.cu), Inductor does not
    assert [kernel.moved_bytes for kernel in softmax_kernels("eager")] == [3 * 64 * 16 * 4, 3 * 64 * 16 * 4]
    assert [kernel.moved_bytes for kernel in softmax_kernels("compiled")] == [3 * 64 * 16 * 4]


def test_attention_is_one_kernel():
    model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    kernels = Statistics(model, (2, 16, 64)).kernels("A100")
    (attention,) = [each for each in kernels if each.op_class == "attention"]
    assert attention.sizes == (8, 16, 16, 16)
    assert not [each for each in kernels if each.op_class == "softmax"]


def test_rows_add_up():
    stats = Statistics(block().train(), (2, 3, 16, 16))
    estimate = stats.estimate_latency("A100", backward=True, optimizer="adamw")
    assert estimate == pytest.approx(estimate.forward_ms + estimate.backward_ms + estimate.optimizer_ms)
    assert min(estimate.forward_ms, estimate.backward_ms, estimate.optimizer_ms) > 0
    assert estimate.step_ms == float(estimate)  # the whole step, not its last part
    assert stats.root.estimated_latency_ms == pytest.approx(estimate.forward_ms)
    assert stats.root.estimated_backward_latency_ms == pytest.approx(estimate.backward_ms)
    assert sum(row.self_estimated_latency_ms for row in stats.root.walk()) == pytest.approx(estimate.forward_ms)
    assert stats.root.latency_ms is None


def test_an_estimate_says_where_it_is_from():
    estimate = statistics().estimate_latency("A100", dtype=torch.float16)
    words = " ".join(str(estimate).split())
    assert words.startswith("Sequential, [2, 3, 16, 16], float16, forward, eager on A100 80GB: ")
    assert f" {float(estimate):,.4g} ms (fit: A100" in words
    assert "typical error" in repr(estimate)
    assert 0 < estimate.typical_error < 1
    loaded = pickle.loads(pickle.dumps(estimate))
    assert loaded.__dict__ == {**estimate.__dict__, "predict_on": None}  # it holds the model


class Spectrum(nn.Module):
    def forward(self, x):
        return torch.fft.rfft(x).abs()


def test_an_estimate_names_operators_of_unknown_work():
    stats = Statistics(nn.Sequential(nn.Linear(1024, 1024), Spectrum()), (1024, 1024))
    estimate = stats.estimate_latency("A100")
    assert estimate.uncounted_ops == stats.uncounted_ops == {"aten._fft_r2c": 1}
    assert " ".join(str(estimate).split()).endswith("a lower bound for aten._fft_r2c)")
    kernel = stats.kernels("A100")[1]
    assert kernel.op_class == "other"
    # reads 1024 x 1024 floats and writes 1024 x 513 complex numbers, with at most 2 TB/s
    assert kernel.moved_bytes == 4 * 1024 * 1024 + 8 * 1024 * 513
    assert kernel.seconds > kernel.moved_bytes / 2.04e12
    assert "not known" in str(stats.kernels("A100"))
    assert statistics().estimate_latency("A100").uncounted_ops == {}


MODELS = {
    "convolutions": (lambda: nn.Sequential(block(), nn.ConvTranspose2d(8, 4, 2)), (2, 3, 16, 16)),
    "encoder": (lambda: nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), (2, 16, 64)),
    "lstm": (lambda: LastOf(nn.LSTM(8, 16, 2, batch_first=True)), (2, 5, 8)),
    "bilinear": (lambda: Pair(nn.Bilinear(6, 6, 4)), (3, 6)),
}


class LastOf(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)[0]


class Pair(LastOf):
    def forward(self, x):
        return self.model(x, x)


@pytest.mark.parametrize("name", MODELS)
def test_kernels_have_the_multiply_adds_of_the_table(name):
    make, size = MODELS[name]
    for device in ("cpu", "meta"):
        stats = Statistics(make().to(device), size)
        kernels = stats.kernels("A100", backward=True)
        assert sum(each.flops for each in kernels if each.phase == "forward") == 2 * stats.root.macs
        # two products for each of the forward; the first layer needs no gradient of its input
        backward = sum(each.flops for each in kernels if each.phase == "backward")
        assert 2 * stats.root.macs <= backward <= 5 * stats.root.macs


def test_small_kernels_are_bound_by_the_host():
    estimate = statistics().estimate_latency("H100")
    assert estimate.limited_by == "host"
    # four operators of 28 us, and calls of the model and of its four modules, of 15 us each
    assert estimate == pytest.approx(4 * 28e-3 + 5 * 15e-3)
    compiled = statistics().estimate_latency("H100", "compiled")
    assert compiled.limited_by == "host"
    assert compiled == pytest.approx(3 * 38e-3)  # three kernels


def test_the_host_takes_time_for_views_nodes_and_parameters():
    class Views(nn.Module):
        def forward(self, x):
            return (x + 1).transpose(0, 1).unsqueeze(0) * 2

    views = Statistics(Views(), (2, 4)).estimate_latency("H100")
    assert views == pytest.approx(2 * 28e-3 + 2 * 6.5e-3 + 15e-3)
    step = Statistics(nn.Linear(4, 8, bias=False), (2, 4)).estimate_latency("H100", backward=True, optimizer="sgd")
    # SGD: one operator that updates the only parameter, also if the model is compiled
    assert step.optimizer_ms == pytest.approx(28e-3 + 55e-3)
    linear = Statistics(nn.Linear(4, 8, bias=False), (2, 4))
    compiled = linear.estimate_latency("H100", "compiled", backward=True, optimizer="sgd")
    kernels = linear.kernels("H100", "compiled", backward=True, optimizer="sgd")
    assert compiled.optimizer_ms == step.optimizer_ms
    # the host adds up one gradient beside the compiled kernels
    n_backward = sum(kernel.phase == "backward" for kernel in kernels)
    assert compiled.backward_ms == pytest.approx(n_backward * 38e-3 + 5e-3)
    for mode in ("eager", "compiled"):  # three launches per step of cuDNN's layer, which Inductor does not compile
        longer, shorter = (Statistics(nn.LSTM(4, 8), (n, 2, 4)).estimate_latency("H100", mode) for n in (20, 10))
        assert longer - shorter == pytest.approx(10 * 3 * 9e-3)


class Reading(nn.Module):
    """Reads the weight of a layer without calling it, as ``nn.MultiheadAttention`` does; another layer is not used."""

    def __init__(self):
        super().__init__()
        self.layer, self.unused = nn.Linear(4, 8, bias=False), nn.Linear(4, 8)

    def forward(self, x):
        return nn.functional.linear(x, self.layer.weight)


def test_the_host_updates_the_parameters_that_get_a_gradient():
    """Whoever reads them; one operator of SGD updates the only one."""
    stats = Statistics(Reading(), (2, 4))
    step = stats.estimate_latency("H100", backward=True, optimizer="sgd")
    assert step.optimizer_ms == pytest.approx(28e-3 + 55e-3)
    assert stats.root.estimated_backward_latency_ms == pytest.approx(step.backward_ms)
    called = Statistics(nn.Linear(4, 8, bias=False), (2, 4)).estimate_latency("H100", backward=True, optimizer="sgd")
    assert (step.backward_ms, step.optimizer_ms) == pytest.approx((called.backward_ms, called.optimizer_ms))


def test_switches_of_torch_decide_which_products_run_on_tensor_cores():
    model = nn.Sequential(nn.Conv2d(64, 256, 3, padding=1, device="meta"), nn.Linear(64, 4096, device="meta"))
    stats = Statistics(model, torch.empty(64, 64, 64, 64, device="meta"))

    def milliseconds():
        rows = {row.fqn: row.estimated_latency_ms for row in (stats.estimate_latency("A100"), *stats)[1:]}
        return rows["0"], rows["1"]

    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        convolution, product = milliseconds()
        torch.backends.cudnn.allow_tf32 = False
        exact = milliseconds()[0]
        assert exact > 1.5 * convolution
        assert milliseconds()[1] == product
        torch.set_float32_matmul_precision("high")
        assert milliseconds()[1] < 0.7 * product
        assert milliseconds()[0] == exact  # the switch of cuDNN is another one
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="since torch 2.9")
def test_switches_of_one_library_decide_too():
    stats = Statistics(nn.Linear(64, 4096, device="meta"), torch.empty(2**16, 64, device="meta"))
    exact, matmul = stats.estimate_latency("A100"), torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        assert stats.estimate_latency("A100") < 0.7 * exact
    finally:
        matmul.fp32_precision = before


def test_rows_take_at_least_their_time_on_the_device():
    model = nn.Sequential(*[nn.ReLU() for _ in range(100)], nn.Linear(1024, 4096, device="meta"))
    stats = Statistics(model, (512, 1024))
    estimate = stats.estimate_latency("H100")
    assert estimate.limited_by == "host"
    linear = stats.roofline("H100")[-1]
    assert linear.bound_ms > 0.05  # 2 * 512 * 1024 * 4096 FLOPs with less than 67 TFLOP/s; the host takes 8 us
    assert linear.bound_ms < linear.predicted_ms < 3 * linear.bound_ms
    assert sum(row.self_estimated_latency_ms for row in stats.root.walk()) == pytest.approx(estimate)


def test_the_model_is_untouched():
    model = block().train()
    with untouched(model):
        stats = Statistics(model, (2, 3, 16, 16))
        stats.kernels("A100", backward=True, optimizer="sgd")
        with pytest.raises(InputError, match="mode must be"):
            stats.kernels("A100", mode="fast")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("A100", "fast"), "mode must be one of 'eager', 'compiled', got 'fast'"),
        (("4090",), "the nearest are RTX 4090"),
        (("A100", "eager", 1), "backward must be True or False, got 1"),
        (("A100", "eager", False, "adamw"), "pass backward=True"),
        (("cpu",), "call calibrate"),
        (("cpu:0",), "call calibrate"),
        (("cuda:7",), "if it is available"),
        (("cuda",), "if it is available"),
    ],
)
def test_bad_input(arguments, said):
    if arguments[0].startswith("cuda") and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(InputError, match=said):
        statistics().estimate_latency(*arguments)


@pytest.mark.parametrize("option", ["dtype", "autocast"])
def test_a_device_without_bfloat16_refuses_it(option):
    said = rf"V100 with torch\.bfloat16 is not known; pass {option}= one of (torch\.float\d\d(, |$))+$"  # no tf32, int8
    with pytest.raises(InputError, match=said):
        Statistics(nn.ReLU(), (2, 2)).estimate_latency("V100", **{option: torch.bfloat16})


def test_attention_with_dropout_is_one_kernel_on_accelerators():
    model = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True).train()
    stats = Statistics(model, (2, 16, 64))
    kernels = stats.kernels("A100", backward=True)
    assert [each.phase for each in kernels if each.op_class == "attention"] == ["forward", "backward"]
    assert not [each for each in kernels if each.op_class == "softmax"]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_layer_is_one_kernel_on_accelerators(kind):
    kernels = Statistics(kind(16, 32), (5, 3, 16)).kernels("A100", backward=True, loss=lambda result: result[0].sum())
    forward, backward = (each for each in kernels if each.op_class == "rnn")
    assert (forward.phase, backward.phase) == ("forward", "backward")
    gates = 4 if kind is nn.LSTM else 3
    assert forward.flops == 2 * 5 * 3 * gates * 32 * (16 + 32)
    assert not [each for each in kernels if each.op_class == "gemm"]


def test_the_layout_of_images_is_in_the_kernel():
    x = torch.empty(2, 3, 16, 16, device="meta")
    for images in (x, x.to(memory_format=torch.channels_last)):
        first = Statistics(block().to("meta").eval(), images).kernels("A100")[0]
        assert ("channels last" in first.name) == (images is not x)


def test_unknown_options_and_dtypes():
    with pytest.raises(InputError, match=r"unknown option 'autocst' of a step; expected .*; did you mean 'autocast'"):
        statistics().estimate_latency("A100", autocst=torch.float16)
    with pytest.raises(InputError, match=r"no forward computes in 8 bits alone.*_scaled_mm"):
        statistics().estimate_latency("H100", dtype=torch.float8_e4m3fn)


def test_statistics_without_a_live_model_have_the_bound():
    stats = statistics()
    data = pickle.loads(pickle.dumps(stats))
    spec = DeviceSpec("made up", {torch.float32: 1e6}, 1e5)
    assert data.estimate_latency(spec, dtype=torch.float32) > 0
    with pytest.raises(InputError, match="pass a device name and dtype only"):
        data.estimate_latency(spec, backward=True)
    with pytest.raises(NotLiveError):
        data.kernels("A100")


def test_splits_without_a_run():
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    stats = Statistics(model, (64, 256))
    stats.estimate_latency("A100", backward=True)
    assert len(stats.split(2, by="latency").facts) == 2
    assert stats.suggest_checkpoint(10**9, by="latency").recomputed_macs == 0
    named = Statistics(model, (64, 256)).suggest_checkpoint(10**9, by="latency", device="A100")
    assert stats.suggest_checkpoint(10**9, by="latency") == named
    assert stats.roofline("A100")[0].predicted_ms == stats.root.estimated_latency_ms


def test_kernels_print_and_export():
    pandas = pytest.importorskip("pandas")
    kernels = statistics().kernels("A100")
    assert "aten.convolution" in str(kernels)
    frame = kernels.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["op_class"]) == ["conv", "batch_norm", "elementwise", "conv"]
    assert frame["microseconds"].sum() == pytest.approx(1e6 * kernels.seconds)


def test_the_standard_grid_runs_here():
    calls = standard_grid()
    assert len(calls) > 250
    assert {"conv", "depthwise", "gemm", "attention", "norm"} <= {each.name for each in ()} | {
        work.op_class for call in calls for work in _works(call)
    }


def _works(call):
    from modelsummary.operators.operator_work import work_of

    return work_of(call)


@pytest.fixture
def slow_host(monkeypatch, tmp_path):
    """Let the host of this machine take a second for an operator; kernels take none."""
    monkeypatch.setenv("MODELSUMMARY_CACHE", str(tmp_path))
    entry = Entry("other", "other", "float32", [1], 0, 4, visits=[1e-6])
    facts = {"flops_per_second": 1e15, "bytes_per_second": 1e15, "operator": 1.0}
    KernelTable(machine_of(torch.device("cpu")), {"other": entry}, facts).save()


def test_views_and_modules_take_the_time_of_the_host(slow_host):
    class Views(nn.Module):
        def forward(self, x):
            return (x + 1).transpose(0, 1).unsqueeze(0) * 2

    # two operators, two views, and the call of the module
    assert Statistics(Views(), (2, 4)).estimate_latency() == pytest.approx(5e3)
    assert Statistics(Views(), (2, 4)).estimate_latency(mode="compiled") == pytest.approx(1e3)  # one kernel


def test_a_step_takes_time_for_each_node_of_autograd(slow_host):
    stats = Statistics(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), (2, 4))
    stats.estimate_latency(backward=True)
    operators = observed(stats.live, time_plan(True, None, {}, stats.root)).operators

    def seconds_of_operators(fqn, phase):
        own = [each.run.call for each in operators if each.phase == phase and each.row == (fqn, 0)]
        return sum(call.rule.launches_kernel or call.rule.is_view for call in own)

    linear, relu = stats
    # the call, and the nodes AddmmBackward and TBackward of the weight, or ReluBackward
    assert linear.estimated_latency_ms == pytest.approx(1e3 * (seconds_of_operators("0", "forward") + 1 + 2))
    assert relu.estimated_latency_ms == pytest.approx(1e3 * (seconds_of_operators("1", "forward") + 1 + 1))
    # the same nodes, and two that add up the gradients of weight and bias
    backward_ms = [row.estimated_backward_latency_ms for row in stats]
    assert backward_ms[0] == pytest.approx(1e3 * (seconds_of_operators("0", "backward") + 2 + 2))
    assert backward_ms[1] == pytest.approx(1e3 * (seconds_of_operators("1", "backward") + 1))


def test_a_custom_function_has_a_node_without_a_backward(slow_host):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x + x

    class Model(nn.Module):
        def forward(self, x):
            return Double.apply(x)

    estimate = Statistics(Model(), (2, 4)).estimate_latency()
    assert estimate == estimate.forward_ms == pytest.approx(3e3)  # the addition, the node, and the call of the module
    assert estimate.backward_ms == 0.0


def test_autocast_to_float16_runs_recurrent_layers_that_the_cpu_cannot():
    stats = Statistics(nn.LSTM(16, 32), (5, 3, 16))
    for dtype in (torch.float16, torch.bfloat16):
        (layer,) = [each for each in stats.kernels("A100", autocast=dtype) if each.op_class == "rnn"]
        assert (layer.dtype, layer.flops) == (dtype, 2 * 5 * 3 * 4 * 32 * (16 + 32))


def test_kernels_of_attention_are_an_option():
    stats = Statistics(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval(), (2, 512, 64))
    times = [
        stats.estimate_latency("H100", autocast=torch.bfloat16, attention=kernel) for kernel in ("cudnn", "flash2")
    ]
    assert stats.estimate_latency("H100", autocast=torch.bfloat16) == times[0] <= times[1]
    with pytest.raises(InputError, match="attention='flash2' is for named devices"):
        stats.estimate_latency("cpu", attention="flash2")
    with pytest.raises(InputError, match="attention must be None or one of"):
        stats.kernels("H100", attention="flash")


def test_the_policy_of_a_segment_takes_the_time_of_the_host():
    """A segment of all layers asks as often as the module that has them."""
    parts = {"up": nn.Linear(64, 256), "act": nn.GELU(), "down": nn.Linear(256, 64)}
    stats = Statistics(nn.Sequential(nn.Sequential(OrderedDict(parts)), nn.Linear(64, 8)), (16, 64))
    kept = ("aten.addmm.default#1",)
    segment, whole, nothing = (
        stats.estimate_latency("A100", backward=True, checkpoint=checkpoint)
        for checkpoint in ({"0[0:3]": kept}, {"0": kept}, {"0": ()})
    )
    assert segment == whole
    assert whole.forward_ms > nothing.forward_ms + 4 * 0.045  # two products, two views and an activation at 45 us

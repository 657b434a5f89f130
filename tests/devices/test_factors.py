"""Factors that measurements ask for: a ridge regression by hand, and steps on a device whose factors are chosen."""

from __future__ import annotations

import pickle
from dataclasses import replace
from math import exp, log

import pytest
import torch
from torch import nn

from modelsummary import DeviceSpec, InputError, Statistics
from modelsummary.cluster import Cluster, Plan
from modelsummary.devices.factors import Factors, fitted
from modelsummary.latency import Kernels


def test_one_measurement_moves_a_factor_by_its_share_of_the_variance():
    """The spread is 0.2 and the noise 0.08: 0.04 / (0.04 + 0.0064) of a small logarithm."""
    (factor,) = fitted(lambda factors: [5.0 * factors[0]], [5.0 * exp(0.05)], [0.2], [0.0])
    assert log(factor) == pytest.approx(0.05 * 0.04 / (0.04 + 0.0064), rel=1e-3)
    close, loose = fitted(lambda factors: [factors[0] * factors[1]], [exp(0.05)], [0.1, 0.2], [0.0, 0.0])
    assert log(loose) / log(close) == pytest.approx(4, rel=1e-3)  # as their variances
    one, other = fitted(lambda factors: [factors[0]], [exp(0.05)], [0.1, 0.1], [0.2, 0.2])
    assert log(other) / log(one) == pytest.approx(0.04 / 0.05, rel=1e-3)  # as far as they have it in common


def test_one_odd_step_does_not_spoil_the_others():
    seconds = [1.1, 1.1, 1.1, 1.1, 3.0]
    (factor,) = fitted(lambda factors: [factors[0]] * 5, seconds, [0.2], [0.0])
    assert factor == pytest.approx(1.1, rel=0.02)
    (alone,) = fitted(lambda factors: [factors[0]], [3.0], [0.2], [0.0])
    assert 1.0 < alone < 1.2  # no usual machine is so slow


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.norm = nn.Linear(1024, 1024), nn.LayerNorm(1024)

    def forward(self, x):
        heads = self.mix(x).unflatten(-1, (16, 64)).transpose(1, 2)
        mixed = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(-2)
        return self.norm(mixed).mean(1)


@pytest.fixture(scope="module")
def steps():
    """Steps that differ in what they spend their time on: products, element-wise kernels, all of these."""
    models = [nn.Linear(4096, 4096), nn.Sequential(nn.LayerNorm(8192), nn.GELU()), Layer()]
    inputs = [(8192, 4096), (8192, 8192), (64, 512, 1024)]  # so large that none waits for the host
    statistics = [Statistics(model, size) for model, size in zip(models, inputs, strict=True)]
    return [stats.estimate_latency("A100", backward=True, autocast=torch.bfloat16) for stats in statistics]


def test_a_factor_multiplies_the_kernels_of_its_kind():
    kernels = Statistics(Layer(), (16, 512, 1024)).kernels("A100", autocast=torch.bfloat16)
    slow = kernels.on(DeviceSpec("A100", factors=Factors(products=2.0, attention=3.0, kernels=4.0, host=5.0)))
    expected = {"gemm": 2.0, "attention": 3.0}
    ratios = [after.seconds / before.seconds for before, after in zip(kernels, slow, strict=True)]
    assert {"gemm", "attention", "norm", "reduction"} <= {kernel.op_class for kernel in kernels}
    assert ratios == pytest.approx([expected.get(kernel.op_class, 4.0) for kernel in kernels])
    small = Statistics(nn.Linear(2, 2), (2, 2)).estimate_latency("A100")
    assert small.limited_by == "host"
    assert small.on(DeviceSpec("A100", factors=Factors(host=5.0))) == pytest.approx(5 * small)


def test_a_device_is_calibrated_by_steps(steps):
    true = DeviceSpec("A100", factors=Factors(products=1.3, kernels=1.2))
    measured = [(step, step.on(true).seconds) for step in steps]
    board = DeviceSpec("A100").calibrated(measured)
    assert board.factors.steps == 3
    assert board.factors.after < 0.2 * board.factors.before
    assert 1.2 < board.factors.products < 1.3  # held back by its spread
    assert board.factors.kernels == pytest.approx(1.2, rel=0.05)
    assert (board.factors.communication, board.factors.activations) == (1.0, 1.0)
    assert board.calibrated(measured) == board  # earlier factors are replaced
    one = DeviceSpec("A100").calibrated(measured[:1])
    for step, seconds in measured[1:]:
        assert abs(step.on(one).seconds / seconds - 1) < abs(step.seconds / seconds - 1)
    assert "calibrated with 3 measured steps" in str(steps[0].on(board))
    assert f"products         {board.factors.products:.3f}" in str(board.factors)


def test_a_device_is_calibrated_by_kernels_measured_alone():
    kernels = Statistics(nn.Linear(4096, 4096), (8192, 4096)).kernels("H100", dtype="tf32")
    board = DeviceSpec("H100").calibrated([(kernels[:1], 1.5 * kernels[0].seconds)])
    assert isinstance(kernels[:1], Kernels)
    assert kernels[:1].tf32
    assert 1.3 < kernels.on(board).seconds / kernels.seconds < 1.5


def test_right_predictions_keep_a_device_as_it_is(steps):
    factors = DeviceSpec("A100").calibrated([(step, step.seconds) for step in steps]).factors
    assert [factors.products, factors.attention, factors.kernels, factors.host] == pytest.approx([1.0] * 4)


def test_factors_of_a_cluster_come_in_addition_to_the_factors_of_its_devices():
    stats = Statistics(nn.Linear(4096, 4096), (4096, 4096))
    plan = Plan(micro_batch=4096)
    both = Cluster(DeviceSpec("A100", factors=Factors(products=1.2)), factors=Factors(products=1.5))
    together = Cluster("A100", factors=Factors(products=1.8))
    seconds = [stats.simulate(plan, cluster, 4096).step_seconds for cluster in (both, together)]
    assert seconds[0] == pytest.approx(seconds[1])


@pytest.mark.parametrize(
    "device",
    [
        DeviceSpec("A100"),
        DeviceSpec("A100", watts=300, factors=Factors(products=1.25, host=0.9, steps=2, before=0.2, after=0.01)),
        DeviceSpec("ours", {torch.bfloat16: 3e14, "tf32": 1.5e14}, 1.5e12, factors=Factors(kernels=1.1)),
        replace(DeviceSpec("H100"), achievable_flops={torch.bfloat16: 7e14}),
    ],
)
def test_a_device_is_saved(tmp_path, device):
    loaded = DeviceSpec.from_toml(device.to_toml(tmp_path / "device.toml"))
    assert loaded == device
    assert loaded.achievable_flops == device.achievable_flops
    cluster = Cluster(device, interfaces_per_node=1, link_bandwidth=1e11, memory_bytes=10**9)
    assert Cluster.from_toml(cluster.to_toml(tmp_path / "cluster.toml")) == cluster


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], r"measured must have one measurement or more, got none; pass \[\(estimate, seconds\)\]"),
        ("a step", "measured must be a list of .* got str"),
        ([(Statistics(nn.Linear(2, 2), (1, 2)), 1.0)], r"stats.estimate_latency\(...\), .* got \(Statistics, float\)"),
        ([1.0], "got float"),
    ],
)
def test_what_is_no_measurement_is_refused(entries, message):
    with pytest.raises(InputError, match=message):
        DeviceSpec("A100").calibrated(entries)


def test_unusable_measurements_and_factors_are_refused(steps, tmp_path):
    for seconds in (0, None, True, float("nan")):
        with pytest.raises(InputError, match="seconds of a measurement must be a number > 0, got"):
            DeviceSpec("A100").calibrated([(steps[0], seconds)])
    nothing = Statistics(nn.Linear(2, 2), (1, 2)).kernels("A100")[:0]
    with pytest.raises(InputError, match="measured must have predictions that take time, got one without kernels"):
        DeviceSpec("A100").calibrated([(nothing, 1.0)])
    with pytest.raises(InputError, match="the estimate was loaded without its model; call estimate_latency"):
        DeviceSpec("A100").calibrated([(pickle.loads(pickle.dumps(steps[0])), 1.0)])
    with pytest.raises(InputError, match=r"'A100 80GB': factors must be Factors\(products=1.1, ...\), got 1\.1"):
        DeviceSpec("A100", factors=1.1)
    with pytest.raises(InputError, match="factors: products must be a number > 0, got 0"):
        Factors(products=0)
    with pytest.raises(InputError, match=r"factors: steps must be an integer >= 0, got 1.5"):
        Factors(steps=1.5)
    (tmp_path / "device.toml").write_text('name = "A100"\nspeed = 2.0\n')
    with pytest.raises(InputError, match=r"device: .*'speed'"):
        DeviceSpec.from_toml(tmp_path / "device.toml")

"""Factors that measured steps ask for: steps of a cluster whose factors are chosen."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

from modelsummary import InputError, Statistics
from modelsummary.cluster import Cluster, Factors, Plan, Recipe
from modelsummary.cluster.published_errors import error_of
from modelsummary.devices.device_spec import DeviceSpec
from tests.parallel.models import OLD, Decoder

PLANS = [
    Plan(shard=16),
    Plan(tensor=2, data=8),
    Plan(tensor=2, data=8, micro_batch=2),
    Plan(pipeline=2, data=8),
    Plan(tensor=2, pipeline=2, shard=4, sharded="optimizer", checkpoint="every"),
    Plan(data=16, micro_batch=4),
]


@pytest.fixture(scope="module")
def stats():
    with torch.device("meta"):
        return Statistics(Decoder(8_000, 2048, 8), torch.zeros(1, 1024, dtype=torch.long))


@pytest.fixture(scope="module")
def cluster():
    return Cluster.preset("DGX A100", nodes=2)


@pytest.fixture(scope="module")
def steps(stats, cluster):
    return [stats.simulate(plan, cluster, 64, recipe=Recipe(kernels="eager")) for plan in PLANS]


def measured(steps, factors):
    """Return what steps would take if the factors were true."""
    real = [step.on(replace(step.cluster, factors=factors)) for step in steps]
    return [(step, other.step_seconds, other.memory_bytes) for step, other in zip(steps, real, strict=True)]


@pytest.mark.skipif(OLD, reason="the many kernels of its RMSNorm wait for launches")
def test_calibration_finds_what_slows_the_steps_down(cluster, steps):
    truth = Factors(products=1.35, communication=1.4, activations=1.2)
    for count, most in ((1, 0.12), (5, 0.03)):
        calibrated = cluster.calibrated(measured(steps[:count], truth))
        assert calibrated.factors.steps == count
        assert calibrated.factors.after < 0.3 * calibrated.factors.before
        for step, seconds, peak in measured(steps[count:], truth):
            assert abs(step.step_seconds / seconds - 1) > 0.14
            again = step.on(calibrated)
            assert abs(again.step_seconds / seconds - 1) < most
            assert abs(again.memory_bytes / peak - 1) <= abs(step.memory_bytes / peak - 1)
    assert calibrated.factors.communication > 1.15
    assert calibrated.factors.products > 1.15
    assert f"products         {calibrated.factors.products:.3f}" in str(calibrated.factors)
    assert "Fitted to 5 measured steps: mean error of their seconds" in str(calibrated.factors)


def test_right_predictions_change_nothing(cluster, steps):
    right = [(step, step.step_seconds, None) for step in steps[:3]]
    factors = cluster.calibrated(right).factors
    values = [getattr(factors, name) for name in ("products", "attention", "kernels", "communication", "activations")]
    assert values == pytest.approx([1.0] * 5)


def test_searches_and_errors_take_the_factors(stats, cluster, steps):
    calibrated = cluster.calibrated(measured(steps[:1], Factors(products=1.3)))
    plans = stats.plan(calibrated, 64, tensor=[1, 2], pipeline=[1], micro_batch=[1], checkpoint=[None])
    assert plans[0].cluster.factors == calibrated.factors
    assert plans[0].error == error_of(plans[0].case, steps=1) != error_of(plans[0].case)
    assert plans[0].memory_error == plans[0].on(cluster).memory_error


@pytest.mark.parametrize(
    "device",
    [
        "A100",
        DeviceSpec("ours", {torch.bfloat16: 3e14, "tf32": 1.5e14}, 1.5e12, memory_bytes=80 * 10**9, interconnect=6e11),
        replace(DeviceSpec("H100"), achievable_flops={torch.bfloat16: 7e14}),
    ],
)
def test_a_calibrated_cluster_is_saved(tmp_path, device):
    cluster = Cluster(device, nodes=3, network_latency=2e-5, nvlink_sharp=False, name="our nodes")
    cluster = replace(cluster, factors=Factors(products=1.25, communication=0.9, steps=2, before=0.2, after=0.01))
    loaded = Cluster.from_toml(cluster.to_toml(tmp_path / "cluster.toml"))
    assert loaded == cluster
    assert loaded.name == "our nodes"
    assert loaded.device.achievable_flops == cluster.device.achievable_flops
    plain = Cluster(device, nodes=3)
    assert Cluster.from_toml(plain.to_toml(tmp_path / "plain.toml")) == plain
    with pytest.raises(InputError, match="cannot be written"):
        cluster.to_toml(tmp_path / "missing" / "cluster.toml")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "measured must have one step or more, got none"),
        ("a step", r"measured must be a list of \(estimate, seconds, peak_bytes or None\), .* got None"),
        ([(Plan(), 1.0, None)], "with estimates of stats.simulate, got "),
        ([("step", 1.0)], "with estimates of stats.simulate, got "),
    ],
)
def test_what_is_no_measured_step_is_refused(cluster, entries, message):
    with pytest.raises(InputError, match=message):
        cluster.calibrated(entries)


def test_unusable_figures_are_refused(cluster, steps):
    with pytest.raises(InputError, match="seconds of a measured step must be a number > 0, got None"):
        cluster.calibrated([(steps[0], None, None)])
    with pytest.raises(InputError, match="peak_bytes of a measured step must be a number > 0 or None, got -1"):
        cluster.calibrated([(steps[0], 1.0, -1)])
    with pytest.raises(InputError, match="the estimate was loaded without its model; call plan or simulate"):
        cluster.calibrated([(pickle.loads(pickle.dumps(steps[0])), 1.0, None)])
    with pytest.raises(InputError, match=r"factors must be Factors, such as .* got 1\.1"):
        replace(cluster, factors=1.1)


def test_a_table_of_unknown_factors_is_refused(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text('device = "A100"\n[factors]\nspeed = 2.0\n')
    with pytest.raises(InputError, match=r"factors: .*'speed'"):
        Cluster.from_toml(path)


def test_a_model_of_one_layer_is_calibrated():
    stats, cluster = Statistics(nn.Linear(64, 64), (8, 64)), Cluster("A100")
    step = stats.simulate(Plan(micro_batch=8), cluster, 8)
    assert cluster.calibrated([(step, 2 * step.step_seconds, None)]).factors.before == pytest.approx(0.5)


def test_a_step_on_something_else_than_a_cluster(steps):
    with pytest.raises(InputError, match=r"cluster must be a Cluster, such as Cluster\.preset\(.*\), got 'H100'"):
        steps[0].on("H100")

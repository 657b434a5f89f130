from __future__ import annotations

import pytest
import torch
from torch import nn

from modelsummary import DeviceSpec, InputError, Statistics
from modelsummary.statistics import ModelStatistics
from tests.models import Call

# 1 MFLOP/s, 100 kB/s: 1,000 FLOPs and 100 B per ms
SPEC = DeviceSpec("made up", {torch.float32: 1e6, torch.float64: 5e5, "tf32": 8e6}, 1e5)


def statistics():
    # 0: 2 x (2 x 4 x 8) = 128 FLOPs; reads 8 + 32 + 8 floats and writes 16: 256 B. 1: reads and writes 16: 128 B
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    return Statistics(model, (2, 4))


def as_data(stats):
    return ModelStatistics.from_json(stats.to_json())


def test_the_bound_of_data():
    stats = as_data(statistics())
    assert stats.estimate_latency(SPEC) == pytest.approx(2.56 + 1.28)  # both wait for memory
    assert stats["0"].estimated_latency_ms == pytest.approx(2.56)
    assert stats.root.estimated_latency_ms == pytest.approx(3.84)
    assert stats.estimate_latency(DeviceSpec("slow", {torch.float32: 1.0}, 1e9)) == pytest.approx(128e3, rel=1e-6)
    assert stats.root.latency_ms is None


def test_dtype():
    stats = as_data(Statistics(nn.Sequential(nn.Linear(4, 8)).double(), (2, 4)))
    narrow = DeviceSpec("narrow", {torch.float32: 1.0, torch.float64: 0.5}, 1e9)
    assert stats.estimate_latency(narrow, dtype=torch.float64) == pytest.approx(256e3, rel=1e-3)
    assert stats.estimate_latency(narrow, dtype=torch.float32) == pytest.approx(128e3, rel=1e-3)
    with pytest.raises(InputError, match=r"with torch\.int8 is not known"):
        stats.estimate_latency(narrow, dtype=torch.int8)
    with pytest.raises(InputError, match="no accelerator 'abacus'"):
        stats.estimate_latency("abacus")


def test_roofline():
    stats = statistics()
    model, linear, relu = stats.roofline(SPEC)
    assert (linear.flops, linear.moved_bytes, linear.arithmetic_intensity) == (128, 256, 0.5)
    assert (linear.bound_ms, linear.limited_by, linear.part_of_roof) == (pytest.approx(2.56), "memory", None)
    assert relu.bound_ms == pytest.approx(1.28)
    assert model.bound_ms == pytest.approx(3.84)
    stats.root.latency_ms, stats["0"].latency_ms = 5.0, 5.12
    model, linear, relu = stats.roofline(SPEC)
    assert linear.part_of_roof == pytest.approx(0.5)
    text = str(stats.roofline(SPEC, depth=0))
    assert "Limited by" in text
    assert "76.8%" in text
    assert len(text.splitlines()) == 3
    assert text.startswith("Roofline of Sequential, [2, 4], float32, on made up: ")
    assert "Bound (ms)" in text


def test_short_times_are_printed_in_microseconds():
    # 6 floats in and 6 out at 24 GB/s take 2 ns; the identity does nothing, so nothing limits it
    model = nn.Sequential(nn.Identity(), nn.ReLU())
    roofline = Statistics(model, (2, 3)).roofline(DeviceSpec("small", {torch.float32: 1e9}, 24e9))
    _, _, whole, relu, below = str(roofline).splitlines()
    assert "Bound (us)" in str(roofline)
    assert whole.split()[:8] == ["(model)", "Sequential", "0", "48", "B", "0.00", "0.002", "memory"]
    assert relu.split()[:2] == ["1", "ReLU"]
    assert below == "Without 1 call that move nothing"


def test_functions_of_a_forward_are_counted():
    model = Call(lambda self, x: self.a(x @ x), a=nn.Identity())
    model, identity = Statistics(model, (8, 8)).roofline(SPEC)
    assert model.flops == 1024
    assert model.bound_ms == pytest.approx(max(1.024, 512 / 1e2))  # x is read once, the product written
    assert identity.bound_ms == 0


def test_split_by_an_estimate():
    model = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 4))
    stats = Statistics(model, (2, 4))
    stats.estimate_latency(SPEC)
    stages = stats.split(2, by="latency")
    assert sum(each.cost for each in stages.facts) == pytest.approx(stats.root.estimated_latency_ms / 1e3)


@pytest.mark.parametrize("device", ["A100", "H100", "RTX 4090", "MI300X"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_bound_of_a_large_model_is_below_its_prediction(device, dtype):
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(2048, 16, 8192, batch_first=True, norm_first=True, dtype=dtype)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    stats = Statistics(model, torch.empty(2, 2048, 2048, dtype=dtype, device="meta"))
    estimate = stats.estimate_latency(device)
    bounds = stats.roofline(device)
    assert 0.3 * estimate < bounds[0].bound_ms <= estimate
    products = [row for row in bounds if row.class_name == "Linear"]
    assert products
    assert all(row.bound_ms <= row.predicted_ms for row in products)

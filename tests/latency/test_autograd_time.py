"""What autograd adds to operators."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modelsummary import Statistics
from modelsummary.devices.kernel_table import Entry, KernelTable, machine_of
from modelsummary.latency import autograd_time
from modelsummary.latency.autograd_time import _Chain, autograd_seconds


def test_seconds_are_those_beside_the_operators(monkeypatch):
    # Per chain: forward without and with gradients, backward, and its operators alone; first of 8 operators, then of 1.
    times = iter([10.0, 26.0, 52.0, 24.0, 1.0, 3.0, 13.0, 6.0] * 60)

    def seconds(run):
        run()
        return next(times)

    monkeypatch.setattr(autograd_time, "timed_among_others", lambda: seconds)
    # (26 - 10) / 8 nodes; ((52 - 24) - (13 - 6)) / 7 nodes more in the longer chain
    assert autograd_seconds() == {"node": pytest.approx(2.0), "engine": pytest.approx(3.0)}


def test_a_user_in_inference_mode_gets_times():
    with torch.inference_mode():
        assert set(autograd_seconds()) == {"node", "engine"}


def test_the_operators_of_the_backward_compute_its_gradient():
    chain = _Chain(8)
    chain.forward()
    chain.backward()
    torch.testing.assert_close(chain.x.grad, chain.operators_of_backward().detach())


def test_a_step_takes_time_for_each_node(monkeypatch, tmp_path):
    monkeypatch.setenv("MODELSUMMARY_CACHE", str(tmp_path))
    speeds = {"flops_per_second": 1e12, "bytes_per_second": 1e12, "operator": 0.0, "view": 0.0, "module": 0.0}
    other = Entry("other", "other", "float32", [1], 0, 4, seconds=1e-6)
    stats = Statistics(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), (2, 4))

    def predicted(**autograd):
        KernelTable(machine_of(torch.device("cpu")), {"other": other}, {**speeds, **autograd}).save()
        return stats.estimate_latency(backward=True)

    plain, with_nodes = predicted(), predicted(node=1.0, engine=10.0)
    # AddmmBackward, TBackward of the weight, ReluBackward, SumBackward; weight and bias add up their gradients
    assert with_nodes.forward_ms - plain.forward_ms == pytest.approx(4e3)
    assert with_nodes.backward_ms - plain.backward_ms == pytest.approx(6e4)
    rows = {row.fqn: row.self_estimated_backward_latency_ms for row in stats}
    assert rows["0"] == pytest.approx(4e4, rel=1e-3)
    assert rows["1"] == pytest.approx(1e4, rel=1e-3)

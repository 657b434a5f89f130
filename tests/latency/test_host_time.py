"""Times of an injected clock, so that each expected number follows by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from modelsummary.latency import host_time
from modelsummary.latency.host_time import host_seconds, minor_faults, other_operators, page_seconds, preemptions


def clock(monkeypatch, *moments):
    """Let the thread's CPU time take the given values, one per reading."""
    readings = iter(moments)
    monkeypatch.setattr(host_time, "time", SimpleNamespace(thread_time=lambda: next(readings)))


def test_a_page_fault_is_what_the_first_touch_takes_longer_than_the_second(monkeypatch):
    # Three times: begin, first touch, second touch. 5 - 2, 4 - 2 and 6 - 2 seconds for 100 pages; the least counts.
    clock(monkeypatch, 0, 5, 7, 10, 14, 16, 20, 26, 28)
    counts = iter([0, 100, 100, 200, 200, 300])
    monkeypatch.setattr(host_time, "minor_faults", lambda: next(counts))
    monkeypatch.setattr(torch, "empty", lambda *_, **__: torch.zeros(1))
    assert page_seconds() == pytest.approx(2 / 100)


def test_no_page_faults_cost_nothing(monkeypatch):
    clock(monkeypatch, *[0, 1, 3] * 3)  # the second touch took longer: noise
    monkeypatch.setattr(host_time, "minor_faults", lambda: 7)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: torch.zeros(1))
    assert page_seconds() == 0.0


def test_a_module_costs_what_it_takes_longer_than_its_operator(monkeypatch):
    now = [0.0]

    def taking(seconds):
        def run(*_):
            now[0] += seconds

        return run

    def reading():
        now[0] += 0.5  # what reading the clock takes
        return now[0]

    def transpose(x, *dims, real=torch.Tensor.transpose):
        now[0] += 2.0
        return real(x, *dims)

    monkeypatch.setattr(torch.Tensor, "transpose", transpose)
    monkeypatch.setattr(host_time, "time", SimpleNamespace(thread_time=reading))
    # (9 + 4) / 2 - (5 + 2) / 2
    pairs = [(taking(9.0), taking(5.0)), (taking(4.0), taking(2.0))]
    monkeypatch.setattr(host_time, "_modules_and_operators", lambda _: pairs)
    assert host_seconds() == pytest.approx({"view": 2.5, "next_view": 2.0, "module": 3.0})
    monkeypatch.setattr(host_time, "_modules_and_operators", lambda _: [(taking(1.0), taking(5.0))])
    assert host_seconds()["module"] == 0.0  # never negative


def test_modules_are_compared_with_the_operators_that_they_call():
    x = torch.rand(1, 8, 4, 4)
    with torch.no_grad():
        for module, operator in host_time._modules_and_operators(x)[:-1]:
            found = operator()
            found = found[0] if isinstance(found, tuple) else found
            assert torch.allclose(module(x), found, atol=1e-6)
        identity, nothing = host_time._modules_and_operators(x)[-1]
    assert identity(x) is x
    assert nothing() is None


def test_other_operators_run_different_code():
    runs = other_operators()
    with torch.no_grad():
        names = {run().dtype for run in runs}
    assert len(runs) == 30
    assert names == {torch.float32, torch.long}  # nonzero gives indices


def test_a_system_that_does_not_count(monkeypatch):
    monkeypatch.setattr(host_time, "resource", None)
    assert (preemptions(), minor_faults()) == (0, 0)

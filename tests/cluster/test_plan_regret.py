"""Regret and rank correlation of a choice among plans, by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def plan_regret(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import plan_regret

    yield plan_regret
    for name in ("plan_regret", "latency_page", "cluster_data", "cluster_runs", "cluster_models"):
        sys.modules.pop(name, None)


def test_regret_and_tau_of_a_group(plan_regret):
    choice = plan_regret.Choice
    plans = [choice(1.0, 2.0, 1.0), choice(1.5, 1.0, 1.0), choice(2.0, 3.0, 1.0), choice(4.0, 5.0, 1.0)]
    assert plan_regret.regret(plans, "predicted") == pytest.approx(0.5)  # the second is chosen, the first is best
    assert plan_regret.tau(plans, "predicted") == pytest.approx((5 - 1) / 6)
    assert plan_regret.regret(plans, "anchor") == pytest.approx((1.0 + 1.5 + 2.0 + 4.0) / 4 - 1)
    assert plan_regret.tau(plans, "anchor") == 0.0
    assert plan_regret.row_of("ours", [plans])[1:6] == ["1", "4", "50.0 %", "50 %", "0.67"]

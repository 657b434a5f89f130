"""Own times, medians and shares of rows, from runs whose times are known."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from modelsummary import Statistics
from modelsummary.capture.timer import Timer
from modelsummary.latency.timings import TimedRun, Timings, latencies_of
from tests.clocks import ManualClock, Takes
from tests.models import Call

X = torch.ones(1)


def measured(model, clock, runs=1, cost=(0.0, 0.0)):
    stats = Statistics(model, X)
    timer = Timer(model, clock)
    with timer.running():
        for _ in range(runs):
            model(X)
    timings = Timings(model, stats.root, cost)
    latencies_of(stats.root, [timings.run(step.settle()) for step in timer.steps]).show(stats.root)
    return stats


def facts(stats):
    return {row.fqn: (row.latency_ms, row.self_latency_ms, row.latency_share) for row in (stats.root, *stats)}


def test_total_own_and_share():
    clock = ManualClock()
    model = Call(lambda self, x: self.b(self.a(x)), a=Takes(clock, 1, Takes(clock, 5), after=2), b=Takes(clock, 2))
    assert facts(measured(model, clock)) == {
        "": (10.0, 0.0, 1.0),
        "a": (8.0, 3.0, 0.8),
        "a.inner": (5.0, 0.0, 0.5),  # a container without a call: what is in it
        "a.inner.0": (5.0, 5.0, 0.5),
        "a.inner.0.inner": (None, None, None),
        "b": (2.0, 2.0, 0.2),
        "b.inner": (None, None, None),
    }


def test_calls_of_one_module_are_told_apart():
    clock = ManualClock()

    def grows(self, x):
        self.n = self.n + 1
        clock.wait(self.n)
        return x

    layer = Call(grows)
    layer.n = 0
    stats = measured(Call(lambda self, x: self.layer(self.layer(x)), layer=layer), clock)
    assert [row.latency_ms for row in stats.calls("layer")] == [1.0, 2.0]


def test_modules_without_a_row_are_their_callers():
    clock = ManualClock()
    model = Call(lambda self, x: Takes(clock, 3)(x))
    assert facts(measured(model, clock)) == {"": (3.0, 3.0, 1.0)}


def test_medians_and_their_spread():
    clock = ManualClock()
    times = iter([1.0, 4.0, 2.0, 8.0, 3.0])

    def forward(self, x):
        clock.wait(next(times, 0.0))
        return x

    model = Call(lambda self, x: self.a(x), a=Call(forward))
    stats = Statistics(model, X, execution="shape")
    times = iter([1.0, 4.0, 2.0, 8.0, 3.0])
    timer = Timer(model, clock)
    with timer.running():
        for _ in range(5):
            model(X)
    timings = Timings(model, stats.root, (0.0, 0.0))
    latencies_of(stats.root, [timings.run(step.settle()) for step in timer.steps]).show(stats.root)
    assert stats["a"].latency_ms == 3.0
    assert stats["a"].latency_iqr_ms == 2.0  # from 2 to 4


def test_the_cost_of_timing_is_taken_off():
    clock = ManualClock()
    model = Takes(clock, 1, Takes(clock, 10), Takes(clock, 10))
    # each call costs 0.5 between its marks and 0.25 around them: 3 x 0.5 and 2 x 0.25 of 21 ms
    assert facts(measured(model, clock, cost=(0.5, 0.25)))[""] == (19.0, 0.0, 1.0)
    # 1 - 0.5 - 2 x 0.25 is left of the model's own, 9.5 of each child's
    assert facts(measured(model, clock, cost=(0.5, 0.25)))["inner.0"][:2] == (9.5, 9.5)


def test_what_was_not_called_while_timed():
    clock = ManualClock()
    model = Call(lambda self, x: self.a(x) if self.training else x, a=Takes(clock, 1))
    stats = Statistics(model, X)
    timer = Timer(model.eval(), clock)
    with timer.running():
        model(X)
    latencies_of(stats.root, [Timings(model, stats.root, (0.0, 0.0)).run(timer.steps[0].settle())]).show(stats.root)
    assert stats["a"].latency_ms is None
    assert "not timed" in stats["a"].note
    latencies_of(stats.root, [TimedRun({("", 0): 1.0, ("a", 0): 2.0}, 3.0)]).show(stats.root)
    assert (stats["a"].latency_ms, stats["a"].note) == (2.0, "")


def test_backward():
    model = nn.Sequential(nn.ReLU(), nn.ReLU())
    stats = Statistics(model, X)
    forward = {("", 0): 1.0, ("0", 0): 1.0, ("1", 0): 1.0}
    backward = {("", 0): 0.0, ("0", 0): 6.0, ("1", 0): 2.0}
    latencies_of(stats.root, [TimedRun(forward, 3.0, backward, 8.0, frozenset({("1", 0)}))]).show(stats.root)
    assert (stats.root.backward_latency_ms, stats["0"].backward_latency_share) == (8.0, 0.75)
    assert stats["1"].backward_latency_ms is None
    assert "re-entrant checkpointing" in stats["1"].note


def test_a_later_measurement_leaves_an_earlier_result_as_it_is():
    model = nn.Sequential(nn.ReLU())
    stats = Statistics(model, X)
    first, second = (
        latencies_of(stats.root, [TimedRun({("", 0): 0.0, ("0", 0): milliseconds}, milliseconds)])
        for milliseconds in (2.0, 3.0)
    )
    assert stats["0"].latency_ms is None  # results are not written until they are shown
    second.show(stats.root)
    assert (stats["0"].latency_ms, first.columns["latency_ms"]["0", 0]) == (3.0, 2.0)
    first.show(stats.root)
    assert stats["0"].latency_ms == 2.0


TIMES = st.floats(0, 1e3)


@settings(deadline=None)
@given(st.lists(st.tuples(TIMES, TIMES, TIMES, TIMES), min_size=1, max_size=6))
def test_own_times_add_up_to_the_root(runs):
    model = nn.Sequential(nn.Sequential(nn.ReLU()), nn.ReLU())
    stats = Statistics(model, X)
    keys = [("", 0), ("0", 0), ("0.0", 0), ("1", 0)]
    latencies_of(stats.root, [TimedRun(dict(zip(keys, times, strict=True)), sum(times)) for times in runs]).show(
        stats.root
    )
    rows = [stats.root, *stats]
    assert sum(row.self_latency_ms for row in rows) == pytest.approx(stats.root.latency_ms)
    for row in rows:
        below = sum(child.latency_ms for child in row.children)
        assert row.latency_ms == pytest.approx(row.self_latency_ms + below, abs=1e-9)


def test_means_where_not_every_run_made_the_same_calls():
    model = nn.Sequential(nn.ReLU(), nn.Tanh(), nn.Identity())
    stats = Statistics(model, X)
    keys = [("", 0), ("0", 0), ("1", 0), ("2", 0)]
    runs = [{keys[0]: 0.0, keys[1]: 0.03, keys[1 + n]: 9.0} for n in (1, 2)] + [{keys[0]: 0.0, keys[1]: 9.03}]
    latencies_of(stats.root, [TimedRun(run, sum(run.values())) for run in runs]).show(stats.root)
    assert stats.root.latency_ms == pytest.approx(9.03)
    assert stats["1"].latency_ms == pytest.approx(3.0)
    assert "means, not medians" in stats.root.note

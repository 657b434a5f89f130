"""Calls of modules are timed with a clock that the test advances."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from modelsummary import Statistics
from modelsummary.capture.clock import CpuClock
from modelsummary.capture.timer import Timer, cost_of_timing, suspended
from tests.clocks import ManualClock, Takes
from tests.models import Call
from tests.untouched import untouched

ORIGINAL = nn.Module.__call__


def timed(model, clock, x=None, **options):
    timer = Timer(model, clock, **options)
    with timer.running():
        model(torch.ones(1) if x is None else x)
    assert nn.Module.__call__ is ORIGINAL
    (step,) = timer.steps
    return step.settle()


def outline(call):
    return type(call.module).__name__, call.milliseconds, [outline(child) for child in call.children]


def test_calls_and_their_times():
    clock = ManualClock()
    shared = Takes(clock, 3)
    model = Takes(clock, 1, shared, Takes(clock, 2, shared, after=4), nn.Identity())
    root = timed(model, clock)
    inner = ("Takes", 3.0, [])
    assert outline(root) == ("Takes", 13.0, [inner, ("Takes", 9.0, [inner]), ("Identity", 0.0, [])])
    assert [call.module for call in root.walk()] == [model, shared, model.inner[1], shared, model.inner[2]]
    assert clock.released == 10


def test_what_is_ignored_is_its_callers():
    clock = ManualClock()
    model = Takes(clock, 1, Takes(clock, 2, Takes(clock, 3)))
    root = timed(model, clock, is_ignored=lambda module: module is model.inner[0])
    assert outline(root) == ("Takes", 6.0, [("Takes", 3.0, [])])


def test_modules_of_others_are_not_timed():
    clock = ManualClock()
    other = Takes(clock, 5)
    model = Call(lambda self, x: other(self.a(x)), a=nn.Identity())
    timer = Timer(model, clock)
    with timer.running():
        other(torch.ones(1))
        model.a(torch.ones(1))  # calling only a part of the model is not a step
        model(torch.ones(1))
    (step,) = timer.steps
    assert outline(step.settle()) == ("Call", 5.0, [("Identity", 0.0, [])])


def test_a_module_that_raises_ends():
    clock = ManualClock()

    def forward(self, x):
        try:
            self.a(x)
        except ValueError:
            clock.wait(1)
        return self.b(x)

    def fails(self, x):
        clock.wait(2)
        raise ValueError

    model = Call(forward, a=Call(fails), b=Takes(clock, 4))
    assert outline(timed(model, clock)) == ("Call", 7.0, [("Call", 2.0, []), ("Takes", 4.0, [])])


def test_a_forward_that_raises_is_no_step():
    clock = ManualClock()

    def fails(self, x):
        raise ValueError("no")

    model = Call(lambda self, x: self.a(x), a=Call(fails))
    timer = Timer(model, clock)
    with untouched(model):
        with timer.running(), pytest.raises(ValueError, match="no"):
            model(torch.ones(1))
        assert timer.steps == []
    assert nn.Module.__call__ is ORIGINAL


def test_timers_may_end_in_any_order():
    clock = ManualClock()
    model = Takes(clock, 1)
    one, two = Timer(model, clock), Timer(model, clock)
    one.start()
    two.start()
    model(torch.ones(1))
    one.stop()
    model(torch.ones(1))
    two.stop()
    two.stop()
    assert (len(one.steps), len(two.steps)) == (1, 2)
    assert nn.Module.__call__ is ORIGINAL


def test_own_runs_of_the_library_are_no_steps():
    clock = ManualClock()
    model = nn.Linear(2, 2)
    timer = Timer(model, clock)
    with timer.running():
        Statistics(model, torch.ones(1, 2))
        Statistics(model, torch.ones(1, 2), execution="real")
        with suspended():
            model(torch.ones(1, 2))
        assert timer.steps == []
        model(torch.ones(1, 2))
    assert len(timer.steps) == 1


def test_threads_have_steps_of_their_own():
    clock = CpuClock()
    both = threading.Barrier(2)

    def forward(self, x):
        both.wait(timeout=10)  # both are inside the forward now
        return self.a(x)

    model = Call(forward, a=nn.Identity())
    timer = Timer(model, clock)
    with timer.running():
        threads = [threading.Thread(target=model, args=(torch.ones(1),)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [[type(call.module).__name__ for call in step.settle().walk()] for step in timer.steps] == [
        ["Call", "Identity"]
    ] * 2


def test_calls_in_a_thread_of_the_forward_are_counted():
    def forward(self, x):
        thread = threading.Thread(target=self.a, args=(x,))
        thread.start()
        thread.join()
        return x

    model = Call(forward, a=nn.Identity())
    timer = Timer(model, ManualClock())
    with timer.running():
        model(torch.ones(1))
    assert timer.in_other_threads == 1
    assert timer.steps[0].settle().children == []


def test_the_fused_path_stays_on():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with torch.no_grad():
        root = timed(layer, ManualClock(), torch.ones(1, 3, 8))
    assert root.children == []  # one fused kernel; with a hook, the layer would call its parts


def test_the_cost_of_timing_is_split():
    within, outside = cost_of_timing(calls=50, repetitions=3)
    assert within >= 0
    assert outside >= 0


def test_suspending_concerns_one_thread():
    model = nn.Linear(2, 2)
    timer = Timer(model, ManualClock())
    timer.start()
    with suspended():
        thread = threading.Thread(target=model, args=(torch.ones(1, 2),))
        thread.start()
        thread.join()
        model(torch.ones(1, 2))
        timer.stop()
    assert nn.Module.__call__ is ORIGINAL
    assert len(timer.steps) == 1


def test_a_copy_of_the_wrapper_is_harmless():
    model = nn.Linear(2, 2)
    timer = Timer(model, ManualClock())
    timer.start()
    stale = nn.Module.__call__
    timer.stop()
    nn.Module.__call__ = stale
    try:
        model(torch.ones(1, 2))
    finally:
        nn.Module.__call__ = ORIGINAL
    assert timer.steps == []


def test_dynamo_keeps_no_wrapper():
    utils = pytest.importorskip("torch._dynamo.utils")
    before = getattr(utils, "unpatched_nn_module_call", None)
    timer = Timer(nn.Linear(2, 2), ManualClock())
    with timer.running():
        utils.unpatched_nn_module_call = nn.Module.__call__  # as if it were imported now
    assert utils.unpatched_nn_module_call is ORIGINAL
    utils.unpatched_nn_module_call = before

"""Times of an injected clock, so that each expected number follows by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from modelsummary.latency import kernel_rounds
from modelsummary.latency.kernel_rounds import seconds_of
from modelsummary.operators.operator_calls import OperatorCall, OperatorLog, TensorSpec

CPU = torch.device("cpu")


class Machine:
    """A clock, and counters of the system, that move only when a call says so.

    A call's ``wall`` and ``cpu`` seconds, page faults and preemptions are taken from its plan, one entry per run; the
    last one repeats. The first run of a call is not timed.
    """

    def __init__(self, monkeypatch, threads=1):
        self.now = self.used = 0.0
        self.faults = self.lost = 0
        clock = SimpleNamespace(perf_counter=lambda: self.now, thread_time=lambda: self.used)
        monkeypatch.setattr(kernel_rounds, "time", clock)
        monkeypatch.setattr(kernel_rounds, "minor_faults", lambda: self.faults)
        monkeypatch.setattr(kernel_rounds, "preemptions", lambda: self.lost)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)

    def call(self, *plan, **kwargs):
        """Return a call that takes (wall, CPU, faults, preemptions) in its runs."""
        runs = iter([plan[0], *plan])
        latest = list(plan[-1:])

        def func(*_args):
            wall, cpu, faults, lost = next(runs, latest[0])
            self.now, self.used = self.now + wall, self.used + cpu
            self.faults, self.lost = self.faults + faults, self.lost + lost

        return made(func, **kwargs)


def made(func, shape=(2,), name="aten.relu"):
    spec = TensorSpec(shape, tuple(1 for _ in shape), torch.float32)
    return OperatorCall(func, SimpleNamespace(name=name), (spec,), {}, (spec,), None)


def quiet(seconds):
    return seconds, seconds, 0, 0


def test_each_call_has_its_own_seconds(monkeypatch):
    machine = Machine(monkeypatch)
    calls = [machine.call(quiet(0.002)), machine.call(quiet(0.03))]
    assert seconds_of(calls, CPU) == pytest.approx([0.002, 0.03])


def test_a_call_that_fails_alone_has_no_seconds(monkeypatch):
    def fails(*_):
        raise RuntimeError("not alone")

    machine = Machine(monkeypatch)
    calls = [machine.call(quiet(0.002)), made(fails), machine.call(quiet(0.004))]
    assert seconds_of(calls, CPU) == [pytest.approx(0.002), None, pytest.approx(0.004)]


@pytest.mark.parametrize(("seconds", "rounds"), [(10.0, 5), (0.11, 7), (0.001, 60)])
def test_number_of_rounds(monkeypatch, seconds, rounds):
    # at least 5, then as many as begin within 0.7 s, at most 60
    machine = Machine(monkeypatch)
    seconds_of([machine.call(quiet(seconds))], CPU)
    assert machine.now == pytest.approx(seconds * (1 + rounds))


def test_page_faults_are_left_out(monkeypatch):
    machine = Machine(monkeypatch)
    assert seconds_of([machine.call((0.010, 0.010, 1000, 0))], CPU, page=2e-6) == pytest.approx([0.008])
    assert seconds_of([machine.call((0.001, 0.001, 1000, 0))], CPU, page=2e-6) == [0.0]  # never negative


def test_one_thread_that_loses_its_core_counts_its_own_time(monkeypatch):
    machine = Machine(monkeypatch)
    assert seconds_of([machine.call((0.050, 0.020, 0, 1))], CPU) == pytest.approx([0.020])


def test_several_threads_leave_out_disturbed_runs(monkeypatch):
    machine = Machine(monkeypatch, threads=2)
    waits, loses = (0.1, 0.05, 0, 0), (0.1, 0.1, 0, 1)  # the main thread waits; another thread lost its core
    assert seconds_of([machine.call(waits, loses, quiet(0.15))], CPU) == pytest.approx([0.15])
    assert seconds_of([machine.call(loses)], CPU) == pytest.approx([0.1])  # there are no others


def test_the_faster_half_of_the_rounds_counts(monkeypatch):
    # Rounds at 1, 2, 1.1, 3 and 1.2 times the pace: of five, the first, third and fifth count, with median 1.1.
    pace = (1, 2, 1.1, 3, 1.2)
    machine = Machine(monkeypatch)
    calls = [machine.call(*(quiet(own * each) for each in pace)) for own in (1.0, 10.0)]
    assert seconds_of(calls, CPU) == pytest.approx([1.1, 11.0])


def test_a_round_is_chosen_for_all_calls(monkeypatch):
    # The second call is slow in the first and second round, the three others in the fourth and fifth. Half of the calls
    # and more say which rounds were slow: the fourth and fifth. The mean of the others is 20 / 3 for the second call.
    steady = [(1, 1, 1, 5, 5), (9, 9, 2, 2, 2), (1, 1, 1, 5, 5), (1, 1, 1, 5, 5)]
    machine = Machine(monkeypatch)
    calls = [machine.call(*map(quiet, plan)) for plan in steady]
    assert seconds_of(calls, CPU) == pytest.approx([1, 20 / 3, 1, 1])


def test_an_interrupted_run_counts_for_one_and_a_half(monkeypatch):
    # rounds at 1, 1 and 7 seconds are the faster half of 5 for a call that is alone in them: (1 + 1 + 1.5) / 3
    machine = Machine(monkeypatch)
    assert seconds_of([machine.call(*map(quiet, (1, 7, 1, 8, 9)))], CPU) == pytest.approx([3.5 / 3])


def test_groups_of_64_calls_take_turns(monkeypatch):
    machine = Machine(monkeypatch)
    order = []

    def call(number):
        def func(*_args):
            order.append(number)
            machine.now, machine.used = machine.now + number + 1.0, machine.used + number + 1.0

        return made(func)

    assert seconds_of([call(number) for number in range(70)], CPU) == pytest.approx([*range(1, 71)])
    assert order == [*range(70)] * 6  # once before the clock, then five rounds of both groups


def test_parts_hold_two_gibibytes_or_a_quarter_of_free_memory(monkeypatch):
    small = [made(None) for _ in range(130)]
    assert [len(part) for part in kernel_rounds._parts(small, 2**31)] == [130]
    large = [made(None, (2**28,)) for _ in range(3)]  # 1 GiB of arguments, and as much of results
    assert [len(part) for part in kernel_rounds._parts(large, 2**31)] == [1, 1, 1]
    assert [len(part) for part in kernel_rounds._parts([*small[:3], large[0]], 2**31)] == [3, 1]
    assert list(kernel_rounds._parts([], 2**31)) == []
    limits = []
    monkeypatch.setattr(kernel_rounds, "_parts", lambda _, most_bytes: limits.append(most_bytes) or [])
    for free in (2**40, 2**30):
        monkeypatch.setattr(kernel_rounds, "_free_bytes", lambda _, free=free: free)
        assert seconds_of([], CPU) == []
    assert limits == [2**31, 2**28]


def test_free_memory_is_a_plausible_number_of_bytes():
    assert 2**20 < kernel_rounds._free_bytes(CPU) < 2**50


def test_calls_in_place_keep_their_values_in_range():
    x = torch.empty(8)
    log = OperatorLog(id, set())
    log.note(torch.ops.aten.mul_.Tensor, (x, 3.0), {}, x)
    ready = kernel_rounds._ready(log.runs[0].call, CPU, cold=False)
    for _ in range(200):  # 3 ** 200 overflows float32
        ready.produce()
        ready.run()
    assert ready.produced[0].isfinite().all()

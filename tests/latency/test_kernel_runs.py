"""Times of an injected clock, so that each expected number follows by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from modelsummary.latency import kernel_runs
from modelsummary.latency.kernel_runs import seconds_of
from modelsummary.operators.operator_calls import OperatorCall, OperatorLog, TensorSpec

CPU = torch.device("cpu")


class Machine:
    """A clock that moves only when a call says so.

    A call's ``wall`` and ``cpu`` seconds are taken from its plan, one entry per run; the last one repeats. The first
    run of a call is not timed.
    """

    def __init__(self, monkeypatch, threads=1):
        self.now = self.used = 0.0
        clock = SimpleNamespace(perf_counter=lambda: self.now, thread_time=lambda: self.used)
        monkeypatch.setattr(kernel_runs, "time", clock)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)

    def call(self, *plan):
        """Return a call that takes (wall, CPU) seconds in its runs."""
        runs = iter([plan[0], *plan])

        def func(*_args):
            wall, cpu = next(runs, plan[-1])
            self.now, self.used = self.now + wall, self.used + cpu

        return made(func)


def made(func, shape=(2,)):
    spec = TensorSpec(shape, tuple(1 for _ in shape), torch.float32)
    return OperatorCall(func, SimpleNamespace(name="aten.relu"), (spec,), {}, (spec,), None)


def quiet(seconds):
    return seconds, seconds


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
    assert seconds_of([made(fails)], CPU) == [None]


@pytest.mark.parametrize(("seconds", "rounds"), [(10.0, 7), (0.09, 8), (0.001, 60)])
def test_number_of_rounds(monkeypatch, seconds, rounds):
    # at least 7, then as many as begin within 0.7 s, at most 60
    machine = Machine(monkeypatch)
    seconds_of([machine.call(quiet(seconds))], CPU)
    assert machine.now == pytest.approx(seconds * (1 + rounds))


def test_one_thread_counts_without_what_other_processes_took(monkeypatch):
    assert seconds_of([Machine(monkeypatch).call((0.050, 0.020))], CPU) == pytest.approx([0.020])
    assert seconds_of([Machine(monkeypatch, threads=2).call((0.050, 0.020))], CPU) == pytest.approx([0.050])


def test_the_median_of_the_rounds_counts(monkeypatch):
    call = Machine(monkeypatch).call(*map(quiet, (1, 7, 1, 8, 9, 2, 3)))
    assert seconds_of([call], CPU) == pytest.approx([3])


def test_a_round_runs_every_call_once(monkeypatch):
    machine, order = Machine(monkeypatch), []

    def call(number):
        def func(*_args):
            order.append(number)
            machine.now, machine.used = machine.now + number + 1.0, machine.used + number + 1.0

        return made(func)

    assert seconds_of([call(number) for number in range(5)], CPU) == pytest.approx([*range(1, 6)])
    assert order == [*range(5)] * 8  # once before the clock, then seven rounds


def test_parts_hold_two_gibibytes_or_a_quarter_of_free_memory(monkeypatch):
    small = [made(None) for _ in range(130)]
    assert [len(part) for part in kernel_runs._parts(small, 2**31)] == [130]
    large = [made(None, (2**28,)) for _ in range(3)]  # 1 GiB of arguments, and as much of results
    assert [len(part) for part in kernel_runs._parts(large, 2**31)] == [1, 1, 1]
    assert [len(part) for part in kernel_runs._parts([*small[:3], large[0]], 2**31)] == [3, 1]
    assert list(kernel_runs._parts([], 2**31)) == []
    limits = []
    monkeypatch.setattr(kernel_runs, "_parts", lambda _, most_bytes: limits.append(most_bytes) or [])
    for free in (2**40, 2**30):
        monkeypatch.setattr(kernel_runs, "_free_bytes", lambda _, free=free: free)
        assert seconds_of([], CPU) == []
    assert limits == [2**31, 2**28]


def test_free_memory_is_a_plausible_number_of_bytes():
    assert 2**20 < kernel_runs._free_bytes(CPU) < 2**50


def test_calls_in_place_keep_their_values_in_range():
    x = torch.empty(8)
    log = OperatorLog(id, set())
    log.note(torch.ops.aten.mul_.Tensor, (x, 3.0), {}, x)
    ready = kernel_runs._ready(log.runs[0].call, CPU)
    for _ in range(200):  # 3 ** 200 overflows float32
        ready.seconds(lambda run: run() is None)
    assert ready.produced[0].isfinite().all()


def test_an_argument_that_cannot_be_made():
    call = made(torch.relu)
    with pytest.raises(TypeError, match=r"takes <Tag>, of which no equal can be made"):
        kernel_runs.arguments_of(OperatorCall(call.func, call.rule, ("<Tag>",), {}, (), None), CPU)

from __future__ import annotations

import gc
import weakref
from collections import deque

import pytest
import torch
from torch import nn

import modelsummary
from modelsummary import InputError, Profiler, ProfilerError, TIDSProfiler
from tests.capture.test_backward import CLOCK, Slow
from tests.latency.test_measure import check_sums
from tests.models import Call
from tests.untouched import untouched

ORIGINAL = nn.Module.__call__


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Sequential(nn.ReLU(inplace=True)), nn.Linear(8, 1))


def steps(model, *batches):
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        model(torch.randn(batch, 4)).sum().backward()


def test_a_training_loop_is_the_same_with_it():
    plain, profiled = make(), make()
    prof = Profiler(profiled, backward=True)
    prof.start_profile()
    for model in (plain, profiled):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            steps(model, 5)
            optimizer.step()
    with untouched(profiled):
        stats = prof.generate_profile()
        prof.end_profile()
    assert nn.Module.__call__ is ORIGINAL
    assert all(map(torch.equal, plain.state_dict().values(), profiled.state_dict().values()))
    check_sums(stats)
    check_sums(stats, "backward_")
    assert stats.latency_overhead.runs == 3
    assert stats["0"].input_size == [5, 4]
    assert stats["0"].macs == 5 * 32
    assert "median of 3 runs" in str(stats)


def test_the_most_frequent_size_counts():
    with modelsummary.profile(make()) as prof:
        steps(prof._model, 2, 3, 3)
    stats = prof.generate_profile()
    assert stats.root.input_size == [3, 4]
    assert stats.latency_overhead.runs == 2
    assert "1 more step had other inputs or another mode" in stats.root.note


def test_the_mode_of_the_steps_counts():
    model = make()
    with modelsummary.profile(model) as prof:
        steps(model, 2)
    model.eval()
    with untouched(model):
        stats = prof.generate_profile()
    assert stats["1"].training


def test_only_the_latest_steps_are_kept():
    with modelsummary.profile(make(), max_steps=2) as prof:
        steps(prof._model, 2, 2, 2, 2)
    assert prof.generate_profile().latency_overhead.runs == 2


def test_stop_start_and_reset():
    model = make()
    prof = TIDSProfiler(model)
    prof.start_profile()
    steps(model, 2)
    assert prof.generate_profile().latency_overhead.runs == 1
    steps(model, 2)
    assert prof.generate_profile().latency_overhead.runs == 2  # its own runs are none of them
    prof.stop_profile()
    steps(model, 2)
    assert prof.generate_profile().latency_overhead.runs == 2
    prof.start_profile()
    steps(model, 2)
    assert prof.generate_profile().latency_overhead.runs == 1
    prof.reset_profile()
    with pytest.raises(ProfilerError, match="was not called since start_profile"):
        prof.generate_profile()
    steps(model, 2)
    assert prof.generate_profile().latency_overhead.runs == 1
    prof.end_profile()
    with pytest.raises(ProfilerError, match="was not started"):
        prof.generate_profile()
    assert nn.Module.__call__ is ORIGINAL


def test_ignored_modules():
    model = make()
    prof = Profiler(model)
    prof.start_profile([nn.Linear, "2", model[1]])
    steps(model, 2)
    stats = prof.generate_profile()
    prof.end_profile()
    assert [row.fqn for row in stats if row.latency_ms is not None] == ["2", "2.0"]  # 2 is what is in it
    assert stats["2"].self_latency_ms == 0.0
    check_sums(stats)
    for wrong in ("nonsense", nn.Conv2d, nn.Linear(1, 1)):
        with pytest.raises(InputError, match="the model has no such class, name or module"):
            prof.start_profile([wrong])
    assert nn.Module.__call__ is ORIGINAL


def test_an_exception_leaves_nothing():
    def fails(self, x):
        raise ValueError("no")

    model = Call(lambda self, x: self.b(self.a(x)), a=nn.Linear(2, 2), b=Call(fails))
    prof = Profiler(model, backward=True)
    with untouched(model):
        prof.start_profile()
        for _ in range(2):
            with pytest.raises(ValueError, match="no"):
                model(torch.ones(1, 2))
        with pytest.raises(ProfilerError, match="Call was not called"):
            prof.generate_profile()
        prof.end_profile()
    assert nn.Module.__call__ is ORIGINAL


def test_a_block_that_raises():
    with pytest.raises(ValueError, match="no"), modelsummary.profile(make()):
        raise ValueError("no")
    assert nn.Module.__call__ is ORIGINAL


def test_a_model_that_decides_by_values():
    model = Call(lambda self, x: self.a(x) if x.sum() > 0 else self.b(x), a=nn.Linear(2, 2), b=nn.Linear(2, 3))
    with modelsummary.profile(model) as prof:
        model(torch.full((1, 2), -1.0))
    stats = prof.generate_profile()
    assert stats.execution == "real"
    assert stats["a"].latency_ms is None
    assert stats["b"].latency_ms > 0


def test_a_wrapped_model():
    model = nn.DataParallel(make())
    with modelsummary.profile(model) as prof:
        steps(model, 2)
    stats = prof.generate_profile()
    assert stats.root.class_name == "Sequential"
    check_sums(stats)


@pytest.mark.parametrize(
    ("make_profiler", "message"),
    [
        (lambda: Profiler(nn.Linear), "expected a torch.nn.Module"),
        (lambda: Profiler(make(), max_steps=0), "max_steps must be an integer >= 1, got 0"),
    ],
)
def test_bad_arguments(make_profiler, message):
    with pytest.raises(InputError, match=message):
        make_profiler()


# ------------------------------------------------------------------------------- steps that are not all alike


class Waits(nn.Module):
    """Its backward takes some milliseconds of the manual clock."""

    def __init__(self, milliseconds):
        super().__init__()
        self.milliseconds = milliseconds

    def forward(self, x):
        return Slow.apply(x, self.milliseconds)


@pytest.fixture
def by_hand(monkeypatch):
    """The profiler tells the time by the clock that the test moves."""
    monkeypatch.setattr("modelsummary.profiler.clock_for", lambda device: CLOCK)


def test_generating_twice_gives_the_same(by_hand):
    model = nn.Sequential(nn.Linear(2, 2), Waits(3.0))
    with modelsummary.profile(model, backward=True) as prof:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            assert prof.generate_profile()["1"].backward_latency_ms == 3.0
    assert prof.generate_profile()["1"].backward_latency_ms == 3.0


def test_steps_without_a_backward_do_not_count_for_it(by_hand):
    model = nn.Sequential(nn.Linear(2, 2), Waits(3.0))
    with modelsummary.profile(model, backward=True) as prof:
        model(torch.ones(1, 2)).sum().backward()
        model(torch.ones(1, 2))
        model(torch.ones(1, 2))
    assert prof.generate_profile()["1"].backward_latency_ms == 3.0
    prof.start_profile()
    model(torch.ones(1, 2))
    assert prof.generate_profile()["1"].backward_latency_ms is None
    prof.end_profile()


def test_gradients_taken_in_parts(by_hand):
    model = nn.Sequential(Waits(10.0), nn.Linear(2, 2))
    with modelsummary.profile(model, backward=True) as prof:
        x = torch.ones(1, 2, requires_grad=True)
        output = model(x)
        torch.autograd.grad(output.sum(), x, retain_graph=True)
        CLOCK.wait(1000)  # the user's own work
        output.sum().backward()
    assert prof.generate_profile()["0"].backward_latency_ms == 20.0


def test_other_arguments_and_modes_are_other_steps():
    model = Call(
        lambda self, x, deep=False: self.b(self.a(x)) if deep else self.a(x), a=nn.Linear(2, 2), b=nn.Dropout()
    )
    with modelsummary.profile(model) as prof:
        model(torch.ones(1, 2), deep=True)
        for _ in range(2):
            model(torch.ones(1, 2))
        model.b.eval()
        model(torch.ones(1, 2))
    stats = prof.generate_profile()
    assert stats.latency_overhead.runs == 2
    assert not stats["b"].executed
    assert "2 more steps" in stats.root.note


def test_marks_go_with_the_graph(by_hand):
    """DistributedDataParallel keeps the nodes that add up gradients; they must not gather marks."""
    model = nn.Linear(2, 2)
    kept = [node for node, _ in model(torch.ones(1, 2)).grad_fn.next_functions if node is not None]
    prof = Profiler(model, backward=True, max_steps=2)
    prof.start_profile()
    made = []
    for _ in range(4):
        before = CLOCK.made
        model(torch.ones(1, 2)).sum().backward()
        made.append(CLOCK.made - before)
    assert len(set(made)) == 1
    prof.end_profile()
    before = CLOCK.made
    model(torch.ones(1, 2)).sum().backward()
    assert CLOCK.made == before
    assert kept


def test_graphs_are_not_kept():
    class Held:
        pass

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.held = Held()
            held.append(weakref.ref(ctx.held))
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return grad

    held = Unwatched()
    model = Call(lambda self, x: Keeps.apply(self.a(x)), a=nn.Linear(2, 2))
    with modelsummary.profile(model, backward=True) as prof:
        for _ in range(3):
            model(torch.ones(1, 2))
        gc.collect()
        assert not any(each() for each in held.refs)
        assert prof.generate_profile().latency_overhead.runs == 3


class Unwatched:
    """A list that is not put back after a run of the library's own."""

    __slots__ = ("refs",)

    def __init__(self):
        self.refs = deque()

    def append(self, ref):
        self.refs.append(ref)


def test_a_profiler_that_is_dropped_stops():
    model = nn.Linear(2, 2)
    prof = Profiler(model)
    prof.start_profile()
    del prof
    gc.collect()
    assert nn.Module.__call__ is ORIGINAL


def test_ending_inside_of_a_forward():
    def forward(self, x):
        prof.end_profile()
        return self.a(x)

    model = Call(forward, a=nn.Linear(2, 2))
    prof = Profiler(model, backward=True)
    prof.start_profile()
    model(torch.ones(1, 2))
    assert nn.Module.__call__ is ORIGINAL


def test_the_model_may_change_meanwhile():
    model = make()
    with modelsummary.profile(model) as prof:
        steps(model, 2)
    model.append(nn.Linear(1, 1))
    model.eval()
    assert prof.generate_profile().root.training
    assert not model.training


def test_a_model_that_raises_when_its_shapes_are_captured():
    def forward(self, x):
        if not torch.is_grad_enabled():
            raise ValueError("only with gradients")
        return self.a(x)

    model = Call(forward, a=nn.Linear(2, 2))
    with modelsummary.profile(model) as prof:
        model(torch.ones(1, 2))
    with pytest.raises(ProfilerError, match="failed when its shapes were captured: ValueError: only with gradients"):
        prof.generate_profile()


@pytest.mark.parametrize("wrong", [5, "10", nn.Linear, nn.Linear(1, 1), [["a"]]])
def test_bad_ignore_lists(wrong):
    with pytest.raises(InputError, match="ignore_list"):
        Profiler(make()).start_profile(wrong)


def test_what_cannot_be_profiled():
    with pytest.raises(InputError, match="on meta"):
        Profiler(nn.Linear(2, 2, device="meta")).start_profile()
    with pytest.raises(InputError, match="backward must be True or False, got 'x'"):
        Profiler(make(), backward="x")

"""Calls and operators of one run, as facts."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from modelsummary import InputError, Statistics
from modelsummary.capture.calls import Call as WatchedCall
from modelsummary.capture.execution.real import RealExecution
from modelsummary.capture.execution.shape_tensor import ShapeTensor
from modelsummary.capture.operator_mode import Operators
from modelsummary.capture.step import StepRun
from modelsummary.capture.step_plan import StepPlan
from tests.models import Call, ClampsWeights
from tests.untouched import untouched


def forward_of(model, *args, **kwargs):
    return StepRun(model, args, kwargs, StepPlan(train=False), torch.device("cpu"), level="costs")


def run(forward, execution):
    with torch.no_grad(), Operators(forward.observer.around(execution)):
        forward.step()


def watched(model, *args, **kwargs):
    forward = forward_of(model, *args, **kwargs)
    run(forward, RealExecution(model.parameters()))
    watch, costs = forward.watch, [operator.call.cost for operator in forward.observer.log.runs]
    watch.macs = [
        sum(cost.macs for call, cost in zip(forward.observer.inside, costs, strict=True) if call is one)
        for one in watch.calls
    ]
    return watch


def test_calls_in_the_order_in_which_they_begin():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU()))
    watch = watched(model, torch.rand(2, 4))
    assert [call.module for call in watch.calls] == [model, model[0], model[1], model[1][0]]
    assert [call.parent for call in watch.calls] == [None, watch.calls[0], watch.calls[0], watch.calls[2]]
    assert all(call.finished for call in watch.calls)
    assert watch.innermost is None
    assert watch.macs == [0, 32, 0, 0]


def test_keyword_arguments_are_seen():
    watch = watched(Call(lambda self, x, mask: x * mask), torch.rand(2), mask=torch.rand(2))
    assert watch.calls[0].input_size == ([2], {"mask": [2]})
    assert watch.calls[0].input_bytes == 16


def test_the_mode_of_each_call():
    layer = nn.Linear(4, 4)

    def toggles(self, x):
        y = self.layer(x)
        self.layer.eval()
        return self.layer(y)

    watch = watched(Call(toggles, layer=layer), torch.rand(2, 4))
    assert [call.training for call in watch.calls[1:]] == [True, False]


def test_failed_calls_from_the_inside_out():
    def fails(self, x):
        raise ValueError

    model = nn.Sequential(nn.ReLU(), nn.Sequential(Call(fails)))
    forward = forward_of(model, torch.rand(1))
    with pytest.raises(ValueError, match=r"^$"):
        run(forward, RealExecution([]))
    watch = forward.watch
    assert [call.module for call in watch.failed] == [model[1][0], model[1], model]
    assert not any(call.finished for call in watch.failed)
    assert watch.innermost is None


def test_composite_operators_are_taken_apart():
    """In inference mode torch dispatches F.conv2d as one composite operator."""
    with torch.inference_mode():
        watch = watched(nn.Conv2d(1, 2, 3), torch.rand(1, 1, 4, 4))
    assert watch.macs == [2 * 4 * 9]


def test_only_what_is_written_is_copied():
    model = nn.Sequential(nn.Linear(4, 4), ClampsWeights())
    execution = RealExecution(model.parameters())
    before = model[1].linear.weight.detach().clone()
    run(forward_of(model, torch.rand(2, 4)), execution)
    assert [memory.numel() for memory, _ in execution._copies] == [4 * 4 * 4]
    assert not torch.equal(model[1].linear.weight, before)
    execution.end()
    assert torch.equal(model[1].linear.weight, before)


def test_hooks_of_the_user_have_the_last_word():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(16, 2))
    model[0].register_forward_hook(lambda module, args, out: torch.cat((out, out @ torch.ones(8, 8)), 1))
    watch = watched(model, torch.rand(3, 4))
    assert watch.calls[1].output_size == [3, 16]
    assert watch.macs[1] == 3 * 4 * 8 + 3 * 8 * 8
    assert watch.calls[2].parent is watch.root


def test_hooks_of_the_model_are_its_work():
    model = nn.Linear(4, 8)
    model.head = nn.Linear(8, 2)
    model.register_forward_hook(lambda module, args, out: {"logits": module.head(out)})
    watch = watched(model, torch.rand(3, 4))
    assert watch.root.input_size == [3, 4]
    assert watch.root.output_size == {"logits": [3, 2]}
    assert [call.module for call in watch.calls] == [model, model.head]


def test_a_model_with_a_call_of_its_own():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x):
            return self.b(self.a(x))

        __call__ = forward

    watch = watched(Own(), torch.rand(3, 4))
    assert (watch.root.input_size, watch.root.output_size) == ([3, 4], [3, 2])
    assert [call.parent for call in watch.calls[1:]] == [watch.root] * 2
    assert watch.macs[0] == 0


def test_a_hook_that_raises_ends_its_call():
    def raises(module, args, out):
        raise ValueError

    def catches(self, x):
        try:
            self.a(x)
        except ValueError:
            return self.b(x)

    model = Call(catches, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    model.a.register_forward_hook(raises)
    watch = watched(model, torch.rand(2, 4))
    assert watch.calls[2].module is model.b
    assert watch.innermost is None
    assert [call.finished for call in watch.calls] == [True, False, True]
    assert len(model.a._forward_hooks) == 1


class Streams(nn.Linear):
    def forward(self, x):
        yield super().forward(x)


class Awaited(nn.Linear):
    async def forward(self, x):
        return super().forward(x)


class StreamsAwaited(nn.Linear):
    async def forward(self, x):
        yield super().forward(x)


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (Streams, "a generator, which runs only while somebody iterates over it"),
        (Awaited, "a coroutine, which runs only while somebody awaits it"),
        (StreamsAwaited, "an asynchronous generator, which"),
    ],
)
@pytest.mark.parametrize("execution", ["auto", "real"])
def test_a_forward_that_only_returns_what_runs_later_is_refused(kind, what, execution):
    model = kind(4, 4)
    with untouched(model), pytest.raises(InputError, match=f"the forward returns {what}"):
        Statistics(model, (2, 4), execution=execution)


def test_a_generator_inside_the_model_runs_where_it_is_read():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Streams(4, 4)

        def forward(self, x):
            return list(self.inner(x))

    stats = Statistics(Reads(), (2, 4))
    assert stats.total_macs == 2 * 4 * 4
    assert stats.memory().params == 80


def test_a_run_frees_its_tensors_and_calls_without_the_collector():
    def alive():
        return sum(type(entry) in (ShapeTensor, WatchedCall) for entry in gc.get_objects())

    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.BatchNorm1d(4)))
    gc.collect()
    gc.disable()
    try:
        before = alive()
        stats = Statistics(model, torch.rand(2, 4))
        after = alive()
    finally:
        gc.enable()
    assert (stats.execution, after) == ("shape", before)

"""Backward times by autograd nodes, with a clock that backward functions advance."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from modelsummary.capture.backward import BackwardTimer
from modelsummary.capture.timer import Timer
from tests.clocks import ManualClock
from tests.models import Call

CLOCK = ManualClock()


class Slow(torch.autograd.Function):
    """A function whose backward takes some milliseconds."""

    @staticmethod
    def forward(ctx, x, milliseconds):
        ctx.milliseconds = milliseconds
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        CLOCK.wait(ctx.milliseconds)
        return grad, None


class Slowly(nn.Module):
    def __init__(self, milliseconds):
        super().__init__()
        self.milliseconds = milliseconds

    def forward(self, x):
        return Slow.apply(x, self.milliseconds)


def times(model, x, loss=torch.sum):
    """FQN and number of the call -> milliseconds."""
    timer = Timer(model, CLOCK)
    with timer.running():
        output = model(x)
    step = timer.steps.pop()
    backward = BackwardTimer(step, CLOCK)
    assert not backward.ran
    loss(output).backward()
    assert backward.ran
    names = {id(module): fqn for fqn, module in model.named_modules()}
    calls = list(step.root().walk())
    found = backward.milliseconds()
    unknown = [names[id(call.module)] for call in calls if call in backward.unknown]
    backward.detach()
    return [(names[id(call.module)], found[call]) for call in calls if found.get(call)], unknown


def test_nodes_belong_to_the_call_that_made_them():
    model = nn.Sequential(nn.Linear(2, 2), Slowly(3), nn.Sequential(Slowly(5), nn.ReLU(inplace=True)))
    assert times(model, torch.ones(1, 2)) == ([("1", 3.0), ("2.0", 5.0)], [])


def test_what_a_forward_does_itself_and_a_module_called_twice():
    shared = Slowly(2)
    model = Call(lambda self, x: self.a(Slow.apply(self.a(x * self.weight), 7)), a=shared)
    model.weight = nn.Parameter(torch.ones(2))
    assert times(model, torch.ones(2)) == ([("", 7.0), ("a", 2.0), ("a", 2.0)], [])


def test_in_place_and_residual_operations():
    def forward(self, x):
        y = self.a(x)
        y += self.b(x)
        return self.c(y)

    model = Call(forward, a=Slowly(1), b=Slowly(2), c=nn.ReLU(inplace=True))
    x = torch.ones(2, requires_grad=True)
    assert times(model, x) == ([("a", 1.0), ("b", 2.0)], [])


def test_what_comes_before_and_after_the_model_is_not_counted():
    x = Slow.apply(torch.ones(2, requires_grad=True), 100)
    model = nn.Sequential(Slowly(1))
    found = times(model, x, loss=lambda output: Slow.apply(output, 1000).sum())
    assert found == ([("0", 1.0)], [])


def test_a_frozen_part_has_no_backward():
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), Slowly(1), nn.Linear(2, 2), Slowly(2))
    assert times(model, torch.ones(1, 2)) == ([("3", 2.0)], [])


def test_nothing_to_differentiate():
    model = nn.Sequential(nn.ReLU())
    timer = Timer(model, CLOCK)
    with timer.running():
        model(torch.ones(2))
    backward = BackwardTimer(timer.steps.pop(), CLOCK)
    assert backward.milliseconds() == {}


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    inner = nn.Sequential(nn.Linear(2, 2), Slowly(4))
    model = Call(lambda self, x: checkpoint(self.inner, x, use_reentrant=reentrant), inner=inner)
    x = torch.ones(1, 2, requires_grad=True)
    if reentrant:  # its nodes are made in the backward, out of sight: the time is counted for the caller
        assert times(model, x) == ([("", 4.0)], ["inner", "inner.0", "inner.1"])
    else:
        assert times(model, x) == ([("inner.1", 4.0)], [])


def test_only_what_is_checkpointed_is_unknown():
    model = Call(
        lambda self, x: checkpoint(self.inner, self.stem(x), use_reentrant=True), stem=Slowly(50), inner=Slowly(4)
    )
    assert times(model, torch.ones(1, 2, requires_grad=True)) == ([("", 4.0), ("stem", 50.0)], ["inner"])


def test_what_the_output_does_not_lead_to():
    def forward(self, x):
        self.aux = self.head(x).sum()
        return self.mid(x)

    model = Call(forward, head=Slowly(5), mid=Slowly(3))
    timer = Timer(model, CLOCK)
    with timer.running():
        output = model(torch.ones(2, requires_grad=True))
    backward = BackwardTimer(timer.steps.pop(), CLOCK)
    assert [call.module for call in backward.unreached if call.module is not model] == [model.head]
    (output.sum() + model.aux).backward()
    assert sum(backward.milliseconds().values()) == 8.0


def test_the_graph_is_as_before():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
    x = torch.ones(2, 3)
    model(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    times(model, x)
    assert all(map(torch.equal, expected, (parameter.grad for parameter in model.parameters())))

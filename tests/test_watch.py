"""Hooks and operators of one run, as facts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modelsummary.capture.real import RealExecution
from modelsummary.capture.watch import Watch
from tests.models import Call, ClampsWeights


def watched(model, *args, **kwargs):
    execution = RealExecution(list(model.modules()), [])
    watch = Watch(execution)
    with watch, torch.no_grad():
        model(*args, **kwargs)
    return watch


def test_calls_in_the_order_in_which_they_begin():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU()))
    watch = watched(model, torch.rand(2, 4))
    assert [call.module for call in watch.calls] == [model, model[0], model[1], model[1][0]]
    assert [call.parent for call in watch.calls] == [None, watch.calls[0], watch.calls[0], watch.calls[2]]
    assert all(call.finished for call in watch.calls)
    assert watch.running is None
    assert [call.macs for call in watch.calls] == [0, 32, 0, 0]


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
    watch = Watch(RealExecution([], []))
    with pytest.raises(ValueError, match=r"^$"), watch:
        model(torch.rand(1))
    assert [call.module for call in watch.failed] == [model[1][0], model[1], model]
    assert not any(call.finished for call in watch.failed)
    assert watch.running is None


def test_composite_operators_are_taken_apart():
    """In inference mode torch hands F.conv2d over whole."""
    with torch.inference_mode():
        watch = watched(nn.Conv2d(1, 2, 3), torch.rand(1, 1, 4, 4))
    assert watch.calls[0].macs == 2 * 4 * 9


def test_only_what_is_written_is_copied():
    model = nn.Sequential(nn.Linear(4, 4), ClampsWeights())
    execution = RealExecution(list(model.modules()), [])
    before = model[1].linear.weight.detach().clone()
    with Watch(execution), torch.no_grad():
        model(torch.rand(2, 4))
    assert [tensor is model[1].linear.weight for tensor, *_ in execution._copies] == [True]
    assert not torch.equal(model[1].linear.weight, before)
    execution.put_back()
    assert torch.equal(model[1].linear.weight, before)

"""The operators of a predicted step, against what torch dispatches in a real one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from modelsummary.capture.input_data import call_arguments
from modelsummary.capture.observe import observe
from modelsummary.memory.step_options import step_plan


class Dispatched(TorchDispatchMode):
    """Names of the operators that torch dispatches."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU, nn.Mish])  # two backwards are one kernel or composite
def test_the_operators_of_a_step_are_those_that_torch_dispatches(activation):
    model, x = nn.Sequential(nn.Linear(4, 8), activation(), nn.Linear(8, 2)), torch.rand(3, 4)
    with Dispatched() as real:
        model(x).sum().backward()
    call = call_arguments(model, x, (), {}, batch_dim=None, device=None, dtypes=None)
    found = [each.run.call for each in observe(model, call, step_plan("train", {}), storages=False).operators]
    assert [call.func for call in found] == real.names
    # the first product: bias and turned weight are parameters, the input is none
    first = next(call for call in found if call.name == "aten.addmm")
    assert first.key == "aten.addmm.default(f32[8]p, f32[3x4], f32[4x8/1x4]p)"
    assert all(call.args == () for call in found if call.rule.is_view)

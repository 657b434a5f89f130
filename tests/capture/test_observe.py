"""The operators of a predicted step, against what torch dispatches in a real one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from modelsummary import Statistics
from modelsummary.capture.input_data import call_arguments
from modelsummary.capture.modules import ModelParts
from modelsummary.capture.observe import observe
from modelsummary.errors import StepError
from modelsummary.memory.step_options import step_plan
from tests.models import Call


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
    call = call_arguments(ModelParts.of(model), x, (), {}, batch_dim=None, device=None, dtypes=None)
    found = [each.run.call for each in observe(model, call, step_plan("train", {}), storages=False).operators]
    assert [call.func for call in found] == real.names
    # the first product: bias and turned weight are parameters, the input is none
    first = next(call for call in found if call.name == "aten.addmm")
    assert first.key == "aten.addmm.default(f32[8]p, f32[3x4], f32[4x8/1x4]p)"
    assert all(call.args == () for call in found if call.rule.is_view)


class Chunked(nn.Module):
    def __init__(self, in_place=False):
        super().__init__()
        self.inner, self.table = nn.Linear(4, 8), nn.Buffer(torch.ones(8))
        self.spare, self.in_place = nn.Parameter(torch.ones(2)), in_place

    def forward(self, x):
        first, second = self.inner(x).chunk(2, -1)
        gate = first.sigmoid()
        if self.in_place:
            gate.mul_(2)
        return gate * second.sigmoid()


def trace_of(model):
    call = call_arguments(ModelParts.of(model), torch.rand(3, 4), (), {}, batch_dim=None, device=None, dtypes=None)
    return observe(model, call, step_plan("train", {}), storages=True)


def test_a_trace_names_tensors_and_results():
    trace = trace_of(Chunked())
    assert list(trace.tensors) == ["spare", "table", "inner.weight", "inner.bias"]
    assert trace.without_gradient == ["spare"]
    product = next(step.run for step in trace.operators if step.run.call.name == "aten.addmm")
    assert product.reads[0] == trace.tensors["inner.bias"]
    assert product.reads[2] == trace.tensors["inner.weight"]
    assert trace.results == {next(step.run for step in trace.operators if step.run.call.name == "aten.mul").makes[0]}


def test_an_operator_has_its_line_and_the_offsets_of_its_arguments():
    lines = Chunked.forward.__code__
    runs = [step.run for step in trace_of(Chunked()).operators if step.run.call.name == "aten.sigmoid"]
    assert [run.offsets for run in runs] == [(0,), (4,)]  # two halves of one storage
    assert runs[0].reads == runs[1].reads
    assert runs[0].call is runs[1].call
    assert [run.line for run in runs] == [(__file__, lines.co_firstlineno + row) for row in (2, 5)]
    # torch's own modules have no lines of a model
    assert {step.run.line for step in trace_of(nn.Sequential(nn.Linear(4, 8), nn.ReLU())).operators} == {None}


def test_writes_are_the_storages_of_the_arguments_that_are_written():
    trace = trace_of(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True)))
    norm, relu = (
        next(step.run for step in trace.operators if name in step.run.call.name) for name in ("batch_norm", "relu")
    )
    assert norm.writes == tuple(trace.tensors[f"1.{name}"] for name in ("running_mean", "running_var"))
    assert relu.writes == relu.makes == (norm.makes[0],)


def test_the_operator_that_overwrites_a_saved_tensor_is_named():
    with pytest.raises(StepError, match=r"aten\.mul_ wrote it in line") as error:
        trace_of(Chunked(in_place=True))
    assert error.value.line == (__file__, Chunked.forward.__code__.co_firstlineno + 4)


def test_gradients_inside_of_a_forward_cost_the_same_in_both_of_torchs_forms():
    def transformed(self, x):
        return self.linear(torch.func.grad(lambda inner: torch.tanh(self.linear(inner)).sum())(x))

    def written(self, x):
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(torch.tanh(self.linear(x)).sum(), x, create_graph=True)
        return self.linear(grad)

    linear, x = nn.Linear(64, 64), torch.rand(8, 64)
    models = [Call(forward, linear=linear) for forward in (transformed, written)]
    memories = [Statistics(model, x).memory() for model in models]
    assert len({(memory.grads, memory.activations) for memory in memories}) == 1
    assert memories[0].activations > 2 * 8 * 64 * 4  # the two tensors that tanh and the second product keep
    with pytest.raises(RuntimeError, match="hooks"), torch.autograd.graph.save_on_cpu():
        models[0](x)  # as before: torch refuses its transforms under hooks of others

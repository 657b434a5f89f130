"""The record of a forward: constants, batch sizes, choices of the mode, obstacles."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from modelsummary import DataDependentError
from modelsummary.capture.input_data import call_arguments
from modelsummary.capture.modules import ModelParts
from modelsummary.capture.templates import Attribute, BatchSize, ModeChoice, OwnDevice, Unknown, leaves_of
from modelsummary.record.merging import _linear
from modelsummary.record.runs import record
from tests.idioms import Gpt2, MixtureOfExperts, ids, rows
from tests.models import CachesTensors, Call
from tests.untouched import untouched


def recorded(model, *inputs, execution="shape", batch_dim=None):
    call = call_arguments(ModelParts.of(model), inputs, (), {}, batch_dim=batch_dim, device=None, dtypes=None)
    return list(record(model, call, execution, batch_dim))


def calls(event):
    return [child.name for child in event.children]


def test_the_tree_of_calls():
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model = Call(lambda self, x: F.relu(self.inner(x)) + x, inner=inner)
    best = recorded(model, rows(2, 4))[0]
    assert calls(best.root) == ["inner", "relu", "add"]
    assert calls(best.root.children[0]) == ["inner.0", "inner.1"]
    assert best.root.children[0].macs == 2 * 16
    assert (best.batch_size, best.batch_dim, best.no_other_mode) == (2, 0, False)


def test_sizes_of_the_batch_and_choices_of_the_mode():
    def forward(self, x):
        x = x.view(x.shape[0] * 2, -1) + torch.zeros(x.shape[0] * 2 + 1, 1)[1:]
        return F.dropout(x, 0.5, self.training), x.view(1, -1)

    best = recorded(Call(forward), rows(3, 4))[0]
    view, zeros, _, _, dropout, flat = best.root.children
    assert leaves_of(view.args)[1:] == [BatchSize(2, 0), -1]
    assert leaves_of(zeros.args)[0] == BatchSize(2, 1)
    assert ModeChoice(True, False) in leaves_of((dropout.args, dropout.kwargs))
    assert flat.result.sizes == (1, BatchSize(4, 0))
    assert flat.result.batch == (1, 4)


@given(
    factor=st.integers(-5, 9).filter(bool),
    offset=st.integers(-9, 9),
    divisor=st.sampled_from([1, 2, 3, 4, 8]),
    rounds_up=st.booleans(),
    batch=st.integers(2, 8),
)
def test_functions_of_the_batch_are_told_from_the_sizes_tried(factor, offset, divisor, rounds_up, batch):
    offset = offset if divisor == 1 else (divisor - 1) * rounds_up
    truth = BatchSize(factor, offset, divisor)
    tried = [batch, 1, batch + 257]  # as ``record`` does
    sizes = [truth.at(each) for each in tried]
    found = next(each for each in _linear(tried, sizes) if list(map(each.at, tried)) == sizes)
    assert [found.at(each) for each in range(1, 600)] == [truth.at(each) for each in range(1, 600)]


def test_dropout_of_a_model_in_eval_makes_another_tensor():
    # in evaluation dropout(x) is x: only the run in the other mode distinguishes the two uses
    model = Call(lambda self, x: x + self.drop(x), drop=nn.Dropout(0.5)).eval()
    best = recorded(model, rows(2, 4))[0]
    drop, add = best.root.children
    assert add.args[0] is drop.args[0]
    assert add.args[1] is drop.result
    assert drop.result is not drop.args[0]


def test_tensors_of_the_model_and_devices():
    def forward(self, x):
        return F.linear(x, self.linear.weight) + torch.arange(4, device=x.device) + self.constant

    model = Call(forward, linear=nn.Linear(4, 4))
    model.constant = torch.ones(4)
    best = recorded(model, rows(2, 4))[0]
    linear, arange, _, add = best.root.children
    assert Attribute("linear.weight") in leaves_of(linear.args)
    assert OwnDevice() in leaves_of(arange.kwargs)
    assert Attribute("constant") in leaves_of(add.args)


def test_a_tensor_from_outside_is_a_constant():
    outside = torch.ones(4)
    best = recorded(Call(lambda self, x: x + outside), rows(2, 4))[0]
    assert best.root.children[0].args[1] is outside


def test_what_is_written_in_place():
    model = Call(lambda self, x: self.a(x).relu_().view(-1).add_(1), a=nn.Linear(4, 4))
    best = recorded(model, rows(2, 4))[0]
    linear, relu, view, add = best.root.children
    storage = linear.result.storages[0]
    assert not linear.writes[0]
    assert relu.writes[0] == add.writes[0] == {storage}
    assert not view.writes[0]
    assert view.result.storages[0] == storage


def test_batch_norm_writes_its_statistics_in_train():
    model = nn.Sequential(nn.BatchNorm1d(4)).eval()
    best = recorded(model, rows(3, 4))[0]
    written = set().union(*best.root.children[0].writes)
    names = {fqn for fqn, storages in best.storages_of.items() if set(storages) & written}
    assert names == {"0.running_mean", "0.running_var", "0.num_batches_tracked"}


@pytest.mark.parametrize(
    ("forward", "obstacle"),
    [
        (lambda self, x: x if bool(x.sum() > 0) else -x, "decides by values of tensors: it calls bool"),
        (lambda self, x: x * int(self.scale), "decides by values of tensors: it calls int"),
        (lambda self, x: x * torch.rand(()).item(), "decides by values of tensors: it calls item"),
        (lambda self, x: setattr(self, "seen", self.seen + 1) or x * 1, "assigns its attribute 'seen'"),
        (lambda self, x: self.kept.append(1) or x * 1, "assigns its attribute 'kept'"),
        (lambda self, x: setattr(x, "requires_grad", True) or x * 1, "assigns an attribute of a tensor"),
    ],
)
def test_obstacles(forward, obstacle):
    model = Call(forward)
    model.scale, model.kept, model.seen = nn.Parameter(torch.ones(1)), [], 0
    with untouched(model):
        records = recorded(model, rows(2, 4), execution="real")
    assert all(each.root.obstacle.startswith(obstacle) for each in records)


def test_what_the_caller_changed_is_no_argument():
    def forward(self, x):
        self.layer.state = object()
        return self.layer(x)

    model = Call(forward, layer=nn.Linear(4, 4))
    model.layer.state = None
    (layer,) = recorded(model, rows(2, 4))[0].root.children
    assert (len(layer.args), layer.kwargs) == (1, {})
    assert [leaf.reason for leaf in layer.unknown] == ["another state by the code that calls it"]


def test_records_for_one_mode_and_one_batch_size_come_last():
    model = Call(lambda self, x: self.a(x) if self.training and x.shape[0] == 2 else self.b(x), a=nn.Identity())
    model.b = nn.Linear(4, 4)
    records = recorded(model, rows(2, 4))
    assert [bool(each.root.obstacle) for each in records] == [True] * (len(records) - 1) + [False]
    assert records[-1].batch_size is None
    assert records[-1].no_other_mode


def test_a_constant_that_is_not_linear_in_the_batch_is_unknown():
    best = recorded(Call(lambda self, x: x.repeat(x.shape[0] ** 2, 1)), rows(2, 4))[0]
    assert any(
        isinstance(leaf, Unknown) and "4, which becomes" in leaf.reason
        for leaf in leaves_of(best.root.children[0].args)
    )


def test_the_batch_may_be_the_second_dimension():
    best = recorded(nn.Sequential(nn.Unflatten(0, (2, 3)), nn.Flatten(2)), rows(6, 5))[0]
    assert (best.batch_size, best.batch_dim) == (5, 1)
    best = recorded(nn.Linear(4, 4), rows(6, 5, 4), batch_dim=1)[0]
    assert (best.batch_size, best.batch_dim) == (5, 1)


@pytest.mark.parametrize("execution", ["shape", "real"])
@pytest.mark.parametrize(
    ("model", "inputs"), [(Gpt2(), ids()), (CachesTensors(), rows(2, 4)), (MixtureOfExperts(), rows(4, 8))]
)
def test_nothing_is_left_behind(model, inputs, execution):
    call = nn.Module.__call__
    needs_values = isinstance(model, MixtureOfExperts) and execution == "shape"
    with untouched(model), pytest.raises(DataDependentError) if needs_values else nullcontext():
        recorded(model, inputs, execution=execution)
    assert nn.Module.__call__ is call


def test_nothing_is_left_behind_by_a_forward_that_raises():
    def forward(self, x):
        x = self.a(x)
        if len(self.seen) == 1:
            raise ValueError("the second time")
        self.seen.append(1)
        return x

    model = Call(forward, a=nn.Linear(4, 4))
    model.seen = [0, 0]
    call = nn.Module.__call__
    with untouched(model):
        recorded(model, rows(2, 4))
    model.seen = [0]
    with untouched(model), pytest.raises(ValueError, match="the second time"):
        recorded(model, rows(2, 4))
    assert nn.Module.__call__ is call

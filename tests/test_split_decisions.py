"""Forwards that decide by values of integers: opened where they must be, and checked at every call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import modelsummary
from modelsummary import SplitError, Statistics, TraceError
from tests.idioms import rows
from tests.models import Call


def masking(self, x, mask):
    """What transformers does: a mask that hides nothing is left out."""
    hidden = None if mask.all() else (1 - mask)[..., None].bool()
    for layer in self.layers:
        x = layer(x)
        if hidden is not None:
            x = x.masked_fill(hidden, 0.0)
    return x


def model():
    return Call(masking, layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(4)))


def mask(batch, hidden=0):
    found = torch.ones(batch, 3, dtype=torch.long)
    found[:, 3 - hidden :] = 0
    return found


@pytest.mark.parametrize("hidden", [0, 1])
def test_stages_hold_for_inputs_that_decide_alike(hidden):
    stages = Statistics(model(), (rows(2, 3, 4), mask(2, hidden))).split(4)
    assert [each.macs for each in stages.facts] == [2 * 3 * 16] * 4
    assert "Valid for inputs by whose values the forward decides alike" in str(stages)
    assert stages.verify(rows(5, 3, 4), mask(5, hidden)).outputs == 0.0
    with pytest.raises(SplitError, match=rf"gave {not hidden} when it was recorded, and gives {bool(hidden)}"):
        stages(rows(2, 3, 4), mask(2, 1 - hidden))


def test_other_values_that_decide_alike():
    stages = Statistics(model(), (rows(2, 3, 4), mask(2, 1))).split(2)
    assert stages.verify(rows(2, 3, 4), mask(2, 2)).outputs == 0.0


@pytest.mark.parametrize("hidden", [0, 1])
def test_graphs_hold_for_inputs_that_decide_alike(hidden):
    whole = model()
    graph = modelsummary.symbolic_trace(whole, meta_args={"x": rows(2, 3, 4), "mask": mask(2, hidden)})
    given = rows(5, 3, 4), mask(5, hidden)
    assert torch.equal(graph(*given), whole(*given))
    with pytest.raises(TraceError, match=rf"read {not hidden} when it was traced, and reads {bool(hidden)}"):
        graph(rows(5, 3, 4), mask(5, 1 - hidden))


def test_a_layer_that_decides_stays_whole_where_that_costs_nothing():
    both = Call(lambda self, x, mask: self.b(self.a(x, mask)), a=model(), b=nn.Linear(4, 16, bias=False))
    stages = Statistics(both, (rows(2, 3, 4), mask(2))).split(2)
    assert [each.first for each in stages.facts] == ["a", "b"]
    assert stages.verify(rows(2, 3, 4), mask(2, 1)).outputs == 0.0  # the layer decides anew


def test_numbers_that_follow_the_batch_are_compared_with_it():
    def forward(self, x, mask):
        return self.b(self.a(x)) * mask.sum().item()

    stages = Statistics(Call(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), (rows(2, 3, 4), mask(2))).split(2)
    assert stages.verify(rows(4, 3, 4), mask(4)).outputs == 0.0  # 3 for each row
    with pytest.raises(SplitError, match="gave 12 when it was recorded, and gives 8"):
        stages(rows(4, 3, 4), mask(4, 1))


def test_what_floats_decide_is_never_opened():
    def forward(self, x, scale):
        return self.b(self.a(x)) if scale.sum() > 0 else self.b(x)

    stats = Statistics(Call(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), (rows(2, 4), torch.ones(2)))
    with pytest.raises(SplitError, match="the model decides by values of tensors"):
        stats.split(2)

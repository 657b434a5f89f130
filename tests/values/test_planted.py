"""Planted NaN and Inf: the first offender is named in each, and nothing in sound models."""

from __future__ import annotations

import pytest
import torch

from modelsummary import Statistics
from tests.idioms import IDIOMS
from tests.untouched import untouched
from tests.values.planted import DEFECTS, Model


def _trained(model, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).float().sum().backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("name", DEFECTS)
def test_the_first_offender(name):
    defect = DEFECTS[name]
    torch.manual_seed(0)
    model, x = Model(defect.forward), torch.randn(3, 5, 8)
    with Statistics(model, x).watch() as values:
        _trained(model, x)
    bad = values.first_bad()
    assert (bad.operator, bad.kind, bad.phase) == (defect.operator, defect.kind, defect.phase)
    assert (bad.key, bad.class_name, bad.step) == (("part", 0), "Part", 0)
    assert bad.node == defect.node or not defect.node
    assert bad.line.file.endswith("planted.py")
    assert bad.code.endswith("# planted")
    assert defect.operator in str(bad)


def test_there_are_forty():
    assert len(DEFECTS) >= 40


@pytest.mark.parametrize("name", IDIOMS)
def test_sound_models_make_nothing_bad(name):
    kind, inputs = IDIOMS[name]
    torch.manual_seed(0)
    model, x = kind(), inputs(3, 0)
    stats = Statistics(model, x)
    with untouched(model):
        values = stats.values(x)
    assert values.first_bad() is None
    assert all(call.output is None or call.output.is_finite for call in values.calls)
    assert values.parameters

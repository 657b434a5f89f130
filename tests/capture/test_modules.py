"""Facts of modules without a run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from modelsummary import InputError, SplitError, Statistics
from modelsummary.capture.modules import modules_of, named_modules, tensors_of_modules, unwrap
from modelsummary.capture.tree import module_facts, totals
from tests.models import Decoder, Nested


@st.composite
def module_graphs(draw):
    """Modules whose children are any earlier ones, so some are shared, and some of which register a tied parameter."""
    made = [nn.Linear(1, 1), nn.Linear(2, 1)]
    for _ in range(draw(st.integers(0, 8))):
        container = nn.Module()
        for position, index in enumerate(draw(st.lists(st.integers(0, len(made) - 1), max_size=4))):
            container.add_module(f"child{position}", made[index])
        if draw(st.booleans()):
            container.tied = made[1].weight
        made.append(container)
    return made[-1]


@given(module_graphs())
@settings(max_examples=100, deadline=None)
def test_names_are_those_of_torch(model):
    assert named_modules(model) == list(model.named_modules())
    assert modules_of(model) == list(model.modules())
    facts = module_facts(model)
    assert [each.fqn for each in facts.values()] == [fqn for fqn, _ in model.named_modules()]
    for own in facts.values():
        assert own.all_parameters.totals().numel == sum(p.numel() for p in own.module.parameters())


def test_deep_models_do_not_meet_the_recursion_limit_of_names():
    model = nn.Linear(1, 1)
    for _ in range(150):
        model = Nested(model)
    assert len(named_modules(model)) == 151
    assert next(iter(module_facts(model).values())).all_parameters.totals().numel == 2


def test_a_tied_parameter_is_owned_twice_and_counted_once():
    model = Decoder()
    facts = {each.fqn: each for each in module_facts(model).values()}
    assert facts["embed"].parameters[0].key == facts["head"].parameters[0].key
    assert facts[""].all_parameters.totals().numel == sum(p.numel() for p in model.parameters())


def test_totals():
    layer = nn.Linear(3, 2)
    layer.bias.requires_grad_(False)
    own = module_facts(layer)[id(layer)]
    assert totals(own.parameters) == (8, 6, 32)
    assert [(each.name, each.shape) for each in own.parameters] == [("weight", [2, 3]), ("bias", [2])]


def test_tensors_of_modules_are_parameters_and_buffers():
    norm = nn.BatchNorm1d(2)
    assert list(tensors_of_modules([norm])) == [*norm.parameters(), *norm.buffers()]


def test_unwrapping():
    model = nn.Linear(1, 1)
    assert unwrap(model) is model
    assert unwrap(nn.DataParallel(torch.compile(nn.DataParallel(model), backend="eager"))) is model


class Child(nn.Module):
    """A module that refers to the one around it, as editors of attention layers do."""

    def __init__(self, parent):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.parent = parent

    def forward(self, x):
        return self.linear(x)


class Parent(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(Child(self) for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_modules_that_refer_to_those_around_them():
    stats = Statistics(Parent(30), (2, 4))  # a layer: 4 * 4 + 4 parameters, 2 * 4 * 4 multiply-adds
    assert (stats.total_params, stats["blocks.7"].num_params, stats.total_macs) == (600, 20, 960)
    assert stats.memory().params == 4 * 600
    for verb in (lambda: stats.split(2), lambda: stats.parallel_plan(shard=2), lambda: stats.parallel_plan(tensor=2)):
        with pytest.raises((InputError, SplitError), match=r"a tree of modules, but 'blocks.0.parent'"):
            verb()

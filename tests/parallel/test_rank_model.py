"""The copy of a model that one rank runs holds no part of the model, whatever holds the parts."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from modelsummary import InputError, Statistics
from modelsummary.cluster import Cluster, Plan
from modelsummary.parallel.rank_model import copied
from tests.parallel.mixtures import DIM, MIXTURES
from tests.parallel.models import Called
from tests.untouched import untouched


class Held(nn.Module):
    """Calls one layer in every way in which an object can hold it."""

    def __init__(self):
        super().__init__()
        self.layer = layer = nn.Linear(4, 4)
        self.activation = nn.functional.relu
        self.closure = lambda x: 1.0 * layer(x)
        self.default = lambda x, layer=layer: layer(x)
        self.listed = [functools.partial(lambda layer, x: layer(x), layer)]
        self.named = {"method": layer.forward}
        before = self.forward

        def repeated(x, times=2):
            return layer(x) if not times else repeated(x, times - 1)

        self.repeated = repeated
        self.forward = lambda x: before(x) * 2
        layer.register_forward_hook(lambda _module, _args, out: out + layer.bias)

    def forward(self, x):
        calls = (self.closure, self.default, self.listed[0], self.named["method"], self.repeated)
        return self.activation(sum(call(x) for call in calls))


def test_functions_hold_the_copies():
    model = Held()
    with untouched(model):
        twin = copied(model, torch.ones_like)
        # Five calls of 4 + 1, of which the four that run the hook add 1 more, twice.
        assert twin(torch.ones(1, 4)).tolist() == [[2 * (5 * 5 + 4)] * 4]
    assert twin.activation is nn.functional.relu
    assert twin.repeated.__closure__[1].cell_contents is twin.repeated


def test_a_model_that_refuses_is_named():
    model = nn.Linear(2, 2)
    model.lock = (each for each in ())  # a generator cannot be copied
    with pytest.raises(InputError, match="Linear cannot be copied, which a plan needs: TypeError"):
        copied(model, torch.empty_like)


def test_layers_that_a_closure_calls_are_split():
    stats = Statistics(Called(), (3, 8, 16))
    plan = stats.parallel_plan(tensor=2)
    assert {layer.fqn: layer.role for layer in plan.layers if "mlp" in layer.fqn} == {
        "mlp.up": "column",
        "mlp.down": "row",
    }
    assert not any(layer.reason for layer in plan.layers)
    # Weights and bias of the first layer and the weight of the second are halved, the other bias is whole.
    mlp = (2 * 16 * 64 + 64) // 2 + 16
    attention = sum(parameter.numel() for parameter in stats.live.model.attention.parameters())
    attention -= (4 * 16 * 16 + 3 * 16) // 2
    memory = plan.memory()
    assert memory.params == 4 * (mlp + attention + 32)
    assert memory.grads == memory.params


def test_experts_that_are_the_whole_model_are_counted_as_a_rank_has_them():
    torch.manual_seed(0)
    plan = Statistics(MIXTURES["Soft"](), (3, 5, DIM)).parallel_plan(expert=2, dispatch="all_reduce")
    (layer,) = plan.layers
    assert layer.fqn == ""
    assert plan.params_per_rank == layer.params == plan.memory().params // 4


def test_a_custom_operator_in_an_attribute():
    @torch.library.custom_op("modelsummary_tests::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    doubled.register_fake(torch.empty_like)
    doubled.register_autograd(lambda _ctx, grad: grad * 2)

    class Doubled(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.operators = nn.Linear(8, 16), nn.Linear(16, 8), [doubled]

        def forward(self, x):
            return self.down(self.up(x)) + self.operators[0](x)

    stats = Statistics(nn.Sequential(Doubled(), Doubled()), (4, 8))
    assert stats.simulate(Plan(data=2), Cluster("H100"), global_batch=8).step_seconds > 0
    assert stats.parallel_plan(tensor=2).collectives["forward", "all_reduce"] == (2, 2 * 4 * 8 * 4)

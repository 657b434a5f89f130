"""Making a plan and asking what it costs leave the model as it was, also where they fail."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modelsummary import InputError, Statistics, StepError
from tests.parallel.models import OLD
from tests.untouched import untouched


class Heads(nn.Module):
    """Attention that keeps the number of heads, a buffer and a norm with statistics."""

    def __init__(self):
        super().__init__()
        self.heads = 4
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        b, t, _ = x.shape
        q, k, v = (each.view(b, t, self.heads, -1).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, 16)
        return self.norm(self.out(y).transpose(1, 2))


@pytest.mark.parametrize("execution", ["shape", "real"])
def test_a_plan(execution):
    model = Heads()
    stats = Statistics(model, torch.rand(2, 3, 16), execution=execution)
    with untouched(model):
        print(stats.parallel_plan(tensor=2))


def test_a_plan_that_is_refused():
    model = Heads()
    stats = Statistics(model, torch.rand(2, 3, 16))
    with untouched(model), pytest.raises(InputError):
        stats.parallel_plan(tensor=7)
    with untouched(model), pytest.raises(InputError):
        stats.parallel_plan(tensor=2, precision="half")


@pytest.mark.parametrize("mesh", [{"tensor": 2}] if OLD else [{"tensor": 2}, {"shard": 2}])
def test_memory_of_a_rank(mesh):
    model = Heads()
    plan = Statistics(model, torch.rand(2, 3, 16)).parallel_plan(**mesh)
    with untouched(model):
        plan.memory(rank=0, optimizer="adamw")

    def fails(_):
        raise ValueError("stop")

    with untouched(model), pytest.raises(StepError, match="stop"):
        plan.memory(rank=0, loss=fails)
    assert not torch.distributed.is_initialized()


def test_predicted_time():
    model = Heads()
    stats = Statistics(model, torch.rand(2, 3, 16))
    with untouched(model):
        stats.estimate_latency("A100", backward=True, optimizer="adamw")
        stats.kernels("A100", mode="compiled", backward=True)
    with untouched(model), pytest.raises(InputError):
        stats.estimate_latency("A100", mode="quick")

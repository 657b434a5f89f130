"""After a run, shape-only or real, returned or raised, everything is as before."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from modelsummary import ForwardError, Statistics
from tests.models import CachesTensors, Call, ClampsWeights, Decoder, ReplacesData
from tests.untouched import untouched

EXECUTIONS = ["shape", "real"]


def draws(self, x):
    return x + torch.rand(4) + random.random() + float(np.random.rand()) + torch.rand(4, generator=self.generator)


def flips_modes(self, x):
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(True)
    torch.backends.mha.set_fastpath_enabled(True)
    self.linear.eval()
    self.train()
    return self.linear(x)


def rewires(self, x):
    """Adds and removes modules, parameters, buffers and hooks."""
    del self.linear.bias
    self.linear.register_parameter("bias", None)
    self.linear.register_buffer("extra", torch.ones(4))
    self.added = nn.Linear(4, 4)
    self.linear.register_forward_hook(lambda *args: None)
    return self.added(self.linear(x))


def weight_norm():
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(nn.Linear(4, 4))


def pruned():
    layer = nn.Linear(4, 4)
    prune.random_unstructured(layer, "weight", 0.5)
    return layer


def frozen():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[0].weight.requires_grad_(False)
    model[0].bias.grad = torch.ones(4)
    model[1].eval()
    return model


MODELS = {
    "stores tensors": CachesTensors,
    "writes parameters": ClampsWeights,
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()),
    "frozen parts": frozen,
    "random numbers": lambda: Call(draws, generator=torch.Generator().manual_seed(3)),
    "modes": lambda: Call(flips_modes, linear=nn.Linear(4, 4)),
    "rewires": lambda: Call(rewires, linear=nn.Linear(4, 4)),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(3)),
    "weight norm hook": weight_norm,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "spectral norm hook": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    "pruned": pruned,
    "lstm": lambda: nn.LSTM(4, 4),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8),
}


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("case", MODELS)
def test_untouched_after_a_run(case, execution):
    model = MODELS[case]()
    with untouched(model):
        stats = Statistics(model, torch.ones(2, 4), execution=execution)
    assert stats.execution == execution


def test_replaced_data_comes_back():
    model = ReplacesData()
    with untouched(model):
        stats = Statistics(model, torch.ones(2, 4))
    assert stats.execution == "real"
    assert "set_data" in stats.fallback_reason


def fails(self, x):
    raise ValueError("deliberately")


@pytest.mark.parametrize("execution", ["auto", *EXECUTIONS])
@pytest.mark.parametrize("case", MODELS)
def test_untouched_after_an_exception(case, execution):
    model = nn.Sequential(MODELS[case](), Call(fails))
    with untouched(model), pytest.raises(ForwardError, match="deliberately") as caught:
        Statistics(model, torch.ones(2, 4), execution=execution)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_untouched_after_an_interrupt(execution):
    def interrupt(self, x):
        raise KeyboardInterrupt

    model = nn.Sequential(CachesTensors(), Call(interrupt))
    with untouched(model), pytest.raises(KeyboardInterrupt):
        Statistics(model, torch.ones(2, 4), execution=execution)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_inputs_are_not_written(execution):
    model = Call(lambda self, x, rest: x.relu_() + rest.pop("y"))
    x, rest = -torch.ones(3), {"y": torch.ones(3)}
    Statistics(model, x, rest, execution=execution)
    assert x.tolist() == [-1.0] * 3
    assert list(rest) == ["y"]


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_tensors_inside_of_objects_are_not_written(execution):
    class Batch:
        def __init__(self):
            self.x = -torch.ones(3)

    batch = Batch()
    Statistics(Call(lambda self, batch: batch.x.relu_()), batch, execution=execution)
    assert batch.x.tolist() == [-1.0] * 3


def test_a_decision_on_a_tensor_inside_of_an_object_needs_values():
    class Batch:
        def __init__(self):
            self.x = torch.ones(3)

    stats = Statistics(Call(lambda self, batch: batch.x if batch.x.sum() > 0 else batch.x[:1]), Batch())
    assert stats.execution == "real"


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_run_does_not_change_the_next_forward(execution):
    """A cache filled with meta tensors, or a moved generator, would show here."""
    model = Decoder().eval()
    ids = torch.arange(12).reshape(2, 6)
    expected = copy.deepcopy(model)(ids).logits
    Statistics(model, ids, execution=execution)
    assert torch.equal(model(ids).logits, expected)


def test_a_training_step_is_the_same_after_a_run():
    def step(model):
        torch.manual_seed(1)
        model(torch.ones(3, 4)).sum().backward()
        return [p.grad for p in model.parameters()], list(model.buffers())

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    expected = step(copy.deepcopy(model))
    Statistics(model, (5, 4))
    Statistics(model, (5, 4), execution="real")
    for before, after in zip(expected, step(model), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_the_autograd_graph_of_the_user_stays_valid():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    loss = model(torch.rand(3, 4)).sum()
    Statistics(model, (5, 4), execution="real")
    loss.backward()


def test_hooks_of_the_user_run_and_stay():
    seen = []
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape)))
    with untouched(model):
        Statistics(model, (2, 4))
    assert seen == [(2, 4)]


def test_a_call_from_another_thread_is_not_recorded():
    from concurrent.futures import ThreadPoolExecutor

    other = nn.Linear(4, 4)

    def elsewhere(self, x):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(other, torch.rand(1, 4)).result()
        return self.linear(x)

    stats = Statistics(Call(elsewhere, linear=nn.Linear(4, 4)), (2, 4))
    assert [row.fqn for row in stats] == ["linear"]
    assert stats.total_mult_adds == 32

"""Faults at every place, threads, random models, and many summaries in a row: nothing is left behind."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from modelsummary import Statistics
from tests.models import Call
from tests.untouched import untouched


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)


def mixed():
    return Call(
        lambda self, x: self.head(self.norm(self.first(x)).relu_().flatten(1)) + self.bias[0],
        first=nn.Conv2d(3, 4, 3),
        norm=nn.BatchNorm2d(4),
        head=nn.LazyLinear(5),
        bias=nn.ParameterList([torch.zeros(5)]),
    )


# ----------------------------------------------------------------------------------------------- threads


def test_threads():
    shared, x = encoder(), torch.randn(2, 5, 16)
    own = [encoder() for _ in range(8)]
    expected = str(Statistics(shared, x))
    results, errors = [], []

    def work(number):
        try:
            for _ in range(3):
                model = shared if number % 2 else own[number]
                stats = Statistics(model, x)
                stats.memory()
                results.append(str(stats) == expected)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    with untouched(shared):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    assert results == [True] * 24


# ---------------------------------------------------------------------------------------------- contexts


@pytest.mark.parametrize(
    "context",
    [
        torch.inference_mode,
        torch.no_grad,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.device("meta"),
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
    ],
)
def test_in_contexts(context):
    model, x = encoder(), torch.randn(2, 5, 16)
    expected = Statistics(model, x)
    with untouched(model), context():
        stats = Statistics(model, x)
    assert stats.total_mult_adds == expected.total_mult_adds
    assert [row.output_size for row in stats] == [row.output_size for row in expected]


# ------------------------------------------------------------------------------------------------ growth


def test_many_summaries():
    model, x = mixed(), torch.randn(2, 3, 6, 6)
    model(x)

    def objects():
        gc.collect()
        return len(gc.get_objects())

    for _ in range(20):
        Statistics(model, x)
    before = objects()
    for _ in range(300):
        Statistics(model, x)
    assert objects() - before < 100
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert gc.isenabled()


# ----------------------------------------------------------------------------------------- random models

WIDTH = 4


class Random(nn.Module):
    """Runs a program of steps over a list of tensors of shape (batch, WIDTH); each step adds a tensor."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(2)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, scale=None):
        values = [x]
        for kind, one, other in self.steps:
            a, b = values[one % len(values)], values[other % len(values)]
            values.append(self._step(kind, a, b))
        result = values[-1] if scale is None else values[-1] * scale
        return {"last": result, "all": (values[0] + 0, None), "sum": sum(values)}

    def _step(self, kind, a, b):
        match kind:
            case "layer":
                return self.layers[0](a)
            case "other":
                return self.layers[1](a) + b
            case "shared":
                return F.linear(a, self.linear.weight)
            case "norm":
                return self.norm(a)
            case "in-place":
                return (a + 0).mul_(2).add_(b)
            case "chunk":
                left, right = torch.cat([a, b], 1).chunk(2, 1)
                return left * right
            case "outer":
                return torch.einsum("bi,bj,bj->bi", a, b, b)
            case "batch":
                return a if a.shape[0] > 100 else self.linear(b)
        raise AssertionError(kind)


KINDS = ["layer", "other", "shared", "norm", "in-place", "chunk", "outer", "batch"]
PROGRAMS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(PROGRAMS, st.booleans())
def test_random_models(steps, scaled):
    torch.manual_seed(0)
    model = Random(steps)
    x = torch.randn(3, WIDTH)
    arguments = {"x": x, "scale": torch.tensor(0.5)} if scaled else {"x": x}
    with untouched(model):
        stats = Statistics(model, arguments)
    assert stats.execution == "shape"
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**arguments)
    assert stats.total_flops == counter.get_total_flops()
    assert sum(row.self_macs for row in (stats.root, *stats)) == stats.total_mult_adds
    assert stats.total_params == sum(parameter.numel() for parameter in model.parameters())


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(PROGRAMS)
def test_random_models_split(steps):
    torch.manual_seed(0)
    model = Random([("layer", 0, 0), *steps, ("other", -1, 0)]).double()
    x = torch.randn(3, WIDTH, dtype=torch.double)
    with untouched(model):
        stages = Statistics(model, x).split(2)
        found = stages.verify(x)
    assert (found.outputs, found.buffers) == (0.0, 0.0)
    assert found.gradients < 1e-9  # sums of gradients in another order

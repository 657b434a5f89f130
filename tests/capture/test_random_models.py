"""Random models: the same counts as torch's, the same on shapes and for real, and exactly the same in stages."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from modelsummary import Statistics
from tests.untouched import untouched

WIDTH = 4


class Block(nn.Module):
    """Takes keywords and lists, returns early, and returns a dict with a None in it."""

    def __init__(self):
        super().__init__()
        self.linear, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, parts, *, gate=None):
        y = self.linear(sum(parts))
        if gate is None:
            return {"y": y, "gate": None}
        self.calls += 1
        return {"y": y * self.gate(gate).sigmoid(), "gate": gate}


class Pair(nn.Module):
    """Returns a tuple with an unused tensor and the input itself."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.left(x), (self.right(x), None), x


class Random(nn.Module):
    """Runs a program of steps over a list of tensors of shape (batch, WIDTH); each step adds a tensor."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(2)
        )
        self.norm, self.block, self.pair = nn.LayerNorm(WIDTH), Block(), Pair()
        self.linear, self.tied = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.linear.weight

    def forward(self, x, scale=None):
        values = [x]
        for kind, one, other in self.steps:
            a, b = values[one % len(values)], values[other % len(values)]
            if kind == "return":
                return {"last": a + 0, "all": None}
            values.append(STEPS[kind](self, a, b, other))
        result = values[-1] if scale is None else values[-1] * scale
        return {"last": result, "all": (values[0] + 0, None), "sum": sum(values)}


def written_view(self, a, b, number):
    copy = a + 0
    copy[:, 1:3].add_(b[:, :2])
    return copy


def looped(self, a, b, number):
    for _ in range(number % 3):
        a = self.linear(a)
    return a + b


def chunked(self, a, b, number):
    left, right = torch.cat([a, b], 1).chunk(2, 1)
    return left * right


def unpacked(self, a, b, number):
    left, (right, _), same = self.pair(a)
    return left + same if number % 2 else right * b


STEPS = {
    "layer": lambda self, a, b, number: self.layers[0](a),
    "other": lambda self, a, b, number: self.layers[1](a) + b,
    "loop": looped,
    "shared": lambda self, a, b, number: F.linear(a, self.linear.weight) + self.tied(b),
    "norm": lambda self, a, b, number: self.norm(a),
    "in-place": lambda self, a, b, number: (a + 0).mul_(2).add_(b),
    "view": written_view,
    "chunk": chunked,
    "outer": lambda self, a, b, number: torch.einsum("bi,bj,bj->bi", a, b, b),
    "batch": lambda self, a, b, number: a if a.shape[0] > 100 else self.linear(b),
    "keywords": lambda self, a, b, number: self.block([a, b], gate=b if number % 2 else None)["y"],
    "tuple": unpacked,
    "return": None,
}
PROGRAMS = st.lists(st.tuples(st.sampled_from([*STEPS]), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12)


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
    real = Statistics(model, arguments, execution="real")
    facts = [[(row.fqn, row.macs, row.elementwise_ops, row.output_size) for row in each] for each in (stats, real)]
    assert facts[0] == facts[1]
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
    assert found.gradients < 1e-9  # gradients are summed in another order

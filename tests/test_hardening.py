"""Faults at every place, threads, random models, and many summaries in a row: nothing is left behind."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

import modelsummary
from modelsummary import ForwardError, Statistics
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


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def left_behind():
    """What a summary could leave in the process: objects, hooks, modes, and the collector switched off."""
    gc.collect()
    hooks = [len(each) for name, each in vars(module_hooks).items() if name.startswith("_global_forward")]
    modes = _get_current_dispatch_mode_stack(), _get_current_function_mode_stack()
    return len(gc.get_objects()), (hooks, modes, gc.isenabled(), threading.active_count())


def summarised():
    model, x = mixed(), torch.randn(2, 3, 6, 6)
    model(x)
    return lambda: Statistics(model, x)


def refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 5))

    def run():
        with pytest.raises(ForwardError):
            Statistics(model, (2, 4))

    return run


def run_for_real():
    model = Call(lambda self, x: self.linear(x) if x.sum() > 0 else x, linear=nn.Linear(4, 4))
    return lambda: Statistics(model, torch.ones(2, 4))


RUNS = [summarised, refused, run_for_real]


@pytest.mark.parametrize("make", RUNS)
def test_many_summaries(make):
    run = make()
    for _ in range(20):
        run()
    objects, rest = left_behind()
    for _ in range(100):
        run()
    objects_after, rest_after = left_behind()
    assert objects_after - objects < 100  # less than one a summary
    assert rest_after == rest


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
@pytest.mark.parametrize("make", RUNS)
def test_ten_thousand_summaries(make):
    run, resident = make(), []
    run()
    objects, rest = left_behind()
    for _ in range(5):
        for _ in range(2000):
            run()
        objects_after, rest_after = left_behind()
        resident.append(resident_bytes())
    assert objects_after - objects < 1000
    assert rest_after == rest
    # Malloc takes a new arena now and then; what leaks grows all the time. A row alone takes more than 200 bytes.
    assert min(after - before for before, after in pairwise(resident)) < 200 * 2000


def in_a_profile(model, x):
    with modelsummary.profile(model) as profiler:
        model(x)
    return profiler.generate_profile()


def after_an_error(model, x):
    with pytest.raises(ForwardError):
        Statistics(model, (1, 1))


@pytest.mark.parametrize(
    "use",
    [
        Statistics,
        after_an_error,
        in_a_profile,
        lambda model, x: Statistics(model, x, execution="real"),
        lambda model, x: Statistics(model, x).measure_latency(backward=True, runs=2),
        lambda model, x: Statistics(model, x).memory(),
        lambda model, x: Statistics(model, x).measure_memory(),
        lambda model, x: Statistics(model, x).split(2),
        lambda model, x: Statistics(model, x).graph(),
        lambda model, x: Statistics(model, x).graph_module(),
        lambda model, x: modelsummary.summary(model, input_data=x, verbose=0),
    ],
)
def test_the_model_is_free_to_go(use):
    """No cache keeps it, ours or torch's."""
    torch.overrides.get_ignored_functions.cache_clear()
    torch.overrides._get_overridable_functions.cache_clear()
    model, x = mixed(), torch.randn(2, 3, 6, 6)
    model(x)
    parts = [weakref.ref(part) for part in (x, *model.modules(), *model.parameters(), *model.buffers())]
    result = use(model, x)
    del model, x, result
    gc.collect()
    assert not any(part() is not None for part in parts)


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

"""Threads, contexts, and many summaries in a row: nothing is left behind."""

from __future__ import annotations

import copy
import gc
import os
import threading
import weakref
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import modelsummary
from modelsummary import ForwardError, Statistics
from tests.models import Call, encoder, mixed
from tests.untouched import untouched

# ----------------------------------------------------------------------------------------------- threads


def convolutions():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))


def decides():
    return Call(lambda self, x: self.linear(x) if x.sum() > 0 else x, linear=nn.Linear(4, 4))


def raises():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 5))


def refusal(model, x):
    with pytest.raises(ForwardError) as caught:
        Statistics(model, x)
    return str(caught.value), str(caught.value.partial)


def timed(model, x):
    stats = Statistics(model, x)
    stats.measure_latency(backward=True, runs=1, warmup=0)
    return [row.latency_ms is not None for row in stats]


JOBS = [  # eight threads: a new model or one that all share, its input, the method to call
    (encoder, torch.ones(2, 5, 16), lambda model, x: Statistics(model, x).memory().peak),
    (convolutions, torch.ones(2, 3, 6, 6), lambda model, x: str(Statistics(model, x).split(2))),
    (convolutions, torch.ones(2, 3, 6, 6), lambda model, x: str(Statistics(model, x).graph())),
    (convolutions, torch.ones(2, 3, 6, 6), timed),
    (decides, torch.ones(2, 4), lambda model, x: str(Statistics(model, x))),
    (raises, torch.ones(2, 4), refusal),
    (None, torch.ones(2, 5, 16), lambda model, x: str(Statistics(model, x))),
    (None, torch.ones(2, 5, 16), lambda model, x: str(Statistics(model, x, execution="real"))),
]


def in_threads(works):
    """Start all jobs at once and return the result or exception of each."""
    results, begin = [None] * len(works), threading.Barrier(len(works))

    def run(number):
        begin.wait()
        try:
            results[number] = works[number]()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_threads():
    shared = encoder()
    models = [make() if make else shared for make, *_ in JOBS]
    works = [partial(ask, model, x) for model, (_, x, ask) in zip(models, JOBS, strict=True)]
    expected = [work() for work in works]
    with ExitStack() as stack:
        for model in {id(model): model for model in models}.values():
            stack.enter_context(untouched(model))
        for _ in range(3):
            assert in_threads(works) == expected


def train(model):
    optimizer, x = torch.optim.SGD(model.parameters(), 0.1), torch.linspace(-1, 1, 160).view(2, 5, 16)
    losses = []
    for _ in range(20):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_forward_may_summarise_another_model():
    def forward(_, x):
        return x * Statistics(nn.Linear(4, 2), (2, 4)).total_params

    model = Call(forward)
    with untouched(model):
        stats = Statistics(model, (3, 4))
    assert (stats.execution, stats.root.output_size) == ("shape", [3, 4])
    assert {"resize_", "size"}.isdisjoint(vars(torch.UntypedStorage))


def test_another_thread_may_train_another_model():
    model = encoder().eval()  # all threads share the random number generator
    expected = train(copy.deepcopy(model))
    works = [partial(ask, (make or encoder)(), x) for make, x, ask in JOBS]
    assert in_threads([partial(train, model), lambda: [work() for work in works]])[0] == expected


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
    """Return the state that a summary could leave in the process: objects, hooks, modes, a disabled collector."""
    gc.collect()
    hooks = [len(each) for name, each in vars(module_hooks).items() if name.startswith("_global_forward")]
    modes = _get_current_dispatch_mode_stack(), _get_current_function_mode_stack()
    return len(gc.get_objects()), (hooks, modes, gc.isenabled(), threading.active_count())


def summarised():
    model, x = mixed(), torch.randn(2, 3, 6, 6)
    model(x)
    return lambda: Statistics(model, x)


def refused():
    model = raises()

    def run():
        with pytest.raises(ForwardError):
            Statistics(model, (2, 4))

    return run


def run_for_real():
    model = decides()
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
    assert objects_after - objects < 100  # less than one per summary
    assert rest_after == rest


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
@pytest.mark.parametrize("make", RUNS)
def test_the_memory_of_the_process_does_not_grow(make):
    run, resident = make(), []
    run()
    objects, rest = left_behind()
    for _ in range(5):
        for _ in range(400):
            run()
        objects_after, rest_after = left_behind()
        resident.append(resident_bytes())
    assert objects_after - objects < 200  # less than one in ten summaries
    assert rest_after == rest
    # Malloc takes a new arena now and then, while a leak grows steadily. One row takes more than 200 bytes.
    assert min(after - before for before, after in pairwise(resident)) < 200 * 400


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
    """No cache keeps the model alive, neither ours nor torch's."""
    torch.overrides.get_ignored_functions.cache_clear()
    torch.overrides._get_overridable_functions.cache_clear()
    model, x = mixed(), torch.randn(2, 3, 6, 6)
    model(x)
    parts = [weakref.ref(part) for part in (x, *model.modules(), *model.parameters(), *model.buffers())]
    result = use(model, x)
    del model, x, result
    gc.collect()
    assert not any(part() is not None for part in parts)

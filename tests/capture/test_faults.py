"""A fault at the n-th call of a module, in every mode: nothing is left behind."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from unittest import mock

import pytest
import torch
from torch import nn

import modelsummary
from modelsummary import ForwardError, ModelSummaryError, Statistics
from tests.models import encoder, mixed
from tests.untouched import untouched
from tests.zoo.torchvision_models import swept


class Fault(Exception):
    """The injected fault."""


@contextmanager
def raising(module, error, call=0):
    """Make ``module`` raise in its ``call``-th call from now on, and in all later ones."""
    original, calls = module.forward, count()

    def forward(*args, **kwargs):
        if next(calls) >= call:  # a model that falls back to real execution runs again
            raise error
        return original(*args, **kwargs)

    module.forward = forward
    try:
        yield
    finally:
        del module.forward


@pytest.mark.parametrize("execution", ["shape", "real"])
@pytest.mark.parametrize(("make", "size"), [(encoder, (2, 5, 16)), (mixed, (2, 3, 6, 6))])
def test_every_module(make, size, execution):
    for error, expected in ((Fault("now"), ForwardError), (KeyboardInterrupt(), KeyboardInterrupt)):
        for number in range(len(list(make().modules()))):
            model = make()
            if execution == "real":
                model(torch.zeros(size))  # initialises lazy layers
            x = torch.randn(size)
            module = list(model.modules())[number]
            with untouched(model), raising(module, error), suppress(expected):  # some modules are not called
                Statistics(model, x, execution=execution)


# -------------------------------------------------------------------------------------------- torchvision

SMALL = 32_000_000  # parameters of a model that is run for real, too
LARGE_IMAGES = ("vit", "maxvit", "mvit", "s3d")  # of 224 pixels: real runs take seconds
FAULTS = 3  # in each run of each model
OTHERS = ["mobilenet_v3_small", "resnet18", "shufflenet_v2_x0_5", "vit_b_32"]
# Other methods that run a model; the statistics were made before the fault.
OTHER_MODES = {
    "latency": lambda model, x, stats: stats.measure_latency(backward=True, runs=1, warmup=1),
    "memory": lambda model, x, stats: stats.memory(),
    "measured memory": lambda model, x, stats: stats.measure_memory(),
    "split": lambda model, x, stats: stats.split(2),
    "graph": lambda model, x, stats: stats.graph(),
    "profile": lambda model, x, stats: profiled(model, x),
}
INITIALISERS = "constant_ kaiming_normal_ kaiming_uniform_ normal_ ones_ trunc_normal_ uniform_ xavier_uniform_ zeros_"


def profiled(model, x):
    with modelsummary.profile(model):
        model(x)


@pytest.fixture(scope="module")
def zoo():
    return pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))


def family_of(zoo, name):
    """Return ``"detection"``, ``"video"`` ...; ``""`` for most image classifiers."""
    parts = zoo.get_model_builder(name).__module__.removeprefix("torchvision.models.").split(".")
    return parts[0] if len(parts) > 1 else ""


def build(zoo, name):
    """Make a model without initialising its parameters: memory that was never written costs nothing."""
    family = family_of(zoo, name)
    options = {"weights_backbone": None} if family in ("detection", "segmentation") else {}
    if "googlenet" in name or "inception" in name:
        options["init_weights"] = False
    with mock.patch.multiple(nn.init, **dict.fromkeys(INITIALISERS.split(), lambda tensor, *_, **__: tensor)):
        model = zoo.get_model(name, weights=None, **options)
    return model.eval() if family == "detection" else model  # in training it needs targets


def zeroed(model):
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    return model.eval()


def inputs(zoo, name, *, small):
    """Return inputs that the model accepts, of the usual or the smallest possible size."""
    family, edge = family_of(zoo, name), 64 if small else 224
    if family == "detection":
        return {"images": [torch.zeros(3, edge, edge)]}
    if family == "optical_flow":
        return {"image1": torch.zeros(1, 3, 128, 128), "image2": torch.zeros(1, 3, 128, 128), "num_flow_updates": 2}
    if name.startswith(LARGE_IMAGES):
        edge = 224
    elif "inception" in name:
        edge = 75 if small else 299
    return torch.zeros(1, 3, 8 if small else 16, edge, edge) if family == "video" else torch.zeros(2, 3, edge, edge)


def calls_of(stats):
    """Return the calls of modules in order: module, number of the call."""
    rows = sorted((row for row in stats if row.executed), key=lambda row: row.call_order)
    return [(row.module, row.call_index) for row in rows]


def statistics(model, x, execution):
    """Return the statistics, of a failing run up to the failure."""
    try:
        return Statistics(model, x, execution=execution)
    except ForwardError as error:
        return error.partial


def try_faults(model, stats, shift, run):
    """Raise in some calls, spread over the run; ``shift`` selects other calls for each model."""
    calls = calls_of(stats)
    for number in range(FAULTS):
        module, call = calls[int((number + shift) / FAULTS * len(calls))]
        stops = (number + int(shift * 10)) % 2
        expected = KeyboardInterrupt if stops else (Fault, ModelSummaryError)
        error = KeyboardInterrupt() if stops else Fault("now")
        with untouched(model), raising(module, error, call), pytest.raises(expected):
            run()


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["shape", "real"])
def test_every_kind_of_torchvision(zoo, execution):
    tried, names = 0, swept(zoo.list_models())
    for number, name in enumerate(names):
        model = build(zoo, name)
        if execution == "shape":
            model = model.to("meta")
        elif name.startswith(LARGE_IMAGES) or sum(parameter.numel() for parameter in model.parameters()) > SMALL:
            continue
        else:
            zeroed(model)
        x = inputs(zoo, name, small=execution == "real")
        run = partial(Statistics, model, x, execution=execution)
        try_faults(model, statistics(model, x, execution), number * 0.618 % 1, run)
        tried += 1
    assert tried > (50 if execution == "shape" else 25)


@pytest.mark.slow
@pytest.mark.parametrize("mode", OTHER_MODES)
def test_other_modes(zoo, mode):
    for number, name in enumerate(OTHERS):
        model, x = zeroed(build(zoo, name)), inputs(zoo, name, small=True)
        stats = Statistics(model, x)
        run = partial(OTHER_MODES[mode], model, x, stats)
        try_faults(model, stats, number * 0.618 % 1, run)
        with untouched(model):
            run()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # quantisation announces its future API
def test_quantised_models(zoo, monkeypatch):
    monkeypatch.setattr(torch.backends.quantized, "engine", torch.backends.quantized.engine)  # torchvision sets it
    for number, name in enumerate(("quantized_resnet18", "quantized_shufflenet_v2_x0_5", "quantized_mobilenet_v2")):
        model, x = zoo.get_model(name, weights=None, quantize=True).eval(), inputs(zoo, name, small=True)
        for execution in ("auto", "real"):
            run = partial(Statistics, model, x, execution=execution)
            try_faults(model, run(), number * 0.618 % 1, run)

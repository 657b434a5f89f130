"""Predictions with the coefficients of the package against published measurements, with error and bias.

The environment variable MODELSUMMARY_MEASUREMENTS names their folder, the DATA of ``benchmarks/fit_kernels.py``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from modelsummary import DeviceSpec
from modelsummary.devices.kernel_time import device_model

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("MODELSUMMARY_MEASUREMENTS", "nowhere"))
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not DATA.exists(), reason="needs the published measurements")]
_LONG = 2e-3  # seconds; the data adds an overhead to every call, which matters for short ones


@pytest.fixture
def benchmarks(monkeypatch):
    for name in ("numpy", "scipy"):
        pytest.importorskip(name)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield
    for name in ("single_kernels", "whole_steps"):
        sys.modules.pop(name, None)


def judged(ratios):
    """Return the mean error and the median bias of predicted over measured times."""
    ratios = sorted(ratios)
    return sum(abs(ratio - 1) for ratio in ratios) / len(ratios), ratios[len(ratios) // 2] - 1


# operator -> the largest mean error and bias on any device, rounded up from what was measured when this was written
THRESHOLDS = {"linear": (0.15, 0.1), "bmm": (0.15, 0.12), "conv": (0.22, 0.16)}


@pytest.mark.parametrize("op", THRESHOLDS)
def test_single_float32_kernels(benchmarks, op):
    from single_kernels import kernels_of

    error, bias = THRESHOLDS[op]
    for (_, name), samples in kernels_of(DATA, op).items():
        model = device_model(DeviceSpec(name))
        long = [(work, seconds) for work, seconds, _ in samples if seconds > _LONG]
        found = judged([model.seconds(work) / seconds for work, seconds in long[:: max(1, len(long) // 300)]])
        # long rows of operands slow down boards of 2016, for which the model has no law
        old = {"P100": (0.4, 0.35), "P4": (0.6, 0.65)}.get(name) if op == "linear" else None
        assert found[0] < (old or (error, bias))[0], name
        assert abs(found[1]) < (old or (error, bias))[1], name


def test_whole_steps_in_half_precision(benchmarks):
    pytest.importorskip("timm")
    from whole_steps import TABLES, kernels_in, models_of, step_ratios

    models = [kernels_in(step, TABLES["infer"].mode) for step in models_of(DATA, TABLES["infer"], 8)]
    assert len(models) >= 5
    error, bias = judged(step_ratios(models, device_model(DeviceSpec("RTX 3090"))))
    assert error < 0.2
    assert abs(bias) < 0.15


def test_training_iterations_on_an_a100(benchmarks):
    from whole_steps import iteration_seconds, iterations

    device = device_model(DeviceSpec("A100 80GB"))
    wide = [(run, seconds) for run, seconds in iterations(DATA) if run["width"] >= 2048]  # Python limits small layers
    assert len(wide) > 10
    error, bias = judged([iteration_seconds(run, device, 0.0) / seconds for run, seconds in wide])
    assert error < 0.1
    assert abs(bias) < 0.1
    assert device.spec.has(torch.float16)

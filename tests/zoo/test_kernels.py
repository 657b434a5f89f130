"""The kernels of the fixed part of the gate: none is of unknown work, and they have the multiply-adds of the table."""

from __future__ import annotations

import contextlib
import importlib

import pytest
import torch

from modelsummary import ModelSummaryError
from tests.operators.page import rows_of_page
from tests.zoo.catalogues import CATALOGUES, REQUIRES
from tests.zoo.checks import statistics
from tests.zoo.fixed import FIXED


def operators_of(stats):
    """Return the names of the operators that launch kernels, in the backward too if there is one."""
    kernels = stats.kernels("H100")
    with contextlib.suppress(ModelSummaryError):
        kernels = stats.kernels("H100", backward=True)
    return {kernel.work.operator for kernel in kernels} - {"recurrent layer"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", FIXED)
def test_kernels(library, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for module in REQUIRES[library]:
        pytest.importorskip(module, exc_type=(ImportError, RuntimeError))
    torch.manual_seed(0)
    for name in FIXED[library]:
        stats = statistics(importlib.import_module(CATALOGUES[library]).make(name))
        root = stats.root
        unlisted = operators_of(stats) - rows_of_page().keys()
        assert unlisted == set(), f"{name}: run python -m tests.operators"
        # the models are float32: FlashAttention would pad heads of other sizes than multiples of 8
        kernels = stats.kernels("H100")
        assert {each.name for each in kernels if each.op_class == "other"} == set(), name
        assert sum(each.flops for each in kernels) == 2 * (root.macs - (root.skipped_macs or 0)), name

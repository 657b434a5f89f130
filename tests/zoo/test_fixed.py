"""The fixed part of the gate: what holds of each model, but for the known exceptions."""

from __future__ import annotations

import importlib
import random

import numpy as np
import pytest
import torch

from tests.zoo.catalogues import CATALOGUES, REQUIRES
from tests.zoo.checks import CHECKS, UNTOUCHED, check
from tests.zoo.fixed import FIXED, KNOWN

MODELS = [(library, name) for library, names in FIXED.items() for name in names]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("library", "name"), MODELS, ids=[f"{library}-{name}" for library, name in MODELS])
def test_gate(library, name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for module in REQUIRES[library]:
        pytest.importorskip(module, exc_type=(ImportError, RuntimeError))
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    found = dict(check(importlib.import_module(CATALOGUES[library]).make(name)))
    known = KNOWN.get((library, name), {})
    bad = {each: finding.reason for each, finding in found.items() if finding.verdict in ("no", "refused")}
    assert {each: reason for each, reason in bad.items() if each not in known} == {}
    assert [each for each in known if each not in bad] == [], "holds now: take it out of KNOWN in tests/zoo/fixed.py"


def test_exceptions_are_of_the_fixed_part():
    assert KNOWN.keys() <= set(MODELS)
    assert {check for checks in KNOWN.values() for check in checks} <= {*CHECKS, UNTOUCHED}
    assert all(reason for checks in KNOWN.values() for reason in checks.values())

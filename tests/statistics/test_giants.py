"""The published giants of the tutorials: parameters counted by hand."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from modelsummary import Statistics

PATH = Path(__file__).parents[2] / "docs" / "tutorials" / "giants.py"


@pytest.fixture(scope="module")
def giants():
    spec = importlib.util.spec_from_file_location("giants", PATH)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "giants", module)  # its dataclass looks its module up
        spec.loader.exec_module(module)
        yield module


def grouped(d=16384, kv=8 * 128, inner=53248):
    """Parameters of a block of Llama 3.1 405B: q and o, k and v, gate, up and down, two norms."""
    return 2 * d * d + 2 * d * kv + 3 * d * inner + 2 * d


def latent(heads, feed_forward, d=7168, q=1536, kv=512):
    """Parameters of a block of DeepSeek-V3: heads have 128 features and 64 for the position."""
    queries = d * q + q + q * heads * (128 + 64)
    keys_and_values = d * (kv + 64) + kv + kv * heads * (128 + 128)
    return queries + keys_and_values + heads * 128 * d + feed_forward + 2 * d


def experts(count, d=7168, inner=2048):
    """Router with a bias an expert, one shared expert, and the others."""
    return d * count + count + 3 * d * inner * (count + 1)


DENSE = 3 * 7168 * 18432
PARAMETERS = {
    "Llama 3.1 405B": 126 * grouped() + 2 * 128256 * 16384 + 16384,
    "DeepSeek-V3 671B": 3 * latent(128, DENSE) + 58 * latent(128, experts(256)) + 2 * 129280 * 7168 + 7168,
    "Kimi K2 1T": latent(64, DENSE) + 60 * latent(64, experts(384)) + 2 * 163840 * 7168 + 7168,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(giants, name):
    stats = Statistics(giants.decoder(giants.GIANTS[name]), torch.zeros(1, 768, dtype=torch.long, device="meta"))
    assert stats.execution == "shape"
    assert stats.total_params == PARAMETERS[name]
    assert stats.total_params in (405_853_388_800, 671_026_419_200, 1_026_408_232_448)  # as published


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMETERS)
def test_sixteen_stages(giants, name):
    stats = Statistics(giants.decoder(giants.GIANTS[name]), torch.zeros(1, 768, dtype=torch.long, device="meta"))
    stages = stats.split(16)
    assert sum(fact.macs for fact in stages.facts) == stats.total_mult_adds
    assert max(fact.macs for fact in stages.facts) < 1.05 * stats.total_mult_adds / 16

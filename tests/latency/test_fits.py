"""Which devices a step fits on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modelsummary import DeviceSpec, InputError, Statistics

WIDTH, LAYERS = 4096, 8


@pytest.fixture(scope="module")
def stats():
    with torch.device("meta"):
        return Statistics(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))), (16, WIDTH))


def test_memory_and_time_are_those_of_the_step(stats):
    """16 bytes for each parameter with AdamW, 4 for square roots in its step, and 0.5 GiB for the context of CUDA."""
    fits = stats.fits_on(["A100", "H100"], optimizer="adamw")
    params, context = LAYERS * (WIDTH**2 + WIDTH), 2**29
    memory = stats.memory(optimizer="adamw", device="cuda", reserve=True)
    for fit in fits:
        assert fit.fits
        assert fit.needed_bytes == memory.reserve.reserved + context
        assert 20 * params < fit.needed_bytes - context < 20.5 * params
        assert fit.step_ms == stats.estimate_latency(fit.device, backward=True, optimizer="adamw")


def test_the_table_says_where_it_does_not_fit(stats):
    fits = stats.fits_on(["RTX 3070", "P100", "A100"], optimizer="adamw", dtype="bf16", backward=True)
    small = stats.fits_on(["A100"], backward=False)
    assert [fit.device for fit in fits] == ["RTX 3070", "P100", "A100 80GB"]
    assert fits[1].fits
    assert fits[1].step_ms is None  # it lacks bfloat16
    assert small[0].needed_bytes < fits[0].needed_bytes
    assert str(fits).startswith("Devices for one training step on cuda: Sequential, [16, 4096], bfloat16, AdamW")
    assert [record["fits"] for record in fits.to_records()] == [fit.fits for fit in fits]
    with pytest.raises(InputError, match="no accelerator 'H1000' in the table"):
        stats.fits_on(["H1000"])
    with pytest.raises(InputError, match="devices is empty; pass names"):
        stats.fits_on([])


def test_what_no_table_could_say_is_refused(stats):
    with pytest.raises(InputError, match="the memory of 'mine' is not known; pass memory_bytes= to its DeviceSpec"):
        stats.fits_on(DeviceSpec("mine", {torch.float32: 1e13}, 1e12))
    with pytest.raises(InputError, match=r"attention must be one of 'flash1', .*, got 'flash9'"):
        stats.fits_on(["A100"], attention="flash9")


def test_devices_that_are_no_list():
    stats = Statistics(nn.Linear(4, 2), (1, 4))
    with pytest.raises(InputError, match=r"devices must be a list of accelerators, such as .*, got 80"):
        stats.fits_on(80)

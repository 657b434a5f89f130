from __future__ import annotations

import pytest
from torch import nn

from modelsummary import InputError, SplitError, Statistics

pytestmark = pytest.mark.filterwarnings("ignore:plan.devices, memory_bytes:DeprecationWarning")


def _stats(depth=8):
    """Return equal layers of 64 x 64: 16,384 bytes of weights, 4,096 MACs per sample, 256 bytes of result."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(depth)))
    return Statistics(model, (4, 64))


def test_by_hand():
    # 8 layers x 4 samples x 4,096 MACs: a forward takes 2 x 131,072 / 2^18 = 1 s, with the backward 3 s
    options = {"flops_per_second": 2**18, "bandwidth": 1e12, "n_microbatches": 4, "schedules": ["1f1b"]}
    plans = _stats().plan(4, 10**9, **options)
    assert [(each.pipeline, each.data_parallel) for each in plans] == [(1, 4), (2, 2), (4, 1)]
    # one copy on p devices: (m + p - 1) x 3 / p; samples per second: 4 x m x copies / step
    assert [each.step_seconds for each in plans] == pytest.approx([12, 7.5, 5.25], rel=1e-3)
    assert [each.samples_per_second for each in plans] == pytest.approx([64 / 12, 32 / 7.5, 16 / 5.25], rel=1e-3)
    assert [each.bubble for each in plans] == pytest.approx([0, 1 / 5, 3 / 7], rel=1e-3)
    # 4 x the weights (gradients, two states of Adam) + activations: layers x 4 x 256 bytes x those in flight
    assert [each.memory_bytes for each in plans] == [
        4 * 8 * 16384 + 8 * 1024,
        4 * 4 * 16384 + 4 * 1024 * 2,
        4 * 2 * 16384 + 2 * 1024 * 4,
    ]


def test_only_what_fits():
    plans = _stats().plan(4, 200_000, n_microbatches=4, schedules=["1f1b"])
    assert [each.pipeline for each in plans] == [4]
    with pytest.raises(SplitError, match=r"no plan fits into 100,000 bytes.*4 devices with 1f1b, needs 139,264"):
        _stats().plan(4, 100_000, n_microbatches=4, schedules=["1f1b"])


def test_the_reduction_of_gradients_counts():
    options = {"flops_per_second": 2**18, "n_microbatches": 4, "schedules": ["gpipe"]}
    fast, slow = (_stats().plan(2, 10**9, bandwidth=bandwidth, **options) for bandwidth in (1e15, 8 * 16384))
    copies = {each.pipeline: each.step_seconds for each in slow}[1] - {
        each.pipeline: each.step_seconds for each in fast
    }[1]
    assert copies == pytest.approx(2 * (2 - 1) / 2)  # all weights once at that bandwidth


def test_thousands_of_devices():
    plans = _stats().plan(4096, 10**9, n_microbatches=[8])
    assert {each.pipeline * each.data_parallel for each in plans} == {4096}
    assert max(each.pipeline for each in plans) == 8
    assert str(plans).splitlines()[0].split()[:3] == ["Pipeline", "Data", "parallel"]
    assert len(str(plans).splitlines()) == len(plans) + 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": 0}, "devices must be .* got 0"),
        ({"memory_bytes": 1.5}, r"memory_bytes must be .* got 1\.5"),
        ({"bandwidth": -1}, "bandwidth must be .* got -1"),
        ({"optimizer_states": -1}, "optimizer_states must be .* got -1"),
        ({"n_microbatches": []}, r"n_microbatches must be .* got \[\]"),
        ({"schedules": "gpipe"}, "schedules must be a list of .* got 'gpipe'"),
        ({"schedules": ["best"]}, r"schedules must be a list of .* got \['best'\]"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        _stats(2).plan(**{"devices": 2, "memory_bytes": 10**9, **arguments})

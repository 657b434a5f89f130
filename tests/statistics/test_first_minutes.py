"""What people try first works, or says what would."""

from __future__ import annotations

import pytest
from torch import nn

from modelsummary import Statistics
from modelsummary.errors import InputError
from modelsummary.torchinfo import summary

MODEL = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))  # 2 x 8 + 8, 8 x 4 + 4 parameters


def stats():
    return Statistics(MODEL, (3, 2))


def test_top():
    """3 rows of the batch: 3 x 8 x 4 and 3 x 2 x 8 multiply-adds; ReLU has none."""
    assert [(row.fqn, row.self_macs) for row in stats().top()] == [("2", 96), ("0", 48)]
    assert [row.fqn for row in stats().top(1, by="params")] == ["2"]
    with pytest.raises(InputError, match=r"measure_latency\(\)"):
        stats().top(by="latency")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("flops", "total_flops"),
        ("params", "total_params"),
        ("total_mult_add", "'total_mult_adds'"),
        ("tabel", "'table'"),
    ],
)
def test_a_misspelt_attribute_is_told_what_was_meant(name, hint):
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; did you mean {hint}"):
        getattr(stats(), name)


def test_total_macs_is_another_name():
    assert stats().total_macs == stats().total_mult_adds == 144


@pytest.mark.parametrize("name", ["mult_adds", "macs", "flops", "output_bytes", "input_bytes"])
def test_totals_of_a_forward_that_was_not_run_are_refused(name):
    with pytest.raises(InputError, match=r"needs a forward, and none was run; pass an input"):
        getattr(Statistics(MODEL), f"total_{name}")


@pytest.mark.parametrize("name", ["estimate_latency", "roofline"])
def test_times_of_a_forward_that_was_not_run_are_refused(name):
    with pytest.raises(InputError, match=f"{name} needs a forward, and none was run; pass an input"):
        getattr(Statistics(MODEL), name)("A100")


def test_torchinfo_says_zero():
    assert summary(MODEL, verbose=0).total_mult_adds == 0


def test_a_column_that_nothing_filled_says_which_call_does():
    table = stats().table(["latency_ms", "peak_bytes", "macs"])
    assert "latency_ms is not known yet: call stats.measure_latency()" in table
    assert "peak_bytes is not known yet: call stats.memory()" in table
    assert "macs is not known" not in table


def test_budgets_in_words():
    assert stats().max_batch_size("1 kB", "inference") == stats().max_batch_size(1000, "inference")
    with pytest.raises(
        InputError, match=r"memory_bytes must be an integer >= 1 or text such as '24GB' or '16GiB', got '24 potatoes'"
    ):
        stats().max_batch_size("24 potatoes")


def test_optimizers_as_torch_writes_them():
    assert stats().memory(optimizer="AdamW").peak == stats().memory(optimizer="adamw").peak

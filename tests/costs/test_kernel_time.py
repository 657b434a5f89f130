from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelsummary import DeviceSpec, InputError
from modelsummary.costs.device_table import TABLE
from modelsummary.costs.kernel_time import device_model, fits, sustained
from modelsummary.costs.operator_work import Work

HALF = torch.float16
DEVICES = sorted(set(TABLE) - {"P4", "TPU v5e", "TPU v5p", "TPU v6e"})  # these have no float16


def gemm(m, n, k, batch=1, dtype=HALF):
    moved = dtype.itemsize * batch * (m * n + n * k + m * k)
    return Work("aten.mm", "gemm", dtype, (batch, m, n, k), 2 * batch * m * n * k, moved)


def copy(nbytes):
    return Work("aten.clone", "copy", HALF, (nbytes // 2,), 0, nbytes)


@pytest.mark.parametrize("name", DEVICES)
def test_no_kernel_beats_the_data_sheet_by_much(name):
    model, spec = device_model(DeviceSpec(name)), DeviceSpec(name)
    work = gemm(8192, 8192, 8192)
    reached = work.flops / model.seconds(work) / spec.peak(HALF)
    assert 0.3 < reached < 1.25  # clocks may exceed the data sheet
    assert 0.3 < 2**30 / model.seconds(copy(2**30)) / spec.bandwidth < 1.1


@settings(deadline=None, max_examples=50)
@given(*[st.integers(1, 3000)] * 3, st.sampled_from(["A100", "T4", "RTX 4090"]))
def test_more_work_takes_no_less_time(m, n, k, name):
    model = device_model(DeviceSpec(name))
    assert model.seconds(gemm(2 * m, n, k)) >= 0.99 * model.seconds(gemm(m, n, k))
    assert model.seconds(gemm(m, n, 2 * k)) >= 0.99 * model.seconds(gemm(m, n, k))
    assert model.seconds(gemm(m, n, k)) > model.launch


def test_a_device_without_a_fit_takes_that_of_its_generation():
    assert device_model(DeviceSpec("A100")).fit == "A100"
    assert device_model(DeviceSpec("A10")).fit == "generation ampere"
    assert device_model(DeviceSpec("H100")).fit == "no fit of its own"
    assert device_model(DeviceSpec("H100")).typical_error >= device_model(DeviceSpec("A100")).typical_error
    # what published products reach takes the place of the fit: 794.5 of 989.5 TFLOP/s
    work = gemm(8192, 8192, 8192)
    reached = work.flops / device_model(DeviceSpec("H100")).seconds(work)
    assert reached == pytest.approx(794.5e12, rel=0.12)


def test_a_dtype_that_the_device_lacks_is_refused():
    with pytest.raises(InputError, match=r"peak of T4 with torch\.float8_e4m3fn is not known"):
        device_model(DeviceSpec("T4")).seconds(gemm(8, 8, 8, dtype=torch.float8_e4m3fn))


def attention(outer=128, queries=1024, keys=1024, head=64, part="", products=2):
    flops = 2 * products * outer * queries * keys * head
    moved = 2 * outer * head * (2 * queries + 2 * keys)
    name = f"aten._scaled_dot_product_flash_attention{part}"
    return Work(name, "attention", HALF, (outer, queries, keys, head), flops, moved)


def test_attention():
    model = device_model(DeviceSpec("A100"))
    plain, causal = model.seconds(attention()), model.seconds(attention(part=" (causal)"))
    assert 0.5 < causal / plain < 0.62  # of 8 x 8 tiles, 36 are computed
    # the backward computes five products instead of two, at four fifths of the speed
    assert model.seconds(attention(part="_backward", products=5)) / plain == pytest.approx(2.5 / 0.8, rel=0.02)
    # larger heads come nearer to the peak: 26 elements of each head are spent on exponentials
    small, large = (model.computing(attention(head=head)) for head in (32, 128))
    assert large / small == pytest.approx(4 * (1 + 26 / 128) / (1 + 26 / 32))
    assert 0.4 < attention(head=128).flops / model.seconds(attention(head=128)) / 312e12 < 0.85


@settings(deadline=None, max_examples=50)
@given(*[st.integers(1, 500)] * 3, st.sampled_from(["A100", "H100", "RTX 4090"]))
def test_longer_attention_takes_no_less_time(outer, queries, keys, name):
    model = device_model(DeviceSpec(name))
    least = 0.999 * model.seconds(attention(outer, queries, keys))
    assert model.seconds(attention(outer + 1, queries, keys)) >= least
    assert model.seconds(attention(outer, queries + 1, keys)) >= least
    assert model.seconds(attention(outer, queries, keys + 1)) >= least


def test_what_the_cache_holds_moves_faster():
    model = device_model(DeviceSpec("A100"))
    small, large = (model.moving(copy(nbytes)) / nbytes for nbytes in (2**20, 2**30))
    assert 1 / 3 < small / large < 0.4
    sizes = [2**20 * number for number in range(1, 80)]
    assert sorted(sizes, key=lambda size: model.moving(copy(size))) == sizes


def test_channels_last_needs_no_conversion():
    model = device_model(DeviceSpec("RTX 3090"))
    sizes = (1, 100_352, 64, 64, 56, 56)
    plain, last = (
        Work(f"aten.convolution{part}", "conv", HALF, sizes, 2 * 100_352 * 64 * 64, 4 * 100_352 * 64)
        for part in ("", " (channels last)")
    )
    assert model.moving(plain) > 1.2 * model.moving(last)


def test_float32_products_reach_what_power_and_lanes_allow():
    per_joule = {"ampere": 76.0, "hopper": 130.0}
    assert sustained(DeviceSpec("A100"), per_joule) == 0.95
    assert sustained(DeviceSpec("A10"), per_joule) == pytest.approx(76e9 * 150 / 31.2e12)
    assert sustained(DeviceSpec("H100"), per_joule) == 0.75  # 128 lanes for each unit


@pytest.mark.parametrize("name", sorted(TABLE))
def test_larger_convolutions_take_longer_within_bounds(name):
    model = device_model(DeviceSpec(name))
    if not model.spec.has(torch.float32):
        return
    reached, previous = 0.0, 0.0
    for size in (1, 7, 14, 56, 112):
        m, n, k = 8 * size**2, 64, 9 * 64
        sizes, flops = (1, m, n, k, size, size), 2 * m * n * k
        work = Work("aten.convolution (3x3)", "conv", torch.float32, sizes, flops, 4 * (2 * m * n + n * k))
        seconds = model.seconds(work)
        assert seconds >= 0.97 * previous
        previous, reached = seconds, flops / seconds / model.spec.peak(torch.float32)
    assert 0.1 < reached < 1.9  # Winograd's algorithm needs fewer products than are counted


def test_the_fit_says_where_it_is_from():
    found = fits()
    assert found["date"]
    assert len(found["sources"]) == 3
    assert set(found["held_out_error"]) >= {"gemm", "conv", "elementwise", "infer", "train", "a100"}

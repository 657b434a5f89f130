from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelsummary import DeviceSpec, InputError
from modelsummary.costs.device_table import TABLE
from modelsummary.costs.kernel_time import device_model, fits
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
    assert 0.4 < 2**30 / model.seconds(copy(2**30)) / spec.bandwidth < 1.1


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


def test_the_fit_says_where_it_is_from():
    found = fits()
    assert found["date"]
    assert len(found["sources"]) == 3
    assert set(found["held_out_error"]) >= {"gemm", "conv", "elementwise", "infer", "train", "a100"}

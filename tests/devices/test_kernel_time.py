from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelsummary import DeviceSpec, InputError
from modelsummary.devices.device_table import TABLE
from modelsummary.devices.kernel_time import device_model, fits
from modelsummary.operators.operator_work import Work

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
    assert device_model(DeviceSpec("H100")).fit == "generation hopper"
    assert device_model(DeviceSpec("H100")).typical_error >= device_model(DeviceSpec("A100")).typical_error
    assert device_model(DeviceSpec("MI300X")).fit == "no fit of its own"


@pytest.mark.parametrize(
    ("name", "m", "n", "k", "teraflops"),
    [  # measured one after the other on random numbers; an A100 PCIe has 300 W instead of 400 W
        ("A100 80GB", 8192, 12288, 4096, 249),  # aiconfigurator 0.12
        ("A100 80GB PCIe", 4096, 28672, 8192, 0.751 * 312),  # SimuMax
        ("H100", 8192, 65536, 16384, 696),
        ("H200", 8192, 65536, 16384, 679),
        ("B200", 8192, 65536, 16384, 1419),
    ],
)
def test_long_products_reach_what_power_sustains(name, m, n, k, teraflops):
    work = gemm(m, n, k)
    assert work.flops / device_model(DeviceSpec(name)).seconds(work) == pytest.approx(teraflops * 1e12, rel=0.06)


def test_products_pay_for_their_last_wave_and_for_short_inner_dimensions():
    model = device_model(DeviceSpec("A100"))
    whole, more = gemm(256 * 12, 128 * 9, 4096), gemm(256 * 12 + 1, 128 * 9, 4096)  # 108 tiles, and a few more
    assert model.computing(more) > 1.3 * model.computing(whole)
    per_flop = [model.computing(gemm(8192, 8192, k)) / k for k in (128, 512, 2048)]
    assert per_flop[0] > 1.2 * per_flop[1] > 1.2 * 1.05 * per_flop[2]


def test_a_dtype_that_the_device_lacks_is_refused():
    with pytest.raises(InputError, match=r"peak of T4 with torch\.float8_e4m3fn is not known"):
        device_model(DeviceSpec("T4")).seconds(gemm(8, 8, 8, dtype=torch.float8_e4m3fn))


def attention(outer=128, queries=1024, keys=1024, head=64, products=2, **facts):
    flops = 2 * products * outer * queries * keys * head
    moved = 2 * outer * head * (2 * queries + 2 * keys)
    return Work("attention", "attention", HALF, (outer, queries, keys, head), flops, moved, **facts)


def test_attention():
    model = device_model(DeviceSpec("A100"))
    plain, causal = model.seconds(attention()), model.seconds(attention(is_causal=True))
    assert 0.5 < causal / plain < 0.62  # of 8 x 8 tiles, 36 are computed
    # the backward computes five products instead of two, at 0.86 of the speed
    assert model.seconds(attention(is_backward=True, products=5)) / plain == pytest.approx(2.5 / 0.86, rel=0.02)
    # larger heads come nearer to the peak: 26 elements of each head are spent on exponentials
    small, large = (model.computing(attention(head=head)) for head in (32, 128))
    assert large / small == pytest.approx(4 * (1 + 26 / 128) / (1 + 26 / 32))
    assert 0.4 < attention(head=128).flops / model.seconds(attention(head=128)) / 312e12 < 0.85


def test_where_flash_attention_does_not_run_the_memory_efficient_kernel_does():
    # an A100, 160 heads of 128, 4,096 tokens: 7.6 ms in float16, 29.3 ms in float32 (xFormers, pull request 587)
    model, flash = device_model(DeviceSpec("A100")), attention(160, 4096, 4096, 128)
    efficient = flash._replace(is_efficient=True)
    assert model.computing(efficient) == pytest.approx(7.6e-3, rel=0.08)
    assert model.computing(efficient) > 1.1 * model.computing(flash)
    single = flash._replace(dtype=torch.float32)  # three TF32 products each
    assert model.computing(single) == pytest.approx(29.3e-3, rel=0.05)
    assert device_model(DeviceSpec("A100"), tf32=True).computing(single) == model.computing(single)
    # cuDNN takes masks, and values with heads of another size
    hopper = device_model(DeviceSpec("H100"))
    assert hopper.computing(efficient) == hopper.computing(flash)
    older = device_model(DeviceSpec("H100"), attention="flash2")  # before version 2.10, torch had none for them
    assert older.computing(efficient) == pytest.approx(older.computing(flash) / 0.85)
    # GeForce cards of all generations have the same share of their TF32 peaks
    speeds = {
        name: single.flops / device_model(DeviceSpec(name)).computing(single) / DeviceSpec(name).peak("tf32")
        for name in ("RTX 3090", "RTX 4090", "RTX 5090")
    }
    assert max(speeds.values()) < 1.1 * min(speeds.values())
    # power limits the float16 products of an L4 to 43 % of the peak, those of an A100 to 79 %; and TF32 with them
    powered = device_model(DeviceSpec("L4"))
    ratio = (powered.sustained / 121e12) / (model.sustained / 312e12)
    speed = single.flops / powered.computing(single) / powered.spec.peak("tf32")
    assert speed == pytest.approx(single.flops / model.computing(single) / 156e12 * ratio, rel=0.05)
    # a V100 has no TF32: its vector units compute
    assert single.flops / device_model(DeviceSpec("V100")).computing(single) < 15.7e12


@pytest.mark.parametrize(
    ("kernel", "length", "fact", "teraflops"),
    [  # figures 5 and 6 of arXiv:2407.08608: an H100, 16,384 tokens, 16 heads of 128
        ("flash2", 2048, "is_causal", 298),
        ("flash2", 8192, "is_causal", 333),
        ("flash2", 2048, "is_backward", 291),
        ("cudnn", 2048, "is_causal", 484),
        ("cudnn", 8192, "is_causal", 529),
        ("cudnn", 4096, "is_backward", 499),
    ],
)
def test_attention_on_an_h100_depends_on_its_kernels(kernel, length, fact, teraflops):
    outer, products = 16 * 16384 // length, 5 if fact == "is_backward" else 2
    work = attention(outer, length, length, 128, products, **{fact: True})
    needed = work.flops / (2 if work.is_causal else 1)
    seconds = device_model(DeviceSpec("H100"), attention=kernel).seconds(work)
    assert needed / seconds == pytest.approx(teraflops * 1e12, rel=0.08)
    default = device_model(DeviceSpec("H100")).seconds(work)
    assert (default == seconds) == (kernel == "cudnn")


def test_attention_whose_speed_was_not_measured():
    with pytest.raises(InputError, match="'cudnn' on the A100 80GB is not known; pass None or 'flash2'"):
        device_model(DeviceSpec("A100"), attention="cudnn")
    for name in ("RTX 3090", "RTX 4090", "L40S", "V100", "MI300X"):
        with pytest.raises(InputError, match=f"on the {name}.* no fused attention was measured .* leave attention out"):
            device_model(DeviceSpec(name), attention="flash2")
    volta, flops = device_model(DeviceSpec("V100")), attention(head=128).flops
    reached = flops / volta.computing(attention(head=128))
    assert reached == pytest.approx(0.89 * volta.spec.peak(HALF) * volta.tensor, rel=0.1)  # as fitted to an RTX 3090


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
        Work("aten.convolution", "conv", HALF, sizes, 2 * 100_352 * 64 * 64, 4 * 100_352 * 64, channels_last=is_last)
        for is_last in (False, True)
    )
    assert model.moving(plain) == model.moving(last)
    # images and results are read and written once more each
    assert model.busy(plain) - model.busy(last) == pytest.approx(2 * model.moving(last), rel=0.05)
    assert model.busy(plain._replace(is_product=True)) == model.busy(last)


@pytest.mark.parametrize("name", sorted(TABLE))
def test_larger_convolutions_take_longer_within_bounds(name):
    model = device_model(DeviceSpec(name))
    if not model.spec.has(torch.float32):
        return
    reached, previous = 0.0, 0.0
    for size in (1, 7, 14, 56, 112):
        m, n, k = 8 * size**2, 64, 9 * 64
        sizes, flops = (1, m, n, k, size, size), 2 * m * n * k
        work = Work("conv", "conv", torch.float32, sizes, flops, 4 * (2 * m * n + n * k), is_3x3=True)
        seconds = model.seconds(work)
        assert seconds >= 0.97 * previous
        previous, reached = seconds, flops / seconds / model.spec.peak(torch.float32)
    assert 0.1 < reached < 1.9  # Winograd's algorithm needs fewer products than are counted


def with_coefficients(model, where, **values):
    coefficients = deepcopy(dict(model.coefficients))
    coefficients["simt"][where] |= values
    return replace(model, coefficients=coefficients)


def conv(pixels, side, channels, out, kernel=1):
    sizes = (1, pixels, out, channels * kernel**2, side, side)
    flops = 2 * pixels * out * channels * kernel**2
    return Work("conv", "conv", torch.float32, sizes, flops, 4 * (pixels * (channels + out)), is_3x3=kernel == 3)


@pytest.mark.parametrize("sizes", [(0, 8, 8), (8, 0, 8), (8, 8, 0), (0, 0, 8)])
def test_products_of_empty_matrices_take_a_launch(sizes):
    model, work = device_model(DeviceSpec("P100")), gemm(*sizes, dtype=torch.float32)._replace(nbytes=0)
    assert model.seconds(work) == model.launch


def test_convolutions_have_a_speed_of_their_own():
    turing = replace(DeviceSpec("T4"), name="another of its generation")
    assert device_model(DeviceSpec("T4")).conv != device_model(turing).conv == 1.0
    model = replace(device_model(DeviceSpec("A100")), conv=1.0)
    work = conv(100_352, 56, 64, 64)
    assert replace(model, conv=0.5).computing(work) == pytest.approx(2 * model.computing(work))
    product = gemm(100_352, 64, 64, dtype=torch.float32)
    assert replace(model, conv=0.5).computing(product) == model.computing(product)
    half = work._replace(dtype=HALF)
    assert replace(model, conv=0.5).computing(half) == model.computing(half)


def test_only_transformed_images_and_results_stay_in_caches():
    # 32 images of 16 x 16 are 512 tiles of 4 x 4 results, each transformed into 36 numbers, written and read.
    work, model = conv(8192, 16, 256, 128, kernel=3), device_model(DeviceSpec("A100"))
    once, twice = (with_coefficients(model, "conv", transform=speed).computing(work) for speed in (1.0, 2.0))
    saved = 4 * (72 * 512 + 8192) * (256 + 128) / 2 / (model.spec.bandwidth * model.stream)
    assert once - twice == pytest.approx(saved)


def test_the_fit_says_where_it_is_from():
    found = fits()
    assert found["date"]
    assert len(found["sources"]) == 6
    assert all(0 < device["error"] < 0.2 for device in found["devices"].values())


def test_a_complex_multiply_add_is_four_real_ones():
    model = device_model(DeviceSpec("A100"))
    work = gemm(512, 512, 512, dtype=torch.complex64)
    # (x + iy)(u + iv) = xu - yv + i (xv + yu), as a real product with two rows and two columns for each complex one
    real = gemm(512, 2 * 512, 2 * 512, dtype=torch.float32)._replace(nbytes=work.nbytes)
    assert real.flops == 4 * work.flops
    assert model.seconds(work) == model.seconds(real)
    with pytest.raises(InputError, match=r"aten.mm computes with torch.float32: the peak of TPU v5e"):
        device_model(DeviceSpec("TPU v5e")).seconds(work)


@pytest.mark.parametrize("name", ["RTX 3090", "RTX 4090", "RTX 5090", "L40S", "A100"])
def test_tf32_is_never_slower_as_float32_kernels_stay_allowed(name):
    """Winograd's algorithm in float32 does 4 of 9 multiply-adds, and tensor cores of GeForce cards have half rate."""
    sizes, flops = (1, 100352, 64, 576, 1792, 56), 2 * 100352 * 64 * 576
    convolution = Work("aten.convolution", "conv", torch.float32, sizes, flops, 51_000_000, is_3x3=True)
    exact, rounded = (device_model(DeviceSpec(name), tf32=tf32, tf32_in_cudnn=tf32) for tf32 in (False, True))
    for work in (convolution, gemm(4096, 4096, 4096, dtype=torch.float32)):
        assert rounded.seconds(work) <= exact.seconds(work)


@pytest.mark.parametrize(("dtype", "name"), [(HALF, "B200"), (HALF, "RTX 3090"), (torch.float32, "A100")])
def test_long_products_run_at_the_speed_that_was_measured_on_the_board(dtype, name):
    plain = device_model(DeviceSpec(name))
    work = gemm(16384, 16384, 16384, dtype=dtype)
    speed = 0.8 * work.flops / plain.seconds(work)
    board = device_model(DeviceSpec(name, sustained_flops={dtype: speed}))
    assert work.flops / board.seconds(work) == pytest.approx(speed, rel=0.05)


@pytest.mark.parametrize(
    ("name", "faster", "slower", "ratio"),
    [  # the speeds that were published, see ``attention_time``
        ("A100", "flash2", "flash1", 0.66 / 0.45),
        ("H100", "flash2", "flash1", 0.35 / 0.24),
        ("H100", "flash3", "cudnn", 0.61 / 0.59),
        ("H100", "cudnn", "flash2", 0.59 / 0.35),
        ("A100", "flash2", "efficient", 1 / 0.85),
    ],
)
def test_generations_of_attention(name, faster, slower, ratio):
    # cuDNN's causal kernels compute more tiles on the diagonal than the others
    work = attention(256, 8192, 8192, 128, is_causal="cudnn" not in (faster, slower))
    quick, slow = (device_model(DeviceSpec(name), attention=kernel).computing(work) for kernel in (faster, slower))
    assert slow / quick == pytest.approx(ratio)


@pytest.mark.parametrize("head", [64, 128])
def test_flash_attention_1_is_as_fast_as_was_published(head):
    """30 to 50 % of the peak of an A100 forward, 25 to 35 % backward: Dao 2023, arXiv:2307.08691, section 1."""
    model = device_model(DeviceSpec("A100"), attention="flash1")
    for is_backward, least, most in ((False, 0.3, 0.5), (True, 0.25, 0.35)):
        work = attention(256, 8192, 8192, head)._replace(is_backward=is_backward)
        assert least < work.flops / model.computing(work) / 312e12 < most


def test_float32_attention_is_the_memory_efficient_kernel_whichever_runs_in_half_precision():
    work = attention(64, 1024, 1024, 64)._replace(dtype=torch.float32, is_backward=True)
    seconds = {device_model(DeviceSpec("A100"), attention=kernel).seconds(work) for kernel in ("flash1", "flash2")}
    assert len(seconds) == 1


def test_unknown_kernels_of_attention():
    with pytest.raises(InputError, match=r"attention must be None or one of .flash1., .*.efficient., got .flash."):
        device_model(DeviceSpec("RTX 3090"), attention="flash")


def test_a_tensor_that_the_cache_holds_is_read_faster_the_smaller_it_is():
    model = device_model(DeviceSpec("RTX 4090"))  # 72 MB
    speeds = [nbytes / model.moving(copy(nbytes)) for nbytes in (10**6, 36 * 10**6, 72 * 10**6, 10**9)]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[0] == pytest.approx(3 * speeds[-1], rel=0.05)


def test_compiled_steps_say_their_own_error():
    model = device_model(DeviceSpec("RTX 3090"))
    assert model.compiled_error == fits()["compiled_error"] > model.typical_error


@pytest.mark.parametrize(("name", "most"), [("A100", 0.03), ("B200", 0.12)])
@pytest.mark.parametrize("is_backward", [False, True])
def test_wide_heads_are_slower(name, most, is_backward):
    """Latent attention of 64 heads and 4,096 tokens on an A100 and a B200 (configs/system of SimuMax at e691807).

    Measured: the share of the peak with heads of 192 and 128, over the one with heads of 128, operations counted alike.
    """
    measured = {("A100", False): 1.0544 / 1.187, ("A100", True): 0.7943 / 1.005}
    measured |= {("B200", False): 0.8306 / 0.9967, ("B200", True): 0.6426 / 0.8316}  # of 128 heads
    heads = 64 if name == "A100" else 128
    model = device_model(DeviceSpec(name))

    def rate(size, flops):
        sizes = (heads, 4096, 4096, size)
        work = Work("", "attention", torch.bfloat16, sizes, flops, 0, is_backward=is_backward, is_causal=True)
        return flops / model.busy(work)

    pairs = heads * 4096 * 4096 * (5 if is_backward else 2)
    wide, usual = rate(192, pairs * (192 + 128)), rate(128, pairs * 256)
    assert wide / usual == pytest.approx(measured[name, is_backward], rel=most)


@pytest.mark.parametrize(
    ("groups", "rows", "share"), [(256, 128, 0.2081), (64, 512, 0.3670), (32, 1024, 0.4571), (40, 9832, 0.4746)]
)
def test_products_of_groups_hide_less_of_their_moving(groups, rows, share):
    """Experts of DeepSeek on a B200 that sustains 1,107 TFLOP/s (configs/system of SimuMax at e691807)."""
    n, k = (3072, 5120) if groups == 40 else (4096, 7168)
    model = device_model(DeviceSpec("B200", sustained_flops={torch.bfloat16: 1.107e15}))
    nbytes = 2 * groups * (n * k + rows * (n + k))
    one = Work("", "gemm", torch.bfloat16, (groups, rows, n, k), 2 * groups * rows * n * k, nbytes)
    seconds = [model.busy(work) for work in (one, one._replace(is_grouped=True))]
    assert seconds[0] < seconds[1]
    assert one.flops / seconds[1] / 2250e12 == pytest.approx(share, rel=0.2)


@pytest.mark.parametrize(
    ("name", "speed", "n", "k", "shares"),
    [
        ("B200", 1.107e15, 57344, 8192, (0.4536, 0.4867, 2250e12)),
        ("B200", 1.107e15, 16384, 53248, (0.4536, 0.5109, 2250e12)),
        ("A100 80GB PCIe", 2.34e14, 28672, 8192, (0.7116, 0.7411, 312e12)),
        ("A100 80GB PCIe", 2.34e14, 8192, 8192, (0.7137, 0.7327, 312e12)),
    ],
)
def test_products_that_add_to_sums_are_slower(name, speed, n, k, shares):
    """Gradients of weights of 4,096 tokens in float32, and the forward (configs/system of SimuMax at e691807)."""
    added, forward, peak = shares
    model = device_model(DeviceSpec(name, sustained_flops={torch.bfloat16: speed}))
    flops, operands = 2 * n * k * 4096, 2 * 4096 * (n + k)
    plain = Work("", "gemm", torch.bfloat16, (1, 4096, n, k), flops, operands + 2 * n * k)
    adding = plain._replace(sizes=(1, n, k, 4096), nbytes=operands + 8 * n * k, is_added=True)
    assert flops / model.busy(plain) / peak == pytest.approx(forward, rel=0.05)
    assert flops / model.busy(adding) / peak == pytest.approx(added, rel=0.05)
    assert model.busy(plain) < model.busy(adding)


BF16, FLOAT32 = torch.bfloat16, torch.float32


def product(m, n, k):
    alignment = 16 if n % 8 == 0 and k % 8 == 0 else 4 if n % 2 == 0 and k % 2 == 0 else 2
    return gemm(m, n, k, dtype=BF16)._replace(alignment=alignment)


def test_depthwise_convolutions_take_cycles_of_units_and_no_tensor_cores():
    work = Work("conv", "depthwise", HALF, (10**8, 49), 98 * 10**8, 4 * 10**8, channels_last=True)
    data_center, desktop = (device_model(DeviceSpec(name)).computing(work) for name in ("A100", "RTX 3090"))
    assert data_center / desktop == pytest.approx(82 * 1.695 / (108 * 1.41), rel=0.01)  # units and their GHz


def depthwise(elements, positions):
    return Work("conv", "depthwise", BF16, (elements, positions), 2 * elements * positions, 4 * elements)


def batch_norm(batch, channels, side, passes, part="without cuDNN", *, backward=False):
    elements = batch * side**2
    moved = 2 * passes * channels * elements
    return Work("norm", "batch_norm", BF16, (channels, batch, side**2), 0, moved, part, backward)


@pytest.mark.parametrize(
    ("work", "microseconds"),
    [  # an H100 with torch 2.11, each measured alone or profiled in a model (benchmarks/gpu_truth.py)
        (product(4096, 4096, 4096), 174),
        (product(4096, 4098, 4096), 483),
        (product(4096, 4097, 4096), 1428),
        (product(8192, 50_257, 1024), 8525),
        (product(8192, 30_522, 1024), 1956),
        (product(8192, 766, 768), 51),
        (Work("cast", "copy", FLOAT32, (4096**2,), 0, 6 * 4096**2, "element by element"), 55),
        (Work("clone", "copy", BF16, (64 * 196 * 768,), 0, 4 * 64 * 196 * 768, "transposed"), 70),
        (Work("norm", "norm", BF16, (200_704, 96), 0, 4 * 200_704 * 96), 232),
        (Work("norm", "norm", BF16, (4096, 4096), 0, 4 * 4096**2), 33),
        (Work("sum", "reduction", BF16, (3072, 8192), 0, 2 * 8192 * 3072, "over rows"), 34),
        (batch_norm(256, 16, 112, 3), 2803),
        (batch_norm(64, 512, 28, 3), 140),
        (batch_norm(256, 960, 7, 2, "inference"), 152),
        (batch_norm(64, 256, 56, 2, "inference"), 141),
        (batch_norm(256, 16, 112, 5, backward=True), 5666),
        (batch_norm(64, 256, 56, 5, backward=True), 462),
        (depthwise(256 * 72 * 56 * 56, 9), 563),
        (depthwise(256 * 120 * 28 * 28, 25), 418),
    ],
)
def test_what_units_load_limits_kernels_of_an_h100(work, microseconds):
    assert 1e6 * device_model(DeviceSpec("H100")).seconds(work) == pytest.approx(microseconds, rel=0.25)


def test_float16_and_channels_last_get_kernels_of_cudnn():
    model = device_model(DeviceSpec("H100"))
    for work in (batch_norm(256, 16, 112, 3), depthwise(10**7, 9)):
        in_float16 = work._replace(dtype=HALF, part="")
        assert model.seconds(in_float16) < 0.5 * model.seconds(work)
        assert model.seconds(work._replace(channels_last=True, part="")) < 0.8 * model.seconds(work)


def convolution(groups, channels, size, *, positions=9, **facts):
    """A convolution of 64 images whose groups have 56 channels each, or as many as are given."""
    m, n, k = 64 * size**2, channels // groups, channels // groups * positions
    nbytes = 2 * (2 * m * channels + groups * n * k)
    sizes = (groups, m, n, k, size, size)
    return Work("aten.convolution", "conv", torch.bfloat16, sizes, 2 * groups * m * n * k, nbytes, **facts)


def test_groups_of_convolutions_run_one_after_the_other_on_an_h100():
    """In bfloat16 with torch 2.11, RegNet-Y-8GF runs kernels of 64 x 64 for each of 16 groups, nine times."""
    model = device_model(DeviceSpec("H100"))
    grouped, single = convolution(16, 896, 14), convolution(1, 56, 14)
    assert model.seconds(grouped) == pytest.approx(16 * model.seconds(single))
    assert model.seconds(grouped._replace(channels_last=True)) < 0.3 * model.seconds(grouped)
    ampere = device_model(DeviceSpec("A100"))
    assert ampere.seconds(grouped) < 4 * ampere.seconds(convolution(1, 896, 14, positions=1))


@pytest.mark.parametrize(
    ("channels", "size", "microseconds"),  # on an H100 with torch 2.11, bfloat16, in ResNet-50 and RegNet-Y-8GF
    [(64, 56, 18.5), (224, 56, 65.3), (448, 28, 44.3)],
)
def test_convolutions_of_single_pixels_are_products_of_images_as_they_are(channels, size, microseconds):
    work = convolution(1, channels, size, positions=1, is_product=True)
    assert device_model(DeviceSpec("H100")).seconds(work) == pytest.approx(1e-6 * microseconds, rel=0.2)


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "microseconds"),  # log-softmax on an H100 with torch 2.11
    [
        (8192, 50_257, torch.float32, 2063),
        (4096, 128_256, torch.float32, 2796),
        (4096, 32_000, torch.float32, 640),
        (4096, 512, torch.float32, None),
    ],
)
def test_softmax_reads_wide_rows_again(rows, width, dtype, microseconds):
    nbytes = 2 * rows * width * dtype.itemsize
    work, model = Work("", "softmax", dtype, (rows, width), 0, nbytes), device_model(DeviceSpec("H100"))
    once = model.seconds(work._replace(is_backward=True))
    if microseconds is None:
        assert model.seconds(work) == once
    else:
        assert model.seconds(work) == pytest.approx(1e-6 * microseconds, rel=0.12)
        assert once < 0.95 * model.seconds(work)


def test_cudnn_is_slower_with_masks_and_dropout():
    """On an H100, 8 x 12 heads of 64 and 512 tokens take 22 us, with a mask 36; dropout slows the forward alone."""
    model = device_model(DeviceSpec("H100"))
    plain = attention(96, 512, 512, 64)
    assert model.computing(plain._replace(is_masked=True)) == pytest.approx(model.computing(plain) / 0.61)
    assert model.computing(plain._replace(drops=True)) == pytest.approx(model.computing(plain) / 0.47)
    backward = plain._replace(is_backward=True)
    assert model.computing(backward._replace(drops=True)) == model.computing(backward)
    single = plain._replace(dtype=torch.float32, is_masked=True, is_efficient=True)
    assert model.computing(single) == model.computing(single._replace(is_masked=False))


def test_float32_attention_on_an_h100():
    """16 heads of 128 with 4,096 tokens took 3.56 ms; 64 x 12 heads of 64 with 197 tokens 0.41 ms (torch 2.11)."""
    model = device_model(DeviceSpec("H100"))
    for sizes, seconds in (((16, 4096, 4096, 128), 3.56e-3), ((768, 197, 197, 64), 0.414e-3)):
        work = attention(*sizes)._replace(dtype=torch.float32, is_efficient=True)
        assert model.seconds(work) == pytest.approx(seconds, rel=0.1)


@pytest.mark.parametrize(
    ("channels", "size", "microseconds"),  # of 64 images in ResNet-50, on an H100 with torch 2.11
    [(256, 56, 170.4), (512, 28, 90.0), (2048, 7, 80.8)],
)
def test_units_limit_float32_batch_norm_on_an_h100(channels, size, microseconds):
    model, elements = device_model(DeviceSpec("H100")), 64 * channels * size**2
    sizes = channels, 64, size**2
    work = Work("aten.native_batch_norm", "batch_norm", torch.float32, sizes, 0, 8 * elements, "inference")
    assert model.seconds(work) == pytest.approx(1e-6 * microseconds, rel=0.2)

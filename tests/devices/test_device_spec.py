from __future__ import annotations

import math

import pytest
import torch

from modelsummary import DeviceSpec, InputError
from modelsummary.cluster import Cluster
from modelsummary.devices.device_table import TABLE


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("a100 80gb", "A100 80GB"),
        ("A100", "A100 80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB PCIe"),
        ("A100 PCIe", "A100 80GB PCIe"),
        ("A100 40 GB", "A100 40GB"),
        ("A100-40G", "A100 40GB"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("TPU v5e", "TPU v5e"),
    ],
)
def test_names(name, found):
    assert DeviceSpec.of(name).name == found


@pytest.mark.parametrize(
    "name",
    [
        None,
        b"A100",
        ["A100"],
        *"4090,nothing,,NVIDIA H100 NVL,NVIDIA H200 NVL,RTX 4090 Laptop GPU,RTX 3090 Ti".split(","),
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "A100, H100",  # two
        "NVIDIA H20-3e",  # 141 GB at 4.8 TB/s
    ],
)
def test_unknown_names(name):
    with pytest.raises(InputError, match=r"in the table; (the nearest are|expected one of P100, P4, V100)"):
        DeviceSpec.of(name)


def test_the_interconnect_of_a_card_without_nvlink_is_its_pcie_slot():
    """Sixteen lanes have 32 GB/s in the fourth generation and 64 GB/s in the fifth; both directions count."""
    for names, nbytes in (("3060 3070 3080 3090 4070 4080 4090", 64e9), ("5070 5080 5090", 128e9)):
        assert {DeviceSpec(f"RTX {name}").interconnect for name in names.split()} == {nbytes}


def test_the_blackwells_of_a_superchip_share_the_link_to_grace():
    assert DeviceSpec("GB200").host_bandwidth == DeviceSpec("GB300").host_bandwidth == 0.8 * 450e9 / 2
    assert DeviceSpec("B300").host_bandwidth == 50e9


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(InputError, match="the nearest are RTX 4090"):
        DeviceSpec("4090")


@pytest.mark.parametrize(
    ("name", "entry", "ratio"),
    [
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada", 4),
        ("NVIDIA RTX A5000", "A5000", 4),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000", 4),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000 Max-Q", 4),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", 2),
    ],
)
def test_cards_for_workstations_have_whole_tensor_cores(name, entry, ratio):
    """Data sheets: four times the vector units with float32 sums; GeForce cards have half of it."""
    device = DeviceSpec(name)
    assert device.name == entry
    assert device.peak_flops[torch.bfloat16] / device.peak_flops[torch.float32] == pytest.approx(ratio, rel=0.01)


@pytest.mark.parametrize("name", ["RTX PRO 6000 D", "RTX 4000 SFF Ada", "RTX A5000 Laptop GPU"])
def test_other_cards_of_a_name_are_not_taken_for_it(name):
    with pytest.raises(InputError, match=r"; the nearest are (RTX PRO 6000|RTX 4000 Ada|A5000), .{,90}; pass one"):
        DeviceSpec(name)


def test_the_nearest_names_are_found_by_word():
    with pytest.raises(InputError, match="the nearest are MI250"):
        DeviceSpec("AMD Instinct MI250X")


@pytest.mark.parametrize(
    ("name", "entry"), [("RTX3090", "RTX 3090"), ("a100-80gb", "A100 80GB"), ("tpu_v5e", "TPU v5e")]
)
def test_case_and_marks_in_a_name_do_not_count(name, entry):
    assert DeviceSpec(name) == DeviceSpec(entry)


@pytest.mark.parametrize(
    ("peak", "bandwidth", "said"),
    [
        (312, 2e12, "peak_flops of torch.bfloat16 must be in FLOP/s, such as 312e12, got 312"),
        (312e12, 2039, "bandwidth must be in bytes"),
        (312, 2039, "peak_flops of torch.bfloat16 must be in FLOP/s, such as 312e12, got 312"),
        ("312 TFLOP/s", 2e12, "must be a number > 0 in FLOP/s, such as 312e12, got '312 TFLOP/s'"),
        (312e12, "2 TB/s", "bandwidth must be a number > 0 in bytes per second, such as 2e12, got '2 TB/s'"),
    ],
)
def test_a_figure_without_its_unit_is_refused(peak, bandwidth, said):
    with pytest.raises(InputError, match=said):
        DeviceSpec("mine", {"bf16": peak}, bandwidth)


def test_dtypes_have_names():
    spec = DeviceSpec("mine", {"bf16": 312e12, "tf32": 156e12}, 2e12)
    assert spec.peak(torch.bfloat16) == spec.peak("bfloat16") == 312e12
    assert spec.peak("tf32") == 156e12


def test_a_memory_in_the_name_counts():
    spec = DeviceSpec("Tesla V100-SXM2-16GB")  # the table's V100 has 32 GB
    assert spec.memory_bytes == 16 * 10**9
    assert spec.source.endswith("2020, with 16 GB")
    assert DeviceSpec("Tesla V100-SXM2-32GB").memory_bytes == DeviceSpec("V100").memory_bytes == int(31.73 * 2**30)


def test_a_name_alone_says_which_device_it_took():
    spec = DeviceSpec("A100")
    assert (spec.name, spec.memory_bytes, spec.units) == ("A100 80GB", int(79.14 * 2**30), 108)
    assert spec.bandwidth == pytest.approx(2.039e12)
    assert spec.source.startswith("A100 taken as A100 80GB: NVIDIA A100 data sheet")
    assert spec.achievable_flops[torch.bfloat16] == 271.2e12


@pytest.mark.parametrize("name", TABLE)
def test_every_device_of_the_table_has_a_source(name):
    spec = DeviceSpec(name)
    assert spec.source == TABLE[name].source
    assert all(getattr(spec, each) > 0 for each in ("memory_bytes", "interconnect", "units", "cache_bytes"))
    for dtype, reached in spec.achievable_flops.items():
        assert 0.4 * spec.peak(dtype) < reached < spec.peak(dtype)
    assert max(spec.peak_flops.values()) > spec.bandwidth  # FLOP/s and B/s were not confused


@pytest.mark.parametrize("name", TABLE)
def test_memory_is_what_torch_sees(name):
    usable, sheet = DeviceSpec(name).memory_bytes, TABLE[name].memory
    if TABLE[name].usable_gib is not None:  # between the sheet's figure in GB and in GiB, less what the device keeps
        assert 0.85 * sheet * 2**30 < usable <= sheet * 2**30
    else:
        assert usable == sheet * 10**9


def test_bound():
    # 100 TFLOP/s and 10 TB/s: from 10 FLOPs per byte on computing takes longer
    spec = DeviceSpec("made up", {torch.float32: 100e12}, 10e12)
    assert spec.bound(200e12, 10e12, torch.float32) == (2.0, "compute")
    assert spec.bound(200e12, 40e12, torch.float32) == (4.0, "memory")
    assert spec.bound(0, 0, torch.float32) == (0.0, "compute")
    with pytest.raises(InputError, match=r"peak of made up with torch\.float64 is not known; pass dtype= one of"):
        spec.bound(1, 1, torch.float64)


@pytest.mark.parametrize(
    ("peaks", "bandwidth"),
    [
        ({}, 1.0),
        ({torch.float32: 0.0}, 1.0),
        ({torch.float32: 1.0}, -1.0),
        ({torch.float32: "a"}, 1.0),
        ({torch.float32: 1.0}, "b"),
        (5, 1.0),
    ],
)
def test_bad_figures(peaks, bandwidth):
    with pytest.raises(
        InputError,
        match=r"peak_flops must map dtypes to FLOP/s|must be a number > 0 in (FLOP/s|bytes per second), such as",
    ):
        DeviceSpec("bad", peaks, bandwidth)


def test_devices_that_cannot_be_measured():
    for device in ("nowhere", "meta"):
        with pytest.raises(InputError, match=repr(device)):
            DeviceSpec.measure(device)
    with pytest.raises(InputError, match="dtypes must be a list of torch"):
        DeviceSpec.measure(dtypes=("float32",))
    assert len({DeviceSpec.of("H100"), DeviceSpec.of("h100")}) == 1


@pytest.mark.slow
def test_this_machine():
    spec = DeviceSpec.measure(dtypes=(torch.float32, torch.float64))
    assert spec.peak(torch.float32) > spec.peak(torch.float64) > 1e8
    assert spec.bandwidth > 1e8


def test_the_speed_and_the_power_of_this_very_board():
    spec = DeviceSpec("B200", sustained_flops={torch.bfloat16: 1.107e15}, watts=700)
    assert (spec.name, spec.watts, spec.peak(torch.bfloat16)) == ("B200", 700, 2.25e15)
    assert DeviceSpec("B200").watts == 1000
    assert DeviceSpec("mine", {torch.float32: 1e12}, 1e11).watts is None


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"sustained_flops": {torch.bfloat16: 0}}, "sustained_flops must map .*torch.bfloat16 to numbers > 0, got"),
        ({"sustained_flops": {"tf32": 1e12}}, "sustained_flops must map torch.float32, torch.float16, torch.bfloat16"),
        ({"sustained_flops": 1e12}, "sustained_flops must map"),
        ({"watts": -1}, "watts must be a number > 0 or None, got -1"),
    ],
)
def test_unusable_figures_of_a_board(figures, said):
    with pytest.raises(InputError, match=said):
        DeviceSpec("A100", **figures)


def test_the_sustained_speed_is_measured_here():
    speeds = DeviceSpec.sustained("cpu", [torch.float32, torch.bfloat16], seconds=0.02)
    assert list(speeds) == [torch.float32, torch.bfloat16]
    assert min(speeds.values()) > 0
    assert DeviceSpec("A100", sustained_flops=speeds).sustained_flops == speeds


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("meta",), "must be one that computes"),
        (("cpu", [torch.int8]), "dtypes must be a list of torch.float32"),
        (("cpu", [torch.float32], 0), "seconds must be a number > 0, got 0"),
    ],
)
def test_a_sustained_speed_needs_usable_arguments(arguments, said):
    with pytest.raises(InputError, match=said):
        DeviceSpec.sustained(*arguments)


def test_units_of_memory_and_links():
    memory = {"peak_flops": {torch.float32: 1e12}, "bandwidth": 1e12}
    assert DeviceSpec("mine", **memory, memory_bytes="80GB").memory_bytes == 80 * 10**9
    with pytest.raises(InputError, match="memory_bytes is in bytes, and 80 is 80 of them; pass text such as '80GB'"):
        DeviceSpec("mine", **memory, memory_bytes=80)
    for name, gigabytes in (("link_bandwidth", 600), ("network_bandwidth", 25)):
        with pytest.raises(InputError, match=f"{name} must be in bytes per second, such as 25e9, got {gigabytes}"):
            Cluster("A100", **{name: gigabytes})


@pytest.mark.parametrize("amounts", [("1e9", 1e9), (-1e9, 1e9), (1e9, math.nan), (1e9, None)])
def test_bound_of_no_amount(amounts):
    with pytest.raises(InputError, match=r"(flops|moved_bytes) must be a number >= 0, got "):
        DeviceSpec("A100").bound(*amounts, torch.float32)

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from modelsummary import DeviceSpec
from modelsummary.devices.device_table import TABLE
from modelsummary.devices.kernel_time import device_model
from modelsummary.devices.sustained import clock_of, half_speed, is_geforce, is_in_desktop, vector_share

MEASURED = {"hopper": {"sustained": {"H100": 0.8 * 794.5e12}}, "ada": {"sustained": {"L40S": 2e14}}}


def test_float32_products_reach_what_power_and_lanes_allow():
    per_joule = {"ampere": 76.0, "hopper": 130.0}
    assert vector_share(DeviceSpec("A100"), per_joule) == 0.95
    assert vector_share(DeviceSpec("A10"), per_joule) == pytest.approx(76e9 * 150 / 31.2e12)
    assert vector_share(DeviceSpec("H100"), per_joule) == 0.75  # 128 lanes for each unit


def test_a_published_highest_speed_is_sustained_as_far_as_on_the_measured_device():
    assert half_speed(DeviceSpec("H200"), MEASURED) == pytest.approx(0.8 * 794.5e12)
    slower = replace(DeviceSpec("H100"), achievable_flops={torch.bfloat16: 500e12})
    assert half_speed(slower, MEASURED) == pytest.approx(400e12)
    assert half_speed(DeviceSpec("MI300X"), MEASURED) == 668.4e12  # no device of its generation was measured


def test_without_a_published_speed_power_and_units_count():
    # 72 W instead of 350 W, shared by 58 units instead of 142
    assert half_speed(DeviceSpec("L4"), MEASURED) == pytest.approx(2e14 * (72 / 350 * 58 / 142) ** 0.5)
    assert half_speed(DeviceSpec("RTX 4090"), MEASURED) == pytest.approx(1.1 * 165.2e12)  # by its clock, and no more
    assert half_speed(DeviceSpec("V100"), {}) == pytest.approx(300 / 70 * 24e12)
    assert half_speed(DeviceSpec("P4"), {}) is None


def test_a_speed_that_was_measured_on_a_device_of_this_type_counts():
    measured = {"blackwell": {"sustained": {"B200": 1.4e15, "GB300": 1.7e15}}}
    assert half_speed(DeviceSpec("GB300"), measured) == 1.7e15
    assert half_speed(DeviceSpec("GB300", watts=700), measured) == pytest.approx(1.7e15 * 0.5**0.5)  # instead of 1,400


def test_blackwells_for_graphics_are_not_predicted_from_a_b200():
    """They run the products of the Ampere generation: 383 TFLOP/s were measured at 600 W, and 300 W sustain less."""
    whole, half = (device_model(DeviceSpec(name)) for name in ("RTX PRO 6000", "RTX PRO 6000 Max-Q"))
    assert whole.sustained == pytest.approx(383e12, rel=0.01)
    assert half.sustained == pytest.approx(383e12 / 2**0.5, rel=0.01)
    assert whole.attention_kernel == "flash2"  # torch prefers cuDNN where the compute capability is 9.0 or 10.0


GEFORCE = [name for name in TABLE if re.fullmatch(r"RTX [345]0\d\d", name)]


def spec(name, single, half, tf32=None, generation=""):
    peaks = {torch.float32: single * 1e12, torch.bfloat16: half * 1e12}
    return DeviceSpec(name, {**peaks, **({} if tf32 is None else {"tf32": tf32 * 1e12})}, 1e12, generation=generation)


@pytest.mark.parametrize(
    ("device", "is_halved"),
    [
        *[(DeviceSpec(name), name in GEFORCE or name == "L40") for name in TABLE],
        # NVIDIA's data sheets and whitepapers: dense peaks with float32 accumulation
        (spec("RTX A6000", 38.7, 154.8, 77.4, "ampere"), False),
        (spec("my RTX card", 125, 503.8, 251.9), False),
        (spec("GeForce 3080", 29.8, 59.5, 29.8), True),
        (spec("a card", 29.8, 59.5, generation="ampere"), True),
        (DeviceSpec("a processor", {torch.float32: 1e11}, 5e10), False),
    ],
)
def test_geforce_cards_are_known_by_their_peaks(device, is_halved):
    assert is_geforce(device) == is_halved


def test_a_server_card_with_halved_tensor_cores_is_not_in_a_desktop():
    desktops = [name for name in TABLE if is_in_desktop(DeviceSpec(name))]
    assert desktops == GEFORCE
    assert clock_of(DeviceSpec("L40")) == 1.0
    assert device_model(DeviceSpec("L40")).host == device_model(DeviceSpec("L40S")).host  # an operator waits as long


def test_a_highest_speed_in_float16_alone_counts():
    own = replace(DeviceSpec("H100"), achievable_flops={torch.float16: 500e12})
    assert half_speed(own, MEASURED) == pytest.approx(400e12)

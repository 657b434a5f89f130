import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelsummary import InputError
from modelsummary.units import (
    PREFIXES,
    auto_prefix,
    decimals,
    duration,
    format_number,
    grouped,
    percent,
    scaled,
    symbol,
)


@pytest.mark.parametrize(
    ("value", "prefix", "expected"),
    [
        (0, "", "0"),
        (11_513_626_624, "", "11,513,626,624"),
        (11_513_626_624, "G", "11.51"),
        (240_771_232, "M", "240.77"),
        (240_771_232, "Mi", "229.62"),  # 240,771,232 / 2^20 = 229.617
        (1_234_567, "K", "1,234.57"),
    ],
)
def test_format_number(value, prefix, expected):
    assert format_number(value, prefix) == expected


@pytest.mark.parametrize(("prefix", "unit", "expected"), [("M", "B", "MB"), ("K", "B", "kB"), ("Ki", "B", "KiB")])
def test_symbol(prefix, unit, expected):
    assert symbol(prefix, unit) == expected


def test_symbol_of_counts():
    assert symbol("K") == "K"


def test_unknown_prefix_is_echoed():
    with pytest.raises(InputError, match="unknown unit prefix 'X'; expected one of ''"):
        format_number(1, "X")


@given(st.integers(min_value=0, max_value=10**20))
def test_auto_prefix_leaves_a_digit_before_the_point(value):
    factor = PREFIXES[auto_prefix(value)]
    assert value >= factor or value == 0
    assert value < 1000 * factor or auto_prefix(value) == "P"


@pytest.mark.parametrize(
    ("value", "unit", "binary", "expected"),
    [
        (0, "B", False, "0 B"),
        (512, "B", False, "512 B"),
        (0.5, "FLOP/s", False, "0.50 FLOP/s"),
        (1500, "B", False, "1.50 kB"),
        (1500, "B", True, "1.46 KiB"),  # 1500 / 1024 = 1.4648
        (1023, "B", True, "1023 B"),
        (11_513_626_624, "", False, "11.51 G"),
        (2**50, "B", True, "1024.00 TiB"),
    ],
)
def test_scaled(value, unit, binary, expected):
    assert scaled(value, unit, binary=binary) == expected


def test_what_has_no_figure():
    assert {grouped(None), decimals(None, 2), percent(None)} == {"--"}


@pytest.mark.parametrize(
    ("milliseconds", "expected"), [(1000, "1.00 s"), (999, "999.00 ms"), (1, "1.00 ms"), (0.0125, "12.50 us")]
)
def test_duration(milliseconds, expected):
    assert duration(milliseconds) == expected

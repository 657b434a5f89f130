"""One formatter for counts (parameters, MACs) and bytes.

Prefixes are decimal (``K`` = 10^3, ``M`` = 10^6 ...) or binary (``Ki`` = 2^10, ``Mi`` = 2^20 ...).
"""

from __future__ import annotations

from enum import Enum, unique

from modelsummary.errors import InputError

__all__ = [
    "PREFIXES",
    "ReadableNumbers",
    "Units",
    "auto_prefix",
    "check_prefix",
    "format_number",
    "in_parentheses",
    "symbol",
]

PREFIXES: dict[str, int] = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "P": 10**15,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
_AUTO = ("P", "T", "G", "M", "K")


def check_prefix(prefix: str) -> str:
    """Return ``prefix``; raise ``InputError`` if it is no known prefix."""
    if not isinstance(prefix, str) or prefix not in PREFIXES:
        known = ", ".join(repr(known) for known in PREFIXES)
        raise InputError(f"unknown unit prefix {prefix!r}; expected one of {known}")
    return prefix


def auto_prefix(value: float) -> str:
    """The largest decimal prefix that leaves at least one digit before the point."""
    return next((prefix for prefix in _AUTO if abs(value) >= PREFIXES[prefix]), "")


def symbol(prefix: str, unit: str = "") -> str:
    """``prefix`` and ``unit`` as they are written together: ``MB``, ``kB``, ``MiB``, ``G``."""
    return ("k" if prefix == "K" and unit else prefix) + unit


def format_number(value: int, prefix: str = "", digits: int = 2) -> str:
    """``value`` divided by the prefix: all digits with thousands separators, or ``digits`` decimals.

    >>> format_number(11_513_626_624)
    '11,513,626,624'
    >>> format_number(11_513_626_624, "G")
    '11.51'
    """
    factor = PREFIXES[check_prefix(prefix)]
    return f"{value:,}" if factor == 1 else f"{value / factor:,.{digits}f}"


@unique
class Units(str, Enum):
    """Prefixes of the totals of ``summary``: powers of 1,000; ``AUTO`` takes M, G or T by size."""

    AUTO = "auto"
    KILOBYTES = "K"
    MEGABYTES = "M"
    GIGABYTES = "G"
    TERABYTES = "T"
    NONE = ""


class ReadableNumbers:
    """The conversions that torchinfo's ``ModelStatistics`` has as static methods."""

    @staticmethod
    def float_to_megabytes(num: float) -> float:
        """Megabytes (10^6 bytes) of ``num`` numbers of 4 bytes."""
        return num * 4 / 1e6

    @staticmethod
    def to_megabytes(num: float) -> float:
        """Megabytes (10^6 bytes) of ``num`` bytes."""
        return num / 1e6

    @staticmethod
    def to_readable(num: float, units: Units = Units.AUTO) -> tuple[Units, float]:
        """``num`` in these units; ``AUTO``: tera from 10^12, giga from 10^9, else mega."""
        units = Units(units)
        if units == Units.AUTO:
            units = next((each for each in _LARGE if num >= PREFIXES[each.value]), Units.MEGABYTES)
        return units, num / PREFIXES[units.value]

    @staticmethod
    def format_output_num(num: float, units: Units, is_bytes: bool = False) -> str:
        """How the number follows its title: ``" (M): 7.80"``, whole numbers without decimals."""
        used, number = ReadableNumbers.to_readable(num, units)
        written = f"{int(number):,}" if float(number).is_integer() else f"{number:,.2f}"
        return f"{in_parentheses(used, is_bytes)}: {written}"


_LARGE = (Units.TERABYTES, Units.GIGABYTES)


def in_parentheses(units: Units, is_bytes: bool) -> str:
    """Return units as they follow the title of a figure: ``" (MB)"``."""
    written = symbol(units.value, "B" if is_bytes else "")
    return f" ({written})" if units != Units.NONE else ""

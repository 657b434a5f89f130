"""Formatting of all numbers: counts (parameters, MACs), bytes, times and shares.

Prefixes are decimal (``K`` = 10^3, ``M`` = 10^6 ...) or binary (``Ki`` = 2^10, ``Mi`` = 2^20 ...).
"""

from __future__ import annotations

import re
from decimal import Decimal
from enum import Enum, unique

from modelsummary.errors import InputError

__all__ = [
    "NOTHING",
    "PREFIXES",
    "ReadableNumbers",
    "Units",
    "auto_prefix",
    "check_prefix",
    "decimals",
    "duration",
    "format_number",
    "grouped",
    "in_parentheses",
    "number_of",
    "parse_amount",
    "parse_bytes",
    "percent",
    "scaled",
    "symbol",
]

NOTHING = "--"  # shown in a table for a missing figure

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
_LEAST = 1000  # bytes; a smaller number without a unit is one of gigabytes
_AUTO = ("P", "T", "G", "M", "K")
_BINARY = ("Ti", "Gi", "Mi", "Ki")


def parse_bytes(value: float | str, name: str) -> int:
    """Return a number of bytes >= 1, given as a whole number, such as 80e9, or as text with a prefix.

    Raises:
        InputError: ``value`` is neither, or has no unit and is too small for bytes; the message calls it ``name``.

    >>> parse_bytes("1.5 GiB", "memory_bytes"), parse_bytes(4096, "memory_bytes"), parse_bytes("512B", "memory_bytes")
    (1610612736, 4096, 512)
    """
    amount = parse_amount(value) if isinstance(value, str) else value
    if isinstance(amount, float) and amount.is_integer():
        amount = int(amount)
    if type(amount) is not int or amount < 1:
        raise InputError(f"{name} must be an integer >= 1 or text such as '24GB' or '16GiB', got {value!r}")
    if amount < _LEAST and str(value).strip()[-1].isdigit():
        raise InputError(
            f"{name} is in bytes, and {value!r} is {amount} of them; pass text such as '{amount}GB', or '{amount}B'"
        )
    return amount


def parse_amount(text: str) -> int | None:
    """Return an amount such as ``"25M"``, ``"4.1G"`` or ``"16GiB"`` as an integer; None if it is not one.

    >>> parse_amount("4.1G"), parse_amount("many")
    (4100000000, None)
    """
    match = _AMOUNT.fullmatch(text.strip())
    return (
        None if match is None else int(Decimal(match["number"]) * PREFIXES[(match["prefix"] or "").replace("k", "K")])
    )


_AMOUNT = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<prefix>[KkMGT]i?|P)?B?")


def check_prefix(prefix: str) -> str:
    """Return ``prefix``; raise ``InputError`` if it is unknown.

    >>> check_prefix("Mi")
    'Mi'
    """
    if not isinstance(prefix, str) or prefix not in PREFIXES:
        choices = ", ".join(repr(choice) for choice in PREFIXES)
        meant = [name for name in PREFIXES if name and str(prefix).lower() in (name.lower(), f"{name.lower()}b")]  # MB
        hint = f"; did you mean {meant[0]!r}?" if meant else ""
        raise InputError(f"unknown unit prefix {prefix!r}{hint}; expected one of {choices}")
    return prefix


def auto_prefix(value: float, *, binary: bool = False) -> str:
    """Return the largest decimal (or binary) prefix that leaves at least one digit before the point.

    >>> auto_prefix(25_557_032), auto_prefix(2048, binary=True), auto_prefix(7)
    ('M', 'Ki', '')
    """
    return next((prefix for prefix in (_BINARY if binary else _AUTO) if abs(value) >= PREFIXES[prefix]), "")


def symbol(prefix: str, unit: str = "") -> str:
    """Return ``prefix`` and ``unit`` as they are written together.

    >>> symbol("M", "B"), symbol("K", "B"), symbol("Mi", "B"), symbol("K")
    ('MB', 'kB', 'MiB', 'K')
    """
    return ("k" if prefix == "K" and unit else prefix) + unit


def format_number(value: int, prefix: str = "", digits: int = 2) -> str:
    """Return ``value`` in full with thousands separators, or divided by a prefix and rounded to ``digits`` decimals.

    >>> format_number(11_513_626_624)
    '11,513,626,624'
    >>> format_number(11_513_626_624, "G")
    '11.51'
    """
    factor = PREFIXES[check_prefix(prefix)]
    return f"{value:,}" if factor == 1 else f"{value / factor:,.{digits}f}"


def scaled(value: float, unit: str = "", *, binary: bool = False) -> str:
    """Return a number with a suitable prefix, its unit and two decimals; a whole number without a prefix has none.

    >>> scaled(11_513_626_624, "MACs"), scaled(1536, "B", binary=True), scaled(24)
    ('11.51 GMACs', '1.50 KiB', '24')
    """
    prefix = auto_prefix(value, binary=binary)
    is_whole = not prefix and float(value).is_integer()
    text = f"{value / PREFIXES[prefix]:.{0 if is_whole else 2}f}"
    return f"{text} {symbol(prefix, unit)}".rstrip()


def grouped(value: float | None) -> str:
    """Return a count in full, with thousands separators; ``--`` for None.

    >>> grouped(25_557_032)
    '25,557,032'
    """
    return NOTHING if value is None else f"{value:,}"


def decimals(value: float | None, digits: int) -> str:
    """Return a number with thousands separators and ``digits`` decimals; ``--`` for None.

    >>> decimals(1234.5, 2)
    '1,234.50'
    """
    return NOTHING if value is None else f"{value:,.{digits}f}"


def percent(share: float | None, digits: int = 1) -> str:
    """Return a share (0 to 1) as a percentage; ``--`` for None.

    >>> percent(0.125)
    '12.5%'
    """
    return NOTHING if share is None else f"{share:.{digits}%}"


def number_of(count: int, noun: str) -> str:
    """Return a count with its noun, in the plural unless it is one.

    >>> number_of(1, "stage"), number_of(1200, "module")
    ('1 stage', '1,200 modules')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def duration(milliseconds: float) -> str:
    """Return a time in seconds, milliseconds or microseconds, whichever leaves a digit before the point.

    >>> duration(1500), duration(0.25)
    ('1.50 s', '250.00 us')
    """
    if milliseconds >= 1e3:
        return f"{milliseconds / 1e3:.2f} s"
    return f"{milliseconds:.2f} ms" if milliseconds >= 1 else f"{1e3 * milliseconds:.2f} us"


@unique
class Units(str, Enum):
    """Prefixes of the totals of ``summary``, powers of 1,000; ``AUTO`` chooses M, G or T by size."""

    AUTO = "auto"
    KILOBYTES = "K"
    MEGABYTES = "M"
    GIGABYTES = "G"
    TERABYTES = "T"
    NONE = ""


class ReadableNumbers:
    """The conversions that torchinfo's ``ModelStatistics`` offers as static methods."""

    @staticmethod
    def float_to_megabytes(num: float) -> float:
        """Return the megabytes (10^6 bytes) of ``num`` numbers of 4 bytes each."""
        return num * 4 / 1e6

    @staticmethod
    def to_megabytes(num: float) -> float:
        """Return ``num`` bytes in megabytes (10^6 bytes)."""
        return num / 1e6

    @staticmethod
    def to_readable(num: float, units: Units = Units.AUTO) -> tuple[Units, float]:
        """Return the units and ``num`` in them; ``AUTO`` chooses tera from 10^12, giga from 10^9, else mega.

        >>> ReadableNumbers.to_readable(3.6e9)
        (<Units.GIGABYTES: 'G'>, 3.6)
        """
        units = Units(units)
        if units == Units.AUTO:
            units = next((unit for unit in _LARGE if num >= PREFIXES[unit.value]), Units.MEGABYTES)
        return units, num / PREFIXES[units.value]

    @staticmethod
    def format_output_num(num: float, units: Units, is_bytes: bool = False) -> str:
        """Return the number as it follows its title, whole numbers without decimals.

        >>> ReadableNumbers.format_output_num(7_800_000, Units.MEGABYTES)
        ' (M): 7.80'
        """
        amount_units, amount = ReadableNumbers.to_readable(num, units)
        text = f"{int(amount):,}" if float(amount).is_integer() else f"{amount:,.2f}"
        return f"{in_parentheses(amount_units, is_bytes)}: {text}"


_LARGE = (Units.TERABYTES, Units.GIGABYTES)


def in_parentheses(units: Units, is_bytes: bool) -> str:
    """Return units as they follow the title of a figure.

    >>> in_parentheses(Units.MEGABYTES, is_bytes=True)
    ' (MB)'
    """
    written = symbol(units.value, "B" if is_bytes else "")
    return f" ({written})" if units != Units.NONE else ""

"""One formatter for counts (parameters, MACs) and bytes.

Prefixes are decimal (``K`` = 10^3, ``M`` = 10^6 ...) or binary (``Ki`` = 2^10, ``Mi`` = 2^20 ...).
"""

from __future__ import annotations

from modelsummary.errors import InputError

__all__ = ["PREFIXES", "auto_prefix", "check_prefix", "format_number", "symbol"]

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

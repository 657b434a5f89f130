"""The longest context and the largest batch that fit into the memory of a device."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["largest_fitting"]


def largest_fitting(peak: Callable[[int], int], limit: int, start: int, most: int) -> int:
    """Return the largest n from 1 to ``most`` with ``peak(n) <= limit``, for a peak that does not fall with n.

    Few peaks are asked for: the line through the two nearest known ones gives the next guess, and every third guess
    halves what is left.

    Args:
        peak: bytes as a function of n.
        limit: the bytes that there are.
        start: the first n to try, at least 1.
        most: the largest n of interest; it is the result if it fits.

    Returns:
        The largest n that fits, 0 if 1 does not.

    >>> asked = []
    >>> def peak(n):
    ...     asked.append(n)
    ...     return 100 + 7 * n
    >>> largest_fitting(peak, 1000, start=16, most=10**6), len(asked)
    (128, 4)
    """
    known: dict[int, int] = {}

    def fits(number: int) -> bool:
        if number not in known:
            known[number] = peak(number)
        return known[number] <= limit

    low, high = 0, most + 1  # ``low`` fits, ``high`` does not
    guess = min(start, most)
    while high - low > 1:
        if fits(guess):
            low = guess
        else:
            high = guess
        halves = len(known) % 3 == 0 and high in known
        guess = (low + high) // 2 if halves else _next(known, limit, low, high)
    return low


def _next(known: dict[int, int], limit: int, low: int, high: int) -> int:
    """Return the number between ``low`` and ``high`` to try next, by the line through the nearest known peaks."""
    inside = [each for each in sorted(known) if low <= each <= high]
    nearest = inside[:2] if len(inside) >= 2 else sorted(known)[-2:]
    guess = 2 * max(low, 1)
    if len(nearest) == 2:
        one, two = nearest
        slope = (known[two] - known[one]) / (two - one)
        guess = int(one + (limit - known[one]) / slope) if slope > 0 else 8 * max(low, 1)
    if low in known and guess == low:
        guess = low + 1
    if high in known and guess == high:
        guess = high - 1
    return min(max(guess, low + 1), high - 1)

"""The longest context and the largest batch that fit into the memory of a device."""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["largest_fitting"]

_FARTHEST = 32  # the next guess, as a multiple of the largest that fits


def largest_fitting(peak: Callable[[int], int | None], limit: int, start: int, most: int) -> int:
    """Return the largest n from 1 to ``most`` with ``peak(n) <= limit``, for a peak that does not fall with n.

    Few peaks are asked for: the parabola through the three nearest known ones gives the next guess, as attention that
    keeps its scores is quadratic, and every third guess halves what is left; if the smallest n that does not fit is
    refused, each guess does.

    Args:
        peak: bytes as a function of n; None if n is refused, as are all larger ones then.
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
    peaks: dict[int, int] = {}

    def fits(n: int) -> bool:
        if n not in peaks:
            nbytes = peak(n)
            if nbytes is None:
                return False
            peaks[n] = nbytes
        return peaks[n] <= limit

    low, high = 0, most + 1  # ``low`` fits, ``high`` does not
    guess = min(start, most)
    while high - low > 1:
        if fits(guess):
            low = guess
        else:
            high = guess
        halves = len(peaks) % 3 == 0 if high in peaks else high <= most
        guess = (low + high) // 2 if halves else _next(peaks, limit, low, high)
    return low


def _next(peaks: dict[int, int], limit: int, low: int, high: int) -> int:
    """Return the n between ``low`` and ``high`` to try next, by the parabola through the three nearest peaks."""
    nearest = sorted(sorted(peaks, key=lambda n: (max(low - n, n - high), -n))[:3])
    largest = _FARTHEST * max(low, 1)  # peaks of few tokens say little about many
    guess = _crossing([(n, peaks[n]) for n in nearest], limit, largest)
    if low in peaks and guess <= low:
        guess = low + 1
    if high in peaks and guess >= high:
        guess = high - 1
    return min(max(guess, low + 1), high - 1, largest)


def _crossing(points: list[tuple[int, int]], limit: int, largest: int) -> int:
    """Return where the polynomial through one to three points crosses ``limit``; ``largest`` if it does not rise.

    >>> _crossing([(1, 104), (2, 110), (4, 128)], 1000, 10**6)  # 100 + 3 n + n^2
    28
    """
    if len(points) < 2:
        return 2 * points[0][0] if points else 1
    (x0, y0), (x1, y1) = points[-2:]
    slope = (y1 - y0) / (x1 - x0)
    if len(points) == 3:
        x, y = points[0]
        bend = (slope - (y0 - y) / (x0 - x)) / (x1 - x)
        # y1 + (slope + bend (x1 - x0)) d + bend d^2 = limit, for d = the distance from x1
        tangent = slope + bend * (x1 - x0)
        root = tangent**2 + 4 * bend * (limit - y1)
        if root > 0 and tangent + math.sqrt(root) > 0:
            return min(int(x1 + 2 * (limit - y1) / (tangent + math.sqrt(root))), largest)
    return min(int(x1 + (limit - y1) / slope), largest) if slope > 0 else largest

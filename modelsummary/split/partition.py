"""Cut a sequence of costs into contiguous parts: minimize the largest part, then the bytes crossing.

Costs are integers of any meaning. The bottleneck is found by parametric search: the smallest limit under which the
parts reach the end. The cuts are found by dynamic programming over the partitions that keep to that limit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

__all__ = ["Chain", "fewest_parts", "partitions"]

_INFINITE = float("inf")


@dataclass(frozen=True)
class Chain:
    """A sequence of calls, and where it may be cut.

    Attributes:
        costs: cost of each call, integers >= 0.
        crossing: legal cut -> bytes that cross it; a cut ``c`` lies before call ``c``, 0 < c < len(costs).
        required: cuts that must be made.
        holds: for each call, keys of the memory it holds; a key that several calls of a part share counts once.
        sizes: bytes of each key in ``holds``.
    """

    costs: Sequence[int]
    crossing: Mapping[int, int]
    required: Collection[int] = ()
    holds: Sequence[Collection[Hashable]] = ()
    sizes: Mapping[Hashable, int] = field(default_factory=dict)

    @property
    def points(self) -> list[int]:
        """Positions where parts may begin or end."""
        return [0, *sorted(self.crossing), len(self.costs)]


def partitions(chain: Chain, n_parts: int, caps: Sequence[int] | None = None) -> Iterator[list[int]]:
    """Yield three partitions with the smallest bottleneck: the fewest bytes, the most cost up front, the evenest.

    The evenest has the least sum of distances from equal parts and of bytes, over all cuts. What exceeds an equal part
    is left out.

    Args:
        caps: bytes that each part may hold, one number per part; None: no limit.

    Yields:
        The ``n_parts - 1`` cuts in ascending order; nothing if no partition keeps to the legal and required cuts and
        the caps.

    >>> next(partitions(Chain([5, 4, 3, 6, 2, 7], crossing={cut: 8 for cut in range(1, 6)}), n_parts=3))
    [2, 4]
    """
    points = chain.points
    n_segments = len(points) - 1
    if not 1 <= n_parts <= n_segments or not set(chain.required) <= chain.crossing.keys():
        return
    sums = [0, *accumulate(chain.costs)]
    reach = _Reach([sums[point] for point in points], _limits(chain, points, n_parts, caps))
    low = max(after - before for before, after in zip(reach.sums, reach.sums[1:], strict=False))
    low, high = max(low, -(-sums[-1] // n_parts)), sums[-1]
    if not reach.fits(high):
        return
    while low < high:
        middle = (low + high) // 2
        if reach.fits(middle):
            high = middle
        else:
            low = middle + 1
    crossing = [0, *(chain.crossing[point] for point in points[1:-1]), 0]
    behind = [reach.sums[-1] - before for before in reach.sums]
    level = _level([after - before for before, after in pairwise(reach.sums)], n_parts)
    even = [0.0, *accumulate(min(after - before, level) for before, after in pairwise(reach.sums))]
    mean, most = even[-1] / n_parts, max(1, *crossing)  # the most bytes weigh as much as a quarter of a part
    weighed = [mean / 4 * nbytes / most for nbytes in crossing]
    uneven = [
        [abs(before - part * mean) + price for before, price in zip(even, weighed, strict=True)]
        for part in range(1, n_parts + 1)
    ]
    for prices in ([crossing] * n_parts, [behind] * n_parts, uneven):
        yield [points[index] for index in reach.cheapest(high, prices)]


def _level(costs: Sequence[int], n_parts: int) -> float:
    """Return the mean part if each cost above that mean is a part of its own, and counts as one.

    >>> _level([1, 1, 1, 9], n_parts=4)
    1.0
    """
    level = sum(costs) / n_parts
    while True:
        larger = [cost for cost in costs if cost > level]
        if len(larger) >= n_parts:
            return level
        lower = (sum(costs) - sum(larger)) / (n_parts - len(larger))
        if lower >= level:
            return level
        level = lower


def fewest_parts(chain: Chain, cap: int | None = None) -> int | None:
    """Return the smallest number of parts that keeps to the required cuts and the cap.

    Return None if a single call exceeds the cap.

    >>> chain = Chain([1, 1, 1], {1: 0, 2: 0}, holds=["a", "b", "c"], sizes={"a": 4, "b": 4, "c": 4})
    >>> fewest_parts(chain, cap=8)
    2
    """
    points = chain.points
    earliest = _earliest(chain, points, cap)
    count, end = 0, len(points) - 1
    while end > 0:
        if earliest[end] >= end:
            return None
        count, end = count + 1, earliest[end]
    return count


def _limits(chain: Chain, points: list[int], n_parts: int, caps: Sequence[int] | None) -> list[list[int]]:
    """Return, for each part, the earliest begin for each end. Both are indices of points."""
    by_cap: dict[int | None, list[int]] = {}
    for cap in caps or (None,):
        if cap not in by_cap:
            by_cap[cap] = _earliest(chain, points, cap)
    return [by_cap[cap] for cap in (caps if caps is not None else [None] * n_parts)]


def _earliest(chain: Chain, points: list[int], cap: int | None) -> list[int]:
    """Return, for each end, the earliest begin that required cuts and the cap allow. Both are indices of points."""
    earliest = [0]
    begin = held_bytes = 0
    held: Counter[Hashable] = Counter()
    for end in range(1, len(points)):
        last_required = end - 1 if points[end - 1] in chain.required else 0
        if cap is not None:
            for call in range(points[end - 1], points[end]):
                for key in chain.holds[call]:
                    held_bytes += chain.sizes[key] if not held[key] else 0
                    held[key] += 1
        while begin < end and (begin < last_required or (cap is not None and held_bytes > cap)):
            if cap is not None:
                for call in range(points[begin], points[begin + 1]):
                    for key in chain.holds[call]:
                        held[key] -= 1
                        held_bytes -= chain.sizes[key] if not held[key] else 0
            begin += 1
        earliest.append(begin)
    return earliest


class _Reach:
    """The points that parts can end at under a limit to their cost. All points are indices.

    Args:
        sums: cost up to each point.
        earliest: for each part, the earliest begin for each end. It never decreases, so any piece of an allowed part is
            allowed too.
    """

    def __init__(self, sums: list[int], earliest: list[list[int]]) -> None:
        self.sums = sums
        self._earliest = earliest
        self._n_points = len(sums)
        self._alike = all(begins is earliest[0] for begins in earliest)
        self._latest = _inverse(earliest[0]) if self._alike else []

    def fits(self, limit: int) -> bool:
        """Return True if exactly the given number of parts reaches the end, each with a cost <= ``limit``."""
        if not self._alike:
            return self._ends(limit)[-1][-1] < _INFINITE
        point = 0  # if all parts have the same caps, the greedy choice is optimal, and any part can be cut further
        for _ in self._earliest:
            point = self._furthest(point, limit)
        return point == self._n_points - 1

    def _furthest(self, begin: int, limit: int) -> int:
        return min(bisect_right(self.sums, self.sums[begin] + limit) - 1, self._latest[begin])

    def cheapest(self, limit: int, prices: Sequence[Sequence[float]]) -> list[int]:
        """Return the cuts under ``limit`` with the least sum of prices.

        Args:
            prices: of each part -> of its end at each point.
        """
        best = self._ends(limit, prices)
        cuts = [self._n_points - 1]
        for part in range(len(self._earliest) - 1, 0, -1):
            end = cuts[-1]
            begins = range(max(self._earliest[part][end], self._begin_by_cost(end, limit)), end)
            cuts.append(min(begins, key=best[part].__getitem__))
        return cuts[:0:-1]

    def _begin_by_cost(self, end: int, limit: int) -> int:
        """Return the earliest begin of a part that ends at ``end`` and costs at most ``limit``."""
        return bisect_right(self.sums, self.sums[end] - limit - 1)

    def _ends(self, limit: int, prices: Sequence[Sequence[float]] | None = None) -> list[list[float]]:
        """Return the least sum of prices for each number of parts and each end; infinite if it cannot be reached."""
        prices = prices or [[0] * self._n_points] * len(self._earliest)
        by_cost = [self._begin_by_cost(end, limit) for end in range(self._n_points)]
        earliest = [list(map(max, begins, by_cost)) for begins in self._earliest]
        best: list[list[float]] = [[0, *[_INFINITE] * (self._n_points - 1)]]
        next_begin = 0
        for part, ends in enumerate(self._possible_ends(earliest)):
            before, after = best[-1], [_INFINITE] * self._n_points
            window: deque[int] = deque()  # begins in ascending order of prices: the first is the best
            for end in ends:
                for begin in range(next_begin, end):
                    while window and before[window[-1]] > before[begin]:
                        window.pop()
                    window.append(begin)
                next_begin = end
                while window and window[0] < earliest[part][end]:
                    window.popleft()
                if window:
                    after[end] = before[window[0]] + prices[part][end]
            best.append(after)
            next_begin = ends.start
        return best

    def _possible_ends(self, earliest: Sequence[Sequence[int]]) -> list[range]:
        """Return, for each part, the ends from which and to which the other parts may reach."""
        n_parts, last = len(earliest), self._n_points - 1
        low = [last]
        for part in range(n_parts - 1, 0, -1):
            low.append(max(part, earliest[part][low[-1]]))
        ends, high = [], 0
        for part, begin in enumerate(reversed(low)):
            high = bisect_right(range(last - (n_parts - 1 - part) + 1), high, key=earliest[part].__getitem__) - 1
            ends.append(range(begin, high + 1))
        return ends


def _inverse(earliest: list[int]) -> list[int]:
    """Return the latest end that each begin may have."""
    latest = [0] * len(earliest)
    for end, begin in enumerate(earliest):
        if begin < end or end == 0:
            latest[begin] = end
    for begin in range(1, len(latest)):
        latest[begin] = max(latest[begin], latest[begin - 1])
    return latest

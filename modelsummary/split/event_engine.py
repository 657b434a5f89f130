"""The engine for the time of a step: items on resources, each of which waits for earlier items.

A resource runs its items one after the other: the kernels of a rank, a stream in which a group of ranks communicates, a
host, the link between two stages. An item begins when its resource is free and all items that it waits for have ended.
``ItemGraph`` has the items, whatever the times; the seconds are passed when it runs, so that one graph serves all plans
with the same order. Where resources slow each other down, a function says how fast they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = ["ItemGraph", "Resource", "Speed", "periodic"]


class Resource(NamedTuple):
    """What runs items one after the other.

    Attributes:
        kind: such as ``"kernels"`` or ``"link"``.
        ranks: the rank, or the stages, that it belongs to; empty if there is one of its kind.
    """

    kind: str
    ranks: tuple[int, ...] = ()


Speed = Callable[[Sequence[Resource]], Sequence[float]]
"""Function from the resources that run at a moment to their speeds; 1 is the speed for which seconds are passed."""


class ItemGraph:
    """Items, numbered from 1 in an order in which each follows the items that it waits for.

    Attributes:
        resources: the resource of each item.
        work: index of the seconds of each item.
        waits_for: numbers of the items that each one waits for.
        previous: number of the item before it on its resource; 0: none.
        last: resource -> number of its last item.

    >>> graph, stream, kernels = ItemGraph(), Resource("stream"), Resource("kernels")
    >>> gather = graph.add(stream, 0)
    >>> layer = graph.add(kernels, 1, gather)
    >>> reduction = graph.add(stream, 2, layer)
    >>> graph.add(kernels, 1)
    4
    >>> graph.run([1.0, 3.0, 5.0])  # the ends; before all items is 0
    [0.0, 1.0, 4.0, 9.0, 7.0]
    """

    def __init__(self) -> None:
        self.resources: list[Resource] = []
        self.work: list[int] = []
        self.waits_for: list[tuple[int, ...]] = []
        self.previous: list[int] = []
        self.last: dict[Resource, int] = {}

    def add(self, resource: Resource, work: int, *waits_for: int) -> int:
        """Add an item and return its number.

        Args:
            resource: what runs it, after all items that were added to this resource before.
            work: index of its seconds in the list that ``run`` takes.
            waits_for: numbers of items that end before it begins.
        """
        self.previous.append(self.last.get(resource, 0))
        self.resources.append(resource)
        self.work.append(work)
        self.waits_for.append(waits_for)
        self.last[resource] = number = len(self.work)
        return number

    def run(self, seconds: Sequence[float], speed: Speed | None = None) -> list[float]:
        """Return the end of each item by its number; 0.0 for the number 0.

        Args:
            seconds: seconds of each kind of work, at full speed.
            speed: how fast resources are that run at the same time; None: at full speed.
        """
        if speed is not None:
            return self._run_slowed(seconds, speed)
        ends = [0.0]
        for previous, waits_for, work in zip(self.previous, self.waits_for, self.work, strict=True):
            begin = ends[previous]
            for number in waits_for:
                ready = ends[number]
                begin = ready if ready > begin else begin  # faster than max
            ends.append(begin + seconds[work])
        return ends

    def _run_slowed(self, seconds: Sequence[float], speed: Speed) -> list[float]:
        """Run the items from one end of an item to the next: between two ends, all speeds stay the same."""
        ends, ended, now = [0.0] * (len(self.work) + 1), {0}, 0.0
        left = [0.0, *(seconds[work] for work in self.work)]
        following = dict(zip(self.previous, range(1, len(left)), strict=True))  # an item -> the next on its resource
        heads = {resource: number for number, resource in reversed([*enumerate(self.resources, 1)])}
        while heads:
            running = {
                resource: number for resource, number in heads.items() if ended.issuperset(self.waits_for[number - 1])
            }
            speeds = dict(zip(running, speed([*running]), strict=True))
            span = min(left[number] / speeds[resource] for resource, number in running.items())
            now += span
            for resource, number in running.items():
                needed = left[number] / speeds[resource]
                left[number] -= span * speeds[resource]
                if needed <= span:
                    ends[number] = now
                    ended.add(number)
                    if number in following:
                        heads[resource] = following[number]
                    else:
                        del heads[resource]
        return ends

    def begins(self, ends: Sequence[float]) -> list[float]:
        """Return the begin of each item by its number, from the ends that ``run`` returned."""
        return [0.0, *(self._begin(number, ends) for number in range(1, len(ends)))]

    def _begin(self, number: int, ends: Sequence[float]) -> float:
        return max(ends[before] for before in self._before(number))

    def _before(self, number: int) -> tuple[int, ...]:
        """Return the numbers of the items that end before an item begins."""
        return self.previous[number - 1], *self.waits_for[number - 1]

    def idle(self, resource: Resource, ends: Sequence[float]) -> dict[Resource, float]:
        """Return the seconds in which a resource waits, until all items have ended, by the resource it waits for.

        A wait is followed back through the items that ended last before the next one could begin.
        """
        lost: dict[Resource, float] = {}
        before = self.last[resource]
        awaited: tuple[int, ...] = (max(range(len(ends)), key=ends.__getitem__),)
        while awaited:  # from the wait for the end of all items back to the first one
            until, numbers = max(ends[number] for number in awaited), awaited
            while until > ends[before]:
                latest = max(numbers, key=ends.__getitem__)
                since = max(self._begin(latest, ends), ends[before])
                of_item = self.resources[latest - 1]
                lost[of_item] = lost.get(of_item, 0.0) + until - since
                until, numbers = since, self._before(latest)
            awaited = self._before(before) if before else ()
            before = self.previous[before - 1] if before else 0
        return lost


def periodic(seconds: Callable[[int], float], count: int, shortest: int, period: int) -> float:
    """Return ``seconds(count)`` of something that repeats itself: after ``shortest`` rounds, each period adds the same.

    >>> periodic(lambda rounds: 5.0 + 2.0 * rounds, 1000, shortest=4, period=2)
    2005.0
    """
    if count <= shortest + period:
        return seconds(count)
    short, long = seconds(shortest), seconds(shortest + period)
    return short + (count - shortest) / period * (long - short)

"""``ServingSimulation``: what serving a load takes, as plain data that prints as a table; the largest rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, inf, sqrt
from statistics import mean, quantiles
from typing import Any, NamedTuple

from modelsummary.cluster.published_errors import PublishedErrors
from modelsummary.errors import InputError, is_number
from modelsummary.extras import Records
from modelsummary.serving.load import Load
from modelsummary.serving.published import ServedCase, error_of_serving
from modelsummary.serving.scheduler import NO_LIMITS, Engine, Limits, ServedRequest, Timeline
from modelsummary.tables import Printed, Report
from modelsummary.units import decimals, duration, grouped, percent, scaled

__all__ = ["ServingSimulation", "Spread", "check_limits", "keeps_limits", "largest_rate", "least_requests"]

_FIGURES = ("ttft_ms", "tpot_ms", "e2e_ms")
_SLOWEST, _FASTEST = 2.0**-20, 2.0**20  # requests per second between which a rate is searched
_CHANCE = 0.05  # growth of the wait, or what is left after the last arrival, per time, that may as well be nothing
_PRECISION = 1.01  # ratio of a rate that is met to one that is not
_TIMES = 10  # requests of a load that is long, over the ones that run together


class Spread(NamedTuple):
    """A figure of many requests.

    Attributes:
        mean: the mean.
        p50, p95, p99: percentiles, with a straight line between neighbours.
        most: the largest.

    >>> Spread.of([400.0, 100.0, 200.0, 300.0, 500.0])
    Spread(mean=300.0, p50=300.0, p95=480.0, p99=496.0, most=500.0)
    """

    mean: float
    p50: float
    p95: float
    p99: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        cuts = quantiles([*values, *values] if len(values) == 1 else values, n=100, method="inclusive")
        return cls(mean(values), cuts[49], cuts[94], cuts[98], max(values))


@dataclass(frozen=True, repr=False)
class ServingSimulation(Printed, Records):
    """What serving a load takes, made by ``ServingEstimate.simulate``; ``print`` shows it as a table.

    Attributes:
        model, device, tensor: class of the model, name of the device, and number of devices.
        load: the requests.
        engine: how they were batched.
        timeline: what happened: the requests, and counts of steps, pages and tokens.
        n_pages: pages of the cache.
        page_bytes: bytes of a page on one device.
        price_error: the largest difference between a sum of prices and a forward on shapes that was run to check it, as
            a fraction.
        typical_error: mean error of such predicted times against measurements they had not seen, as a fraction.
        case: what decides which published tables it is compared with; None: none is like it.
    """

    model: str
    device: str
    tensor: int
    load: Load
    engine: Engine
    timeline: Timeline
    n_pages: int
    page_bytes: float
    price_error: float
    typical_error: float
    case: ServedCase | None = None

    @property
    def error(self) -> PublishedErrors | None:
        """The errors of the throughput that simulations of published tables had.

        None if no table is like it, or arrivals alone decide it: next to nothing is left to do after the last one.
        """
        arriving = self.requests[-1].arrival - self.requests[0].arrival
        is_decided = arriving > (1 - _CHANCE) * self.seconds
        return None if self.case is None or is_decided else error_of_serving(self.case)

    @property
    def requests(self) -> Sequence[ServedRequest]:
        """The requests in the order in which they arrived."""
        return self.timeline.requests

    @property
    def seconds(self) -> float:
        """Seconds from the first arrival to the last token."""
        return self.timeline.seconds - self.requests[0].arrival

    @property
    def requests_per_second(self) -> float:
        """Requests per second of all devices together."""
        return len(self.requests) / self.seconds

    @property
    def input_tokens_per_second(self) -> float:
        """Tokens of prompts per second of all devices together."""
        return sum(request.prompt for request in self.requests) / self.seconds

    @property
    def output_tokens_per_second(self) -> float:
        """Generated tokens per second of all devices together."""
        return sum(request.output for request in self.requests) / self.seconds

    @property
    def output_tokens_per_second_per_device(self) -> float:
        """Generated tokens per second and device."""
        return self.output_tokens_per_second / self.tensor

    @cached_property
    def ttft_ms(self) -> Spread:
        """Milliseconds from arrival to first token."""
        return Spread.of([request.ttft_ms for request in self.requests])

    @cached_property
    def tpot_ms(self) -> Spread | None:
        """Milliseconds per token after the first; None if no request has a second token."""
        values = [request.tpot_ms for request in self.requests if request.tpot_ms is not None]
        return Spread.of(values) if values else None

    @cached_property
    def e2e_ms(self) -> Spread:
        """Milliseconds from arrival to last token."""
        return Spread.of([request.e2e_ms for request in self.requests])

    @property
    def mean_requests(self) -> float:
        """Requests that run together, averaged over time."""
        return self.timeline.request_seconds / self.seconds

    @property
    def mean_pages(self) -> float:
        """Pages that are held, averaged over time."""
        return self.timeline.page_seconds / self.seconds

    @property
    def preemptions(self) -> int:
        """How often requests lost their pages."""
        return sum(request.preemptions for request in self.requests)

    @cached_property
    def excess(self) -> float:
        """The fraction by which requests arrive faster than they are served, as the queue grows; 0.0 if it does not.

        Waiting for the first token grows by this fraction of the time between arrivals, from the third quarter of the
        requests to the last. Less than a twentieth is taken for chance.
        """
        quarter = len(self.requests) // 4
        third, last = self.requests[2 * quarter : 3 * quarter], self.requests[3 * quarter :]
        if not third or third[0].arrival == last[-1].arrival:
            return 0.0
        between = mean(request.arrival for request in last) - mean(request.arrival for request in third)
        waited = mean(request.ttft_ms for request in last) - mean(request.ttft_ms for request in third)
        growth = 1e-3 * waited / between
        return growth if growth > _CHANCE else 0.0

    @property
    def limited_by(self) -> str:
        """What most of the time goes to: see ``timeline.seconds_by_limit``."""
        seconds = self.timeline.seconds_by_limit
        return max(seconds, key=seconds.__getitem__)

    def to_records(self) -> list[dict[str, Any]]:
        """Return one dict per request."""
        return [
            {
                "arrival_seconds": request.arrival,
                "prompt_tokens": request.prompt,
                "output_tokens": request.output,
                "first_seconds": request.first,
                "last_seconds": request.last,
                "preemptions": request.preemptions,
                **{name: getattr(request, name) for name in _FIGURES},
            }
            for request in self.requests
        ]

    def _report(self) -> Report:
        timeline, devices = self.timeline, self.device if self.tensor == 1 else f"{self.tensor} x {self.device}"
        spreads = (("TTFT (ms)", self.ttft_ms), ("TPOT (ms)", self.tpot_ms), ("End to end (ms)", self.e2e_ms))
        rows = [[name, *(decimals(value, 1) for value in spread)] for name, spread in spreads if spread is not None]
        rows += [
            ["Requests at a time", decimals(self.mean_requests, 1), "", "", "", grouped(timeline.most_requests)],
            ["Pages in use", decimals(self.mean_pages, 1), "", "", "", grouped(timeline.most_pages)],
        ]
        limits = sorted(timeline.seconds_by_limit.items(), key=lambda item: -item[1])
        whole = sum(timeline.seconds_by_limit.values()) or 1.0
        per_device = f" ({decimals(self.output_tokens_per_second_per_device, 1)} per device)" if self.tensor > 1 else ""
        below = [
            f"Throughput: {decimals(self.requests_per_second, 2)} requests/s, "
            f"{decimals(self.input_tokens_per_second, 1)} tokens/s in, "
            f"{decimals(self.output_tokens_per_second, 1)} tokens/s out{per_device}",
            f"Cache: {grouped(self.n_pages)} pages of {scaled(self.page_bytes, 'B')}, {self.preemptions} preemptions",
            "Limited by: " + ", ".join(f"{name} {percent(seconds / whole, 0)}" for name, seconds in limits if seconds),
            f"Prices of steps: at most {percent(self.price_error)} off the forwards that checked them; typical error "
            f"of forwards {percent(self.typical_error, 0)}",
        ]
        if self.excess:
            below.append(f"The queue grows: requests arrive {percent(self.excess, 0)} faster than they are served")
        if self.error is not None:
            below.append(f"Throughput: {self.error.describe()}")
        above = [
            f"{self.model} on {devices}: {grouped(len(self.requests))} requests in {duration(1e3 * self.seconds)}, "
            f"{grouped(timeline.steps)} steps"
        ]
        return Report(rows, ["", "Mean", "p50", "p95", "p99", "Most"], "lrrrrr", above=above, below=below)


def keeps_limits(simulation: ServingSimulation, limits: Limits) -> bool:
    """Return True if the 95th percentiles are within limits."""
    if simulation.timeline.missed:
        return False
    pairs = zip((simulation.ttft_ms, simulation.tpot_ms), limits, strict=True)
    return all(limit is None or spread is None or spread.p95 <= limit for spread, limit in pairs)


def least_requests(simulation: ServingSimulation, limits: Limits) -> int:
    """Return how many requests a load needs for a largest rate that is near to the one that the server sustains.

    It has ten times the requests that run together, and so many that a queue which ends at the limit of the first token
    grows by a twentieth.
    """
    of_queue = 1e-3 * (limits.ttft_ms or 0.0) * simulation.requests_per_second / _CHANCE
    return ceil(max(_TIMES * simulation.mean_requests, of_queue))


def check_limits(load: Load, limits: Limits) -> None:
    """Raise ``InputError`` unless limits of the 95th percentiles are usable for a load whose rate is searched."""
    if limits == NO_LIMITS:
        raise InputError("pass ttft_ms= or tpot_ms=, the limits that the rate is to keep")
    for name, limit in limits._asdict().items():
        if limit is not None and not (is_number(limit) and limit > 0):
            raise InputError(f"{name} must be a number of milliseconds > 0 or None, got {limit!r:.80}")
    if load.arrivals is not None:
        raise InputError("the rate of the load is searched, but its arrivals= are fixed; pass a Load without them")
    if limits.tpot_ms is not None and all(request.output == 1 for request in load.sample()):
        raise InputError("tpot_ms limits tokens after the first, but all outputs are of one token; pass ttft_ms= alone")


def largest_rate(simulate: Callable[[Load], ServingSimulation], load: Load, limits: Limits) -> float:
    """Return the largest rate at which the 95th percentiles keep limits, as ``ServingEstimate.max_rate`` says.

    Args:
        simulate: serves a load.
        load: its rate is the first that is tried.
        limits: limits of ``ServingSimulation.ttft_ms.p95`` and ``tpot_ms.p95``.

    Raises:
        InputError: a limit is missing or unusable, arrivals are a list, or ``tpot_ms`` limits nothing.
    """
    check_limits(load, limits)

    def keeps(rate: float) -> bool:
        return keeps_limits(simulate(replace(load, rate=None if rate == inf else rate)), limits)

    if keeps(inf):
        return inf
    low = high = min(max(load.rate or 1.0, _SLOWEST), _FASTEST)
    while not keeps(low):
        if low <= _SLOWEST:
            return 0.0
        low, high = low / 2, low
    while high < _FASTEST and (high == low or keeps(high)):
        low, high = high, 2 * high
    while high > _PRECISION * low:
        middle = sqrt(low * high)
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low

"""Search for the way to serve a load on a cluster with the most requests per second within limits of latencies.

A way is a number of devices that share a model (tensor parallelism), or its experts (expert parallelism, with attention
of parallel data), replicas of them, a form of weights and caches, and limits of batches. Each replica gets its share of
the requests. All ways are tried unless a bound excludes them: the tokens and steps of a request cost at least what a
straight line below the prices says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from math import inf
from typing import Any, NamedTuple

import torch

from modelsummary.capture.run import no_collection
from modelsummary.errors import InputError, check_integers, close_to, is_number
from modelsummary.extras import Records
from modelsummary.keywords import takes_keywords
from modelsummary.serving.load import Load
from modelsummary.serving.number_formats import named_formats
from modelsummary.serving.prices import CurvePoint, StepPrices
from modelsummary.serving.scheduler import Batch, Engine, Limits, check_longest
from modelsummary.serving.server import Server
from modelsummary.serving.simulation import (
    ServingSimulation,
    Spread,
    check_limits,
    keeps_limits,
    largest_rate,
    least_requests,
)
from modelsummary.tables import Printed, Report
from modelsummary.units import decimals, grouped, scaled

__all__ = ["ServingPlan", "ServingPlans", "ServingSpace", "least_seconds", "search"]

_MARGIN = 0.98  # of the best rate, below which a way that misses the limits is not searched
# Names of options in the engines' own words. LMDeploy and others take the same figures under other names.
_FLAGS: dict[str, dict[str, str]] = {
    "vllm": {
        "tensor": "--tensor-parallel-size",
        "replicas": "--data-parallel-size",
        "sends_tokens": "--enable-expert-parallel",
        "max_requests": "--max-num-seqs",
        "token_budget": "--max-num-batched-tokens",
        "memory_share": "--gpu-memory-utilization",
        "weights": "--quantization",
        "cache_dtype": "--kv-cache-dtype",
    },
    "sglang": {
        "together": "--tp-size",
        "replicas": "--dp-size",
        "expert": "--ep-size",
        "sends_tokens": "--enable-dp-attention",
        "all_requests": "--max-running-requests",
        "all_tokens": "--chunked-prefill-size",
        "static_share": "--mem-fraction-static",
        "weights": "--quantization",
        "cache_dtype": "--kv-cache-dtype",
    },
    "tensorrt-llm": {
        "together": "--tp_size",
        "expert": "--ep_size",
        "sends_tokens": "--enable_attention_dp",
        "max_requests": "--max_batch_size",
        "token_budget": "--max_num_tokens",
        "free_share": "--kv_cache_free_gpu_memory_fraction",
    },
}
# Of vLLM and SGLang; "awq" forces slower kernels than "awq_marlin", and takes float16 alone. 8-bit integers are told by
# the checkpoint.
_WEIGHTS = {"fp8": "fp8", "int4": "awq_marlin", "mxfp4": "mxfp4", "nvfp4": "modelopt_fp4"}
_CACHES = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}
_NOT_SIMULATED = {
    name: f"tensor=, as {what} are not simulated: models that share the requests take the other devices"
    for names, what in (
        (("pipeline", "pp"), "pipelines of servers"),
        (("prefill", "decode"), "separate devices for prompts and tokens"),
    )
    for name in names
}


@takes_keywords(_NOT_SIMULATED)
@dataclass(frozen=True)
class ServingSpace:
    """The ways of serving that are tried.

    Attributes:
        tensor: numbers of devices that share a model; more than there are, are left out.
        weights: forms of weights, as for ``Statistics.serving``; None: as the estimate has them.
        cache_dtype: dtypes of caches; None: as the estimate has them.
        max_requests: largest numbers of requests that run together.
        token_budget: tokens of a step; ones that are fewer than ``max_requests`` are left out.
        expert: numbers of devices that divide the experts of a mixture, each with requests of its own; more than 1 with
            ``tensor`` = 1 alone.

    Raises:
        InputError: a list is empty or a value is unusable.
    """

    tensor: Sequence[int] = (1, 2, 4, 8)
    weights: Sequence[str | None] = (None,)
    cache_dtype: Sequence[torch.dtype | None] = (None,)
    max_requests: Sequence[int] = (32, 128, 512)
    token_budget: Sequence[int] = (512, 2048, 8192)
    expert: Sequence[int] = (1,)

    def __post_init__(self) -> None:
        for name in ("tensor", "weights", "cache_dtype", "max_requests", "token_budget", "expert"):
            values = getattr(self, name)
            if isinstance(values, str) or not isinstance(values, Sequence) or not values:
                raise InputError(f"{name} must be a list of values to try, got {values!r:.80}")
        for name in ("tensor", "max_requests", "token_budget", "expert"):
            for value in getattr(self, name):
                check_integers(**{name: value})
        object.__setattr__(self, "weights", tuple(named_formats(value, None)[0] for value in self.weights))
        object.__setattr__(self, "cache_dtype", tuple(named_formats(None, value)[1] for value in self.cache_dtype))


@dataclass(frozen=True)
class ServingPlan:
    """A way to serve a load.

    Attributes:
        tensor: devices that share a model.
        replicas: models that share the requests; with ``expert`` > 1, devices.
        weights, cache_dtype: forms of weights and caches; None: the dtype of the forward.
        simulation: of one replica at the largest rate within the limits.
        rate: that rate, of one replica; ``inf`` if all requests may come at once.
        memory_bytes: memory of a device.
        weight_bytes: bytes of parameters and buffers on a device.
        expert: devices that divide the experts, each with requests of its own.
    """

    tensor: int
    replicas: int
    weights: str | None
    cache_dtype: torch.dtype | None
    simulation: ServingSimulation
    rate: float
    memory_bytes: int
    weight_bytes: int
    expert: int = 1

    @property
    def engine(self) -> Engine:
        """How a replica batches requests."""
        return self.simulation.engine

    @property
    def cache_name(self) -> str | None:
        """The name of ``cache_dtype``, without ``torch.``."""
        return None if self.cache_dtype is None else str(self.cache_dtype).removeprefix("torch.")

    @property
    def devices(self) -> int:
        """The number of devices that are used."""
        return self.tensor * self.replicas

    @property
    def requests_per_second(self) -> float:
        """Requests per second of all replicas."""
        return self.replicas * self.simulation.requests_per_second

    def devices_for(self, rate: float) -> int:
        """Return how many devices serve a rate, in whole replicas, and in groups that have all experts."""
        if not is_number(rate) or rate <= 0:
            raise InputError(f"rate must be a number of requests per second > 0, got {rate!r:.80}")
        ranks = self.tensor * self.expert
        return ranks * -int(-rate // (self.expert * self.simulation.requests_per_second))

    def flags(self, engine: str) -> str:
        """Return the options of an engine's command line for this plan.

        Each engine has its own share of the memory: vLLM of all that the engine takes, SGLang of weights and pages, and
        TensorRT-LLM of the pages in what weights and workspace leave free. SGLang divides requests and tokens by the
        devices that share experts. Weights in int8 have no option: the checkpoint tells them.

        Args:
            engine: ``"vllm"``, ``"sglang"`` or ``"tensorrt-llm"``. TensorRT-LLM takes the forms of weights and caches
                from the checkpoint, and replicas are servers of their own there, as are groups that have all experts in
                all engines.

        Raises:
            InputError: the engine is unknown.
        """
        if engine not in _FLAGS:
            names = ", ".join(map(repr, _FLAGS))
            raise InputError(f"engine must be one of {names}, got {engine!r:.80}{close_to(engine, _FLAGS)}")
        pages = self.simulation.n_pages * self.simulation.page_bytes
        replicas = self.expert if self.expert > 1 else self.replicas
        budget = self.engine.token_budget
        values = {
            "tensor": self.tensor,
            "together": self.tensor * self.expert,
            "replicas": replicas if replicas > 1 else None,
            "expert": self.expert if self.expert > 1 else None,
            "sends_tokens": "" if self.expert > 1 else None,
            "max_requests": self.engine.max_requests,
            "token_budget": budget,
            "all_requests": self.expert * self.engine.max_requests,
            "all_tokens": budget and self.expert * budget,
            "memory_share": self.engine.memory_share,
            "static_share": _share(self.weight_bytes + pages, self.memory_bytes),
            "free_share": _share(pages, pages + (1 - self.engine.memory_share) * self.memory_bytes),
            "weights": _WEIGHTS.get(self.weights or ""),
            "cache_dtype": _CACHES.get(self.cache_dtype),  # type: ignore[arg-type]
        }
        names_of = _FLAGS[engine]
        return " ".join(
            f"{names_of[name]} {value}".rstrip()
            for name, value in values.items()
            if name in names_of and value is not None
        )

    def _row(self) -> list[str]:
        simulation = self.simulation
        tpot = simulation.tpot_ms
        return [
            f"{self.tensor} x {self.replicas}" + (f", {self.expert} share experts" if self.expert > 1 else ""),
            self.weights or "",
            self.cache_name or "",
            grouped(self.engine.max_requests),
            grouped(self.engine.token_budget or 0),
            decimals(self.requests_per_second, 2),
            decimals(self.requests_per_second / self.devices, 3),
            decimals(simulation.ttft_ms.p95, 1),
            "" if tpot is None else decimals(tpot.p95, 1),
            decimals(simulation.mean_requests, 1),
        ]


@dataclass(frozen=True, repr=False)
class ServingPlans(Printed, Records):
    """The ways to serve a load within limits, the best first; ``print`` shows them as a table.

    Attributes:
        plans: the ways whose largest rate was searched; the others cannot serve more than the first.
        ttft_ms: the limit of the 95th percentile of milliseconds to the first token; None: any.
        tpot_ms: the limit of the 95th percentile of milliseconds per further token; None: any.
        tried: number of ways.
        refused: way that cannot serve -> why.
        price: of a device and an hour; None: not given.
    """

    plans: tuple[ServingPlan, ...]
    ttft_ms: float | None
    tpot_ms: float | None
    tried: int
    refused: Mapping[str, str] = field(default_factory=dict)
    price: float | None = None

    @property
    def best(self) -> ServingPlan:
        """The plan with the most requests per second.

        Raises:
            InputError: no way keeps the limits; says why ways were refused.
        """
        if not self.plans:
            reasons = _first_reasons(self.refused)
            raise InputError(
                f"none of {self.tried} ways keeps ttft_ms={self.ttft_ms} and tpot_ms={self.tpot_ms}; pass larger "
                f"limits, shorter requests or other devices{f' (refused: {reasons})' if reasons else ''}"
            )
        return self.plans[0]

    @property
    def requests_per_price(self) -> float | None:
        """Requests of the best plan for a unit of cost; None without a price."""
        return self._per_price(self.best)

    def _per_price(self, plan: ServingPlan) -> float | None:
        return None if self.price is None else 3600 * plan.requests_per_second / (plan.devices * self.price)

    def to_records(self) -> list[dict[str, Any]]:
        """Return one dict per plan."""
        return [
            {
                "tensor": plan.tensor,
                "replicas": plan.replicas,
                "expert": plan.expert,
                "weights": plan.weights,
                "cache_dtype": plan.cache_name,
                "max_requests": plan.engine.max_requests,
                "token_budget": plan.engine.token_budget,
                "requests_per_second": plan.requests_per_second,
                "requests_per_second_per_device": plan.requests_per_second / plan.devices,
                "requests_per_price": self._per_price(plan),
            }
            for plan in self.plans
        ]

    def _report(self) -> Report:
        best = self.best
        headers = [
            "Tensor x replicas",
            "Weights",
            "Cache",
            "Requests",
            "Budget",
            "Requests/s",
            "per device",
            "TTFT p95",
            "TPOT p95",
            "At a time",
        ]
        below = [f"{engine}: {best.flags(engine)}" for engine in _FLAGS]
        if self.price is not None:
            below.insert(0, f"Requests for a price of 1: {decimals(self.requests_per_price or 0.0, 1)}")
        least = least_requests(best.simulation, Limits(self.ttft_ms, self.tpot_ms))
        if (count := len(best.simulation.requests)) < least:
            below.append(
                f"The load is short: a server sustains less than the rate of {grouped(count)} requests; pass "
                f"{grouped(least)} or more"
            )
        below += [f"Refused: {name}: {reason}" for name, reason in self.refused.items()]
        set_limits = [f"{name} {ms} ms" for name, ms in (("TTFT", self.ttft_ms), ("TPOT", self.tpot_ms)) if ms]
        limits = f"{', '.join(set_limits)} at p95" if set_limits else "no limit of latency"
        ways = f"{len(self.plans)} of {self.tried} ways"
        above = [f"{best.simulation.model} on {best.devices} x {best.simulation.device}: {limits}; {ways}"]
        rows = [plan._row() for plan in self.plans]
        return Report(rows, headers, "lllrrrrrrr", above=above, below=below)


def _first_reasons(refused: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in [*refused.items()][:2])


def _share(part: float, whole: float) -> float:
    """Return a fraction with three decimals, rounded down: engines must not take more.

    >>> _share(2, 3)
    0.666
    """
    return int(1000 * part / whole) / 1000


class _Way(NamedTuple):
    """A way with the most requests per second that its replicas can serve."""

    bound: float
    replicas: int
    engine: Engine
    prices: StepPrices
    server: Server


@no_collection()
def search(
    server_of: Callable[..., Server],
    simulate: Callable[[Load, Engine, StepPrices, Server, Limits], ServingSimulation],
    load: Load,
    engine: Engine,
    space: ServingSpace,
    devices: int,
    limits: Limits,
    price: float | None = None,
) -> ServingPlans:
    """Return the ways to serve a load, the one with the most requests per second first.

    Args:
        server_of: returns the server with other options ``tensor``, ``weights`` and ``cache_dtype``.
        simulate: serves a load by an engine, from its prices on a server, until limits are missed.
        load: the requests of a replica; their rate is changed.
        engine: its figures hold but for the ones that are searched.
        space: the ways that are tried.
        devices: number of devices of the cluster.
        limits: of the 95th percentiles of TTFT and TPOT.
        price: of a device and an hour.

    Raises:
        InputError: limits are unusable, or no way can serve the load at any rate.
    """
    check_limits(load, limits)
    ways, refused = _ways(server_of, load, engine, space, devices)
    if not ways:
        raise InputError(f"no way can serve the load: {_first_reasons(refused)}")
    plans: list[ServingPlan] = []
    best = 0.0
    for way in sorted(ways, key=lambda way: -way.bound):
        if way.bound <= best:
            break

        def served(changed: Load, way: _Way = way) -> ServingSimulation:
            return simulate(changed, way.engine, way.prices, way.server, limits)

        if _misses_alone(load, way.engine, way.prices, limits):
            continue
        needed = _MARGIN * best / way.replicas
        if needed and not keeps_limits(served(replace(load, rate=needed)), limits):
            continue
        rate = largest_rate(served, replace(load, rate=needed or way.bound / way.replicas), limits)
        if rate:
            plan = ServingPlan(
                tensor=way.server.options.tensor,
                expert=way.server.options.expert,
                replicas=way.replicas,
                weights=way.server.options.weights,
                cache_dtype=way.server.options.cache_dtype,
                simulation=served(replace(load, rate=None if rate == inf else rate)),
                rate=rate,
                memory_bytes=way.server.memory,
                weight_bytes=way.prices.weight_bytes,
            )
            plans.append(plan)
            best = max(best, plan.requests_per_second)
    plans.sort(key=lambda plan: (-plan.requests_per_second, plan.tensor))
    return ServingPlans(tuple(plans), *limits, len(ways), refused, price)


def _misses_alone(load: Load, engine: Engine, prices: StepPrices, limits: Limits) -> bool:
    """Return True if requests that come alone are later than the limit of the first token, so that no rate keeps it."""
    if limits.ttft_ms is None or load.shared_tokens:
        return False

    def seconds(prompt: int) -> float:
        budget = engine.token_budget or prompt
        chunks = [(before, min(before + budget, prompt)) for before in range(0, prompt, budget)]
        batches = (
            Batch(after - before, int(after == prompt), [before] if before else [], [(before, after)])
            for before, after in chunks
        )
        return sum(prices.price(batch).seconds for batch in batches) + 1e-3 * engine.overhead_ms * len(chunks)

    return Spread.of([1e3 * seconds(request.prompt) for request in load.sample()]).p95 > limits.ttft_ms


def _ways(
    server_of: Callable[..., Server], load: Load, engine: Engine, space: ServingSpace, devices: int
) -> tuple[list[_Way], dict[str, str]]:
    """Return the ways that can serve, with their bounds, and why the others cannot."""
    ways: list[_Way] = []
    refused: dict[str, str] = {}
    if min(space.tensor) * min(space.expert) > devices or min(space.max_requests) > max(space.token_budget):
        raise InputError(
            f"space has no way: it needs a tensor <= devices={devices}, got {[*space.tensor]}, and a max_requests <= a "
            f"token_budget, got {[*space.max_requests]} and {[*space.token_budget]}"
        )
    engines = [
        replace(engine, max_requests=most, token_budget=budget)
        for most, budget in product(space.max_requests, space.token_budget)
        if most <= budget
    ]
    for tensor, expert, weights, cache_dtype in product(space.tensor, space.expert, space.weights, space.cache_dtype):
        if tensor * expert > devices or min(tensor, expert) > 1:
            continue
        values = {"tensor": tensor, "expert": expert, "weights": weights, "cache_dtype": cache_dtype}
        changes = {name: value for name, value in values.items() if value is not None}
        described = ", ".join(f"{name}={value}" for name, value in changes.items() if (name, value) != ("expert", 1))
        try:
            server = server_of(**changes)
            if (least := server.least_weight_bytes) > engine.memory_share * server.memory:
                raise InputError(
                    f"the weights take at least {scaled(least, 'B')} of a device, more than "
                    f"memory_share={engine.memory_share} of {scaled(server.memory, 'B')}"
                )
            prices = server.prices(*engines)
        except InputError as error:
            refused[described] = str(error)
            continue
        replicas = devices // (tensor * expert) * expert
        for batching, offer in zip(engines, prices, strict=True):
            try:
                if isinstance(offer, InputError):
                    raise offer
                check_longest(load, batching, offer.pages)
            except InputError as error:
                limits = f"max_requests={batching.max_requests}, token_budget={batching.token_budget}"
                refused[f"{described}, {limits}"] = str(error)
                continue
            bound = replicas / least_seconds(offer.token_nodes, batching, load)
            ways.append(_Way(bound, replicas, batching, offer, server))
    return ways, refused


def least_seconds(nodes: Sequence[CurvePoint], engine: Engine, load: Load) -> float:
    """Return the seconds that each request of a load takes of a server at least, whatever it is batched with.

    A straight line that is nowhere above the price of a step has a part per step and a part per token. Of each request,
    all tokens are computed; each that is generated comes from a step that at most ``max_requests`` requests share.

    Args:
        nodes: price of a step by its tokens, linear in between.
        engine: the engine.
        load: the requests.

    >>> nodes = [CurvePoint(1, 10.0, 10.0), CurvePoint(100, 10.0, 10.0), CurvePoint(1000, 100.0, 100.0)]
    >>> least_seconds(nodes, Engine(max_requests=5), Load(1, prompt=10, output=10))  # ten steps, shared by five
    20.0
    """
    requests = load.sample()
    tokens = sum(max(request.prompt - load.shared_tokens, 1) + request.output - 1 for request in requests)
    steps = sum(request.output for request in requests) / (engine.max_requests * (1 + engine.draft_tokens))
    corners = [(0.0, 0.0), *((node.x, max(node.y, 0.0)) for node in nodes)]
    slopes = [(high[1] - low[1]) / (high[0] - low[0]) for low, high in pairwise(corners) if high[0] > low[0]]
    best = 0.0
    for slope in {0.0, *(max(slope, 0.0) for slope in slopes)}:
        if slope <= max(slopes[-1], 0.0):  # else the price is below the line of many tokens
            base = max(min(y - slope * x for x, y in corners[1:]), 0.0)
            is_below = all(base + slope * x <= y * (1 + 1e-9) for x, y in corners[1:])
            best = max(best, base * steps + slope * tokens) if is_below else best
    return best / len(requests)

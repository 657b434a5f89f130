"""``ServingEstimate``: what serving a model takes on a device, as plain data that prints as tables and draws itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from modelsummary.errors import InputError, check_integers, is_number
from modelsummary.extras import Records, axes_for
from modelsummary.serving.load import Load
from modelsummary.serving.number_formats import WEIGHTS
from modelsummary.serving.plan import ServingPlans, ServingSpace, search
from modelsummary.serving.prices import StepPrices
from modelsummary.serving.scheduler import NO_LIMITS, Engine, Limits, serve
from modelsummary.serving.server import Server
from modelsummary.serving.simulation import ServingSimulation, largest_rate
from modelsummary.tables import Printed, Report, table
from modelsummary.units import decimals, duration, grouped, scaled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["ServingEstimate", "Throughput"]


@dataclass(frozen=True)
class Throughput:
    """Decoding a batch of requests.

    Attributes:
        batch: number of requests.
        decode_ms: milliseconds to decode one token of each request.
        tokens_per_second: tokens of all requests.
        memory_bytes: the most bytes alive on a device.
        fits: True if they fit.
    """

    batch: int
    decode_ms: float
    tokens_per_second: float
    memory_bytes: int
    fits: bool


@dataclass(frozen=True, repr=False)
class ServingEstimate(Printed, Records):
    """Memory and time of serving a model, made by ``Statistics.serving``; ``print`` shows two tables.

    A request is a prompt of ``context - 1`` tokens and one token more. Bytes are for one device: with ``tensor`` > 1,
    its shards of weights and cache. With ``expert`` > 1, so are requests and tokens per second.

    Attributes:
        model: class of the model.
        device: name of the device.
        dtype: floating point dtype of the weights.
        mode: ``"eager"`` or ``"compiled"``.
        context: tokens of each request that the cache holds.
        batch: number of requests; with ``expert`` > 1, of each device.
        tensor: number of devices over which layers are split.
        cache_layers: class of a cache's layer -> number of layers.
        cache_bytes: bytes of the cache of one request.
        cache_bytes_per_token: bytes by which the cache of one request grows per token, over the second half of the
            context.
        weight_bytes: bytes of parameters and buffers.
        workspace_bytes: bytes that the forwards hold beside weights and cache at the peak.
        peak_bytes: the most bytes alive: weights, the caches of all requests, and the workspace.
        memory_bytes: memory of the device.
        max_context: longest context that fits for this batch, and that the model accepts; 0 if none does.
        max_context_limited_by: ``"memory"``; ``"model"`` if its forward fails for longer ones, such as beyond the end
            of its table of positions; ``"search"`` if longer ones are not tried.
        max_batch: largest batch that fits for this context; 0 if none does.
        prefill_ms: milliseconds of the forward of one request's prompt.
        decode_ms: milliseconds of the forward of one token of each request.
        decode_ms_per_token: milliseconds by which ``decode_ms`` grows with each token of context.
        prefill_limited_by, decode_limited_by: ``"compute"``, ``"memory"``, ``"launches"``, ``"host"`` or ``"links"``.
        collective_ms: part of ``decode_ms`` in which devices communicate.
        throughput: decoding with batches of several sizes, at this context.
        source: name of the fit, or of the kernel table of this machine.
        typical_error: mean error of such predicted times against measurements they had not seen, as a fraction.
        notes: assumptions.
        weights: format of the weights of products, one of ``WEIGHTS``; None: ``dtype``.
        expert: number of devices that divide the experts.
        server: runs the model for simulations; None: the estimate was loaded without its model.
    """

    model: str
    device: str
    dtype: str
    mode: str
    context: int
    batch: int
    tensor: int
    cache_layers: Mapping[str, int]
    cache_bytes: int
    cache_bytes_per_token: float
    weight_bytes: int
    workspace_bytes: int
    peak_bytes: int
    memory_bytes: int
    max_context: int
    max_context_limited_by: str
    max_batch: int
    prefill_ms: float
    decode_ms: float
    decode_ms_per_token: float
    prefill_limited_by: str
    decode_limited_by: str
    collective_ms: float
    throughput: tuple[Throughput, ...]
    source: str
    typical_error: float
    notes: tuple[str, ...] = field(default=())
    weights: str | None = None
    expert: int = 1
    server: Server | None = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "server": None}  # it holds the model

    @property
    def ranks(self) -> int:
        """The number of devices that hold the model together."""
        return self.tensor * self.expert

    @property
    def fits(self) -> bool:
        """Whether ``batch`` requests of ``context`` tokens fit into the memory of the device."""
        return self.peak_bytes <= self.memory_bytes

    @property
    def tokens_per_second(self) -> float:
        """Tokens that all requests of the batch decode per second."""
        return 1e3 * self.batch / self.decode_ms

    def decode_ms_at(self, tokens: int) -> float:
        """Return the milliseconds of a decode step while each cache holds ``tokens`` tokens, linear in between.

        Raises:
            InputError: ``tokens`` is not an integer from 1 to ``context``.
        """
        if type(tokens) is not int or not 1 <= tokens <= self.context:
            raise InputError(f"tokens must be an integer from 1 to {self.context}, got {tokens!r}")
        return self.decode_ms - self.decode_ms_per_token * (self.context - tokens)

    def request_ms(self, new_tokens: int) -> float:
        """Return the milliseconds of a request that ends with ``context`` tokens, the last ``new_tokens`` decoded.

        The prompt is taken to need its share of ``prefill_ms``.

        Raises:
            InputError: ``new_tokens`` is not an integer from 1 to ``context - 1``.
        """
        if type(new_tokens) is not int or not 1 <= new_tokens < self.context:
            raise InputError(f"new_tokens must be an integer from 1 to {self.context - 1}, got {new_tokens!r}")
        first, last = self.decode_ms_at(self.context - new_tokens + 1), self.decode_ms
        prefill = self.prefill_ms * (self.context - new_tokens) / (self.context - 1)
        return prefill + new_tokens * (first + last) / 2

    def prices(self, engine: Engine) -> StepPrices:
        """Return the seconds of the steps of an engine, and the pages of its cache.

        Raises:
            InputError: the model has an encoder, no page fits, or the estimate was loaded without its model.
        """
        prices = self._live_server.prices(engine)[0]
        if isinstance(prices, InputError):
            raise prices
        return prices

    @property
    def _live_server(self) -> Server:
        if self.server is None:
            raise InputError("the estimate was loaded without its model; call serving in this process")
        return self.server

    def simulate(self, load: Load, engine: Engine | None = None) -> ServingSimulation:
        """Simulate a server with continuous batching and a paged cache, step by step.

        The first simulation with an engine runs the model on shapes, for the prices of steps. ``context`` is the
        longest context, and ``batch`` does not count: requests run together as the engine admits them. With ``expert``
        > 1, it is one of the devices, and the others compute as many tokens of their own requests in each step.

        Args:
            load: the requests; with ``expert`` > 1, of one device.
            engine: how they are batched. Default: ``Engine()``.

        Raises:
            InputError: a request does not fit, the model has an encoder, or the estimate was loaded without its model.

        >>> import torch
        >>> from torch import nn
        >>> from modelsummary import Statistics
        >>> class Sums(nn.Embedding):
        ...     def forward(self, ids, cache=None):
        ...         x = super().forward(ids)
        ...         cache = [x if cache is None else torch.cat([cache[0], x], dim=1)]
        ...         return x + cache[0].mean(1, keepdim=True), cache
        >>> estimate = Statistics(Sums(100, 8), torch.zeros(1, 4, dtype=torch.long)).serving(64, device="A100")
        >>> simulation = estimate.simulate(Load(20, prompt=30, output=10, rate=5.0))
        >>> simulation.timeline.steps, simulation.preemptions, simulation.limited_by
        (200, 0, 'arrivals')
        """
        _check_load(load)
        return self._simulated(load, *self._priced(engine))

    def _priced(self, engine: Engine | None) -> tuple[Engine, StepPrices, Server]:
        """Return an engine with the prices of its steps."""
        if engine is not None and not isinstance(engine, Engine):
            raise InputError(f"engine must be an Engine or None, got {engine!r:.80}")
        engine = engine or Engine()
        return engine, self.prices(engine), self._live_server

    def _simulated(
        self, load: Load, engine: Engine, prices: StepPrices, server: Server, limits: Limits = NO_LIMITS
    ) -> ServingSimulation:
        timeline = serve(load, engine, prices.pages, prices.price, limits)
        return ServingSimulation(
            model=self.model,
            device=self.device,
            tensor=server.options.tensor,
            load=load,
            engine=engine,
            timeline=timeline,
            n_pages=prices.pages.total,
            page_bytes=prices.page_bytes,
            price_error=prices.error,
            typical_error=self.typical_error,
            case=server.case,
        )

    def max_rate(
        self, load: Load, *, ttft_ms: float | None = None, tpot_ms: float | None = None, engine: Engine | None = None
    ) -> float:
        """Return the largest rate at which this load keeps the 95th percentiles of latencies within limits, to 1 %.

        All requests of the load count, the first ones, which meet an empty server, too. Above the rate that a server
        sustains, each request waits longer than the one before, so a short load keeps a limit at rates that a long one
        does not: let the load last many times ``ttft_ms``, and have many times the requests that run together. With
        ``tpot_ms`` alone, nothing limits how long requests wait for their first token.

        Args:
            load: the requests; their rate is changed.
            ttft_ms: limit of the milliseconds from arrival to first token; None: any.
            tpot_ms: limit of the milliseconds per token after the first; None: any.
            engine: how they are batched. Default: ``Engine()``.

        Returns:
            Requests per second; 0.0 if even requests that come alone miss a limit; ``inf`` if all requests of the load
            may come at once, so that only a load of more requests tells a rate.

        Raises:
            InputError: a limit is missing or unusable, ``tpot_ms`` is passed for outputs of one token, arrivals are a
                list, or ``simulate`` refuses.
        """
        _check_load(load)
        limits = Limits(ttft_ms, tpot_ms)
        return largest_rate(lambda changed: self._simulated(changed, *self._priced(engine), limits), load, limits)

    def plan(
        self,
        load: Load,
        *,
        ttft_ms: float | None = None,
        tpot_ms: float | None = None,
        devices: int | None = None,
        space: ServingSpace | None = None,
        engine: Engine | None = None,
        price: float | None = None,
    ) -> ServingPlans:
        """Search for the way to serve a load with the most requests per second within limits of latencies.

        Each of several replicas gets a share of the requests; ``load`` is what one of them gets, at the rate that its
        95th percentiles allow, as for ``max_rate``.

        Args:
            load: the requests of a replica; their rate is changed.
            ttft_ms: limit of the milliseconds from arrival to first token; None: any.
            tpot_ms: limit of the milliseconds per token after the first; None: any.
            devices: number of devices. Default: all of the cluster that was passed to ``serving``; 8 of a named
                device; all accelerators of this machine, or its CPU.
            space: the ways that are tried. Default: ``ServingSpace()``.
            engine: its figures hold but for the limits of batches that are tried. Default: ``Engine()``.
            price: of a device and an hour, for requests per unit of cost.

        Raises:
            InputError: a value is unusable, ``simulate`` or ``max_rate`` refuses, or the estimate was loaded without
                its model.

        >>> import torch
        >>> from torch import nn
        >>> from modelsummary import Statistics
        >>> class Sums(nn.Embedding):
        ...     def forward(self, ids, cache=None):
        ...         x = super().forward(ids)
        ...         cache = [x if cache is None else torch.cat([cache[0], x], dim=1)]
        ...         return x + cache[0].mean(1, keepdim=True), cache
        >>> estimate = Statistics(Sums(100, 8), torch.zeros(1, 4, dtype=torch.long)).serving(64, device="A100")
        >>> space = ServingSpace(tensor=[1], max_requests=[4, 16], token_budget=[64])
        >>> plans = estimate.plan(Load(40, prompt=30, output=10), tpot_ms=5.0, space=space)
        >>> plans.best.replicas, plans.best.engine.max_requests
        (8, 16)
        """
        _check_load(load)
        space, server = ServingSpace() if space is None else space, self._live_server
        for name, value, kind in (("space", space, ServingSpace), ("engine", engine, Engine)):
            if value is not None and not isinstance(value, kind):
                raise InputError(f"{name} must be a {kind.__name__} or None, got {value!r:.80}")
        devices = server.devices if devices is None else devices
        check_integers(devices=devices)
        if price is not None and not (is_number(price) and price > 0):
            raise InputError(f"price must be a number > 0 or None, got {price!r:.80}")

        server.check_prices()
        limits = Limits(ttft_ms, tpot_ms)
        return search(server.changed, self._simulated, load, engine or Engine(), space, devices, limits, price)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain containers."""
        figures = asdict(replace(self, server=None))
        del figures["server"]
        return {**figures, "tokens_per_second": self.tokens_per_second, "fits": self.fits}

    def to_records(self) -> list[dict[str, Any]]:
        """Return one dict per batch size of ``throughput``."""
        return [asdict(throughput) for throughput in self.throughput]

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw tokens per second against the batch size, with the time of a step beside it; return the axes.

        Batches that do not fit are drawn hollow.

        Args:
            ax: axes to draw into; None: new axes.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        axes = axes_for(ax, layout="constrained")
        batches = [throughput.batch for throughput in self.throughput]
        line = axes.plot(batches, [throughput.tokens_per_second for throughput in self.throughput], color="tab:blue")[0]
        for throughput in self.throughput:
            face = line.get_color() if throughput.fits else "none"
            axes.plot(throughput.batch, throughput.tokens_per_second, "o", color=line.get_color(), markerfacecolor=face)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("batch (requests)")
        axes.set_ylabel("tokens per second")
        axes.set_title(f"{self.model}, {grouped(self.context)} tokens of context, {self._devices}", wrap=True)
        time_axes = axes.twinx()
        time_axes.plot(batches, [throughput.decode_ms for throughput in self.throughput], "--", color="tab:gray")
        time_axes.set_ylabel("decode step (ms)")
        time_axes.set_ylim(bottom=0)
        return axes

    @property
    def _devices(self) -> str:
        return self.device if self.ranks == 1 else f"{self.ranks} x {self.device}"

    def _report(self) -> Report:
        layers = ", ".join(f"{count} x {name}" for name, count in self.cache_layers.items())
        error = f"typical error {100 * self.typical_error:.0f} %"
        longest = f"{grouped(self.max_context)} tokens"
        are_several, of_each = self.ranks > 1, " of each device" if self.expert > 1 else ""
        kept = "" if self.weights is None else f", {WEIGHTS[self.weights].label}"
        rows = [
            ["Device memory", f"{scaled(self.memory_bytes, 'B')}{' each' if are_several else ''}"],
            ["Weights", f"{scaled(self.weight_bytes, 'B')}{kept}"],
            ["Cache per token", scaled(self.cache_bytes_per_token, "B")],
            ["Cache per request", f"{scaled(self.cache_bytes, 'B')} ({layers})"],
            ["Workspace", scaled(self.workspace_bytes, "B")],
            ["Peak", f"{scaled(self.peak_bytes, 'B')}{'' if self.fits else ', which does not fit'}"],
            ["Longest context", f"{longest} for batch {grouped(self.batch)}, limited by {self.max_context_limited_by}"],
            ["Largest batch", f"{grouped(self.max_batch)} for {grouped(self.context)} tokens"],
            ["Prefill of one request", f"{duration(self.prefill_ms)}, limited by {self.prefill_limited_by}"],
            ["Decode of one token", f"{duration(self.decode_ms)}, limited by {self.decode_limited_by}"],
            ["Tokens per second", f"{decimals(self.tokens_per_second, 1)}{of_each}"],
            ["Time from", f"{self.source}, {error}"],
        ]
        if are_several:
            rows.insert(-2, ["Collectives of a token", duration(self.collective_ms)])
        headers = ["Batch", "Decode (ms)", "Tokens/s", "Memory (GB)", "Fits"]
        batches = [
            [
                grouped(throughput.batch),
                decimals(throughput.decode_ms, 2),
                decimals(throughput.tokens_per_second, 1),
                decimals(throughput.memory_bytes / 1e9, 2),
                "yes" if throughput.fits else "no",
            ]
            for throughput in self.throughput
        ]
        case = (
            f"Serving {self.model}, {self.dtype}, {self.mode} on {self._devices}: {grouped(self.context)} tokens of "
            f"context, batch {grouped(self.batch)}{of_each}"
        )
        facts = table(rows, [], "ll", "plain").split("\n")
        return Report(batches, headers, "rrrrl", above=[case, *facts, ""], below=self.notes)


def _check_load(load: object) -> None:
    """Raise ``InputError`` unless a load is a ``Load``."""
    if not isinstance(load, Load):
        raise InputError(f"load must be a Load, such as Load(100, prompt=500, output=100), got {load!r:.80}")

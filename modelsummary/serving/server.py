"""``Server``: a model on one or several devices, run on shapes as its requests call it, and the prices of its steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from math import inf
from typing import Any

import torch
from torch import nn

from modelsummary.capture.exclusive import exclusive
from modelsummary.capture.live import LiveModel
from modelsummary.capture.run import no_collection
from modelsummary.cluster.collectives import Network
from modelsummary.cluster.topology import Cluster, calibrated_device
from modelsummary.devices.device_spec import DeviceSpec
from modelsummary.devices.kernel_table import device_here
from modelsummary.devices.target import Target, target_of
from modelsummary.errors import InputError, check_integers
from modelsummary.keywords import choice_of, dtype_named
from modelsummary.latency.calibrate import calibrate_calls
from modelsummary.layer_info import LayerInfo
from modelsummary.operators.kernels import MODES
from modelsummary.parallel.applied_rank import rank_of, sharded_copy
from modelsummary.parallel.equal_blocks import fold
from modelsummary.parallel.expert_plans import sending_tokens
from modelsummary.parallel.make import make_plan
from modelsummary.parallel.plan import ParallelPlan
from modelsummary.parallel.record_calls import TRACE_RULES, Calls
from modelsummary.record.runs import record_of
from modelsummary.serving.cache import MakeCache, cache_maker
from modelsummary.serving.depth import Fold, fold_of
from modelsummary.serving.number_formats import WEIGHTS, NumberFormats, check_device, named_formats
from modelsummary.serving.prices import StepPrices
from modelsummary.serving.published import ServedCase
from modelsummary.serving.request import Request, request_of
from modelsummary.serving.run import Phase, PhaseTime, Points, run_request
from modelsummary.serving.scheduler import Engine
from modelsummary.serving.times import Communicate, phase_time
from modelsummary.units import parse_bytes

__all__ = ["MOST_REQUESTS", "Server", "ServingOptions", "calibrate"]

MOST_REQUESTS = 2**16
_PER_NODE = 8  # devices of a node with the links of a named device
_CHECKED = 64  # tokens of a request that compares few blocks with all; the longest context is another
_MOST_DIFFERENCE = 0.01  # of their times; otherwise all blocks run


@dataclass(frozen=True)
class ServingOptions:
    """The options of ``Statistics.serving``, checked.

    Attributes:
        context, batch, tensor, dtype, cache, mode, memory_bytes, batches, calibrate, cluster, weights, cache_dtype,
            expert: see ``Statistics.serving``.

    Raises:
        InputError: a value is unusable.
    """

    context: int
    batch: int = 1
    tensor: int = 1
    dtype: torch.dtype | None = None
    cache: str | MakeCache | None = None
    mode: str | None = None
    memory_bytes: int | str | None = None
    batches: Sequence[int] | None = None
    calibrate: bool = False
    cluster: Cluster | None = None
    weights: str | None = None
    cache_dtype: torch.dtype | None = None
    expert: int = 1

    def __post_init__(self) -> None:
        check_integers(2, context=self.context)
        check_integers(batch=self.batch, tensor=self.tensor, expert=self.expert)
        if self.tensor > 1 and self.expert > 1:
            raise InputError(
                f"tensor={self.tensor} with expert={self.expert}: devices of tensor have the same requests, devices of "
                "expert their own; pass tensor=1 or expert=1"
            )
        if self.dtype is not None:
            object.__setattr__(self, "dtype", dtype_named(self.dtype, "dtype"))
        if self.mode is not None:
            object.__setattr__(self, "mode", choice_of(self.mode, MODES, "mode", " or None"))
        if self.cluster is not None and not isinstance(self.cluster, Cluster):
            raise InputError(f"cluster must be a Cluster or None, got {self.cluster!r:.80}")
        weights, cache_dtype = named_formats(self.weights, self.cache_dtype)
        object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "cache_dtype", cache_dtype)
        if cache_dtype is not None and self.cache is not None:
            raise InputError(
                "pass cache= or cache_dtype=, not both: cache_dtype= keeps the model's own cache in a dtype"
            )
        if self.batch > MOST_REQUESTS:
            raise InputError(f"batch must be at most {MOST_REQUESTS}, got {self.batch}")
        if self.batches is not None and (
            not isinstance(self.batches, (list, tuple, range))
            or not all(type(batch) is int and 0 < batch <= MOST_REQUESTS for batch in self.batches)
        ):
            raise InputError(f"batches must be a list of integers >= 1 and <= {MOST_REQUESTS}, got {self.batches!r}")

    @property
    def ranks(self) -> int:
        """The number of devices that hold the model together."""
        return self.tensor * self.expert

    @property
    def formats(self) -> NumberFormats:
        """How weights and caches are kept."""
        return NumberFormats(None if self.weights is None else WEIGHTS[self.weights], self.cache_dtype)


class Server:
    """A model on a device, or split over several, to be run on shapes.

    Args:
        live: the live model.
        root: its row.
        device: the device; None: the one of the cluster, or this machine.
        options: the options.
        runs: runs of other servers of the same model, and how far few blocks are from all, by what they depend on;
            further ones are added.

    Attributes:
        request: how the model is called.
        target: the device.
        mode: ``"eager"`` or ``"compiled"``.
        memory: memory of the device in bytes.
        options: the options.

    Raises:
        InputError: an option is unusable.
    """

    def __init__(
        self,
        live: LiveModel,
        root: LayerInfo,
        device: DeviceSpec | torch.device | str | None,
        options: ServingOptions,
        runs: dict[Any, dict[Any, Any]] | None = None,
    ) -> None:
        if options.cluster is not None:
            if device is not None:
                raise InputError("pass device= or cluster=, not both: the device is the one of the cluster")
            device = calibrated_device(options.cluster)
        self.live, self._root, self._device, self.options = live, root, device, options
        target = self.target = target_of(device)
        self.mode = options.mode or ("eager" if target.model is None else "compiled")
        self.request, self._make_cache = request_of(live), cache_maker(options.cache)
        check_device(options.formats, options.weights, target)
        self.memory = _memory_of(target, options)
        self._communicate = communication(target, options)
        self._all_runs = {} if runs is None else runs
        self._differences: dict[int, float] = self._all_runs.setdefault((options.dtype, options.cache), {})
        # whether few blocks ran, batch and context -> phases
        self._runs: dict[tuple[bool, int, int], list[Phase]]
        self._runs, self._whole_runs = (
            self._all_runs.setdefault((ranks, options.dtype, options.cache), {})
            for ranks in ((options.tensor, options.expert), (1, 1))
        )
        self._prices: dict[Engine, StepPrices | InputError] = {}

    def changed(self, **changes: Any) -> Server:
        """Return the server of the same model with other options, which shares its runs as far as they are the same."""
        options = replace(self.options, **changes)
        device = None if options.cluster is not None else self._device
        return Server(self.live, self._root, device, options, self._all_runs)

    @property
    def devices(self) -> int:
        """Return the number of devices that a plan has unless told: of the cluster, of a node, or of this machine."""
        if self.options.cluster is not None:
            return self.options.cluster.devices
        if self.target.model is not None:
            return _PER_NODE
        return 1 if self.target.is_cpu else torch.cuda.device_count()

    @property
    def case(self) -> ServedCase | None:
        """Return what decides which published tables a simulation is compared with; None on this machine, or eager."""
        if self.target.model is None or self.mode == "eager":
            return None
        weights = self.options.weights or {1: "fp8", 2: "bfloat16"}.get(self.dtype.itemsize, self.dtype_name)
        return ServedCase(self.target.model.spec.generation, weights, "one" if self.options.ranks == 1 else "several")

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of weights and hidden states."""
        if self.options.dtype is not None:
            return self.options.dtype
        floats = (parameter.dtype for parameter in self.live.model.parameters() if parameter.dtype.is_floating_point)
        return next(floats, torch.get_default_dtype())

    @property
    def dtype_name(self) -> str:
        """Return the name of that dtype, without ``torch.``."""
        return str(self.dtype).removeprefix("torch.")

    @contextmanager
    def points(self, few: Fold | None = None) -> Iterator[Points]:
        """Return a context with the points of the model that one device runs.

        Args:
            few: the version of the model with few of its equal blocks, which runs where it tells what all take.
        """
        with _versions(self.live, self._root, self.options, self.request) as version:
            whole = Points(partial(self._run, version, None))
            error = inf if few is None else self._error_of_few(version, whole, few)
            yield Points(partial(self._run, version, few), error) if error <= _MOST_DIFFERENCE else whole

    def _run(
        self, version: Callable[[Fold | None], nn.Module], few: Fold | None, batch: int, context: int, decodes: bool
    ) -> list[Phase]:
        """Return the phases of requests with their bytes and times, run on shapes unless that is known.

        Args:
            version: returns a version of the model.
            few: the version; None: the whole model.
            batch, context, decodes: as for ``run_request``.
        """
        key, least = (few is not None, batch, context), 1 + decodes
        if len(self._runs.get(key, ())) < least:
            run = partial(
                run_request,
                request=self.request,
                batch=batch,
                context=context,
                dtype=self.options.dtype,
                make_cache=self._make_cache,
                decodes=decodes,
            )
            if self.options.ranks > 1 and batch == 1 and few is None and len(self._whole_runs.get(key, ())) < least:
                self._whole_runs[key] = run(self.live.model)  # a shard of a table does not tell its positions
            routes_evenly, times = self.options.expert > 1, None if few is None else few.times
            self._runs[key] = run(version(few), routes_evenly=routes_evenly, times=times)
        return [replace(phase, time=self._time(phase)) for phase in self.options.formats.bytes_of(self._runs[key])]

    def _error_of_few(self, version: Callable[[Fold | None], nn.Module], whole: Points, few: Fold) -> float:
        """Return the largest difference of few equal blocks from all in the times of a request, as a fraction.

        Equal blocks are split alike over any number of devices, so the model on one device tells it, once.

        Args:
            version: returns a version of the model.
            whole: points of the whole model.
            few: the version with few blocks.
        """
        contexts = sorted({min(self.options.context, _CHECKED), self.options.context})
        missing = [context for context in contexts if context not in self._differences]
        if missing and self.options.ranks > 1:
            with self.changed(tensor=1, expert=1).points(few):  # notes them
                pass
        for context in missing if self.options.ranks == 1 else ():
            self._differences[context] = _difference(Points(partial(self._run, version, few)), whole, context)
        return max(self._differences[context] for context in contexts)

    def _time(self, phase: Phase) -> PhaseTime:
        return phase_time(self.live, phase, self.target, self.mode, self._communicate, self.options.formats)

    def check_prices(self) -> None:
        """Raise ``InputError`` if the steps of the model have no prices."""
        if self.request.others.kwargs:
            raise InputError(
                f"simulate is for decoders without an encoder: steps of {type(self.live.model).__name__} have no "
                "price for the encoders of some of their requests; serving() alone has its prefill and decode"
            )

    @exclusive
    @no_collection()
    def prices(self, *engines: Engine) -> list[StepPrices | InputError]:
        """Return the prices of the steps of engines, which run the model on shapes the first time.

        With ``calibrate``, the operator calls that they are made of are measured on this machine. Of an engine for
        which no page of the cache fits, the error is returned.

        Raises:
            InputError: the model has an encoder, or a run fails.
        """
        self.check_prices()
        # what a step takes besides its forward is not in the prices
        plain = [replace(engine, watermark=0.0, overhead_ms=0.0, acceptance=0.0, draft_ms=0.0) for engine in engines]
        new = [engine for engine in dict.fromkeys(plain) if engine not in self._prices]
        if new:
            if self.options.calibrate:
                self._new_prices(new)
                _measure(list(chain.from_iterable(self._runs.values())), device_here(self._device))  # type: ignore[arg-type]
                self._differences.clear()  # which were not of measured times
                self.target = target_of(self._device)
            self._prices.update(self._new_prices(new))
        return [self._prices[engine] for engine in plain]

    @property
    def least_weight_bytes(self) -> float:
        """Return the bytes of parameters that a device has at least, however they are shared out."""
        format_ = self.options.formats.weights
        bits = 64.0 if format_ is None else format_.bits
        nbytes = 0.0
        for parameter in self.live.model.parameters():
            if type(parameter) is nn.Parameter and parameter.dtype.is_floating_point:
                dtype = self.options.dtype or parameter.dtype
                nbytes += parameter.numel() * min(dtype.itemsize, bits / 8)
        return nbytes / self.options.ranks

    def _new_prices(self, engines: Sequence[Engine]) -> dict[Engine, StepPrices | InputError]:
        with self.points(fold_of(self._root)) as points:
            budgets = [engine.token_budget for engine in engines if engine.token_budget is not None]
            largest = replace(
                engines[0],
                token_budget=max(budgets) if len(budgets) == len(engines) else None,
                max_requests=max(engine.max_requests for engine in engines),
                draft_tokens=max(engine.draft_tokens for engine in engines),
            )
            curves = StepPrices(points, self.options.context, largest)
            return {engine: _offer(curves, engine, self.memory) for engine in engines}


def _offer(curves: StepPrices, engine: Engine, memory_bytes: int) -> StepPrices | InputError:
    """Return the prices of an engine with its pages, or why it has none."""
    try:
        return curves.paged(engine, memory_bytes)
    except InputError as error:
        return error


def _difference(few: Points, whole: Points, context: int) -> float:
    """Return the difference of few blocks from all in the times of a request; infinite if bytes differ, too."""
    of_all = whole.decode(1, context), whole.prefill(1, context)
    try:
        of_few = few.decode(1, context), few.prefill(1, context)
    except InputError:  # such as a block that does not return a tensor of the size that it takes
        return inf
    nbytes = {(decode.cache.nbytes, decode.weight_bytes) for decode, _ in (of_few, of_all)}
    if len(nbytes) > 1:
        return inf
    return max(abs(one.seconds / all_.seconds - 1) for one, all_ in zip(of_few, of_all, strict=True))


@contextmanager
def _versions(
    live: LiveModel, root: LayerInfo, options: ServingOptions, request: Request
) -> Iterator[Callable[[Fold | None], nn.Module]]:
    """Return a context with the model, or with the shard of it that one of several devices holds.

    The plan is made of a forward that returns no cache, where the model can be told so: each device keeps the keys and
    values of its own heads, while a value that leaves the model would be gathered.

    Yields:
        A function that returns the version of the model with few blocks, or the whole one. It raises ``InputError`` for
        a model that cannot be copied, or sharded.
    """
    with ExitStack() as stack:
        plan: ParallelPlan | None = None
        models: dict[bool, nn.Module] = {}

        def version(few: Fold | None) -> nn.Module:
            nonlocal plan
            if few is None and options.ranks == 1:
                return live.model
            if (few is not None) not in models:
                same = {} if few is None else few.same
                if options.ranks == 1:
                    models[True] = fold(live.model, same)
                else:
                    if plan is None:
                        plan = _plan_of(live, root, options, request)
                        stack.enter_context(rank_of(plan, 0, plan.world_size, "the model of a rank"))
                    model, _ = stack.enter_context(sharded_copy(plan, live.model, None, same))
                    models[few is not None] = model
            return models[few is not None]

        yield version


def _plan_of(live: LiveModel, root: LayerInfo, options: ServingOptions, request: Request) -> ParallelPlan:
    """Return the plan of the devices that hold a model together."""
    if "use_cache" in request.flags:
        live = replace(live, call=replace(live.call, kwargs={**live.call.kwargs, "use_cache": False}))
    plan = make_plan(live, root, tensor=options.tensor)
    if options.expert == 1:
        return plan
    calls = Calls(live.model, record_of(live, TRACE_RULES))
    return sending_tokens(plan, live, calls, options.expert)


def calibrate(
    live: LiveModel,
    device: DeviceSpec | torch.device | str | None,
    options: ServingOptions,
    batches: Iterable[int],
    contexts: Iterable[int],
) -> None:
    """Measure the operator calls of requests on this machine, unless they are known.

    Raises:
        InputError: the device is another one.
    """
    spec = device if options.cluster is None else options.cluster.device
    if isinstance(spec, DeviceSpec):
        raise InputError(f"calibrate=True measures this machine; leave it out for {spec.name}")
    local_device = device_here(spec)
    request, make_cache = request_of(live), cache_maker(options.cache)
    phases = [
        phase
        for batch, context in product(batches, contexts)
        for phase in run_request(live.model, request, batch, context, dtype=options.dtype, make_cache=make_cache)
    ]
    _measure(phases, local_device)


def _measure(phases: Sequence[Phase], device: torch.device) -> None:
    calibrate_calls((operator.run.call for phase in phases for operator in phase.operators), device)


def communication(target: Target, options: ServingOptions) -> Communicate | None:
    """Return the function from a collective and its bytes to seconds; None for a single device.

    Args:
        target: the device. Without a cluster there are nodes of eight with its links.
        options: the options.

    Raises:
        InputError: the links between devices are not known, or the cluster has fewer devices.
    """
    cluster, ranks = options.cluster, options.ranks
    if ranks == 1:
        return None
    argument = f"tensor={options.tensor}" if options.expert == 1 else f"expert={options.expert}"
    if cluster is None:
        spec = None if target.model is None else target.model.spec
        if spec is None or spec.interconnect is None:
            raise InputError(
                f"{argument}: the links between devices are not known for {target.name}; pass cluster=Cluster(...)"
            )
        cluster = Cluster(spec, nodes=-(-ranks // _PER_NODE), memory_bytes=spec.memory_bytes or 1)
    if ranks > cluster.devices:
        raise InputError(f"{argument} needs as many devices, the cluster has {cluster.devices}")
    network = Network(cluster)
    group = network.group(ranks)
    return lambda name, nbytes: network.seconds(name, nbytes, group)


def _memory_of(target: Target, options: ServingOptions) -> int:
    """Return the memory of the device in bytes."""
    if options.memory_bytes is not None:
        return parse_bytes(options.memory_bytes, "memory_bytes")
    if options.cluster is not None:
        return options.cluster.memory_bytes
    if target.model is not None:
        capacity = target.model.spec.memory_bytes
        if capacity is None:
            raise InputError(f"the memory of {target.name} is not known; pass memory_bytes=")
        return capacity
    if "cuda" in target.name:
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

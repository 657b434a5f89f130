"""Predict what serving a model takes on a device: memory, times, and what fits."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import nn

from modelsummary.capture.exclusive import exclusive
from modelsummary.capture.live import LiveModel
from modelsummary.capture.observe import check_initialized
from modelsummary.cluster.topology import Cluster, calibrated_device
from modelsummary.devices.device_spec import DeviceSpec
from modelsummary.devices.kernel_table import device_here
from modelsummary.devices.target import Target, target_of
from modelsummary.errors import InputError, check_integers
from modelsummary.keywords import choice_of, dtype_named
from modelsummary.latency.calibrate import calibrate_calls
from modelsummary.latency.predict import TABLE_ERROR
from modelsummary.layer_info import LayerInfo
from modelsummary.operators.kernels import MODES
from modelsummary.parallel.applied_rank import sharded_model
from modelsummary.parallel.equal_blocks import fold
from modelsummary.parallel.make import make_plan
from modelsummary.serving.cache import MakeCache, cache_maker
from modelsummary.serving.depth import Folds, folds_of
from modelsummary.serving.fit import largest_fitting
from modelsummary.serving.links import communication
from modelsummary.serving.points import Points
from modelsummary.serving.prices import StepPrices
from modelsummary.serving.report import ServingEstimate, Throughput
from modelsummary.serving.request import Request, request_of
from modelsummary.serving.run import RequestRun, run_request
from modelsummary.serving.scheduler import Engine
from modelsummary.serving.stored import Stored, check_device, check_stored
from modelsummary.serving.times import PhaseTime, phase_time
from modelsummary.units import grouped, parse_bytes, scaled

__all__ = ["ServingOptions", "estimate_serving"]

_SHORT = 64  # tokens of the run that tells the bytes of the weights
_LONGEST = 2**24  # tokens of the longest context that is tried
_MOST_REQUESTS = 2**16
_BATCHES = (1, 4, 16, 64, 256)


@dataclass(frozen=True)
class ServingOptions:
    """The options of ``Statistics.serving``, checked.

    Attributes:
        context, batch, tensor, dtype, cache, mode, memory_bytes, batches, calibrate, cluster, weights, cache_dtype: see
            ``Statistics.serving``.

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

    def __post_init__(self) -> None:
        check_integers(2, context=self.context)
        check_integers(batch=self.batch, tensor=self.tensor)
        if self.dtype is not None:
            object.__setattr__(self, "dtype", dtype_named(self.dtype, "dtype"))
        if self.mode is not None:
            object.__setattr__(self, "mode", choice_of(self.mode, MODES, "mode", " or None"))
        if self.cluster is not None and not isinstance(self.cluster, Cluster):
            raise InputError(f"cluster must be a Cluster or None, got {self.cluster!r:.80}")
        if self.stored.cache_dtype is not None and self.cache is not None:
            raise InputError(
                "pass cache= or cache_dtype=, not both: cache_dtype= keeps the model's own cache in a dtype"
            )
        if self.batch > _MOST_REQUESTS:
            raise InputError(f"batch must be at most {_MOST_REQUESTS}, got {self.batch}")
        if self.batches is not None and (
            not isinstance(self.batches, (list, tuple, range))
            or not all(type(batch) is int and 0 < batch <= _MOST_REQUESTS for batch in self.batches)
        ):
            raise InputError(f"batches must be a list of integers >= 1 and <= {_MOST_REQUESTS}, got {self.batches!r}")

    @property
    def stored(self) -> Stored:
        """How weights and caches are kept."""
        return check_stored(self.weights, self.cache_dtype)


def estimate_serving(
    live: LiveModel, root: LayerInfo, device: DeviceSpec | torch.device | str | None, options: ServingOptions
) -> ServingEstimate:
    """Return what serving takes, as ``Statistics.serving`` says.

    Raises:
        InputError: an argument is unusable, the forward returns no cache or refuses the context, or the weights alone
            do not fit.
    """
    check_initialized(live)
    if options.cluster is not None:
        if device is not None:
            raise InputError("pass device= or cluster=, not both: the device is the one of the cluster")
        device = calibrated_device(options.cluster)
    if options.calibrate:
        _calibrate(live, device, options)
    server = _Server(live, root, device, options)
    with server.points() as (model, points):
        return _Serving(model, points, server).estimate()


class _Server:
    """A model on a device, to be run on shapes.

    Attributes:
        request: how the model is called.
        target: the device.
        mode: ``"eager"`` or ``"compiled"``.
        memory: memory of the device in bytes.
        options: the options.
    """

    def __init__(
        self,
        live: LiveModel,
        root: LayerInfo,
        device: DeviceSpec | torch.device | str | None,
        options: ServingOptions,
    ) -> None:
        self._live, self._root, self._device, self.options = live, root, device, options
        target = self.target = target_of(device)
        self.mode = options.mode or ("eager" if target.model is None else "compiled")
        self.request, self._make_cache = request_of(live), cache_maker(options.cache)
        check_device(options.stored, options.weights, target)
        self.memory = _memory_of(target, options)
        self._communicate = communication(target, options.tensor, options.cluster)
        self._prices: dict[Engine, StepPrices] = {}

    @contextmanager
    def points(
        self, runs: list[RequestRun] | None = None, folds: Folds | None = None
    ) -> Iterator[tuple[nn.Module, Points]]:
        """Return a context with the model that one device runs, and its points, whose runs are appended to ``runs``.

        Args:
            runs: list of the runs.
            folds: versions of the model with few of its equal blocks, which the points may take times from.
        """
        live, dtype = self._live, self.options.dtype
        with _served_models(live, self._root, self.options.tensor, self.request, folds) as (model, *versions):

            def run_of(served: nn.Module, batch: int, context: int) -> RequestRun:
                request_run = run_request(
                    served, self.request, batch, context, dtype=dtype, make_cache=self._make_cache
                )
                if runs is not None:
                    runs.append(request_run)
                return self.options.stored.bytes_of(request_run)

            def run(batch: int, context: int) -> RequestRun:
                if model is not live.model and batch == 1:
                    run_request(live.model, self.request, batch, context, dtype=dtype, make_cache=self._make_cache)
                    # a shard of a table does not tell which positions the table has
                return run_of(model, batch, context)

            def time(request_run: RequestRun) -> tuple[PhaseTime, PhaseTime]:
                prefill, decode = (
                    phase_time(live, phase, self.target, self.mode, self._communicate, self.options.stored)
                    for phase in (request_run.prefill, request_run.decode)
                )
                return prefill, decode

            folded = [Points(partial(run_of, version), time) for version in versions]
            yield model, Points(run, time, list(zip(folded, folds.factors if folds and folded else (), strict=True)))

    @exclusive
    def prices(self, engine: Engine) -> StepPrices:
        """Return the prices of an engine's steps, which run the model on shapes the first time.

        With ``calibrate``, the operator calls that they are made of are measured on this machine.

        Raises:
            InputError: the model has an encoder, or no page of the cache fits.
        """
        if self.request.others.kwargs:
            raise InputError(
                f"simulate is for decoders without an encoder: steps of {type(self._live.model).__name__} have no "
                "price for the encoders of some of their requests"
            )
        # what a step takes besides its forward is not in the prices
        engine = replace(engine, watermark=0.0, overhead_ms=0.0, acceptance=0.0, draft_ms=0.0)
        if engine not in self._prices:
            if self.options.calibrate:
                runs: list[RequestRun] = []
                self._new_prices(engine, runs)
                _measure(runs, device_here(self._device))  # type: ignore[arg-type]
                self.target = target_of(self._device)
            self._prices[engine] = self._new_prices(engine)
        return self._prices[engine]

    def _new_prices(self, engine: Engine, runs: list[RequestRun] | None = None) -> StepPrices:
        with self.points(runs, folds_of(self._root)) as (_, points):
            return StepPrices(points, self.options.context, self.memory, engine)


@contextmanager
def _served_models(
    live: LiveModel, root: LayerInfo, tensor: int, request: Request, folds: Folds | None = None
) -> Iterator[list[nn.Module]]:
    """Return a context with the model, or with the shard of it that one of several devices holds, and its folds.

    The plan is made of a forward that returns no cache, where the model can be told so: each device keeps the keys and
    values of its own heads, while a value that leaves the model would be gathered. A model that cannot be copied has no
    folds.
    """
    same = () if folds is None else folds.same
    with ExitStack() as stack:
        if tensor == 1:
            models = [live.model]
            with suppress(InputError):
                models += [fold(live.model, blocks) for blocks in same]
        else:
            if "use_cache" in request.flags:
                live = replace(live, call=replace(live.call, kwargs={**live.call.kwargs, "use_cache": False}))
            plan = make_plan(live, root, tensor=tensor)
            models = stack.enter_context(sharded_model(plan, 0, *same))
        yield models if len(models) == 1 + len(same) else models[:1]


def _calibrate(live: LiveModel, device: DeviceSpec | torch.device | str | None, options: ServingOptions) -> None:
    """Measure the operator calls of the requests on this machine, unless they are known."""
    if isinstance(device, DeviceSpec):
        raise InputError(f"calibrate=True measures this machine; leave it out for {device.name}")
    local_device = device_here(device)
    request, make_cache = request_of(live), cache_maker(options.cache)
    runs = [
        run_request(live.model, request, batch, context, dtype=options.dtype, make_cache=make_cache)
        for batch in {1, options.batch}
        for context in {options.context, _half(options.context)}
    ]
    _measure(runs, local_device)


def _measure(runs: Sequence[RequestRun], device: torch.device) -> None:
    """Measure the operator calls of runs on a device of this machine, unless they are known."""
    phases = [phase for run in runs for phase in (run.prefill, run.decode)]
    calibrate_calls((operator.run.call for phase in phases for operator in phase.operators), device)


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


def _half(context: int) -> int:
    return max(context // 2, 2)


class _Serving:
    """The figures of one estimate under construction."""

    def __init__(self, model: nn.Module, points: Points, server: _Server) -> None:
        self.model, self.points, self._server = model, points, server
        self.request, self.target, self.mode = server.request, server.target, server.mode
        self.memory, self.options = server.memory, server.options

    def estimate(self) -> ServingEstimate:
        """Return the estimate."""
        options, context, batch = self.options, self.options.context, self.options.batch
        self._check_context()
        weights = self.points.at(1, min(context, _SHORT)).weight_bytes
        self._check_weights(weights)
        one, half = self.points.at(1, context), self.points.at(1, _half(context))
        point, shorter = self.points.at(batch, context), self.points.at(batch, _half(context))
        tokens = context - _half(context) or context  # the shortest context has no half
        peak = self._peak(batch, context)
        return ServingEstimate(
            model=type(self.model).__name__,
            device=self.target.name,
            dtype=self._dtype_name(),
            mode=self.mode,
            context=context,
            batch=batch,
            tensor=options.tensor,
            cache_layers=one.cache.layers,
            cache_bytes=one.cache.nbytes,
            cache_bytes_per_token=(one.cache.nbytes - (half.cache.nbytes if half is not one else 0)) / tokens,
            weight_bytes=weights,
            workspace_bytes=peak - weights - point.cache.held_bytes,
            peak_bytes=peak,
            memory_bytes=self.memory,
            max_context=self._max_context,
            max_context_limited_by=self._max_context_limited_by(),
            max_batch=self._max_batch,
            prefill_ms=1e3 * one.prefill.seconds,
            decode_ms=1e3 * point.decode.seconds,
            decode_ms_per_token=1e3 * (point.decode.seconds - shorter.decode.seconds) / tokens,
            prefill_limited_by=one.prefill.limited_by,
            decode_limited_by=point.decode.limited_by,
            collective_ms=1e3 * point.decode.collective_seconds,
            throughput=self._throughput(),
            source=self._source(),
            typical_error=self._error(),
            notes=self._notes(),
            weights=options.weights,
            prices=self._server.prices,
        )

    def _check_context(self) -> None:
        """Raise ``InputError`` if the model does not accept the context; says which it accepts."""
        context = self.options.context
        reason = self._refusal(context)
        if reason is None:
            return
        longest = largest_fitting(lambda tokens: self._refused(tokens + 1), 0, 1, context - 1)
        if not longest:
            raise reason
        raise InputError(
            f"context={context} is beyond the {grouped(longest + 1)} tokens that {type(self.model).__name__} accepts; "
            f"pass less ({reason})"
        )

    def _refusal(self, context: int) -> InputError | None:
        """Return the error of a request with this context, None if it runs."""
        try:
            self.points.at(1, context)
        except InputError as error:
            return error
        return None

    def _refused(self, context: int) -> int | None:
        """Return None for a context that the model refuses, else 0."""
        return 0 if self._refusal(context) is None else None

    def _check_weights(self, weights: int) -> None:
        if weights <= self.memory:
            return
        ranks = self.options.tensor
        while weights * self.options.tensor > ranks * self.memory:
            ranks *= 2
        have = f"{scaled(self.memory, 'B')} of {self.target.name}"
        raise InputError(
            f"the weights take {scaled(weights, 'B')} in {self.options.weights or self._dtype_name()}, more than the "
            f"{have}: pass tensor={ranks}, a smaller dtype, weights='int4', or a device with more memory"
        )

    def _peak(self, batch: int, context: int) -> int:
        """Return the most bytes alive: one request is prefilled while all others wait with their caches."""
        one = self.points.at(1, context)
        prefilling = one.prefill_peak + (batch - 1) * one.cache.held_bytes
        # Requests hold tensors of their own, so a decode step grows at most with the batch, and often need not be run.
        if one.weight_bytes + batch * (one.decode_peak - one.weight_bytes) <= prefilling:
            return prefilling
        return max(prefilling, self.points.at(batch, context).decode_peak)

    @cached_property
    def _max_context(self) -> int:
        """Return the longest context of at least two tokens that fits; 0 if there is none."""
        batch = self.options.batch

        def peak(tokens: int) -> int | None:
            return self._peak(batch, tokens + 1) if self._refusal(tokens + 1) is None else None

        longest = largest_fitting(peak, self.memory, self.options.context - 1, _LONGEST - 1)
        return longest + 1 if longest else 0

    def _max_context_limited_by(self) -> str:
        if self._max_context >= _LONGEST:
            return "search"
        return "memory" if not self._max_context or self._refusal(self._max_context + 1) is None else "model"

    @cached_property
    def _max_batch(self) -> int:
        context = self.options.context
        return largest_fitting(
            lambda batch: self._peak(batch, context), self.memory, self.options.batch, _MOST_REQUESTS
        )

    def _throughput(self) -> tuple[Throughput, ...]:
        context = self.options.context
        usual = [batch for batch in _BATCHES if batch <= self._max_batch]
        batches = sorted({*(self.options.batches or usual), self.options.batch})
        throughputs = []
        for batch in batches:
            seconds, peak = self.points.at(batch, context).decode.seconds, self._peak(batch, context)
            throughputs.append(Throughput(batch, 1e3 * seconds, batch / seconds, peak, peak <= self.memory))
        return tuple(throughputs)

    def _dtype(self) -> torch.dtype:
        if self.options.dtype is not None:
            return self.options.dtype
        floats = (parameter.dtype for parameter in self.model.parameters() if parameter.dtype.is_floating_point)
        return next(floats, torch.get_default_dtype())

    def _dtype_name(self) -> str:
        return str(self._dtype()).removeprefix("torch.")

    def _source(self) -> str:
        model = self.target.model
        return f"kernel table of {self.target.name}" if model is None else f"fit: {model.fit}"

    def _error(self) -> float:
        return TABLE_ERROR if self.target.model is None else self.target.model.typical_error

    def _notes(self) -> tuple[str, ...]:
        notes = []
        if self.points.extrapolated_from is not None:
            longest = grouped(self.points.extrapolated_from)
            notes.append(
                f"Prompts of more than {longest} tokens are extrapolated: the forward works through the tokens one "
                "after the other"
            )
        if self._max_context_limited_by() == "model":
            refusal = self._refusal(self._max_context + 1)
            notes.append(f"Contexts of more than {grouped(self._max_context)} tokens are not accepted: {refusal}")
        if self._dtype().itemsize == 1:
            notes.append(
                f"Weights, hidden states and cache in {self._dtype_name()}, as a server with scaled products keeps "
                "them: PyTorch's own products of such tensors need scales; scales are not counted"
            )
        if self.options.cache_dtype is not None:
            name = str(self.options.cache_dtype).removeprefix("torch.")
            notes.append(f"What attention reads of caches is kept in {name}; scales are not counted")
        if self.request.left_out:
            notes.append(f"Requests have tokens only; left out: {', '.join(self.request.left_out)}")
        return tuple(notes)

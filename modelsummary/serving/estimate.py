"""Predict what serving a model takes on a device: memory, times, and what fits."""

from __future__ import annotations

from functools import cached_property

import torch

from modelsummary.capture.live import LiveModel
from modelsummary.capture.observe import check_initialized
from modelsummary.capture.run import no_collection
from modelsummary.devices.device_spec import DeviceSpec
from modelsummary.errors import InputError
from modelsummary.latency.predict import TABLE_ERROR
from modelsummary.layer_info import LayerInfo
from modelsummary.serving.fit import largest_fitting
from modelsummary.serving.report import ServingEstimate, Throughput
from modelsummary.serving.run import Points
from modelsummary.serving.server import MOST_REQUESTS, Server, ServingOptions, calibrate
from modelsummary.units import grouped, scaled

__all__ = ["estimate_serving"]

_SHORT = 64  # tokens of the run that tells the bytes of the weights
_LONGEST = 2**24  # tokens of the longest context that is tried
_BATCHES = (1, 4, 16, 64, 256)


@no_collection()
def estimate_serving(
    live: LiveModel, root: LayerInfo, device: DeviceSpec | torch.device | str | None, options: ServingOptions
) -> ServingEstimate:
    """Return what serving takes, as ``Statistics.serving`` says.

    Raises:
        InputError: an argument is unusable, the forward returns no cache or refuses the context, or the weights alone
            do not fit.
    """
    check_initialized(live)
    if options.calibrate:
        calibrate(live, device, options, {1, options.batch}, {options.context, _half(options.context)})
    server = Server(live, root, device, options)
    with server.points() as points:
        return _Serving(points, server).estimate()


def _half(context: int) -> int:
    return max(context // 2, 2)


class _Serving:
    """The figures of one estimate under construction."""

    def __init__(self, points: Points, server: Server) -> None:
        self.model, self.points, self._server = server.live.model, points, server
        self.request, self.target, self.mode = server.request, server.target, server.mode
        self.memory, self.options = server.memory, server.options

    def estimate(self) -> ServingEstimate:
        """Return the estimate."""
        options, context, batch = self.options, self.options.context, self.options.batch
        self._check_context()
        weights = self.points.decode(1, min(context, _SHORT)).weight_bytes
        self._check_weights(weights)
        one, half = self.points.decode(1, context), self.points.decode(1, _half(context))
        decode, shorter = self.points.decode(batch, context), self.points.decode(batch, _half(context))
        prefill = self.points.prefill(1, context).timed
        tokens = context - _half(context) or context  # the shortest context has no half
        peak = self._peak(batch, context)
        return ServingEstimate(
            model=type(self.model).__name__,
            device=self.target.name,
            dtype=self._server.dtype_name,
            mode=self.mode,
            context=context,
            batch=batch,
            tensor=options.tensor,
            cache_layers=one.cache.layers,
            cache_bytes=one.cache.nbytes,
            cache_bytes_per_token=(one.cache.nbytes - (half.cache.nbytes if half is not one else 0)) / tokens,
            weight_bytes=weights,
            workspace_bytes=peak - weights - decode.cache.held_bytes,
            peak_bytes=peak,
            memory_bytes=self.memory,
            max_context=self._max_context,
            max_context_limited_by=self._max_context_limited_by(),
            max_batch=self._max_batch,
            prefill_ms=1e3 * prefill.seconds,
            decode_ms=1e3 * decode.seconds,
            decode_ms_per_token=1e3 * (decode.seconds - shorter.seconds) / tokens,
            prefill_limited_by=prefill.limited_by,
            decode_limited_by=decode.timed.limited_by,
            collective_ms=1e3 * decode.timed.collective_seconds,
            throughput=self._throughput(),
            source=self._source(),
            typical_error=self._error(),
            notes=self._notes(),
            weights=options.weights,
            expert=options.expert,
            server=self._server,
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
            self.points.decode(1, context)
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
        fewer = "" if self.options.weights or self.target.model is None else ", weights='int4'"
        raise InputError(
            f"the weights take {scaled(weights, 'B')} in {self.options.weights or self._server.dtype_name}, more than "
            f"the {have}: pass tensor={ranks}, a smaller dtype{fewer}, or a device with more memory"
        )

    def _peak(self, batch: int, context: int) -> int:
        """Return the most bytes alive: one request is prefilled while all others wait with their caches."""
        one = self.points.decode(1, context)
        prefilling = self.points.prefill(1, context).peak_bytes + (batch - 1) * one.cache.held_bytes
        # Requests hold tensors of their own, so a decode step grows at most with the batch, and often need not be run.
        if one.weight_bytes + batch * (one.peak_bytes - one.weight_bytes) <= prefilling:
            return prefilling
        return max(prefilling, self.points.decode(batch, context).peak_bytes)

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
        return largest_fitting(lambda batch: self._peak(batch, context), self.memory, self.options.batch, MOST_REQUESTS)

    def _throughput(self) -> tuple[Throughput, ...]:
        context = self.options.context
        usual = [batch for batch in _BATCHES if batch <= self._max_batch]
        batches = sorted({*(self.options.batches or usual), self.options.batch})
        throughputs = []
        for batch in batches:
            seconds, peak = self.points.decode(batch, context).seconds, self._peak(batch, context)
            throughputs.append(Throughput(batch, 1e3 * seconds, batch / seconds, peak, peak <= self.memory))
        return tuple(throughputs)

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
        if self._server.dtype.itemsize == 1:
            notes.append(
                f"Weights, hidden states and cache in {self._server.dtype_name}, as a server with scaled products "
                "keeps them: PyTorch's own products of such tensors need scales; scales are not counted"
            )
        if self.options.cache_dtype is not None:
            name = str(self.options.cache_dtype).removeprefix("torch.")
            notes.append(f"What attention reads of caches is kept in {name}; scales are not counted")
        if self.request.left_out:
            notes.append(f"Requests have tokens only; left out: {', '.join(self.request.left_out)}")
        return tuple(notes)

"""The figures of a batch of requests: cache, memory and time, run on shapes once for each batch and context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from modelsummary.errors import InputError
from modelsummary.serving.cache import CacheBytes
from modelsummary.serving.run import RequestRun
from modelsummary.serving.times import PhaseTime

__all__ = ["Point", "Points"]

_MOST_OPERATORS = 10_000  # of the prompt of one run; about a second
_PROBES = (64, 128, 256)  # multiples of the chunks in which linear attention works
_FEW = _PROBES[-1]  # tokens that are always run
_ODDS = 0.5  # more operators of a longer prompt, as a fraction of the operators of a token: masks, but no loop


class Point(NamedTuple):
    """The figures of a batch of requests whose caches hold ``context`` tokens.

    Attributes:
        cache: the bytes of the cache of all requests.
        weight_bytes: bytes of parameters and buffers.
        prefill_peak, decode_peak: the most bytes alive in the forward of the prompts, and of one further token.
        prefill, decode: the times of these forwards.
    """

    cache: CacheBytes
    weight_bytes: int
    prefill_peak: int
    decode_peak: int
    prefill: PhaseTime
    decode: PhaseTime


class Points:
    """Points that are run when they are first asked for.

    A forward that works through its tokens one by one, or in chunks, has more operators for longer prompts. If a run
    would have too many, its figures follow the line through two shorter runs.

    Args:
        run: runs a batch of requests of a context on shapes.
        time: returns the times of prefill and decode of a run.
        folded: points of versions of the model with few of its equal blocks, each with its factor; empty: all blocks
            run.
        fold_error: the largest difference between the times of few blocks and of all blocks, as a fraction.

    Attributes:
        extrapolated_from: the longest context that was run if others were extrapolated, else None.
    """

    def __init__(
        self,
        run: Callable[[int, int], RequestRun],
        time: Callable[[RequestRun], tuple[PhaseTime, PhaseTime]],
        folded: Sequence[tuple[Points, float]] = (),
        fold_error: float = 0.0,
    ) -> None:
        self._run, self._time, self._folded, self.fold_error = run, time, folded, fold_error
        self._points: dict[tuple[int, int], Point] = {}
        self._n_operators: dict[int, tuple[int, int]] = {}  # context -> operators of a prompt, and of a token
        self._per_token = 0.0
        self.extrapolated_from: int | None = None

    def at(self, batch: int, context: int) -> Point:
        """Return the point of ``batch`` requests with ``context`` tokens each."""
        key = batch, context
        if key not in self._points:
            longest = self._longest(context)
            self._points[key] = self._measured(*key) if context <= longest else self._on_line(*key, longest)
        return self._points[key]

    def timed(self, batch: int, context: int) -> Point:
        """Return a point of which the times, the cache and the weights count: few of equal blocks tell them.

        The highest peak may be of another part of a model with few blocks, so ``at`` tells the peaks.
        """
        if not self._folded:
            return self.at(batch, context)
        points, factors = zip(*self._folded, strict=True)
        return _sum([point.at(batch, context) for point in points], factors)

    def workspace(self, batch: int, context: int) -> int:
        """Return the most bytes that prompts hold besides weights and the caches after them.

        A block that repeats takes as much as the one before it, while the caches grow, so few blocks tell it, too: the
        last repetition runs. The part of a block that has more workspace before the caches are full counts more.
        """
        points = self._folded[0][0] if self._folded else self
        point = points.at(batch, context)
        return max(point.prefill_peak - point.weight_bytes - point.cache.held_bytes, 0)

    def difference(self, context: int) -> float:
        """Return the difference of few blocks from all in the times of a request; infinite if bytes differ, too."""
        whole = self.at(1, context)
        try:
            few = self.timed(1, context)
        except InputError:  # such as a block that does not return a tensor of the size that it takes
            return inf
        if (few.cache.nbytes, few.weight_bytes) != (whole.cache.nbytes, whole.weight_bytes):
            return inf
        phases = ((few.prefill, whole.prefill), (few.decode, whole.decode))
        return max(abs(one.seconds / all_.seconds - 1) for one, all_ in phases)

    def _measured(self, batch: int, context: int) -> Point:
        run = self._run(batch, context)
        self._n_operators[context] = len(run.prefill.operators), len(run.decode.operators)
        decode = run.decode
        return Point(decode.cache, run.weight_bytes, run.prefill.peak_bytes, decode.peak_bytes, *self._time(run))

    def _longest(self, context: int) -> int:
        """Return the longest context that may be run, a multiple of the chunks of linear attention."""
        if context <= _FEW:
            return context
        self._per_token = self._per_token or self._growth()
        if self._per_token * context <= _MOST_OPERATORS:
            return context
        return max(_FEW, int(_MOST_OPERATORS / self._per_token) // _FEW * _FEW)

    def _growth(self) -> float:
        """Return the operators that a prompt has more for each of its tokens, 0 as long as no run shows any.

        Masks and windows add operators once. Prompts that grow with each probe work through tokens or chunks; chunks
        that are longer than the probes show in the longest run, by as many operators as half a token has.
        """
        few, more = (self._operators(probe)[0] for probe in _PROBES[:2])
        if more > few:
            more_again, tokens = self._operators(_PROBES[2])[0] - more, _PROBES[2] - _PROBES[1]
            if more_again > 0:
                return more_again / tokens
        longest = max(self._n_operators)
        many, of_one = self._n_operators[longest]
        return (many - more) / (longest - _PROBES[1]) if many - more > _ODDS * of_one else 0.0

    def _operators(self, context: int) -> tuple[int, int]:
        """Return the numbers of operators of a prompt and of a single token."""
        self.at(1, context)
        return self._n_operators[context]

    def _on_line(self, batch: int, context: int, longest: int) -> Point:
        self.extrapolated_from = longest
        part = (context - longest) / (longest - longest // 2)
        return _sum([self.at(batch, longest // 2), self.at(batch, longest)], [-part, 1 + part])


def _sum(points: Sequence[Point], factors: Sequence[float]) -> Point:
    """Return the point whose figures are the sums of these, each multiplied by its factor; the last tells the rest."""

    def of(figure: Callable[[Point], float]) -> float:
        return sum(factor * figure(point) for factor, point in zip(factors, points, strict=True))

    def time(phase: Callable[[Point], PhaseTime]) -> PhaseTime:
        return phase(last)._replace(
            seconds=of(lambda point: phase(point).seconds),
            collective_seconds=of(lambda point: phase(point).collective_seconds),
        )

    last = points[-1]
    return Point(
        last.cache._replace(
            nbytes=round(of(lambda point: point.cache.nbytes)),
            held_bytes=round(of(lambda point: point.cache.held_bytes)),
        ),
        round(of(lambda point: point.weight_bytes)),
        round(of(lambda point: point.prefill_peak)),
        round(of(lambda point: point.decode_peak)),
        time(lambda point: point.prefill),
        time(lambda point: point.decode),
    )

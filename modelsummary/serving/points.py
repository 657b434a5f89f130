"""The phases of a batch of requests: cache, memory and time, run on shapes once for each batch and context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from modelsummary.serving.run import Phase

__all__ = ["Points"]

_MOST_OPERATORS = 10_000  # of the prompt of one run; about a second
_PROBES = (64, 128, 256)  # multiples of the chunks in which linear attention works
_FEW = _PROBES[-1]  # tokens that are always run
_ODDS = 0.5  # more operators of a longer prompt, as a fraction of the operators of a token: masks, but no loop


class Points:
    """Phases that are run when they are first asked for.

    A forward that works through its tokens one by one, or in chunks, has more operators for longer prompts. If a run
    would have too many, its figures follow the line through two shorter runs.

    Args:
        run: runs a batch of requests of a context on shapes, and tells their prefill, and if asked their decode.
        error: the largest difference between the times of few equal blocks, which run, and of all, as a fraction.

    Attributes:
        extrapolated_from: the longest context that was run if others were extrapolated, else None.
    """

    def __init__(self, run: Callable[[int, int, bool], list[Phase]], error: float = 0.0) -> None:
        self._run, self.error = run, error
        self._phases: dict[tuple[int, int], list[Phase]] = {}
        self._per_token = 0.0
        self.extrapolated_from: int | None = None

    def prefill(self, batch: int, context: int) -> Phase:
        """Return the forward of ``batch`` prompts of ``context - 1`` tokens."""
        return self._of(batch, context, decodes=False)[0]

    def decode(self, batch: int, context: int) -> Phase:
        """Return the forward of the last of ``context`` tokens of ``batch`` requests."""
        return self._of(batch, context, decodes=True)[1]

    def _of(self, batch: int, context: int, *, decodes: bool) -> list[Phase]:
        key = batch, context
        if len(self._phases.get(key, ())) < 1 + decodes:
            longest = self._longest(context)
            if context <= longest:
                self._phases[key] = self._run(batch, context, decodes)
            else:
                self._phases[key] = self._on_line(batch, context, longest, decodes=decodes)
        return self._phases[key]

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
        few, more = map(self._operators, _PROBES[:2])
        if more > few:
            more_again, tokens = self._operators(_PROBES[2]) - more, _PROBES[2] - _PROBES[1]
            if more_again > 0:
                return more_again / tokens
        batch, longest = max(self._phases, key=lambda key: key[1])
        many, of_one = (len(phase.operators) for phase in (self.prefill(batch, longest), self.decode(1, _PROBES[0])))
        return (many - more) / (longest - _PROBES[1]) if many - more > _ODDS * of_one else 0.0

    def _operators(self, context: int) -> int:
        """Return the number of operators of a prompt."""
        return len(self.prefill(1, context).operators)

    def _on_line(self, batch: int, context: int, longest: int, *, decodes: bool) -> list[Phase]:
        self.extrapolated_from = longest
        part = (context - longest) / (longest - longest // 2)
        lower, upper = (self._of(batch, tokens, decodes=decodes) for tokens in (longest // 2, longest))
        return [_between(*pair, part) for pair in zip(lower, upper, strict=False)]


def _between(lower: Phase, upper: Phase, part: float) -> Phase:
    """Return the phase on the line through two, at a part of their distance behind the upper one."""

    def of(low: float, high: float) -> float:
        return high + part * (high - low)

    early, late = lower.timed, upper.timed
    return replace(
        upper,
        cache=upper.cache._replace(
            nbytes=round(of(lower.cache.nbytes, upper.cache.nbytes)),
            held_bytes=round(of(lower.cache.held_bytes, upper.cache.held_bytes)),
        ),
        workspace_bytes=round(of(lower.workspace_bytes, upper.workspace_bytes)),
        time=late._replace(
            seconds=of(early.seconds, late.seconds),
            collective_seconds=of(early.collective_seconds, late.collective_seconds),
        ),
    )

"""``StepPrices``: the seconds of a step of a server, from few forwards on shapes.

No forward computes a chunk of one prompt, the end of another one and tokens of twenty requests together, but its parts
add up, as each operator works either on tokens or on what a request has kept:

- products, norms and element-wise operators depend on the number of tokens: forwards of short prompts;
- the logits depend on the number of results: one token of several requests, beyond as many tokens of prompts;
- the attention of decoding requests reads their caches: it depends on the bytes in them, wherever they are;
- the attention of a chunk, or its scan of a state, is the difference between two prompts: with the chunk, and without
  it. Several chunks keep a device busier than one: the longest takes its time alone, and each other one what it adds
  to eight prompts that run together. A chunk also reads the cache of the tokens before it once.

Each part is a curve through forwards that ran, linear in between; a curve gets more points until the next one is
where it was expected.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from copy import copy
from itertools import accumulate, pairwise
from math import ceil, isqrt
from operator import sub
from typing import NamedTuple

from modelsummary.errors import InputError
from modelsummary.serving.run import Points
from modelsummary.serving.scheduler import Batch, Engine, Pages, StepPrice
from modelsummary.units import scaled

__all__ = ["Curve", "CurvePoint", "StepPrices"]

_TOLERANCE = 0.02  # of a forward: a curve whose next point is nearer to it gets no more
_NEAREST = 1.25  # ratio of neighbours between which no point is added
_VECTOR = 8  # elements of a load of 16 bytes: engines pad to it, and products of scores of other sizes take up to twice
_PROMPT = 64  # tokens of a short prompt: its attention and its logits count little
_SHORTEST = 2  # tokens of the shortest context
_MOST_CACHED = 2**18  # tokens in caches beyond which attention takes the time of their bytes
_TOGETHER = 8  # prompts that tell how much time each adds to the others
_CHECKED = (3, 7)  # requests of the forwards that check the sum of the parts


def _aligned(size: int) -> int:
    """Return the largest size up to this one that fills whole vectors of a kernel: a power of two, or multiple of 8.

    >>> [_aligned(size) for size in (1, 3, 7, 8, 63, 1000)]
    [1, 2, 4, 8, 56, 1000]
    """
    return size // _VECTOR * _VECTOR or 1 << (size.bit_length() - 1)


class CurvePoint(NamedTuple):
    """A point of a curve.

    Attributes:
        x, y: the point.
        whole: what an error of ``y`` is relative to.
    """

    x: float
    y: float
    whole: float


class Curve:
    """A quantity that was evaluated at few points, and is linear in between and beyond.

    Attributes:
        nodes: the points, ascending.
        error: the largest difference at a point from the line through its neighbours before it was added, relative to
            ``whole``, among points after which no further ones were added.

    >>> curve = Curve(lambda n: CurvePoint(n, max(100, n), max(100, n)), 1, 10_000)
    >>> curve.at(50), curve.at(5000), len(curve.nodes), curve.error < 0.05
    (100.0, 5000.0, 5, True)
    """

    def __init__(self, node: Callable[[int], CurvePoint], least: int, most: int) -> None:
        by_size = {n: node(n) for n in sorted({least, max(least, most)})}
        pending, self.error = [(least, most)] if most > least else [], 0.0
        while pending:
            low, high = pending.pop()
            middle = _aligned(isqrt(low * high))
            if not low < middle < high:
                continue
            by_size[middle] = node(middle)
            line = Curve._line(by_size[low], by_size[high], by_size[middle].x)
            error = abs(line - by_size[middle].y) / by_size[middle].whole
            if error > _TOLERANCE and high > _NEAREST * low:
                pending += [(low, middle), (middle, high)]
            else:
                self.error = max(self.error, error)
        by_x = {point.x: point for point in by_size.values()}
        self.nodes = [by_x[x] for x in sorted(by_x)]
        self._xs = [point.x for point in self.nodes]

    @staticmethod
    def _line(low: CurvePoint, high: CurvePoint, x: float) -> float:
        if high.x == low.x:
            return low.y
        return low.y + (high.y - low.y) * (x - low.x) / (high.x - low.x)

    def at(self, x: float) -> float:
        """Return the quantity at ``x``."""
        if len(self.nodes) == 1:
            return float(self.nodes[0].y)
        index = min(max(bisect_left(self._xs, x), 1), len(self.nodes) - 1)
        return float(self._line(self.nodes[index - 1], self.nodes[index], x))


class StepPrices:
    """The prices of an engine's steps, and the pages of its cache.

    Args:
        points: runs requests on shapes.
        context: longest context in tokens.
        engine: the largest steps.

    Attributes:
        pages: the pages of the cache, see ``paged``.
        page_bytes: bytes of a page on one device; of a cache that does not grow, bytes of a request.
        weight_bytes: bytes of parameters and buffers on one device.
        error: the largest difference between a sum of prices and a forward that was run to check it, as a fraction: of
            several equal requests, of points of the curves before they were added, and of few blocks from all.
    """

    pages: Pages
    page_bytes: float

    def __init__(self, points: Points, context: int, engine: Engine) -> None:
        self._points, self._context = points, context
        most_results = engine.max_requests * (1 + engine.draft_tokens)
        most_tokens = max(engine.token_budget or context, most_results, context - 1)
        most_cached = min(engine.max_requests * context, _MOST_CACHED)
        self._limits: dict[float, str] = {}
        self._tokens = Curve(self._of_tokens, 1, max(most_tokens, _TOGETHER * (context - 1)))
        self._results = Curve(self._of_results, 1, most_results)
        self._bytes = Curve(self._of_bytes, _SHORTEST, context)
        self._cached = Curve(self._of_cached, min(_SHORTEST + 1, context), most_cached)
        self._alone = Curve(self._of_prompt, 1, _aligned(context - 1))
        self._added = Curve(self._of_prompts, 1, _aligned(context - 1))
        self._grown = [self._bytes.at(max(tokens, _SHORTEST)) - self._bytes.nodes[0].y for tokens in range(context + 1)]
        self.error = self._largest_error(engine.max_requests, most_tokens)
        self.weight_bytes = self._points.decode(1, _SHORTEST).weight_bytes

    @property
    def token_nodes(self) -> list[CurvePoint]:
        """The price of what depends on the number of tokens, at the numbers that ran."""
        return self._tokens.nodes

    def paged(self, engine: Engine, memory_bytes: int) -> StepPrices:
        """Return the prices with the pages of an engine whose steps are at most as large, while the points can run.

        Raises:
            InputError: weights and workspace leave no page.
        """
        prices = copy(self)
        prices.page_bytes = self._bytes_of_page(engine.page_tokens)
        prices.pages = prices._paged(engine, memory_bytes, engine.max_requests * (1 + engine.draft_tokens))
        return prices

    # ------------------------------------------------------------------------------------------ the parts

    def _of_tokens(self, tokens: int) -> CurvePoint:
        length = min(tokens, _PROMPT, self._context - 1)
        prompts = max(tokens // length, 1)
        time = self._points.prefill(prompts, length + 1).timed
        self._limits[prompts * length] = time.limited_by
        return CurvePoint(prompts * length, time.seconds, time.seconds)

    def _of_results(self, results: int) -> CurvePoint:
        seconds = self._points.decode(results, _SHORTEST).seconds
        return CurvePoint(results, seconds - self._tokens.at(results), seconds)

    def _of_bytes(self, tokens: int) -> CurvePoint:
        nbytes = self._points.decode(1, tokens).cache.nbytes
        return CurvePoint(tokens, nbytes, nbytes or 1)

    def _of_cached(self, tokens: int) -> CurvePoint:
        context = min(tokens, self._context)
        requests = tokens // context
        long, short = (self._points.decode(requests, length) for length in (context, _SHORTEST))
        return CurvePoint(long.cache.nbytes - short.cache.nbytes, long.seconds - short.seconds, long.seconds)

    def _of_prompt(self, tokens: int) -> CurvePoint:
        seconds = self._points.prefill(1, tokens + 1).seconds
        return CurvePoint(tokens, seconds - self._tokens.at(tokens), seconds)

    def _of_prompts(self, tokens: int) -> CurvePoint:
        seconds = self._points.prefill(_TOGETHER, tokens + 1).seconds
        added = seconds - self._tokens.at(_TOGETHER * tokens) - self._alone.at(tokens)
        return CurvePoint(tokens, added / (_TOGETHER - 1), seconds / _TOGETHER)

    # ------------------------------------------------------------------------------------------ their sum

    def price(self, batch: Batch) -> StepPrice:
        """Return the time of a step."""
        results = self._results.at(max(batch.results, 1))
        # tokens alone may take less than as many of prompts, as a state that steps instead of a scan; chunks do not
        tokens = self._tokens.at(batch.tokens) + (max(results, 0.0) if batch.chunks else results)
        cached = self._cached.at(sum(map(self._grown.__getitem__, batch.contexts))) if batch.contexts else 0.0
        alone, added = (
            [curve.at(after) - (curve.at(before) if before else 0.0) for before, after in batch.chunks]
            for curve in (self._alone, self._added)
        )
        chunks = max(map(sub, alone, added), default=0.0) + sum(added)
        parts = {self._limit(batch.tokens): tokens}
        for limit, seconds in (("memory", cached), ("compute", chunks)):
            parts[limit] = parts.get(limit, 0.0) + seconds
        return StepPrice(tokens + cached + chunks, max(parts, key=parts.__getitem__))

    def _limit(self, tokens: int) -> str:
        """Return what limits the forward of this many tokens, as of the nearest that ran."""
        return self._limits[min(self._limits, key=lambda x: abs(x - tokens))]

    def _largest_error(self, most_requests: int, most_tokens: int) -> float:
        """Return the largest difference from forwards of several equal requests, and of points of the curves."""
        curves = (self._tokens, self._results, self._cached, self._alone, self._added)
        errors = [self._points.error, *(curve.error for curve in curves)]
        for number in _CHECKED:
            requests, context = min(number, most_requests), max(self._context * 2 // number, _SHORTEST)
            length = _aligned(max(min(context - 1, most_tokens // requests), 1))
            prompts = Batch(requests * length, requests, (), [(0, length)] * requests)
            decoded = Batch(requests, requests, [context] * requests, ())
            for batch, phase in (
                (prompts, self._points.prefill(requests, length + 1)),
                (decoded, self._points.decode(requests, context)),
            ):
                errors.append(abs(self.price(batch).seconds / phase.seconds - 1))
        return max(errors)

    # ------------------------------------------------------------------------------------------ pages

    def _bytes_of_page(self, page_tokens: int) -> float:
        nodes = self._bytes.nodes
        slopes = [(high.y - low.y) / (high.x - low.x) for low, high in pairwise(nodes)]
        return page_tokens * max(slopes, default=nodes[0].y / _SHORTEST) or nodes[0].y or 1.0

    def _workspace(self, engine: Engine, most_results: int) -> int:
        """Return the workspace of steps with as many tokens as the budget: of the longest prompts, and of the most.

        A block that repeats takes as much as the one before it, while the caches grow, so few blocks tell it, too: the
        last repetition runs. The part of a block that has more workspace before the caches are full counts more.
        """
        longest = self._context - 1
        budget = engine.token_budget or max(longest, most_results)
        return max(
            max(self._points.prefill(requests, min(ceil(budget / requests), longest) + 1).workspace_bytes, 0)
            for requests in {min(ceil(budget / longest), engine.max_requests), min(budget, most_results)}
        )

    def _paged(self, engine: Engine, memory_bytes: int, most_results: int) -> Pages:
        """Return the pages that fit beside weights and the workspace of a step."""
        weights, workspace = self.weight_bytes, self._workspace(engine, most_results)
        left = engine.memory_share * memory_bytes - weights - workspace
        if left < self.page_bytes:
            raise InputError(
                f"memory_share={engine.memory_share} of {scaled(memory_bytes, 'B')} has no room for a page of "
                f"{scaled(self.page_bytes, 'B')}: weights take {scaled(weights, 'B')}, the workspace of a step "
                f"{scaled(workspace, 'B')}; pass a larger share, a smaller token_budget or max_requests, tensor=, or "
                "a device with more memory"
            )
        held = [0, *(ceil(self._bytes.at(tokens) / self.page_bytes - 1e-6) for tokens in range(1, self._context + 1))]
        return Pages(int(left // self.page_bytes), list(accumulate(held, max)))

"""``Engine``: how a server batches requests, and its loop, step by step, on given prices.

Each step computes some tokens of some requests. Requests that run are served in the order of their arrival: one token
of each that decodes, and a chunk of a prompt up to the token budget. What is left of the budget admits requests that
wait, first come first served, as far as pages of the cache are free. If a running request needs a page and none is
free, the youngest loses its pages and computes its tokens again later (recomputation). This is the policy of continuous
batching with paged caches (Kwon et al. 2023, https://arxiv.org/abs/2309.06180) and chunked prefills (Agrawal et al.
2024, https://arxiv.org/abs/2403.02310).

Nothing here knows a model: prices and pages are numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from modelsummary.errors import InputError, check_integers, is_number
from modelsummary.keywords import takes_keywords
from modelsummary.serving.load import Load, LoadRequest
from modelsummary.units import grouped

__all__ = [
    "NO_LIMITS",
    "Batch",
    "Engine",
    "Limits",
    "Pages",
    "ServedRequest",
    "StepPrice",
    "Timeline",
    "check_longest",
    "serve",
]


@takes_keywords()
@dataclass(frozen=True)
class Engine:
    """How a server batches requests; the defaults are usual ones.

    Attributes:
        page_tokens: tokens of a page of the cache.
        memory_share: fraction of the device's memory that weights, workspace and pages take.
        token_budget: tokens of a step; longer prompts are computed in chunks. None: steps compute either whole prompts,
            of requests that wait, together as many tokens as the longest context; or one token of each running request.
        max_requests: largest number of requests that run together.
        watermark: fraction of the pages that stays free when a request is admitted while others run.
        overhead_ms: milliseconds that each step takes besides the forward: scheduling, sampling, detokenisation.
        draft_tokens: tokens that a draft proposes for each decoding request in each step (speculative decoding).
        acceptance: probability that the model accepts a proposed token after the ones before it.
        draft_ms: milliseconds of the draft in a step in which requests decode.

    Raises:
        InputError: a value is unusable.

    >>> Engine(max_requests=64).token_budget
    2048
    """

    page_tokens: int = 16
    memory_share: float = 0.9
    token_budget: int | None = 2048
    max_requests: int = 256
    watermark: float = 0.0
    overhead_ms: float = 0.0
    draft_tokens: int = 0
    acceptance: float = 0.0
    draft_ms: float = 0.0

    def __post_init__(self) -> None:
        check_integers(page_tokens=self.page_tokens, max_requests=self.max_requests)
        check_integers(0, draft_tokens=self.draft_tokens)
        if self.token_budget is not None:
            check_integers(token_budget=self.token_budget)
        for name, least, most in (("memory_share", 0, 1), ("watermark", 0, 1), ("acceptance", 0, 1)):
            value = getattr(self, name)
            if not is_number(value) or not least <= value <= most:
                raise InputError(f"{name} must be a number from {least} to {most}, got {value!r:.80}")
        for name in ("overhead_ms", "draft_ms"):
            value = getattr(self, name)
            if not is_number(value) or value < 0:
                raise InputError(f"{name} must be a number >= 0, got {value!r:.80}")
        if not self.draft_tokens and (self.acceptance or self.draft_ms):
            raise InputError(
                f"acceptance={self.acceptance} and draft_ms={self.draft_ms} are about drafts, but draft_tokens=0; pass "
                "draft_tokens= too"
            )


class Pages(NamedTuple):
    """The pages of a cache.

    Attributes:
        total: number of pages.
        held: tokens of a request, from 0 on -> pages that it holds; as long as the longest context, and one more.
    """

    total: int
    held: Sequence[int]

    @property
    def longest(self) -> int:
        """The longest context in tokens."""
        return len(self.held) - 1


class Batch(NamedTuple):
    """The work of a step.

    Attributes:
        tokens: tokens that the step computes.
        results: requests whose next token it computes, and drafts: rows of logits.
        contexts: tokens of each cache that is read: of decoding requests with their new token, of chunks before them.
        chunks: tokens of each request with a chunk of its prompt, before and after the step.
    """

    tokens: int
    results: int
    contexts: Sequence[int]
    chunks: Sequence[tuple[int, int]]


class StepPrice(NamedTuple):
    """The seconds of a step and what limits it, such as ``"memory"``."""

    seconds: float
    limited_by: str


class ServedRequest(NamedTuple):
    """A request after it was served.

    Attributes:
        arrival: seconds after the start.
        prompt: tokens of the prompt.
        output: generated tokens.
        first: seconds after the start when the first token was generated.
        last: seconds after the start when the last token was generated.
        preemptions: how often it lost its pages.
    """

    arrival: float
    prompt: int
    output: int
    first: float
    last: float
    preemptions: int

    @property
    def ttft_ms(self) -> float:
        """Milliseconds from the arrival to the first token."""
        return 1e3 * (self.first - self.arrival)

    @property
    def tpot_ms(self) -> float | None:
        """Milliseconds per token after the first; None of a single token."""
        return 1e3 * (self.last - self.first) / (self.output - 1) if self.output > 1 else None

    @property
    def e2e_ms(self) -> float:
        """Milliseconds from the arrival to the last token."""
        return 1e3 * (self.last - self.arrival)


@dataclass
class Timeline:
    """What happened while a load was served.

    Attributes:
        requests: the requests in the order in which they arrived.
        seconds: time of the last step's end.
        steps: number of steps.
        seconds_by_limit: what limited steps -> their seconds: as prices say; ``"pages"`` or ``"requests"`` while a
            request waited for pages, or for one of ``max_requests`` places; ``"overhead"`` or ``"draft"`` where these
            take longer than the forward; ``"arrivals"`` while no request was there, after the first.
        request_seconds, page_seconds: requests that ran, and pages that were held, times seconds.
        most_requests, most_pages: the most of a step.
        most_tokens: the most tokens of a step.
        tokens: tokens that steps computed, also again after a preemption, and for rejected drafts.
        missed: whether serving ended before the last request, as more requests missed a limit than may.
    """

    requests: list[ServedRequest] = field(default_factory=list)
    seconds: float = 0.0
    steps: int = 0
    seconds_by_limit: dict[str, float] = field(default_factory=dict)
    request_seconds: float = 0.0
    page_seconds: float = 0.0
    most_requests: int = 0
    most_pages: int = 0
    most_tokens: int = 0
    tokens: int = 0
    missed: bool = False

    def spend(self, seconds: float, limit: str) -> None:
        """Add seconds to the ones of a limit."""
        self.seconds_by_limit[limit] = self.seconds_by_limit.get(limit, 0.0) + seconds


class Limits(NamedTuple):
    """Limits of the 95th percentiles of latencies in milliseconds; None: any.

    Attributes:
        ttft_ms: from arrival to first token.
        tpot_ms: per token after the first.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None


NO_LIMITS = Limits()


def serve(
    load: Load, engine: Engine, pages: Pages, price: Callable[[Batch], StepPrice], limits: Limits = NO_LIMITS
) -> Timeline:
    """Return what happens while an engine serves a load.

    Args:
        load: the requests.
        engine: how they are batched.
        pages: the pages of the cache.
        price: returns the time of a step.
        limits: serving ends as soon as a 95th percentile is certain to exceed its limit.

    Raises:
        InputError: the longest request exceeds the longest context, or alone takes more pages than there are.

    >>> pages = Pages(100, held=range(1001))  # a page per token
    >>> load = Load(2, prompt=10, output=3)
    >>> timeline = serve(load, Engine(), pages, lambda batch: StepPrice(0.5, "memory"))
    >>> timeline.steps, timeline.requests[1].ttft_ms, timeline.requests[1].tpot_ms, timeline.most_pages
    (3, 500.0, 500.0, 24)
    """
    check_longest(load, engine, pages)
    return _Loop(load.sample(), engine, pages, price, _in_whole_pages(load, engine), limits).run()


def _in_whole_pages(load: Load, engine: Engine) -> int:
    """Return the tokens of pages that all requests share."""
    return load.shared_tokens // engine.page_tokens * engine.page_tokens


def check_longest(load: Load, engine: Engine, pages: Pages) -> None:
    """Raise ``InputError`` if the longest request of a load cannot be served even alone."""
    shared = _in_whole_pages(load, engine)
    lengths = [request.prompt + request.output - 1 for request in load.sample()]  # the last token is not computed
    tokens = max(lengths)
    index = lengths.index(tokens)
    if tokens > pages.longest:
        raise InputError(
            f"request {index} takes {grouped(tokens)} tokens of context, more than context={pages.longest}; pass "
            f"serving({tokens}, ...) or shorter requests"
        )
    if (n_pages := pages.held[shared] + pages.held[tokens - shared]) > pages.total:
        raise InputError(
            f"request {index} takes {grouped(n_pages)} pages of the cache, more than the {grouped(pages.total)} that "
            "there are; pass shorter requests, tensor=, or a device with more memory"
        )


class _Sequence:
    """A request while it is served.

    Attributes:
        lengths: the request.
        generated: tokens that were generated.
        computed: tokens whose keys and values are in the cache.
        pages: pages that it holds.
        preemptions: how often it lost its pages.
        first: seconds of its first token.
    """

    def __init__(self, lengths: LoadRequest) -> None:
        self.lengths = lengths
        self.generated = self.computed = self.pages = self.preemptions = 0
        self.first = 0.0

    @property
    def due(self) -> int:
        """Tokens to compute until the next token is generated."""
        return self.lengths.prompt + self.generated - self.computed

    @property
    def decodes(self) -> bool:
        """Whether all but its last generated token are computed."""
        return self.generated > 0 and self.due == 1


class _Loop:
    """The state of a server."""

    def __init__(
        self,
        requests: Sequence[LoadRequest],
        engine: Engine,
        pages: Pages,
        price: Callable[[Batch], StepPrice],
        shared: int,
        limits: Limits,
    ) -> None:
        self._engine, self._pages, self._price = engine, pages, price
        self._all = [_Sequence(lengths) for lengths in requests]
        self._arriving, self._waiting = deque(self._all), deque[_Sequence]()
        self._running: list[_Sequence] = []
        self._free = pages.total - pages.held[shared]
        self._shared, self._has_shared = shared, False
        self._now = requests[0].arrival
        self._blocked = ""  # what the first of the requests that wait, waits for
        self._has_preempted = False  # in this step, which then admits nobody
        self._served: dict[int, ServedRequest] = {}
        self._accepts = Random(0)
        self._timeline = Timeline()
        self._limits, self._late, self._slow = limits, 0, 0
        self._most_late = _most_above(len(requests))
        self._most_slow = _most_above(sum(request.output > 1 for request in requests))

    def run(self) -> Timeline:
        """Serve all requests."""
        while self._arriving or self._waiting or self._running:
            while self._arriving and self._arriving[0].lengths.arrival <= self._now:
                self._waiting.append(self._arriving.popleft())
            if not self._waiting and not self._running:
                arrival = self._arriving[0].lengths.arrival
                self._timeline.spend(arrival - self._now, "arrivals")
                self._now = arrival
                continue
            scheduled = self._scheduled()
            self._step(scheduled)
            self._step_alike(scheduled)
            if self._misses_limits():
                self._timeline.missed = True
                break
        timeline = self._timeline
        timeline.seconds = self._now
        timeline.requests = [self._served[id(sequence)] for sequence in self._all if id(sequence) in self._served]
        return timeline

    def _misses_limits(self) -> bool:
        """Return True if too many requests got their tokens too late, or wait too long for the first one."""
        if self._late > self._most_late or self._slow > self._most_slow:
            return True
        fewest = self._most_late - self._late  # that wait too long; the queue is in the order of arrival
        if self._limits.ttft_ms is None or len(self._waiting) <= fewest or not self._is_late(self._waiting[fewest]):
            return False
        return sum(not sequence.generated and self._is_late(sequence) for sequence in self._waiting) > fewest

    def _is_late(self, sequence: _Sequence) -> bool:
        """Return True if a first token that comes now is later than the limit."""
        limit = self._limits.ttft_ms
        return limit is not None and 1e3 * (self._now - sequence.lengths.arrival) > limit

    # ------------------------------------------------------------------------------------------ which tokens

    def _scheduled(self) -> list[tuple[_Sequence, int]]:
        """Return the requests of the next step, each with the number of tokens that it computes."""
        self._blocked, self._has_preempted = "", False
        budget = self._engine.token_budget
        if budget is not None:
            return self._continued(budget, admits=True)
        return self._admitted(self._pages.longest, whole=True) or self._continued(None, admits=False)

    def _continued(self, budget: int | None, *, admits: bool) -> list[tuple[_Sequence, int]]:
        """Return the running requests in their order, then, unless one lost its pages, requests that waited."""
        scheduled: list[tuple[_Sequence, int]] = []
        for sequence in list(self._running):
            n_tokens = self._wanted(sequence) if budget is None else min(self._wanted(sequence), budget)
            if not n_tokens:
                break
            while not self._takes_pages(sequence, n_tokens):
                if self._preempt() is sequence:
                    return scheduled
            scheduled.append((sequence, n_tokens))
            budget = None if budget is None else budget - n_tokens
            if sequence is self._running[-1]:  # the ones after it lost their pages
                break
        if admits and budget and self._blocked != "pages":
            scheduled += self._admitted(budget, whole=False)
        return scheduled

    def _wanted(self, sequence: _Sequence) -> int:
        """Return the tokens that a running request would compute: up to its next token, and drafts behind it."""
        if not self._engine.draft_tokens or not sequence.decodes:
            return sequence.due
        return min(1 + self._engine.draft_tokens, sequence.lengths.output - sequence.generated)

    def _admitted(self, budget: int, *, whole: bool) -> list[tuple[_Sequence, int]]:
        """Admit requests that wait, and return them with the tokens that they compute."""
        scheduled: list[tuple[_Sequence, int]] = []
        while self._waiting and budget:
            sequence = self._waiting[0]
            sequence.computed = self._shared if self._has_shared else 0
            n_tokens = min(sequence.due, budget)
            if whole and n_tokens < sequence.due:
                break
            if len(self._running) == self._engine.max_requests:
                self._blocked = "requests"
                break
            reserve = self._engine.watermark * self._pages.total if self._running else 0
            if not self._takes_pages(sequence, n_tokens, reserve):
                self._blocked = "pages"
                break
            self._running.append(self._waiting.popleft())
            scheduled.append((sequence, n_tokens))
            budget -= n_tokens
        return scheduled

    def _takes_pages(self, sequence: _Sequence, n_tokens: int, reserve: float = 0) -> bool:
        """Give a request the pages for more tokens; return False if fewer than these and a reserve are free.

        Its pages are the pages of a request without the shared tokens: it has a window and a state of its own.
        """
        tokens = sequence.computed + n_tokens - self._shared
        more = self._pages.held[tokens if tokens > 0 else 0] - sequence.pages  # max() takes a tenth of a simulation
        if more <= 0:
            return True
        if more > self._free - reserve:
            return False
        sequence.pages += more
        self._free -= more
        return True

    def _preempt(self) -> _Sequence:
        """Take the pages of the youngest request, which waits again before all others, and return it."""
        sequence = self._running.pop()
        self._free += sequence.pages
        sequence.pages = sequence.computed = 0
        sequence.preemptions += 1
        self._waiting.appendleft(sequence)
        self._blocked, self._has_preempted = "pages", True
        return sequence

    # ------------------------------------------------------------------------------------------ a step

    def _step(self, scheduled: list[tuple[_Sequence, int]]) -> None:
        """Compute a step."""
        has_draft = bool(self._engine.draft_tokens) and any(sequence.decodes for sequence, _ in scheduled)
        self._spend(_batch_of(scheduled), self._pages.total - self._free, has_draft=has_draft)
        for sequence, n_tokens in scheduled:
            self._advance(sequence, n_tokens)
        self._running = [sequence for sequence in self._running if id(sequence) not in self._served]

    def _step_alike(self, scheduled: list[tuple[_Sequence, int]]) -> None:
        """Compute the steps that follow a step and are like it, as in most of the time.

        All running requests decode a token each, and none ends, begins, or needs a page that is not free. What blocks
        the requests that wait stays the same.
        """
        sequences = [sequence for sequence, _ in scheduled]
        budget = self._engine.token_budget
        if (
            self._engine.draft_tokens
            or self._has_preempted
            or sequences != self._running
            or not all(sequence.decodes for sequence in sequences)
            or (self._waiting and (not self._blocked or len(sequences) == budget))
        ):
            return
        computed, held = [sequence.computed for sequence in sequences], self._pages.held
        others = self._pages.total - self._free - sum(sequence.pages for sequence in sequences)  # the shared tokens
        steps = 0
        for step in range(1, min(sequence.lengths.output - sequence.generated for sequence in sequences)):
            contexts = [tokens + step for tokens in computed]
            n_pages = others + sum([held[max(tokens - self._shared, 0)] for tokens in contexts])
            is_met = self._arriving and self._arriving[0].lengths.arrival <= self._now
            if is_met or n_pages > self._pages.total:
                break
            self._spend(Batch(len(contexts), len(contexts), contexts, ()), n_pages, has_draft=False)
            steps = step
        for sequence in sequences if steps else ():
            self._takes_pages(sequence, steps)
            sequence.generated += steps
            sequence.computed += steps

    def _spend(self, batch: Batch, n_pages: int, *, has_draft: bool) -> None:
        """Note a step, and what it takes."""
        engine, timeline = self._engine, self._timeline
        price = self._price(batch)
        draft, overhead = 1e-3 * engine.draft_ms if has_draft else 0.0, 1e-3 * engine.overhead_ms
        seconds = price.seconds + draft + overhead
        limits = {price.limited_by: price.seconds, "draft": draft, "overhead": overhead}
        timeline.spend(seconds, self._blocked or max(limits, key=limits.__getitem__))
        timeline.request_seconds += len(self._running) * seconds
        timeline.page_seconds += n_pages * seconds
        timeline.most_requests = max(timeline.most_requests, len(self._running))
        timeline.most_pages = max(timeline.most_pages, n_pages)
        timeline.most_tokens = max(timeline.most_tokens, batch.tokens)
        timeline.tokens += batch.tokens
        timeline.steps += 1
        self._now += seconds

    def _advance(self, sequence: _Sequence, n_tokens: int) -> None:
        """Note the tokens that a request computed in the step that ends now."""
        drafts = n_tokens - sequence.due
        if drafts < 0:
            sequence.computed += n_tokens
        else:
            lengths = sequence.lengths
            if not sequence.generated:
                sequence.first = self._now
                self._late += self._is_late(sequence)
            sequence.generated += 1 + (self._accepted(drafts) if drafts else 0)
            sequence.computed = lengths.prompt + sequence.generated - 1
            if sequence.generated == lengths.output:
                self._free += sequence.pages
                served = ServedRequest(*lengths, sequence.first, self._now, sequence.preemptions)
                self._served[id(sequence)] = served
                limit = self._limits.tpot_ms
                self._slow += limit is not None and served.tpot_ms is not None and served.tpot_ms > limit
        self._has_shared |= sequence.computed >= self._shared

    def _accepted(self, drafts: int) -> int:
        """Return how many of the proposed tokens the model accepts: all before the first that it rejects."""
        return next((n for n in range(drafts) if self._accepts.random() >= self._engine.acceptance), drafts)


def _most_above(n: int) -> int:
    """Return how many of n values may exceed a limit that their 95th percentile keeps.

    The percentile is between two neighbours of the sorted values; the lower one must keep the limit.

    >>> _most_above(100)
    5
    """
    return n - 1 - 95 * (n - 1) // 100


def _batch_of(scheduled: Sequence[tuple[_Sequence, int]]) -> Batch:
    tokens = results = 0
    contexts, chunks = [], []
    for sequence, n_tokens in scheduled:
        tokens += n_tokens
        before = sequence.computed
        if sequence.decodes:
            results += n_tokens
            contexts.append(before + n_tokens)
        else:
            results += n_tokens == sequence.due
            chunks.append((before, before + n_tokens))
            contexts += [before] if before else []
    return Batch(tokens, results, contexts, chunks)

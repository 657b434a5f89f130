"""The loop of a server: schedules worked out by hand, and what no schedule may lose."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelsummary import InputError
from modelsummary.serving import Engine, Load
from modelsummary.serving.scheduler import Limits, Pages, StepPrice, _Loop, serve
from modelsummary.serving.simulation import Spread


def pages(total, size=4, longest=200):
    return Pages(total, [-(-tokens // size) for tokens in range(longest + 1)])


def a_second(batch):
    return StepPrice(1.0, "memory")


def test_ten_requests_by_hand():
    """Eight tokens per step, three requests at a time, a second per step.

    ===== ======================================================= ==================================
    until tokens of requests                                      what happens
    ===== ======================================================= ==================================
    1     0: 4 (whole), 1: 4 (whole)                              0 and 1 begin, 1 ends
    2     0: 1, 2: 4 (whole), 3: 3 of 10                          2 begins, 0 ends
    3     2: 1, 3: 7                                              3 begins
    4     2: 1, 3: 1, 4: 4; 5 waits for one of three places       4 begins, 2 and 3 end
    5     4: 1, 5: 4                                              5 begins and ends, 4 ends
    6.5   6: 4, after half a second without a request             6 begins and ends
    21    7: 8 of 20, after 13.5 seconds without a request
    22    7: 8
    23    7: 4, 8: 1, 9: 1                                        7, 8 and 9 begin, 9 ends
    24    7: 1, 8: 1                                              7 ends
    25    8: 1                                                    8 ends
    ===== ======================================================= ==================================
    """
    load = Load(
        10,
        prompt=[4, 4, 4, 10, 4, 4, 4, 20, 1, 1],
        output=[2, 1, 3, 2, 2, 1, 1, 2, 3, 1],
        arrivals=[0, 0, 0, 0, 2, 2, 5.5, 20, 20, 20],
    )
    tokens = []

    def price(batch):
        tokens.append(batch.tokens)
        return a_second(batch)

    timeline = serve(load, Engine(token_budget=8, max_requests=3), pages(100), price)
    assert tokens == [8, 8, 8, 6, 5, 4, 8, 8, 6, 2, 1]
    assert [request.first for request in timeline.requests] == [1, 1, 2, 3, 4, 5, 6.5, 23, 23, 23]
    assert [request.last for request in timeline.requests] == [2, 1, 4, 4, 5, 5, 6.5, 24, 25, 23]
    assert timeline.seconds_by_limit == {"memory": 10, "requests": 1, "arrivals": 14}
    assert (timeline.steps, timeline.seconds, timeline.most_requests, timeline.tokens) == (11, 25, 3, 64)
    # requests that run in each step: 2, 3, 2, 3, 2, 1, 1, 1, 3, 2, 1
    assert timeline.request_seconds == 21
    assert timeline.requests[7].ttft_ms == 3000
    assert timeline.requests[8].tpot_ms == 1000
    assert timeline.requests[9].tpot_ms is None
    assert timeline.requests[3].e2e_ms == 4000


def test_whole_prompts_by_hand():
    """Whole prompts of at most 200 tokens together, before any token is decoded."""
    batches = []

    def price(batch):
        batches.append((batch.tokens, batch.results, list(batch.chunks)))
        return a_second(batch)

    load = Load(3, prompt=[150, 60, 30], output=2)
    serve(load, Engine(token_budget=None), pages(100), price)
    assert batches == [(150, 1, [(0, 150)]), (90, 2, [(0, 60), (0, 30)]), (3, 3, [])]


def test_preemption_by_hand():
    """Two requests of 9 tokens, thus of 3 pages, share 4: the younger one loses its pages to the ninth token.

    Both hold two pages from their fifth to their eighth token, in the steps that end at 2 to 5. In the sixth step the
    first one takes a page of the second one and ends; the seventh computes all 4 + 5 tokens of the second one again.
    """
    timeline = serve(Load(2, prompt=4, output=6), Engine(), pages(4), a_second)
    assert [(request.first, request.last, request.preemptions) for request in timeline.requests] == [
        (1, 6, 0),
        (1, 7, 1),
    ]
    assert (timeline.tokens, timeline.most_pages) == (9 + 8 + 9, 4)
    assert timeline.page_seconds == 2 + 4 * 4 + 3 + 3
    assert timeline.seconds_by_limit == {"memory": 6, "pages": 1}


def test_watermark_holds_pages_back():
    """Two requests fit into 4 pages at once, unless half of the pages stays free for the first one."""
    load = Load(2, prompt=8, output=1)
    first, last = (serve(load, Engine(watermark=share), pages(4), a_second).seconds for share in (0.0, 0.5))
    assert (first, last) == (1, 2)


def test_shared_tokens_are_computed_and_kept_once():
    """Of 9 shared tokens, 2 pages of 4 are whole: later prompts of 10 compute 2 tokens and hold a page of their own."""
    tokens = []

    def price(batch):
        tokens.append((batch.tokens, list(batch.chunks)))
        return a_second(batch)

    load = Load(3, prompt=10, output=1, arrivals=[0, 1, 1], shared_tokens=9)
    timeline = serve(load, Engine(page_tokens=4), pages(4), price)
    assert tokens == [(10, [(0, 10)]), (4, [(8, 10), (8, 10)])]
    assert timeline.most_pages == 2 + 2


@pytest.mark.parametrize("n_pages", [2, 1])
def test_a_window_or_a_state_is_not_shared(n_pages):
    """Each request holds its own window of 8 tokens, 2 pages of 4, or its own state, a page, beside the shared ones."""
    cache = Pages(10, [0, *(min(-(-tokens // 4), n_pages) for tokens in range(1, 201))])
    timeline = serve(Load(3, prompt=40, output=1, shared_tokens=20), Engine(page_tokens=4), cache, a_second)
    assert timeline.most_pages == n_pages + 3 * n_pages
    alone = Pages(2 * n_pages - 1, cache.held)
    with pytest.raises(InputError, match=f"request 0 takes {2 * n_pages} pages of the cache"):
        serve(Load(1, prompt=40, output=1, shared_tokens=20), Engine(page_tokens=4), alone, a_second)


@pytest.mark.parametrize(("acceptance", "steps", "tokens"), [(1.0, 3, 10 + 2 * 4), (0.0, 9, 10 + 5 * 4 + 3 + 2 + 1)])
def test_drafts_by_hand(acceptance, steps, tokens):
    """Nine tokens: one of the prompt, then four per step if all drafts are accepted, else one."""
    engine = Engine(draft_tokens=3, acceptance=acceptance, draft_ms=250.0)
    timeline = serve(Load(1, prompt=10, output=9), engine, pages(100), a_second)
    assert (timeline.steps, timeline.tokens) == (steps, tokens)
    assert timeline.seconds == steps + 0.25 * (steps - 1)


def test_accepted_drafts_follow_their_probability():
    """A step has 1 + a + a^2 + a^3 tokens in the mean, with drafts that are accepted one after the other."""
    timeline = serve(
        Load(1, prompt=1, output=20_001),
        Engine(draft_tokens=3, acceptance=0.6),
        pages(10_000, longest=30_000),
        a_second,
    )
    assert 20_000 / (timeline.steps - 1) == pytest.approx(1 + 0.6 + 0.36 + 0.216, rel=0.02)


def test_overhead_and_what_limits():
    timeline = serve(Load(1, prompt=1, output=3), Engine(overhead_ms=2000.0), pages(100), a_second)
    assert timeline.seconds == 9
    assert timeline.seconds_by_limit == {"overhead": 9}


def test_nothing_waits_before_the_first_arrival():
    """Times of a trace may count from anywhere."""
    timeline = serve(Load(2, prompt=1, output=2, arrivals=[1e9, 1e9]), Engine(), pages(100), a_second)
    assert timeline.seconds_by_limit == {"memory": 2}
    assert timeline.seconds == 1e9 + 2


def test_requests_that_never_fit():
    message = r"request 1 takes 301 tokens of context, more than context=200; pass serving\(301, "
    with pytest.raises(InputError, match=message):  # the longest: the remedy is enough for all
        serve(Load(3, prompt=[150, 201, 1], output=101), Engine(), pages(100), a_second)
    with pytest.raises(InputError, match=r"request 0 takes 3 pages of the cache, more than the 2 that there are"):
        serve(Load(1, prompt=8, output=2), Engine(), pages(2), a_second)


lengths = st.integers(1, 40)
loads = st.integers(1, 12).flatmap(
    lambda n: st.builds(
        Load,
        st.just(n),
        prompt=st.lists(lengths, min_size=n, max_size=n),
        output=st.lists(lengths, min_size=n, max_size=n),
        arrivals=st.lists(st.floats(0, 50), min_size=n, max_size=n).map(sorted),
    )
)
drafts = st.one_of(
    st.just({}), st.fixed_dictionaries({"draft_tokens": st.integers(1, 3), "acceptance": st.floats(0, 1)})
)
engines = drafts.flatmap(
    lambda options: st.builds(
        Engine,
        token_budget=st.one_of(st.none(), st.integers(1, 30)),
        max_requests=st.integers(1, 6),
        watermark=st.floats(0, 0.3),
        **{name: st.just(value) for name, value in options.items()},
    )
)


@settings(deadline=None, max_examples=200)
@given(loads, engines, st.integers(20, 60))
def test_conservation(load, engine, n_pages):
    """Nothing is lost or made: requests, tokens, pages, time; no step exceeds the budget."""
    batches = []

    def price(batch):
        batches.append(batch)
        return StepPrice(0.1 + 0.01 * batch.tokens, "memory")

    timeline = serve(load, engine, pages(n_pages, longest=80), price)
    served, requests = timeline.requests, load.sample()
    assert [request[:3] for request in served] == [tuple(request) for request in requests]
    assert all(request.arrival < request.first <= request.last <= timeline.seconds for request in served)
    assert 0 < timeline.most_pages <= n_pages
    assert timeline.most_requests <= engine.max_requests
    assert max(batch.tokens for batch in batches) <= (engine.token_budget or 80)
    assert timeline.seconds - requests[0].arrival == pytest.approx(sum(timeline.seconds_by_limit.values()))
    assert timeline.tokens == sum(batch.tokens for batch in batches)
    preemptions = sum(request.preemptions for request in served)
    # each token but the last of a request is computed once, if none is computed again and no draft is rejected
    least = sum(prompt + output - 1 for _, prompt, output in requests)
    assert timeline.tokens >= least
    if not preemptions:
        if not engine.draft_tokens:
            assert timeline.tokens == least
        assert [request.first for request in served] == sorted(request.first for request in served)
    for batch in batches:
        assert batch.tokens >= batch.results
        assert batch.tokens >= sum(after - before for before, after in batch.chunks)


@settings(max_examples=60, deadline=None)
@given(loads, engines, st.integers(20, 60))
def test_steps_that_are_alike_are_computed_as_each_alone(load, engine, n_pages):
    """Also with prices that depend on all contexts, so that no step may be left out or taken twice."""

    def price(batch):
        return StepPrice(0.1 + 0.01 * batch.tokens + 0.001 * sum(batch.contexts), "memory")

    together = serve(load, engine, pages(n_pages), price)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Loop, "_step_alike", lambda self, scheduled: None)
        assert serve(load, engine, pages(n_pages), price) == together


def test_waiting_time_of_a_queue():
    """One request at a time, a second each, at random: the mean waiting time of a queue with constant service (M/D/1).

    Pollaczek and Khinchine: load / (2 (1 - load)) service times, for a load of 0.5 half a second.
    """
    load = Load(40_000, prompt=1, output=1, rate=0.5)
    timeline = serve(load, Engine(max_requests=1), pages(10), a_second)
    ttft = sum(request.ttft_ms for request in timeline.requests) / len(timeline.requests)
    assert ttft == pytest.approx(1000 + 500, rel=0.03)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=40),
    st.floats(0.01, 3.0),
    st.integers(8, 60),
    st.floats(1.0, 60.0),
    st.floats(0.9, 3.0),
)
def test_serving_ends_early_where_limits_are_missed_alone(lengths, rate, total, ttft, tpot):
    prompts, outputs = zip(*lengths, strict=True)
    load = Load(len(lengths), prompt=prompts, output=outputs, rate=rate)
    engine = Engine(token_budget=8, max_requests=3)
    whole = serve(load, engine, pages(max(total, 12)), a_second)
    ended = serve(load, engine, pages(max(total, 12)), a_second, Limits(1e3 * ttft, 1e3 * tpot))
    waits = Spread.of([request.ttft_ms for request in whole.requests]).p95
    steps = [request.tpot_ms for request in whole.requests if request.tpot_ms is not None]
    is_missed = waits > 1e3 * ttft or (bool(steps) and Spread.of(steps).p95 > 1e3 * tpot)
    assert is_missed if ended.missed else ended == whole

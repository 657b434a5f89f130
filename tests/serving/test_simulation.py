"""Serving a load with the prices of a model: steps, pages, latencies, and the rate that keeps limits."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch

from modelsummary import DeviceSpec, InputError, Statistics
from modelsummary.serving import Engine, Load
from modelsummary.serving.prices import Curve, CurvePoint
from modelsummary.serving.scheduler import Batch, Limits, Pages, StepPrice, serve
from modelsummary.serving.simulation import ServingSimulation, largest_rate
from tests.serving.models import Decoder, Recurrent
from tests.serving.test_serving import DEVICE, IDS, PER_TOKEN, WEIGHTS
from tests.untouched import untouched

# Attention that takes a large part of a step: keys and values are read slowly.
SLOW = DeviceSpec("slow", {torch.float32: 1e12}, 1e8, memory_bytes=10**8, units=10)
CONTEXT = 400


@pytest.fixture(scope="module")
def estimate():
    return Statistics(Decoder(), IDS).serving(CONTEXT, device=SLOW, batches=[1])


@pytest.fixture(scope="module")
def prices(estimate):
    return estimate.prices(Engine(token_budget=256, max_requests=64))


def test_curve_is_refined_where_it_bends():
    curve = Curve(lambda n: CurvePoint(n, max(137, n), max(137, n)), 1, 10_000)
    for n in range(1, 10_001, 77):
        assert curve.at(n) == pytest.approx(max(137, n), rel=0.06)
    assert curve.at(20_000) == 20_000
    assert Curve(lambda n: CurvePoint(n, 7, 7), 3, 3).at(100) == 7


def test_curves_have_points_of_whole_vectors():
    # products whose rows do not fill loads of 16 bytes take twice as long; an engine pads them
    curve = Curve(lambda n: CurvePoint(n, n * n * (1 + (n % 8 > 0)) + 1e4, n * n * (1 + (n % 8 > 0)) + 1e4), 8, 4096)
    assert all(point.x % 8 == 0 for point in curve.nodes)
    assert curve.at(1001) == pytest.approx(1001**2 + 1e4, rel=0.03)
    assert curve.error < 0.02


def test_prices_are_the_forwards(estimate, prices):
    """A step with one whole prompt, or with one token of each request, is a forward of the estimate."""
    prompt = prices.price(Batch(CONTEXT - 1, 1, (), [(0, CONTEXT - 1)]))
    token = prices.price(Batch(1, 1, [CONTEXT], ()))
    assert 1e3 * prompt.seconds == pytest.approx(estimate.prefill_ms, rel=0.02)
    assert 1e3 * token.seconds == pytest.approx(estimate.decode_ms, rel=0.02)
    assert prices.error < 0.1


class Scans(Decoder):
    """Prompts take much longer than as many tokens that are decoded, as where a scan takes the place of a step."""

    def forward(self, ids, past=None, use_cache=True):
        for _ in range(20 if ids.shape[1] > 1 else 0):
            self.up[0](self.words(ids))
        return super().forward(ids, past, use_cache)


def test_prompts_of_a_model_whose_tokens_take_a_shorter_way():
    """Three and seven prompts, and as many tokens, are compared with their forwards; both ways are exact."""
    estimate = Statistics(Scans(), IDS).serving(CONTEXT, device=SLOW, batches=[1])
    prices = estimate.prices(Engine(token_budget=256, max_requests=64))
    assert prices._results.nodes[-1].y < -0.1 * prices._tokens.at(64)
    assert prices.error < 0.03


def test_prices_do_not_depend_on_what_comes_besides_forwards(estimate, prices):
    engine = Engine(token_budget=256, max_requests=64, overhead_ms=3.0, watermark=0.1)
    assert estimate.prices(engine) is prices


def test_prices_of_batches_that_no_price_was_made_from(prices):
    estimate = Statistics(Decoder(), IDS).serving(150, batch=11, device=SLOW, batches=[11])
    step = prices.price(Batch(11, 11, [150] * 11, ()))
    assert 1e3 * step.seconds == pytest.approx(estimate.decode_ms, rel=0.05)
    mixed = prices.price(Batch(11, 11, [100] * 5 + [200] * 4 + [175] * 2, ()))  # the same tokens in caches
    assert mixed.seconds == pytest.approx(step.seconds, rel=1e-3)


def test_chunks_add_up_to_the_prompt(prices):
    """Chunks repeat the part that depends on tokens, read the cache again, and share the attention of the prompt."""
    whole = prices.price(Batch(256, 1, (), [(0, 256)])).seconds
    first = prices.price(Batch(128, 0, (), [(0, 128)])).seconds
    second = prices.price(Batch(128, 1, [128], [(128, 256)])).seconds
    tokens, again = (prices._tokens.at(n) for n in (256, 128))
    cached = prices._cached.at(128 * PER_TOKEN)
    assert first + second - 2 * again == pytest.approx(whole - tokens + cached, rel=0.05)
    assert second > first


def test_pages_by_hand(prices):
    """Pages of 16 tokens take what 0.9 of the memory leaves beside the weights, but for a workspace below 1 %."""
    assert prices.page_bytes == 16 * PER_TOKEN
    assert list(prices.pages.held[:18]) == [0, *[1] * 16, 2]
    most = (0.9 * 10**8 - WEIGHTS) / (16 * PER_TOKEN)
    assert 0.99 * most < prices.pages.total < most


def test_workspace_is_of_all_prompts_of_a_step(estimate):
    """A budget of 2,048 tokens computes five prompts of 399 tokens and more together, each with its hidden states."""
    per_token = estimate.workspace_bytes / (CONTEXT - 1)
    left = 0.9 * 10**8 - WEIGHTS - 2048 * per_token
    assert estimate.prices(Engine()).pages.total == pytest.approx(left / (16 * PER_TOKEN), abs=50)


def test_pages_of_a_window_and_of_a_state():
    window = Statistics(Decoder(window=32), IDS).serving(CONTEXT, device=DEVICE, batches=[1]).prices(Engine())
    assert window.page_bytes == 16 * PER_TOKEN
    assert window.pages.held[CONTEXT] == 2
    state = Statistics(Recurrent(), IDS).serving(100, device=DEVICE, batches=[1]).prices(Engine())
    assert set(state.pages.held[1:]) == {1}


def test_a_simulation(estimate):
    load, engine = Load(30, prompt=60, output=20, rate=2000.0), Engine(token_budget=256, max_requests=8)
    simulation = estimate.simulate(load, engine)
    assert simulation.requests_per_second == pytest.approx(30 / simulation.seconds)
    assert simulation.output_tokens_per_second == pytest.approx(20 * simulation.requests_per_second)
    assert simulation.input_tokens_per_second == pytest.approx(60 * simulation.requests_per_second)
    assert simulation.timeline.most_requests == 8
    assert simulation.limited_by == "requests"
    assert 0 < simulation.mean_requests <= 8
    assert simulation.ttft_ms.p50 <= simulation.ttft_ms.p95 <= simulation.e2e_ms.most
    records = simulation.to_records()
    assert records[3]["ttft_ms"] == simulation.requests[3].ttft_ms
    assert list(simulation.to_pandas()["output_tokens"]) == [20] * 30
    text = str(simulation)
    assert text.startswith(f"Decoder on slow: 30 requests in {1e3 * simulation.seconds:.2f} ms, ")
    assert "TTFT (ms)" in text
    assert "Limited by: requests" in text


def test_a_queue_that_grows(estimate):
    """A request alone takes ``one`` seconds; twice as many arrive, or half as many."""
    engine = Engine(token_budget=256, max_requests=1)
    one = estimate.simulate(Load(1, prompt=60, output=20), engine).seconds
    fast, slow = (
        estimate.simulate(Load(80, prompt=60, output=20, arrivals=[gap * n for n in range(80)]), engine)
        for gap in (one / 2, one * 2)
    )
    assert fast.excess == pytest.approx(1.0, rel=0.01)  # each waits half a request longer than the one before it
    assert "The queue grows: requests arrive 100% faster than they are served" in str(fast)
    assert slow.excess == 0.0
    assert "queue" not in str(slow)
    assert fast.error is not None
    assert slow.error is None  # arrivals alone decide its throughput


def test_little_memory_preempts(estimate):
    """Eight requests end with 100 tokens, 7 pages, of 30 pages: four of them have room at the end."""
    room = WEIGHTS + 31 * 16 * PER_TOKEN
    workspace = estimate.prices(Engine()).pages.total * 16 * PER_TOKEN  # what is left is the workspace
    share = (room + 0.9 * 10**8 - WEIGHTS - workspace) / 10**8
    simulation = estimate.simulate(Load(8, prompt=40, output=61), Engine(memory_share=share))
    assert 30 <= simulation.n_pages <= 32
    assert simulation.preemptions > 0
    assert simulation.timeline.most_pages <= simulation.n_pages


def test_shared_tokens_save_time(estimate):
    load = Load(20, prompt=200, output=2)
    apart, shared = (estimate.simulate(replace(load, shared_tokens=tokens)) for tokens in (0, 160))
    assert apart.timeline.tokens - shared.timeline.tokens == pytest.approx(19 * 160, abs=10 * 160)
    assert shared.seconds < apart.seconds


def test_max_rate(estimate):
    load, limit = Load(60, prompt=60, output=10, rate=1.0), 1.5 * estimate.prefill_ms
    rate = estimate.max_rate(load, ttft_ms=limit)
    assert estimate.simulate(replace(load, rate=rate)).ttft_ms.p95 <= limit
    assert estimate.simulate(replace(load, rate=1.02 * rate)).ttft_ms.p95 > limit
    assert estimate.max_rate(load, ttft_ms=limit / 1000) == 0.0
    assert estimate.max_rate(load, tpot_ms=1e9) == float("inf")
    assert estimate.max_rate(load, ttft_ms=limit, tpot_ms=1e9) == rate


def rate_of(load, ttft_ms):
    """Return the largest rate of a server that computes one request after the other, each in a second."""

    def simulate(changed):
        held = Pages(9, [0, *[1] * 9])
        timeline = serve(changed, Engine(max_requests=1), held, lambda batch: StepPrice(1.0, "memory"))
        return ServingSimulation("Net", "a device", 1, changed, Engine(), timeline, 9, 1.0, 0.0, 0.0)

    return largest_rate(simulate, load, Limits(ttft_ms))


def test_max_rate_nears_what_is_sustained_as_the_load_grows():
    """Of n requests at a rate r > 1, the last one waits n (1 - 1 / r) seconds: with equal gaps, r is about 2 or 1.01.

    Gaps are random: the rate is near these, and far above what is sustained only while the load is short.
    """
    assert rate_of(Load(10, prompt=1, output=1), 10_000) == float("inf")
    short, long = (rate_of(Load(n, prompt=1, output=1), 10_000) for n in (20, 1000))
    assert short > 1.5
    assert 0.8 < long < 1.05


@pytest.mark.parametrize("rate", [2.0**-30, 2.0**30])
def test_max_rate_from_any_rate(rate):
    load = Load(40, prompt=1, output=1)
    assert rate_of(replace(load, rate=rate), 10_000) == pytest.approx(rate_of(load, 10_000), rel=0.02)


@pytest.mark.parametrize(
    ("load", "limits", "message"),
    [
        (Load(2, 3, 4), {}, "pass ttft_ms= or tpot_ms="),
        (Load(2, 3, 4), {"ttft_ms": 0}, "ttft_ms must be a number of milliseconds > 0 or None, got 0"),
        (
            Load(2, 3, 4, arrivals=[0, 1]),
            {"ttft_ms": 1},
            "the rate of the load is searched, but its arrivals= are fixed; pass a Load without them",
        ),
        (Load(2, 3, 1), {"tpot_ms": 1}, "tpot_ms limits tokens after the first, but all outputs are of one token"),
    ],
)
def test_unusable_limits(load, limits, message):
    with pytest.raises(InputError, match=message):
        largest_rate(None, load, Limits(**limits))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_tokens": 0}, "page_tokens must be an integer >= 1, got 0"),
        ({"token_budget": 0}, "token_budget must be an integer >= 1, got 0"),
        ({"memory_share": 90}, "memory_share must be a number from 0 to 1, got 90"),
        ({"overhead_ms": -1}, "overhead_ms must be a number >= 0, got -1"),
        ({"draft_ms": 3}, "acceptance=0.0 and draft_ms=3 are about drafts, but draft_tokens=0; pass draft_tokens= too"),
    ],
)
def test_unusable_engines(options, message):
    with pytest.raises(InputError, match=message):
        Engine(**options)


def test_refusals(estimate):
    for call in (estimate.simulate, estimate.max_rate):
        with pytest.raises(InputError, match=r"load must be a Load, such as .*, got 3"):
            call(3)
    with pytest.raises(InputError, match="engine must be an Engine or None, got 8"):
        estimate.simulate(Load(1, 3, 4), 8)
    with pytest.raises(InputError, match=r"memory_share=1e-06 of 100.00 MB has no room for a page of 4.10 kB"):
        estimate.simulate(Load(1, 3, 4), Engine(memory_share=1e-6))
    with pytest.raises(InputError, match="request 0 takes 401 tokens of context, more than context=400"):
        estimate.simulate(Load(1, 400, 2))


def test_models_with_an_encoder_are_refused():
    class Both(Decoder):
        def forward(self, decoder_input_ids, input_features=None, past=None):
            return super().forward(decoder_input_ids, past)

    inputs = {"input_features": torch.ones(1, 3), "decoder_input_ids": IDS}
    estimate = Statistics(Both(), inputs).serving(50, device=DEVICE, batches=[1])
    for call in (estimate.simulate, partial(estimate.plan, tpot_ms=9)):
        with pytest.raises(InputError, match=r"^simulate is for decoders without an encoder: steps of Both"):
            call(Load(1, 3, 4))


def test_the_model_stays_untouched():
    model = Decoder().train()
    estimate = Statistics(model, IDS).serving(64, device=DEVICE, batches=[1])
    with untouched(model):
        estimate.simulate(Load(2, prompt=3, output=4))
    assert model.training


def test_the_model_stays_untouched_after_an_exception():
    class Changing(Decoder):
        fails = False

        def forward(self, ids, past=None, use_cache=True):
            self.seen = past
            if self.fails:
                raise ValueError("another model")
            return super().forward(ids, past)

    model = Changing()
    estimate = Statistics(model, IDS).serving(64, device=DEVICE, batches=[1])
    model.fails = True
    with untouched(model), pytest.raises(InputError, match="serving Changing on shapes failed: ValueError: another"):
        estimate.simulate(Load(2, prompt=3, output=4))


def test_an_estimate_that_was_stored(estimate):
    stored = pickle.loads(pickle.dumps(estimate))
    assert stored == estimate
    assert "server" not in json.loads(json.dumps(estimate.to_dict()))
    with pytest.raises(InputError, match="the estimate was loaded without its model; call serving in this process"):
        stored.simulate(Load(1, 3, 4))
    assert copy.deepcopy(estimate).server is None


def test_several_devices():
    linked = DeviceSpec("linked", {torch.float32: 1e12}, 1e11, memory_bytes=10**8, units=10, interconnect=1e11)
    estimate = Statistics(Decoder(), IDS).serving(60, device=linked, tensor=2, batches=[1])
    simulation = estimate.simulate(Load(3, prompt=20, output=5), Engine(max_requests=4))
    assert simulation.output_tokens_per_second_per_device == simulation.output_tokens_per_second / 2
    assert simulation.page_bytes == 16 * PER_TOKEN / 2
    assert "per device" in str(simulation)

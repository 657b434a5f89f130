"""The search for a way to serve a load: equal to trying everything; bounds; flags of engines."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from math import ceil, inf

import pytest
import torch

from modelsummary import DeviceSpec, InputError, Statistics
from modelsummary.cluster import Cluster
from modelsummary.devices.kernel_table import KernelTable, machine_of
from modelsummary.devices.target import Target
from modelsummary.serving import Engine, Load, ServingSpace
from modelsummary.serving.plan import least_seconds
from modelsummary.serving.prices import CurvePoint
from modelsummary.serving.scheduler import Limits
from modelsummary.serving.simulation import largest_rate
from tests.serving.models import Decoder
from tests.serving.test_serving import IDS
from tests.untouched import untouched

LINKED = DeviceSpec(
    "linked", {torch.float32: 1e12, torch.float8_e4m3fn: 4e12}, 1e11, memory_bytes=10**8, units=10, interconnect=1e11
)
LOAD = Load(40, prompt=[20 + number % 7 for number in range(40)], output=12)
SPACE = ServingSpace(tensor=[1, 2], weights=[None, "int4"], max_requests=[2, 16], token_budget=[32, 64])
LIMITS = {"ttft_ms": 3.0, "tpot_ms": 0.35}


@pytest.fixture(scope="module")
def estimate():
    return Statistics(Decoder(), IDS).serving(64, device=LINKED, batches=[1])


@pytest.fixture(scope="module")
def plans(estimate):
    return estimate.plan(LOAD, **LIMITS, devices=4, space=SPACE, price=2.0)


def test_equal_to_trying_everything(estimate, plans):
    rates = {}
    for tensor in SPACE.tensor:
        for weights in SPACE.weights:
            server = estimate.server.changed(tensor=tensor, weights=weights)
            for most in SPACE.max_requests:
                for budget in SPACE.token_budget:
                    engine = Engine(max_requests=most, token_budget=budget)
                    (prices,) = server.prices(engine)

                    def served(load, engine=engine, prices=prices, server=server):
                        return estimate._simulated(load, engine, prices, server)

                    rates[tensor, weights, most, budget] = _rate(served) * (4 // tensor)
    best = plans.best
    assert plans.tried == len(rates) == 16
    assert best.requests_per_second == pytest.approx(max(rates.values()), rel=0.02)
    key = best.tensor, best.weights, best.engine.max_requests, best.engine.token_budget
    assert rates[key] == pytest.approx(max(rates.values()), rel=0.02)
    assert len(plans.plans) < 16  # bounds and the best rate exclude ways


def _rate(served):
    rate = largest_rate(served, LOAD, Limits(**LIMITS))
    if not rate:
        return 0.0
    return served(replace(LOAD, rate=None if rate == inf else rate)).requests_per_second


def test_plans_as_text(plans):
    best, text = plans.best, str(plans)
    assert plans.requests_per_price == pytest.approx(3600 * best.requests_per_second / (best.devices * 2.0))
    assert best.devices_for(2.5 * best.simulation.requests_per_second) == 3 * best.tensor
    assert f"--max-num-seqs {best.engine.max_requests}" in text
    assert best.flags("sglang").startswith(f"--tp-size {best.tensor} ")
    assert "--quantization awq" in best.flags("vllm") or best.weights is None
    assert best.flags("vllm").count("awq") == best.flags("vllm").count("awq_marlin")
    header, row = text.splitlines()[1:3]
    assert header.split()[-6:] == ["p95", "TPOT", "p95", "At", "a", "time"]
    assert row.split()[-1] == f"{best.simulation.mean_requests:.1f}"
    assert plans.to_records()[0]["requests_per_second"] == best.requests_per_second
    with pytest.raises(InputError, match="engine must be one of 'vllm', 'sglang', 'tensorrt-llm', got 'vlm'; did you"):
        best.flags("vlm")
    with pytest.raises(InputError, match="rate must be a number of requests per second > 0, got 0"):
        best.devices_for(0)


def test_a_load_that_is_short_is_named(estimate, plans):
    """Ten times the requests that run together, and twenty times the ones that come within the limit of 3 ms."""
    simulation = plans.best.simulation
    together, queued = 10 * simulation.mean_requests, 20 * 0.003 * simulation.requests_per_second
    assert max(together, queued) > 40
    assert f"requests; pass {ceil(max(together, queued)):,} or more" in str(plans)
    space = ServingSpace([1], max_requests=[2], token_budget=[32])
    long = Load(200, prompt=20, output=12)
    assert "short" not in str(estimate.plan(long, ttft_ms=3.0, devices=1, space=space))


def test_no_way_keeps_the_limits(estimate):
    with untouched(estimate.server.live.model):
        plans = estimate.plan(LOAD, ttft_ms=1e-3, space=ServingSpace(tensor=[1], max_requests=[2], token_budget=[32]))
    with pytest.raises(InputError, match=r"none of 1 ways keeps ttft_ms=0.001 and tpot_ms=None; pass larger limits"):
        str(plans)


def test_each_engine_gets_its_own_share_of_the_memory(plans):
    best = plans.best
    pages = best.simulation.n_pages * best.simulation.page_bytes
    static = float(best.flags("sglang").split("--mem-fraction-static ")[1].split()[0])
    free = float(best.flags("tensorrt-llm").split("--kv_cache_free_gpu_memory_fraction ")[1])
    assert "--gpu-memory-utilization 0.9" in best.flags("vllm")  # of all that the engine takes
    # of weights and pages, without the workspace; of the pages in what weights and workspace leave
    assert static == pytest.approx((best.weight_bytes + pages) / 1e8, abs=0.001)
    assert free == pytest.approx(pages / (pages + 0.1 * 1e8), abs=0.001)
    assert max(static, free) < 0.9


def test_forms_of_the_estimate_are_in_its_plans():
    kept = {"weights": "fp8", "cache_dtype": torch.float8_e5m2}
    estimate = Statistics(Decoder(), IDS).serving(64, device=LINKED, batches=[1], **kept)
    plans = estimate.plan(LOAD, ttft_ms=30.0, devices=1, space=ServingSpace([1], max_requests=[2], token_budget=[32]))
    assert "--quantization fp8 --kv-cache-dtype fp8_e5m2" in plans.best.flags("vllm")
    assert (plans.to_records()[0]["weights"], plans.to_records()[0]["cache_dtype"]) == ("fp8", "float8_e5m2")


def test_a_way_without_room_for_a_request_is_refused(estimate):
    """One device keeps a page; two have half of the weights each, and serve requests of two pages."""
    prices = estimate.prices(Engine(max_requests=2, token_budget=32))
    share = 0.9 - (prices.pages.total - 1) * prices.page_bytes / estimate.memory_bytes
    space = ServingSpace([1, 2], max_requests=[2], token_budget=[32])
    plans = estimate.plan(LOAD, ttft_ms=30.0, devices=2, space=space, engine=Engine(memory_share=share))
    assert [plan.tensor for plan in plans.plans] == [2]
    (reason,) = plans.refused.items()
    assert reason[0] == "tensor=1, max_requests=2, token_budget=32"
    assert reason[1].endswith("there are; pass shorter requests, tensor=, or a device with more memory")


@pytest.mark.parametrize(
    ("load", "space", "message"),
    [
        (Load(2, 100, 3), SPACE, "no way can serve the load: tensor=1, max_requests=2, .*: request 0 takes 102 tokens"),
        (LOAD, ServingSpace([4]), r"space has no way: it needs a tensor <= devices=2, got \[4\]"),
        (LOAD, ServingSpace(max_requests=[64], token_budget=[32]), r"max_requests <= a token_budget, got \[64\] and"),
        (Load(2, 9, 3, arrivals=[0.0, 1.0]), SPACE, "the rate of the load is searched, but its arrivals= are fixed"),
    ],
)
def test_loads_that_no_way_serves(estimate, load, space, message):
    with pytest.raises(InputError, match=message):
        estimate.plan(load, ttft_ms=3.0, devices=2, space=space)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 0}, "devices must be an integer >= 1, got 0"),
        ({"price": -1}, "price must be a number > 0 or None, got -1"),
        ({"space": [1]}, r"space must be a ServingSpace or None, got \[1\]"),
        ({"engine": "vllm"}, "engine must be a Engine or None, got 'vllm'"),
    ],
)
def test_unusable_options(estimate, options, message):
    with pytest.raises(InputError, match=message):
        estimate.plan(LOAD, **LIMITS, **options)


def test_unusable_spaces():
    with pytest.raises(InputError, match="weights must be a list of values to try, got 'fp8'"):
        ServingSpace(weights="fp8")
    with pytest.raises(InputError, match="tensor must be an integer >= 1, got 0"):
        ServingSpace(tensor=[0])
    with pytest.raises(InputError, match=r"weights must be one of 'fp8', .* or None, got 'int5'"):
        ServingSpace(weights=["int5"])
    with pytest.raises(InputError, match="pipeline is not an option of ServingSpace; pass tensor=, as pipelines of"):
        ServingSpace(pipeline=[2])
    with pytest.raises(InputError, match=r"unknown option .tp. of ServingSpace; .*did you mean .tensor."):
        ServingSpace(tp=[2])
    assert ServingSpace(cache_dtype=["e5m2"]).cache_dtype == (torch.float8_e5m2,)


def test_least_seconds_by_hand():
    """Ten seconds for up to 100 tokens, then a tenth of a second per token."""
    nodes = [CurvePoint(x, y, y) for x, y in ((1, 10.0), (100, 10.0), (1000, 100.0))]
    # a prompt costs its tokens; 100 tokens come from 100 / 20 steps of 10 seconds
    assert least_seconds(nodes, Engine(), Load(4, prompt=500, output=1)) == pytest.approx(50.0)
    assert least_seconds(nodes, Engine(max_requests=20), Load(4, prompt=1, output=100)) == pytest.approx(50.0)
    # where tokens cost nothing, each request still needs its part of a step
    for price in (10.0, 9.0):  # or, of a small model, even less than nothing
        flat = [nodes[0], CurvePoint(1000, price, price)]
        assert least_seconds(flat, Engine(max_requests=5), Load(4, prompt=7, output=1)) == price / 5


def test_devices_of_a_plan(estimate):
    """A node of a named device, the whole cluster, or what this machine has."""
    server = estimate.server
    assert server.devices == 8
    assert server.changed(cluster=Cluster(LINKED, nodes=3, devices_per_node=2)).devices == 6
    here = copy(server)
    here.target = Target("cpu", KernelTable(machine_of(torch.device("cpu"))))
    assert here.devices == 1


def test_weights_that_cannot_fit_are_refused_before_the_model_runs(estimate):
    small = estimate.server.changed(memory_bytes=60_000)
    plans = replace(estimate, server=small).plan
    with pytest.raises(InputError, match=r"tensor=1: the weights take at least 62.59 kB of a device, more"):
        plans(LOAD, ttft_ms=30.0, devices=1, space=ServingSpace([1]))
    assert not small._prices


@pytest.mark.parametrize("space", [{}, 0, ()])
def test_a_space_that_is_false(estimate, space):
    with pytest.raises(InputError, match="space must be a ServingSpace or None, got "):
        estimate.plan(Load(4, prompt=4, output=4), tpot_ms=5.0, space=space)

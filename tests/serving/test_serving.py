"""Serving a model: bytes of its cache, what fits, times; the model untouched."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from modelsummary import DeviceSpec, InputError, NotLiveError, Statistics
from modelsummary.cluster import Cluster, Factors
from modelsummary.cluster.collectives import Network
from modelsummary.devices.kernel_table import KernelTable, machine_of
from modelsummary.devices.target import Target, target_of
from modelsummary.serving import Engine, Load, ServingSpace, run, server
from modelsummary.serving.cache import cache_maker
from modelsummary.serving.fit import largest_fitting
from modelsummary.serving.request import request_of
from modelsummary.serving.run import Encoded, run_request
from modelsummary.serving.server import ServingOptions, communication
from modelsummary.serving.times import phase_time
from tests.serving.models import HEADS, WIDTH, WORDS, Decoder, MixtureDecoder, Recurrent, TupleDecoder
from tests.untouched import untouched

IDS = torch.zeros(1, 4, dtype=torch.long)
EXPERTS = 8
# The words and the head; in the layer, four square projections and an MLP of four times the width with its biases.
WEIGHTS = 4 * (2 * WORDS * WIDTH + 4 * WIDTH**2 + 8 * WIDTH**2 + 5 * WIDTH)
PER_TOKEN = 2 * WIDTH * 4  # keys and values of a layer in float32
DEVICE = DeviceSpec("made up", {torch.float32: 1e12, torch.bfloat16: 4e12}, 1e11, memory_bytes=10**8, units=10)


@pytest.fixture(scope="module")
def stats():
    return Statistics(Decoder(), IDS)


@pytest.fixture(scope="module")
def estimate(stats):
    return stats.serving(100, batch=3, device=DEVICE, batches=[1, 4])


def test_bytes(estimate):
    assert estimate.weight_bytes == WEIGHTS
    assert estimate.cache_bytes_per_token == PER_TOKEN
    assert estimate.cache_bytes == 100 * PER_TOKEN
    assert estimate.cache_layers == {"Cache": 1}
    assert estimate.fits
    assert estimate.collective_ms == 0
    assert estimate.peak_bytes == WEIGHTS + 3 * 100 * PER_TOKEN + estimate.workspace_bytes
    # the longest prompt holds its hidden states of the MLP: more than a token's of any other
    assert 0 < estimate.workspace_bytes < 99 * 4 * (4 * 4 * WIDTH + 8 * WIDTH)


def test_model_stays_untouched():
    model = Decoder().train()
    stats = Statistics(model, IDS)
    with untouched(model):
        stats.serving(30, device=DEVICE)
    assert model.training


def test_model_stays_untouched_after_an_exception():
    class Broken(Decoder):
        def forward(self, ids, past=None, use_cache=True):
            if past is not None:
                self.seen = past
                raise ValueError("no second call")
            return super().forward(ids, past)

    model = Broken()
    stats = Statistics(model, IDS)
    with untouched(model), pytest.raises(InputError, match="serving Broken on shapes failed: ValueError: no second"):
        stats.serving(30, device=DEVICE)


def test_dtype(stats):
    half = stats.serving(100, device=DEVICE, dtype=torch.bfloat16, batches=[1])
    assert (half.weight_bytes, half.cache_bytes, half.dtype) == (WEIGHTS // 2, 50 * PER_TOKEN, "bfloat16")


def test_window():
    estimate = Statistics(Decoder(layers=2, window=16), IDS).serving(100, device=DEVICE, batches=[1])
    assert estimate.cache_bytes == 2 * 16 * PER_TOKEN
    assert estimate.cache_bytes_per_token == 0


def test_forward_over_single_tokens_is_extrapolated(monkeypatch):
    stats = Statistics(Recurrent(), IDS)
    monkeypatch.setattr(run, "_MOST_OPERATORS", 1600)
    estimate = stats.serving(100_000, device=DEVICE, batches=[1])
    assert estimate.cache_bytes == 4 * WIDTH
    assert "one after the other" in estimate.notes[0]
    assert "Prompts of more than 256 tokens" in estimate.notes[0]  # five operators per token, six in torch 2.6
    short = stats.serving(100, device=DEVICE, memory_bytes=estimate.weight_bytes, batches=[1])
    assert estimate.prefill_ms / 99_999 == pytest.approx(short.prefill_ms / 99, rel=0.05)
    assert estimate.decode_ms == pytest.approx(short.decode_ms)


@pytest.mark.parametrize(("chunk", "constant"), [(64, 200), (200, 0)])
def test_forward_over_chunks_is_extrapolated(monkeypatch, chunk, constant):
    """Chunks show late beside the operators that all prompts have, or where they are longer than the first prompts."""

    class Chunks(Recurrent):
        def forward(self, ids, state=None):
            x = self.words(ids)
            h = x.new_zeros(len(ids), WIDTH) if state is None else state[0]
            for _ in range(constant):
                h = h * 1
            for part in x.split(chunk, dim=1):
                for _ in range(10):
                    h = h + part.sum(1)
            return {"last": h, "state": [h]}

    monkeypatch.setattr(run, "_MOST_OPERATORS", 400)
    lengths = []

    def noted_run(*args, context, **kwargs):
        lengths.append(context)
        return run_request(*args, context=context, **kwargs)

    monkeypatch.setattr(server, "run_request", noted_run)
    Statistics(Chunks(), IDS).serving(50, device=DEVICE, batches=[1], memory_bytes="1TB")
    assert max(lengths) < 10_000


def test_search_ends(stats):
    estimate = Statistics(Decoder(window=8), IDS).serving(20, device=DEVICE, memory_bytes="1TB", batches=[1])
    assert (estimate.max_context, estimate.max_context_limited_by) == (2**24, "search")


def test_cache_of_tuples():
    estimate = Statistics(TupleDecoder(64), IDS).serving(50, device=DEVICE, batches=[1])
    assert (estimate.cache_bytes, estimate.cache_layers) == (2 * 50 * PER_TOKEN, {"tuple": 1})


def test_what_fits(stats, estimate):
    def peak(batch, context):
        (prefill, one), (_, decode) = (run_request(stats.live.model, request, n, context) for n in (1, batch))
        return max(decode.peak_bytes, prefill.peak_bytes + (batch - 1) * one.cache.held_bytes)

    assert estimate.max_context_limited_by == "memory"
    limit, request = DEVICE.memory_bytes, request_of(stats.live)
    assert peak(estimate.max_batch, 100) <= limit < peak(estimate.max_batch + 1, 100)
    assert peak(3, estimate.max_context) <= limit < peak(3, estimate.max_context + 1)


@pytest.mark.parametrize("model", [Decoder(positions=24), TupleDecoder(24)])
def test_positions_end(model):
    stats = Statistics(model, IDS)
    estimate = stats.serving(20, device=DEVICE, batches=[1])
    assert (estimate.max_context, estimate.max_context_limited_by) == (24, "model")
    assert "24 tokens for batch 1, limited by model" in str(estimate)
    assert "Contexts of more than 24 tokens are not accepted: " in estimate.notes[0]
    said = f"context=200 is beyond the 24 tokens that {type(model).__name__} accepts; pass less "
    with untouched(model), pytest.raises(InputError, match=said):
        stats.serving(200, device=DEVICE)
    ids = torch.zeros(1, 25, dtype=torch.long)
    with pytest.raises((IndexError, RuntimeError)):
        model(ids)


def test_index_beyond_a_table_is_named():
    stats = Statistics(Decoder(positions=24), IDS)
    said = r"IndexError: index 24 is out of range for positions\.weight of shape \[24, 32\]"
    assert run_request(stats.live.model, request_of(stats.live), 2, 24)[1].cache.nbytes == 2 * 24 * PER_TOKEN
    with pytest.raises(InputError, match=said):
        run_request(stats.live.model, request_of(stats.live), 2, 25)


def test_no_request_fits(stats):
    estimate = stats.serving(1000, device=DEVICE, memory_bytes=WEIGHTS + 100_000)
    assert (estimate.max_batch, estimate.fits) == (0, False)
    assert 0 < estimate.max_context < 1000
    assert "which does not fit" in str(estimate)
    with pytest.raises(InputError, match=r"the weights take .* in float32, more than the .*: pass tensor=4"):
        stats.serving(1000, device=DEVICE, memory_bytes=WEIGHTS // 3)


def test_times_are_the_time_of_the_bytes(stats):
    """Nothing but the bandwidth limits a device that computes at once; decode reads weights and cache."""
    slow = DeviceSpec("slow", {torch.float32: 1e18}, 1e6, memory_bytes=10**9, units=10)
    one, more = (stats.serving(n, device=slow, memory_bytes=2**17, batches=[1]) for n in (500, 1000))
    assert one.decode_limited_by == "memory"
    grown = (more.decode_ms - one.decode_ms) / 500
    assert grown == pytest.approx(one.decode_ms_per_token, rel=0.02)
    # each token of context is read once more by attention, and copied by ``cat``
    least = 1e3 * PER_TOKEN / slow.bandwidth
    assert least < grown < 6 * least
    assert one.decode_ms > 1e3 * (WEIGHTS - 4 * WORDS * WIDTH) / slow.bandwidth
    assert one.decode_ms_at(250) == pytest.approx(one.decode_ms - 250 * one.decode_ms_per_token)
    assert one.request_ms(1) == pytest.approx(one.prefill_ms + one.decode_ms)


def test_modes(stats):
    eager, compiled = (stats.serving(64, device="A100", mode=mode, batches=[1]) for mode in ("eager", "compiled"))
    assert eager.decode_limited_by == "host"
    assert compiled.decode_ms < eager.decode_ms
    assert compiled.decode_limited_by == "launches"  # its kernels take less than a launch each


def test_the_shortest_context_has_a_cache_per_token(stats):
    estimate = stats.serving(2, device=DEVICE, batches=[1])
    assert estimate.cache_bytes_per_token == estimate.cache_bytes / 2 == PER_TOKEN


def test_table_and_exports(estimate):
    text = str(estimate)
    assert "Cache per token" in text
    assert text.splitlines()[-1].split()[0] == "4"
    assert [each.batch for each in estimate.throughput] == [1, 3, 4]
    record = estimate.to_records()[1]
    assert record["tokens_per_second"] == pytest.approx(estimate.tokens_per_second)
    assert json.loads(json.dumps(estimate.to_dict()))["cache_bytes"] == estimate.cache_bytes
    assert list(estimate.to_pandas()["batch"]) == [1, 3, 4]


def test_plot(estimate):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    axes = estimate.plot()
    assert axes.get_xlabel() == "batch (requests)"
    pyplot.close(axes.figure)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 1}, "context must be an integer >= 2, got 1"),
        ({"batch": 0}, "batch must be an integer >= 1, got 0"),
        ({"tensor": "2"}, "tensor must be an integer >= 1, got '2'"),
        ({"dtype": torch.int8}, "dtype must be a floating point torch.dtype, .* got torch.int8"),
        ({"mode": "fast"}, "mode must be one of 'eager', 'compiled' or None, got 'fast'"),
        ({"cache": "statc"}, "cache must be .* got 'statc'; did you mean 'static'"),
        ({"cache": "static"}, "Decoder takes no cache; leave out cache="),
        ({"batches": [0]}, "batches must be a list of integers >= 1"),
        ({"batch": 10**9}, "batch must be at most 65536, got 1000000000"),
        ({"batches": [10**9]}, "batches must be a list of integers >= 1 and <= 65536"),
        ({"batches": 3}, "batches must be a list of integers >= 1 and <= 65536, got 3"),
        ({"calibrate": True}, "calibrate=True measures this machine; leave it out for made up"),
        ({"memory_bytes": "much"}, "memory_bytes must be an integer"),
    ],
)
def test_unusable_options(stats, options, message):
    with pytest.raises(InputError, match=message):
        stats.serving(**{"context": 8, "device": DEVICE, **options})


class Cached(nn.Embedding):
    """Hidden states of all tokens, in a list."""

    def forward(self, ids, cache=None):
        states = super().forward(ids)
        cache = [states if not cache else torch.cat([cache[0], states], dim=1)]
        return {"logits": states * cache[0].shape[1], "cache": cache}


def test_functions_that_make_a_cache():
    stats = Statistics(Cached(WORDS, WIDTH), IDS)
    assert stats.serving(8, device=DEVICE, cache=lambda model, n: [], batches=[1]).cache_bytes == 8 * WIDTH * 4
    with pytest.raises(InputError, match="the function passed as cache= must return an empty cache, got None"):
        stats.serving(8, device=DEVICE, cache=lambda model, n: None)
    with pytest.raises(InputError, match="serving Cached on shapes failed with the cache that was passed: TypeError"):
        stats.serving(8, device=DEVICE, cache=lambda model, n: 3)


def test_float8():
    spec = DeviceSpec("eight", {torch.float8_e4m3fn: 1e12}, 1e11, memory_bytes=10**8, units=10)
    made = Cached(WORDS, WIDTH)
    for model, dtype in ((made, torch.float8_e4m3fn), (made.to(torch.float8_e4m3fn), None)):
        eight = Statistics(model, IDS).serving(8, device=spec, dtype=dtype, batches=[1])
        assert (eight.weight_bytes, eight.cache_bytes) == (WORDS * WIDTH, 8 * WIDTH)
        assert "in float8_e4m3fn, as a server" in str(eight)


def test_quantised_caches_are_for_decoders():
    model = nn.Identity()
    model.config = SimpleNamespace(is_encoder_decoder=True)
    with pytest.raises(InputError, match="cache='fp8' is for decoders without an encoder"):
        cache_maker("fp8")(model, 8)


def test_a_cache_that_transformers_cannot_make(monkeypatch):
    transformers = pytest.importorskip("transformers")

    def unknown(backend, config):
        raise ValueError(f"Unknown quantization backend `{backend}`")

    monkeypatch.setattr(transformers, "QuantizedCache", unknown)
    model = nn.Identity()
    model.config = SimpleNamespace()
    version = re.escape(transformers.__version__)
    with pytest.raises(InputError, match=rf"'fp8' cannot be made by transformers {version}: "):
        cache_maker("fp8")(model, 8)


def test_fields_of_an_encoder_that_nobody_asked_for():
    encoded = Encoded((torch.ones(2),))
    assert encoded.last_hidden_state is encoded[0]
    assert encoded.router_logits is None
    assert not hasattr(encoded, "_fields")


@pytest.mark.parametrize(("end", "expected"), [(10**9, 995_012), (700, 700), (0, 0)])
def test_largest_fitting_asks_few(end, expected):
    asked = []

    def peak(n):
        asked.append(n)
        return max(5_000_000, n**2 + 10_000 * n + 7) if n <= end else None

    # n^2 + 10,000 n + 7 <= 10^12 up to n = sqrt(10^12 + 5,000^2 - 7) - 5,000
    assert largest_fitting(peak, 10**12, start=12, most=2**24) == expected
    assert len(asked) <= 13


def test_models_without_a_cache():
    with pytest.raises(InputError, match="Embedding returns no cache that it takes back"):
        Statistics(nn.Embedding(8, 4), IDS).serving(8, device=DEVICE)
    with pytest.raises(InputError, match="serving needs an input of tokens"):
        Statistics(nn.Linear(8, 4), (1, 8)).serving(8, device=DEVICE)
    with pytest.raises(NotLiveError, match="serving needs the live model"):
        Statistics(Decoder()).serving(8, device=DEVICE)


def test_tensor_parallel(stats):
    linked = DeviceSpec("linked", {torch.float32: 1e12}, 1e11, memory_bytes=10**8, units=10, interconnect=1e11)
    model = stats.live.model
    with untouched(model):
        two, again = (stats.serving(100, device=linked, tensor=2, batches=[1]) for _ in range(2))
    assert two == again  # distributed tensors infer shapes once; this is not an operator of the model
    assert two.cache_bytes == 100 * PER_TOKEN // 2  # by heads
    assert HEADS % 2 == 0
    assert WEIGHTS // 2 <= two.weight_bytes < 0.6 * WEIGHTS
    assert two.collective_ms > 0
    assert "2 x linked" in str(two)
    with pytest.raises(InputError, match="the links between devices are not known for made up"):
        stats.serving(100, device=DEVICE, tensor=2)


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="torch has no grouped_mm before 2.8")
def test_experts_over_devices():
    """Each device has the model but for its experts, and sends the rows of its own requests, by hand."""
    model = MixtureDecoder(EXPERTS).bfloat16()
    stats = Statistics(model, IDS)
    rates, links = {torch.bfloat16: 1e12, torch.float32: 1e12}, {"link_bandwidth": 1e6, "link_latency": 1e-5}
    spec = DeviceSpec("linked", rates, 1e11, memory_bytes=10**8, units=10)
    cluster = Cluster(spec, devices_per_node=4, **links)
    with untouched(model):
        alone = stats.serving(100, 16, cluster=cluster, batches=[16])
        divided = stats.serving(100, 16, cluster=cluster, batches=[16], expert=4)
    assert alone.weight_bytes - divided.weight_bytes == 2 * (EXPERTS - EXPERTS // 4) * WIDTH**2
    assert divided.cache_bytes == alone.cache_bytes == 100 * 2 * WIDTH * 2
    rows = 16 * 2  # a token of each request goes to two experts
    network = Network(cluster)
    sent = (8 * EXPERTS, 2 * rows * WIDTH, 2 * rows, 2 * rows * WIDTH)  # numbers of rows, rows, their weights, results
    seconds = sum(network.seconds("all_to_all", nbytes, network.group(4)) for nbytes in sent)
    assert divided.collective_ms == pytest.approx(1e3 * seconds)
    assert divided.tokens_per_second == pytest.approx(16e3 / divided.decode_ms)
    assert "on 4 x linked: 100 tokens of context, batch 16 of each device" in str(divided)
    for sizes, message in (
        ({"expert": 3}, "expert=3 does not divide the 8 experts of experts"),
        ({"expert": 2, "tensor": 2}, "devices of tensor have the same requests, devices of expert their own"),
        ({"expert": 8}, "expert=8 needs as many devices, the cluster has 4"),
    ):
        with pytest.raises(InputError, match=message):
            stats.serving(100, cluster=cluster, **sizes)


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="torch has no grouped_mm before 2.8")
def test_a_load_on_devices_that_divide_experts():
    """A device that decodes a request at a time takes the decode of the estimate, with its exchanges, per token."""
    stats = Statistics(MixtureDecoder(EXPERTS).bfloat16(), IDS)
    rates = {torch.bfloat16: 1e12, torch.float32: 1e12}
    spec = DeviceSpec("linked", rates, 1e11, memory_bytes=10**8, units=10)
    cluster = Cluster(spec, devices_per_node=4, link_bandwidth=1e6, link_latency=1e-5)
    estimate = stats.serving(64, cluster=cluster, batches=[1], expert=4)
    simulation = estimate.simulate(Load(2, prompt=20, output=45, arrivals=[0.0, 1.0]), Engine(max_requests=1))
    assert simulation.tpot_ms.mean == pytest.approx(estimate.decode_ms, rel=0.05)
    space = ServingSpace([1, 2], max_requests=[2], token_budget=[64], expert=[4])
    plans = estimate.plan(Load(4, prompt=20, output=10), tpot_ms=1e6, space=space)
    assert plans.tried == 1  # there is none with tensor=2 and expert=4
    divided = plans.best
    assert (divided.tensor, divided.replicas, divided.devices) == (1, 4, 4)
    assert divided.devices_for(1.5 * divided.requests_per_second) == 8
    assert divided.weight_bytes == estimate.weight_bytes
    assert "--data-parallel-size 4 --enable-expert-parallel --max-num-seqs 2" in divided.flags("vllm")
    # SGLang takes the requests and the tokens of all devices, and divides them by --dp-size
    flags = (
        "--tp-size 4 --dp-size 4 --ep-size 4 --enable-dp-attention --max-running-requests 8 --chunked-prefill-size 256 "
    )
    assert divided.flags("sglang").startswith(flags)
    assert "--tp_size 4 --ep_size 4 --enable_attention_dp --max_batch_size 2 " in divided.flags("tensorrt-llm")


def test_cluster(stats):
    """Half of the link's bandwidth and a longer latency make collectives slower; the memory is the cluster's."""
    spec = DeviceSpec("linked", {torch.float32: 1e12}, 1e11, memory_bytes=10**8, units=10, interconnect=1e11)
    plain = stats.serving(100, device=spec, tensor=2, batches=[1])
    same, slow = (
        stats.serving(100, cluster=Cluster(spec, devices_per_node=2, **links), tensor=2, batches=[1])
        for links in ({"memory_bytes": 2 * 10**7}, {"link_bandwidth": 1e9, "link_latency": 1e-4})
    )
    assert same.collective_ms == plain.collective_ms
    assert same.memory_bytes == 2 * 10**7
    # two collectives in a layer, and the ones of words and head: each waits for a message at least
    assert slow.collective_ms > plain.collective_ms + 2 * 0.1
    doubled = Cluster(spec, devices_per_node=2, factors=Factors(2.0, 2.0, 2.0, 2.0, 2.0))  # all that takes time
    slower = stats.serving(100, cluster=doubled, tensor=2, batches=[1])
    assert slower.prefill_ms == pytest.approx(2 * same.prefill_ms)
    assert slower.decode_ms == pytest.approx(2 * same.decode_ms)
    with pytest.raises(InputError, match="tensor=4 needs as many devices, the cluster has 2"):
        stats.serving(100, cluster=Cluster(spec, devices_per_node=2), tensor=4)
    with pytest.raises(InputError, match="pass device= or cluster=, not both"):
        stats.serving(100, device=spec, cluster=Cluster(spec))
    with pytest.raises(InputError, match="cluster must be a Cluster or None, got 'DGX'"):
        stats.serving(100, cluster="DGX")


def test_ranks_of_several_nodes_take_the_network():
    """An interface sends an eighth of 2 * 15 / 16 times the bytes, at 25 GB/s; NVLink alone is faster."""
    target = SimpleNamespace(model=SimpleNamespace(spec=DeviceSpec("H100")), name="H100")
    nbytes = 2**26
    least = 2 * 15 / 16 * nbytes / 8 / 25e9
    one_node, two_nodes = (communication(target, ServingOptions(2, tensor=n))("all_reduce", nbytes) for n in (8, 16))
    assert one_node < least < two_nodes < 2 * least


def test_the_host_of_an_eager_forward_is_that_of_its_latency(stats):
    """What takes the host's time is the same: operators, views, and calls of modules."""
    _, decode = run_request(stats.live.model, request_of(stats.live), 1, 4)
    costs = target_of("H100").times.host_seconds
    views = sum(operator.run.call.rule.is_view for operator in decode.operators)
    operators = sum(operator.run.call.rule.launches_kernel for operator in decode.operators)
    assert views
    expected = operators * costs["operator"] + views * costs["view"] + decode.n_calls * costs["module"]
    time = phase_time(stats.live, decode, target_of("H100"), "eager")
    assert (time.limited_by, time.seconds) == ("host", pytest.approx(expected))


@pytest.mark.parametrize(
    ("facts", "limit"),
    [
        ({"flops_per_second": 1e6, "bytes_per_second": 1e15, "operator": 1e-9}, "compute"),
        ({"flops_per_second": 1e15, "bytes_per_second": 1e6, "operator": 1e-9}, "memory"),
        ({"flops_per_second": 1e12, "bytes_per_second": 1e12, "operator": 1.0}, "host"),
    ],
)
def test_what_limits_this_machine(stats, facts, limit):
    """A table without calls takes the time of multiply-adds, bytes and dispatch, of which one is made the slowest."""
    (prefill,) = run_request(stats.live.model, request_of(stats.live), 2, 40, decodes=False)
    target = Target("this machine", KernelTable(machine_of(torch.device("cpu")), facts=facts))
    assert phase_time(stats.live, prefill, target, "eager").limited_by == limit

"""Weights and caches as a server keeps them: bytes and kernels by hand; few of a model's equal blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from modelsummary import DeviceSpec, InputError, Statistics
from modelsummary.operators.kernels import kernels_of
from modelsummary.serving import Engine
from modelsummary.serving import server as server_module
from modelsummary.serving.depth import fold_of
from modelsummary.serving.number_formats import format_of_checkpoint
from modelsummary.serving.published import ServedCase
from modelsummary.serving.request import request_of
from modelsummary.serving.run import run_request
from modelsummary.serving.server import Server, ServingOptions
from modelsummary.serving.times import with_merged_products
from tests.serving.models import WIDTH, WORDS, BlockDecoder, Cache, Decoder
from tests.serving.test_serving import DEVICE, IDS
from tests.untouched import untouched

# Nothing but bytes takes time.
BYTES = DeviceSpec(
    "bytes", {torch.bfloat16: 1e18, torch.float8_e4m3fn: 2e18}, 1e6, memory_bytes=10**9, units=10, generation="none"
)
IN_PRODUCTS = 4 * WIDTH**2 + 8 * WIDTH**2  # of a layer; its biases, the words and the head stay in two bytes
HALF = 2 * (2 * WORDS * WIDTH + IN_PRODUCTS + 5 * WIDTH)
CONTEXT = 100


@pytest.fixture(scope="module")
def stats():
    return Statistics(Decoder(), IDS)


def served(stats, **options):
    return stats.serving(CONTEXT, device=BYTES, dtype=torch.bfloat16, batches=[1], **options)


@pytest.fixture(scope="module")
def plain(stats):
    return served(stats)


@pytest.mark.parametrize(("weights", "bits"), [("fp8", 8), ("int4", 4 + 20 / 128), ("mxfp4", 4.25)])
def test_weights_by_hand(stats, plain, weights, bits):
    with untouched(stats.live.model):
        estimate = served(stats, weights=weights)
    saved = round(IN_PRODUCTS * (2 - bits / 8))
    assert plain.weight_bytes - estimate.weight_bytes == saved
    assert (plain.weight_bytes, plain.peak_bytes - estimate.peak_bytes) == (HALF, saved)
    assert estimate.cache_bytes == plain.cache_bytes
    share = (plain.decode_ms - estimate.decode_ms) * 1e-3 * BYTES.bandwidth / saved
    assert 1 < share < 1.6  # the bandwidth is not reached in full; fp8 reads the hidden states in one byte, too
    assert weights in str(estimate).lower()


def test_cache_dtype_by_hand(stats, plain):
    estimate = served(stats, cache_dtype=torch.float8_e4m3fn)
    assert (plain.cache_bytes, estimate.cache_bytes) == (CONTEXT * 2 * WIDTH * 2, CONTEXT * 2 * WIDTH)
    assert estimate.weight_bytes == plain.weight_bytes
    assert estimate.decode_ms < plain.decode_ms
    assert "kept in float8_e4m3fn" in str(estimate)


def test_cache_dtype_where_attention_reads_copies(stats, plain, monkeypatch):
    """As where keys are repeated for several heads: the copy reads the cache, and attention the copy."""
    update = Cache.update
    monkeypatch.setattr(Cache, "update", lambda *args: tuple(tensor.clone() for tensor in update(*args)))
    copied = Statistics(Decoder(), IDS)
    estimate, wide = served(copied, cache_dtype=torch.float8_e4m3fn), served(copied)
    assert (wide.cache_bytes, estimate.cache_bytes) == (plain.cache_bytes, plain.cache_bytes // 2)
    assert estimate.decode_ms < wide.decode_ms


def test_a_wider_cache_takes_more(stats, plain):
    wide = served(stats, cache_dtype="fp32")
    assert wide.cache_bytes == 2 * plain.cache_bytes
    assert wide.decode_ms > plain.decode_ms
    assert wide.peak_bytes > plain.peak_bytes


def points_of(stats, **options):
    return Server(stats.live, stats.root, BYTES, ServingOptions(16, dtype=torch.bfloat16, **options)).points()


def test_weights_with_the_shape_of_a_table_of_positions():
    """Four weights of attention have the shape of the one table of positions: they are no heads."""
    stats = Statistics(Decoder(positions=WIDTH), IDS)
    with points_of(stats) as plain, points_of(stats, weights="FP8") as kept:
        assert plain.decode(1, 16).weight_bytes - kept.decode(1, 16).weight_bytes == IN_PRODUCTS


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, "float32"),
        ({"dtype": torch.float16}, "bfloat16"),
        ({"dtype": "fp8"}, "fp8"),
        ({"dtype": "fp8", "weights": "int4"}, "int4"),
    ],
)
def test_the_form_of_weights_decides_which_tables_are_near(stats, options, weights):
    assert Server(stats.live, stats.root, BYTES, ServingOptions(16, **options)).case == ServedCase("none", weights)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "int5"}, "weights must be one of 'fp8', .* or None, got 'int5'; did you mean 'int"),
        ({"weights": 4}, "weights must be one of 'fp8', .* or None, got 4"),
        ({"cache_dtype": torch.int8}, "cache_dtype must be a floating point torch.dtype or None, .*, got torch.int8"),
        ({"cache_dtype": torch.float16, "cache": "static"}, "pass cache= or cache_dtype=, not both"),
        ({"weights": "fp8", "device": DEVICE}, "needs products of torch.float8_e4m3fn, which made up does not have"),
    ],
)
def test_what_cannot_be_kept(stats, options, message):
    with pytest.raises(InputError, match=message):
        stats.serving(**{"context": 8, "device": BYTES, **options})


def test_products_of_one_input_are_one(stats):
    """Queries, keys and values of a layer; the output, both products of the MLP and the head stay alone."""
    operators = run_request(stats.live.model, request_of(stats.live), 2, 30)[1].operators
    merged = with_merged_products(operators)
    every, fewer = (
        [operator.run.call for operator in ones if "mm" in operator.run.call.name] for ones in (operators, merged)
    )
    assert (len(every), len(fewer)) == (7, 5)
    assert (2, 3 * WIDTH) in {call.outputs[0].shape for call in fewer}
    for figure in ("macs", "bytes_written"):
        assert sum(getattr(call.cost, figure) for call in every) == sum(getattr(call.cost, figure) for call in fewer)
    saved = sum(call.cost.bytes_read for call in every) - sum(call.cost.bytes_read for call in fewer)
    assert saved == 2 * 2 * WIDTH * 4  # two readings of the hidden states of two tokens in float32


@pytest.mark.parametrize("tensor", [1, 2])
def test_few_blocks_tell_what_all_take(monkeypatch, tensor):
    """Prices of nine equal layers, from forwards with three of them, are the ones from forwards of all.

    How well they tell it, the model on one device does, once for all servers.
    """
    stats = Statistics(BlockDecoder(9), IDS)
    engine = Engine(token_budget=64, max_requests=4)
    device, compared = replace(BYTES, interconnect=1e6), []
    difference = server_module._difference
    monkeypatch.setattr(server_module, "_difference", lambda *args: compared.append(args[-1]) or difference(*args))
    server = Server(stats.live, stats.root, device, ServingOptions(CONTEXT, tensor=tensor, dtype=torch.bfloat16))
    few, other = server.prices(engine), server.changed(weights="int4").prices(engine)
    assert compared == [64, CONTEXT]
    assert all(prices[0]._points.error < 0.001 for prices in (few, other))
    assert {is_few for is_few, *_ in server._runs} == ({False, True} if tensor == 1 else {True})
    assert other[0].weight_bytes < few[0].weight_bytes
    monkeypatch.setattr(server_module, "fold_of", lambda _: None)
    every = server.changed().prices(engine)
    few, every = few[0], every[0]
    assert few.pages == every.pages
    for few_curve, curve in ((few._tokens, every._tokens), (few._cached, every._cached), (few._bytes, every._bytes)):
        assert [point.y for point in few_curve.nodes] == pytest.approx([point.y for point in curve.nodes], rel=0.01)


class Alternating(Cache):
    """Every second layer keeps 80 tokens; nothing but the number of a layer tells which."""

    def update(self, number, keys, values):
        self.window = 80 if number % 2 else None
        return super().update(number, keys, values)


class AlternatingDecoder(Decoder):
    def forward(self, ids, past=None, use_cache=True):
        return super().forward(ids, Alternating() if past is None else past)


def test_blocks_that_differ_in_long_contexts_only_are_not_folded():
    """Half of eight layers keep 80 of 100 tokens, which a request of 64 tokens does not show."""
    stats = Statistics(AlternatingDecoder(layers=8), IDS)
    server = Server(stats.live, stats.root, BYTES, ServingOptions(CONTEXT, dtype=torch.bfloat16))
    with server.points(fold_of(stats.root)) as points:
        assert points.decode(1, CONTEXT).cache.nbytes == (4 * CONTEXT + 4 * 80) * 2 * WIDTH * 2
        assert points.error == 0.0  # nothing is folded


def test_a_collective_ends_the_kernels_that_it_waits_for():
    """Both sums of each of three layers add 50 tokens of a reduced result: two operands are read, one is written."""
    stats = Statistics(BlockDecoder(3), IDS)
    device = replace(BYTES, interconnect=1e6)
    server = Server(stats.live, stats.root, device, ServingOptions(CONTEXT, tensor=2, dtype=torch.bfloat16))
    with server.points() as points:
        kernels = kernels_of(points.prefill(1, 51).operators, "compiled")
    sums = [kernel for kernel in kernels if kernel.name == "add (triton)"]
    assert [(kernel.n_operators, kernel.moved_bytes) for kernel in sums] == [(1, 3 * 50 * WIDTH * 2)] * 6


def groups(*weights):
    return {"quant_method": "compressed-tensors", "config_groups": dict(enumerate({"weights": row} for row in weights))}


INT4, FP8 = {"num_bits": 4, "type": "int"}, {"num_bits": 8, "type": "float"}


@pytest.mark.parametrize(
    ("quantization", "form"),
    [
        ({"quant_method": "gptq", "bits": "4"}, "int4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        (groups(INT4, INT4), "int4"),
        (groups({"num_bits": 4, "type": "float", "group_size": 16}), "nvfp4"),
        (groups({"num_bits": 4, "type": "float", "group_size": 32}), "mxfp4"),
    ],
)
def test_the_form_that_a_checkpoint_names(quantization, form):
    assert format_of_checkpoint(quantization) == form


@pytest.mark.parametrize(
    ("quantization", "count"),
    [
        (groups(INT4, FP8), "several"),
        (groups({"num_bits": [4, 3], "type": "float"}), "none"),
        ({"quant_method": "awq", "bits": 3}, "none"),
        ({"quant_method": "x", "config_groups": [1]}, "none"),
    ],
)
def test_forms_that_are_refused(quantization, count):
    with pytest.raises(InputError, match=f"names {count} of the forms fp8, int8, int4, mxfp4, nvfp4; pass weights="):
        format_of_checkpoint(quantization)

"""Profiles of graphs: memory and FLOPs of each node, against figures derived by hand and against other sources."""

from __future__ import annotations

import csv
import inspect
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from modelsummary import InputError, Statistics, TraceError, symbolic_trace
from modelsummary.fx import (
    CommunicationProfiler,
    FlopProfiler,
    GraphProfiler,
    MeshSpec,
    MetaInfo,
    ShapeProp,
    TensorSet,
    checkpoint_graph,
    flop_count,
    sim_env,
    symbolic_profile,
)
from modelsummary.fx.profile_table import profile_table, rows_of
from modelsummary.units import scaled
from tests.idioms import IDIOMS, some
from tests.untouched import untouched

MIB = 2**20


class Mlp(nn.Module):
    """Layers 4 -> 8 -> ReLU -> 2, with a residual sum between."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        hidden = self.up(x)
        return self.down(F.relu(hidden) + hidden)


def profiled(model, *args, **options):
    key = next(iter(inspect.signature(model.forward).parameters))
    graph = symbolic_trace(model, meta_args={key: args[0]})
    return symbolic_profile(graph, *args, **options)


def test_every_column_of_a_small_graph():
    """x: 3 x 4 floats = 48 B; up: 96 B; relu saves its result, 96 B; the sum is saved by down, 96 B."""
    rows = {row["op"]: row for row in rows_of(profiled(Mlp(), torch.rand(3, 4)))}

    def sizes(name):
        return [value for key, value in rows[name].items() if key.endswith("_size")]

    # accumulate, incremental, output, temp, param, backward
    assert sizes("x") == [48, 48, 48, 0, 0, 0]
    assert sizes("up") == [48, 0, 0, 96, 160, 48]  # neither relu nor the sum keeps it
    assert sizes("relu") == [144, 96, 0, 96, 0, 96]  # saved, but by itself
    assert sizes("add") == [240, 96, 96, 0, 0, 192]
    assert sizes("down") == [240, 0, 0, 24, 72, 96]
    assert sizes("output") == [240, 0, 0, 24, 0, 24]
    macs = {name: row["fwd_macs"] for name, row in rows.items()}
    assert macs == {"x": 0, "up": 3 * 4 * 8, "relu": 0, "add": 0, "down": 3 * 8 * 2, "output": 0}
    assert [rows[name]["fwd_flop"] for name in ("up", "down")] == [192, 96]
    assert [rows[name]["bwd_flop"] for name in ("up", "down")] == [192, 2 * 96]  # up: x takes no gradient


def test_an_input_that_takes_a_gradient_costs_its_product():
    graph = profiled(Mlp(), torch.rand(3, 4, requires_grad=True))
    up = next(node for node in graph.graph.nodes if node.name == "up").meta["info"]
    assert (up.fwd_flop, up.bwd_flop) == (192, 2 * 192)


@pytest.mark.parametrize(
    ("layer", "size", "forward", "backward"),
    [
        (nn.Conv2d(32, 64, 3, padding=1, groups=4), (2, 32, 28, 28), 7_225_344, 14_450_688),
        (nn.Conv2d(32, 32, 3, padding=1, groups=32), (2, 32, 28, 28), 451_584, 903_168),
        (nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1), (2, 32, 28, 28), 12_845_056, 2 * 12_845_056),
        (nn.Linear(64, 96), (2, 50, 64), 614_400, 1_228_800),
        (nn.LSTM(64, 128, 2, batch_first=True), (2, 50, 64), 22_937_600, None),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_products_of_layers(layer, size, forward, backward, device):
    """Hand-derived multiply-adds; the backward has one product for the weight and one for the input."""
    x = torch.rand(size, requires_grad=True)
    flops = flop_count(layer, x, device=device)
    assert flops[0] == 2 * forward
    assert backward is None or flops[1] == 2 * backward


def test_flop_count_of_a_function(capsys):
    flops = flop_count(lambda a, b: (a @ b).relu(), torch.rand(2, 3), torch.rand(3, 5), verbose=True)
    assert flops == (2 * 30, 4 * 30)
    assert capsys.readouterr().out == "Forward 60 FLOPs\nBackward 120 FLOPs\nNot counted: none\n"
    with pytest.raises(InputError, match="expected a module or a function, got int: 3"):
        flop_count(3)


def test_flop_count_of_what_needs_values_or_writes_to_its_inputs():
    x = torch.rand(3, 4)
    assert flop_count(lambda x: (x @ x.T) * x.sum().item(), x) == (72, 144)
    assert flop_count(lambda x: x.mul_(2) @ x.T, before := x.clone()) == (72, 144)
    assert torch.equal(before, x)
    with torch.inference_mode():
        assert flop_count(nn.Linear(4, 4), torch.rand(3, 4)) == (96, 96)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_input_that_another_call_made_takes_a_gradient(device):
    x = torch.rand(3, 4, requires_grad=True) * 2
    assert flop_count(nn.Linear(4, 4), x, device=device) == (96, 192)


def test_flop_count_says_in_one_line_what_failed(capfd):
    with pytest.raises(TraceError, match=r"Linear failed: RuntimeError: a and b must have same reduction dim"):
        flop_count(nn.Linear(4, 4), torch.rand(3, 5))
    assert capfd.readouterr() == ("", "")
    with pytest.raises(InputError, match="expected a module or a function, got type"):
        flop_count(nn.Linear, torch.rand(3, 5))


@pytest.mark.parametrize(
    "use",
    [
        ShapeProp,
        lambda module: GraphProfiler(module).propagate(torch.rand(2, 2)),
        lambda module: CommunicationProfiler(module, MeshSpec(2, 1e9)),
        lambda module: checkpoint_graph(module, ["0"]),
        lambda module: symbolic_profile(module, torch.rand(2, 2)),
    ],
)
def test_what_is_no_graph_is_refused(use):
    with pytest.raises(InputError, match=r"expected a torch\.fx\.GraphModule, got Linear"):
        use(nn.Linear(2, 2))


def test_threads_wait_for_one_another():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(8)])
    x, failed = torch.rand(4, 16), []
    graph = symbolic_trace(model, meta_args={"input": x})

    def repeat(work):
        try:
            for _ in range(3):
                work()
        except Exception as error:
            failed.append(error)

    works = [
        lambda: symbolic_profile(graph, x),
        lambda: flop_count(model, x),
        lambda: ShapeProp(graph).propagate(x),
        lambda: symbolic_trace(model, meta_args={"input": x}),
        lambda: Statistics(model, (4, 16)).graph_module(),
    ]
    threads = [threading.Thread(target=repeat, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert not any(each.is_meta for each in model.parameters())


def test_attention_says_which_kernel():
    """4 heads of 8, 2 x 16 tokens: a product has 2*4*16*16*8 = 16,384 MACs; the fused kernel computes scores again."""
    q = torch.rand(2, 4, 16, 8)
    assert flop_count(F.scaled_dot_product_attention, q, q.clone(), q.clone(), device="meta") == (
        2 * 2 * 16_384,
        2 * 4 * 16_384,
    )
    assert flop_count(F.scaled_dot_product_attention, q, q.clone(), q.clone(), device="cpu") == (
        2 * 2 * 16_384,
        2 * 5 * 16_384,
    )


def test_a_fused_recurrent_kernel_has_a_backward():
    """Two layers, 10 rows of (8 + 6) x 24 and of (6 + 6) x 24 multiply-adds: 6,240; the backward has all gradients."""
    assert flop_count(nn.LSTM(8, 6, 2), torch.rand(5, 2, 8), device="cpu") == (2 * 6_240, 4 * 6_240)


def seed_rows(name):
    with (Path(__file__).parents[1] / "data" / name).open() as lines:
        return list(csv.DictReader(line for line in lines if not line.startswith("#")))


@pytest.fixture(scope="module")
def models():
    return pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_mobilenet_v2_as_the_analyzer_printed_it(models, device):
    model = models.mobilenet_v2().train()
    x = torch.empty(100, 3, 224, 224, device="meta")
    with untouched(model):
        graph = symbolic_trace(model, meta_args={"x": torch.empty(2, 3, 224, 224, device="meta")})
        rows = rows_of(symbolic_profile(graph, x, device=device))
    expected = seed_rows("analyzer_mobilenet_v2.csv")
    assert len(rows) == len(expected) == 155
    for own, row in zip(rows, expected, strict=True):
        printed = {
            name: own[name] if name.startswith("op") and name != "output_size" else scaled(own[name], "B", binary=True)
            for name in row
        }
        assert printed == row
    assert rows[-1]["accumulate_size"] == 7_821_090_048  # what saved_tensors_hooks finds in a real run
    assert sum(row["fwd_macs"] for row in rows) == 30_077_427_200
    assert sum(row["bwd_flop"] for row in rows) == 2 * 59_071_052_800
    depthwise = next(row for row in rows if row["op"] == "features_1_conv_0_0")
    assert depthwise["bwd_flop"] == 2 * (361_267_200 + 361_267_200)


def test_vit_b_16_as_the_analyzer_printed_it(models):
    model = models.vit_b_16().train()
    x = torch.empty(8, 3, 224, 224, device="meta")
    graph = symbolic_trace(model, meta_args={"x": torch.empty(2, 3, 224, 224, device="meta")})
    rows = rows_of(symbolic_profile(graph, x, device="meta"))
    assert len(rows) == 170
    assert rows[-1]["accumulate_size"] == 1_118_392_640
    assert sum(row["fwd_macs"] for row in rows) == 140_510_625_792
    assert sum(row["bwd_flop"] for row in rows) == 2 * 280_096_407_552
    by_name = {row["op"].removeprefix("encoder_layers_encoder_layer_0_"): row["fwd_macs"] for row in rows}
    assert by_name["self_attention"] == 4_195_135_488
    assert by_name["mlp_0"] == 3_718_250_496
    assert by_name["conv_proj"] == 924_844_032
    assert by_name["heads_head"] == 6_144_000
    rows = rows_of(symbolic_profile(graph, x, device="cpu"))  # the fused kernel keeps no scores
    assert sum(row["bwd_flop"] for row in rows) == 2 * 282_957_717_504


@pytest.mark.parametrize("name", some("gpt2 with loss", "llama", "t5", "experts", "unet", "lstm"))
def test_totals_are_those_of_the_statistics(name):
    torch.manual_seed(0)
    model, inputs = IDIOMS[name][0](), IDIOMS[name][1](3, 0)
    graph = symbolic_trace(model, meta_args=inputs)
    given = {key: value for key, value in inputs.items() if isinstance(value, torch.Tensor)}
    with untouched(model):
        symbolic_profile(graph, **given)
    assert sum(row["fwd_macs"] for row in rows_of(graph)) == Statistics(model, inputs).root.macs


def test_memory_is_what_a_real_run_saves():
    model = IDIOMS["unet"][0]()
    x = torch.rand(2, 3, 16, 16)
    graph = symbolic_profile(symbolic_trace(model, meta_args={"x": x}), x)
    with sim_env(model) as env:
        model(x)
    assert next(iter(reversed(graph.graph.nodes))).meta["info"].accumulate_size == env.ctx.nbytes


def test_a_table_says_its_units(capsys):
    graph = profiled(Mlp(), torch.rand(3, 4), verbose=True)
    out = capsys.readouterr().out
    assert out == profile_table(graph) + "\n"
    lines = out.splitlines()
    assert lines[0].split("  ")[0] == "Op type"
    assert "Fwd MACs" in lines[0]
    assert lines[-2:] == [
        "Kept for the backward: 240 B (240 B)",
        "Products: 144 MACs forward = 288 FLOPs; 384 FLOPs backward",
    ]


def test_bytes_are_printed_with_binary_prefixes():
    assert [scaled(each, "B", binary=True) for each in (0, 1023, 1024, 160_563_200, 3 * 2**30)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "153.12 MiB",
        "3.00 GiB",
    ]


def test_profilers_fill_their_own_part():
    graph = symbolic_trace(Mlp(), meta_args={"x": torch.rand(3, 4)})
    GraphProfiler(graph).propagate(torch.rand(3, 4))
    infos = [node.meta["info"] for node in graph.graph.nodes]
    assert infos[-1].accumulate_size == 240
    assert sum(info.macs for info in infos) == 0
    FlopProfiler(graph).propagate(torch.rand(3, 4))
    assert sum(node.meta["info"].macs for node in graph.graph.nodes) == 144


def test_shapes_on_a_device_that_is_not_there():
    graph = symbolic_trace(Mlp(), meta_args={"x": torch.rand(3, 4)})
    out = ShapeProp(graph).propagate(torch.rand(7, 4), device="cuda")
    assert (out.shape, out.device.type) == ((7, 2), "cuda")
    shapes = {node.name: node.meta["tensor_meta"].shape for node in graph.graph.nodes}
    assert shapes["up"] == (7, 8)
    with pytest.raises(TraceError, match=r"node 'up' .* failed: RuntimeError"):
        ShapeProp(graph).propagate(torch.rand(7, 5))
    with pytest.raises(TraceError, match=r"the graph takes 1 argument\(s\) \['x'\], got 2"):
        ShapeProp(graph).propagate(torch.rand(7, 4), 1)


def test_an_ordinary_graph_module_is_profiled():
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    symbolic_profile(graph, torch.rand(3, 4))
    assert sum(row["fwd_macs"] for row in rows_of(graph)) == 144


def test_sets_of_tensors():
    one, two = TensorSet({(1, 0): 4, (2, 0): 8}), TensorSet({(2, 0): 6, (3, 0): 1})
    assert one.union(two) == {(1, 0): 4, (2, 0): 8, (3, 0): 1}
    assert one.intersect(two) == {(2, 0): 8}
    assert one.subtract(two) == {(1, 0): 4}
    assert one.union(two).nbytes == 13
    first, second = MetaInfo(saved=one), MetaInfo(kept=two)
    assert first.union(second) == one.union(two)
    assert first.intersect(second) == one.intersect(two)
    assert first.subtract(second) == one.subtract(two)


def test_sim_env_tells_parameters_and_buffers_from_activations():
    layer = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.Sigmoid())
    with sim_env(layer) as env:
        layer(torch.rand(2, 4))
    # input, result of the product, mean and inverse deviation, result of the sigmoid
    assert sorted(env.ctx.values()) == [16, 16, 32, 32, 32]
    assert len(env.param_ctx) == 3
    assert len(env.buffer_ctx) == 3

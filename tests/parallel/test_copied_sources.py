"""Attention as widely copied sources write it: what their plans shard, and that they train as the model."""

from __future__ import annotations

import builtins
import copy
import dis
import types

import pytest
import torch
from torch import nn

from modelsummary import InputError, Statistics
from tests.parallel import collectives, processes
from tests.parallel.copied_models import ATTENTIONS, Model, ids

# Four results of 4 x 8 tokens of 16 features, and the logits of 48; the head reduces the gradient of its input.
ACTIVATION = 4 * 8 * 16 * 4
LEAST = {
    ("forward", "all_reduce"): (5, 5 * ACTIVATION),
    ("forward", "all_gather"): (1, 3 * ACTIVATION),
    ("backward", "all_reduce"): (5, 5 * ACTIVATION),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_heads_are_split(name):
    plan = Statistics(Model(name).eval(), ids()).parallel_plan(tensor=2)
    assert not [layer.reason for layer in plan.layers if layer.reason]
    expected = dict(LEAST)
    if name == "palm":  # attention and MLP are reduced one by one, and added then
        expected["forward", "all_reduce"] = (7, 7 * ACTIVATION)
    assert {key: moved for key, moved in plan.collectives.items() if key[1] != "all_to_all"} == expected
    assert plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("name", "pieces", "times"),
    [
        # Of queries, keys and values: 16, 8 and 8 rows and elements of the bias.
        ("litgpt gqa", ((16, False), (8, False), (8, False)), 4),
        ("litgpt mqa", ((16, False), (4, True), (4, True)), 4),
        # Queries, a key and a value that all heads share, and the two halves of the gated MLP; no bias.
        ("palm", ((16, False), (4, True), (4, True), (64, False), (64, False)), 2),
    ],
)
def test_ranks_exchange_rows_of_unequal_pieces(name, pieces, times):
    plan = Statistics(Model(name).eval(), ids()).parallel_plan(tensor=2)
    first = next(layer for layer in plan.layers if "pieces" in layer.options)
    assert first.options["pieces"] == dict.fromkeys(first.options["shards"], pieces)
    assert set(first.options["shards"].values()) == {"Shard(0)"}
    rows = sum(size if is_whole else size // 2 for size, is_whole in pieces)
    nbytes = 2 * rows * (16 + (times == 4)) * 4  # two layers
    exchanged = {key: moved for key, moved in plan.collectives.items() if key[1] == "all_to_all"}
    assert exchanged == {(phase, "all_to_all"): (times, nbytes) for phase in ("forward", "backward")}


def test_heads_of_a_piece_that_do_not_divide_are_named():
    plan = Statistics(Model("litgpt gqa").eval(), ids()).parallel_plan(tensor=4)
    assert {layer.reason for layer in plan.layers if layer.fqn == "h.0.attn.qkv"} == {
        "2 heads or features of each piece of h.0.attn.qkv do not divide by 4; divisors of 2 work"
    }


class Tripled(nn.Module):
    """Groups of queries that are expanded with the whole number of heads, beside a tensor that all heads share."""

    def __init__(self):
        super().__init__()
        self.k, self.out = nn.Linear(16, 16), nn.Linear(48, 16)

    def forward(self, x):
        b, t, c = x.shape
        heads = self.k(x).view(b, t, 4, 1, c // 4).expand(b, t, 4, 3, c // 4)
        return self.out(heads.reshape(b, t, 3 * c))


def test_expansions_take_the_heads_of_a_rank():
    plan = Statistics(nn.Sequential(Tripled()), (2, 6, 16)).parallel_plan(tensor=2)
    (sizes, *layers) = plan.layers
    assert [layer.reason for layer in layers] == ["", ""]
    assert [call["name"] for call in sizes.options["calls"]] == ["view", "expand", "reshape"]


def test_sizes_of_the_whole_model_are_given_as_those_of_a_rank():
    plan = Statistics(Model("nanoGPT").eval(), ids()).parallel_plan(tensor=2)
    (first, _) = (layer for layer in plan.layers if layer.role == "sizes")
    assert (first.fqn, first.style) == ("h.0.attn", "LocalSizes")
    # split(16, dim=2) of 48 features, view(4, 8, 4, 4) and view(4, 8, 16).
    calls = [(call["name"], call.get("whole", call.get("numbers")), call["local"]) for call in first.options["calls"]]
    assert calls == [("split", ((0, 16, 8),), 24), ("view", 4, 8), ("view", 16, -1)]
    assert plan.attributes == ()


@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"tensor": 2, "shard": 2}, {"tensor": 2, "sequence": True}])
def test_code_imports_every_name_that_it_uses(sizes):
    def names_in(code):
        yield from (step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                yield from names_in(inner)

    for name in ("nanoGPT", "x-transformers", "whisper", "palm", "mha"):
        code = compile(Statistics(Model(name).eval(), ids()).parallel_plan(**sizes).to_code(), name, "exec")
        functions = {}
        exec(code, functions)
        assert {each for each in names_in(code) if each not in functions} <= {
            *vars(builtins),
            "__module__",
            "__qualname__",
        }


class Between(nn.Module):
    """A function between a layer that is split by columns and one that is split by rows."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return self.down(self.function(self.up(x)))


def reason(function):
    plan = Statistics(nn.Sequential(Between(function)), (2, 4, 16)).parallel_plan(tensor=2)
    return next(layer.reason for layer in plan.layers)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("div", lambda x: x / x.shape[-1]),
        ("tensor", lambda x: x / torch.tensor(x.shape[-1])),
        ("full", lambda x: x / torch.full((1,), x.shape[-1])),
        ("arange", lambda x: x + torch.arange(0, x.shape[-1], x.shape[-1] // 4).sum()),
        ("roll", lambda x: x.roll(x.shape[-1] // 16, 1)),
    ],
)
def test_a_number_that_differs_is_named(name, function):
    whole, local = (4, 2) if name == "roll" else (64, 32)
    assert reason(function).startswith(
        f"{name}() in 0 computes with {whole}, and with {local} on the shapes of one rank"
    )


def test_a_decision_by_a_size_is_named():
    assert reason(lambda x: x.relu() if x.shape[-1] > 40 else x).startswith(
        "0.down is called on the shapes of one rank"
    )


def test_functions_along_other_dimensions_take_shards():
    for function in (lambda x: x.sort(1)[0], lambda x: x.argsort(dim=1) * x, lambda x: x.flip(0, 1)):
        assert reason(function) == ""
    for name, function in {
        "sort": lambda x: x.sort()[0],
        "flip": lambda x: x.flip(0, 2),
        "std": lambda x: x / x.std(True),
    }.items():
        assert (
            reason(function)
            == f"{name}() in 0 works along the sharded dimension; along another dimension it can be split"
        )


def test_a_cast_to_the_same_dtype_is_passed():
    class Cast(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))

    plan = Statistics(nn.Sequential(Cast(8, 32), nn.GELU(), Cast(32, 8)), (2, 8)).parallel_plan(tensor=2)
    assert [(layer.role, layer.style) for layer in plan.layers] == [
        ("column", "LinearParallel"),
        ("row", "LinearParallel"),
    ]


def test_bags_of_rows_and_contexts_are_named():
    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag, self.mlp = nn.EmbeddingBag(40, 8), Between(torch.relu)
            self.into = nn.Linear(8, 16)

        def forward(self, ids):
            return self.mlp(self.into(self.bag(ids)))

    statistics = Statistics(Bags(), torch.zeros(2, 3, dtype=torch.long))
    assert "torch has no style for bag (EmbeddingBag)" in statistics.parallel_plan(tensor=2).replicated["bag"]
    with pytest.raises(InputError, match="context=2 does not divide the 3 tokens of the recorded input"):
        statistics.parallel_plan(context=2)


def test_a_call_that_does_not_take_chunks_gets_the_whole_sequence():
    class Ends(nn.Module):  # as GPT-2 of transformers: the last view has the length of the input
        def __init__(self):
            super().__init__()
            self.tok, self.block, self.norm = nn.Embedding(48, 16), Model("nanoGPT").h[0], nn.LayerNorm(16)
            self.head = nn.Linear(16, 48)

        def forward(self, ids):
            return self.head(self.norm(self.block(self.tok(ids))).view(-1, ids.shape[1], 16))

    plan = Statistics(Ends().eval(), ids()).parallel_plan(tensor=2, sequence=True)
    assert [(layer.fqn, layer.style) for layer in plan.layers if layer.fqn == "norm"] == [
        ("norm", "SequenceParallel"),
        ("norm", "PrepareModuleOutput"),
    ]


def test_what_does_not_run_on_chunks_is_named():
    class Reads(nn.Module):  # the block itself reads the length
        def __init__(self):
            super().__init__()
            self.q, self.out, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16)

        def forward(self, x):
            b, t, c = self.norm(x).shape
            return x + self.out(self.q(x).view(b, t, 4, c // 4).relu().view(b, t, c)) / t

    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16), Reads())
    with pytest.raises(
        InputError, match=r"does not run on chunks of the sequence: the forward of 2 fails \(RuntimeError: shape"
    ):
        Statistics(model, (2, 8, 16)).parallel_plan(tensor=2, sequence=True)


def _compared(_rank, _n):
    results = {}
    for name in ATTENTIONS:
        torch.manual_seed(0)
        model = Model(name).double().eval()
        plan = Statistics(model, ids()).parallel_plan(tensor=2)
        whole, model = processes.copies(model)
        coded, functions = copy.deepcopy(whole), {}
        exec(plan.to_code(), functions)
        mesh = plan.device_mesh("cpu")
        plan.apply(model, mesh)
        functions["parallelize"](coded, mesh)
        ran = collectives.of_step(model, (ids(),), processes.loss_of)
        with torch.no_grad():  # another batch, and a sequence that two does not divide
            other = ids()[:3, :7]
            sizes = max(processes.difference(whole(other), sharded(other)) for sharded in (model, coded))
        results[name] = (processes.compare(whole, model, (ids(),)), sizes, ran == collectives.of_plan(plan))
    return results


@pytest.mark.slow
def test_two_processes_are_the_model():
    for result in processes.run(_compared, 2):
        assert set(result) == set(ATTENTIONS)
        for name, (differences, sizes, is_planned) in result.items():
            assert max(differences.values()) <= 1e-10, name
            assert max(differences["output"], differences["grad"], sizes) <= 1e-12, name
            assert is_planned, name

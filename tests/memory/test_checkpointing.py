from __future__ import annotations

import copy
import itertools
import pickle
from collections import deque

import pytest
import torch
from torch import nn

from modelsummary import InputError, Statistics, apply_checkpoint
from modelsummary.capture.checkpoints import copied
from modelsummary.memory.checkpointing import CheckpointPlan, blocks_of, square_root
from tests.models import Call
from tests.untouched import untouched


def model_of(*widths):
    return nn.Sequential(
        nn.Linear(8, 64),
        *(nn.Sequential(Residual(width), nn.Identity()) for width in widths),
        nn.Linear(64, 4),
    )


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.one, self.two = nn.Linear(64, width), nn.Linear(width, 64)

    def forward(self, x):
        return x + self.two(nn.functional.gelu(self.one(x)))


def test_blocks():
    stats = Statistics(model_of(64, 128), (4, 8))
    assert [row.fqn for row in blocks_of(stats.root)] == ["1.0", "2.0"]
    assert [row.fqn for row in blocks_of(Statistics(nn.Sequential(nn.ReLU(), nn.Tanh()), (1, 2)).root)] == ["0", "1"]


def test_modules_of_which_only_submodules_are_called_are_containers_in_a_list():
    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.head = nn.ModuleList(nn.Module() for _ in range(2)), nn.Linear(4, 4)
            for layer in self.layers:
                layer.norm, layer.mlp = nn.LayerNorm(4), Call(lambda mlp, x: mlp.up(x), up=nn.Linear(4, 4))

        def forward(self, x):
            for layer in self.layers:
                x = x + layer.mlp(layer.norm(x))
            return self.head(x)

    assert [row.fqn for row in blocks_of(Statistics(Blocks(), (2, 4)).root)] == ["layers.0.mlp", "layers.1.mlp"]


def test_suggestion():
    model = model_of(64, 512, 64, 256)
    stats = Statistics(model, (1000, 8))
    plain = stats.memory().peak
    with untouched(model):
        plan = stats.suggest_checkpoint(int(plain * 0.95))
    assert plan.peak <= int(plain * 0.95)
    assert (plan.peak_without, plan.peak) == (plain, stats.memory(checkpoint=plan.fqns).peak)
    # of all sets that fit none does fewer MACs again
    fqns = [row.fqn for row in blocks_of(stats.root)]
    for size in range(len(fqns) + 1):
        for chosen in itertools.combinations(fqns, size):
            if stats.memory(checkpoint=chosen).peak <= int(plain * 0.95):
                assert stats.memory(checkpoint=chosen).recomputed_macs >= plan.recomputed_macs
    assert stats.suggest_checkpoint(plain).fqns == ()
    with pytest.raises(InputError, match="with all 4 blocks recomputed a step takes"):
        stats.suggest_checkpoint(1000)
    with pytest.raises(InputError, match=r"budget_bytes must be an integer >= 1 or text .*, got 0"):
        stats.suggest_checkpoint(0)
    every = stats.memory(checkpoint="every")
    assert every == stats.memory(checkpoint=fqns)


def test_applied():
    torch.manual_seed(0)
    model = model_of(64, 64)
    plain, x = copy.deepcopy(model), torch.randn(16, 8)
    apply_checkpoint(model, ["1.0", "2.0"])
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        each.zero_grad()
        plain.zero_grad()
        each(x).sum().backward()
        plain(x).sum().backward()
        gradients = [[parameter.grad for parameter in which.parameters()] for which in (each, plain)]
        assert all(map(torch.equal, *gradients))
        assert list(each.state_dict()) == list(plain.state_dict())
    stats, unwrapped = Statistics(model, (16, 8)), Statistics(plain, (16, 8))
    assert stats.memory().activations == unwrapped.memory(checkpoint=["1.0", "2.0"]).activations
    assert stats.memory().activations < unwrapped.memory().activations


def test_segments():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(Residual(16), nn.Dropout(0.5)) for _ in range(5)))
    plain, x = copy.deepcopy(model), torch.randn(16, 64)
    apply_checkpoint(model, ["[0:2]", "[3:5]"])
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        results = []
        for which in (each, plain):
            torch.manual_seed(1)
            which.zero_grad()
            output = which(x)
            output.sum().backward()
            results.append([output, *(parameter.grad for parameter in which.parameters())])
        assert all(map(torch.equal, *results))
        assert list(each.state_dict()) == list(plain.state_dict())


def test_square_root():
    model = Call(
        lambda self, x: self.tail(self.many(self.head(x))),
        head=nn.Sequential(Residual(8), nn.Tanh(), Residual(8)),
        many=nn.Sequential(*(Residual(8) for _ in range(10))),
        tail=Call(lambda self, x: self.list[0](x), list=nn.ModuleList([Residual(8)])),
    )
    names = square_root(blocks_of(Statistics(model, (4, 64)).root))
    # 1 and 1 block, as Tanh stands between them; 10 blocks in 3 segments; a ModuleList's block for itself
    assert names == ["head.0", "head.2", "many[0:3]", "many[3:6]", "many[6:10]", "tail.list.0"]


def test_bad_names():
    model = model_of(64)
    with untouched(model), pytest.raises(InputError, match="'nonsense', but the model has no such module"):
        apply_checkpoint(model, ["1.0", "nonsense"])
    with pytest.raises(InputError, match=r"got one name; pass \['1.0'\]"):
        apply_checkpoint(model, "1.0")
    for names, message in [
        ([1], r"fqns must be a list of module names, got \[1\]"),
        (None, "fqns must be a list of module names, got None"),
        (["1", "1[0:2]"], "and all of '1'; pass only one of them"),
    ]:
        with untouched(model), pytest.raises(InputError, match=message):
            apply_checkpoint(model, names)
    apply_checkpoint(model, ["1[0:2]"])
    with pytest.raises(InputError, match=r"^'1' is checkpointed already; call undo\(\) of what"):
        apply_checkpoint(model, ["1"])


class Squared(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 256), nn.Linear(256, 16)

    def forward(self, x):
        return x + self.down(self.up(x).relu().square())


def test_frozen_blocks_save_nothing():
    """The first two of eight blocks of one kind are frozen: recomputing one of the others suffices."""
    model = nn.Sequential(*(Squared() for _ in range(8)))
    model[:2].requires_grad_(False)
    stats = Statistics(model, (512, 16))
    assert stats.suggest_checkpoint(int(0.9 * stats.memory().peak)).fqns == ("2",)


class Recurrent(nn.Module):
    """Reads a state of a fixed size from its arguments and replaces it, as layers with a cache do."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x, cache, *, debug=None):
        state = torch.tanh(self.up(x + cache.layers[-1]["state"])) @ self.up.weight
        cache.layers.append({"state": state})
        if debug is not None:
            debug.append(len(debug))
            x = x * len(debug)
        return x + self.down(torch.sigmoid(self.up(state)))


class Cache:
    """A state for each layer; it can be any object."""

    def __init__(self):
        self.layers = []


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList(Recurrent() for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        cache, debug = Cache(), deque()
        cache.layers.append({"state": torch.zeros_like(x)})
        for layer in self.layers:
            x = layer(x, cache, debug=debug)
        return x, cache, debug


def test_code_of_whole_blocks_runs_no_mode_that_sees_operators():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    plan = CheckpointPlan(("0", "1"), 10, 20, 0, {"1": ("aten.relu.default#0",)})
    exec(plan.to_code(), {"model": model})
    whole, selective = (module.forward.args[1] for module in model)
    assert whole == {"use_reentrant": False}
    assert selective.keys() == {"use_reentrant", "context_fn"}


def test_arguments_that_a_block_changes():
    """A state of a fixed size: without copies, torch's checks of shapes pass, and gradients would be others."""
    torch.manual_seed(0)
    model, x = Decoder().double(), torch.randn(32, 16, dtype=torch.float64)
    stats = Statistics(model, x)
    plan = stats.memory_plan((stats.memory().peak + stats.memory(checkpoint="every").peak) // 2)
    assert plan.kept
    by_code = copy.deepcopy(model)
    exec(plan.to_code(), {"model": by_code})
    results = []
    for checkpoint in ({}, plan.checkpoint, [f"layers.{index}" for index in range(3)], None):
        planned = by_code if checkpoint is None else copy.deepcopy(model)
        with untouched(planned), apply_checkpoint(planned, checkpoint or {}):
            output, cache, debug = planned(x)
            gradients = torch.autograd.grad(
                output.sum(), planned.parameters(), retain_graph=checkpoint != plan.checkpoint
            )
            if isinstance(checkpoint, list):  # a second backward runs the blocks again
                again = torch.autograd.grad(output.sum(), planned.parameters())
                assert all(map(torch.equal, gradients, again))
        assert (len(cache.layers), list(debug)) == (4, [0, 1, 2])
        results.append([output, *gradients, *(layer["state"] for layer in cache.layers)])
    assert all(all(map(torch.equal, results[0], result)) for result in results)
    memory, measured = (read(checkpoint=plan.checkpoint) for read in (stats.memory, stats.measure_memory))
    assert measured.peak == memory.peak == plan.peak


def test_copies_of_arguments():
    tensor, linear = torch.ones(2), nn.Linear(2, 2)
    cache = Cache()
    cache.layers, cache.itself, cache.linear = [(tensor, {"length": 1})], cache, linear
    again, same = copied([cache, cache])
    assert again is same is again.itself is not cache
    assert again.linear is linear
    assert again.layers[0][0] is tensor
    again.layers[0][1]["length"] += 1
    again.layers.append(None)
    assert cache.layers == [(tensor, {"length": 1})]
    constant = (tensor, (1, "text"), torch.Size([2]), len)
    assert copied(constant) is constant


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_decoders_with_a_cache(kind, attention):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    extra = {"intermediate_size": 64} if kind == "llama" else {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.AutoConfig.for_model(kind, **sizes, **extra, attn_implementation=attention)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).double().train()
    tokens = torch.randint(0, 64, (2, 32))
    stats = Statistics(model, {"input_ids": tokens, "labels": tokens})
    blocks = [row.fqn for row in blocks_of(stats.root)]
    plan = stats.memory_plan((stats.memory().peak + stats.memory(checkpoint="every").peak) // 2)
    results = []
    for checkpoint in ({}, plan.checkpoint, blocks):
        with apply_checkpoint(model, checkpoint):
            torch.manual_seed(1)
            output = model(input_ids=tokens, labels=tokens)
            gradients = torch.autograd.grad(output.loss, list(model.parameters()))
        keys = [layer.keys for layer in output.past_key_values.layers]
        results.append([output.loss, output.logits, *gradients, *keys])
    assert len(blocks) == len(keys) == 2
    assert all(all(map(torch.equal, results[0], result)) for result in results[1:])
    assert stats.measure_memory(checkpoint=blocks).peak == stats.memory(checkpoint=blocks).peak

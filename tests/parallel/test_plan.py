"""What plans are derived, shown and refused."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest
import torch
from torch import nn

from modelsummary import InputError, SplitError, Statistics
from modelsummary.parallel import ParallelPlan
from tests import idioms
from tests.parallel.models import OLD, Decoder, make


def plan_of(name: str, **sizes: int) -> ParallelPlan:
    model, inputs = make(name)
    return Statistics(model, inputs).parallel_plan(**sizes)


def roles(plan: ParallelPlan) -> dict[str, str]:
    return {layer.fqn: layer.role + ("*" if layer.reason else "") for layer in plan.layers}


def test_a_decoder():
    plan = plan_of("decoder", tensor=2)
    found = roles(plan)
    assert found["embed"] == "embedding"
    assert found["head"] == "head"
    assert {name: found[f"blocks.1.{name}"] for name in ("attention", "mlp")} == {"attention": "input", "mlp": "input"}
    assert [found[f"blocks.0.attention.{name}"] for name in ("wq", "wk", "wv", "wo")] == [*["column"] * 3, "row"]
    assert [found[f"blocks.0.mlp.{name}"] for name in ("w1", "w3", "w2")] == ["column", "column", "row"]
    assert found["blocks.0.attention.q_norm"] == "norm"  # over the heads: its gradient is reduced
    assert "blocks.0.norm1" not in found
    assert plan.attributes == ()
    assert plan.replicated == {}


def test_a_decoder_moves_what_is_counted_by_hand():
    # Activations: 4 x 8 tokens x 16 features x 8 bytes. Forward: embedding, and two row-parallel layers in each of two
    # blocks; backward: the inputs of two modules in each block, and of the head. Logits: 4 x 8 x 48 x 8 bytes.
    activation = 4 * 8 * 16 * 8
    assert plan_of("decoder", tensor=2).collectives == {
        ("forward", "all_reduce"): (5, 5 * activation),
        ("forward", "all_gather"): (1, 4 * 8 * 48 * 8),
        ("backward", "all_reduce"): (5, 5 * activation),
    }


def test_numbers_of_heads_in_attributes_are_divided():
    plan = plan_of("llama", tensor=2)
    changed = {(each.name, each.whole, each.local) for each in plan.attributes}
    assert changed == {("heads", 4, 2), ("groups", 2, 1)}
    assert len(plan.attributes) == 4


def test_fused_projections_are_gathered():
    found = roles(plan_of("gpt2", tensor=2))
    assert (found["h.0.c_attn"], found["h.0.c_proj"]) == ("column*", "row*")
    assert (found["h.0.mlp.0"], found["h.0.mlp.2"]) == ("column", "row")


def test_fused_projections_that_keep_heads_whole_are_sharded():
    class Fused(nn.Module):  # query, key and value of each head lie together, as in GPT-NeoX
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x):
            q, k, v = self.qkv(x).view(*x.shape[:-1], -1, 12).transpose(1, 2).chunk(3, dim=-1)
            a = nn.functional.scaled_dot_product_attention(q, k, v)
            return self.out(a.transpose(1, 2).reshape(*x.shape[:-1], -1))

    plan = Statistics(Fused(), (2, 6, 16)).parallel_plan(tensor=4)
    assert roles(plan) == {"qkv": "column", "out": "row"}


def test_a_relative_bias_is_split_with_the_heads_that_take_it():
    plan = plan_of("t5", tensor=2)
    assert roles(plan)["encoder.0.ff.0"] == "column"
    assert ("encoder.0.ff.1", "inplace", True, False) in {
        (each.fqn, each.name, each.whole, each.local) for each in plan.attributes
    }


def test_the_gradient_of_a_shared_scale_keeps_a_layer_whole():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 8)
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return self.two(self.one(x) * self.scale)

    plan = Statistics(Scaled(), (2, 8)).parallel_plan(tensor=2)
    assert roles(plan) == {"one": "column*", "two": "row*"}
    assert "part of the gradient of a replicated tensor" in plan.layers[0].reason


@pytest.mark.parametrize("dim", [-1, 1])
def test_a_softmax_along_the_shards_is_not_split(dim):
    class Softmax(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            return self.two(self.one(x).softmax(dim))

    plan = Statistics(Softmax(), (2, 4, 8)).parallel_plan(tensor=2)
    assert [bool(layer.reason) for layer in plan.layers] == [dim == -1, dim == -1]


def test_what_does_not_divide_is_refused_with_the_numbers():
    with pytest.raises(InputError, match=r"tensor=3 does not divide the 4 heads or features of blocks.0.attention.wq"):
        plan_of("decoder", tensor=3)
    with pytest.raises(InputError, match=r"tensor=8 does not divide the 4 .*; pass one of 1, 2, which divide all"):
        plan_of("decoder", tensor=8)
    with pytest.raises(InputError, match="shard=0; expected an integer >= 1"):
        plan_of("decoder", shard=0)
    with pytest.raises(InputError, match="tensor=2: no layer of Sequential can be split"):
        plan_of("cnn", tensor=2)


def test_keys_that_do_not_divide_are_whole_on_each_rank():
    plan = plan_of("decoder", tensor=4)  # 4 heads, 2 of keys and values
    assert {roles(plan)[f"blocks.0.attention.{name}"] for name in ("wq", "wk", "wv")} == {"column*"}
    assert "2 heads of keys and values do not divide by 4" in str(plan)


def test_the_model_is_as_before():
    model, inputs = make("llama")
    before = {name: (id(each), each.clone()) for name, each in model.state_dict(keep_vars=True).items()}
    heads = model.layers[0].heads
    plan = Statistics(model, inputs).parallel_plan(tensor=2, shard=1 if OLD else 2)
    plan.memory(0)
    assert model.layers[0].heads == heads
    for name, each in model.state_dict(keep_vars=True).items():
        assert id(each) == before[name][0]
        assert torch.equal(each, before[name][1])
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_units_are_blocks_and_tied_parameters_belong_to_one():
    assert plan_of("gpt2", shard=2).units == (("h.0",), ("h.1",))

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))
            self.parts = nn.ModuleList(_Part() for _ in range(4))
            self.parts[1].linear.weight = self.parts[0].linear.weight
            self.last = nn.Linear(4, 4)
            self.last.weight = self.parts[3].linear.weight

        def forward(self, x):
            for part in self.parts:
                x = part(x)
            return self.last(x)

    plan = Statistics(Tied(), (2, 4)).parallel_plan(shard=2)
    assert plan.units == (("parts.0", "parts.1"), ("parts.2",))  # the last one shares with the root


class _Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).relu()


def test_parameters_of_a_rank():
    # Vocabulary 48, width 16, inner 32, 4 heads of 4, 2 of keys; two blocks.
    plan = plan_of("decoder", tensor=2)
    block = 16 * 16 + 16 + 2 * (8 * 16 + 8) + 16 * 16 + 16 + 2 * (32 * 16 + 32) + 16 * 32 + 16 + 4 + 2 * 16
    assert plan.params == 2 * block + 2 * 48 * 16 + 16
    halved = block - (16 + 16 + 4 + 32)  # the biases of row-parallel layers and the norms are whole
    assert plan.params_per_rank == 2 * (block - halved // 2) + 48 * 16 + 16


def test_it_prints():
    text = str(plan_of("decoder", tensor=2, shard=2))
    assert "Parallel plan of Decoder for 4 ranks: shard 2 x tensor 2" in text
    row = next(line for line in text.splitlines() if line.startswith("blocks.*.mlp.w2 x 2"))
    assert re.split(r"  +", row) == ["blocks.*.mlp.w2 x 2", "RowwiseParallel", "weight[1]", "272", "all_reduce 4.1 kB"]
    assert "FSDP units: blocks.* x 2, and the root (resharded after the forward)" in text


def test_json_gives_the_plan_again():
    plan = plan_of("gpt2", tensor=2, shard=2)
    again = ParallelPlan.from_json(plan.to_json(indent=1))
    assert again == plan
    assert json.loads(plan.to_json())["mesh"] == {"shard": 2, "tensor": 2}
    with pytest.raises(InputError, match="not the JSON of a plan"):
        ParallelPlan.from_json("[]")
    with pytest.raises(InputError, match="memory of a plan needs the model"):
        again.memory()


def test_code_is_torch_alone():
    code = plan_of("decoder", tensor=2, shard=2).to_code()
    compiled: dict[str, object] = {}
    exec(compile(code, "plan", "exec"), compiled)
    assert callable(compiled["parallelize"])
    assert callable(compiled["make_mesh"])
    assert "modelsummary" not in code
    modules = Counter(line.split()[1].split(".")[0] for line in code.splitlines() if line.startswith("from "))
    assert set(modules) == {"torch"}


def test_stages_begin_with_blocks():
    plan = Statistics(Decoder(depth=4), idioms.ids()).parallel_plan(tensor=2, pipeline=2)
    assert plan.boundaries == ("blocks.2",)
    assert plan.world_size == 4
    with pytest.raises(InputError, match="a plan with stages cannot be written as code"):
        plan.to_code()
    with pytest.raises(
        SplitError, match=r"cannot split into 9 stages: 7 are possible, .* because it is inside a block"
    ):
        Statistics(Decoder(depth=4), idioms.ids()).parallel_plan(pipeline=9)


def test_memory_of_a_rank():
    plan, sharded = plan_of("decoder", tensor=2), plan_of("decoder", shard=2)
    if OLD:  # nor can it compute the gradient of an embedding that is sharded by rows
        with pytest.raises(InputError, match=r"needs torch >= 2\.10, got 2\."):
            sharded.memory(0)
        return
    estimate = plan.memory(0, optimizer="adamw")
    assert estimate.params == 8 * plan.params_per_rank
    assert estimate.execution == "shape"
    with pytest.raises(InputError, match=r"rank=2; expected an integer from 0 to 1"):
        plan.memory(2)
    estimate = sharded.memory(0, optimizer="sgd-momentum")
    assert estimate.params == estimate.grads == estimate.optimizer_state == 8 * sharded.params_per_rank
    assert estimate.peak > estimate.held_after_forward > estimate.params


def test_activations_between_split_layers_are_chunks_of_the_sequence():
    plan = plan_of("decoder", tensor=2, sequence=True)
    styles = {layer.fqn: (layer.style, layer.options) for layer in plan.layers}
    assert styles["blocks.0.norm1"] == ("SequenceParallel", {"sequence_dim": 1, "use_local_output": True})
    assert styles["blocks.0.attention.wo"] == ("RowwiseParallel", {"output_layouts": "Shard(1)"})
    assert styles["blocks.0.mlp"][1]["input_layouts"] == ("Shard(1)",)
    activation = 4 * 8 * 16 * 8  # as in the test of collectives above: each all-reduce is now two halves
    assert plan.collectives == {
        ("forward", "reduce_scatter"): (5, 5 * activation),
        ("forward", "all_gather"): (6, 5 * activation + 4 * 8 * 48 * 8),
        ("backward", "reduce_scatter"): (5, 5 * activation),
        ("backward", "all_gather"): (5, 5 * activation),
    }


def test_a_function_that_returns_what_it_takes_changes_no_layout():
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16))

        def forward(self, x):
            return self.weight * x.to(torch.float32)  # the same tensor, in float32

    class Reads(nn.Module):  # the length of the sequence, from the embeddings, as Llama of transformers does
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(48, 16), nn.Linear(16, 48)
            self.blocks = nn.ModuleList(nn.Sequential(Norm(), nn.Linear(16, 32), nn.Linear(32, 16)) for _ in range(2))
            self.block = Residual(self.blocks)

        def forward(self, ids):
            x = self.embed(ids)
            return self.head(self.block(x) + torch.zeros(x.shape[1], 1).sum())

    class Residual(nn.Module):
        def __init__(self, blocks):
            super().__init__()
            self.blocks = blocks

        def forward(self, x):
            for block in self.blocks:
                x = x + block(x)
            return x

    plan = Statistics(Reads().float(), torch.ones(2, 8, dtype=torch.long)).parallel_plan(tensor=2, sequence=True)
    assert "SequenceParallel" in {layer.style for layer in plan.layers}
    cut = next(layer for layer in plan.layers if layer.fqn == "block")
    assert cut.options["desired_input_layouts"] == ("Shard(1)",)


def test_a_sequence_that_does_not_divide_or_is_read_by_blocks_is_refused():
    with pytest.raises(InputError, match="pass tensor > 1, too"):
        plan_of("decoder", sequence=True)
    with pytest.raises(InputError, match="whole activations cross between stages"):
        plan_of("decoder", tensor=2, pipeline=2, sequence=True)
    with pytest.raises(InputError, match="must be a multiple of 2"):
        Statistics(Decoder(), torch.ones(2, 7, dtype=torch.long)).parallel_plan(tensor=2, sequence=True)
    with pytest.raises(InputError, match="Gpt2 does not run on chunks of the sequence"):
        plan_of("gpt2", tensor=2, sequence=True)  # its blocks read the length before the attention


def test_experts_sinks_and_shared_keys():
    plan = plan_of("mixture", tensor=2)
    found = {layer.fqn: layer for layer in plan.layers if layer.style in ("LocalParallel", "ReduceGradient")}
    experts = found["mixture.experts"]
    assert experts.options["shards"] == {
        "gate_up": "_StridedShard(1, split_factor=2)",
        "gate_up_bias": "_StridedShard(1, split_factor=2)",
        "down": "Shard(2)",
    }
    assert experts.options["once"] == ("down_bias",)
    assert experts.params == 4 * (16 * 16 + 16 + 16 * 8) // 2 + 4 * 16
    assert found["attention"].options == {"shards": {"sinks": "Shard(0)"}}
    assert found["attention.kv"].options == {"parts": ((0, 8),)}  # one head of four keys and four values
    code = plan.to_code()
    compile(code, "plan", "exec")
    assert "class LocalParallel(ParallelStyle)" in code
    assert "import _StridedShard" in code


def test_a_bias_that_fsdp_could_not_gather_keeps_experts_whole():
    # The bias has one dimension: a rank of tensor=2 has a chunk of the gate and of the up projection, and FSDP would
    # shard that dimension again.
    (experts,) = (each for each in plan_of("shared_bias", tensor=2).layers if each.fqn == "mixture.experts")
    assert experts.options["shards"]["bias"] == "_StridedShard(0, split_factor=2)"
    plan = plan_of("shared_bias", tensor=2, shard=2)
    reason = "FSDP cannot gather mixture.experts.bias, of which each rank has several pieces"
    assert plan.replicated["mixture.experts"] == reason
    assert "mixture.experts" not in {each.fqn for each in plan.layers}


def test_experts_over_three_dimensions_are_not_split_by_width():
    # Torch refuses to gather what is sharded by expert, by FSDP and as chunks of the gate and of the up projection.
    plan = plan_of("mixture", expert=2, tensor=2, shard=2)
    (experts,) = (each for each in plan.layers if each.fqn == "mixture.experts")
    assert experts.style == "ExpertParallel"
    assert experts.params == 2 * (16 * 16 + 16 + 16 * 8 + 16)

"""What plans are derived, shown and refused."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from modelsummary import InputError, SplitError, Statistics
from modelsummary.parallel import ParallelPlan, applied_rank
from modelsummary.parallel.applied_rank import fake_world
from tests import idioms
from tests.parallel.models import OLD, Captioner, Decoder, Part, SharedBiasExperts, make


def plan_of(name: str, **sizes: Any) -> ParallelPlan:
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


def test_figures_of_the_papers():
    # Korthikanti et al. 2022, section 4.2.2: between layers that are split, and chunks of the sequence, a block has two
    # all-gathers and two reduce-scatters of b x s x h elements in the forward, and again in the backward.
    plan, tokens = plan_of("decoder", tensor=2, sequence=True), 4 * 8 * 16 * 8
    of_block = [each for each in plan.communication if each.fqn.startswith("blocks.0")]
    assert {each.group for each in of_block} == {"tensor"}
    for phase in ("forward", "backward"):
        for operation in ("all_gather", "reduce_scatter"):
            moved = [each for each in of_block if (each.phase, each.operation) == (phase, operation)]
            assert (sum(each.count for each in moved), sum(each.nbytes for each in moved)) == (2, 2 * tokens)
    # Zhao et al. 2023, section 3.2.1: FSDP gathers the parameters for the forward and again for the backward, and
    # scatters the gradients once. What the backward begins with, here norm and head, stays gathered.
    plan = plan_of("decoder", shard=2)
    nbytes = 8 * sum(parameter.numel() for parameter in make("decoder")[0].parameters())
    last = 8 * (48 * 16 + 16 + 16)
    moved = plan.unit_collectives
    assert moved["forward", "all_gather"][1] == moved["backward", "reduce_scatter"][1]
    assert abs(moved["forward", "all_gather"][1] - nbytes) <= 8 * 20  # rows are padded to a multiple of the ranks
    assert moved["forward", "all_gather"][1] - moved["backward", "all_gather"][1] == pytest.approx(last, abs=8 * 16)


def test_a_rank_communicates_in_the_dtype_of_the_precision():
    # 4 x 8 tokens x 16 features, and logits of 48, of 2 bytes; FSDP over one rank moves nothing.
    plan, activation = plan_of("decoder", tensor=2, precision=torch.bfloat16), 4 * 8 * 16 * 2
    assert plan.collectives["forward", "all_reduce"] == (5, 5 * activation)
    assert plan.collectives["forward", "all_gather"] == (1, 4 * 8 * 48 * 2)
    assert {each.dtype for each in plan.communication if each.phase == "forward"} == {"bfloat16"}
    assert plan.unit_collectives == {}


def test_what_is_not_known_says_why():
    stored = ParallelPlan.from_json(plan_of("decoder", tensor=2).to_json())
    stored = replace(stored, stored_communication=None)
    with pytest.raises(InputError, match="needs the model that it was made of"):
        stored.collectives  # noqa: B018
    assert "Collectives are not known: communication of a plan needs the model" in str(stored)


@pytest.mark.skipif(OLD, reason="FSDP of older versions needs data")
@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        (
            "in_place",
            {"checkpoint": "every"},
            "checkpoint of blocks.0, .* modified by an inplace .* it runs with",
        ),
        (
            "in_place",
            {"tensor": 2, "checkpoint": ["blocks.0"]},
            "checkpoint of blocks.0: the backward of a rank",
        ),
        (
            "biased",
            {"tensor": 2, "precision": torch.bfloat16},
            "precision=torch.bfloat16: the forward .* attn_mask",
        ),
    ],
)
def test_a_step_that_a_knob_keeps_from_running_is_refused(name, options, reason):
    # The first block writes into its input, which its second forward would take. FSDP casts no buffer, as the mask is.
    with pytest.raises(InputError, match=reason):
        plan_of(name, **options)
    assert plan_of("in_place", checkpoint=["blocks.2"]).checkpoint == ("blocks.2",)


@pytest.mark.skipif(OLD, reason="FSDP of older versions needs data")
def test_a_plan_of_one_rank_leaves_scalars_whole():
    plan = plan_of("scaled", checkpoint="every")
    assert plan.averaged
    assert plan.communication == ()


@pytest.mark.skipif(OLD, reason="FSDP of older versions needs data")
@pytest.mark.parametrize(
    "options",
    [
        {"tensor": 2, "sequence": True},
        {"tensor": 2, "shard": 2, "checkpoint": "every"},
        {"shard": 2, "data": 2, "precision": torch.bfloat16},
    ],
)
def test_equal_blocks_that_do_not_run_communicate_as_those_that_do(options):
    model = Decoder(depth=9)
    model.blocks[0].attention.wq.requires_grad_(False)
    plan = Statistics(model, (torch.zeros(4, 8, dtype=torch.long),)).parallel_plan(**options)
    assert applied_rank._repeated_blocks(plan) == {
        "blocks.4": "blocks.3",
        "blocks.5": "blocks.3",
        "blocks.6": "blocks.3",
    }
    assert Counter(plan.communication) == Counter(replace(plan, _blocks={}).communication)


@pytest.mark.skipif(OLD, reason="FSDP of older versions needs data")
@pytest.mark.parametrize("options", [{"tensor": 2}, {"tensor": 2, "shard": 2, "checkpoint": "every"}])
def test_blocks_that_alternate_do_not_all_run(options):
    model = Decoder(depth=14)
    for block in model.blocks[::2]:
        block.attention.q_norm = nn.Identity()
    plan = Statistics(model, (torch.zeros(4, 8, dtype=torch.long),)).parallel_plan(**options)
    same = applied_rank._repeated_blocks(plan)  # of seven equal pairs, the first three and the last two run
    assert same == {f"blocks.{n}": f"blocks.{4 + n % 2}" for n in (6, 7, 8, 9)}
    assert Counter(plan.communication) == Counter(replace(plan, _blocks={}).communication)


def test_blocks_that_the_model_reads_from_outside_all_run():
    class Penalised(Decoder):
        def forward(self, ids):
            return super().forward(ids) + sum(parameter.sum() for parameter in self.blocks.parameters())

    plan = Statistics(Penalised(depth=9), (torch.zeros(4, 8, dtype=torch.long),)).parallel_plan(shard=2)
    assert applied_rank._repeated_blocks(plan) == {}


def test_recomputed_blocks_communicate_again_up_to_what_they_keep():
    # Each of two blocks has two all-reduces in the forward. The second is added to the residual, which keeps nothing
    # for the backward, so torch stops before it. In chunks, both attention and MLP also gather what they take.
    activation, backward = 4 * 8 * 16 * 8, ("backward", "all_reduce")
    assert plan_of("decoder", tensor=2, checkpoint="every").collectives[backward] == (5 + 2, 7 * activation)
    found = plan_of("decoder", tensor=2, checkpoint="every", sequence=True).collectives
    assert found["backward", "reduce_scatter"] == (5 + 2, 7 * activation)
    assert found["backward", "all_gather"] == (5 + 4, 9 * activation)


@pytest.mark.parametrize(
    ("behind", "again"),
    [
        (nn.FeatureAlphaDropout(0.0), 0),
        (nn.Flatten(2), 0),
        (lambda x: F.dropout(x, p=0.0, training=True), 0),
        (lambda x: F.dropout(x, 0.1), 2),
        (nn.GELU(), 2),
    ],
)
def test_what_keeps_a_tensor_behind_a_collective_repeats_it(behind, again):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.behind = nn.Linear(8, 16), nn.Linear(16, 8), behind

        def forward(self, x):
            return x + self.behind(self.down(self.up(x).relu()))

    stats = Statistics(nn.Sequential(nn.Linear(8, 8), *(Block() for _ in range(2))).train(), (2, 3, 8))
    once, every = (stats.parallel_plan(tensor=2, checkpoint=each).collectives for each in (None, "every"))
    whole = stats.parallel_plan(tensor=2, checkpoint=[""]).collectives
    reduced, activation = ("backward", "all_reduce"), 2 * 3 * 8 * 4
    count, nbytes = once[reduced]
    assert every[reduced] == (count + again, nbytes + again * activation)
    assert whole[reduced][0] == count + max(again, 1)  # the first block's, up to what the second one keeps


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # the summary runs without gradients
def test_a_model_that_recomputes_its_blocks_itself():
    class Recomputed(Decoder):
        def __init__(self, reentrant):
            super().__init__()
            self.reentrant = reentrant

        def forward(self, ids):
            x = self.embed(ids)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
            return self.head(self.norm(x))

    expected = roles(plan_of("decoder", tensor=2))
    for reentrant in (False, True):
        plan = Statistics(Recomputed(reentrant), (4, 8), dtypes=torch.long).parallel_plan(tensor=2)
        assert roles(plan) == expected


def test_an_equation_with_an_ellipsis():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            q, k, v = (each(x).unflatten(-1, (-1, 2)).transpose(1, 2) for each in (self.q, self.k, self.v))
            weights = torch.einsum("...id,...jd->...ij", q, k).softmax(-1)
            return self.o(torch.einsum("... i j, ... j d -> ... i d", weights, v).transpose(1, 2).flatten(2))

    plan = Statistics(Attention(), (2, 3, 8)).parallel_plan(tensor=2)
    assert roles(plan) == {**dict.fromkeys("qkv", "column"), "o": "row"}


def test_heads_that_share_keys_have_values_of_their_own():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(8, size) for size in (8, 2, 8, 8))

        def forward(self, x):
            q, v = (each(x).unflatten(-1, (-1, 2)).transpose(1, 2) for each in (self.q, self.v))
            weights = (q @ self.k(x).unsqueeze(1).mT).softmax(-1)
            return self.o((weights @ v).transpose(1, 2).flatten(2))

    plan = Statistics(Attention(), (2, 3, 8)).parallel_plan(tensor=2)
    found = [(layer.fqn, layer.role) for layer in plan.layers]  # a second entry would sum the gradients of v's columns
    assert found == [("q", "column"), ("v", "column"), ("k", "gradient"), ("o", "row")]


@pytest.mark.parametrize("name", ["dim", "axis"])
def test_joining_features_of_two_layers(name):
    class Joined(nn.Module):
        def __init__(self, join, dim):
            super().__init__()
            self.join, self.kwargs = join, {name: dim}
            self.a, self.b, self.down = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(16, 4)

        def forward(self, x):
            return self.down(self.join([self.a(x), self.b(x)], **self.kwargs).flatten(2))

    # The first half of the joined features is of one layer: a rank has the first half of both.
    plan = Statistics(Joined(torch.cat, 2), (2, 3, 4)).parallel_plan(tensor=2)
    assert roles(plan) == {"a": "column*", "b": "column*", "down": "row*"}
    assert "joins along the sharded dimension" in str(plan)
    plan = Statistics(Joined(torch.stack, -1), (2, 3, 4)).parallel_plan(tensor=2)  # in turns
    assert roles(plan) == {"a": "column", "b": "column", "down": "row"}


def test_stages_with_other_numbers_of_heads():
    plan = plan_of("biased", tensor=2)  # 3 heads, then 2
    assert roles(plan) == {
        "0": "input",
        **dict.fromkeys(("0.q", "0.k", "0.v"), "column*"),
        "0.out": "row*",
        "1": "local",  # the table of biases, by heads
        **dict.fromkeys(("1.q", "1.k", "1.v"), "column"),
        "1.out": "row",
    }
    reasons = {layer.reason for layer in plan.layers if layer.reason}
    assert reasons == {"3 heads or features do not divide by 2; divisors of 3 work"}
    with pytest.raises(InputError, match=r"tensor=4 does not divide the 3 heads or features of 0\.q; pass one of 1"):
        plan_of("biased", tensor=4)


def test_a_fused_projection_that_lies_group_by_group():
    plan = plan_of("grouped", tensor=2)
    assert roles(plan) == {f"{n}.{name}": role for n in (0, 1) for name, role in (("qkv", "column"), ("out", "row"))}
    assert {layer.style for layer in plan.layers} == {"ColwiseParallel", "RowwiseParallel"}
    assert {(each.name, each.whole, each.local) for each in plan.attributes} == {("heads", 8, 4), ("groups", 4, 2)}


def test_the_gradient_of_a_result_that_only_columns_take_is_reduced_once():
    # Activations: 3 x 8 tokens x 16 features x 8 bytes; two blocks.
    activation = 3 * 8 * 16 * 8
    plan = plan_of("inline", tensor=2)
    assert {layer.fqn: layer.style for layer in plan.layers if layer.role == "output"} == {
        "0.norm": "PrepareModuleOutput",
        "1.norm": "PrepareModuleOutput",
    }
    assert plan.collectives == {
        ("forward", "all_reduce"): (2, 2 * activation),
        ("backward", "all_reduce"): (2, 2 * activation),
    }


def test_layers_that_take_two_results_reduce_the_gradients_themselves():
    # Each of q, k, v is called twice in each of two blocks.
    plan = plan_of("again", tensor=2)
    assert not [layer.fqn for layer in plan.layers if layer.role in ("input", "output")]
    assert plan.collectives["backward", "all_reduce"] == (2 * 2 * 3, 2 * 2 * 3 * 3 * 8 * 16 * 8)


def test_one_tensor_as_two_arguments_is_reduced_by_each_layer():
    # A style would prepare two arguments apart. The sum beside the first attention takes the result of its norm, too.
    plan = plan_of("pairs", tensor=2)
    assert [layer.fqn for layer in plan.layers if layer.role in ("input", "output")] == ["1.norm"]
    assert plan.collectives["backward", "all_reduce"] == (3 + 1, (3 + 1) * 3 * 8 * 16 * 8)


def test_numbers_of_heads_in_attributes_are_divided():
    plan = plan_of("llama", tensor=2)
    changed = {(each.name, each.whole, each.local) for each in plan.attributes}
    assert changed == {("heads", 4, 2), ("groups", 2, 1)}
    assert len(plan.attributes) == 4


def test_fused_projections_are_split_with_the_sizes_of_a_rank():
    found = roles(plan_of("gpt2", tensor=2))
    assert (found["h.0.c_attn"], found["h.0.c_proj"]) == ("column", "row")
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


def test_the_rows_of_a_relative_bias_need_not_divide():
    model, inputs = make("t5")
    for stack in (model.encoder, model.decoder):
        stack[0].relative = nn.Embedding(63, 2, dtype=torch.float64)  # its columns are heads
    plan = Statistics(model, inputs).parallel_plan(tensor=2)
    assert {layer.fqn: layer.shards for layer in plan.layers if "relative" in layer.fqn} == {
        "encoder.0.relative": {"weight": 1},
        "decoder.0.relative": {"weight": 1},
    }


def test_a_mask_with_heads_is_followed_once_however_often_functions_take_it():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads, self.qkv, self.out = 4, nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x):
            q, k, v = self.qkv(x).view(2, 6, 3, -1, 4).permute(2, 0, 3, 1, 4)
            mask = torch.zeros(2, self.heads, 6, 6)
            for _ in range(64):
                mask = mask + mask
            scores = q @ k.mT + mask
            return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    plan = Statistics(Masked(), (2, 6, 16)).parallel_plan(tensor=2)
    assert [(each.name, each.whole, each.local) for each in plan.attributes] == [("heads", 4, 2)]


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
    with pytest.raises(InputError, match="shard must be an integer >= 1, got 0"):
        plan_of("decoder", shard=0)
    with pytest.raises(InputError, match=r"checkpoint='blocks.4' names no module of Decoder; .*; did you mean 'blocks"):
        plan_of("decoder", shard=2, checkpoint=["blocks.4"])
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


def test_a_model_without_values_is_left_alone():
    model, inputs = make("llama")
    plan = Statistics(model, inputs).parallel_plan(tensor=2)
    empty = copy.deepcopy(model).to("meta")
    before = {name: id(each) for name, each in empty.named_parameters()}
    state = {**model.state_dict(), "norm.weight": torch.ones(3)}
    with fake_world(0, 2):
        mesh = plan.device_mesh("cpu")
        with pytest.raises(InputError, match=r"'embed_tokens.weight' is on meta and has no values; pass init="):
            plan.apply(empty, mesh)
        with pytest.raises(InputError, match=r"'norm.weight' has the shape \[16\], but \[3\] in the checkpoint"):
            plan.apply(empty, mesh, checkpoint=state)
    assert {name: id(each) for name, each in empty.named_parameters()} == before
    assert empty.layers[0].heads == model.layers[0].heads
    assert not any(module._forward_pre_hooks for module in empty.modules())


def test_units_whose_forward_chooses_parameters_by_values_are_named():
    plan = plan_of("list", shard=2)  # a dense block, and one whose mixture calls the experts that its tokens choose
    assert (plan.conditional, plan_of("decoder", shard=2).conditional) == (("blocks.1",), ())
    assert "use different parameters, which needs torch 2.13: blocks.1" in str(plan)
    assert "set_reduce_scatter_unused_params(True, recurse=False)" in plan.to_code()


def test_units_are_blocks_and_tied_parameters_belong_to_one():
    plan = plan_of("gpt2", shard=2)
    assert (plan.units, plan.last_unit) == ((("wpe",), ("h.0",), ("h.1",)), ())  # the final norm is small
    shares = "and is gathered from the first of these calls to the last"
    assert plan.gathered_with_root == {
        "wte": f"wte.weight is lm_head.weight, too, {shares}",
        "lm_head": f"lm_head.weight is wte.weight, too, {shares}",
    }

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))
            self.parts = nn.ModuleList(Part() for _ in range(4))
            self.parts[1].linear.weight = self.parts[0].linear.weight
            self.last = nn.Linear(4, 4)
            self.last.weight = self.parts[3].linear.weight

        def forward(self, x):
            for part in self.parts:
                x = part(x)
            return self.last(x)

    plan = Statistics(Tied(), (2, 4)).parallel_plan(shard=2)
    assert plan.units == (("parts.0", "parts.1"), ("parts.2",))
    shares = "it shares a parameter with a module in no unit; a parameter of its own works"
    tied = "last.weight is parts.3.linear.weight, too, and is gathered from the first of these calls to the last"
    assert plan.gathered_with_root == {"parts.3": shares, "last": tied}


def test_a_block_with_two_names_is_one_unit():
    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    plan = Statistics(nn.Sequential(block, block, nn.Sequential(nn.Linear(4, 4), nn.ReLU())), (2, 4)).parallel_plan(
        shard=2
    )
    assert (plan.units, plan.unit_calls, plan.gathered_with_root) == ((("0",), ("2",)), (2, 1), {})


def test_small_layers_outside_of_blocks_are_no_units():
    plan = plan_of("flat", shard=2)
    layer = "one layer of fewer than 100,000,000 parameters; a block of several layers can be a unit"
    assert plan.gathered_with_root == dict.fromkeys(("first", "second", "last"), layer)
    # The root alone gathers (16 x 16 + 16) + (16 x 32 + 32) + (32 x 16 + 16) parameters of 8 bytes, once.
    assert plan.units == ()
    assert plan.unit_collectives == {("forward", "all_gather"): (1, 10752), ("backward", "reduce_scatter"): (1, 10752)}
    text = str(plan)
    assert "FSDP units: the root alone (kept after the forward)" in text
    assert f"Gathered with the root: first, second, last: {layer}" in " ".join(text.split())
    assert ParallelPlan.from_json(plan.to_json()) == plan
    with torch.device("meta"):
        layers = [nn.Linear(10_000, 10_000, bias=False), nn.Linear(10_000, 9_999), nn.Linear(9_999, 2)]
    plan = Statistics(nn.Sequential(*layers), (2, 10_000)).parallel_plan(shard=2)
    assert plan.units == (("0",),)  # it has 100,000,000 parameters, the second 9,999 x 10,001 = 99,999,999


def test_a_block_whose_layers_are_in_a_list_is_a_unit():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    assert Statistics(nn.Sequential(Block(), Block()), (2, 4)).parallel_plan(shard=2).units == (("0",), ("1",))


def test_a_block_whose_layer_is_called_from_outside_is_no_unit():
    class Borrowing(nn.Module):
        def __init__(self, before):
            super().__init__()
            self.blocks, self.before = nn.ModuleList(Part() for _ in range(3)), before

        def forward(self, x):
            x = self.blocks[1].linear(x) if self.before else x
            for block in self.blocks:
                x = block(x)
            return x if self.before else x + self.blocks[1].linear(x)

    for before in (False, True):
        plan = Statistics(Borrowing(before), (2, 4)).parallel_plan(shard=2)
        assert plan.units == (("blocks.0",), ("blocks.2",))
        why = "Borrowing calls blocks.1.linear, which a unit gathers for its own forward alone"
        assert plan.gathered_with_root == {"blocks.1": why}


def test_blocks_whose_tensors_are_written_in_place_are_no_units():
    plan = plan_of("in_place", shard=2)
    works = "x = x + y instead of x += y works"
    assert plan.units[-1] == ("blocks.2",)  # autograd keeps hooks on what is written, unless it is a view
    assert {fqn: why for fqn, why in plan.gathered_with_root.items() if fqn != "embed"} == {
        "blocks.0": f"it writes into what it takes, which torch refuses in a unit; {works}",
        "blocks.1": f"it returns a view, which loses FSDP's hook where activation writes into it; {works}",
    }


@pytest.mark.skipif(torch.__version__ < "2.7", reason="FSDP of torch 2.6 leaves no parameter out")
def test_parameters_without_dimensions_are_whole_on_each_rank():
    plan = plan_of("scaled", shard=2)
    assert plan.averaged == ("temperature", "blocks.0.alpha", "blocks.1.alpha")
    decoder = plan_of("decoder", shard=2)
    assert (plan.units, plan.root_gathers) == (decoder.units, decoder.root_gathers) == (plan.units, False)
    for key in (("forward", "all_gather"), ("backward", "reduce_scatter")):
        assert plan.unit_collectives[key] == decoder.unit_collectives[key]
    assert "Whole on each rank, having no dimensions to shard: temperature, blocks.*.alpha x 2" in str(plan)
    assert ParallelPlan.from_json(plan.to_json()) == plan
    written: dict[str, object] = {}
    exec(plan.to_code(), written)
    assert "ignored_params=scalars" in plan.to_code()
    if torch.__version__ >= "2.10":  # a rank has half of the other parameters, and these three, of 8 bytes
        whole, ours = plan_of("decoder", shard=2).memory(0), plan.memory(0)
        assert (ours.params - whole.params, ours.grads - whole.grads) == (3 * 8, 3 * 8)


def test_units_are_in_the_order_of_their_calls():
    class Alternating(nn.Module):
        def __init__(self):
            super().__init__()
            self.own, self.cross = (nn.ModuleList(Part() for _ in range(2)) for _ in range(2))

        def forward(self, x):
            for own, cross in zip(self.own, self.cross, strict=True):
                x = cross(own(x))
            return x

    plan = Statistics(Alternating(), (2, 4)).parallel_plan(shard=2)
    assert plan.units == (("own.0",), ("cross.0",), ("own.1",), ("cross.1",))


def test_blocks_that_the_forward_does_not_call_are_units_that_cause_nothing():
    plan, decoder = plan_of("captioner", shard=2), plan_of("decoder", shard=2)
    encoder = (("encoder.0",), ("encoder.1",))
    assert plan.units == (*decoder.units, *encoder)
    assert plan.called_units == decoder.units
    assert plan.unit_calls == (1, 1, 1, 1, 0, 0)
    # The root gathers the unused layer of patches, too: 16 x 12 weights and 16 biases of 8 bytes. It has no gradient.
    assert (plan.root_gathers, decoder.root_gathers) == (True, False)
    totals, of_decoder = plan.unit_collectives, decoder.unit_collectives
    count, nbytes = of_decoder["forward", "all_gather"]
    assert totals["forward", "all_gather"] == (count + 1, nbytes + (16 * 12 + 16) * 8)
    assert totals["backward", "reduce_scatter"] == of_decoder["backward", "reduce_scatter"]
    assert "does not call: encoder.* x 2" in str(plan)
    assert "in zip(units, units[1:4]):" in plan.to_code()


def test_blocks_that_are_called_twice_are_gathered_for_each_call():
    # Bytes of a block: 4 layers of 16 x 16 weights and 16 biases, and a norm of 2 x 16, in float64.
    block = (4 * (16 * 16 + 16) + 2 * 16) * 8
    found = plan_of("looped", shard=2).unit_collectives
    assert found["forward", "all_gather"] == found["backward", "all_gather"] == (4, 4 * block)
    assert found["backward", "reduce_scatter"] == (2, 2 * block)
    model, inputs = make("looped")
    found = Statistics(model, inputs).parallel_plan(shard=2, sharded="gradients").unit_collectives
    assert found["forward", "all_gather"] == found["backward", "all_gather"] == (2, 2 * block)


def test_a_called_block_is_gathered_even_if_it_uses_no_parameter():
    class Skipped(Part):
        def __init__(self):
            super().__init__()
            self.activation = nn.ReLU()

        def forward(self, x):
            return self.activation(x)

    plan = Statistics(nn.Sequential(Part(), Skipped(), Part()), (2, 4)).parallel_plan(shard=2)
    assert plan.called_units == plan.units == (("0",), ("1",), ("2",))
    assert not plan.root_gathers
    assert plan.unit_collectives["forward", "all_gather"] == (3, 3 * 80)  # 4 x 4 weights and 4 biases of 4 bytes
    assert plan.unit_collectives["backward", "reduce_scatter"] == (2, 2 * 80)


@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"shard": 2}, {"pipeline": 2}])
def test_a_model_that_is_sharded_already_is_refused(sizes):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with fake_world(0, 2):
        plan = plan_of("decoder", shard=2)
        model, inputs = make("decoder")
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
        fully_shard(model, mesh=mesh)
        with pytest.raises(InputError, match=r"^embed.weight is sharded already .*; pass the model before parallelize"):
            Statistics(model, inputs).parallel_plan(**sizes)
        with pytest.raises(InputError, match=r"^embed.weight is sharded already"):
            plan.apply(model, mesh)


def test_layers_outside_of_the_blocks_are_units():
    plan = plan_of("ends", shard=2)
    assert plan.units == (
        ("first",),  # the norm of one feature has 2 parameters, a tenth of a block
        ("small",),
        ("encoder.0",),
        ("encoder.1",),
        ("between",),
        ("decoder.0",),
        ("decoder.1",),
        ("norm", "heads.one", "heads.other"),
    )
    assert plan.last_unit == plan.units[-1]
    assert plan.gathered_with_root == {"twice": "2 calls of a module that is not a repeated block; one works"}
    # 7 units are gathered for both passes, the last one and the root for the forward alone; each rank has 2 of 4 rows.
    last = 4 + 4 + (4 * 4 + 4) + (2 * 4 + 2)  # a norm, and two heads of 3 (padded to 4) and 2 rows
    others = 20 + 2 * 2 + 4 * 20 + 2 * 20  # the norm of one feature is padded to 2
    root = 20 + 2 * 4 + 2
    assert plan.unit_collectives["backward", "all_gather"] == (7, others * 8)
    assert plan.unit_collectives["forward", "all_gather"] == (9, (others + last + root) * 8)


def test_a_parametrization_is_not_a_unit():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([Part()])
            self.last = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

        def forward(self, x):
            return self.last(self.parts[0](x))

    assert Statistics(Normed(), (2, 4)).parallel_plan(shard=2).units == (("parts.0",), ("last",))


def test_blocks_whose_parameters_a_function_takes_belong_to_the_root():
    class Reads(Captioner):
        def forward(self, ids):
            return super().forward(ids) + self.encoder[1].mlp.w1.weight.sum()

    plan = Statistics(Reads(), (torch.zeros(2, 8, dtype=torch.long),)).parallel_plan(shard=2)
    assert plan.units == (("embed",), ("blocks.0",), ("blocks.1",), ("norm", "head"), ("encoder.0",))


def test_parameters_of_a_rank():
    # Vocabulary 48, width 16, inner 32, 4 heads of 4, 2 of keys; two blocks.
    plan = plan_of("decoder", tensor=2)
    block = 16 * 16 + 16 + 2 * (8 * 16 + 8) + 16 * 16 + 16 + 2 * (32 * 16 + 32) + 16 * 32 + 16 + 4 + 2 * 16
    assert plan.params == 2 * block + 2 * 48 * 16 + 16
    halved = block - (16 + 16 + 4 + 32)  # the biases of row-parallel layers and the norms are whole
    assert plan.params_per_rank == 2 * (block - halved // 2) + 48 * 16 + 16


def test_it_prints():
    plan = plan_of("decoder", tensor=2, shard=2)
    assert str(plan).startswith("Parallel plan of Decoder for 4 ranks: shard 2 x tensor 2")
    assert max(map(len, str(plan).splitlines())) <= 120
    text = plan._report().text()
    row = next(line for line in text.splitlines() if line.startswith("blocks.*.mlp.w2 x 2"))
    assert re.split(r"  +", row) == ["blocks.*.mlp.w2 x 2", "RowwiseParallel", "weight[1]", "272", "all_reduce 4.1 kB"]
    freed = "(resharded after the forward, norm + head after the backward)"
    assert f"FSDP units: embed, blocks.* x 2, norm + head {freed}" in text


def test_json_gives_the_plan_again():
    plan = plan_of("gpt2", tensor=2, shard=2)
    again = ParallelPlan.from_json(plan.to_json(indent=1))
    assert again == plan
    assert json.loads(plan.to_json())["mesh"] == {"shard": 2, "tensor": 2}
    with pytest.raises(InputError, match="not the JSON of a plan"):
        ParallelPlan.from_json("[]")
    with pytest.raises(InputError, match="memory of a plan needs the model"):
        again.memory()


def test_without_a_mesh_a_plan_is_not_applied():
    with pytest.raises(InputError, match=r"mesh must be a DeviceMesh, such as plan\.device_mesh\('cuda'\), got None"):
        plan_of("decoder", tensor=2).apply(nn.Linear(2, 2), None)


def test_code_is_torch_alone():
    code = plan_of("decoder", tensor=2, shard=2).to_code()
    compiled: dict[str, object] = {}
    exec(compile(code, "plan", "exec"), compiled)
    assert callable(compiled["parallelize"])
    assert callable(compiled["make_mesh"])
    assert "modelsummary" not in code
    modules = Counter(line.split()[1].split(".")[0] for line in code.splitlines() if line.startswith("from "))
    assert modules.keys() - sys.stdlib_module_names == {"torch"}


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
    with pytest.raises(
        InputError, match=r"stage 2 of 0 to 3 would hold no parameters, .*; pass pipeline=3, the largest"
    ):
        plan_of("mixture", pipeline=4)


def test_memory_of_a_rank():
    plan, sharded = plan_of("decoder", tensor=2), plan_of("decoder", shard=2)
    if OLD:  # nor can it compute the gradient of an embedding whose rows do not divide
        with pytest.raises(InputError, match=r"needs torch >= 2\.10, got 2\."):
            sharded.memory(0)
        return
    estimate = plan.memory(0, optimizer="adamw")
    assert estimate.params == 8 * plan.params_per_rank
    assert estimate.execution == "shape"
    estimate = sharded.memory(0, optimizer="sgd-momentum")
    assert estimate.params == estimate.grads == estimate.optimizer_state == 8 * sharded.params_per_rank
    assert estimate.peak > estimate.held_after_forward > estimate.params


def test_a_vocabulary_that_does_not_divide():
    plan = plan_of("odd", tensor=2)
    assert {layer.fqn: layer.params for layer in plan.layers if layer.fqn in ("embed", "head")} == {
        "embed": 25 * 16,
        "head": 25 * 16,
    }
    assert plan.collectives["forward", "all_gather"] == (1, 4 * 8 * 50 * 8)  # gathered chunks are equal, of 25 logits
    if not OLD:
        # Torch scatters equal chunks, so that the memory of the last one holds 25 rows, too.
        assert [plan.memory(rank).params for rank in (0, 1)] == [8 * plan.params_per_rank] * 2
    # Chunks of 25 and 24 rows are cut by FSDP into 7, 7, 7, 4 and 6, 6, 6, 6, not into halves of 13, 13, 13 and 10.
    replicated = plan_of("odd", tensor=2, shard=4).replicated
    assert replicated["head"] == (
        "the 49 rows of head are cut by FSDP where DTensor does not expect it, with tensor=2 and shard=4; multiples of "
        "4 rows, or shard=1, work"
    )
    assert "49 rows of embed" in replicated["embed"]
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 64), nn.Linear(64, 8))
    assert Statistics(model, torch.ones(2, 3, dtype=torch.long)).parallel_plan(tensor=8).replicated["0"] == (
        "the 9 rows of 0 leave no row to the last of 8 ranks; fewer ranks work"
    )


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
    with pytest.raises(InputError, match="pass tensor >= 2"):
        plan_of("decoder", sequence=True)
    with pytest.raises(InputError, match="whole activations cross between stages"):
        plan_of("decoder", tensor=2, pipeline=2, sequence=True)
    reason = r"blocks.0.attention.wo returns \[2, 7, 16\], and 2 ranks do not divide its 7 tokens, .*; multiples of 2"
    with pytest.raises(InputError, match=reason):
        Statistics(Decoder(), torch.ones(2, 7, dtype=torch.long)).parallel_plan(tensor=2, sequence=True)
    with pytest.raises(InputError, match="Gpt2 does not run on chunks of the sequence"):
        plan_of("gpt2", tensor=2, sequence=True)  # its blocks read the length before the attention


def test_merged_tokens_are_gathered_in_the_order_of_the_ranks():
    layers = {layer.fqn: layer for layer in plan_of("merged", tensor=2, sequence=True).layers if layer.role != "input"}
    assert layers["blocks.0.norm"].options["sequence_dim"] == 0
    assert layers["blocks.0.fc1"].options == {"input_layouts": "Shard(0)"}
    assert layers["blocks.0.fc2"].options == {"output_layouts": "Shard(0)"}
    # The model slices what its last norm returns, and takes the mean: the norm gathers its result.
    assert layers["norm"].options["desired_output_layouts"] == ("Replicate()",)


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


def test_a_single_stacked_expert_is_split_by_its_width():
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = SharedBiasExperts(1, 16, 8)

        def forward(self, x):
            return self.experts(x, torch.zeros(6, 1, dtype=torch.long), torch.ones(6, 1))

    (experts,) = Statistics(One(), (6, 16)).parallel_plan(tensor=2).layers
    assert (experts.style, experts.params) == ("LocalParallel", (16 * 16 + 16 + 16 * 8) // 2)


def test_pieces_of_a_bias_that_fsdp_could_not_gather_are_exchanged():
    # The bias has one dimension: a rank of tensor=2 needs a chunk of the gate and of the up projection, and FSDP would
    # shard that dimension again.
    layers = {}
    for sizes in ({"tensor": 2}, {"tensor": 2, "shard": 2}):
        plan = plan_of("shared_bias", **sizes)
        (layers[len(sizes)],) = (layer for layer in plan.layers if layer.fqn == "mixture.experts")
    assert layers[1].options["shards"]["bias"] == "_StridedShard(0, split_factor=2)"
    assert "pieces" not in layers[1].options
    assert layers[2].options["shards"] == {"gate_up": "Shard(1)", "bias": "Shard(0)", "down": "Shard(2)"}
    assert layers[2].options["pieces"] == dict.fromkeys(("gate_up", "bias"), ((8, False), (8, False)))


def test_experts_over_three_dimensions_are_split_by_width_too():
    plan = plan_of("mixture", expert=2, dispatch="all_reduce", tensor=2, shard=2)
    by_number, by_width = (layer for layer in plan.layers if layer.fqn == "mixture.experts")
    assert (by_number.style, by_width.style) == ("ExpertParallel", "LocalParallel")
    assert by_number.params == 2 * (16 * 16 + 16 + 16 * 8) // 2 + 2 * 16
    assert by_width.options["pieces"].keys() == {"gate_up", "gate_up_bias"}


class Caching(nn.Module):
    """Blocks that write into a list, as those of Hugging Face write into their cache."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x, cache):
            cache.append(self.up(x))
            return x + self.down(cache[-1])

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))

    def forward(self, x):
        cache = []
        for block in self.blocks:
            x = block(x, cache)
        return x, cache


def test_blocks_that_stages_open_cannot_run_again():
    stats = Statistics(Caching(), torch.ones(2, 8))
    with pytest.raises(InputError, match=r"checkpoint: blocks.0 cannot run again.*use_cache=False"):
        stats.parallel_plan(pipeline=2, checkpoint="every")
    assert stats.parallel_plan(pipeline=2).checkpoint == ()


class Keeps(nn.Module):
    """An MLP that leaves tensors where a loop can read them."""

    def __init__(self, kept):
        super().__init__()
        self.up, self.act, self.down, self.kept = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), kept
        self.inputs = []

    def forward(self, x):
        hidden = self.act(self.up(x))
        if self.kept == "attribute":
            self.hidden = hidden
        elif self.kept == "input":
            self.inputs.append(x.square())
        return x + self.down(hidden)


@pytest.mark.parametrize("sees_input", [False, True])
def test_a_layer_whose_hook_would_see_a_part_has_whole_activations(sees_input):
    model, seen = nn.Sequential(Keeps(""), nn.Linear(8, 8)), []
    if sees_input:
        model[0].down.register_forward_pre_hook(lambda _module, args: seen.append(args[0].square().mean()))
    else:
        model[0].act.register_forward_hook(lambda _module, _args, out: seen.append(out.square().mean()))
    plan = Statistics(model, torch.randn(2, 8)).parallel_plan(tensor=2)
    assert seen == []
    assert [layer.fqn for layer in plan.layers] == ["0.up", "0.down"]
    for layer in plan.layers:
        assert "Replicate()" in layer.options.values()
        assert "a hook of 0." in layer.reason


def test_activations_that_an_attribute_keeps_are_not_sharded():
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), Keeps("attribute"))
    plan = Statistics(model, torch.randn(2, 4, 8)).parallel_plan(tensor=2)
    assert [layer.fqn for layer in plan.layers if layer.role in ("column", "row")] == ["0.0", "0.2"]
    assert "an attribute or a hook keeps a sharded tensor, the result of 1.act" in plan.replicated["1.up"]
    assert "hidden" not in vars(model[1])


def test_a_chunk_of_the_sequence_that_a_list_keeps_is_refused():
    model = nn.Sequential(Keeps(""), Keeps("input"))
    with pytest.raises(InputError, match="keeps a chunk of the sequence, the result of square in 1; a tensor that no"):
        Statistics(model, torch.randn(2, 4, 8)).parallel_plan(tensor=2, sequence=True)
    assert model[1].inputs == []


def test_a_parameter_that_took_no_gradient_is_refused_where_it_takes_one():
    model, inputs = make("decoder")
    model.embed.weight.requires_grad_(False)
    plan = Statistics(model, inputs).parallel_plan(tensor=2)
    assert plan.frozen == ("embed.weight",)
    assert ParallelPlan.from_json(plan.to_json()) == plan
    functions: dict[str, Any] = {}
    exec(plan.to_code(), functions)
    with fake_world(0, 2):
        mesh = plan.device_mesh("cpu")
        with pytest.raises(InputError, match=r"embed.weight takes a gradient, and took none when the plan was made"):
            plan.apply(make("decoder")[0], mesh)
        with pytest.raises(ValueError, match="make another plan"):
            functions["parallelize"](make("decoder")[0], mesh)
        plan.apply(model, mesh)
    assert not model.embed.weight.requires_grad


class FirstBias(nn.Module):
    """An attention that takes the bias of the heads from the one before it, as in T5."""

    def __init__(self, is_first):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.bias = nn.Embedding(16, 4) if is_first else None

    def forward(self, x, bias):
        q, k, v = (layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.bias is not None:
            place = torch.arange(x.shape[1])
            bias = self.bias(place[:, None] - place + 8).permute(2, 0, 1).unsqueeze(0)
        weights = (q @ k.transpose(-1, -2) + bias).softmax(-1)
        return x + self.o((weights @ v).transpose(1, 2).flatten(2)), bias


class FirstBiasStack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(FirstBias(place == 0) for place in range(4))

    def forward(self, x):
        bias = None
        for block in self.blocks:
            x, bias = block(x, bias)
        return x


def test_a_part_of_a_tensor_is_not_sent_between_stages():
    stats = Statistics(FirstBiasStack(), torch.randn(2, 8, 8))
    assert {layer.reason for layer in stats.parallel_plan(tensor=2).layers} == {""}
    plan = stats.parallel_plan(tensor=2, pipeline=2)
    reasons = {layer.reason for layer in plan.layers if layer.role in ("column", "row")}
    assert reasons == {
        "the result of unsqueeze in blocks.0 goes to the stage that begins with blocks.2; pipeline=1 works"
    }
    outputs = [layer.options.get("output_layouts") for layer in plan.layers if layer.role == "column"]
    assert set(outputs) == {"Replicate()"}  # so that stages send whole tensors


def test_a_whole_tensor_that_meets_chunks_is_the_reason():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

        def forward(self, x):
            return self.mlp(x) * (x.sum(-1, keepdim=True) > 0)

    reason = "mul in the model takes a chunk of the sequence and a whole tensor of the shape [2, 4, 1]; one that enters"
    with pytest.raises(InputError, match=re.escape(reason)):
        Statistics(Masked(), torch.randn(2, 4, 8)).parallel_plan(tensor=2, sequence=True)


def test_memory_plans():
    """By hand: a rank keeps the results of the first product of each MLP, which tensor parallelism divides."""
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))
    model, x = nn.Sequential(*layers), torch.randn(512, 64)
    stats = Statistics(model, x)
    kept = dict.fromkeys(("0", "1", "2"), ("aten.addmm.default#0",))
    for sizes, divisor in (({"shard": 2}, 1), ({"tensor": 2}, 2)):
        plan, whole = (stats.parallel_plan(checkpoint=checkpoint, **sizes) for checkpoint in (kept, "every"))
        kept_bytes = 3 * 512 * 256 * 4 // divisor
        assert plan.memory(0).activations - whole.memory(0).activations == kept_bytes
        assert plan.memory(0).recomputed_macs == 0 < whole.memory(0).recomputed_macs
        assert ParallelPlan.from_json(plan.to_json()).kept == kept
        assert "Kept in * x 3: aten.addmm.default#0" in str(plan)
    memory_plan = stats.memory_plan(int(0.9 * stats.memory().peak))
    plan = stats.parallel_plan(checkpoint=memory_plan)
    assert {fqn: plan.kept.get(fqn, ()) for fqn in plan.checkpoint} == memory_plan.checkpoint
    namespace: dict[str, Any] = {}
    exec(plan.to_code(), namespace)
    assert {"keeping", "parallelize"} <= namespace.keys()
    with pytest.raises(InputError, match="names no operator of torch"):
        stats.parallel_plan(checkpoint={"0": ["aten.addmm"]})
    for sizes in ({}, {"shard": 2}, {"tensor": 2}):
        with pytest.raises(InputError, match=r"keeps 'aten.addmm.default#2' in '0', which calls aten.addmm.default 2"):
            stats.parallel_plan(checkpoint={"0": ["aten.addmm.default#2"]}, **sizes)
    for method in (stats.parallel_plan, stats.memory):
        with pytest.raises(InputError, match="must have a list of names of results for '0', got None; an empty one"):
            method(checkpoint={"0": None})
    with pytest.raises(InputError, match="parallel_plan moves no saved tensors to the host"):
        stats.parallel_plan(checkpoint=replace(memory_plan, offload={"0": (0,)}))


def test_pieces_that_are_unbound_from_heads_in_the_last_dimension():
    """Results of ``unbind`` have a dimension less than what it takes, as in Hiera and MViT of timm."""

    class Unbound(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 1, 4, 3).unbind(0)
            return self.out((q.sigmoid() * k + v).transpose(2, 3).flatten(2))

    plan = Statistics(Unbound(), torch.randn(2, 8, 16)).parallel_plan(tensor=2)
    assert [(layer.fqn, layer.role) for layer in plan.layers] == [("qkv", "column"), ("out", "row")]


def test_offload_without_fsdp_is_refused():
    stats = Statistics(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), (2, 8))
    with pytest.raises(InputError, match="offload=True moves what FSDP shards to the CPU, and tensor=2"):
        stats.parallel_plan(tensor=2, offload=True)
    assert "CPUOffloadPolicy" in stats.parallel_plan(tensor=2, shard=2, offload=True).to_code()

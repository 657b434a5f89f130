"""Activations of a block of GPT: the formulas of Korthikanti et al. 2022 follow from a plain module.

Their table 2, in bytes of half precision, without the means and deviations of two norms (4 x 2 bytes per token).
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from modelsummary import InputError, Statistics
from modelsummary.cluster import Plan, Recipe, StepModel
from modelsummary.cluster.parts import AFTER, BEFORE
from modelsummary.cluster.weights import Weights
from tests.cluster.models import HEADS, LAYERS, LENGTH, WIDTH, Block, gpt, statistics
from tests.parallel import models

S, H, A = LENGTH, WIDTH, HEADS
STATISTICS = 8  # bytes per token that the norms keep


@pytest.fixture(scope="module")
def model():
    return StepModel(statistics().live, statistics().root, Recipe(precision=torch.float16, sequence="megatron"))


def parts(model, tensor, micro_batch=1, *, sequence=False):
    return model.parts(Plan(tensor=tensor, sequence=sequence, micro_batch=micro_batch))


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_activations_of_a_block(model, micro_batch):
    block = parts(model, 1, micro_batch)["blocks.0"]
    tokens = S * micro_batch
    assert block.kept_bytes == tokens * (H * (34 + 5 * A * S / H) + STATISTICS)
    assert block.core_bytes == tokens * 5 * A * S
    assert block.entered_bytes == 2 * tokens * H


@pytest.mark.parametrize("t", [2, 4])
def test_activations_with_tensor_parallelism(model, t):
    block = parts(model, t)["blocks.0"]
    assert block.kept_bytes == S * (H * (10 + 24 / t + 5 * A * S / (H * t)) + STATISTICS)
    assert block.core_bytes == S * 5 * A * S / t


@pytest.mark.parametrize("t", [2, 4])
def test_activations_with_sequence_parallelism(model, t):
    block = parts(model, t, sequence=True)["blocks.0"]
    assert block.kept_bytes == S / t * (H * (34 + 5 * A * S / H) + STATISTICS)
    assert block.entered_bytes == 2 * S * H / t


def test_collectives_of_a_block(model):
    whole = 2 * S * H
    for sequence, forward, backward in (
        (False, {"all_reduce": 2}, {"all_reduce": 2}),
        # in the backward, what the column-parallel layers took is gathered again
        (True, {"all_gather": 2, "reduce_scatter": 2}, {"all_gather": 4, "reduce_scatter": 2}),
    ):
        block = parts(model, 2, sequence=sequence)["blocks.0"]
        assert {each.nbytes for each in block.collectives} == {whole}
        for phase, wanted in (("forward", forward), ("backward", backward)):
            found = [each.operation for each in block.collectives if each.phase == phase]
            assert {name: found.count(name) for name in found} == wanted


def test_tokens_of_megatron_need_no_copies_and_are_shared_out_behind_frozen_layers():
    """Its sequence comes first, so chunks of several samples are in one piece."""
    module, ids = gpt(fused=True)
    module.tokens.requires_grad_(False)
    stats = Statistics(module, ids)
    eager = StepModel(stats.live, stats.root, Recipe(kernels="eager", sequence="megatron"))
    alone, shared = (parts(eager, 2, 2, sequence=sequence)["blocks.0"] for sequence in (False, True))
    operators = [{work.operator for work, _ in part.works["forward"]} for part in (alone, shared)]
    assert operators[0] == operators[1]
    assert (shared.entered_bytes, shared.crossing_bytes) == (0, 2 * 2 * S * H // 2)  # nothing before it is trained


def test_parts_hold_all_work_and_all_parameters(model):
    stats = statistics()
    whole, halves = parts(model, 1), parts(model, 2)
    assert model.counts == {"blocks.0": LAYERS}
    ends = whole[BEFORE].flops + whole[AFTER].flops
    assert ends + LAYERS * whole["blocks.0"].flops == 2 * stats.total_macs
    held = {**whole[BEFORE].weights, **whole[AFTER].weights}  # the tied weight has one id
    ends, block = (Weights.of(each.values()) for each in (held, whole["blocks.0"].weights))
    assert ends.elements + LAYERS * block.elements == stats.total_params
    assert halves["blocks.0"].flops * 2 == whole["blocks.0"].flops


def test_equal_blocks_run_once_and_different_ones_apart():
    module, ids = gpt()
    module.blocks[2].dropout1.p = 0.2
    stats = Statistics(module, ids)
    model = StepModel(stats.live, stats.root, Recipe())
    assert model.counts == {"blocks.0": LAYERS - 1, "blocks.2": 1}


def test_the_model_stays_untouched():
    module, ids = gpt()
    before = {name: id(each) for name, each in module.named_parameters()}
    hooks = [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in module.modules()]
    stats = Statistics(module, ids)
    parts(StepModel(stats.live, stats.root, Recipe()), 2, sequence=True)
    assert before == {name: id(each) for name, each in module.named_parameters()}
    assert hooks == [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in module.modules()]
    assert module.blocks[0].attention.heads == HEADS
    assert not any("forward" in vars(each) for each in module.modules())


def test_functions_of_a_block_call_the_layers_of_the_copy():
    def through(layer):
        return lambda x: nn.functional.linear(x, layer.weight, layer.bias)

    module, ids = gpt()
    for block in module.blocks:
        block.up.forward = through(block.up)
    stats = Statistics(module, ids)
    block = parts(StepModel(stats.live, stats.root, Recipe(precision=torch.float16)), 1)["blocks.0"]
    assert block.kept_bytes == S * (H * (34 + 5 * A * S / H) + STATISTICS)  # no parameter is among the activations


def test_a_block_that_needs_whole_sequences_is_refused_with_what_shares_them():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
            self.shift = nn.Parameter(torch.zeros(LENGTH, WIDTH))

        def forward(self, x):
            return x + self.shift + self.down(nn.functional.gelu(self.up(x)))

    module = nn.Sequential(nn.Embedding(64, WIDTH), *(Shifted() for _ in range(3)))
    stats = Statistics(module, torch.zeros(1, LENGTH, dtype=torch.long))
    for layers, message in (
        ("megatron", r"^tensor=2, sequence=True: the step does not run .*; pass sequence=False$"),
        ("torch", r"^sequence=True: Sequential does not run on chunks .*; Recipe\(sequence='megatron'\) costs"),
    ):
        model = StepModel(stats.live, stats.root, Recipe(sequence=layers))
        assert parts(model, 2)
        with pytest.raises(InputError, match=message):
            parts(model, 2, sequence=True)


def test_context_parallelism_gathers_keys_and_values():
    module, ids = gpt(fused=True)
    stats = Statistics(module, ids)
    model = StepModel(stats.live, stats.root, Recipe())
    whole = model.parts(Plan())["blocks.0"]
    shared = model.parts(Plan(context=2))["blocks.0"]
    assert shared.flops * 2 == whole.flops
    assert {(each.operation, each.phase, each.nbytes) for each in shared.collectives} == {
        ("all_gather", "forward", 2 * 2 * S * H),
        ("all_gather", "backward", 2 * 2 * S * H),
        ("all_to_all", "backward", 2 * 4 * S * H // 2),
    }
    for recipe in (Recipe(kernels="fused"), Recipe(sequence="megatron")):  # one sum, as Megatron has it
        block = StepModel(stats.live, stats.root, recipe).parts(Plan(context=2))["blocks.0"]
        assert ("reduce_scatter", "backward", 2 * 2 * S * H) in {each[:3] for each in block.collectives}


def _moved(model, plan):
    """Collectives of a rank's micro-batch, and their bytes, as a parallel plan counts them."""
    found = {}
    for name, part in model.parts(plan).items():
        for each in part.collectives:
            count, nbytes = found.get((each.phase, each.operation), (0, 0))
            times = model.counts.get(name, 1)
            found[each.phase, each.operation] = (count + times, nbytes + times * each.nbytes)
    return found


def test_experts_and_shared_keys_move_what_the_parallel_plan_counts():
    stats = Statistics(*models.make("mixture"))
    plan = stats.parallel_plan(tensor=2)
    planned = {key: (count, nbytes // 2) for key, (count, nbytes) in plan.collectives.items()}  # its float64 halved
    applied, model = (
        StepModel(stats.live, stats.root, Recipe(precision=torch.float32, sequence=layers))
        for layers in ("torch", "megatron")
    )
    alone = Plan(tensor=2, micro_batch=model.recorded_batch)
    assert _moved(applied, alone) == planned
    del planned["forward", "all_gather"]  # of the logits: Megatron's loss takes shards
    assert _moved(model, alone) == planned
    with pytest.raises(InputError, match=r"sequence=True is not costed for .*; use sequence=False"):
        model.parts(Plan(tensor=2, sequence=True, micro_batch=model.recorded_batch))


@pytest.mark.parametrize("name", ["decoder", "mixture"])
def test_sequence_parallelism_costs_what_is_applied(name):
    """Collectives and kept bytes of a rank to which the plan is applied."""
    stats = Statistics(*models.make(name))
    model = StepModel(stats.live, stats.root, Recipe(precision=None, kernels="eager"))
    plan, applied = (
        Plan(tensor=2, sequence=True, micro_batch=model.recorded_batch),
        stats.parallel_plan(2, sequence=True),
    )
    assert _moved(model, plan) == applied.collectives
    kept = sum(part.kept_bytes * model.counts.get(name, 1) for name, part in model.parts(plan).items())
    memory = applied.memory(device="cuda", block_bytes=1)
    assert memory.activations + memory.inputs == kept


@pytest.mark.skipif(torch.__version__ < "2.14", reason="ring attention of older versions has other names")
@pytest.mark.parametrize("context", [2, 4])
def test_context_parallelism_moves_what_is_applied(context):
    """Keys and values are gathered, and their gradients sent round, by the ring that is applied."""
    module, ids = gpt(fused=True)
    stats = Statistics(module.bfloat16(), ids)
    plan = Plan(context=context, micro_batch=len(ids))
    costed = _moved(StepModel(stats.live, stats.root, Recipe(precision=None)), plan)
    assert costed == stats.parallel_plan(context=context).collectives


def test_the_cut_of_the_first_block_counts_once():
    """The input of the first block is cut there, and its gradient gathered; the other blocks take chunks."""

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.ModuleList(gpt(1)[0].blocks[0] for _ in range(4))

        def forward(self, x):
            x = self.project(x)
            for block in self.blocks:
                x = block(x)
            return x

    with torch.device("meta"):
        stats = Statistics(First(), torch.ones(1, LENGTH, WIDTH))
    model = StepModel(stats.live, stats.root, Recipe(precision=None))
    assert _moved(model, Plan(tensor=2, sequence=True)) == stats.parallel_plan(2, sequence=True).collectives


def test_gradients_of_weights_alone():
    """Each product of a linear layer has one for its weight; scores and context of attention have none."""
    model = StepModel(statistics().live, statistics().root, Recipe(precision=torch.float16, kernels="eager"))
    flops = {
        (name, phase): sum(work.flops * times for work, times in part.works[phase])
        for name, part in parts(model, 1).items()
        for phase in ("forward", "backward", "weights")
    }
    attention = 2 * 2 * S * S * H
    assert flops["blocks.0", "weights"] == flops["blocks.0", "forward"] - attention
    assert flops["blocks.0", "backward"] == 2 * flops["blocks.0", "forward"]
    assert flops[AFTER, "weights"] == flops[AFTER, "forward"]
    block = parts(model, 1)["blocks.0"]
    sums = [work.operator for work, times in block.works["weights"] for _ in range(times) if not work.flops]
    assert sums == ["aten.sum"] * 4  # of the biases


def test_no_gradient_of_frozen_weights():
    frozen, ids = gpt()
    frozen.requires_grad_(False)
    frozen.tokens.requires_grad_(True)  # so that the gradient passes through all blocks
    stats = Statistics(frozen, ids)
    block = parts(StepModel(stats.live, stats.root, Recipe(kernels="eager")), 1)["blocks.0"]
    assert block.has_backward
    assert block.works["weights"] == ()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_recomputation_repeats_what_torch_repeats(dropout, reentrant):
    """The products of a block that ``torch.utils.checkpoint`` runs again, counted as they are dispatched.

    The backward of the last layer does not read its result, but the mask of a dropout behind it.
    """
    model, ids = gpt(fused=False)
    block = Block(fused=False)
    for module in (*model.modules(), *block.modules()):
        if isinstance(module, nn.Dropout):
            module.p = dropout
    x = torch.randn(1, LENGTH, WIDTH, requires_grad=True)

    def products(run):
        with FlopCounterMode(display=False) as counter:
            run().sum().backward()
        return counter.get_total_flops()

    stats, recipe = Statistics(model, ids), Recipe(kernels="eager", early_stop=False if reentrant else None)
    part = StepModel(stats.live, stats.root, recipe).parts(Plan())["blocks.0"]
    repeated = products(lambda: checkpoint(block, x, use_reentrant=reentrant)) - products(lambda: block(x))
    assert part.repeated_flops == repeated
    assert part.flops - repeated == (0 if reentrant or dropout else 2 * LENGTH * 4 * WIDTH**2)
    assert [Recipe(kernels=kernels).stops_early for kernels in ("eager", "fused", "compiled")] == [True, False, True]


def test_products_of_megatron_add_gradients_of_weights_to_their_sums():
    """A pass over micro-batches reads and writes the sums; elsewhere a kernel of its own adds them."""
    stats = statistics()
    by_kernels = {
        kernels: StepModel(stats.live, stats.root, Recipe(kernels=kernels)).parts(Plan())["blocks.0"]
        for kernels in ("compiled", "fused")
    }
    products = {
        kernels: {work.sizes: work for work, _ in part.works["weights"] if work.op_class == "gemm"}
        for kernels, part in by_kernels.items()
    }
    assert products["compiled"].keys() == products["fused"].keys()
    for sizes, work in products["fused"].items():
        plain, elements = products["compiled"][sizes], sizes[1] * sizes[2]
        assert (work.is_added, plain.is_added) == (True, False)
        assert (
            work.nbytes - plain.nbytes == (2 * 4 - 2) * elements
        )  # read and written in float32, not written in bfloat16

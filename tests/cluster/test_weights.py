"""Frozen, half-precision and integer weights, and buffers: what ``memory`` and ``flops_per_token`` say of the model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from modelsummary import InputError, Statistics, apply_checkpoint
from modelsummary.cluster import Cluster, Plan, Recipe, StepModel, StepSimulator
from modelsummary.cluster.weights import Weight, Weights, weight_of
from tests.cluster.models import LAYERS, LENGTH, gpt

BATCH, RANK = 2, 2


class LoRA(nn.Module):
    """A frozen layer beside a trained product of low rank."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, RANK, bias=False, device="meta")
        self.up = nn.Linear(RANK, base.out_features, bias=False, device="meta")

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Int8(nn.Module):
    """A layer whose weight is stored as integers, with scales in a buffer."""

    def __init__(self, base):
        super().__init__()
        weight = torch.zeros_like(base.weight, dtype=torch.int8, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("scale", torch.ones(base.out_features, 1, device="meta"))

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype))


class Scaled(nn.Module):
    """A frozen layer whose results are scaled by a trained vector in a container that nobody calls."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scales = nn.ParameterDict({"one": nn.Parameter(torch.ones(base.out_features, device="meta"))})

    def forward(self, x):
        return self.base(x) * self.scales["one"]


class Borrowing(nn.Module):
    """A model that calls a layer of its first block once more, as DiT does for its output."""

    def __init__(self, gpt):
        super().__init__()
        self.gpt = gpt

    def forward(self, ids):
        return self.gpt(ids), self.gpt.blocks[0].up(self.gpt.tokens(ids))


def dense():
    return gpt(fused=True)[0]


def scaled():
    model = dense().requires_grad_(False)
    for block in model.blocks:
        block.up = Scaled(block.up)
    return model


def borrowing():
    return Borrowing(dense())


def frozen():
    model = dense()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("blocks.3", "norm")))
    return model


def lora():
    model = dense().requires_grad_(False)
    for block in model.blocks:
        block.attention.qkv = LoRA(block.attention.qkv)
    return model


def half():
    return dense().bfloat16()


def quantised():
    model = lora()
    for block in model.blocks:
        block.up, block.down = Int8(block.up), Int8(block.down)
    return model


def statistics_of(model):
    return Statistics(model, torch.zeros(BATCH, LENGTH, dtype=torch.long, device="meta"))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("make", [dense, frozen, lora, half, quantised, scaled, borrowing])
def test_one_device_holds_what_memory_says(make, count):
    """With one micro-batch, gradients come while activations go."""
    model = make()
    stats = statistics_of(model)
    own = next(model.parameters()).dtype
    recipe = Recipe(precision=None, gradient_dtype=None, state_dtype=own, master_weights=False, kernels="eager")
    step = stats.simulate(Plan(micro_batch=BATCH), Cluster("A100"), count * BATCH, recipe=recipe)
    memory = stats.memory(optimizer="adamw", accumulates=count > 1, device="cuda", block_bytes=1, workspaces=False)
    rank, updating = step.moments[0]
    assert rank.parameters == memory.params == sum(each.nbytes for each in model.parameters())
    assert rank.buffers == memory.buffers
    assert updating.gradients == memory.grads
    assert rank.optimizer == memory.optimizer_state
    assert rank.activations == memory.activations + memory.inputs
    assert step.memory_bytes == pytest.approx(memory.peak, rel=5e-4)


class Tied(nn.Module):
    """Layers that are no repeated blocks, whose last one has the weight of the first one."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(500, 64, device="meta")
        self.layer, self.head = nn.Linear(64, 64, device="meta"), nn.Linear(64, 500, bias=False, device="meta")
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.layer(self.table(ids)).relu())


def test_a_weight_that_two_layers_share_is_there_once():
    stats = statistics_of(Tied())
    recipe = Recipe(precision=None, gradient_dtype=None, kernels="eager")
    step = stats.simulate(Plan(micro_batch=BATCH), Cluster("A100"), 2 * BATCH, recipe=recipe)
    elements = 500 * 64 + 64 * 64 + 64
    assert (step.memory[0].parameters, step.memory[0].gradients) == (4 * elements, 4 * elements)
    assert step.memory[0].optimizer == 8 * elements


class Halving(nn.Module):
    """A convolution that adds to its input and halves the size: of equal blocks, the first one keeps most."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(8, 8, 3, padding=1, device="meta")

    def forward(self, x):
        return F.avg_pool2d(F.gelu(self.layer(x)) + x, 2)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("names", [["0", "1", "2", "3"], ["0", "1"], ["3"]])
def test_early_blocks_run_again_when_later_ones_hold_nothing(names, count):
    stats = Statistics(nn.Sequential(*(Halving() for _ in range(4))), torch.zeros(BATCH, 8, 64, 64, device="meta"))
    recipe = Recipe(precision=None, gradient_dtype=None, optimizer="sgd", kernels="eager")
    step = stats.simulate(Plan(micro_batch=BATCH, checkpoint=names), Cluster("A100"), count * BATCH, recipe=recipe)
    options = {"device": "cuda", "block_bytes": 1, "workspaces": False, "accumulates": count > 1}
    peak = stats.memory(optimizer="sgd", checkpoint=names, **options).peak
    assert step.memory_bytes == pytest.approx(peak, rel=0.01)


class Hidden(nn.Module):
    """Large results for a moment; with ``is_pooled`` many weights and few of them, else ``steps`` that all stay."""

    def __init__(self, width, hidden, *, is_pooled=False, steps=0):
        super().__init__()
        self.up, self.down = (nn.Linear(*size, device="meta") for size in ((width, hidden), (hidden, width)))
        self.is_pooled, self.steps = is_pooled, steps

    def forward(self, x):
        y = self.up(x.mean(1, keepdim=True) if self.is_pooled else x)
        for _ in range(self.steps):
            y = torch.sin(y)
        return x + self.down(y.relu())


def test_equal_blocks_between_others_may_be_the_fullest():
    """The third of four equal blocks: behind it gradients grow, and before it activations go."""
    kinds = {
        "wide": lambda: Hidden(256, 2048),
        "pooled": lambda: Hidden(256, 16384, is_pooled=True),
        "deep": lambda: Hidden(256, 256, steps=30),
    }
    order = "wide deep wide deep wide pooled wide pooled wide".split()
    stats = Statistics(nn.Sequential(*(kinds[kind]() for kind in order)), torch.zeros(4, 256, 256, device="meta"))
    recipe = Recipe(precision=None, gradient_dtype=None, optimizer="sgd", kernels="eager")
    step = stats.simulate(Plan(micro_batch=4), Cluster("A100"), 4, recipe=recipe)
    memory = stats.memory(optimizer="sgd", device="cuda", block_bytes=1, workspaces=False)
    assert step.memory_bytes == pytest.approx(memory.peak, rel=5e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_an_optimizer_step_may_be_the_fullest_moment(optimizer):
    """Foreach kernels of AdamW hold the roots of one state of all parameters: a tensor like each parameter."""
    stats = Statistics(nn.Sequential(*(nn.Linear(64, 64, device="meta") for _ in range(4))), (BATCH, 64))
    recipe = Recipe(precision=None, gradient_dtype=None, optimizer=optimizer, kernels="eager")
    params, inputs, result = 4 * 4 * (64 * 64 + 64), 4 * BATCH * 64, 4 * BATCH * 64
    loss = 4
    for count in (1, 2):
        step = stats.simulate(Plan(micro_batch=BATCH), Cluster("A100"), count * BATCH, recipe=recipe)
        tensors = 5 if optimizer == "adamw" else 2  # parameters, gradients, two states, roots
        assert step.moments[0].optimizer.total == tensors * params + inputs + result + loss
    fused = replace(recipe, kernels="fused")
    step = stats.simulate(Plan(micro_batch=BATCH), Cluster("A100"), BATCH, recipe=fused)
    assert step.moments[0].optimizer.temporary == 0


class Perceptron(nn.Module):
    """Two layers that add to their input."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 128, device="meta"), nn.Linear(128, 32, device="meta")

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Perceptrons(nn.Module):
    """An embedding, four blocks, and a head."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(64, 32, device="meta"), nn.Linear(32, 64, device="meta")
        self.blocks = nn.ModuleList(Perceptron() for _ in range(4))

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_the_result_is_held_while_blocks_run_again():
    """The peak is in the last block: the logits, which the loss saved, are still there as the result of the model."""
    model, blocks = Perceptrons(), [f"blocks.{index}" for index in range(4)]
    stats = Statistics(model, torch.zeros(4, 64, dtype=torch.long, device="meta"))
    recipe = Recipe(
        precision=None,
        gradient_dtype=None,
        master_weights=False,
        kernels="eager",
        loss=lambda logits: logits.logsumexp(-1).mean(),
    )
    plan = Plan(micro_batch=4, checkpoint=dict.fromkeys(blocks, ()))
    rank = stats.simulate(plan, Cluster("A100"), 8, recipe=recipe).memory[0]
    options = {"optimizer": "adamw", "accumulates": True, "device": "cuda", "block_bytes": 1, "workspaces": False}
    memory = stats.memory(checkpoint=blocks, loss=recipe.loss, **options)
    assert memory.activations + memory.inputs == rank.activations
    assert rank.total == memory.peak


@pytest.mark.parametrize("autocast", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", [dense, lora])
def test_autocast_keeps_what_memory_says(make, autocast):
    stats = statistics_of(make())
    recipe = Recipe(autocast=autocast, gradient_dtype=None, kernels="eager")
    step = stats.simulate(Plan(micro_batch=BATCH), Cluster("A100"), 2 * BATCH, recipe=recipe)
    options = {"optimizer": "adamw", "accumulates": True, "device": "cuda", "block_bytes": 1, "workspaces": False}
    memory, rank = stats.memory(autocast=autocast, **options), step.memory[0]
    assert (rank.parameters, rank.gradients, rank.optimizer) == (memory.params, memory.grads, memory.optimizer_state)
    assert rank.activations == memory.activations + memory.inputs
    assert rank.total == pytest.approx(memory.peak, rel=5e-4)
    assert f"{str(autocast).removeprefix('torch.')} autocast" in step.subject
    assert step.parallel_plan().precision is None


class CachingBlock(nn.Module):
    """Attention whose keys, which autograd saves, and a copy of whose values, which it does not, go to a cache."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96, device="meta"), nn.Linear(32, 32, device="meta")

    def forward(self, x, cache):
        query, key, value = self.qkv(x).chunk(3, -1)
        key = key.contiguous()
        cache.append((key, value.clone()))
        return x + self.out((query @ key.mT).softmax(-1) @ value)


class Caching(nn.Module):
    """Returns the cache beside the result, as decoders of transformers do by default."""

    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(CachingBlock() for _ in range(4)), nn.Linear(32, 64, device="meta")

    def forward(self, x):
        cache = []
        for block in self.blocks:
            x = block(x, cache)
        return self.head(x), cache


@pytest.mark.parametrize("checkpoint", [None, "every"])
def test_caches_that_the_result_holds(checkpoint):
    stats = Statistics(Caching(), torch.zeros(BATCH, LENGTH, 32, device="meta"))
    recipe = Recipe(
        precision=None, gradient_dtype=None, master_weights=False, kernels="eager", loss=lambda result: result[0].sum()
    )
    plan = Plan(micro_batch=BATCH, checkpoint=checkpoint)
    rank = stats.simulate(plan, Cluster("A100"), 2 * BATCH, recipe=recipe).memory[0]
    options = {"optimizer": "adamw", "accumulates": True, "device": "cuda", "block_bytes": 1, "workspaces": False}
    fqns = [f"blocks.{index}" for index in range(4)] if checkpoint else None
    memory = stats.memory(loss=recipe.loss, checkpoint=fqns, **options)
    assert 0.999 * memory.peak < rank.total < (1.1 if checkpoint else 1.001) * memory.peak
    if checkpoint is None:
        values = 4 * BATCH * LENGTH * 32 * 4  # of four blocks in float32
        assert rank.activations == memory.activations + memory.inputs + values


def test_autocast_and_a_precision_are_one_too_many():
    assert Recipe(autocast="bf16") == Recipe(autocast=torch.bfloat16, precision=None)
    with pytest.raises(InputError, match=r"autocast=torch.bfloat16 leaves weights .* pass one of the two$"):
        Recipe(autocast="bf16", precision=torch.float16)
    with pytest.raises(InputError, match=r"precision=torch\.bfloat16 casts them; pass one of the two"):
        Recipe(autocast="bf16", precision="bf16")
    assert Recipe().precision is torch.bfloat16
    with pytest.raises(InputError, match=r"^autocast must be torch.float16 or torch.bfloat16"):
        Recipe(autocast="fp32")


def checkpointed():
    model = dense()
    apply_checkpoint(model, [f"blocks.{number}" for number in range(LAYERS)])
    return model


@pytest.mark.parametrize("make", [dense, frozen, lora, half, quantised, scaled, borrowing, checkpointed])
def test_model_flops_are_those_of_flops_per_token(make):
    stats = statistics_of(make())
    counted = stats.flops_per_token()
    for plan, devices in ((Plan(micro_batch=BATCH), 1), (Plan(tensor=2, shard=2, micro_batch=BATCH), 4)):
        step = stats.simulate(plan, Cluster("A100"), 4)
        assert step.model_flops == 4 * LENGTH * counted.training
        assert step.mfu == pytest.approx(step.tokens_per_second * counted.training / (devices * 312e12))


def test_checkpoints_of_the_model_are_flops_of_the_hardware_alone():
    step = statistics_of(checkpointed()).simulate(Plan(micro_batch=BATCH), Cluster("A100"), BATCH)
    # per token and block: q, k, v, out, up and down have 3 + 1 + 4 + 4 weights of 32 x 32; scores and context multiply
    # 32 features by 16 positions each; the mask of the last dropout is kept, so nothing of a block is left out
    again = 12 * 32 * 32 + 2 * 16 * 32
    assert step.hardware_flops - step.model_flops == 2 * BATCH * LENGTH * LAYERS * again


def test_frozen_layers_take_no_gradients_and_no_states():
    stats, model = statistics_of(lora()), lora()
    everything, trained = (
        sum(each.numel() for each in model.parameters() if each.requires_grad >= on) for on in (0, 1)
    )
    rank = stats.simulate(Plan(micro_batch=BATCH), Cluster("A100"), BATCH).memory[0]
    assert rank.parameters == 2 * everything  # the recipe casts them to bfloat16
    assert (rank.gradients, rank.optimizer) == (4 * trained, 12 * trained)


def test_frozen_layers_are_gathered_and_not_reduced():
    stats = statistics_of(lora())
    model = StepModel(stats.live, stats.root, Recipe(overlap_gradients=False))
    simulator = StepSimulator(model, Cluster("A100"), 8, LENGTH)
    plan = Plan(shard=4, micro_batch=BATCH)
    (stage,), items, times = simulator.stages(plan), simulator.items(plan), simulator.time_model
    group, root, block = times.groups(plan)["shards"], stage.root.shared, stage.units[1].weights.shared
    assert root.nbytes + LAYERS * block.nbytes == stage.weights.total.nbytes

    def of_units(root_seconds, block_seconds):
        return root_seconds + LAYERS * block_seconds

    def seconds(operation, nbytes):
        return times.network.seconds(operation, nbytes, group)

    slowest = times.slowest(4)
    passes = (
        sum(value * (slowest if cause == "compute" else 1) for cause, value in spent.items())
        for spent in (stage.forward, stage.backward)
    )
    (load,), copied = items.loads, lambda nbytes: slowest * times.moved("copies", nbytes) if nbytes else 0.0
    again = seconds("all_gather", block.nbytes) + copied(2 * block.nbytes)  # the root stays gathered
    forward = of_units(seconds("all_gather", root.nbytes) + copied(2 * root.nbytes), again)
    assert load.forward == pytest.approx(next(passes) + forward)
    reduced = (seconds("reduce_scatter", 4 * unit.elements) + copied(6 * unit.elements) for unit in (root, block))
    backward = of_units(*reduced) + LAYERS * again
    assert load.backward == pytest.approx(next(passes) + backward)
    memory = simulator.simulate(plan).memory[0]
    frozen, trained = stage.weights.total.frozen, stage.weights.total.elements
    downs = (each for name, each in model.module.named_parameters() if name.endswith("qkv.down.weight"))
    of_two_rows = sum(each.numel() for each in downs)
    shards = of_two_rows // 2 + (trained - of_two_rows) // 4  # the first rank has one of two rows
    assert memory.parameters == frozen // 4 + 4 * shards


def test_stages_behind_frozen_layers_still_send():
    model = dense().requires_grad_(False)
    model.head = nn.Linear(32, 64, device="meta")
    stats = statistics_of(model)
    simulator = StepSimulator(StepModel(stats.live, stats.root, Recipe()), Cluster("A100"), 8, LENGTH)
    plan = Plan(pipeline=2, micro_batch=BATCH, checkpoint="every")
    first, second = simulator.stages(plan)
    assert second.crossing_bytes == 2 * BATCH * LENGTH * 32
    assert sum(first.backward.values()) == first.of_weights == 0
    assert first.kept_bytes == BATCH * LENGTH * 8  # token numbers
    assert simulator.items(plan).loads[0].message > 0


def test_sums():
    weights = [Weight(10, 20, "trained", has_master=True), Weight(8, 8, "frozen"), Weight(3, 12, "buffer")]
    both = Weights.of(weights) + Weights.of([Weight(4, 16, "trained", is_expert=True)])
    assert (both.elements, both.trained, both.frozen, both.buffers, both.masters, both.narrow) == (
        14,
        36,
        8,
        12,
        10,
        20,
    )
    assert both.stored == 8 + 4 * 14
    half = both.over(2)
    assert (half.elements, half.trained, half.frozen, half.masters, half.narrow) == (7, 18, 4, 5, 10)
    assert half.buffers == 12  # whole on each rank
    assert (both.gradient_bytes(Recipe()), both.gradient_bytes(Recipe(gradient_dtype=None))) == (56, 36)
    assert Weights.of(weights, are_experts=True) == Weights()


def test_fsdp_shards_rows():
    # The first of 4 ranks has 2 of 5 rows, as torch.chunk gives it, the only row of a bias, and a scalar.
    tensors = [torch.ones(5, 3), torch.ones(1), torch.ones(())]
    weights = Weights.of(weight_of(tensor, tensor, Recipe(precision=None), "trained") for tensor in tensors)
    assert (weights.elements, weights.over(4).elements, (weights + weights).over(4).trained) == (17, 8, 2 * 4 * 8)
    assert torch.ones(5, 3).chunk(4)[0].numel() + 2 == 8


@pytest.mark.skipif(torch.__version__ < "2.10", reason="FSDP of older versions does not run without data")
@pytest.mark.parametrize("make", [dense, lora])
@pytest.mark.parametrize(
    ("plan", "count"), [(Plan(), 2), (Plan(shard=2), 1), (Plan(shard=2), 2), (Plan(tensor=2), 2)], ids=str
)
def test_a_rank_holds_what_the_applied_plan_holds(make, plan, count):
    """Where FSDP computes in copies, these are the estimate's parameters, and its parameters are the master weights.

    ``count`` micro-batches: in the optimizer's step, the copies are gone.
    """
    plan, model = replace(plan, micro_batch=BATCH), make()
    step = statistics_of(model).simulate(
        plan, Cluster("A100"), count * BATCH * plan.batch_ranks, recipe=Recipe(kernels="eager")
    )
    applied = step.parallel_plan()
    alone = {"device": "cuda", "block_bytes": 1, "workspaces": False}
    memory, rank = applied.memory(optimizer="adamw", accumulates=count > 1, **alone), step.memory[0]
    gradients = step.moments[0].optimizer.gradients
    assert gradients == memory.grads
    frozen_bytes = sum(weight.nbytes for weight in model.blocks[0].parameters() if not weight.requires_grad)
    # one rank gathers copies of the frozen weights of a block in bfloat16, which the estimate leaves out
    copied = frozen_bytes // 2 // plan.tensor if plan.shard == 1 else 0
    assert 0.97 < (rank.total + copied) / memory.peak < 1.05
    if plan.zero_stage == 3:
        assert (rank.parameters, rank.optimizer) == (memory.params, memory.optimizer_state)
    else:
        trained = gradients // 4
        assert rank.parameters + rank.optimizer == memory.params + memory.optimizer_state + 2 * trained

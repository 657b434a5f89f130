"""Models that are not plain transformers: a U-net with skip connections, and attention with fewer heads of keys."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from modelsummary import Statistics
from modelsummary.cluster import Cluster, Plan, Recipe, StepModel
from tests.parallel.models import Decoder

BATCH, CHANNELS, TIME, SIZE, GROUPS = 2, 8, 16, 8, 4
EAGER = Recipe(precision=None, gradient_dtype=None, master_weights=False, kernels="eager", loss=torch.Tensor.mean)


class Residual(nn.Module):
    """Two convolutions with the embedding of a time between them, as in diffusion models."""

    def __init__(self, given, made):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(GROUPS, given), nn.Conv2d(given, made, 3, padding=1)
        self.time, self.norm2 = nn.Linear(TIME, made), nn.GroupNorm(GROUPS, made)
        self.conv2 = nn.Conv2d(made, made, 3, padding=1)
        self.skip = nn.Conv2d(given, made, 1) if given != made else nn.Identity()

    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(t))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class UNet(nn.Module):
    def __init__(self, c=CHANNELS):
        super().__init__()
        self.time = nn.Linear(TIME, TIME)
        self.first, self.last = nn.Conv2d(3, c, 3, padding=1), nn.Conv2d(c, 3, 3, padding=1)
        self.down = nn.ModuleList([Residual(c, c), Residual(c, 2 * c)])
        self.smaller = nn.ModuleList(nn.Conv2d(each, each, 3, stride=2, padding=1) for each in (c, 2 * c))
        self.up = nn.ModuleList([Residual(4 * c, c), Residual(2 * c, c)])

    def forward(self, x, t):
        x, t, skips = self.first(x), self.time(t), []
        for block, smaller in zip(self.down, self.smaller, strict=True):
            x = block(x, t)
            skips.append(x)
            x = smaller(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1), t)
        return self.last(x)


def saved_bytes(model, inputs):
    """Return the bytes that autograd keeps in a real forward, without parameters and inputs."""
    known = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *inputs)}
    found = {}

    def pack(x):
        if x.untyped_storage().data_ptr() not in known:
            found[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        EAGER.loss(model(*inputs))
    return sum(each.untyped_storage().nbytes() for each in found.values())


@pytest.fixture(scope="module")
def unet():
    torch.manual_seed(0)
    inputs = torch.randn(BATCH, 3, SIZE, SIZE), torch.randn(BATCH, TIME)
    model = UNet()
    return model, inputs, Statistics(model, inputs)


def test_activations_of_a_unet_are_what_autograd_keeps(unet):
    model, inputs, stats = unet
    step = stats.simulate(Plan(micro_batch=BATCH), Cluster("A100"), 4, recipe=EAGER)
    assert step.memory[0].activations == saved_bytes(model, inputs) + sum(tensor.nbytes for tensor in inputs)
    no_input_gradient = sum(row.macs for row in stats.root.walk() if row.fqn in ("time", "first"))
    assert step.model_flops == 2 * 4 / BATCH * (3 * stats.total_macs - no_input_gradient)
    assert step.memory[0].parameters == 4 * stats.total_params


def test_equal_blocks_that_return_another_size_all_run():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x):
            return self.layer(x).relu()

    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Half() for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = block(torch.cat([x, x], -1))
            return x

    step = Statistics(Joined(), (BATCH, 4)).simulate(
        Plan(micro_batch=BATCH), Cluster.preset("DGX A100"), BATCH, recipe=EAGER
    )
    assert step.memory[0].parameters == 3 * (8 * 4 + 4) * 4
    assert step.model_flops == 2 * BATCH * 8 * 4 * (3 + 3 + 2)  # the first layer's input takes no gradient


def test_bytes_of_a_residual_block(unet):
    """Norms keep what they take, the functions after them what they take, convolutions what they take."""
    model = StepModel(unet[2].live, unet[2].root, EAGER)
    block = model.parts(Plan(micro_batch=BATCH))["down.1"]
    given, made = CHANNELS, 2 * CHANNELS
    maps = 3 * given + 3 * made
    statistics = 2 * 2 * GROUPS  # mean and deviation of two norms
    embedding = TIME  # after the activation; before it, one tensor of all blocks
    assert block.kept_bytes == 4 * BATCH * (maps * (SIZE // 2) ** 2 + statistics + embedding)


def test_context_parallelism_sends_the_heads_that_keys_have():
    heads, groups, width, length = 8, 2, 64, 16  # heads of 8, as kernels pad smaller ones
    with torch.device("meta"):
        model = Decoder(width=width, heads=heads, groups=groups)
        stats = Statistics(model, torch.zeros(1, length, dtype=torch.long))
    model = StepModel(stats.live, stats.root, Recipe())
    for tensor, context in ((1, 2), (1, 4), (2, 2)):
        block = model.parts(Plan(tensor=tensor, context=context), length)["blocks.0"]
        both = 2 * length * groups * (width // heads) * 2 // tensor  # keys and values of all tokens, in bfloat16
        sent = [(each.operation, each.phase, each.nbytes) for each in block.collectives if each.group == "context"]
        assert sent == [
            ("all_gather", "forward", both),
            ("all_gather", "backward", both),
            *[("all_to_all", "backward", 2 * both // context)] * context,
        ]
        (attention,) = (work for work, _ in block.works["forward"] if work.op_class == "attention")
        assert attention.sizes == (heads // tensor, length // context, length, width // heads)


@pytest.mark.parametrize("causal", [True, False])
def test_heads_of_two_sizes_take_one_kernel(causal):
    """Heads of 24 for keys and of 16 for values: torch has a fused kernel for them, but on GPUs only."""

    class Latent(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(32, 32)

        def forward(self, x):
            q, k, v = (each(x).unflatten(-1, (2, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)

    stats = Statistics(Latent(), (3, 8, 32))
    parts = StepModel(stats.live, stats.root, Recipe(precision=torch.bfloat16)).parts(Plan(micro_batch=3))
    works = [work for part in parts.values() for work, _ in part.works["forward"] if work.op_class == "attention"]
    assert [(work.sizes, work.flops, work.is_causal) for work in works] == [
        ((3 * 2, 8, 8, 24), 2 * 3 * 2 * 8 * 8 * (24 + 16), causal)
    ]
    assert not any(work.name == "aten.bmm" for part in parts.values() for work, _ in part.works["forward"])

"""What a compiled model keeps for the backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from modelsummary import Statistics
from modelsummary.cluster import Plan, Recipe, StepModel

WIDTH, INNER, ROWS = 16, 40, 8


class Gated(nn.Module):
    """A block with gated layers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def stack(device="cpu"):
    with torch.device(device):
        return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), *(Gated() for _ in range(3)))


def kept_in_a_block(kernels):
    stats = Statistics(stack("meta"), (ROWS, WIDTH))
    model = StepModel(stats.live, stats.root, Recipe(precision=None, kernels=kernels))
    return model.parts(Plan(micro_batch=ROWS))["1"].kept_bytes


def test_a_compiled_backward_computes_element_wise_results_again():
    # input, norm's statistics and result, gate, silu, up, product: the backward multiplies by silu element by element
    eager = 4 * ROWS * (WIDTH + 2 + WIDTH + 4 * INNER)
    assert kept_in_a_block("eager") == kept_in_a_block("fused") == eager
    assert kept_in_a_block("compiled") == eager - 4 * ROWS * INNER


@pytest.mark.slow
def test_the_partitioner_of_torch_keeps_as_much():
    module, x = stack(), torch.rand(ROWS, WIDTH)
    own = {each.untyped_storage().data_ptr() for each in (*module.parameters(), x)}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    compiled = torch.compile(module, backend="aot_eager_decomp_partition")
    compiled(x)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = compiled(x)
    assert sum(saved.values()) == pytest.approx(3 * kept_in_a_block("compiled"), rel=0.03)
    del result

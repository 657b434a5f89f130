"""Gradients of a stage, without other processes."""

from types import SimpleNamespace

import torch
from torch import nn

from modelsummary.split.backward_halves import backward_of_inputs, backward_of_weights
from modelsummary.split.engine_stage import RankGradients


def test_weights_that_are_added_have_gradients_of_their_own():
    first, other, last = (nn.Parameter(torch.ones(3, 3)) for _ in range(3))
    x = torch.ones(2, 3, requires_grad=True)
    result = torch.nn.functional.linear(x, first + other).sum() + last.sum()
    _, later = backward_of_inputs([result], None, [x], [first, other, last])
    backward_of_weights(later)
    for weight in (first, other, last):  # as a schedule scales them, in place
        weight.grad.div_(2)
    assert [weight.grad.tolist() for weight in (first, other)] == [[[1.0] * 3] * 3] * 2  # 2 rows of ones / 2
    assert last.grad.tolist() == [[0.5] * 3] * 3


def test_a_step_after_one_that_raised_scales_gradients_of_all_stages():
    gradients = RankGradients((), None)
    modules = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    gradients.stages += [SimpleNamespace(submod=module) for module in modules]

    def step(*finished):
        for stage in range(2):
            gradients.begin(stage)
        for stage in finished:
            modules[stage].weight.grad = torch.full((1, 1), 4.0)
            gradients.finish(stage, 2)

    step(1)  # stage 0 raises
    step(1, 0)
    assert [module.weight.grad.item() for module in modules] == [2.0, 2.0]

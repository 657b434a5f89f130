"""Gradients of a stage, without other processes."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from modelsummary import Statistics
from modelsummary.capture.backward_halves import backward_of_inputs, backward_of_weights
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


@pytest.mark.parametrize("is_added", [False, True])
def test_gradients_of_weights_lie_as_the_weights_do(is_added):
    # Fused optimizers of torch read a gradient in the order of its parameter, whatever its strides.
    stack, filters = nn.Parameter(torch.randn(4, 3, 5)), nn.Parameter(torch.randn(2, 3, 3, 3))
    filters.data = filters.data.contiguous(memory_format=torch.channels_last)
    x, image = torch.randn(6, 3, requires_grad=True), torch.randn(1, 3, 5, 5, requires_grad=True)
    result = torch.einsum("td,edh->teh", x, stack).square().sum() + F.conv2d(image, filters).square().sum()
    expected = torch.autograd.grad(result, [stack, filters], retain_graph=True)
    assert expected[0].stride() != stack.stride()  # or this shows nothing
    for _ in range(1 + is_added):
        _, later = backward_of_inputs([result], None, [x, image], [stack, filters])
        backward_of_weights(later)
    for weight, gradient in zip((stack, filters), expected, strict=True):
        assert weight.grad.stride() == weight.stride()
        torch.testing.assert_close(weight.grad, (1 + is_added) * gradient)


def test_a_step_after_one_that_raised_scales_gradients_of_all_stages():
    gradients = RankGradients((), None)
    modules = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    gradients.stages += [SimpleNamespace(submod=module, open_chunks=0) for module in modules]

    def step(*finished):
        for stage in range(2):
            gradients.begin(stage)
        for stage, module in enumerate(modules):
            module.weight.grad = (0 if module.weight.grad is None else module.weight.grad) + torch.full((1, 1), 4.0)
            gradients.stages[stage].open_chunks = 0 if stage in finished else 1
        for stage in finished:
            gradients.finish(stage, 2)

    step(0, 1)
    step(1)  # stage 0 raises after its first gradient
    step(1, 0)  # what the step before it left is dropped, what the first one made is kept
    assert [module.weight.grad.item() for module in modules] == [4.0, 4.0]


class Named(nn.Module):
    """A model that runs over names in some order, as over a set, whose order differs between processes."""

    def __init__(self, names: str) -> None:
        super().__init__()
        self.names, self.first, self.last = names, nn.Linear(4, 4), nn.Linear(4, 4)
        for shift, name in enumerate("ab"):
            self.register_buffer(name, torch.full((4,), float(shift)))

    def forward(self, x):
        parts = {name: x + getattr(self, name) for name in self.names}
        y = self.last(self.first(x))
        return y * parts["a"] - parts["b"]


def test_stages_send_alike_in_every_process():
    x, sent = torch.arange(8.0).view(2, 4), []
    for names in ("ab", "ba"):
        torch.manual_seed(0)
        stages = Statistics(Named(names), x).split(2, boundaries=["last"])
        sent.append(stages[0](x))
    assert len(sent[0]) == 3  # x + a, x + b, and the result of the first layer
    assert all(torch.equal(*pair) for pair in zip(*sent, strict=True))


class Written(nn.Module):
    """A layer whose result is copied into zeros, which cross."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = torch.zeros(2, 4)
        y.copy_(self.first(x))
        return self.last(y)


def test_what_a_result_was_copied_into_takes_a_gradient():
    stages = Statistics(Written(), torch.ones(2, 4)).split(2, boundaries=["last"])
    assert [[crossing.requires_grad for crossing in taken] for taken in stages.crossing] == [[False], [True], [True]]


class Tied(nn.Module):
    """A weight that is tied before the layers that use it, under a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.first.weight = self.shared.weight

    def forward(self, x):
        return self.last(self.first(x).relu())


def test_a_tied_weight_keeps_its_first_name_in_a_stage():
    model = Tied()
    stages = Statistics(model, torch.ones(2, 4)).split(2, boundaries=["last"])
    assert next(name for name, _ in stages[0].named_parameters()) == "shared.weight"

"""The time of autograd: of recording an operator in the forward, and of the engine around it in the backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from modelsummary.latency.host_time import lower_quartiles, timed_among_others

__all__ = ["autograd_seconds"]

_ROUNDS = 60


@torch.inference_mode(False)  # in which the caller may be, and which refuses gradients
def autograd_seconds() -> dict[str, float]:
    """Return the seconds of the CPU that autograd adds to an operator.

    Returns:
        ``"node"``: what a forward takes longer with gradients; ``"engine"``: what a backward takes longer than its
        operators. Both per node.
    """
    seconds = timed_among_others()
    rounds: list[list[float]] = []
    for _ in range(_ROUNDS):
        times = []
        for chain in (_Chain(len(_OPERATORS)), _Chain(1)):
            with torch.no_grad():
                times += [seconds(chain.forward)]
            with torch.enable_grad():
                times += [seconds(chain.forward)]
            times += [seconds(chain.backward)]
            with torch.no_grad():
                times += [seconds(chain.operators_of_backward)]
        rounds.append(times)
    plain, recorded, backward, operators, _, _, short_backward, short_operators = lower_quartiles(rounds)
    engine = (backward - operators) - (short_backward - short_operators)  # without the start of a backward
    n = len(_OPERATORS)
    return {"node": max((recorded - plain) / n, 0.0), "engine": max(engine / (n - 1), 0.0)}


_aten = torch.ops.aten
# operator, and the operator of its backward, which takes a gradient, the argument and the result
_OPERATORS: tuple[tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor, Tensor], Any]], ...] = (
    (torch.sigmoid, lambda g, _, y: _aten.sigmoid_backward.default(g, y)),
    (F.gelu, lambda g, x, _: _aten.gelu_backward.default(g, x)),
    (torch.tanh, lambda g, _, y: _aten.tanh_backward.default(g, y)),
    (F.silu, lambda g, x, _: _aten.silu_backward.default(g, x)),
    (F.hardswish, lambda g, x, _: _aten.hardswish_backward.default(g, x)),
    (F.leaky_relu, lambda g, x, _: _aten.leaky_relu_backward.default(g, x, 0.01, False)),
    (F.softplus, lambda g, x, _: _aten.softplus_backward.default(g, x, 1, 20)),
    (F.hardtanh, lambda g, x, _: _aten.hardtanh_backward.default(g, x, -1.0, 1.0)),
)


class _Chain:
    """Small operators, one after the other, and their backward."""

    def __init__(self, length: int) -> None:
        self.operators = _OPERATORS[:length]
        self.x = torch.rand(64, device="cpu", requires_grad=True)
        self.gradient = torch.ones(64, device="cpu")
        self.results = [self.x.detach()]
        for operator, _ in self.operators:
            self.results.append(operator(self.results[-1]))

    def forward(self) -> None:
        """Run the operators; the graph lives until the backward has run."""
        self.output = reduce(lambda result, pair: pair[0](result), self.operators, self.x)

    def backward(self) -> None:
        """Run the backward of the forward that ran last."""
        self.output.backward(self.gradient)

    def operators_of_backward(self) -> Tensor:
        """Run the operators of the backward alone; return the gradient of the input."""
        gradient, index = self.gradient, len(self.operators)
        for _, operator in reversed(self.operators):
            index -= 1
            gradient = operator(gradient, self.results[index], self.results[index + 1])
        return gradient

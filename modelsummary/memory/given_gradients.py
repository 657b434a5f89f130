"""Which parameters a backward gives a gradient."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import ref

from torch import Tensor, nn

from modelsummary.operators.tensor_bytes import inner_tensors

__all__ = ["GivenGradients"]

Writes = list[tuple["ref[Tensor]", int]]  # of a gradient and its inner tensors: each with the number of writes to it


class GivenGradients:
    """The gradients that parameters have before a backward; they are not kept alive.

    >>> import torch
    >>> model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    >>> for each in model.parameters():
    ...     each.grad = torch.zeros_like(each)
    >>> given = GivenGradients(model.parameters())
    >>> model[0](torch.ones(1, 2)).sum().backward()
    >>> [each is model[1].weight for each in given.unused()]
    [True]
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._given: list[tuple[nn.Parameter, Writes]] = [
            (each, [(ref(tensor), tensor._version) for tensor in _tensors(each.grad)]) for each in parameters
        ]

    def unused(self) -> list[nn.Parameter]:
        """Return the parameters whose gradient was neither made nor written since."""
        return [parameter for parameter, writes in self._given if _are_same(_tensors(parameter.grad), writes)]


def _tensors(grad: Tensor | None) -> list[Tensor]:
    """Return a gradient and its inner tensors; autograd counts writes to the former, and FSDP2 writes to the latter."""
    return [] if grad is None else [grad, *inner_tensors(grad)]


def _are_same(tensors: list[Tensor], writes: Writes) -> bool:
    return len(tensors) == len(writes) and all(
        before() is each and version == each._version for each, (before, version) in zip(tensors, writes, strict=True)
    )

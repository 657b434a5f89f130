"""The cheapest choice of options that saves enough: an exact dynamic programme over sets of choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Option", "least_cost", "undominated_options"]

_MOST = 2048  # choices that are carried on; of more, nearly equal costs count once


class Option(NamedTuple):
    """One of the ways in which a block may run.

    Attributes:
        cost: what it takes in addition, in any unit.
        saving: bytes that are then not kept for the backward.
    """

    cost: int
    saving: int


def least_cost(blocks: Sequence[Sequence[Option]], needed: Sequence[int]) -> list[int] | None:
    """Return the number of the option of each block that saves enough at the least cost; None if none does.

    Blocks are in the order of the forward. While block j runs, forward or backward, the activations of the blocks
    before it are alive, and none of the blocks after it. So the savings of the blocks before j must reach
    ``needed[j]``, and the savings of all blocks ``needed[len(blocks)]``, for the operators after the last block. All
    choices that no other choice beats in both saving and cost are extended block by block, so the result is exact while
    these are at most 2,048; of more, choices whose costs differ by less than 1/2,048 of the largest count as one.

    >>> leave = Option(0, 0)
    >>> blocks = [[leave, Option(5, 10)], [leave, Option(9, 30)], [leave, Option(6, 20)]]
    >>> least_cost(blocks, needed=[0, 0, 0, 25])
    [0, 1, 0]
    >>> least_cost(blocks[:1], needed=[0, 25]) is None
    True
    """
    front = _Front(max(needed))
    for options, saving in zip(blocks, needed, strict=False):
        front.require(saving)
        front.extend(options)
    front.require(needed[-1])
    return front.choice(0) if len(front.costs) else None


def undominated_options(items: Sequence[Sequence[Option]]) -> list[tuple[Option, list[int]]]:
    """Return the sums of one option of each item that no other sum beats, by cost, with the numbers of the options.

    >>> leave = Option(0, 0)
    >>> [option for option, _ in undominated_options([[leave, Option(2, 3)], [leave, Option(3, 3)]])]
    [Option(cost=0, saving=0), Option(cost=2, saving=3), Option(cost=5, saving=6)]
    """
    front = _Front()
    for options in items:
        front.extend(options)
    pairs = zip(front.costs.tolist(), front.savings.tolist(), strict=True)
    return [(Option(*pair), front.choice(index)) for index, pair in enumerate(pairs)]


class _Front:
    """Choices of the options so far that no other choice beats, in the order of their costs.

    Args:
        most: the most saving that is needed; more counts as much. Default: no limit.
    """

    def __init__(self, most: int | None = None) -> None:
        self.costs = torch.zeros(1, dtype=torch.int64)
        self.savings = torch.zeros(1, dtype=torch.int64)
        self._most = most
        self._steps: list[tuple[Tensor, Tensor]] = []  # the choice before, and the option, of each choice

    def require(self, saving: int) -> None:
        """Drop the choices that save less."""
        self._keep(self.savings >= saving)

    def extend(self, options: Sequence[Option]) -> None:
        """Choose among the options of one more block."""
        table = torch.tensor(options, dtype=torch.int64)
        n_before = len(self.costs)
        costs = (table[:, 0, None] + self.costs).flatten()
        savings = (table[:, 1, None] + self.savings).flatten()
        if self._most is not None:
            savings = savings.clamp(max=self._most)
        order = torch.argsort(savings, descending=True, stable=True)
        order = order[torch.argsort(costs[order], stable=True)]
        self.costs, self.savings = costs[order], savings[order]
        if not n_before:
            self._steps.append((order, order))
            return
        self._steps.append((order % n_before, order // n_before))  # of equal ones, earlier blocks run again
        best = torch.cummax(self.savings, 0).values
        is_better = torch.ones_like(best, dtype=torch.bool)
        is_better[1:] = self.savings[1:] > best[:-1]
        self._keep(is_better)
        if len(self.costs) > _MOST:
            cells = self.costs * _MOST // max(int(self.costs[-1]), 1)
            is_last = torch.ones_like(cells, dtype=torch.bool)
            is_last[:-1] = cells[1:] != cells[:-1]
            is_last[0] = True
            self._keep(is_last)

    def _keep(self, chosen: Tensor) -> None:
        self.costs, self.savings = self.costs[chosen], self.savings[chosen]
        if self._steps:
            before, option = self._steps[-1]
            self._steps[-1] = before[chosen], option[chosen]
        elif not bool(chosen.all()):
            self.costs, self.savings = self.costs[:0], self.savings[:0]

    def choice(self, index: int) -> list[int]:
        """Return the numbers of the options of one choice."""
        options = []
        for before, option in reversed(self._steps):
            options.append(int(option[index]))
            index = int(before[index])
        return options[::-1]

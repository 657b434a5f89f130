"""The cheapest choice of options that fits: an exact dynamic programme over sets of choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Option", "least_cost", "least_peak", "peak_of", "undominated_options"]

_MOST = 2048  # choices that are carried on; of more, nearly equal costs count once


class Option(NamedTuple):
    """One of the ways in which a block may run.

    Attributes:
        cost: what it takes in addition, in any unit.
        saving: bytes that are then not kept for the backward.
        peak: the most bytes alive while the block runs, forward or backward, if no other block saves any.
    """

    cost: int
    saving: int
    peak: int = 0


def least_cost(blocks: Sequence[Sequence[Option]], between: Sequence[int], budget: int) -> list[int] | None:
    """Return the number of the option of each block that fits a budget at the least cost; None if none does.

    Blocks are in the order of the forward. While block j runs, forward or backward, the activations of the blocks
    before it are alive, and none of the blocks after it. So the savings of the blocks before j count for the peak of
    block j, and for what is alive between the blocks j - 1 and j (``between[j]``); all savings count after the last
    block (``between[len(blocks)]``). All choices that no other choice beats in both saving and cost are extended block
    by block, so the result is exact while these are at most 2,048; of more, choices whose costs differ by less than
    1/2,048 of the largest count as one.

    >>> blocks = [[Option(0, 0), Option(5, 10)], [Option(0, 0), Option(9, 30)], [Option(0, 0), Option(6, 20)]]
    >>> least_cost(blocks, between=[0, 0, 0, 100], budget=75)
    [0, 1, 0]
    >>> least_cost(blocks[:1], between=[0, 100], budget=75) is None
    True
    >>> least_cost([blocks[0], [Option(0, 0, peak=90)]], between=[0, 0, 0], budget=85)
    [1, 0]
    """
    peaks = [*between, *(option.peak for options in blocks for option in options)]
    front = _Front(max(peaks) - budget)
    for options, peak in zip(blocks, between, strict=False):
        front.require(peak - budget)
        front.extend(options, [option.peak - budget for option in options])
    front.require(between[-1] - budget)
    return front.choice(0) if len(front.costs) else None


def peak_of(options: Sequence[Option], between: Sequence[int]) -> int:
    """Return the peak of a choice: one option of each block.

    >>> peak_of([Option(5, 10, peak=70), Option(0, 0, peak=90)], between=[20, 60, 85])
    80
    """
    saved, peak = 0, between[0]
    for option, after in zip(options, between[1:], strict=True):
        peak = max(peak, option.peak - saved)
        saved += option.saving
        peak = max(peak, after - saved)
    return peak


def least_peak(blocks: Sequence[Sequence[Option]], between: Sequence[int]) -> int:
    """Return the least budget that some choice fits.

    >>> least_peak([[Option(0, 0, peak=90), Option(5, 10, peak=95)], [Option(0, 0, peak=92)]], between=[0, 0, 0])
    92
    """
    low, high = between[0], peak_of([options[0] for options in blocks], between)
    while low < high:  # what saves most of what fits so far leaves most room for later blocks
        budget, saved = (low + high) // 2, 0
        for options, after in zip(blocks, between[1:], strict=True):
            savings = [option.saving for option in options if option.peak - saved <= budget]
            saved += max(savings, default=0)
            if not savings or after - saved > budget:
                low = budget + 1
                break
        else:
            high = budget
    return low


def undominated_options(items: Sequence[Sequence[Option]]) -> list[tuple[Option, list[int]]]:
    """Return the sums of one option of each item that no other sum beats, by cost, with the numbers of the options.

    >>> leave = Option(0, 0)
    >>> [option[:2] for option, _ in undominated_options([[leave, Option(2, 3)], [leave, Option(3, 3)]])]
    [(0, 0), (2, 3), (5, 6)]
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

    def extend(self, options: Sequence[Option], needed: Sequence[int] | None = None) -> None:
        """Choose among the options of one more block.

        Args:
            needed: saving of earlier blocks that each option needs. Default: none.
        """
        table = torch.tensor(options, dtype=torch.int64)
        n_before = len(self.costs)
        costs = (table[:, 0, None] + self.costs).flatten()
        savings = (table[:, 1, None] + self.savings).flatten()
        if self._most is not None:
            savings = savings.clamp(max=self._most)
        order = torch.argsort(costs, stable=True)
        if needed is not None:
            is_enough = (self.savings >= torch.tensor(needed, dtype=torch.int64)[:, None]).flatten()
            order = order[is_enough[order]]
        self.costs, self.savings = costs[order], savings[order]
        if not len(order):
            self._steps.append((order, order))
            return
        self._steps.append((order % n_before, order // n_before))  # of equal ones, earlier blocks run again
        best = torch.cummax(self.savings, 0).values
        is_better = torch.ones_like(best, dtype=torch.bool)
        is_better[1:] = self.savings[1:] > best[:-1]
        self._keep(is_better)
        self._keep(_is_last(self.costs))  # of equal costs, the largest saving
        if len(self.costs) > _MOST:
            is_chosen = _is_last(self.costs * _MOST // max(int(self.costs[-1]), 1))
            is_chosen[0] = True
            self._keep(is_chosen)

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


def _is_last(numbers: Tensor) -> Tensor:
    """Return True for the last one of equal neighbours."""
    is_last = torch.ones_like(numbers, dtype=torch.bool)
    is_last[:-1] = numbers[1:] != numbers[:-1]
    return is_last

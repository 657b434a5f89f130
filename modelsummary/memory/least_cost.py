"""The cheapest choice of options that fits: an exact dynamic programme over sets of choices."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import pairwise, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Option", "UndominatedChoices", "corners_of", "least_cost", "least_peak", "peak_of", "undominated_options"]

_MOST = 512  # choices that are carried on; of more, nearly equal costs count once
_NEVER = 1e300  # what a byte costs that cannot be saved


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
    by block, but for the ones that cannot become cheaper than a choice that few of them led to. The result is exact
    while these are at most 512; of more, choices whose costs differ by less than 1/512 of their range count as one.

    >>> blocks = [[Option(0, 0), Option(5, 10)], [Option(0, 0), Option(9, 30)], [Option(0, 0), Option(6, 20)]]
    >>> least_cost(blocks, between=[0, 0, 0, 100], budget=75)
    [0, 1, 0]
    >>> least_cost(blocks[:1], between=[0, 100], budget=75) is None
    True
    >>> least_cost([blocks[0], [Option(0, 0, peak=90)]], between=[0, 0, 0], budget=85)
    [1, 0]
    """
    needed = [peak - budget for peak in between]  # that the blocks before save
    for index, options in enumerate(blocks):
        needed[index] = max(needed[index], min(option.peak for option in options) - budget)
    most = max([*needed, *(option.peak - budget for options in blocks for option in options)])
    until = max(range(len(needed)), key=needed.__getitem__)
    corners = [corners_of(options) for options in blocks[:until]]
    cost = _cost_by_corners(blocks, corners, between, budget)
    rests = [None] * len(blocks) if cost is None else _rests(corners, needed[until], cost)
    front = UndominatedChoices(most)
    for options, saving, rest in zip_longest(blocks, needed[:-1], rests):
        front.require(saving)
        front.extend(options, [option.peak - budget for option in options], rest)
    cheapest = front.cheapest(needed[-1])
    return None if cheapest is None else cheapest[1]


def _cost_by_corners(
    blocks: Sequence[Sequence[Option]], corners: Sequence[Sequence[Option]], between: Sequence[int], budget: int
) -> int | None:
    """Return the cost of a choice that fits, for which bytes were saved where the next ones cost least; None if none.

    Args:
        blocks, between, budget: as for ``least_cost``.
        corners: of the blocks that may save.
    """
    steps = sorted(
        (_slope(before, after), index, after)
        for index, of_block in enumerate(corners)
        for before, after in pairwise(of_block)
    )

    def choice(n_steps: int) -> list[Option]:
        options = [min(of_block) for of_block in blocks]
        for _, index, option in steps[:n_steps]:
            options[index] = option
        return options

    fits = bisect_left(range(len(steps)), True, key=lambda n_steps: peak_of(choice(n_steps), between) <= budget)
    options = choice(fits)
    return sum(option.cost for option in options) if peak_of(options, between) <= budget else None


class _Rest(NamedTuple):
    """The least cost of what is left to save behind a block, if the blocks there could save in parts.

    Attributes:
        needed: bytes that all blocks up to some point have to save.
        most: the cost that a choice may have.
        savings, costs, slopes: corners of the cost as a function of what the blocks behind save up to this point, and
            what a byte more costs from each corner on.
    """

    needed: int
    most: int
    savings: Tensor
    costs: Tensor
    slopes: Tensor

    def may_follow(self, costs: Tensor, savings: Tensor) -> Tensor:
        """Return True for choices of the blocks so far that may become cheap enough."""
        left = (self.needed - savings).to(torch.float64).clamp(min=float(self.savings[0]))
        corner = torch.searchsorted(self.savings, left, right=True) - 1
        least = self.costs[corner] + self.slopes[corner] * (left - self.savings[corner])
        return costs + least <= self.most + 0.5  # costs are integers


def _rests(corners: Sequence[Sequence[Option]], needed: int, most: int) -> list[_Rest]:
    """Return what is left to save behind each block.

    Args:
        corners: of the blocks up to the point where most is needed.
        needed, most: as ``_Rest`` has them.
    """
    saving, cost = 0, 0  # of the cheapest options
    steps: list[tuple[float, int, int]] = []  # cost of a byte, bytes and cost of what can be saved in addition
    rests = []
    for of_block in reversed(corners):
        table = torch.tensor([*steps, (_NEVER, 0, 0)], dtype=torch.float64)
        savings, costs = (torch.cat([torch.zeros(1), table[:-1, column].cumsum(0)]) for column in (1, 2))
        rests.append(_Rest(needed, most, savings + saving, costs + cost, table[:, 0].contiguous()))
        saving, cost = saving + of_block[0].saving, cost + of_block[0].cost
        for before, after in pairwise(of_block):
            insort(steps, (_slope(before, after), after.saving - before.saving, after.cost - before.cost))
    return rests[::-1]


def corners_of(options: Sequence[Option]) -> list[Option]:
    """Return the corners of the least cost as a function of the saving, if options could be mixed; the cheapest first.

    >>> [option[:2] for option in corners_of([Option(0, 0), Option(5, 2), Option(6, 10), Option(9, 11)])]
    [(0, 0), (6, 10), (9, 11)]
    """
    corners: list[Option] = []
    for option in sorted(options, key=lambda option: (option.cost, -option.saving)):
        if corners and option.saving <= corners[-1].saving:
            continue
        while len(corners) > 1 and _slope(corners[-2], corners[-1]) >= _slope(corners[-1], option):
            corners.pop()
        corners.append(option)
    return corners


def _slope(before: Option, after: Option) -> float:
    return (after.cost - before.cost) / (after.saving - before.saving)


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
    front = UndominatedChoices()
    for options in items:
        front.extend(options)
    pairs = zip(front.costs.tolist(), front.savings.tolist(), strict=True)
    return [(Option(*pair), front.choice(index)) for index, pair in enumerate(pairs)]


class UndominatedChoices:
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

    def extend(self, options: Sequence[Option], needed: Sequence[int] | None = None, rest: _Rest | None = None) -> None:
        """Choose among the options of one more block.

        Args:
            needed: saving of earlier blocks that each option needs. Default: none.
            rest: what is left to save behind the block. Default: it is not looked at.
        """
        table = torch.tensor(options, dtype=torch.int64)
        n_before = len(self.costs)
        costs = (table[:, 0, None] + self.costs).flatten()
        savings = (table[:, 1, None] + self.savings).flatten()
        if self._most is not None:
            savings = savings.clamp(max=self._most)
        order = torch.arange(len(costs))
        if needed is not None:
            order = order[(self.savings >= torch.tensor(needed, dtype=torch.int64)[:, None]).flatten()]
        if rest is not None:
            order = order[rest.may_follow(costs[order], savings[order])]
        order = order[torch.argsort(costs[order], stable=True)]
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
            least, most = int(self.costs[0]), int(self.costs[-1])
            is_chosen = _is_last((self.costs - least) * _MOST // (most - least))
            is_chosen[0] = True
            self._keep(is_chosen)

    def _keep(self, chosen: Tensor) -> None:
        self.costs, self.savings = self.costs[chosen], self.savings[chosen]
        if self._steps:
            before, option = self._steps[-1]
            self._steps[-1] = before[chosen], option[chosen]
        elif not bool(chosen.all()):
            self.costs, self.savings = self.costs[:0], self.savings[:0]

    def cheapest(self, saving: int) -> tuple[int, list[int]] | None:
        """Return the cost and the options of the cheapest choice that saves so many bytes; None if none does.

        >>> choices = UndominatedChoices()
        >>> for _ in range(2):
        ...     choices.extend([Option(0, 0), Option(2, 3)])
        >>> choices.cheapest(3), choices.cheapest(7)
        ((2, [1, 0]), None)
        """
        index = int((self.savings < saving).sum())  # savings rise with costs
        return (int(self.costs[index]), self.choice(index)) if index < len(self.costs) else None

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

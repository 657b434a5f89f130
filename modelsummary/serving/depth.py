"""Few of a model's equal blocks run in place of all: what a forward takes grows evenly with their number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from modelsummary.equality import patterns
from modelsummary.layer_info import LayerInfo
from modelsummary.memory.checkpointing import blocks_of
from modelsummary.parallel.equal_blocks import kinds_of_blocks

__all__ = ["Fold", "fold_of"]

_LEAST = 6  # repetitions of a pattern that is folded: three of them run


class Fold(NamedTuple):
    """A version of a model in which blocks return what they take, and others stand for them.

    Attributes:
        same: FQN of a block that does not run -> FQN of the equal one that runs before it. Of each pattern of blocks,
            the first two and the last repetition run.
        times: FQN of a block -> the number of blocks that its figures count for, other than 1: of the second
            repetition, the ones that do not run as well, which count for none.
    """

    same: Mapping[str, str]
    times: Mapping[str, int]


def fold_of(root: LayerInfo) -> Fold | None:
    """Return the version of a model with few of its equal blocks; None if no pattern of blocks comes often.

    >>> import torch
    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(8)))
    >>> fold = fold_of(Statistics(model, (1, 4)).root)
    >>> list(fold.same), fold.times  # the first block takes no gradient, so it is another kind
    (['3', '4', '5', '6'], {'3': 0, '4': 0, '5': 0, '6': 0, '2': 5})
    """
    rows = blocks_of(root)
    kinds, names = kinds_of_blocks(root, rows), [row.fqn for row in rows]
    numbers: dict[str, int] = {}
    same: dict[str, str] = {}
    times: dict[str, int] = {}
    for begin, period, repeats in patterns([numbers.setdefault(kinds[name], len(numbers)) for name in names]):
        if repeats >= _LEAST:
            left_out = range(begin + 2 * period, begin + (repeats - 1) * period)
            same |= {names[position]: names[begin + (position - begin) % period] for position in left_out}
            second = names[begin + period : begin + 2 * period]
            times |= dict.fromkeys((names[position] for position in left_out), 0) | dict.fromkeys(second, repeats - 2)
    return Fold(same, times) if same else None

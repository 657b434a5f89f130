"""Few of a model's equal blocks run in place of all: what a forward takes grows evenly with their number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from modelsummary.equality import patterns
from modelsummary.layer_info import LayerInfo
from modelsummary.memory.checkpointing import blocks_of
from modelsummary.parallel.equal_blocks import kinds_of_blocks

__all__ = ["Folds", "folds_of"]

_LEAST = 6  # repetitions of a pattern that is folded: forwards with two and with three of them run in its place


class Folds(NamedTuple):
    """Versions of a model in which blocks return what they take.

    Attributes:
        same: for each version, FQN of a block that does not run -> FQN of the equal one that runs before it. In the
            first version, the first and the last repetition of each pattern of blocks run; in each other one, one more
            repetition of one pattern.
        factors: by which the figures of each version are multiplied, so that their sum is the figure of all blocks.
    """

    same: tuple[Mapping[str, str], ...]
    factors: tuple[float, ...]


def folds_of(root: LayerInfo) -> Folds | None:
    """Return versions of a model with few of its equal blocks; None if no pattern of blocks comes often.

    >>> import torch
    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(8)))
    >>> folds = folds_of(Statistics(model, (1, 4)).root)
    >>> [len(same) for same in folds.same], folds.factors  # the first block takes no gradient, so it is another kind
    ([5, 4], (-4.0, 5.0))
    """
    rows = blocks_of(root)
    kinds, names = kinds_of_blocks(root, rows), [row.fqn for row in rows]
    numbers: dict[str, int] = {}
    repeated = [
        (begin, period, times)
        for begin, period, times in patterns([numbers.setdefault(kinds[name], len(numbers)) for name in names])
        if times >= _LEAST
    ]
    if not repeated:
        return None

    def left_out(begin: int, period: int, times: int, first: int) -> dict[str, str]:
        between = range(begin + first * period, begin + (times - 1) * period)
        return {names[position]: names[begin + (position - begin) % period] for position in between}

    first = [left_out(*pattern, 1) for pattern in repeated]
    one_more = [left_out(*pattern, 2) for pattern in repeated]
    versions = [first, *([*first[:index], one_more[index], *first[index + 1 :]] for index in range(len(repeated)))]
    same = tuple({fqn: kind for part in version for fqn, kind in part.items()} for version in versions)
    missing = [float(times - 2) for _, _, times in repeated]
    return Folds(same, (1 - sum(missing), *missing))

"""Calls that take sizes of the whole model."""

import pytest
import torch

from modelsummary.parallel.local_sizes import SizesOfRank

CALLS = [
    {"name": "expand", "at": -2, "local": 2, "n_leaves": 2, "numbers": ((0, 4, 2),)},
    {"name": "getitem", "at": -2, "local": 2, "n_leaves": 3, "numbers": ((0, 0, 0), (1, 2, 1))},
]


@pytest.mark.parametrize("function", [lambda x: x.expand(4, 3), lambda x: x[0:2]])
def test_tensors_of_fewer_dimensions_are_left_alone(function):
    x = torch.arange(3)
    with SizesOfRank(CALLS, 2):
        result = function(x)
    assert torch.equal(result, function(x))


@pytest.mark.parametrize("split", [lambda x, dim: x.split(4, dim), lambda x, dim: torch.split(x, 4, dim=dim)])
def test_splits_along_another_dimension_are_left_alone(split):
    """Parts of four heads are parts of two on a rank; parts of four tokens stay parts of four."""
    x = torch.arange(32).view(1, 8, 4)
    with SizesOfRank([{"name": "split", "at": -1, "local": 4, "n_leaves": 1, "numbers": ((0, 4, 2),)}], 2):
        tokens, heads = split(x, 1), split(x, -1)
    assert [part.shape for part in tokens] == [(1, 4, 4)] * 2
    assert [part.shape for part in heads] == [(1, 8, 2)] * 2

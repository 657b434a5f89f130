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

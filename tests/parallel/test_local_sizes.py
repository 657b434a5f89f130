"""Calls that take sizes of the whole model."""

import pytest
import torch

from modelsummary.parallel.local_sizes import SizesOfRank

CALLS = [
    {"name": "expand", "kind": "expand", "at": -2, "n_sizes": 2, "local": 2},
    {"name": "getitem", "kind": "slice", "at": -2, "n_parts": 1, "part": 0, "whole": (0, 4), "local": 2},
]


@pytest.mark.parametrize("function", [lambda x: x.expand(4, 3), lambda x: x[0:2]])
def test_tensors_of_fewer_dimensions_are_left_alone(function):
    x = torch.arange(3)
    with SizesOfRank(CALLS, 2):
        result = function(x)
    assert torch.equal(result, function(x))

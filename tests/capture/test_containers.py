"""Shapes and bytes of the arguments and results of modules."""

from __future__ import annotations

from collections import OrderedDict, UserDict, deque

import pytest
import torch
from torch import nn

from modelsummary import Statistics
from modelsummary.capture.containers import argument_sizes, map_tensors, result_sizes, sizes_of
from modelsummary.layer_info import UNKNOWN, first_shape
from tests.models import Output, Pair

x, y = torch.rand(2, 3), torch.rand(4)


class Holder:
    def __init__(self):
        self.inner = Inner()
        self.scale = 2.0


class Inner:
    def __init__(self):
        self.keys = [x, y]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (x, [2, 3]),
        (torch.rand(()), []),
        ((x, y), ([2, 3], [4])),
        ([x, [y, None]], ([2, 3], ([4], None))),
        ({"a": x, "b": 1}, {"a": [2, 3], "b": None}),
        (OrderedDict(a=x), {"a": [2, 3]}),
        (UserDict(a=x), {"a": [2, 3]}),
        (deque([x]), ([2, 3],)),
        (Pair(x, y), ([2, 3], [4])),
        (Output(x, 0.5), {"logits": [2, 3]}),
        (torch.distributions.Normal(x, x), {"loc": [2, 3], "scale": [2, 3]}),
        (Holder(), {"inner": {"keys": ([2, 3], [4])}}),
        (nn.utils.rnn.pack_sequence([x, x]), ([4, 3], [2], None, None)),
        (None, None),
        (3, None),
        (object(), UNKNOWN),
        (torch.nested.nested_tensor([x, x], layout=torch.jagged), UNKNOWN),
    ],
)
def test_sizes_keep_the_structure(value, expected):
    assert result_sizes(value)[0] == expected


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_bytes_follow_the_dtype_and_count_a_tensor_once():
    assert result_sizes((x, y))[1] == 24 + 16
    assert result_sizes((x, [x, {"again": x}]))[1] == 24
    assert result_sizes(x.half())[1] == 12
    assert result_sizes(torch.eye(3).to_sparse())[1] == 12
    assert result_sizes(torch.eye(3).to_sparse_csr())[1] == 12


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((x,), {}, [2, 3]),
        ((x, None, 3), {"flag": True}, [2, 3]),
        ((x, y), {}, ([2, 3], [4])),
        ((), {"hidden": x}, {"hidden": [2, 3]}),
        ((x,), {"mask": y, "flag": True}, ([2, 3], {"mask": [4]})),
        ((), {}, None),
    ],
)
def test_arguments(args, kwargs, expected):
    assert argument_sizes(args, kwargs)[0] == expected


def test_the_first_shape_is_found_depth_first():
    assert first_shape((None, {"a": None, "b": ([5], [6])})) == [5]
    assert first_shape((None,)) is None
    assert first_shape([]) == []


def test_mapping_keeps_types_and_other_objects():
    holder = Holder()
    mapped = map_tensors(lambda tensor: tensor + 1, {"a": Pair(x, [y]), "b": holder, "c": "text"})
    assert isinstance(mapped["a"], Pair)
    assert torch.equal(mapped["a"].second[0], y + 1)
    assert mapped["b"] is holder


def test_a_packed_sequence_keeps_its_batch_sizes():
    packed = nn.utils.rnn.pack_sequence([x, x])
    mapped = map_tensors(lambda tensor: tensor.to("meta"), packed)
    assert mapped.data.is_meta
    assert mapped.batch_sizes is packed.batch_sizes


def test_an_output_of_unknown_size_prints_as_question_mark():
    class Opaque(nn.Module):
        def forward(self, x):
            return object()

    stats = Statistics(Opaque(), (2, 3))
    assert stats.root.output_size == UNKNOWN
    assert str(stats).splitlines()[3].split()[-3:] == ["?", "--", "--"]


def test_keys_are_text_without_values():
    """The text of a tensor has its values, which a tensor without data lacks: reading them ends the process."""
    weight = nn.Parameter(torch.ones(2))
    assert sizes_of({weight: torch.ones(3), ("user", "item"): torch.ones(4), 7: None}) == {
        "Parameter 0": [3],
        "('user', 'item')": [4],
        "7": None,
    }

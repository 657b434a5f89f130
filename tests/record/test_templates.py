from __future__ import annotations

import pickle
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from modelsummary.capture.templates import (
    Attribute,
    BatchSize,
    leaves_of,
    map_template,
    same_structure,
    structure_of,
    with_leaves,
)
from modelsummary.record.events import TorchFunction, Value, attributes_in, torch_function, values_in

Pair = namedtuple("Pair", "one other")


@dataclass
class Output:
    first: object
    rest: tuple = ()


def value(index, *sizes):
    return Value(index, (1,) * len(sizes), torch.float32, 4, False, (index,), sizes)


@pytest.mark.parametrize(
    "template",
    [
        (1, [2, "x"], {"a": None, "b": 3.0}),
        Pair(1, Pair(2, 3)),
        OrderedDict(b=1, a=[2]),
        Output(1, (2, {"x": 3})),
        (slice(1, None, 2), ..., slice(0, 3)),
        (value(0), Attribute("a.weight"), BatchSize(2, 1)),
    ],
)
def test_a_template_is_rebuilt_with_its_containers(template):
    rebuilt = map_template(lambda leaf: leaf, template)
    assert rebuilt == template
    assert type(rebuilt) is type(template)
    assert structure_of(rebuilt) == structure_of(template)
    leaves = leaves_of(template)
    assert leaves_of(with_leaves(template, range(len(leaves)))) == list(range(len(leaves)))


STRUCTURES = st.recursive(
    st.sampled_from([1, 2.0, "x", None, torch.float32, value(0), Attribute("w"), BatchSize(2, 1), torch.Size([2])]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.lists(inner, max_size=2).map(tuple)
        | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=5,
)


@settings(deadline=None)
@given(STRUCTURES, STRUCTURES)
def test_structures_are_compared_as_by_torchs_tree_walk(one, other):
    assert same_structure(one, other) == (structure_of(one) == structure_of(other))


def test_a_size_becomes_a_tuple():
    assert leaves_of(torch.Size([2, 3])) == [2, 3]
    assert map_template(str, torch.Size([2, 3])) == ("2", "3")


def test_values_and_attributes_are_found_once():
    one, other = value(0), value(1)
    template = ([one, other], {"x": one, "y": slice(other, None)}, Attribute("w"), Attribute("w"))
    assert values_in(template) == [one, other]
    assert attributes_in(template) == [Attribute("w")]


def test_the_dimension_that_shows_the_batch():
    assert value(0, 3, BatchSize(4, 0), 5).batch == (1, 4)
    assert value(0, BatchSize(1, 1)).batch is None
    assert value(0, None, 2).batch is None


class Names(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append((torch_function(func), args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def test_functions_have_public_names_and_pickle():
    x = torch.randn(2, 3)
    with Names() as names:
        outs = [F.relu(x), x + 1, x.view(-1), torch.cat([x, x]), x[0], x.mT, F.scaled_dot_product_attention(x, x, x)]
        outs.append(torch.special.expit(x))
        outs.append(torch.linalg.norm(x))
    assert [function.short_name for function, _, _ in names.seen][:6] == ["relu", "add", "view", "cat", "getitem", "mT"]
    for (function, args, kwargs), out in zip(names.seen, outs, strict=True):
        again = pickle.loads(pickle.dumps(function))
        assert again == function
        assert torch.equal(again(*args, **kwargs), out)


def test_a_function_without_a_public_name_pickles_itself():
    function = TorchFunction("function", "mine", outer)
    assert pickle.loads(pickle.dumps(function)) == function


def outer(x: Tensor) -> Tensor:
    return x * 2

"""Models that return objects which hold tensors, such as a cache of keys and values."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import modelsummary
from modelsummary import SplitError, Statistics
from modelsummary.capture.templates import ObjectState, leaves_of, map_template, taken_apart
from tests.idioms import rows
from tests.models import Call
from tests.split.test_engine import needs_engine


class Layer:
    def __init__(self):
        self.keys = None
        self.length = 0

    def update(self, keys):
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], 1)
        self.length = keys.shape[1]


class Cache:
    """The keys of each layer: objects within a list within an object."""

    def __init__(self, n_layers):
        self.layers = [Layer() for _ in range(n_layers)]
        self.name = "cache"


def caching(self, x):
    cache = Cache(3)
    for number, layer in enumerate(self.layers):
        x = layer(x, cache, number)
    return {"out": x, "cache": cache}


def model():
    def layer(self, x, cache, number):
        x = torch.relu(self.linear(x))
        cache.layers[number].update(x)
        return x

    return Call(caching, layers=nn.ModuleList(Call(layer, linear=nn.Linear(4, 4)) for _ in range(3)))


def test_stages_return_the_object():
    whole = model()
    stages = Statistics(whole, rows(2, 4)).split(3)
    x = rows(5, 4, seed=1)
    expected, found = whole(x), stages(x)
    assert type(found["cache"]) is Cache
    assert [type(each) for each in found["cache"].layers] == [Layer] * 3
    assert found["cache"].name == "cache"
    for own, other in zip(expected["cache"].layers, found["cache"].layers, strict=True):
        assert torch.equal(own.keys, other.keys)
        assert own.length == other.length == 4
    # the output, the keys of three layers, and the gradients of six parameters; the model has no buffers
    verified = stages.verify(x)
    assert (verified.outputs, verified.gradients, verified.compared) == (0.0, 0.0, 4 + 6)
    assert len(stages.crossing[2]) == 2  # the keys of the first two layers; the second are the input of the third


def test_graphs_return_the_object():
    whole = model()
    graph = modelsummary.symbolic_trace(whole, meta_args={"x": rows(2, 4)})
    x = rows(5, 4, seed=1)
    expected, found = whole(x), graph(x)
    assert type(found["cache"]) is Cache
    for own, other in zip(expected["cache"].layers, found["cache"].layers, strict=True):
        assert torch.equal(own.keys, other.keys)


def test_an_object_that_is_passed_on_is_not_made_again():
    """Open layers that change an object they are given, so that all others see the change."""
    stages = Statistics(model(), rows(2, 4)).split(2)
    paths = [step.path for stage in stages for step in stage._plan.steps if step.path]
    assert paths == ["layers.0.linear", "layers.1.linear", "layers.2.linear"]


def test_a_dtype_in_the_object_is_a_constant():
    def forward(self, x):
        layer = Layer()
        layer.update(self.b(self.a(x)))
        layer.dtype = layer.keys.dtype
        return layer

    stages = Statistics(Call(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), rows(2, 4)).split(2)
    stages[0].double()
    stages[1].double()
    with pytest.raises(SplitError, match=r"made for torch\.float32"):
        stages(rows(2, 4).double())


def test_taken_apart():
    layer = Layer()
    layer.update(torch.ones(2, 3))
    holder, plain = Layer(), Layer()
    holder.keys = holder  # holds itself, and a tensor: left as it is where it is met again
    holder.more = [layer]
    apart = taken_apart((layer, plain, holder, nn.Linear(1, 1)))
    assert apart[0] == ObjectState(Layer, {"keys": layer.keys, "length": 3})
    assert apart[1] is plain
    assert apart[2].attributes["keys"] is holder
    assert sum(isinstance(leaf, torch.Tensor) for leaf in leaves_of(apart)) == 2
    again = map_template(lambda leaf: leaf, apart[0], makes_objects=True)
    assert type(again) is Layer
    assert vars(again) == vars(layer)


def continuing(self, x, cache):
    for number, layer in enumerate(self.layers):
        x = torch.relu(layer(x))
        cache.layers[number].update(x)
    return x, cache


def filled(batch, seed=0):
    cache = Cache(2)
    for layer in cache.layers:
        layer.update(rows(batch, 4, seed=seed))
    return cache


def test_an_object_that_is_given_is_read_and_returned():
    model = Call(continuing, layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(2)))
    given = filled(2)
    stages = Statistics(model, (rows(2, 4), given)).split(2)
    assert [tuple(layer.keys.shape) for layer in given.layers] == [(2, 4)] * 2  # as it was
    verified = stages.verify(rows(5, 4), filled(5))
    assert (verified.outputs, verified.gradients) == (0.0, 0.0)
    own = filled(5)
    x, cache = stages(rows(5, 4), own)
    expected_x, expected = model(rows(5, 4), filled(5))
    assert torch.equal(x, expected_x)
    for one, other in zip(cache.layers, expected.layers, strict=True):
        assert tuple(one.keys.shape) == (5, 8)
        assert torch.equal(one.keys, other.keys)
    assert tuple(own.layers[0].keys.shape) == (5, 4)


def test_a_graph_of_an_object_that_is_given():
    model = Call(continuing, layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(2)))
    graph = modelsummary.symbolic_trace(model, meta_args={"x": rows(2, 4), "cache": filled(2)})
    x, cache = graph(rows(5, 4), filled(5))
    expected_x, expected = model(rows(5, 4), filled(5))
    assert torch.equal(x, expected_x)
    assert all(torch.equal(one.keys, other.keys) for one, other in zip(cache.layers, expected.layers, strict=True))


def test_an_object_that_is_changed_and_not_returned():
    model = Call(lambda self, x, cache: continuing(self, x, cache)[0], layers=nn.ModuleList([nn.Linear(4, 4)] * 2))
    with pytest.raises(SplitError, match="changes a Cache that it does not return"):
        Statistics(model, (rows(2, 4), filled(2))).split(2)


@needs_engine
def test_the_engine_deals_out_no_objects(tmp_path):
    model = Call(continuing, layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(2)))
    stages = Statistics(model, (rows(2, 4), filled(2))).split(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        with pytest.raises(SplitError, match="an object that holds tensors, which cannot be dealt"):
            stages.schedule("gpipe", 1)
    finally:
        dist.destroy_process_group()


def overwriting(self, x, cache):
    for number, layer in enumerate(self.layers):
        x = torch.relu(layer(x))
        cache.layers[number].keys.copy_(x.detach())
        x = x + cache.layers[number].keys
    return x, cache


def test_tensors_of_an_object_may_be_overwritten_behind_a_cut():
    model = Call(overwriting, layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(4)))
    given = Cache(4)
    for layer in given.layers:
        layer.update(torch.zeros(2, 4))
    stages = Statistics(model, (rows(2, 4), given)).split(4)
    assert [each.macs for each in stages.facts] == [2 * 16] * 4
    verified = stages.verify(rows(2, 4), given)
    assert (verified.outputs, verified.gradients) == (0.0, 0.0)


def test_a_model_without_a_backward_is_verified_by_its_values():
    def forward(self, x, cache):
        y = self.b(self.a(x) * cache.layers[0].keys)
        cache.layers[0].keys.add_(1)  # what the product keeps for its backward
        return y, cache

    model = Call(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    stages = Statistics(model, (rows(2, 4), filled(2))).split(2)
    verified = stages.verify(rows(2, 4), filled(2))
    assert verified.outputs == 0.0
    assert math.isnan(verified.gradients)


class Settings:
    """A plain object without tensors and without ``__eq__``."""

    def __init__(self, scale):
        self.scale = scale


class Holder:
    def __init__(self, scale):
        self.tensor, self.settings = torch.ones(4), Settings(scale)


def test_objects_that_a_given_object_holds_are_compared_by_their_attributes():
    model = Call(
        lambda self, x, held: self.b(self.a(x + held.tensor)) * held.settings.scale,
        a=nn.Linear(4, 4),
        b=nn.Linear(4, 4),
    )
    stages = Statistics(model, torch.ones(2, 4), held=Holder(2.0)).split(2)
    x = torch.rand(2, 4)
    assert torch.equal(stages(x, held=Holder(2.0)), model(x, held=Holder(2.0)))
    with pytest.raises(SplitError, match="'held' was recorded as"):
        stages(x, held=Holder(3.0))

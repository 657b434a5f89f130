"""Forwards with traps: the stages are exactly the model, or there are none."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from modelsummary import SplitError, Statistics
from tests.idioms import rows
from tests.models import Call
from tests.untouched import untouched

needs_top_hooks = pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"),
    reason="on torch 2.6 checkpointing cannot be told from other autograd functions: refused",
)


class Counter:
    def __init__(self):
        self.n = 0


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


class Applied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, x):
        return function(x) * 1

    @staticmethod
    def backward(ctx, grad):
        return None, grad


def counts(self, x):
    self.counter.n += 1
    return self.b(self.a(x) * self.counter.n)


def caches(self, x):
    x = self.a(x)
    if "k" not in self.cache:
        self.cache["k"] = x.detach()
    return self.b(x + self.cache["k"])


def reassigns_a_buffer(self, x):
    self.mean = self.mean * 0.9 + self.a(x).mean(0).detach() * 0.1
    return self.b(self.a(x) + self.mean)


def updates_a_buffer(self, x):
    self.mean.mul_(0.9).add_(self.a(x).mean(0).detach() * 0.1)
    return self.b(self.c(self.a(x)) + self.mean)


def writes_through_a_view(self, x):
    y = self.a(x) * 1
    view = y[:, :2]
    z = self.c(y * 1)
    view += 1
    return self.b(z + y)


def unpacks(self, x):
    one, two, three, four = self.a(x).unbind(1)
    return self.b(torch.stack([four, three, two, one], 1))


def writes_to_out(self, x):
    y = self.a(x).detach()
    out = torch.empty_like(y)
    torch.add(y, 1, out=out)
    return self.b(out)


def sets_data(self, x):
    y = self.a(x)
    y.data.mul_(2)
    return self.b(y)


def fills(self, x):
    y = torch.zeros(x.shape[0], 4)
    y[:, 0] = self.a(x)[:, 0]
    y[1:, 1] = 1.0
    return self.b(y)


def masks(self, x):
    y = self.a(x).clone()
    y[y < 0] = 0
    return self.b(y)


def chunks(self, x):
    one, two = self.a(x).chunk(2)
    return self.b(torch.cat([two, one]))


class Tricky(Call):
    n = 0


def ties(self, x):
    self.b.weight = self.a.weight
    return self.b(self.a(x))


def sets_momentum(self, x):
    self.norm.momentum = 0.7
    return self.b(self.norm(self.a(x)))


def seeds(self, x):
    torch.manual_seed(3)
    return self.b(F.dropout(self.a(x), 0.5, True))


def forks(self, x):
    with torch.random.fork_rng():
        y = F.dropout(self.a(x), 0.5, True)
    return self.b(F.dropout(y, 0.5, True))


def counts_in_an_array(self, x):
    self.array[0] += 1
    return self.b(self.a(x) * float(self.array[0]))


def counts_in_its_class(self, x):
    Tricky.n += 1
    return self.b(self.a(x) * Tricky.n)


def without_autocast(self, x):
    with torch.autocast("cpu", enabled=False):
        x = self.a(x.float())
    return self.b(x)


def hooks_a_tensor(self, x):
    y = self.a(x)
    y.register_hook(lambda grad: grad * 2)
    return self.b(y)


EXACT = {
    "updates a buffer": updates_a_buffer,
    "writes through a view": writes_through_a_view,
    "unpacks": unpacks,
    "iterates": lambda self, x: self.b(torch.stack([row * 2 for row in self.a(x).t()]).t()),
    "writes to out=": writes_to_out,
    "sets .data": sets_data,
    "the same tensor twice": lambda self, x: [self.b(self.a(x))] * 2,
    "its input and None": lambda self, x: (self.b(self.a(x)), x, None),
    "a parameter": lambda self, x: (self.b(self.a(x)), self.weight),
    "nested outputs": lambda self, x: {"a": [self.b(self.a(x)), {"k": (x * 2, None, 3)}]},
    "noise": lambda self, x: self.b(self.a(x) + torch.randn_like(x) + F.dropout(x, 0.5, True)),
    "shuffles": lambda self, x: self.b(self.a(x)[torch.randperm(x.shape[0])]),
    "one layer twice": lambda self, x: self.b(self.a(self.a(x))),
    "a tied function": lambda self, x: F.linear(self.b(self.a(x)), self.a.weight),
    "numpy scalars": lambda self, x: self.b(self.a(x) * float(np.sqrt(4))),
    "a tensor in a list": lambda self, x: self.b(self.a(x) + self.constants[0]),
    "sizes": lambda self, x: self.b(self.a(x)).view(*list(x.shape)[:-1], 2, 2),
    "half of a size": lambda self, x: self.b(self.a(x))[:, : int(x.shape[1] / 2)],
    "where": lambda self, x: self.b(torch.where(self.a(x) > 0, x, 0.0)),
    "masks": masks,
    "chunks": chunks,
    "fills": fills,
    "selects by values": lambda self, x: self.b(x)[torch.nonzero(self.a(x)[:, 0] > 0).squeeze(1)],
    "einsum": lambda self, x: self.b(torch.einsum("bi,ij->bj", self.a(x), self.weight)),
    "complex": lambda self, x: self.b(torch.view_as_real(torch.fft.fft(self.a(x)))[..., 0]),
    "arange of the batch": lambda self, x: self.b(self.a(x) + torch.arange(x.size(0))[:, None]),
    "eye of the batch": lambda self, x: self.b(torch.eye(x.size(0)) @ self.a(x)),
    "expands to the batch": lambda self, x: self.b(self.a(x) + self.weight[0].expand(x.shape[0], -1)),
    "a tensor of the batch size": lambda self, x: self.b(self.a(x) * torch.tensor(x.shape[0])),
    "a literal": lambda self, x: self.b(self.a(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])),
    "a dtype": lambda self, x: self.b(self.a(x).masked_fill(x > 0, torch.finfo(x.dtype).min).clamp(-1)),
    "in place on its input": lambda self, x: self.b(self.a(x.add_(1))),
    "an autograd function": lambda self, x: self.b(Square.apply(self.a(x))),
    "an autograd function of its result": lambda self, x: Square.apply(self.b(self.a(x))),
    "detaches": lambda self, x: self.b(self.a(x)) + self.a(x).detach(),
    "half of the batch": lambda self, x: self.b(self.a(x))[: x.shape[0] // 2],
    "two halves of the batch": lambda self, x: self.b(
        torch.cat(self.a(x).split([x.shape[0] // 2, -(-x.shape[0] // 2)]))
    ),
    "the last third of the batch": lambda self, x: self.b(self.a(x)[-(x.shape[0] // 3) :]),
    "strides": lambda self, x: self.b(torch.as_strided(self.a(x), (x.shape[0], 4), (4, 1))),
}

# exact for the recorded batch size; another is refused
OF_ONE_SIZE = {
    "the batch as a float": lambda self, x: self.b(self.a(x)) / float(x.shape[0]),
    "a list as long as the batch": lambda self, x: self.b(self.a(x) * torch.tensor([1.0] * x.shape[0])[:, None]),
    "a loop over the batch": lambda self, x: sum(self.a(x)[i].sum() for i in range(x.shape[0])) + self.b(x),
    "at most a hundred": lambda self, x: self.b(self.a(x)) * min(x.shape[0], 100),
    "a branch on the batch": lambda self, x: self.b(self.a(x)) if x.shape[0] > 3 else self.b(self.a(x)) * 2,
}

REFUSED = {
    "counts": (counts, "assigns its attribute 'counter'"),
    "caches": (caches, "assigns its attribute 'cache'"),
    "reassigns a buffer": (reassigns_a_buffer, "assigns its attribute 'mean'"),
    "the largest value": (lambda self, x: self.b(self.a(x)) * x.max().item(), "decides by values"),
    "a legacy constructor": (lambda self, x: self.b(self.a(x) * torch.Tensor([1, 2, 3, 4])), "outside of torch"),
    "an unregistered layer": (lambda self, x: self.b(self.hidden[0](self.a(x))), "outside of torch"),
    "an autograd function that calls a function": (
        lambda self, x: self.b(Applied.apply(self.c, self.a(x))),
        "passes a function to the autograd function Applied",
    ),
    "vmap": (lambda self, x: self.b(torch.vmap(lambda row: row * 2)(self.a(x))), "outside of torch"),
    "other weights": (
        lambda self, x: self.b(
            torch.func.functional_call(self.a, {name: each * 2 for name, each in self.a.named_parameters()}, (x,))
        ),
        "another weight by the code that calls it",
    ),
    "another weight": (ties, "layer 'b' .*another weight by the code that calls it"),
    "another momentum": (sets_momentum, "layer 'norm' .*another momentum by the code that calls it"),
    "a layer in train mode": (lambda self, x: self.b(self.norm.train()(self.a(x))), "layer 'norm' calls nothing"),
    "its own seed": (seeds, "seeds the random numbers"),
    "draws aside": (forks, "sets the state of the random numbers"),
    "its own generator": (lambda self, x: self.b(self.a(x) * self.random.random()), "assigns its attribute 'random'"),
    "numpy's generator": (lambda self, x: self.b(self.a(x) * self.draws.random()), "assigns its attribute 'draws'"),
    "counts in an array": (counts_in_an_array, "assigns its attribute 'array'"),
    "counts in its class": (counts_in_its_class, "assigns its attribute 'Tricky.n'"),
    "without autocast": (without_autocast, "switches autocast"),
    "the number of nonzeros": (
        lambda self, x: self.b(self.a(x)) * len(x.to_sparse().indices()[0]),
        "reads a size that depends on values",
    ),
    "a hook on a tensor": (hooks_a_tensor, r"calls register_hook\(\) of a tensor"),
    "asks for gradients": (
        lambda self, x: self.b(self.a(x)) * (1 if torch.is_grad_enabled() else 2),
        "other operators without gradients",
    ),
}


def make(forward):
    torch.manual_seed(0)
    model = Tricky(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 4), norm=nn.BatchNorm1d(4).eval())
    model.random, model.draws, model.array = random.Random(0), np.random.default_rng(0), np.zeros(2)
    model.counter, model.cache, model.constants, model.hidden = Counter(), {}, [torch.ones(4) * 3], [nn.Linear(4, 4)]
    model.weight = nn.Parameter(torch.eye(4) * 2)
    model.register_buffer("mean", torch.ones(4))
    return model


def check(model, stages, batch, seed=0):
    """Compare stages with a copy of the model: twice, in both modes, with and without gradients."""
    twin = copy.deepcopy(model)
    for mode in (True, False):
        for each in (stages, twin, model):
            each.train(mode)
        for grad in (True, False):
            x = rows(batch, 4, seed=seed + mode)
            with torch.set_grad_enabled(grad):
                torch.manual_seed(5)
                expected = tree_leaves(twin(x.clone()))
                torch.manual_seed(5)
                found = tree_leaves(stages(x.clone()))
            assert len(found) == len(expected)
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))


@pytest.mark.parametrize("name", EXACT)
def test_exact(name):
    model = make(EXACT[name])
    with untouched(model):
        stages = Statistics(model, rows(2, 4)).split(2)
    for batch in (2, 6):
        check(model, stages, batch)


@pytest.mark.parametrize("name", ["half of the batch", "two halves of the batch", "the last third of the batch"])
@pytest.mark.parametrize("batch", [1, 3, 7, 100])
def test_fractions_of_the_batch(name, batch):
    model = make(EXACT[name])
    check(model, Statistics(model, rows(2, 4)).split(2), batch)


@pytest.mark.parametrize("name", OF_ONE_SIZE)
def test_of_one_size(name):
    model = make(OF_ONE_SIZE[name])
    stages = Statistics(model, rows(2, 4)).split(2)
    check(model, stages, 2)
    with pytest.raises(SplitError, match=r"shape \[6, 4\], but the stages were made for \[2, 4\]"):
        stages(rows(6, 4))


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    forward, reason = REFUSED[name]
    model = make(forward)
    call, apply = nn.Module.__call__, vars(torch.autograd.Function)["apply"]
    with untouched(model), pytest.raises(SplitError, match=reason):
        Statistics(model, rows(2, 4)).split(2)
    assert nn.Module.__call__ is call
    assert vars(torch.autograd.Function)["apply"] is apply


def test_a_function_that_gives_more_results_than_recorded():
    model = make(lambda self, x: self.b(torch.cat([self.a(each) for each in x.split(400)])))
    stages = Statistics(model, rows(2, 4)).split(2)
    check(model, stages, 6)
    with pytest.raises(SplitError, match="gave 2 results, but 1 when it was recorded"):
        stages(rows(500, 4))


def test_inputs_of_different_batch_sizes():
    model = make(lambda self, x, y: self.b(self.a(x)).repeat(y.shape[0], 1))
    stages = Statistics(model, (rows(2, 4), rows(2, 4))).split(2)
    with pytest.raises(SplitError, match="the same batch size"):
        stages(rows(3, 4), rows(2, 4))


def test_a_forward_that_takes_gradients():
    def forward(self, x):
        x = x.detach().requires_grad_(True)
        energy = self.b(torch.tanh(self.a(x))).sum()
        return energy, torch.autograd.grad(energy, x, create_graph=True)[0]

    model = make(forward)
    stages = Statistics(model, rows(2, 4)).split(2)
    expected, found = model(rows(3, 4)), stages(rows(3, 4))
    assert all(map(torch.equal, expected, found))


def test_a_number_that_a_layer_counts_and_the_model_reads():
    def count(self, x):
        self.n += 1
        return self.b(x)

    model = make(lambda self, x: self.b(self.a(self.layer(x)) * self.layer.n))
    model.layer = Call(count, b=nn.Linear(4, 4))
    model.layer.n = 0
    with untouched(model), pytest.raises(SplitError, match="calls 'layer', which assigns its attribute 'n'"):
        Statistics(model, rows(2, 4)).split(2)


def test_a_batch_of_one_may_be_another_case():
    model = make(lambda self, x: self.b(self.a(x)) * max(x.shape[0], 2))
    stages = Statistics(model, rows(2, 4)).split(2)
    for batch in (2, 5, 300):
        check(model, stages, batch)
    with pytest.raises(SplitError, match="the batch size must be >= 2, got 1"):
        stages(rows(1, 4))


@pytest.mark.parametrize("read", ["buf", "plain"])
def test_a_buffer_that_is_read_before_its_layer_assigns_it(read):
    class Assigns(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("buf", torch.ones(4))
            self.plain = torch.ones(4)

        def forward(self, x):
            self.buf, self.plain = self.buf * 2, self.plain + 1
            return x * self.buf * self.plain

    model = make(lambda self, x: self.layer(self.b(self.a(x + getattr(self.layer, read)))))
    model.layer = Assigns()
    with untouched(model), pytest.raises(SplitError, match=f"'layer.{read}' is written in place and used on both"):
        Statistics(model, rows(2, 4)).split(3)


def test_an_object_that_two_layers_share():
    def count(self, x):
        self.counter.n += 1
        return self.b(x)

    layers = [Call(count, b=nn.Linear(4, 4)), Call(lambda self, x: self.b(x * self.counter.n), b=nn.Linear(4, 4))]
    layers[0].counter = layers[1].counter = Counter()
    model = nn.Sequential(*layers, nn.Linear(4, 4))
    with untouched(model), pytest.raises(SplitError, match="'0', which assigns its attribute 'counter'"):
        Statistics(model, rows(2, 4)).split(2)


def makes_alike(self, x):
    y = self.a(x)
    return self.b(y) + torch.zeros(4, dtype=y.dtype).fill_(1 / 3)


def fills_with_the_least(self, x):
    y = self.a(x)
    return self.b(y.masked_fill(x > 0, torch.finfo(y.dtype).min).clamp(-1))


@pytest.mark.parametrize("forward", [makes_alike, fills_with_the_least])
def test_a_dtype_that_the_model_reads_binds_the_stages(forward):
    model = make(forward)
    stats = Statistics(model, rows(2, 4))
    with torch.autocast("cpu", torch.bfloat16):
        stages = stats.split(2)
        assert torch.equal(stages(rows(2, 4)), model(rows(2, 4)))
    stages = stats.split(2)
    for stage in stages:
        stage.double()
    with pytest.raises(SplitError, match=r"made for torch\.float32.*is given torch\.float64"):
        stages(rows(2, 4).double())


def test_a_layer_that_reads_a_dtype_stays_whole():
    model = nn.Sequential(nn.Linear(4, 4), Call(lambda self, x: (x.double() * 2).to(x.dtype).exp()), nn.Linear(4, 4))
    stages = Statistics(model, rows(2, 4)).split(3, by="activation_bytes")
    for stage in stages:
        stage.bfloat16()
    x = rows(3, 4).bfloat16()
    assert torch.equal(stages(x), model.bfloat16()(x))


@needs_top_hooks
def test_checkpointed_functions():
    model = make(lambda self, x: self.b(checkpoint(lambda y: self.a(y).relu() * 2, x, use_reentrant=False)))
    with untouched(model), pytest.raises(SplitError, match="calls functions under activation checkpointing"):
        Statistics(model, rows(2, 4)).split(2)


@needs_top_hooks
def test_checkpointed_layers_stay_checkpointed():
    runs = []

    def layer(self, x):
        runs.append(self)
        return x + self.c(F.dropout(F.gelu(self.b(x)), 0.3, self.training))

    def forward(self, x):
        for each in (self.one, self.two):
            x = checkpoint(each, x, use_reentrant=False) if self.training else each(x)
        return x

    model = Call(forward, one=make(layer), two=make(layer))
    stages = Statistics(model, rows(2, 4)).split(2)
    assert stages.verify(rows(3, 4)).gradients == 0.0
    for mode, expected in ((True, 4), (False, 2)):
        runs.clear()
        stages.train(mode)(rows(2, 4)).sum().backward()
        assert len(runs) == expected


def test_what_an_autograd_function_makes_has_gradients():
    """Expect a gradient for the result: the engine sends gradients back only for tensors recorded with one."""

    def forward(self, x):
        return self.c(self.b(Square.apply(self.a(x))))

    model = make(forward)
    stages = Statistics(model, rows(2, 4)).split(3, boundaries=["b", "c"])
    assert [each.requires_grad for each in stages.crossing[1]] == [True]
    verified = stages.verify(rows(5, 4))
    assert (verified.outputs, verified.gradients) == (0.0, 0.0)

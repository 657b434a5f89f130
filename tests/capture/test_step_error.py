"""A model that raises in a step, or while it is recorded, gives one clear error, and stays untouched."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from modelsummary import ForwardError, InputError, Statistics, StepError
from tests.models import Call
from tests.untouched import untouched


def only_inference(self, x):
    assert not torch.is_grad_enabled(), "only\ninference"
    return self.linear(x)


def changed_in_place(self, x):
    y = self.linear(x).exp()
    return y.clone() + y.add_(1)  # exp's backward needs y as it was


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError("no backward")


def raises_in_backward(self, x):
    return _NoBackward.apply(self.linear(x))


def model(forward):
    return Call(forward, linear=nn.Linear(4, 4))


class Stuck(torch.optim.SGD):
    def step(self, closure=None):
        raise ArithmeticError("no step")


STEPS = {
    "memory": lambda stats, **options: stats.memory(**options),
    "measure_memory": lambda stats, **options: stats.measure_memory(**options),
    "max_batch_size": lambda stats, **options: stats.max_batch_size("1MB", **options),
    "estimate_latency": lambda stats, **options: stats.estimate_latency("A100", backward=True, **options),
}


@pytest.mark.parametrize("what", STEPS)
def test_a_forward_that_raises_with_gradients(what):
    stats = Statistics(model(only_inference), (1, 4))
    remedy = "backward=False" if what == "estimate_latency" else "mode='inference'"
    with pytest.raises(
        StepError, match=f"the forward of the step failed: AssertionError: only; {remedy} runs the forward without"
    ) as caught:
        STEPS[what](stats)
    assert caught.value.phase == "forward"
    assert isinstance(caught.value.__cause__, AssertionError)
    assert isinstance(caught.value, RuntimeError)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.phase) == (str(caught.value), "forward")


def stops_when_it_is_cast(self, x):
    assert not torch.is_autocast_enabled("cpu"), "no autocast"
    return self.linear(x)


def test_a_forward_that_raises_without_gradients_has_no_remedy():
    stats = Statistics(model(stops_when_it_is_cast), (1, 4))
    options = {"autocast": torch.bfloat16}
    for run in (
        lambda: stats.estimate_latency("A100", **options),
        lambda: stats.memory("inference", **options),
    ):
        with pytest.raises(StepError, match=r"^the forward of the step failed: AssertionError: no autocast$"):
            run()


def test_loss_backward_and_optimizer():
    stats = Statistics(model(raises_in_backward), (1, 4))
    with untouched(stats.root.module):
        with pytest.raises(StepError, match=r"the loss of the step failed: .*; loss takes the model's result"):
            stats.memory(loss=lambda out: out["loss"])
        for step in (stats.memory, stats.measure_memory):
            with pytest.raises(StepError, match=r"the backward of .* failed: NotImplementedError: .*; pass loss="):
                step()
        with pytest.raises(StepError, match=r"the backward of .* failed: .*; leave out backward=True"):
            stats.measure_latency(backward=True, runs=1, warmup=0)
        with pytest.raises(
            StepError, match=r"the optimizer of the step failed: ArithmeticError: no step; pass another"
        ):
            stats.memory(optimizer=Stuck)
    assert stats.measure_latency(runs=1, warmup=0).root.latency_ms > 0


def changed_in_a_view(self, x):
    y = self.linear(x).exp()
    y.view(-1).detach().mul_(2)
    return y


def changed_parameter(self, x):
    out = self.linear(x) * self.scale
    with torch.no_grad():
        self.scale.add_(1)
    return out


def changed_pieces(self, x):
    whole = self.linear(x)
    squares = whole.chunk(2, 1)[0].pow(2)  # torch forbids in-place writes beside several views
    whole.zero_()
    return squares


def changed_as_allowed(self, x):
    x = self.linear(x).relu_()  # a ReLU needs its result alone
    x = x + 1
    x *= 2  # nor does the addition need its result
    out = x * self.scale
    self.scale.data.add_(1)  # torch does not watch ``data``
    return out


@pytest.mark.parametrize("forward", [changed_in_place, changed_in_a_view, changed_parameter, changed_pieces])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_tensor_that_changes_before_the_backward(forward, dtype):
    changed = Call(forward, linear=nn.Linear(4, 4), scale=nn.Parameter(torch.ones(4)))
    stats = Statistics(changed, (1, 4))
    with (
        untouched(changed),
        pytest.raises(StepError, match=r"backward .*modified.*in-?place.*; the forward must write"),
    ):
        stats.memory(dtype=dtype)
    with pytest.raises(StepError, match=r"backward .*modified.*in-?place.*; the forward must write"):
        stats.measure_memory()


def test_a_tensor_that_changes_without_harm():
    changed = Call(changed_as_allowed, linear=nn.Linear(4, 4), scale=nn.Parameter(torch.ones(4)))
    stats = Statistics(changed, (1, 4))
    assert stats.memory().execution == "shape"
    stats.measure_memory()


def test_the_librarys_own_errors_stay():
    with pytest.raises(InputError, match="nothing in the model's result requires a gradient"):
        Statistics(Call(lambda self, x: x + 1), (1, 4)).memory()


@pytest.mark.parametrize(
    "ask", [lambda stats: stats.split(2), lambda stats: stats.graph(), lambda stats: stats.parallel_plan(2)]
)
def test_a_forward_that_cannot_be_recorded(ask):
    stats = Statistics(model(only_inference), (1, 4))
    with pytest.raises(ForwardError, match="recorded with gradients, as in training: AssertionError: only; change"):
        ask(stats)


def test_batch_normalisation_of_one():
    with pytest.raises(ForwardError, match=r"needs a batch of two or more, or call model\.eval\(\)$"):
        Statistics(nn.BatchNorm1d(4), (1, 4))


class FillsACache(nn.Linear):
    def forward(self, x):
        self.seen = getattr(self, "seen", 0) + 1
        x = super().forward(x)
        return x.sin().sin() if self.seen == 1 else x.sin()


def test_a_checkpointed_module_that_runs_differently_again():
    stats = Statistics(nn.Sequential(nn.Linear(4, 4), FillsACache(4, 4)), (1, 4))
    with pytest.raises(StepError, match=r"CheckpointError: .*; a checkpointed module runs again and must do the same"):
        stats.memory(checkpoint=["1"])


def casts_itself(self, x):
    return self.linear(x.float())


@pytest.mark.parametrize("what", sorted(STEPS.keys() - {"measure_memory"}))
def test_a_forward_that_casts_itself_does_not_take_another_dtype(what):
    stats = Statistics(model(casts_itself), (1, 4))
    dtypes = "expects operands of one dtype, got torch.bfloat16, torch.float32, torch.bfloat16; dtype= converts"
    with pytest.raises(StepError, match=f"forward of the step failed: .*{dtypes} .*: pass autocast= instead"):
        STEPS[what](stats, dtype=torch.bfloat16)
    STEPS[what](stats, autocast=torch.bfloat16)


def fails_with_gradients(self, x):
    if torch.is_grad_enabled():
        raise ValueError("no gradients")
    return self.linear(x)


def test_another_dtype_need_not_be_the_cause():
    with pytest.raises(StepError, match=r"autocast= instead; mode='inference' runs the forward without gradients$"):
        Statistics(model(fails_with_gradients), (1, 4)).memory(dtype=torch.bfloat16)


class Appends(nn.Module):
    """A block that adds to what an earlier run of it left, as one that fills a cache does."""

    def __init__(self):
        super().__init__()
        self.linear, self.kept = nn.Linear(4, 4), []

    def forward(self, x):
        self.kept.append(self.linear(x))
        return torch.cat(self.kept).square()[: len(x)]


def test_a_checkpointed_block_that_fills_a_cache():
    stats = Statistics(nn.Sequential(Appends(), nn.Linear(4, 4)), (2, 4))
    with pytest.raises(StepError, match=r"runs again and must do the same: turn off a cache .* use_cache=False"):
        stats.memory(checkpoint=["0"])

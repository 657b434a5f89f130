"""Forwards that choose what they run: mixtures without values, whose choices fall on all experts in turn; branches."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from modelsummary import DataDependentError, Statistics
from modelsummary.errors import ForwardError
from tests.untouched import untouched

TOKENS, WIDTH, HIDDEN, EXPERTS = 10, 16, 32, 4
# per token and expert, two products; the router has one
PER_CHOICE, ROUTER = 2 * WIDTH * HIDDEN, WIDTH * EXPERTS


class Mixture(nn.Module):
    """The loop over experts of Mistral's reference code."""

    chosen = 2

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleDict(
            {
                f"expert_{index}": nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))
                for index in range(EXPERTS)
            }
        )

    def forward(self, x):
        weights, chosen = torch.topk(self.gate(x), self.chosen)
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts.values()):
            token, place = torch.where(chosen == index)
            result[token] += weights[token, place, None] * expert(x[token])
        return result


class ByMask(Mixture):
    chosen = 1

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts.values()):
            mask = chosen == index
            if mask.any():
                result[mask] = expert(x[mask]) * weight[mask, None]
        return result


class ByName(Mixture):
    """The loop of the mixtures in transformers that keep their experts by name."""

    chosen = 1

    def forward(self, x):
        mask = nn.functional.one_hot(self.gate(x).argmax(-1), EXPERTS).permute(1, 0)
        result = torch.zeros_like(x)
        for index in mask.sum(-1).gt(0).nonzero():
            (token,) = torch.where(mask[index].squeeze(0))
            result.index_add_(0, token, self.experts[f"expert_{index[0]}"](x[token]))
        return result


@pytest.mark.parametrize("mixture", [Mixture, ByMask, ByName])
def test_the_count_does_not_depend_on_which_experts_are_chosen(mixture):
    model = mixture()
    expected = TOKENS * (ROUTER + mixture.chosen * PER_CHOICE)
    real = Statistics(model, torch.rand(TOKENS, WIDTH))
    assert (real.execution, real.root.macs, real.root.note) == ("real", expected, "")
    on_meta = copy.deepcopy(model).to("meta")
    with untouched(on_meta):
        stats = Statistics(on_meta, (TOKENS, WIDTH))
        memory = stats.memory()
        estimate = stats.estimate_latency("A100", backward=True)
    assert (stats.execution, stats.root.macs) == ("shape", expected)
    assert "in turn" in stats.root.note
    assert stats.root.note in memory.notes
    assert estimate.backward_ms > 0


def test_nothing_is_assumed_where_values_could_be_computed():
    with pytest.raises((DataDependentError, ForwardError), match="values"):
        Statistics(Mixture(), torch.rand(TOKENS, WIDTH), execution="shape")


class NeedsOther(nn.Module):
    def forward(self, x):
        return x[x > 0]


def test_other_values_stay_unknown():
    with pytest.raises((DataDependentError, ForwardError), match="values"):
        Statistics(nn.Sequential(nn.Linear(4, 4), NeedsOther()).to("meta"), (2, 4))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.small, self.large = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return torch.cond(torch.tensor(True), self.small, lambda t: self.large(self.large(t)), (x,))


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        from torch._higher_order_ops.while_loop import while_loop

        return while_loop(lambda i, _: i < 3, lambda i, t: (i + 1, self.linear(t)), (torch.tensor(0), x))[1]


@pytest.mark.slow  # both call torch.compile
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("model", "runs"), [(Branches(), 1), (Loop(), 3)])
def test_the_operators_of_control_flow_count_as_they_run(model, runs):
    stats = Statistics(model, torch.rand(2, 4), execution="real")
    assert (stats.root.macs, stats.uncounted_ops) == (runs * 2 * 4 * 4, {})


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        from torch._higher_order_ops.map import map as map_rows

        return map_rows(self.linear, x)


class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        from torch._higher_order_ops.scan import scan

        def step(state, row):
            state = torch.tanh(self.linear(row) + state)
            return state, state.clone()

        return scan(step, torch.zeros(4), x, dim=0)[1]


class Written(nn.Module):
    """What ``Branches``, ``Rows`` or ``Steps`` computes, in Python."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        if isinstance(self.model, Branches):
            return self.model.small(x)
        state, states = torch.zeros(4), []
        for row in x:
            state = (
                self.model.linear(row) if isinstance(self.model, Rows) else torch.tanh(self.model.linear(row) + state)
            )
            states.append(state if isinstance(self.model, Rows) else state.clone())
        return torch.stack(states)


@pytest.mark.skipif(torch.__version__ < "2.11", reason="loops have no gradients in torch 2.6")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [Branches, Rows, Steps])
def test_a_step_trains_through_control_flow_as_through_python(kind):
    model, x = kind(), torch.rand(3, 4)
    stats, written = Statistics(model, x), Statistics(Written(model), x)
    assert (stats.root.macs, stats.uncounted_ops) == (written.root.macs, {})
    memory, expected = stats.memory(), written.memory()
    assert (memory.grads, memory.activations) == (expected.grads, expected.activations)
    assert memory.grads == sum(parameter.nbytes for parameter in model.parameters()) // (2 if kind is Branches else 1)
    step, same = (run.estimate_latency("A100", backward=True) for run in (stats, written))
    assert step.backward_ms == same.backward_ms > 0
    model(x).sum().backward()  # as torch runs it, when nothing is observed
    assert all((row.grad is not None) for row in (model.small if kind is Branches else model).parameters())


class LeftOut(nn.Module):
    """A layer that training leaves out at random, after a look at the tokens, as in wav2vec 2.0 and DeBERTa."""

    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(8, 4), nn.Linear(4, 4)

    def forward(self, tokens):
        x = self.embedding(tokens)
        if 7 in tokens[:, [-1, 0]]:
            return x
        return x if self.training and torch.rand([]) < 0.1 else self.linear(x)


@pytest.mark.parametrize("tokens", [torch.zeros(2, 3, dtype=torch.int64, device="meta"), (2, 3)])
def test_tokens_without_values_are_zeros_and_random_numbers_have_their_mean(tokens):
    model = LeftOut().to("meta")
    with untouched(model):
        options = {} if isinstance(tokens, torch.Tensor) else {"dtypes": [torch.int64]}
        stats = Statistics(model, tokens, **options)
        memory = stats.memory()
    assert (stats.execution, stats.root.macs) == ("shape", 2 * 3 * 4 * 4)
    assert "integers that were passed to be zeros" in stats.root.note
    assert stats.root.note in memory.notes
    known = Statistics(model.eval(), torch.full((2, 3), 7))  # tokens with values are not assumed
    assert (known.root.macs, known.root.note) == (0, "")

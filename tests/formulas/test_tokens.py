"""FLOPs per token against hand-derived products, and torch's own counter around a real step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from modelsummary import InputError, Statistics, StepError
from modelsummary.formulas.routing import RoutingChoice, active_params
from tests.untouched import untouched

WIDTH, HEADS, LENGTH, BATCH, VOCABULARY = 8, 2, 6, 3, 10
PER_TOKEN = 4 * WIDTH**2 + WIDTH * VOCABULARY  # four projections, and the head


class Decoder(nn.Module):
    def __init__(self, window=None, checkpointed=False):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.window, self.checkpointed = window, checkpointed

    def attend(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mask = None
        if self.window is not None:
            place = torch.arange(x.shape[1], device=x.device)
            distance = place[:, None] - place
            mask = (distance >= 0) & (distance < self.window)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, ids):
        x = self.embed(ids)
        x = checkpoint(self.attend, x, use_reentrant=False) if self.checkpointed else self.attend(x)
        return self.head(x)


def ids(length=LENGTH):
    return torch.zeros(BATCH, length).long()


class OwnLoss(nn.Linear):
    def forward(self, x):
        return {"loss": super().forward(x).sum(-1)}  # one per sample


def test_a_loss_per_sample_is_added_up():
    found = Statistics(OwnLoss(4, 5), (3, 4)).flops_per_token()
    assert (found.forward, found.training) == (2 * 4 * 5, 2 * 2 * 4 * 5)  # the input requires no gradient


@pytest.mark.parametrize("window", [None, 2])
def test_by_hand(window):
    model = Decoder(window)
    with untouched(model):
        found = Statistics(model, ids()).flops_per_token()
    assert (found.unit, found.count, found.notes) == ("token", BATCH * LENGTH, ())
    assert found.forward == 2 * (PER_TOKEN + 2 * LENGTH * WIDTH)
    assert found.training == 3 * found.forward
    # causal: row i sees i + 1 keys; with a window of 2 the first row sees one, every other two
    seen = sum(range(1, LENGTH + 1)) if window is None else 2 * LENGTH - 1
    assert found.masked_forward * LENGTH == pytest.approx(2 * (PER_TOKEN * LENGTH + 2 * WIDTH * seen))
    assert found.masked_training == pytest.approx(3 * found.masked_forward)
    assert found.params == found.active_params == 2 * WIDTH * VOCABULARY + 4 * WIDTH**2
    assert "Without hidden scores" in str(found)


def test_of_a_real_step():
    model = Decoder()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(ids()).sum().backward()
    assert Statistics(Decoder(), ids()).flops_per_token().training_flops == counter.get_total_flops()


def test_products_of_the_loss():
    """By hand: 4 x 8 by 8 x 16, its gradient once; and a head of 16 x 50 that the loss holds, both of its gradients."""
    model, head, labels = nn.Linear(8, 16), nn.Linear(16, 50), torch.zeros(4, dtype=torch.long)
    found = Statistics(model, (4, 8)).flops_per_token(loss=lambda out: nn.functional.cross_entropy(head(out), labels))
    assert found.forward_flops == 2 * 4 * 8 * 16
    assert found.training_flops == 2 * 2 * 4 * 8 * 16 + 3 * 2 * 4 * 16 * 50
    with pytest.raises(StepError, match=r"failed: ZeroDivisionError: .* by zero; pass loss=, a function"):
        Statistics(model, (4, 8)).flops_per_token(loss=lambda out: out.sum() * (1 // 0))


def test_a_window_over_many_positions():
    # 500 x 500 scores: the first two rows see one and two keys, every other row three
    found = Statistics(Decoder(window=3), ids(500)[:1]).flops_per_token()
    assert found.hidden_forward_flops == 2 * (500 * 500 - 3 * 499) * 2 * WIDTH
    assert found.notes == ()


def test_real_execution_leaves_no_gradients():
    model = Decoder()
    stats = Statistics(model, ids(), execution="real")
    with untouched(model):
        assert stats.flops_per_token() == Statistics(model, ids()).flops_per_token()
    assert all(each.grad is None for each in model.parameters())


def test_recomputation_does_not_count():
    plain, again = (Statistics(Decoder(checkpointed=each), ids()).flops_per_token() for each in (False, True))
    assert again.training_flops == plain.training_flops


def test_other_sizes():
    stats = Statistics(Decoder(), ids())
    found = stats.flops_per_token(sequence=20, batch=1)
    assert found.count == 20
    assert found.forward == 2 * (PER_TOKEN + 2 * 20 * WIDTH)
    assert found == Statistics(Decoder(), ids(20)[:1]).flops_per_token()


class Mixture(nn.Module):
    """Two of four experts per token, stacked in one parameter, and one expert for all."""

    def __init__(self):
        super().__init__()
        self.router, self.shared = nn.Linear(8, 4, bias=False), nn.Linear(8, 8, bias=False)
        self.experts = nn.Parameter(torch.zeros(4, 8, 8))

    def forward(self, x):
        chosen = self.router(x).topk(2, dim=-1).values.sum()
        return self.shared(x) + torch.einsum("th,ehf->tf", x, self.experts) * chosen


def test_active_parameters():
    found = Statistics(Mixture(), (5, 8)).flops_per_token()
    assert found.params == 32 + 64 + 4 * 64
    assert found.active_params == 32 + 64 + 2 * 64
    assert found.unit == "sample"
    listed = nn.Sequential(nn.Linear(4, 3, bias=False), nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]))
    assert active_params(listed, [RoutingChoice(listed[0], 3, 1)]) == 12 + 20
    assert active_params(listed, [RoutingChoice(listed[0], 50, 1)]) == 12 + 60  # no experts exist 50 times
    quantizer = nn.Sequential(nn.Conv1d(2, 8, 3), nn.Linear(4, 8))
    assert active_params(quantizer, [RoutingChoice(quantizer[1], 8, 1)]) == 56 + 40  # a code book, not experts


class TwoMaxima(Mixture):
    """The same with a router that takes the maximum twice, and a batch as large as the number of experts."""

    def forward(self, x):
        scores = self.router(x)
        first = scores.max(-1, keepdim=True)
        second = scores.scatter(-1, first.indices, -1e9).max(-1)
        return self.shared(x).softmax(0) * torch.einsum("th,ehf->tf", x, self.experts) * second.values[:, None]


def test_a_router_of_maxima():
    assert Statistics(TwoMaxima(), (4, 8)).flops_per_token().active_params == 32 + 64 + 2 * 64


class Eager(nn.Module):
    """Attention as two products: a mask that is added or filled in, perhaps with a sink for each row."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.bias = kind, nn.Parameter(torch.zeros(5, 5))

    def forward(self, x):
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        scores = x @ x.transpose(1, 2) / 2
        if self.kind == "filled":
            scores = scores.masked_fill(future, float("-inf"))
        elif self.kind == "where":
            scores = torch.where(~future, scores, -1e9)
        elif self.kind == "biased":
            scores = scores + self.bias
        else:
            scores = scores + future * -1e9
        if self.kind == "sink":
            sink = torch.zeros(*scores.shape[:2], 1, device=x.device)
            return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ x
        return scores.softmax(-1) @ x


@pytest.mark.parametrize("kind", ["added", "filled", "where", "sink", "biased"])
def test_attention_of_two_products(kind):
    found = Statistics(nn.Sequential(nn.Linear(4, 4), Eager(kind)), (2, 5, 4)).flops_per_token(tokens=10)
    # two samples, 10 of 25 scores hidden, 4 multiply-adds per score in each product
    assert found.hidden_forward_flops == (0 if kind == "biased" else 2 * 2 * 10 * (4 + 4))
    assert found.notes == (("Masks whose values are not known count as dense",) if kind == "biased" else ())


class Failing(nn.Linear):
    fails = False

    def forward(self, x):
        if self.fails:
            raise ValueError("now")
        return super().forward(x)


def test_a_step_that_raises():
    model = Failing(4, 4)
    stats = Statistics(model, (2, 4))
    with untouched(model), pytest.raises(StepError, match="the loss of the step failed: ZeroDivisionError"):
        stats.flops_per_token(loss=lambda output: 1 / 0)
    model.fails = True
    with untouched(model), pytest.raises(StepError, match="the forward of the step failed: ValueError: now"):
        stats.flops_per_token()


def test_without_a_backward():
    found = Statistics(nn.Linear(4, 8).requires_grad_(False), (2, 4)).flops_per_token()
    assert (found.forward, found.training, found.masked_training) == (64, 64, 64)  # 2 x 4 x 8
    assert "training has no backward" in str(found)


def test_errors():
    with pytest.raises(InputError, match="tokens must be an integer >= 1, got 0"):
        Statistics(nn.Linear(4, 4), (2, 4)).flops_per_token(tokens=0)
    with pytest.raises(InputError, match="no dimension is called 'sequence'"):
        Statistics(nn.Linear(4, 4), (2, 4)).flops_per_token(sequence=8)

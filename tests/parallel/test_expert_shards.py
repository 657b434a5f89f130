"""Functions of experts on two ranks, in one process: what the ranks add up to is what one process computes."""

import pytest
import torch
import torch.nn.functional as F

from modelsummary.parallel.expert_shards import ExpertShards

X, BIAS = torch.arange(15.0).view(5, 3) - 7, torch.arange(15.0).view(5, 3)
CHOSEN = torch.tensor([0, 3, 2])


def on_two_ranks(function):
    """Return the sum over two ranks, and the result of one process."""
    weight = torch.arange(36.0).sin().view(4, 3, 3)
    shares = []
    for rank in range(2):
        shard = weight.chunk(2)[rank].clone()
        mode = ExpertShards(rank, 2, [shard])
        with mode:
            result = function(shard)
        assert mode.kind(result)
        shares.append(mode.sum_of(result))
    return shares[0] + shares[1], function(weight)


@pytest.mark.parametrize(
    "function",
    [
        lambda w: torch.add((X @ w).sum(0), other=BIAS, alpha=2),
        lambda w: torch.sub(input=(X @ w).sum(0), other=1.0),
        lambda w: 1 - (X @ w).sum(0),
        lambda w: (X @ w).sum(0) + True,
        lambda w: (X @ w).sum(0).where(X > 0, BIAS),
        lambda w: BIAS.where(X > 0, other=(X @ w).sum(0)),
        lambda w: torch.where(X > 0, input=BIAS, other=(X @ w).sum(0)),
        lambda w: F.dropout((X @ w).sum(0), 0.0),
        lambda w: (X @ w).sum(axis=1),
        lambda w: (X @ w).mean(axis=0, keepdims=True),
        lambda w: torch.sum(input=w[CHOSEN], dim=0),
        lambda w: torch.matmul(X[None], w),
        lambda w: torch.einsum("etd,edh->td", X[None], w),
        lambda w: w[3][torch.tensor([True, False, True])],
        lambda w: w[1, :, None][CHOSEN - 1],
        lambda w: w[CHOSEN][:, 0],
        lambda w: w.sum(0)[0],
        lambda w: w.index_select(dim=0, index=CHOSEN),
        lambda w: w[3].index_select(0, CHOSEN % 3),
        lambda w: torch.gather(input=w, dim=0, index=CHOSEN.expand(2, 3, 3)),
        lambda w: w.take_along_dim(CHOSEN.expand(2, 3, 3), 0),
        lambda w: torch.stack(tensors=[w[0], w[3]], dim=1).sum(1),
        lambda w: w * torch.arange(4.0)[:, None, None],
    ],
)
def test_ranks_add_up_to_one_process(function):
    torch.testing.assert_close(*on_two_ranks(function))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda w: torch.div((X @ w).sum(0), 2.0, rounding_mode="floor"), r"div\(\) takes a sum over the ranks"),
        (lambda w: w.var(False), r"var\(\) works along the experts"),
        (lambda w: w.flip(1, 0), r"flip\(\) works along the experts"),
        (lambda w: w[:, w[CHOSEN, 0, 0] > 0], r"getitem\(\) takes sizes or numbers that differ between ranks"),
        (lambda w: w * torch.arange(2.0)[:, None, None], r"mul\(\) spreads one expert over several"),
        (lambda w: torch.bmm(X[None, :3].expand(2, 3, 3), w), r"bmm\(\) spreads one expert over several"),
        (lambda w: w.sum(0).view(torch.int32), r"view\(\) reads the memory of a part of the experts as another dtype"),
    ],
)
def test_functions_that_are_refused(function, reason):
    with pytest.raises(ExpertShards.Refused, match=reason):
        on_two_ranks(function)


def test_a_rank_alone_adds_what_is_added_once():
    """No other rank takes its tokens, so the first one does not add the bias for it."""
    shard = torch.arange(18.0).sin().view(2, 3, 3)
    sums = []
    for alone in (False, True):
        mode = ExpertShards(1, 2, [shard], alone=alone)
        with mode:
            result = (X @ shard).sum(0) + BIAS
        sums.append(mode.sum_of(result))
        mode.unmark([shard])
    torch.testing.assert_close(sums, [(X @ shard).sum(0), (X @ shard).sum(0) + BIAS])

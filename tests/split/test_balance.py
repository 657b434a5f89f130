"""Which record is cut: the one that holds for most, unless what it keeps whole costs balance."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modelsummary import SplitError, Statistics
from tests.idioms import rows
from tests.models import Call


def branching_body():
    """Return six layers behind a branch on the batch size, and a head: 6 x 256 + 64 MACs per sample."""

    def forward(self, x):
        if x.shape[0] > 1:
            x = x * 1.0
        for layer in self.layers:
            x = layer(x)
        return x

    layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(6))
    return nn.Sequential(Call(forward, layers=layers), nn.Linear(16, 4, bias=False))


def test_a_body_is_opened_where_that_balances_better():
    stages = Statistics(branching_body(), rows(2, 16)).split(2)
    assert [each.macs for each in stages.facts] == [2 * 768, 2 * (768 + 64)]
    assert stages.balance == pytest.approx(832 / 800)
    assert stages.limits == []
    assert "Valid for batches of 2 or more" in str(stages)
    assert stages.verify(rows(5, 16)).outputs == 0.0


def test_a_body_stays_whole_where_nothing_is_lost_by_it():
    model = nn.Sequential(branching_body()[0], nn.Linear(16, 96, bias=False))  # 1,536 MACs each
    stages = Statistics(model, rows(2, 16)).split(2)
    assert [each.first for each in stages.facts] == ["0", "1"]
    assert "Valid for" not in str(stages)
    assert torch.equal(stages(rows(1, 16)), model(rows(1, 16)))


@pytest.mark.parametrize("by_name", [True, False])
def test_an_encoder_stays_whole_only_where_it_may_run_on_nested_tensors(by_name):
    def forward(self, x, padding):
        return self.body(x, src_key_padding_mask=padding) if by_name else self.body(x, None, padding)

    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    inputs = torch.randn(2, 4, 8), torch.tensor([[False] * 4, [False, False, True, True]])
    for is_nested in (True, False):
        model = Call(forward, body=nn.TransformerEncoder(layer, 4, enable_nested_tensor=is_nested)).eval()
        statistics = Statistics(model, inputs)
        if is_nested:
            with pytest.raises(SplitError, match="it may run on nested tensors in evaluation"):
                statistics.split(2)
        else:
            with torch.no_grad():
                assert torch.equal(statistics.split(2)(*inputs), model(*inputs))


def test_what_must_stay_whole_and_costs_balance_is_named():
    def decides(self, x):
        return self.b(self.a(x)) if x.sum() > 0 else self.a(x)

    body = Call(decides, a=nn.Linear(16, 16, bias=False), b=nn.Linear(16, 16, bias=False))
    model = nn.Sequential(body, nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False))
    stages = Statistics(model, torch.ones(2, 16)).split(2)
    assert [each.macs for each in stages.facts] == [2 * 512, 2 * (64 + 64)]
    assert stages.balance == pytest.approx(512 / 320)
    (limit,) = stages.limits
    assert (limit.name, limit.share) == ("0", pytest.approx(512 / 640))
    assert f"Limited by 0, 80.0% of the cost: {limit.reason}" in str(stages)
    assert limit.reason.startswith("it decides by values of tensors")


def test_ruled_out_places_in_the_largest_stage_are_named():
    def writes(self, x):
        x = self.a(x)
        view = x[:, :8]
        y = self.b(x * 1)
        y = self.c(y)
        view += 1
        return self.d(x + y)

    layers = {name: nn.Linear(16, 16, bias=False) for name in "abcd"}
    stages = Statistics(Call(writes, **layers), rows(2, 16)).split(2)
    # no cut between the layers a and c: x crosses, and is written to behind them
    assert [each.macs for each in stages.facts] == [2 * 768, 2 * 256]
    (limit,) = stages.limits
    assert "writes in place into a tensor that crosses" in limit.reason

"""Forwards that decide by values of integers: opened where they must be, and checked at every call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import modelsummary
from modelsummary import SplitError, Statistics, TraceError
from tests.idioms import rows
from tests.models import Call
from tests.untouched import untouched


def masking(self, x, mask):
    """Leave out a mask that hides nothing, as transformers does."""
    hidden = None if mask.all() else (1 - mask)[..., None].bool()
    for layer in self.layers:
        x = layer(x)
        if hidden is not None:
            x = x.masked_fill(hidden, 0.0)
    return x


def model():
    return Call(masking, layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(4)))


def mask(batch, hidden=0):
    found = torch.ones(batch, 3, dtype=torch.long)
    found[:, 3 - hidden :] = 0
    return found


@pytest.mark.parametrize("hidden", [0, 1])
def test_stages_hold_for_inputs_that_decide_alike(hidden):
    stages = Statistics(model(), (rows(2, 3, 4), mask(2, hidden))).split(4)
    assert [each.macs for each in stages.facts] == [2 * 3 * 16] * 4
    assert "Valid for inputs whose values lead to the same decisions" in str(stages)
    assert stages.verify(rows(5, 3, 4), mask(5, hidden)).outputs == 0.0
    with pytest.raises(SplitError, match=rf"gave {not hidden} when it was recorded, and gives {bool(hidden)}"):
        stages(rows(2, 3, 4), mask(2, 1 - hidden))


def test_other_values_that_decide_alike():
    stages = Statistics(model(), (rows(2, 3, 4), mask(2, 1))).split(2)
    assert stages.verify(rows(2, 3, 4), mask(2, 2)).outputs == 0.0


@pytest.mark.parametrize("hidden", [0, 1])
def test_graphs_hold_for_inputs_that_decide_alike(hidden):
    whole = model()
    graph = modelsummary.symbolic_trace(whole, meta_args={"x": rows(2, 3, 4), "mask": mask(2, hidden)})
    given = rows(5, 3, 4), mask(5, hidden)
    assert torch.equal(graph(*given), whole(*given))
    with pytest.raises(TraceError, match=rf"read {not hidden} when it was traced, and reads {bool(hidden)}"):
        graph(rows(5, 3, 4), mask(5, 1 - hidden))


def test_a_layer_that_decides_stays_whole_where_that_costs_nothing():
    both = Call(lambda self, x, mask: self.b(self.a(x, mask)), a=model(), b=nn.Linear(4, 16, bias=False))
    stages = Statistics(both, (rows(2, 3, 4), mask(2))).split(2)
    assert [each.first for each in stages.facts] == ["a", "b"]
    assert stages.verify(rows(2, 3, 4), mask(2, 1)).outputs == 0.0  # the layer decides anew


def test_numbers_that_follow_the_batch_are_compared_with_it():
    def forward(self, x, mask):
        return self.b(self.a(x)) * mask.sum().item()

    stages = Statistics(Call(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), (rows(2, 3, 4), mask(2))).split(2)
    assert stages.verify(rows(4, 3, 4), mask(4)).outputs == 0.0  # 3 for each row
    with pytest.raises(SplitError, match="gave 12 when it was recorded, and gives 8"):
        stages(rows(4, 3, 4), mask(4, 1))


def test_what_floats_decide_is_never_opened():
    def forward(self, x, scale):
        return self.b(self.a(x)) if scale.sum() > 0 else self.b(x)

    stats = Statistics(Call(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), (rows(2, 4), torch.ones(2)))
    with pytest.raises(SplitError, match="the model decides by values of tensors"):
        stats.split(2)


def test_sizes_that_integers_decide():
    """Put the features of an image where its tokens are, as vision-language models do."""

    def forward(self, ids, image):
        x, features = self.embed(ids), self.vision(image)
        places = (ids == 0).nonzero()[:, 1]
        for layer in self.layers:
            x = layer(x.index_add(1, places, features[: len(places)].expand(len(x), -1, -1)))
        return x

    model = Call(
        forward,
        embed=nn.Embedding(9, 4),
        vision=nn.Linear(4, 4),
        layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(4)),
    )
    image = torch.ones(3, 4)
    stages = Statistics(model, (torch.tensor([[0, 1, 0, 2]]), image)).split(4)
    assert [each.macs for each in stages.facts] == [3 * 16 + 4 * 16, 4 * 16, 4 * 16, 4 * 16]
    assert stages.verify(torch.tensor([[5, 0, 0, 2]]), image).outputs == 0.0
    with pytest.raises(SplitError, match=r"size gave \(2, 2\) when it was recorded, and gives torch.Size\(\[1, 2\]\)"):
        stages(torch.tensor([[5, 0, 3, 2]]), image)
    graph = modelsummary.symbolic_trace(model, meta_args={"ids": torch.tensor([[0, 1, 0, 2]]), "image": image})
    given = torch.tensor([[5, 0, 0, 2]]), image
    assert torch.equal(graph(*given), model(*given))


def test_lists_that_integers_decide():
    def forward(self, x, lengths):
        return self.b(torch.cat([self.a(each) for each in x.split(lengths.tolist())]))

    model = Call(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    stages = Statistics(model, (torch.ones(5, 4), torch.tensor([2, 3]))).split(2)
    assert stages.verify(torch.rand(5, 4), torch.tensor([2, 3])).outputs == 0.0
    with pytest.raises(SplitError, match=r"gave \[2, 3\] when it was recorded, and gives \[1, 4\]"):
        stages(torch.rand(5, 4), torch.tensor([1, 4]))


def test_attributes_that_the_stages_do_not_assign_are_named():
    """Split a forward that assigns an attribute for generation; a second forward runs the same operators."""

    def forward(self, x):
        self.seen = x.sum()
        return self.b(self.a(x))

    model = Call(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    stages = Statistics(model, torch.ones(2, 4)).split(2)
    assert "Not assigned by the stages, because the forward does not read it: seen" in str(stages)
    assert stages.verify(torch.rand(3, 4)).outputs == 0.0
    assert not hasattr(model, "seen")


def deletes(self, x):
    if "seen" in vars(self):
        del self.seen
        x = x + 1
    return self.b(self.a(x))


def reads_in_eval(self, x):
    y = self.b(self.a(x))
    if not self.training and self.seen is not None:
        y = y + self.seen
    self.seen = y.detach()
    return y


def reads_the_one_before_the_last(self, x):
    y = self.b(self.a(x))
    if self.older is not None:
        y = y + self.older
    self.older, self.seen = self.seen, x
    return y


def asks_for_the_type(self, x):
    y = self.b(self.a(x))
    if isinstance(self.seen, torch.Tensor):
        y = y + 1
    self.seen = x
    return y


def changes_from_the_second_on(self, x):
    y = self.b(self.a(x)) * (1 if self.seen is None else 2)
    self.seen = True
    return y


def test_attributes_that_the_first_forward_settles():
    """Split a classifier of transformers' kind: it notes the type of its problem when it first sees labels."""

    def forward(self, x, labels):
        if self.seen is None:
            self.seen = "labels" if labels.dtype == torch.long else "regression"
        logits = self.b(self.a(x))
        if self.seen == "labels":
            return nn.functional.cross_entropy(logits, labels), logits
        return nn.functional.mse_loss(logits, labels), logits

    model = Call(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    model.seen = None
    x, labels = torch.rand(2, 4), torch.tensor([1, 3])
    stages = Statistics(model, (x, labels)).split(2)
    assert model.seen is None
    loss, logits = stages(x, labels)
    expected_loss, expected_logits = model(x, labels)
    assert torch.equal(loss, expected_loss)
    assert torch.equal(logits, expected_logits)


def test_hooks_that_the_first_forward_installs():
    """Split a model that captures results of layers by hooks, as models of transformers capture logits of routers."""

    class Cache:
        """An object that each forward makes anew."""

    class Layer(nn.Linear):
        def forward(self, x, cache):
            return super().forward(x)

    def forward(self, x):
        if not self.seen:
            self.a.register_forward_hook(lambda module, args, out: results.append(out))
            self.seen = True
        results.clear()
        return self.b(self.a(x), Cache()), *results

    model = Call(forward, a=nn.Linear(4, 4), b=Layer(4, 4))
    model.seen, results = False, []
    with untouched(model):
        stages = Statistics(model, torch.ones(2, 4)).split(2)
        out, captured = stages(torch.ones(2, 4))
    expected_out, expected_captured = model(torch.ones(2, 4))
    assert torch.equal(out, expected_out)
    assert torch.equal(captured, expected_captured)


def settles_the_batch_size(self, x):
    if self.seen is None:
        self.seen = len(x)
    return self.b(self.a(x)) / self.seen


def settles_the_mode(self, x):
    if self.seen is None:
        self.seen = 2 if self.training else 3
    return self.b(self.a(x)) / self.seen


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "forward",
    [
        deletes,
        reads_in_eval,
        reads_the_one_before_the_last,
        asks_for_the_type,
        changes_from_the_second_on,
        settles_the_batch_size,
        settles_the_mode,
    ],
)
def test_attributes_that_some_later_forward_reads(forward, training):
    model = Call(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)).train(training)
    model.seen = model.older = None
    with pytest.raises(SplitError, match="assigns its attribute"):
        Statistics(model, torch.ones(2, 4)).split(2)
    assert (model.seen, model.older) == (None, None)

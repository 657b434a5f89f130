"""Logits that stay sharded by the vocabulary, and their cross-entropy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from modelsummary import InputError, Statistics
from modelsummary.capture.containers import tensors_of
from tests.parallel import collectives, models, processes


def plan_of(model, inputs, **options):
    return Statistics(model, inputs).parallel_plan(tensor=2, loss_parallel=True, **options)


def test_logits_are_not_gathered():
    plan = plan_of(*models.make("decoder"))
    head = next(layer for layer in plan.layers if layer.role == "head")
    assert head.options == {"use_local_output": False}
    # Maximum, sum and loss of the 4 x 8 rows of logits, in float64.
    assert plan.collectives["loss", "all_reduce"] == (3, 3 * 32 * 8)
    assert ("forward", "all_gather") not in plan.collectives
    assert "loss_parallel()" in str(plan)
    assert "ColwiseParallel(use_local_output=False)" in plan.to_code()
    assert type(plan).from_json(plan.to_json()) == plan


def test_a_loss_in_the_model_belongs_to_its_forward():
    model, inputs = models.make("gpt2")
    plan = plan_of(model, {"ids": inputs[0], "labels": inputs[0]})
    assert (
        plan.collectives["forward", "all_reduce"][0]
        == 3 + Statistics(model, inputs).parallel_plan(tensor=2).collectives["forward", "all_reduce"][0]
    )
    assert ("loss", "all_reduce") not in plan.collectives


class Scaled(nn.Module):
    """A head whose logits are changed."""

    def __init__(self, change):
        super().__init__()
        self.embed, self.head, self.change = nn.Embedding(48, 16), nn.Linear(16, 48), change
        self.scale = nn.Parameter(torch.ones(48))

    def forward(self, ids):
        return self.change(self, self.head(self.embed(ids)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model, x: x * model.scale, r"mul\(\) in the model takes them beside a tensor that is not a DTensor"),
        (lambda _, x: x.softmax(-1), r"softmax\(\) in .* works along the sharded dimension"),
        (lambda _, x: F.cross_entropy(x.flatten(0, 1), x.argmax(-1).flatten()), "argmax.* sharded dimension"),
        (
            lambda _, x: F.cross_entropy(x[0], torch.ones(8).long(), label_smoothing=0.1),
            "label_smoothing=0.1, which loss_parallel of torch lacks; use 0",
        ),
        (
            lambda _, x: F.cross_entropy(x, torch.ones(2, 48).long()),
            "whose second dimension is not the vocabulary; flatten",
        ),
    ],
)
def test_what_needs_all_logits_is_refused(change, reason):
    with pytest.raises(InputError, match=f"loss_parallel=True: the logits cannot stay sharded: .*{reason}"):
        plan_of(Scaled(change), torch.ones(2, 8, dtype=torch.long))


def test_a_model_without_logits_is_refused():
    with pytest.raises(InputError, match="no output head of Bert is split by the vocabulary"):
        plan_of(*models.make("bert"))
    with pytest.raises(InputError, match="over the ranks of tensor parallelism; pass tensor > 1, too"):
        Statistics(*models.make("decoder")).parallel_plan(loss_parallel=True)


def _loss(out):
    """The loss that the model returns, or that of its logits."""
    found = list(tensors_of(out))
    scalar = next((each for each in found if each.dim() == 0), None)
    if scalar is not None:
        return scalar
    logits = next(each for each in found if each.dim() == 3)
    target = torch.arange(logits.shape[0] * logits.shape[1]) * 5 % logits.shape[-1]
    return F.cross_entropy(logits.flatten(0, 1), target)


def _compared(_rank, _n, cases):
    from torch.distributed.tensor.parallel import loss_parallel

    found = {}
    for name, labels, sizes in cases:
        model, inputs = models.make(name)
        if labels:
            inputs = {**(inputs if isinstance(inputs, dict) else {"ids": inputs[0]}), "labels": models._ids()}
        whole, model = processes.copies(model)
        args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
        plan = plan_of(model, inputs, **sizes)
        plan.apply(model, plan.device_mesh("cpu"))
        with loss_parallel():
            ran = collectives.of_step(model, inputs, _loss)
            loss = _loss(model(*args, **kwargs))
            loss.backward()
        expected = _loss(whole(*args, **kwargs))
        expected.backward()
        own = dict(model.named_parameters())
        grads = [(each.grad, own[key].grad) for key, each in whole.named_parameters() if each.grad is not None]
        differences = [processes.difference(one, processes.whole(other)) for one, other in grads]
        differences.append(abs(expected.item() - processes.whole(loss).item()))
        found[(name, labels, *sizes)] = (max(differences), ran, collectives.of_plan(plan))
    return found


@pytest.mark.slow
def test_the_loss_of_two_processes_is_that_of_the_model():
    cases = [(name, labels, {}) for name in ("decoder", "gpt2", "hf_bert", "hf_t5") for labels in (False, True)]
    cases += [(name, False, {"sequence": True}) for name in ("decoder", "hf_llama", "hf_qwen3")]
    cases.append(("odd", False, {}))
    for found in processes.run(_compared, 2, [case for case in cases if case[:2] != ("decoder", True)]):
        for case, (difference, ran, planned) in found.items():
            assert difference <= 1e-12, case
            assert ran == planned, case


def _in_stages(_rank, _n):
    from torch.distributed.pipelining import Schedule1F1B
    from torch.distributed.tensor.parallel import loss_parallel

    model, (ids,) = models.make("decoder")
    whole, model = processes.copies(model)
    plan = plan_of(model, (ids[:2],), pipeline=2)
    mesh = plan.device_mesh("cpu")
    stage, is_last = plan.apply(model, mesh), mesh["pipeline"].get_local_rank() == 1
    schedule, losses = Schedule1F1B(stage, 2, loss_fn=_to_target), []
    target = ids * 5 % 48
    with loss_parallel():
        schedule.step(*(() if is_last else (ids,)), **({"target": target, "losses": losses} if is_last else {}))
    expected = [_to_target(whole(part), each) for part, each in zip(ids.split(2), target.split(2), strict=True)]
    (sum(expected) / 2).backward()
    gradients = {name: each.grad for name, each in whole.named_parameters()}
    pairs = [(gradients[name], processes.whole(each.grad)) for name, each in stage.submod.named_parameters()]
    pairs += [(one.detach(), processes.whole(other)) for one, other in zip(expected, losses, strict=False)]
    return [processes.difference(*pair) for pair in pairs]


def _to_target(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


@pytest.mark.slow
def test_the_last_stage_keeps_its_logits_sharded():
    found = processes.run(_in_stages, 4)
    assert [len(each) for each in found] == [18, 18, 21, 21]
    assert all(value <= 1e-12 for each in found for value in each)

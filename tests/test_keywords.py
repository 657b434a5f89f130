"""Guesses for names of arguments that no call has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modelsummary import ForwardError, InputError, ModelSummaryError, Statistics
from modelsummary.cluster import Cluster, Plan, Recipe


def _statistics():
    return Statistics(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), (1, 64))


@pytest.mark.parametrize(
    ("name", "guess"),
    [
        ("tp", "tensor"),
        ("dp", "data"),
        ("pp", "pipeline"),
        ("fsdp", "shard"),
        ("sp", "sequence"),
        ("zero", "sharded"),
        ("recompute", "checkpoint"),
        ("tensr", "tensor"),
    ],
)
def test_unknown_names_are_guessed(name, guess):
    stats, cluster = _statistics(), Cluster("A100")
    calls = {
        "Plan": lambda: Plan(**{name: 2}),
        "parallel_plan": lambda: stats.parallel_plan(**{name: 2}),
        "plan": lambda: stats.plan(cluster, 8, **{name: [2]}),
    }
    if guess == "data":
        del calls["plan"]  # which shares the data among the ranks that are left
    for call, function in calls.items():
        with pytest.raises(
            InputError, match=rf"^unknown option '{name}' of {call}; expected .*; did you mean '{guess}'\?$"
        ):
            function()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tensor": 0}, "tensor must be an integer >= 1, got 0"),
        ({"shard": 2.0}, "shard must be an integer >= 1, got 2.0"),
        ({"sequence": True}, "sequence=True shards activations over the ranks of tensor, of which there is one"),
        ({"tensor": 2, "sequence": 1}, "sequence must be True or False, got 1"),
        ({"shard": 4, "sharded": 0}, "sharded=0 shards nothing over shard=4 ranks; pass data=4 for whole copies"),
        ({"shard": 4, "sharded": "all"}, "sharded must be one of 'optimizer', .* or None, got 'all'"),
    ],
)
def test_both_rooms_refuse_with_the_same_words(arguments, message):
    said = []
    for call in (Plan, _statistics().parallel_plan):
        with pytest.raises(InputError, match=message) as caught:
            call(**arguments)
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_options_of_recipes_are_not_options_of_plans():
    for name in ("dtype", "precision"):
        with pytest.raises(InputError, match=rf"^{name} is not an option of Plan; pass .*Recipe\(precision=\.\.\.\)"):
            Plan(**{name: torch.float16})


def test_a_number_of_blocks_is_checkpointed_in_each_stage():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6)))
    stats = Statistics(model, (2, 64))
    assert stats.parallel_plan(checkpoint=2).checkpoint == ("0", "1")
    staged = stats.parallel_plan(pipeline=2, checkpoint=2)
    first = int(staged.boundaries[0])
    assert staged.checkpoint == ("0", "1", str(first), str(first + 1))
    step = stats.simulate(Plan(checkpoint=2, micro_batch=2), Cluster("A100"), 8)
    assert step.parallel_plan().checkpoint == ("0", "1")
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    assert Statistics(model, (2, 64)).parallel_plan(checkpoint=2).checkpoint == ("2", "3")
    for value in ("full", -1, 2.0, True):
        said = []
        for call in (Plan, stats.parallel_plan):
            with pytest.raises(InputError, match="must be None, 'every', 'selective', 'operator', a number") as caught:
                call(checkpoint=value)
            said.append(str(caught.value))
        assert said[0] == said[1]
    with pytest.raises(InputError, match="parallel_plan does not apply checkpoint='selective'; pass 'every'"):
        stats.parallel_plan(checkpoint="selective")
    named = stats.simulate(Plan(checkpoint=["0"], micro_batch=2), Cluster("A100"), 8)
    assert named.parallel_plan().checkpoint == stats.parallel_plan(checkpoint=["0"]).checkpoint == ("0",)


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (lambda stats: stats.table(colums=["macs"]), "unknown option 'colums' of table; .* did you mean 'columns'"),
        (lambda stats: stats.memory(optim="adam"), "unknown option 'optim' of memory; .* did you mean 'optimizer'"),
        (lambda stats: stats.memory(dtype="bf17"), "dtype must be a floating point .* got 'bf17'"),
        (lambda stats: stats.memory(accumulates="yes"), "accumulates must be True or False, got 'yes'"),
        (
            lambda stats: stats.max_batch_size(24),
            "memory_bytes is in bytes, .*; pass text such as '24GB', or '24B'",
        ),
        (
            lambda stats: stats.max_batch_size(),
            "missing a required argument: 'memory_bytes'; expected memory_bytes, .*\\*\\*",
        ),
        (lambda stats: stats.top(-3), "n must be an integer >= 1, got -3"),
        (lambda stats: stats.simulate(Plan(), Cluster("A100"), batch=8), "'batch' of simulate; .* 'global_batch'"),
        (lambda stats: stats.simulate(Plan(), Cluster("A100"), 8, sequence=8), "of simulate; .* 'sequence_length'"),
        (lambda stats: stats.plan(Cluster("A100"), 8, sequence=8), "sequence must be .*, got 8"),
        (lambda stats: stats.parallel_plan(reshard_after_forward=False), "of parallel_plan; .* 'sharded'"),
        (lambda stats: Recipe(dtype=None), "'dtype' of Recipe; .* 'precision'"),
        (lambda stats: Cluster("A100", gpus=8), "unknown option 'gpus' of Cluster; .* did you mean 'devices_per_node'"),
        (lambda stats: Plan(schedule="1f2b"), "schedule must be one of 'gpipe', .*, got '1f2b'; did you mean '1f1b'"),
        (lambda stats: stats["9"], "no layer named '9' in Sequential; expected one of '0', '1', '2', '3'"),
        (
            lambda stats: stats.table(columns=["mac"]),
            "unknown column 'mac'; .* more; did you mean 'macs'",
        ),
        (lambda stats: stats.table(columns=5), "pass some of: input_size, output_size, "),
        (lambda stats: stats.split(2, max_memory=["1GB", "a lot"]), "max_memory must be .* '24GB' .*, got 'a lot'"),
    ],
)
def test_a_mistake_is_told_what_was_meant(mistake, said):
    with pytest.raises(ModelSummaryError, match=said) as caught:
        mistake(_statistics())
    assert len(str(caught.value)) < 400


def test_small_amounts_need_their_unit():
    stats = _statistics()
    assert not stats.memory(device="cuda", reserve="512B").reserve.fits
    mixed, equal = stats.split(2, max_memory=["1GB", 10**9]), stats.split(2, max_memory="1GB")
    assert mixed.facts == equal.facts


def test_case_and_marks_in_names_do_not_count():
    stats = _statistics()
    assert Plan(schedule="1F1B") == Plan()
    assert Recipe(precision="bf16", optimizer="AdamW", kernels="Compiled") == Recipe()
    assert Cluster.preset("dgx-h100").name == "DGX H100"
    assert stats.memory(optimizer="SGD_momentum", dtype="half") == stats.memory(
        optimizer="sgd-momentum", dtype=torch.float16
    )
    assert stats.estimate_latency("A100", "Compiled", dtype="fp16") == stats.estimate_latency(
        "A100", "compiled", dtype=torch.float16
    )


@pytest.mark.parametrize("tokens", [100, -1])
def test_indices_that_an_embedding_does_not_have_are_refused(tokens):
    with pytest.raises(ForwardError, match="the table has 100 rows, so pass indices from 0 to 99"):
        Statistics(nn.Embedding(100, 4), torch.tensor([[tokens]]))
    assert Statistics(nn.Embedding(100, 4), torch.tensor([[99]])).total_params == 400

"""The search finds what trying everything finds."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from modelsummary import InputError, Statistics
from modelsummary.cluster import Cluster, Plan, Plans, Recipe, StepSimulator
from modelsummary.cluster.search import candidates, find_plans
from modelsummary.parallel import applied_rank
from tests.cluster.models import LENGTH, statistics, step_model
from tests.parallel.models import OLD
from tests.parallel.models import make as decoder

SPACE = {
    "tensor": [1, 2],
    "pipeline": [1, 2, 4],
    "micro_batch": [1, 2],
    "sharded": [None, "parameters"],
    "shard": [None, 2],
    "devices": [4, 8],
    "checkpoint": [None, "every"],
    "sequence": [False],
    "schedules": ["1f1b", "interleaved1f1b", "zbv"],
}


@pytest.fixture(scope="module")
def model():
    return step_model()


def simulator_of(model, memory_bytes=10**9):
    cluster = Cluster("A100", devices_per_node=4, nodes=2, memory_bytes=memory_bytes)
    return StepSimulator(model, cluster, 16, LENGTH)


def brute_force(simulator, space=SPACE):
    """Return the estimates of all plans that are possible and fit."""
    steps = []
    for plan in candidates(simulator, space):
        try:
            step = simulator.simulate(plan)
        except InputError:
            continue
        if step.fits:
            steps.append(step)
    return steps


def figures(step):
    return step.step_seconds, step.memory_bytes, step.plan.devices


@pytest.mark.parametrize("memory_bytes", [10**9, 900_000])
def test_the_search_equals_trying_everything(model, memory_bytes):
    simulator = simulator_of(model, memory_bytes)
    every = brute_force(simulator)
    found = find_plans(simulator, {**SPACE, "limit": 5})
    assert found.tried > len(every) / 2
    fastest = sorted(step.step_seconds for step in every)
    assert [step.step_seconds for step in found[:5]] == pytest.approx(fastest[:5])
    best = {
        figures(step)
        for step in every
        if not any(
            all(a <= b for a, b in zip(figures(other), figures(step), strict=True)) and figures(other) != figures(step)
            for other in every
        )
    }
    assert {figures(step) for step in found.pareto} == best
    assert all(step.fits for step in found)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_searches_of_any_space_equal_trying_everything(data):
    levels = [None, "optimizer", "gradients", "parameters"]
    values = {**SPACE, "sharded": levels, "checkpoint": [None, "every", "selective", 1], "sequence": [False, True]}
    space = {
        name: data.draw(st.lists(st.sampled_from(list(entries)), min_size=1, max_size=2, unique=True), name)
        for name, entries in values.items()
    }
    limit = data.draw(st.integers(1, 4), "limit")
    simulator = simulator_of(step_model(), data.draw(st.sampled_from([10**9, 10**6, 800_000, 600_000]), "memory"))
    every = brute_force(simulator, space)
    if not every:
        with pytest.raises(InputError, match=r"no plan uses|none of [\d,]+ plans"):
            find_plans(simulator, {**space, "limit": limit})
        return
    plans = find_plans(simulator, {**space, "limit": limit})
    fastest = sorted(every, key=figures)
    assert plans.fitting == len(every)
    assert [figures(step) for step in plans[:limit]] == [figures(step) for step in fastest[:limit]]
    pareto = []
    for step in fastest:
        if not any(
            best.memory_bytes <= step.memory_bytes and best.plan.devices <= step.plan.devices for best in pareto
        ):
            pareto.append(step)
    assert [figures(step) for step in plans.pareto] == [figures(step) for step in pareto]


def test_bounds_are_not_above_the_simulation(model):
    simulator = simulator_of(model)
    for plan in candidates(simulator, {**SPACE, "sharded": [None, "parameters"], "devices": [8]}):
        try:
            step = simulator.simulate(plan)
        except InputError:
            continue
        items = simulator.items(plan)
        assert simulator.least_seconds(plan) <= items.least_seconds() <= step.step_seconds * (1 + 1e-9), plan
        assert items.seconds() == pytest.approx(step.step_seconds)
        assert simulator.memory_bytes(plan) == step.memory_bytes
        assert simulator.least_state_bytes(plan) <= step.memory_bytes


def test_candidates_use_all_devices_and_the_batch(model):
    plans = list(candidates(simulator_of(model), {}))
    assert len(set(plans)) == len(plans) > 200
    assert {plan.devices for plan in plans} == {8}
    assert all(16 % (plan.batch_ranks * plan.micro_batch) == 0 for plan in plans)
    assert {plan.schedule for plan in plans} == {"1f1b", "interleaved1f1b", "zb", "zbv", "dualpipev"}
    assert all(1 in (plan.data, plan.shard) for plan in plans)  # all copies shard, or none


def test_candidates_shard_over_a_part_of_the_copies(model):
    options = {
        "tensor": [1, 2],
        "pipeline": [1],
        "sharded": [None, "parameters"],
        "shard": [2, 4, 8],
        "micro_batch": [1],
    }
    plans = list(candidates(simulator_of(model), {**options, "checkpoint": [None], "sequence": [False]}))
    found = {(plan.tensor, plan.data, plan.shard, plan.sharded) for plan in plans}
    whole = {(1, 8, 1, None), (2, 4, 1, None)}
    some = {(1, 1, 8), (1, 4, 2), (1, 2, 4), (2, 1, 4), (2, 2, 2)}  # shards of 8 copies, then of 4
    assert found == whole | {(*sizes, "parameters") for sizes in some}


def test_long_tables_end():
    step = statistics().simulate(Plan(data=8), Cluster("A100"), 8)
    text = str(Plans([step] * 25, [step], 100, 50)).splitlines()
    rows = [line for line in text if line.split()[0] == "8"]  # copies of the model
    assert len(rows) == 20
    assert "5 slower plans: see to_records() or to_pandas()" in text


def test_printing_records_and_traces(tmp_path):
    plans = statistics().plan(Cluster("A100", devices_per_node=4), 8, pipeline=[2], tensor=[1], sharded=[None], limit=3)
    refused = {step.obstacle for step in plans} - {""}
    text = str(plans)
    assert text.startswith(
        "Plans for a training step of Gpt, bfloat16, compiled kernels, adamw, float32 master weights, 8 "
    )
    assert all(f"no ({index}): " in text for index in range(1, len(refused) + 1))
    assert "PP    VS    DP    mb" in text
    record = plans.to_records()[0]
    assert record["pipeline"] == 2
    assert record["total_bytes"] == plans[0].memory_bytes
    assert [name for name in str(plans[0]).partition("Share")[2].split() if name in ("compute", "bubble", "step")] == [
        *("compute", "bubble", "step")
    ]
    path = plans[0].write_trace(tmp_path / "step.json")
    events = json.loads(path.read_text())["traceEvents"]
    rows = {each["tid"]: each["args"]["name"] for each in events if each["ph"] == "M"}
    assert set(rows.values()) >= {"rank 0", "rank 1", "link 0 to 1", "link 1 to 0", "gradients 0"}
    items = [each for each in events if each["ph"] == "X"]
    for name, end in (("backward", plans[0].simulation.makespan), ("optimizer", plans[0].step_seconds)):
        ends = [each["ts"] + each["dur"] for each in items if each["name"].startswith(name)]
        assert max(ends) == pytest.approx(1e6 * end)  # so few micro-batches are all in the trace
    with pytest.raises(InputError, match="cannot be written"):
        plans[0].write_trace(tmp_path / "missing" / "step.json")


def test_pictures():
    pytest.importorskip("matplotlib").use("Agg")
    step = statistics().simulate(Plan(pipeline=2), Cluster("A100"), 8)
    axes = step.plot()
    ends = [each.get_x() + each.get_width() for each in axes.patches]
    assert max(ends) == pytest.approx(step.step_seconds)


def test_plans_become_code():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    stats = Statistics(model, (1, 64))
    for plan, wanted in (
        (Plan(tensor=2, data=2), "parallelize_module"),
        (Plan(shard=4), "fully_shard"),
        (Plan(pipeline=2, data=2), "Schedule1F1B"),
    ):
        code = stats.simulate(plan, Cluster("A100"), 8).to_code()
        assert wanted in code
        compile(code, "plan", "exec")
    deep = stats.simulate(Plan(pipeline=2, virtual_stages=2, schedule="interleaved1f1b"), Cluster("A100"), 8)
    with pytest.raises(InputError, match=r"virtual_stages=2; search with virtual_stages=\[1\]"):
        deep.parallel_plan()
    partly = stats.simulate(Plan(checkpoint="selective"), Cluster("A100"), 8)
    with pytest.raises(InputError, match=r"checkpoint='selective'; search with checkpoint=\[None, 'every'\]"):
        partly.to_code()
    interleaved = stats.simulate(Plan(pipeline=2, schedule="interleaved1f1b"), Cluster("A100"), 8).to_code()
    assert "ScheduleInterleaved1F1B([stage], n_microbatches" in interleaved


def test_the_memory_of_a_cluster_may_be_text():
    assert (
        Cluster("A100", memory_bytes="60GB").memory_bytes
        == Cluster("A100", memory_bytes=60e9).memory_bytes
        == 60 * 10**9
    )
    with pytest.raises(InputError, match="memory_bytes is in bytes, and 80 is 80 of them; pass text such as '80GB'"):
        Cluster("A100", memory_bytes=80)


def test_the_table_says_what_can_be_applied():
    stats = statistics()
    cluster = Cluster("A100", devices_per_node=2)
    space = {"micro_batch": [1], "sharded": [None, "parameters"], "tensor": [1]}
    plans = stats.plan(cluster, 8, limit=20, **space)
    assert {step.applicable for step in plans} == {True, False}
    for step in plans:
        if not step.applicable:
            with pytest.raises(InputError) as caught:
                step.parallel_plan()
            assert str(caught.value) == step.obstacle
    lines = str(plans).splitlines()
    first = next(index for index, line in enumerate(lines) if line.endswith("Applies")) + 1
    marks = [line.split("  ")[-1].strip() for line in lines[first : first + min(len(plans), 20)]]
    assert [mark == "yes" for mark in marks] == [step.applicable for step in plans[:20]]
    assert any(line.startswith("no (1): parallel_plan does not apply ") for line in lines)
    assert "84.98 GB per device; what is free has to hold CUDA's context" in " ".join(str(plans).split())
    assert " on 2 x A100" in " ".join(str(plans).split())
    free = cluster.memory_bytes - plans[0].memory_bytes
    assert f"Free: {free / 1e9:.2f} GB, " in str(plans[0])
    assert [f"{free / cluster.memory_bytes:.1%}"] == [row[-3] for row in plans._report().rows[:1]]
    found = stats.plan(cluster, 8, applicable=True, **space)
    assert len(found) > 3
    assert all(step.parallel_plan().world_size == 2 for step in found[:3])
    assert found[0].plan == next(step.plan for step in plans if step.applicable)
    with pytest.raises(
        InputError, match=r"none of the \d+ plans that fit can be applied, with applicable=True; the fas"
    ):
        stats.plan(cluster, 8, applicable=True, recipe=Recipe(gradient_dtype=torch.bfloat16), **space)
    loaded = pickle.loads(pickle.dumps(found[0]))
    assert loaded.obstacle == "the estimate was loaded without its model; call plan or simulate in this process"


def test_the_best_plan_is_a_parallel_plan_with_its_estimate(monkeypatch):
    stats, cluster = statistics(), Cluster("A100", devices_per_node=2)
    plans = stats.plan(cluster, 8, micro_batch=[1], sharded=[None, "parameters"], tensor=[1])
    with monkeypatch.context() as patch:
        patch.setattr(plans[0].applier, "_make", None)  # a print plans nothing
        assert "?" in str(plans)
    best = plans.best
    fastest = next(step for step in plans if step.applicable)
    assert best == fastest.parallel_plan()
    assert best.estimate is fastest
    assert best.world_size == fastest.plan.devices == 2
    assert f"Predicted: {fastest.in_short()}" in str(best)
    assert stats.parallel_plan(shard=2).estimate is None
    loaded = pickle.loads(pickle.dumps(best))
    assert loaded.estimate.step_seconds == fastest.step_seconds
    assert type(best).from_json(best.to_json()) == best
    none = stats.plan(cluster, 8, micro_batch=[1], recipe=Recipe(gradient_dtype=torch.bfloat16))
    with pytest.raises(
        InputError, match=r"none of the \d+ plans can be applied; search with applicable=True; the fast"
    ):
        _ = none.best


def test_plans_cast_parameters_as_their_recipe_says():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).bfloat16()
    model[0].requires_grad_(False)
    step = Statistics(model, (1, 64)).simulate(Plan(), Cluster("A100"), 8, recipe=Recipe(precision=torch.float16))
    plan = step.parallel_plan()
    assert plan.parameter_dtypes == {"trained": "float32", "frozen": "float16"}
    scope = {}
    exec(step.to_code(), scope)
    assert step.to_code() == plan.to_code()
    assert "Parameters are cast to: float32 (trained), float16 (frozen)" in str(plan)
    data = plan.to_dict()
    assert type(plan).from_json(json.dumps(data)) == plan
    with pytest.raises(
        InputError, match=r"parameter_dtypes\['trained'\] of a plan must be .* floating point dtype, got 'int8'"
    ):
        type(plan).from_json(json.dumps({**data, "parameter_dtypes": {"trained": "int8"}}))


def test_too_few_micro_batches_for_the_engine_are_said():
    step = statistics().simulate(Plan(pipeline=4, micro_batch=4), Cluster("A100"), 8)
    assert "torch runs schedule='1f1b' with as many micro-batches as stages or more, not 2 with pi" in step.obstacle


def test_replicas_become_a_dimension_of_the_mesh():
    stats = Statistics(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), (1, 64))
    step = stats.simulate(Plan(data=2, shard=4), Cluster("A100"), 8)
    assert step.parallel_plan() == stats.parallel_plan(data=2, shard=4, precision=torch.bfloat16)
    assert "data" in step.to_code()


@pytest.mark.skipif(OLD, reason="FSDP of older versions needs data")
def test_a_plan_that_is_applied_reads_its_step_once():
    stats = Statistics(nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4))), (1, 64))
    step = stats.simulate(Plan(shard=2, checkpoint="every"), Cluster("A100"), 8)
    reading = mock.patch("modelsummary.parallel.applied_rank.communication_of", wraps=applied_rank.communication_of)
    with reading as read:
        plan = step.parallel_plan()  # the step runs, to tell whether checkpoints keep it from running
        assert plan.collectives_over("shard")
    assert read.call_count == 1
    assert plan.estimate is step


def test_sequence_parallelism_is_applied_without_stages():
    stats = Statistics(*decoder("decoder"))
    cluster = Cluster("A100", devices_per_node=4)
    step = stats.simulate(Plan(tensor=2, sequence=True), cluster, 4)
    shared = stats.parallel_plan(tensor=2, sequence=True, precision=torch.bfloat16, sharded="gradients")
    assert step.parallel_plan() == replace(shared, parameter_dtypes={"trained": "float32"})  # of float64
    staged = stats.simulate(Plan(tensor=2, sequence=True, pipeline=2), cluster, 4)
    with pytest.raises(InputError, match=r"sequence=True with pipeline=2; search with .*=\[False\]"):
        staged.parallel_plan()
    foreign = stats.simulate(Plan(tensor=2, sequence=True), cluster, 4, recipe=Recipe(sequence="megatron"))
    assert not foreign.applicable
    with pytest.raises(InputError, match=r"does not apply Megatron's layers, .*; pass sequence='torch' to the Recipe"):
        foreign.parallel_plan()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cluster": None}, r"cluster must be a Cluster, such as .* got None"),
        ({"cluster": "H100"}, r"cluster must be a Cluster, such as .* got 'H100'"),
        ({"global_batch": 0}, "global_batch must be an integer >= 1, got 0"),
        ({"tensr": [1]}, "unknown option 'tensr' of plan; expected .*; did you mean 'tensor'"),
        ({"tensor": 2}, r"tensor must be a list of values to try, such as \[1, 2\], got 2"),
        ({"shard": [0]}, r"shard must be a list of integers >= 1 or None, got \[0\]"),
        ({"sharded": [3, True]}, r"sharded must be one of 'optimizer', .*, or None, got True"),
        ({"schedules": ["1f1B"], "pipeline": [1]}, r"schedules must be a list .* 'dualpipev'\), got \['1f1B'\]"),
        ({"sequence": [2], "tensor": [1]}, r"sequence must be a list .*, got \[2\]"),
        ({"expert": [0]}, r"expert must be a list of integers >= 1, got \[0\]"),
        ({"applicable": 1}, "applicable must be True or False, got 1"),
        ({"limit": 0}, "limit must be an integer >= 1, got 0"),
        ({"sequence_length": -1}, "sequence_length must be an integer >= 1, got -1"),
        ({"cluster": Cluster("A100", memory_bytes=10_000)}, "none of .* plans"),
        (
            {"global_batch": 12, "pipeline": [2], "virtual_stages": [2], "schedules": ["interleaved1f1b"]}
            | {"micro_batch": [1], "tensor": [1]},
            "none of the [0-9]+ plans that fit can run its schedule; the fastest: .* needs a multiple of pipeline=2",
        ),
        (
            {"micro_batch": [3]},
            "no plan uses all devices and the batch evenly: tensor x context x pipeline must divide .*; widen",
        ),
    ],
)
def test_bad_arguments(arguments, message):
    given = {"cluster": Cluster("A100"), "global_batch": 8, **arguments}
    with pytest.raises(InputError, match=message):
        statistics().plan(**given)

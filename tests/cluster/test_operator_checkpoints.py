"""Memory plans in plans of a cluster: figures by hand and by torch's checkpoints, and choices against all others."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest
import torch

from modelsummary import InputError, Statistics
from modelsummary.cluster import Cluster, Plan, Recipe, StepModel, StepSimulator
from tests.cluster.models import LAYERS, LENGTH, WIDTH, gpt

BLOCKS = [f"blocks.{number}" for number in range(LAYERS)]
QKV, UP = "aten.addmm.default#0", "aten.addmm.default#2"  # the first and the third product of a block
DOWN = "aten.addmm.default#3"  # dropout reads it, and saves its own mask alone
MIDDLE, OUTPUT = "aten.add.Tensor#0", "aten.add.Tensor#1"  # what the second norm saves, and what the block returns
TOKENS = 8 * LENGTH  # of a micro-batch of 8
QKV_BYTES, UP_BYTES = 2 * TOKENS * 3 * WIDTH, 2 * TOKENS * 4 * WIDTH  # in bfloat16
WIDTH_BYTES = 2 * TOKENS * WIDTH
QKV_FLOPS, UP_FLOPS = 2 * TOKENS * WIDTH * 3 * WIDTH, 2 * TOKENS * WIDTH * 4 * WIDTH


@pytest.fixture(scope="module")
def stats():
    return Statistics(*gpt(fused=True))


def simulator_of(layers=LAYERS, memory_bytes=0, **recipe):
    stats = Statistics(*gpt(layers, fused=True))
    cluster = Cluster("A100", devices_per_node=4, nodes=2, memory_bytes=memory_bytes)
    return StepSimulator(StepModel(stats.live, stats.root, Recipe(**recipe)), cluster, 64, LENGTH)


def with_memory(simulator, memory_bytes):
    """Return a simulator of the same model for devices of another size."""
    cluster = replace(simulator.time_model.cluster, memory_bytes=memory_bytes)
    return StepSimulator(simulator.model, cluster, simulator.global_batch, LENGTH)


def figures(step):
    return step.seconds_by_cause, step.memory, step.hardware_flops


@pytest.mark.parametrize("kernels", ["eager", "fused", "compiled"])
def test_blocks_without_results_are_whole_blocks(kernels):
    simulator = simulator_of(kernels=kernels)
    for pipeline in (1, 2):
        plan = Plan(pipeline=pipeline, micro_batch=8)
        every, named = (simulator.simulate(replace(plan, checkpoint=each)) for each in ("every", BLOCKS))
        assert figures(named) == figures(every)
        count, first = (simulator.simulate(replace(plan, checkpoint=each)) for each in (1, BLOCKS[:: 4 // pipeline]))
        assert figures(first)[:2] == figures(count)[:2]
        assert first.hardware_flops == pytest.approx(count.hardware_flops)


def test_kept_results_by_hand():
    simulator = simulator_of(kernels="eager")
    plan = Plan(micro_batch=8)
    part = simulator.model.parts(plan)["blocks.0"]
    kept = part.keeping([QKV, UP])
    assert kept.result_bytes == QKV_BYTES + UP_BYTES
    assert part.repeated_flops - kept.repeated_flops == QKV_FLOPS + UP_FLOPS
    assert part.operators["again"] - kept.operators["again"] == 2
    assert (kept.works["forward"], kept.works["backward"]) == (part.works["forward"], part.works["backward"])
    whole, keeping = (
        simulator.simulate(replace(plan, checkpoint=dict.fromkeys(BLOCKS, names))) for names in ([], [QKV, UP])
    )
    saved = keeping.memory[0].activations - whole.memory[0].activations
    assert saved == LAYERS * (QKV_BYTES + UP_BYTES)
    assert whole.memory[0].recomputed - keeping.memory[0].recomputed == QKV_BYTES + UP_BYTES
    assert whole.hardware_flops - keeping.hardware_flops == 8 * LAYERS * (QKV_FLOPS + UP_FLOPS)  # 8 micro-batches
    # torch asks for each operator of a block, views too, forward and again; an H100's host needs so long for that
    assert kept.asked == {
        "forward": len(part.results),
        "again": sum(bool(r.operator) for r in part.results.values()) - 2,
    }
    assert keeping.seconds_by_cause["host"] > whole.seconds_by_cause["host"]


@pytest.mark.parametrize(
    ("name", "kept_bytes", "saved_bytes"),
    [(DOWN, WIDTH_BYTES, 0), (MIDDLE, WIDTH_BYTES, WIDTH_BYTES), (OUTPUT, 0, 0)],
)
def test_what_keeping_a_result_adds(name, kept_bytes, saved_bytes):
    """The step without checkpoints does not save the result of ``down``; the next block keeps what a block returns."""
    simulator = simulator_of(kernels="eager")
    whole, keeping = (
        simulator.simulate(Plan(micro_batch=8, checkpoint=dict.fromkeys(BLOCKS, names))).memory[0]
        for names in ([], [name])
    )
    assert keeping.activations - whole.activations == LAYERS * kept_bytes
    assert whole.recomputed - keeping.recomputed == saved_bytes


def test_what_a_stage_sends_is_kept_if_a_checkpoint_keeps_it():
    """The next block is on another rank: its input does not hold what the last block of the stage returns."""
    simulator = simulator_of(kernels="eager")
    plan = Plan(micro_batch=8, pipeline=2, schedule="gpipe")
    whole, keeping = (
        simulator.simulate(replace(plan, checkpoint=dict.fromkeys(BLOCKS, names))).memory for names in ([], [OUTPUT])
    )
    added = [memory.activations - before.activations for memory, before in zip(keeping, whole, strict=True)]
    assert added == [8 * WIDTH_BYTES, 0]  # of 8 micro-batches in flight; the head of the last stage reads its input


@pytest.mark.parametrize("names", [[QKV, UP], [DOWN], [MIDDLE, OUTPUT]])
def test_kept_results_as_torch_keeps_them(names):
    """``memory`` runs torch's selective checkpoints on shapes; the batch and the dtype are the ones of the plan."""
    model, ids = gpt(fused=True)
    batch = Statistics(model.to(torch.bfloat16), ids.expand(8, LENGTH).contiguous())
    whole, keeping = (
        batch.memory(device="cuda", block_bytes=1, checkpoint=dict.fromkeys(BLOCKS, kept)) for kept in ([], names)
    )
    simulator = simulator_of(kernels="eager")
    steps = [simulator.simulate(Plan(micro_batch=8, checkpoint=dict.fromkeys(BLOCKS, kept))) for kept in ([], names)]
    assert keeping.held_after_forward - whole.held_after_forward == (
        steps[1].memory[0].activations - steps[0].memory[0].activations
    )
    flops = steps[0].hardware_flops - steps[1].hardware_flops
    assert 2 * (whole.recomputed_macs - keeping.recomputed_macs) * 8 == flops


@pytest.mark.parametrize(
    ("kernels", "plan"),
    [
        ("compiled", Plan(micro_batch=8)),
        ("compiled", Plan(shard=4, pipeline=2, micro_batch=4)),
        ("eager", Plan(shard=4, micro_batch=4)),
    ],
)
def test_no_other_choice_that_fits_is_faster(kernels, plan):
    free = simulator_of(2, kernels=kernels)
    most, least = (free.memory_bytes(replace(plan, checkpoint=each)) for each in (None, "every"))
    tight = with_memory(free, least)
    tight.resolved(replace(plan, checkpoint="operator"))
    ways = tight._operator_checkpoints[plan.rank_key]._results["blocks.0"]
    assert len(ways) > (1 if kernels == "compiled" else 0)
    steps = []
    for chosen in product([None, *ways], repeat=2):
        checkpoint = {fqn: names for fqn, names in zip(BLOCKS, chosen, strict=False) if names is not None}
        steps.append(free.simulate(replace(plan, checkpoint=checkpoint)))
    for share in (0.0, 0.1, 0.35, 0.8):
        budget = int(least + share * (most - least))
        step = with_memory(free, budget).simulate(replace(plan, checkpoint="operator"))
        assert step.memory_bytes <= budget
        fastest = min(other.step_seconds for other in steps if other.memory_bytes <= budget)
        assert step.step_seconds == pytest.approx(fastest, rel=1e-6)
        assert figures(free.simulate(step.plan)) == figures(step)


def test_what_fits_runs_without_checkpoints_and_what_cannot_saves_all():
    simulator = simulator_of()
    plan = Plan(micro_batch=8, checkpoint="operator")
    assert simulator.simulate(plan).plan == replace(plan, checkpoint=None)
    step = with_memory(simulator, 10**5).simulate(plan)
    assert not step.fits
    assert figures(step) == figures(simulator.simulate(replace(plan, checkpoint="every")))


def test_ranks_of_tensor_parallelism_keep_what_they_communicate():
    simulator = simulator_of()
    plan = Plan(tensor=2, micro_batch=8)
    most, least = (simulator.memory_bytes(replace(plan, checkpoint=each)) for each in (None, "every"))
    step = with_memory(simulator, least + (most - least) // 2).simulate(replace(plan, checkpoint="operator"))
    assert step.fits
    assert any("all_reduce" in name for _, names in step.plan.checkpoint for name in names)
    every = simulator.simulate(replace(plan, checkpoint="every"))
    assert step.seconds_by_cause["tensor"] < every.seconds_by_cause["tensor"]
    assert step.step_seconds < every.step_seconds


def test_a_plan_that_keeps_what_ranks_communicate_is_applied(stats):
    kept = dict.fromkeys(BLOCKS, ("_c10d_functional.all_reduce.default#0", "_c10d_functional.all_reduce.default#1"))
    step = stats.simulate(Plan(tensor=2, micro_batch=8, checkpoint=kept), Cluster("A100", devices_per_node=4), 64)
    assert step.obstacle == ""
    assert step.parallel_plan().kept == kept
    with pytest.raises(InputError, match=r"which calls _c10d_functional\.all_reduce\.default 0 times"):
        stats.parallel_plan(checkpoint=kept)


def test_the_search_finds_plans_of_operators(stats):
    full, lean = (
        stats.simulate(Plan(shard=4, micro_batch=8, checkpoint=each), Cluster("A100", devices_per_node=4), 64)
        for each in (None, "every")
    )
    cluster = Cluster("A100", devices_per_node=4, memory_bytes=(full.memory_bytes + lean.memory_bytes) // 2)
    space = {"tensor": [1], "pipeline": [1], "micro_batch": [8], "sharded": ["parameters"]}
    plans = stats.plan(cluster, 64, **space, checkpoint=[None, "every", "operator"])
    fastest = plans[0]
    assert [step.plan.checkpoint == "every" for step in plans] == [False, True]
    assert lean.memory_bytes < fastest.memory_bytes <= cluster.memory_bytes
    assert fastest.step_seconds < lean.step_seconds
    assert " blocks keeping " in fastest.plan.describe()
    assert " blocks keeping " in str(plans)
    json.dumps(plans.to_records())
    applied = fastest.parallel_plan()
    assert {fqn: applied.kept.get(fqn, ()) for fqn in applied.checkpoint} == dict(fastest.plan.checkpoint)


def test_memory_plans_are_values(stats):
    model, ids = gpt(fused=True)
    batch = Statistics(model.to(torch.bfloat16), ids.expand(8, LENGTH).contiguous())
    step = {"device": "cuda", "workspaces": False}
    plain, every = (batch.memory(**step, checkpoint=each).peak for each in (None, "every"))
    made = batch.memory_plan((plain + every) // 2, **step, by="macs")
    assert made.kept
    plan = Plan(micro_batch=8, checkpoint=made)
    assert plan == Plan(micro_batch=8, checkpoint=made.checkpoint)
    assert dict(plan.checkpoint) == made.checkpoint
    none, every, step = (
        stats.simulate(each, Cluster("A100"), 64)
        for each in (Plan(micro_batch=8), Plan(micro_batch=8, checkpoint="every"), plan)
    )
    assert every.memory_bytes < step.memory_bytes < none.memory_bytes
    with pytest.raises(InputError, match="a Plan moves no saved tensors to the host, as the memory plan"):
        Plan(checkpoint=replace(made, offload={"blocks.0": (1,)}))


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        (
            ["blocks"],
            "checkpoint names 'blocks', but a Plan costs checkpoints around the model's blocks, which are",
        ),
        ({"blocks.0": ["aten.mm.default#7"]}, "checkpoint keeps 'aten.mm.default#7', which no operator of the block"),
        ({"blocks.0": ["mm"]}, "checkpoint keeps 'mm' in 'blocks.0', which names no operator of torch"),
    ],
)
def test_names_that_a_rank_lacks(stats, checkpoint, message):
    with pytest.raises(InputError, match=message):
        stats.simulate(Plan(checkpoint=checkpoint), Cluster("A100"), 64)
    with pytest.raises(InputError, match="parallel_plan does not apply checkpoint='operator'; pass 'every', a number"):
        stats.parallel_plan(checkpoint="operator")

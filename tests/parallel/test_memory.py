"""The memory of a rank, with stages: beside micro-batches that really run, and beside ``simulate``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modelsummary import InputError, Statistics
from modelsummary.cluster import Cluster, Plan, Recipe
from modelsummary.parallel import ParallelPlan
from modelsummary.parallel.fake_world import fake_world
from tests import idioms
from tests.parallel.models import Decoder
from tests.real_memory import allocated

ACTIVATION = 3 * 10 * 16 * 4  # 3 x 10 tokens of 16 features in float32


@pytest.fixture(scope="module")
def statistics() -> Statistics:
    torch.manual_seed(0)
    return Statistics(Decoder(depth=4), idioms.ids())


@pytest.fixture(scope="module")
def plan(statistics: Statistics) -> ParallelPlan:
    return statistics.parallel_plan(pipeline=2)


def order(microbatches: int, in_flight: int) -> str:
    """Forwards and backwards of one stage under 1F1B."""
    return "F" * in_flight + "BF" * (microbatches - in_flight) + "B" * in_flight


@pytest.mark.parametrize(("rank", "microbatches"), [(0, 6), (1, 6), (0, 2)])
def test_a_stage_holds_what_micro_batches_really_hold(plan, rank, microbatches):
    stage = plan._stages[rank]
    inputs = [idioms.ids() if rank == 0 else torch.randn(3, 10, 16, requires_grad=True) for _ in range(microbatches)]
    gradient = None if rank else torch.ones(3, 10, 16)
    optimizer = torch.optim.AdamW(stage.parameters())
    fullest = min(microbatches, 2 - rank)

    def step():
        given, results, taken, outs = iter(inputs), [], [], []
        for place, kind in enumerate(order(microbatches, fullest)):
            if place == fullest:
                with torch.profiler.record_function("## forward"):
                    pass
            if kind == "F":
                taken.append(next(given))
                outs.append(stage(taken[-1]))
                results.append(outs[-1] if rank == 0 else outs[-1].sum())
            else:
                torch.autograd.backward(results.pop(0), gradient)
                taken.pop(0).grad = None
                outs.pop(0)
        optimizer.step()

    step()
    optimizer.zero_grad()
    held, peak = allocated(step)
    guess = plan.memory(rank, microbatches=microbatches, optimizer="adamw")
    before = guess.params + guess.buffers + guess.inputs + guess.optimizer_state
    assert guess.held_after_forward == held["forward"] + before
    assert guess.peak == pytest.approx(peak + before, rel=0.03)
    for each in stage.parameters():
        each.grad = None


def test_the_schedule_says_how_many_are_in_flight(plan):
    # Buffers: what a stage receives, forward and backward, of each micro-batch. Stage 0 has the tokens (int64), too.
    first = [plan.memory(0, microbatches=8, schedule=each) for each in ("1f1b", "gpipe")]
    assert [each.activations % first[0].activations for each in first] == [0, 0]
    assert first[1].activations == 8 // 2 * first[0].activations
    assert first[0].inputs == 8 * (3 * 10 * 8 + ACTIVATION)
    assert plan.memory(1, microbatches=8).inputs == 8 * ACTIVATION
    assert first[0].params == first[0].grads == 4 * sum(each.numel() for each in plan._stages[0].parameters())
    assert first[0].peak > first[0].held_after_forward


def test_simulate_gives_the_same_account():
    # Without dropout and RMSNorm, whose kernels on a GPU, which simulate assumes, keep other tensors.
    statistics = Statistics(idioms.Gpt2(depth=4).eval(), idioms.ids())
    plan = statistics.parallel_plan(pipeline=2)
    recipe = Recipe(dtype=None, gradient_dtype=None, optimizer="adamw", master_weights=False, kernels="eager")
    step = statistics.simulate(Plan(pipeline=2, micro_batch=3), Cluster("A100"), global_batch=18, recipe=recipe)
    for rank, theirs in enumerate(step.memory):
        ours = plan.memory(rank, microbatches=6, optimizer="adamw")
        n_parameters = len(list(plan._stages[rank].parameters()))
        assert (ours.params, ours.grads) == (theirs.parameters, theirs.gradients)
        assert ours.optimizer_state == theirs.optimizer + 4 * n_parameters  # each has a number of steps
        # Torch's engine keeps what stage 0 sent of two micro-batches; what stage 1 takes is among its inputs.
        assert ours.activations == theirs.activations + (2 * ACTIVATION, -ACTIVATION)[rank]
    ours = statistics.parallel_plan(tensor=2).memory(0, optimizer="adamw")
    (theirs,) = statistics.simulate(
        Plan(tensor=2, micro_batch=3), Cluster("A100"), global_batch=3, recipe=recipe
    ).memory
    assert (ours.params, ours.grads) == (theirs.parameters, theirs.gradients)
    assert 0 <= ours.activations - theirs.activations <= 8 * 4  # numbers that autograd keeps


@pytest.mark.parametrize("options", [{"tensor": 2}, {"tensor": 2, "shard": 2}, {"data": 2}])
def test_stages_are_sharded_like_the_model(statistics, options):
    plan = statistics.parallel_plan(pipeline=2, **options)
    whole = statistics.parallel_plan(**options)
    stages = [plan.memory(rank * whole.world_size, microbatches=3, optimizer="sgd-momentum") for rank in range(2)]
    assert sum(each.params for each in stages) == whole.memory().params
    assert all(each.params == each.optimizer_state for each in stages)


def test_ranks_are_asked_one_after_the_other(statistics):
    plan = statistics.parallel_plan(tensor=2, shard=2)  # each rank has process groups of other names
    assert plan.memory(0).peak == plan.memory(3).peak


def test_a_model_that_fsdp_has_sharded_already():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def model() -> nn.Sequential:
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(2)))

    plan = Statistics(model(), (16, 8)).parallel_plan(shard=4).memory(1, optimizer="adamw")
    with fake_world(1, 4):
        sharded = model()
        mesh = init_device_mesh("cpu", (4,))
        for each in (*sharded, sharded):
            fully_shard(each, mesh=mesh)
        own = Statistics(sharded, (16, 8)).memory(optimizer="adamw")
    assert own.execution == "real"
    names = ("params", "grads", "optimizer_state", "activations", "held_after_forward", "peak")
    assert [getattr(own, name) for name in names] == [getattr(plan, name) for name in names]


def test_refusals(plan, statistics):
    with pytest.raises(InputError, match="microbatches=0; expected an integer >= 1"):
        plan.memory(microbatches=0)
    with pytest.raises(InputError, match="schedule='zb'; expected '1f1b' or 'gpipe'"):
        plan.memory(schedule="zb")
    with pytest.raises(InputError, match="microbatches=2 needs a plan with stages"):
        statistics.parallel_plan(shard=2).memory(microbatches=2)
    with pytest.raises(InputError, match="rank=2; expected an integer from 0 to 1"):
        plan.memory(2)

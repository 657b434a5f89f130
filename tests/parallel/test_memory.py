"""The memory of a rank, with stages: beside micro-batches that really run, and beside ``simulate``."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from modelsummary import InputError, Statistics
from modelsummary.capture.backward_halves import backward_of_inputs, backward_of_weights
from modelsummary.cluster import Cluster, Plan, Recipe
from modelsummary.memory.estimate import CATEGORIES
from modelsummary.parallel import ParallelPlan
from modelsummary.parallel.applied_rank import fake_world
from tests import idioms
from tests.parallel.models import OLD, Decoder, make
from tests.real_memory import allocated
from tests.untouched import untouched

ACTIVATION = 3 * 10 * 16 * 4  # 3 x 10 tokens of 16 features in float32
needs_fsdp = pytest.mark.skipif(OLD, reason="FSDP runs without data since torch 2.10")
PLAIN = Recipe(precision=None, gradient_dtype=None, optimizer="adamw", master_weights=False, kernels="eager")


@pytest.fixture(scope="module")
def statistics() -> Statistics:
    torch.manual_seed(0)
    return Statistics(Decoder(), idioms.ids())


@pytest.fixture(scope="module")
def plan(statistics: Statistics) -> ParallelPlan:
    return statistics.parallel_plan(pipeline=2)


def order(microbatches: int, in_flight: int) -> str:
    """Forwards and backwards of one stage under 1F1B."""
    return "F" * in_flight + "BF" * (microbatches - in_flight) + "B" * in_flight


# ZB-H1 on the second of two stages: gradients of weights are computed one micro-batch later.
@pytest.mark.parametrize(
    ("schedule", "rank", "actions"),
    [
        ("1f1b", 0, order(6, 2)),
        ("1f1b", 1, order(6, 1)),
        ("1f1b", 0, order(2, 2)),
        ("zb", 1, "FIF" + "IWF" * 3 + "IWW"),
    ],
)
def test_a_stage_holds_what_micro_batches_really_hold(plan, schedule, rank, actions):
    stage, microbatches = plan._stages[rank], actions.count("F")
    inputs = [idioms.ids() if rank == 0 else torch.randn(3, 10, 16, requires_grad=True) for _ in range(microbatches)]
    gradient = None if rank else torch.ones(3, 10, 16)
    optimizer = torch.optim.AdamW(stage.parameters())
    fullest = next(place for place, kind in enumerate(actions) if kind in "BI")

    def step():
        given, results, taken, outs, halves, sent = iter(inputs), [], [], [], [], []
        for place, kind in enumerate(actions):
            if place == fullest:
                with torch.profiler.record_function("## forward"):
                    pass
            if kind == "F":
                taken.append(next(given))
                outs.append(stage(taken[-1]))
                results.append(outs[-1] if rank == 0 else outs[-1].sum())
            elif kind == "W":
                backward_of_weights(halves.pop(0)[1])
            else:
                out, result, own = outs.pop(0), results.pop(0), taken.pop(0)
                if kind == "B":
                    torch.autograd.backward(result, gradient)
                else:
                    (own.grad,), later = backward_of_inputs([result], None, [own], list(stage.parameters()))
                    halves.append(((out, result), later))
                if schedule != "1f1b":  # torch's engine keeps what it sent until the end of the step
                    sent.append(own.grad)
                own.grad = None
                del out, result
        optimizer.step()

    step()
    optimizer.zero_grad()
    held, peak = allocated(step)
    guess = plan.memory(rank, microbatches=microbatches, schedule=schedule, optimizer="adamw")
    before = guess.params + guess.buffers + guess.inputs + guess.optimizer_state
    assert guess.held_after_forward == held["forward"] + before
    assert guess.peak == pytest.approx(peak + before, rel=0.03)
    for each in stage.parameters():
        each.grad = None


def test_two_stages_on_a_rank(plan):
    found = plan.memory(1, microbatches=4, schedule="zbv", optimizer="adamw")  # rank 1 has the two in the middle
    stages = plan._split(4)
    assert found.params == sum(4 * each.numel() for number in (1, 2) for each in stages[number].parameters())
    # Both have buffers for what they receive, forward and backward, of each micro-batch.
    assert found.inputs == 2 * 2 * 4 * ACTIVATION
    assert found.peak > found.held_after_forward > found.params + found.optimizer_state + found.activations
    assert {each.phase for each in found.timeline} == {"forward", "backward", "step"}


def test_returned_results_are_kept(plan):
    # A micro-batch's logits, and all of them joined, are kept at the end.
    returned = plan.memory(1, microbatches=4, return_outputs=True)
    assert returned.peak >= plan.memory(1, microbatches=4).peak + 3 * 3 * 10 * 48 * 4


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(8, 2), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        chosen = self.router(x).argmax(-1)
        parts = [expert(x[chosen == index]) for index, expert in enumerate(self.experts)]
        return torch.cat(parts)


@needs_fsdp
def test_choices_of_experts_fall_on_all_in_turn():
    memory = Statistics(Routed(), torch.rand(6, 8)).parallel_plan(shard=2).memory()
    assert "choices are assumed to fall on all experts in turn" in str(memory)
    # kept: the rows of each expert (3 x 8) and which rows these are (3 x int64), besides the input
    assert memory.inputs == 6 * 8 * 4


@needs_fsdp
def test_a_forward_that_needs_values_is_refused():
    class Decides(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            y = self.linear(x)
            return y if y.sum() > 0 else -y

    plan = Statistics(Decides(), torch.rand(6, 8)).parallel_plan(shard=2)
    with pytest.raises(InputError, match="needs the values of a tensor in the forward of Decides"):
        plan.memory()


def test_the_schedule_says_how_many_are_in_flight(plan):
    # Buffers: what a stage receives, forward and backward, of each micro-batch. Stage 0 has the tokens (int64), too.
    first = [plan.memory(0, microbatches=8, schedule=each) for each in ("1f1b", "gpipe")]
    assert [each.activations % first[0].activations for each in first] == [0, 0]
    assert first[1].activations == 8 // 2 * first[0].activations
    assert first[0].inputs == 8 * (3 * 10 * 8 + ACTIVATION)
    assert plan.memory(1, microbatches=8).inputs == 8 * ACTIVATION
    assert first[0].params == first[0].grads == 4 * sum(each.numel() for each in plan._stages[0].parameters())
    assert first[0].peak > first[0].held_after_forward


def check_same_account(
    model: nn.Module, inputs: torch.Tensor, crossing: int, numbers: int, *schedules: str
) -> Statistics:
    """Compare both accounts of a model in two stages.

    Torch's engine keeps what stage 0 sent of each micro-batch in flight, ``crossing`` bytes; what stage 1 takes is
    among its inputs, which ``simulate`` counts among the activations. Autograd keeps ``numbers`` bytes of Python
    numbers, which ``simulate`` leaves out.
    """
    statistics = Statistics(model, inputs)
    plan = statistics.parallel_plan(pipeline=2)
    samples = len(inputs)
    for schedule in schedules:
        in_flight = {"1f1b": (2, 1), "gpipe": (6, 6)}[schedule]
        whole = Plan(pipeline=2, micro_batch=samples, schedule=schedule)
        step = statistics.simulate(whole, Cluster("A100"), global_batch=6 * samples, recipe=PLAIN)
        for rank, (theirs, _) in enumerate(step.moments):
            ours = plan.memory(rank, microbatches=6, schedule=schedule, optimizer="adamw")
            n_parameters = len(list(plan._stages[rank].parameters()))
            assert (ours.params, ours.grads) == (theirs.parameters, theirs.gradients)
            assert ours.optimizer_state == theirs.optimizer + 4 * n_parameters  # each has a number of steps
            more = ours.activations - theirs.activations
            assert more == in_flight[rank] * (numbers + (crossing - inputs.nbytes, -crossing)[rank])
    return statistics


def test_simulate_gives_the_same_account():
    # Without dropout and RMSNorm, whose kernels on a GPU, which simulate assumes, keep other tensors.
    statistics = check_same_account(idioms.Gpt2(depth=2).eval(), idioms.ids(), ACTIVATION, 8, "1f1b")
    ours = statistics.parallel_plan(tensor=2).memory(0, optimizer="adamw")
    step = statistics.simulate(Plan(tensor=2, micro_batch=3), Cluster("A100"), global_batch=3, recipe=PLAIN)
    ((theirs, updating),) = step.moments
    assert (ours.params, ours.grads) == (theirs.parameters, updating.gradients)
    assert 0 <= ours.activations + ours.inputs - theirs.activations <= 8 * 4  # numbers that autograd keeps


def test_simulate_gives_the_same_account_of_an_mlp():
    blocks = (nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 24)) for _ in "12")
    check_same_account(nn.Sequential(*blocks), torch.rand(5, 24), 5 * 24 * 4, 0, "1f1b", "gpipe")


@needs_fsdp
def test_the_optimizer_of_a_rank_updates_all_tensors_at_once(statistics):
    """As torch does by default, also with DTensors, which torch/distributed/tensor/__init__.py adds to its list."""
    options = {"optimizer": "adamw", "device": "cuda", "block_bytes": 1, "workspaces": False}
    memory = statistics.parallel_plan(shard=2).memory(0, **options)
    temporary = [dict(zip(CATEGORIES, point.held, strict=True))["temporary"] for point in memory.timeline]
    steps = [number for number, point in enumerate(memory.timeline) if point.phase == "step"]
    roots = max(temporary[number] for number in steps) - temporary[steps[0]]
    assert memory.grads * 0.98 < roots < memory.grads * 1.02


@needs_fsdp  # nor has torch 2.6 the gradient of an embedding that is sharded by rows
@pytest.mark.parametrize("options", [{"tensor": 2}, {"tensor": 2, "shard": 2}, {"data": 2}])
def test_stages_are_sharded_like_the_model(statistics, options):
    plan = statistics.parallel_plan(pipeline=2, **options)
    whole = statistics.parallel_plan(**options)
    stages = [plan.memory(rank * whole.world_size, microbatches=3, optimizer="sgd-momentum") for rank in range(2)]
    assert sum(each.params for each in stages) == whole.memory().params
    assert all(each.params == each.optimizer_state for each in stages)


@needs_fsdp
def test_ranks_are_asked_one_after_the_other(statistics):
    plan = statistics.parallel_plan(tensor=2, shard=2)  # each rank has process groups of other names
    assert plan.memory(0).peak == plan.memory(3).peak


def fully_sharded(size: int, device: str = "cpu", **options) -> nn.Module:
    """A model on the ranks of FSDP: its halves are units. Call it in a process group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with torch.device(device):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(2)))
    mesh = init_device_mesh("cpu", (size,))
    for each in (*model, model):
        fully_shard(each, mesh=mesh, **options)
    return model


@needs_fsdp
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_that_fsdp_has_sharded_already(device):
    report_error = sys.excepthook  # which a process group replaces
    with fake_world(1, 4):
        found = Statistics(fully_sharded(4, device), (16, 8)).memory(optimizer="adamw")
    assert found.execution == "shape"
    # A rank has a quarter of the rows: 2 x (8 x 8 + 8 + 2 x 32 + 2) elements. AdamW has two states of each, and a step.
    assert (found.params, found.grads, found.optimizer_state) == (1104, 1104, 2 * 1104 + 8 * 4)
    # Kept: the result of each ReLU, and of the first half; parameters are freed after the forward of their unit.
    assert found.activations == (2 * 16 * 32 + 16 * 8) * 4
    # As a real step in the fake process group holds.
    assert (found.held_after_forward, found.peak) == (8980, 18552)
    assert sys.excepthook is report_error


@needs_fsdp
def test_the_memory_of_many_ranks():
    plan = Statistics(nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(2))), (4, 512))
    for size in (2, 64, 512):
        found = plan.parallel_plan(shard=size).memory(size - 1)
        assert found.params == found.grads == 2 * 512 * 512 * 4 // size


@needs_fsdp
def test_a_model_that_fsdp_left_gathered_stays_so():
    x = torch.rand(16, 8)
    with fake_world(1, 4):
        model = fully_sharded(4, reshard_after_forward=False)
        with torch.no_grad():
            expected = model(x)
        with untouched(model):
            found = Statistics(model, (16, 8)).memory()
        with torch.no_grad():
            assert torch.equal(model(x), expected)
    assert found.params == 1104


def test_refusals(plan, statistics):
    with pytest.raises(InputError, match="microbatches=0; expected an integer >= 1"):
        plan.memory(microbatches=0)
    with pytest.raises(InputError, match="schedule must be one of 'gpipe'"):
        plan.memory(schedule="zero")
    with pytest.raises(InputError, match="microbatches=2 needs a plan with stages"):
        statistics.parallel_plan(tensor=2).memory(microbatches=2)
    with pytest.raises(InputError, match="rank=2; expected an integer from 0 to 1"):
        plan.memory(2)


class ReadsGradients(torch.optim.SGD):
    """An optimizer whose step depends on values."""

    def step(self, closure=None):
        if all(p.grad.norm().item() < 1 for group in self.param_groups for p in group["params"]):
            super().step(closure)


def test_what_fsdp_cannot_shard_is_said():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).to(memory_format=torch.channels_last)
    plan = Statistics(model, (2, 3, 8, 8)).parallel_plan(shard=2)
    reason = "Sequential cannot be sharded by this plan; torch says NotImplementedError: FSDP does not support non-con"
    with pytest.raises(InputError, match=reason):
        plan.memory()
    assert reason in " ".join(str(plan).split())


def test_a_stage_whose_optimizer_needs_values():
    plan = Statistics(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), (4, 8)).parallel_plan(pipeline=2)
    with pytest.raises(InputError, match="needs the values of a tensor in the optimizer; pass another one"):
        plan.memory(0, optimizer=ReadsGradients)
    with pytest.raises(InputError, match="needs the values of a tensor in the loss; pass another one"):
        plan.memory(1, loss=lambda output: output.sum() * output.sum().item())


def test_units_whose_experts_depend_on_a_choice():
    model, inputs = make("moe")
    estimate = Statistics(model, inputs).parallel_plan(shard=2).memory(optimizer="adamw")
    assert 2 * estimate.params >= sum(each.numel() * 8 for each in model.parameters())
    assert estimate.optimizer_state >= 2 * estimate.params
    assert any("choices are assumed to fall on all experts in turn" in note for note in estimate.notes)


@needs_fsdp
def test_the_report_names_the_model_and_the_rank():
    plan = Statistics(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), (2, 4)).parallel_plan(shard=2)
    first_line = str(plan.memory(1)).split("\n")[0]
    assert first_line == "Memory of one training step on cpu: Sequential, rank 1 of 2, no optimizer"

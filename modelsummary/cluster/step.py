"""``estimate_step``: the time and memory of a training step under a plan, on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from modelsummary.cluster.estimate import StepEstimate
from modelsummary.cluster.memory import RankMemory, memory_of
from modelsummary.cluster.parts import AFTER, BEFORE, Part
from modelsummary.cluster.pipeline import PipelineTime, StageTime, in_flight, pipeline_time, rank_of
from modelsummary.cluster.plan import Plan
from modelsummary.cluster.stages import Stage, stages_of
from modelsummary.cluster.step_model import Share, StepModel
from modelsummary.cluster.timing import Timer, seconds_of
from modelsummary.errors import InputError

__all__ = ["Prepared", "estimate_step", "prepare"]


@dataclass(frozen=True)
class Prepared:
    """What is known of a plan before its schedule is simulated.

    Attributes:
        plan: the plan.
        microbatches: micro-batches of one copy in a step.
        stages: stages of the pipeline.
        times: their seconds.
        once: seconds after the last backward, of the slowest rank: what gradients wait for, and the optimizer.
        memory: of each rank of the pipeline.
    """

    plan: Plan
    microbatches: int
    stages: Sequence[Stage]
    times: Sequence[StageTime]
    once: tuple[float, float]
    memory: Sequence[RankMemory]

    @property
    def memory_bytes(self) -> int:
        """Bytes of the fullest rank."""
        return max(each.total for each in self.memory)


def prepare(model: StepModel, plan: Plan, timer: Timer, global_batch: int, sequence: int) -> Prepared:
    """Return the stages of a plan with their times and memory.

    Raises:
        InputError: model, plan, batch and cluster do not fit together.
    """
    if plan.devices > timer.cluster.devices:
        raise InputError(
            f"the plan needs {plan.devices} devices ({plan.describe()}), but the cluster has {timer.cluster.devices}"
        )
    if plan.context > 1 and (not sequence or sequence % plan.context):
        raise InputError(f"context={plan.context} does not divide the sequence length {sequence}")
    microbatches = plan.microbatches(global_batch)
    parts = model.parts(Share(plan.tensor, plan.sequence_parallel, plan.context, plan.micro_batch, sequence))
    if plan.context > 1 and not any(each.group == "context" for part in parts.values() for each in part.collectives):
        raise InputError(f"context={plan.context}: no scaled_dot_product_attention of the model can gather its keys")
    stages = stages_of(model, parts, seconds_of(timer, parts, plan, model.recipe), plan)
    times = _stage_times(model, stages, plan, timer)
    ranks: list[list[int]] = [[] for _ in range(plan.pipeline)]
    for number in range(len(stages)):
        ranks[rank_of(number, plan)].append(number)
    once = [_once(model, [stages[each] for each in own], [times[each] for each in own], plan, timer) for own in ranks]
    memory = []
    for rank, own in enumerate(ranks):
        held = in_flight(plan.schedule, plan.pipeline, plan.virtual_stages, microbatches, rank)
        each = max(stages[number].kept_bytes for number in own)
        memory.append(memory_of([stages[number] for number in own], held * each, plan, model.recipe, model.weight_bytes))
    return Prepared(plan, microbatches, stages, times, max(once, key=sum), memory)


def _stage_times(model: StepModel, stages: Sequence[Stage], plan: Plan, timer: Timer) -> list[StageTime]:
    """Return the times of the stages, with what FSDP gathers.

    Under FSDP a stage gathers its parameters in each forward and backward, and reduces its gradients in each backward,
    while it computes; it waits for what takes longer than that, and for the first unit.
    """
    group = timer.groups(plan)["gradients"]
    stride = plan.tensor * plan.context * plan.data
    found = []
    for number, each in enumerate(stages):
        following = stages[number + 1].crossing_bytes if number + 1 < len(stages) else 0
        transfer = timer.network.send(following, stride) if plan.pipeline > 1 else 0.0
        forward, backward = each.forward_seconds, each.backward_seconds
        if plan.zero == 3 and group.size > 1:
            gather = timer.network.seconds("all_gather", model.weight_bytes * each.params, group)
            reduce = timer.network.seconds("reduce_scatter", model.gradient_bytes * each.params, group)
            forward = max(forward, gather) + gather * each.unit_params / max(each.params, 1)
            backward = max(backward, gather + reduce)
        found.append(StageTime(forward, backward / 2, backward / 2, transfer, each.kept_bytes))
    return found


def _once(
    model: StepModel, stages: Sequence[Stage], times: Sequence[StageTime], plan: Plan, timer: Timer
) -> tuple[float, float]:
    """Return the seconds for which a rank waits for its gradients and parameters, and the seconds of its optimizer.

    Gradients of the last micro-batch are reduced while its backward runs; what takes longer is waited for, and at least
    the reduction of one block, which follows the last one. Sharded optimizers gather the parameters during the next
    forward.
    """
    params = sum(each.params for each in stages)
    group = timer.groups(plan)["gradients"]
    reduction = gather = 0.0
    if plan.zero == 0:
        reduction = timer.network.seconds("all_reduce", model.gradient_bytes * params, group)
    elif plan.zero < 3:
        reduction = timer.network.seconds("reduce_scatter", model.gradient_bytes * params, group)
        gather = timer.network.seconds("all_gather", model.weight_bytes * params, group)
    if model.recipe.overlap_gradients:
        units = max(sum(sum(each.counts.values()) for each in stages), 1)
        reduction = max(reduction / units, reduction - sum(each.backward for each in times))
        gather = max(gather / units, gather - sum(each.forward for each in times))
    elements = params / (group.size if plan.zero else 1)
    return reduction + gather, timer.optimizer(elements, model.recipe, model.weight_bytes)


def estimate_step(
    model: StepModel, plan: Plan, timer: Timer, global_batch: int, sequence: int, prepared: Prepared | None = None
) -> StepEstimate:
    """Return the estimate of a step.

    Raises:
        InputError: model, plan, batch and cluster do not fit together.
    """
    ready = prepared or prepare(model, plan, timer, global_batch, sequence)
    pipeline = pipeline_time(ready.times, plan, ready.microbatches)
    return StepEstimate(
        plan=plan,
        cluster=timer.cluster,
        global_batch=global_batch,
        sequence=sequence,
        microbatches=ready.microbatches,
        seconds_by_cause=_causes(ready, pipeline),
        memory=tuple(ready.memory),
        model_flops=_flops(model, plan, sequence, global_batch, again=False),
        hardware_flops=_flops(model, plan, sequence, global_batch, again=True),
        peak_flops=timer.device.spec.peak(model.compute_dtype),
        simulation=pipeline.simulation,
    )


def _causes(ready: Prepared, pipeline: PipelineTime) -> dict[str, float]:
    """Return the seconds of a step by cause, on the rank that is busy for longest."""
    plan, m = ready.plan, ready.microbatches
    rank = max(range(plan.pipeline), key=lambda each: pipeline.busy[each])
    numbers = [number for number in range(len(ready.stages)) if rank_of(number, plan) == rank]
    own = [ready.stages[number] for number in numbers]
    causes = {
        "compute": m * sum(each.forward + each.backward for each in own),
        "recomputation": m * sum(each.recomputation for each in own),
    }
    for group in ("tensor", "context"):
        causes[group] = m * sum(each.waits_forward.get(group, 0.0) + each.waits_backward.get(group, 0.0) for each in own)
    busy = m * sum(ready.times[number].forward + ready.times[number].backward for number in numbers)
    causes["fsdp"] = max(busy - sum(causes.values()), 0.0)
    transfers = any(each.transfer for each in ready.times)
    alone = [replace(each, transfer=0.0) for each in ready.times]
    without = pipeline_time(alone, plan, m).seconds if transfers else pipeline.seconds
    causes["pipeline"] = pipeline.seconds - without
    causes["bubble"] = max(without - busy, 0.0)
    causes["gradients"], causes["optimizer"] = ready.once
    return causes


def _flops(model: StepModel, plan: Plan, sequence: int, global_batch: int, *, again: bool) -> float:
    """Return the floating point operations of products in a step; with what is recomputed if ``again``.

    A product of the forward has two in the backward. Attention counts densely.
    """
    parts = model.parts(Share(1, False, 1, plan.micro_batch, sequence))
    blocks = sum(count * parts[kind].flops for kind, count in model.counts.items())
    forward = blocks + parts[BEFORE].flops + parts[AFTER].flops
    repeated = 0.0
    if again and plan.recompute == "full":
        repeated = blocks
    elif again and plan.recompute == "selective":
        repeated = sum(count * _core_flops(parts[kind]) for kind, count in model.counts.items())
    elif again and isinstance(plan.recompute, int):
        repeated = blocks * min(1.0, plan.recompute * plan.stages / max(len(model.blocks), 1))
    return (3 * forward + repeated) * global_batch / plan.micro_batch


def _core_flops(part: Part) -> int:
    return sum(times * work.flops for work, times in part.works["core"])

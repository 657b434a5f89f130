"""Seconds of the stages of a pipeline, and of what each rank does once per step."""

from __future__ import annotations

from collections.abc import Sequence

from modelsummary.cluster.collectives import RankGroup
from modelsummary.cluster.memory import gathered_params, sharded_params
from modelsummary.cluster.pipeline import StageTime, rank_of
from modelsummary.cluster.plan import Plan
from modelsummary.cluster.simulated_stages import SimulatedStage
from modelsummary.cluster.step_model import StepModel
from modelsummary.cluster.timing import TimeModel

__all__ = ["StageTimer", "by_rank"]


class StageTimer:
    """Times what stages compute, communicate and wait for.

    Args:
        model: the model.
        time_model: the time models of devices and network.
    """

    def __init__(self, model: StepModel, time_model: TimeModel) -> None:
        self._model, self._time_model = model, time_model

    def stage_times(
        self, stages: Sequence[SimulatedStage], plan: Plan, microbatches: int
    ) -> tuple[list[StageTime], list[float]]:
        """Return the times of the stages, and within them the seconds of adding gradients up.

        Under FSDP a stage gathers its parameters in each forward and backward, and reduces its gradients in each
        backward, one collective per block; replicas then reduce their shard. If this overlaps with computing, it waits
        for what takes longer than that, and for the first unit. The tensors of a unit are copied out of what was
        gathered, and their gradients into what is reduced, by kernels that run between the layers
        (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
        """
        time_model, model = self._time_model, self._model
        groups = time_model.groups(plan)
        group = groups["shards"]
        sharded = plan.zero == 3 and max(plan.copies, plan.expert_copies if plan.expert > 1 else 1) > 1
        known: dict[tuple[int, int], tuple[StageTime, float]] = {}
        found = []
        for number, each in enumerate(stages):
            following = stages[number + 1].crossing_bytes if number + 1 < len(stages) else 0
            key = id(each), following
            if key not in known:
                forward, params, experts = each.forward_seconds, each.params, each.expert_params
                held = sharded_params(params, experts, plan) if sharded else params
                adding = time_model.accumulation(held, model.recipe, model.weight_bytes) if microbatches > 1 else 0.0
                backward = each.backward_seconds + adding
                if sharded:
                    units = max(sum(each.counts.values()), 1)
                    gather = time_model.over_copies("all_gather", params, experts, model.weight_bytes, plan, units)
                    reduce = time_model.over_copies(
                        "reduce_scatter", params, experts, model.gradient_bytes, plan, units
                    )
                    between = time_model.between_replicas(params, model.gradient_bytes, plan, units)
                    moved = gathered_params(params, experts, plan)
                    out = time_model.copies(moved, 2 * model.weight_bytes)
                    into = time_model.copies(moved, model.weight_bytes + model.gradient_bytes)
                    forward, backward = forward + out, backward + out + into
                    if model.recipe.overlap_gradients:
                        first = gather * each.unit_params / max(params, 1)
                        forward = time_model.overlapped(forward, gather, group) + first
                        replicas = between, groups["replicas"]
                        backward = time_model.overlapped(backward, gather + reduce, group, replicas)
                    else:
                        forward, backward = forward + gather, backward + gather + reduce + between
                transfer = self._transfer(following, plan) if plan.pipeline > 1 else 0.0
                known[key] = StageTime(forward, backward / 2, backward / 2, transfer, each.kept_bytes), adding
            found.append(known[key])
        return [time for time, _ in found], [adding for _, adding in found]

    def _transfer(self, nbytes: int, plan: Plan) -> float:
        """Return the seconds of sending a result to the next stage."""
        stride = plan.tensor * plan.context * plan.data
        if not self._model.recipe.share_messages or plan.sequence_parallel or plan.tensor == 1:
            return self._time_model.network.send(nbytes, stride)
        gather = self._time_model.network.seconds("all_gather", nbytes, self._time_model.groups(plan)["tensor"])
        return self._time_model.network.send(nbytes / plan.tensor, stride) + gather

    def slowest_once(
        self, stages: Sequence[SimulatedStage], times: Sequence[StageTime], plan: Plan
    ) -> tuple[float, float]:
        """Return what the slowest rank takes after its last backward: for its gradients, and for its optimizer."""
        ranks = zip(by_rank(stages, plan), by_rank(times, plan), strict=True)
        distinct = {tuple(map(id, own)): (own, seconds) for own, seconds in ranks}
        return max((self._once_on(own, seconds, plan) for own, seconds in distinct.values()), key=sum)

    def _once_on(self, stages: Sequence[SimulatedStage], times: Sequence[StageTime], plan: Plan) -> tuple[float, float]:
        """Return the seconds for which a rank waits for its gradients and parameters, and the seconds of its optimizer.

        Gradients of the last micro-batch are reduced while its backward runs; what takes longer is waited for, and at
        least the reduction of one block, which follows the last one. Sharded optimizers gather the parameters during
        the next forward. The first and the last stage add the gradients of weights that they share.
        """
        time_model, model = self._time_model, self._model
        params, experts = sum(each.params for each in stages), sum(each.expert_params for each in stages)
        groups = time_model.groups(plan)
        group = groups["shards" if plan.zero else "gradients"]
        reduction = gather = between = 0.0
        if plan.zero == 0:
            reduction = time_model.over_copies("all_reduce", params, experts, model.gradient_bytes, plan)
        elif plan.zero < 3:
            reduction = time_model.over_copies("reduce_scatter", params, experts, model.gradient_bytes, plan)
            between = time_model.between_replicas(params, model.gradient_bytes, plan)
            gather = time_model.over_copies("all_gather", params, experts, model.weight_bytes, plan)
        if model.recipe.overlap_gradients:
            units = max(sum(sum(each.counts.values()) for each in stages), 1)

            def lost(computing: float, *streams: tuple[float, RankGroup]) -> float:
                """Return the seconds that the rank waits, or that its kernels lose meanwhile."""
                communicating = sum(seconds for seconds, _ in streams)
                taken = sum(time_model.network.units_taken(each) * seconds for seconds, each in streams)
                waited = max(communicating / units, communicating - computing)
                return waited + (taken * (1 - waited / communicating) if communicating else 0.0)

            reduction = lost(sum(each.backward for each in times), (reduction, group), (between, groups["replicas"]))
            gather = lost(sum(each.forward for each in times), (gather, group))
        else:
            reduction += between
        tied = [each.tied_params for each in stages if each.tied_params]
        if len(tied) == 1:  # another rank has the other end
            ends = time_model.network.group(2, (plan.pipeline - 1) * plan.devices // plan.pipeline)
            reduction += time_model.network.seconds("all_reduce", model.gradient_bytes * tied[0], ends)
        held = sharded_params(params, experts, plan) if plan.zero else params
        return reduction + gather, time_model.optimizer(held, model.recipe, model.weight_bytes)


def by_rank(values: Sequence[object], plan: Plan) -> list[list]:  # type: ignore[type-arg]
    """Return the values of the stages of each rank of the pipeline."""
    ranks: list[list[object]] = [[] for _ in range(plan.pipeline)]
    for number, each in enumerate(values):
        ranks[rank_of(number, plan)].append(each)
    return ranks

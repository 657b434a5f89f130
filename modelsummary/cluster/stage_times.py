"""Seconds of the stages of a pipeline, and of what each rank does once per step."""

from __future__ import annotations

from collections.abc import Sequence

from modelsummary.cluster.collectives import RankGroup
from modelsummary.cluster.memory import gathered, sharded
from modelsummary.cluster.pipeline import StageTime, rank_of
from modelsummary.cluster.plan import Plan
from modelsummary.cluster.simulated_stages import SimulatedStage
from modelsummary.cluster.step_model import StepModel
from modelsummary.cluster.timing import TimeModel
from modelsummary.cluster.weights import FsdpUnit, Weights

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
        backward, one collective per unit; replicas then reduce their shard. If this overlaps with computing, it waits
        for what takes longer than that, and for the first unit. The tensors of a unit are copied out of what was
        gathered, and their gradients into what is reduced, by kernels that run between the layers
        (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
        """
        time_model, recipe = self._time_model, self._model.recipe
        groups = time_model.groups(plan)
        group = groups["shards"]
        times_of: dict[tuple[int, float], tuple[StageTime, float]] = {}
        stage_times = []
        for index, stage in enumerate(stages):
            transfer = self._transfer(stages, index, plan)
            key = id(stage), transfer
            if key not in times_of:
                forward, weights, experts = stage.forward_seconds, stage.weights, stage.experts
                held = sharded(weights, experts, plan) if plan.is_fsdp else weights + experts
                adding = time_model.accumulation(held, recipe) if microbatches > 1 else 0.0
                backward = stage.backward_seconds + adding
                if plan.is_fsdp:
                    units = stage.n_units
                    gradients = weights.gradient_bytes(recipe), experts.gradient_bytes(recipe)
                    gather = time_model.over_copies("all_gather", weights.nbytes, experts.nbytes, plan, units)
                    again = gather * stage.share_again
                    reduce = time_model.over_copies("reduce_scatter", *gradients, plan, units)
                    between = time_model.between_replicas(gradients[0], plan, units)
                    moved = gathered(FsdpUnit(weights, experts), plan)
                    out = time_model.moved("copies", 2 * moved.nbytes)
                    into = time_model.moved("copies", moved.trained + moved.gradient_bytes(recipe))
                    forward, backward = forward + out, backward + out * stage.share_again + into
                    if recipe.overlap_gradients:
                        first = gather * stage.largest_unit.nbytes / max(weights.nbytes + experts.nbytes, 1)
                        forward = time_model.overlapped(forward, gather, group) + first
                        replicas = between, groups["replicas"]
                        backward = time_model.overlapped(backward, again + reduce, group, replicas)
                    else:
                        forward, backward = forward + gather, backward + again + reduce + between
                times_of[key] = StageTime(forward, backward / 2, backward / 2, transfer, stage.kept_bytes), adding
            stage_times.append(times_of[key])
        return [time for time, _ in stage_times], [adding for _, adding in stage_times]

    def _transfer(self, stages: Sequence[SimulatedStage], index: int, plan: Plan) -> float:
        """Return the seconds of sending the result of a stage to the next one, by the slowest of its ranks.

        Ranks that are neighbours in the pipeline may be in one node, and the next two in different ones. In a schedule
        in which stages return along the ranks, two stages in the middle are on one rank.
        """
        if index + 1 == len(stages):
            return 0.0
        sender, receiver = rank_of(index, plan), rank_of(index + 1, plan)
        if sender == receiver:
            return 0.0
        nbytes, network = stages[index + 1].crossing_bytes, self._time_model.network
        stride = plan.tensor * plan.context * plan.data
        is_inside = network.in_one_node(stride * sender, stride * receiver, stride)
        if not self._model.recipe.share_messages or plan.sequence_parallel or plan.tensor == 1:
            return network.send(nbytes, is_inside=is_inside)
        gather = network.seconds("all_gather", nbytes, self._time_model.groups(plan)["tensor"])
        return network.send(nbytes / plan.tensor, is_inside=is_inside) + gather

    def slowest_once(
        self, stages: Sequence[SimulatedStage], times: Sequence[StageTime], plan: Plan
    ) -> tuple[float, float]:
        """Return what the slowest rank takes after its last backward: for its gradients, and for its optimizer."""
        ranks = zip(by_rank(stages, plan), by_rank(times, plan), strict=True)
        distinct = {tuple(map(id, rank_stages)): (rank_stages, rank_times) for rank_stages, rank_times in ranks}
        return max(
            (self._once_on(rank_stages, rank_times, plan) for rank_stages, rank_times in distinct.values()), key=sum
        )

    def _once_on(self, stages: Sequence[SimulatedStage], times: Sequence[StageTime], plan: Plan) -> tuple[float, float]:
        """Return the seconds for which a rank waits for its gradients and parameters, and the seconds of its optimizer.

        Gradients of the last micro-batch are reduced while its backward runs; what takes longer is waited for, and at
        least the reduction of one block, which follows the last one. Sharded optimizers gather the parameters during
        the next forward. The first and the last stage add the gradients of weights that they share.
        """
        time_model, recipe = self._time_model, self._model.recipe
        weights = sum((stage.weights for stage in stages), Weights())
        experts = sum((stage.experts for stage in stages), Weights())
        gradients = weights.gradient_bytes(recipe), experts.gradient_bytes(recipe)
        groups = time_model.groups(plan)
        group = groups["shards" if plan.zero else "gradients"]
        reduction = gather = between = 0.0
        if plan.zero == 0:
            reduction = time_model.over_copies("all_reduce", *gradients, plan)
        elif plan.zero < 3:
            reduction = time_model.over_copies("reduce_scatter", *gradients, plan)
            between = time_model.between_replicas(gradients[0], plan)
            gather = time_model.over_copies("all_gather", weights.trained, experts.trained, plan)
        if recipe.overlap_gradients:
            units = max(sum(sum(stage.counts.values()) for stage in stages), 1)

            def lost(computing: float, *streams: tuple[float, RankGroup]) -> float:
                """Return the seconds that the rank waits, or that its kernels lose meanwhile."""
                communicating = sum(seconds for seconds, _ in streams)
                taken = sum(time_model.network.units_taken(rank_group) * seconds for seconds, rank_group in streams)
                waited = max(communicating / units, communicating - computing)
                return waited + (taken * (1 - waited / communicating) if communicating else 0.0)

            reduction = lost(sum(time.backward for time in times), (reduction, group), (between, groups["replicas"]))
            gather = lost(sum(time.forward for time in times), (gather, group))
        else:
            reduction += between
        tied = [stage.tied.gradient_bytes(recipe) for stage in stages if stage.tied.elements]
        if len(tied) == 1:  # another rank has the other end
            distance = plan.tensor * plan.context * plan.data * abs(rank_of(plan.stages - 1, plan) - rank_of(0, plan))
            reduction += time_model.network.seconds("all_reduce", tied[0], time_model.network.group(2, distance))
        held = sharded(weights, experts, plan) if plan.zero else weights + experts
        return reduction + gather, time_model.optimizer(held, recipe)


def by_rank(values: Sequence[object], plan: Plan) -> list[list]:  # type: ignore[type-arg]
    """Return the values of the stages of each rank of the pipeline."""
    ranks: list[list[object]] = [[] for _ in range(plan.pipeline)]
    for index, value in enumerate(values):
        ranks[rank_of(index, plan)].append(value)
    return ranks

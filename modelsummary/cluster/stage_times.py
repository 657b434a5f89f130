"""Seconds of the stages of a pipeline, and of what each rank does once per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from modelsummary.cluster.pipeline import WeightUpdate, by_rank, rank_of
from modelsummary.cluster.plan import Plan
from modelsummary.cluster.simulated_stages import SimulatedStage, StageUnit, added, weights_of
from modelsummary.cluster.timing import SecondsByCause, TimeModel, UnitSeconds
from modelsummary.cluster.weights import Weights
from modelsummary.split.schedule import StageLoad

__all__ = ["StageTimer"]

_OF_KERNELS = frozenset({"compute", "recomputation"})
_BUCKET_BYTES = 25 * 2**20  # of gradients that DistributedDataParallel reduces at once, by default
_CLIPPING = 3  # times that gradients are read or written for their norm, and to scale them
_BUFFER_PASSES, _AVERAGING = 2, 2  # the same of buffers of gradients once per step, and to divide them by a number


class _Passes(NamedTuple):
    """How often the foreach kernels of an optimizer of torch read or write each tensor (torch/optim/adamw.py).

    Attributes:
        parameters, gradients: times.
        states: times, on average over the states.
        temporaries: times of a tensor like the parameter.
    """

    parameters: int
    gradients: int
    states: float = 0.0
    temporaries: int = 0


_PASSES = {
    "sgd": _Passes(2, 1),  # p += -lr * g
    "sgd-momentum": _Passes(2, 1, 5),  # m *= mu; m += g; p += -lr * m
    "adam": _Passes(2, 2, 4, 6),  # m.lerp_(g); v *= b; v += g * g; t = sqrt(v); t /= c; t += eps; p += m / t
    "adamw": _Passes(4, 2, 4, 6),  # p *= 1 - lr * decay, before
}


class StageTimer:
    """Times what stages compute, communicate and wait for.

    Args:
        time_model: the time models of devices and network.
    """

    def __init__(self, time_model: TimeModel) -> None:
        self._time_model, self._recipe = time_model, time_model.recipe
        self._sent: dict[tuple[int, ...], float] = {}

    def stage_loads(
        self, stages: Sequence[SimulatedStage], plan: Plan, microbatches: int
    ) -> tuple[list[StageLoad], list[SecondsByCause]]:
        """Return the load of each stage in seconds, and the seconds of its forward and backward by cause."""
        timed: dict[int, tuple[StageLoad, SecondsByCause]] = {}
        loads: dict[tuple[int, float], StageLoad] = {}
        units: dict[tuple[int, bool], UnitSeconds] = {}
        keys = []
        for index, stage in enumerate(stages):
            if id(stage) not in timed:
                timed[id(stage)] = self._load(stage, plan, units, accumulates=microbatches > 1)
            message = self._message(stages, index, plan)
            keys.append((id(stage), message))
            if keys[-1] not in loads:
                loads[keys[-1]] = replace(timed[id(stage)][0], message=message)
        return [loads[key] for key in keys], [timed[id(stage)][1] for stage in stages]

    def _load(
        self, stage: SimulatedStage, plan: Plan, units: dict[tuple[int, bool], UnitSeconds], *, accumulates: bool
    ) -> tuple[StageLoad, SecondsByCause]:
        """Return the load of a stage without its message, and its seconds by cause.

        What a stage does for the gradients of its weights alone is the half of the backward that may come later; adding
        them to their sums over micro-batches is part of it. Under FSDP a stage passes through its units. All ranks keep
        the pace of the slowest.

        Args:
            stage: the stage.
            plan: the plan.
            units: seconds of units, which stages of a plan share; what is not there yet is added.
            accumulates: there are several micro-batches.
        """
        time_model, recipe, slowest = self._time_model, self._recipe, self._time_model.slowest(plan.devices)
        held = stage.weights.sharded(plan) if plan.is_fsdp else stage.weights.total
        read = held.trained + 2 * held.gradient_bytes(recipe)  # a gradient is read, and its sum updated
        adds = accumulates and not recipe.adds_in_products
        adding = slowest * time_model.moved("accumulation", read) if adds else 0.0
        forward, backward = (_on_slowest(spent, slowest) for spent in (stage.forward, stage.backward))
        weight_seconds, waits = slowest * stage.of_weights, [0.0, 0.0]
        if plan.is_fsdp:
            passes = [self._fsdp_units(stage, plan, units, is_forward=is_forward) for is_forward in (True, False)]
            computing = sum(forward.values()), sum(backward.values())
            waits = [
                time_model.over_units(passed, plan) - seconds for passed, seconds in zip(passes, computing, strict=True)
            ]
        spent = added([(forward, 1), (backward, 1), ({"accumulation": adding, "fsdp": sum(waits)}, 1)])
        load = replace(
            stage.load,
            forward=sum(forward.values()) + waits[0],
            backward_input=sum(backward.values()) - weight_seconds + waits[1],
            backward_weight=weight_seconds + adding,
        )
        return load, spent

    def _fsdp_units(
        self, stage: SimulatedStage, plan: Plan, units: dict[tuple[int, bool], UnitSeconds], *, is_forward: bool
    ) -> list[UnitSeconds]:
        """Return the units that FSDP gathers for a forward, or gathers again and reduces for a backward, in its order.

        The tensors of a unit are copied out of what was gathered, and their gradients into what is reduced, by kernels
        that run between the layers (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py). The root is gathered
        before all others, and reduced after them.

        Args:
            stage, plan, units: as for ``_load``.
            is_forward: the pass is a forward.
        """
        root_unit = StageUnit(is_block=False, weights=stage.root, forward={}, backward={})
        root = self._fsdp_unit(root_unit, plan, is_forward=is_forward)
        for unit in stage.units:
            if (id(unit), is_forward) not in units:
                units[id(unit), is_forward] = self._fsdp_unit(unit, plan, is_forward=is_forward)
        called = [units[id(unit), is_forward] for unit in stage.units]
        return [root, *called] if is_forward else [*reversed(called), root]

    def _fsdp_unit(self, unit: StageUnit, plan: Plan, *, is_forward: bool) -> UnitSeconds:
        time_model, recipe = self._time_model, self._recipe
        shared, experts = unit.weights.shared, unit.weights.experts
        slowest = time_model.slowest(plan.devices)
        moved = unit.weights.of_several(plan.shards > 1, plan.expert_copies > 1)
        spent = _on_slowest(unit.forward if is_forward else unit.backward, slowest)
        gather = copies = reduction = replicas = 0.0
        if moved.nbytes and (is_forward or unit.is_gathered_again):
            gather = time_model.over_copies("all_gather", shared.nbytes, experts.nbytes, plan)
            copies = time_model.moved("copies", 2 * moved.nbytes)
        if moved.trained and not is_forward:
            gradients = shared.gradient_bytes(recipe), experts.gradient_bytes(recipe)
            reduction = time_model.over_copies("reduce_scatter", *gradients, plan)
            replicas = time_model.between_replicas(gradients[0], plan)
            copies += time_model.moved("copies", moved.trained + moved.gradient_bytes(recipe))
        return UnitSeconds(gather, sum(spent.values()) + slowest * copies, reduction, replicas)

    def _message(self, stages: Sequence[SimulatedStage], index: int, plan: Plan) -> float:
        """Return the seconds of sending the result of a stage to the next one, by the slowest of its ranks.

        Ranks that are neighbours in the pipeline may be in one node, and the next two in different ones. In a schedule
        in which stages return along the ranks, two stages in the middle are on one rank.
        """
        if index + 1 == len(stages):
            return 0.0
        sender, receiver = rank_of(index, plan), rank_of(index + 1, plan)
        if sender == receiver:
            return 0.0
        nbytes, stride, network = (
            stages[index + 1].crossing_bytes,
            plan.split_ranks * plan.copies,
            self._time_model.network,
        )
        shares = plan.tensor if self._recipe.share_messages and not plan.sequence else 1
        key = nbytes, stride, sender, receiver, shares
        if key not in self._sent:
            is_inside = network.in_one_node(stride * sender, stride * receiver, stride)
            gather = network.seconds("all_gather", nbytes, network.group(shares))
            self._sent[key] = network.send(nbytes / shares, is_inside=is_inside) + gather
        return self._sent[key]

    def updates(self, stages: Sequence[SimulatedStage], loads: Sequence[StageLoad], plan: Plan) -> list[WeightUpdate]:
        """Return what each rank does after its last backward."""
        ranks = list(zip(by_rank(stages, plan), by_rank(loads, plan), strict=True))
        keys = [tuple(map(id, rank_stages)) for rank_stages, _ in ranks]
        distinct = {key: self._update_on(*rank, plan) for key, rank in dict(zip(keys, ranks, strict=True)).items()}
        return [distinct[key] for key in keys]

    def _update_on(self, stages: Sequence[SimulatedStage], loads: Sequence[StageLoad], plan: Plan) -> WeightUpdate:
        """Return the seconds for which a rank waits for its gradients and parameters, and the seconds of its optimizer.

        Gradients of the last micro-batch are reduced while its backward runs: in the buckets of
        ``DistributedDataParallel``, or where they are sharded, block by block. Sharded optimizers gather the parameters
        during the next forward. Without overlap, all of them are reduced at once. The first and the last stage add the
        gradients of weights that they share.
        """
        time_model, recipe = self._time_model, self._recipe
        weights = weights_of(stages)
        shared, experts = weights.shared, weights.experts
        gradients = shared.gradient_bytes(recipe), experts.gradient_bytes(recipe)
        blocks = max(sum(unit.is_block for stage in stages for unit in stage.units), 1)
        pieces = 1
        if recipe.overlap_gradients:
            pieces = blocks if plan.zero_stage else max(ceil(sum(gradients) / _BUCKET_BYTES), 1)
        of_piece = gradients[0] / pieces, gradients[1] / pieces
        reduction = gather = replicas = 0.0
        if plan.zero_stage == 0:
            reduction = time_model.over_copies("all_reduce", of_piece[0], of_piece[1], plan)
        elif plan.zero_stage < 3:
            reduction = time_model.over_copies("reduce_scatter", of_piece[0], of_piece[1], plan)
            replicas = time_model.between_replicas(of_piece[0], plan)
            gather = time_model.over_copies("all_gather", shared.trained / pieces, experts.trained / pieces, plan)
        forward, backward = sum(load.forward for load in loads), sum(load.backward for load in loads)
        waited = 0.0
        for unit, computing in (
            (UnitSeconds(0.0, backward / pieces, reduction, replicas), backward),
            (UnitSeconds(gather, forward / pieces), forward),
        ):
            if unit.gather or unit.reduce:
                waited += time_model.over_units([unit] * pieces, plan) - computing
        tied = [stage.tied.gradient_bytes(recipe) for stage in stages if stage.tied.elements]
        if len(tied) == 1:  # another rank has the other end
            distance = plan.split_ranks * plan.copies * abs(rank_of(plan.stages - 1, plan) - rank_of(0, plan))
            waited += time_model.network.seconds("all_reduce", tied[0], time_model.network.group(2, distance))
        held = weights.sharded(plan) if plan.sharded else weights.total
        buffers = self.buffers(held if plan.is_fsdp else weights.total, averages=plan.copies > 1)
        return WeightUpdate(waited, self.optimizer(held) + buffers)

    def optimizer(self, weights: Weights) -> float:
        """Return the seconds of an optimizer step behind the norm of the gradients.

        Megatron's optimizer is one kernel, which reads gradients, once more than their norm does, states and float32
        weights, and writes all but gradients. torch's optimizers run a kernel for each operation on all tensors
        (``foreach``, the default on accelerators), after the gradients are scaled.
        """
        recipe, moved = self._recipe, self._time_model.moved
        states, stored = weights.state_bytes(recipe), 4 * weights.masters + weights.trained - weights.narrow
        gradients = weights.gradient_bytes(recipe)
        if recipe.kernels == "fused":
            return moved("optimizer", 2 * (gradients + states + stored) + weights.narrow)
        passes = _PASSES[recipe.optimizer]
        nbytes = (passes.parameters + passes.temporaries) * stored + (_CLIPPING + passes.gradients) * gradients
        return moved("optimizer", nbytes + passes.states * states)

    def buffers(self, weights: Weights, *, averages: bool) -> float:
        """Return the seconds of what Megatron does once per step with the buffers that hold whole gradients; else 0.

        They are set to zero, read for values that are not finite, and before their reduction divided by the number of
        copies, if there are some (megatron/core/distributed/param_and_grad_buffer.py).
        """
        passes = _BUFFER_PASSES + (_AVERAGING if averages else 0)
        nbytes = passes * weights.gradient_bytes(self._recipe)
        return self._time_model.moved("buffers", nbytes) if self._recipe.kernels == "fused" else 0.0


def _on_slowest(spent: SecondsByCause, slowest: float) -> SecondsByCause:
    """Return the seconds by cause of a pass on the slowest rank, whose kernels take so many times as long."""
    return {cause: seconds * (slowest if cause in _OF_KERNELS else 1.0) for cause, seconds in spent.items()}

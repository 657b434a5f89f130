"""``StepSimulator``: the time and memory of a training step of one model on one cluster, for any plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from operator import mul

from modelsummary.capture.live import LiveModel
from modelsummary.cluster.applying import Applier, MakePlan
from modelsummary.cluster.estimate import CAUSES, StepEstimate
from modelsummary.cluster.memory import RankLoad, RankMemory, RankMoments, moments_of
from modelsummary.cluster.operator_checkpoints import OperatorCheckpoints
from modelsummary.cluster.parts import AFTER, BEFORE, Part
from modelsummary.cluster.pipeline import StepItems, WeightUpdate, by_rank, in_flight
from modelsummary.cluster.plan import Plan, Recipe
from modelsummary.cluster.published_errors import case_of
from modelsummary.cluster.simulated_stages import RankParts, SimulatedStage, added, stages_of
from modelsummary.cluster.stage_times import StageTimer
from modelsummary.cluster.step_model import StepModel
from modelsummary.cluster.timing import SecondsByCause, TimeModel
from modelsummary.cluster.topology import Cluster, check_cluster
from modelsummary.cluster.weights import RankWeights
from modelsummary.errors import InputError, check_integers
from modelsummary.layer_info import LayerInfo
from modelsummary.split.schedule import IN_V, StageLoad

__all__ = ["StepSimulator", "simulator_of"]

_ROUNDED_DOWN = 1 - 1e-12  # sums of the same seconds in another order differ in their last digits


class StepSimulator:
    """Simulates training steps of one model on one cluster. What several plans share is computed once.

    Args:
        model: the model.
        cluster: the devices.
        global_batch: samples in a step.
        sequence_length: tokens in a sample; 0 if samples are not sequences.
        make_plan: ``parallel_plan`` of the model's statistics, for estimates that apply themselves.

    Raises:
        InputError: ``global_batch`` is not positive, or the device has no peak for the dtype of the recipe.
    """

    def __init__(
        self,
        model: StepModel,
        cluster: Cluster,
        global_batch: int,
        sequence_length: int,
        make_plan: MakePlan | None = None,
    ) -> None:
        check_integers(global_batch=global_batch)
        self.model, self.time_model = model, TimeModel(cluster, model.recipe)
        cluster.device.peak(model.compute_dtype, "a Recipe with precision")  # raises if it is not known
        self._timer = StageTimer(self.time_model)
        self.global_batch, self.sequence_length = global_batch, sequence_length
        self.applier = None if make_plan is None else Applier(make_plan, model.module, model.recipe)
        self._rank_parts: dict[tuple[object, ...], RankParts] = {}
        self._stages: dict[tuple[object, ...], list[SimulatedStage]] = {}
        self._ranks: dict[tuple[object, ...], list[tuple[RankLoad, int]]] = {}
        self._fullest: dict[tuple[object, ...], dict[RankLoad, int]] = {}
        self._rank_loads: dict[tuple[int, ...], RankLoad] = {}
        # bytes of a rank without its activations, and in the optimizer's step
        self._bare: dict[tuple[object, ...], tuple[int, int]] = {}
        self._loads: dict[tuple[object, ...], tuple[list[StageLoad], list[SecondsByCause]]] = {}
        self._updates: dict[tuple[object, ...], list[WeightUpdate]] = {}
        self._operator_checkpoints: dict[tuple[object, ...], OperatorCheckpoints] = {}
        self._least: dict[tuple[object, ...], float] = {}
        self._least_states: dict[tuple[object, ...], float] = {}

    def simulate(self, plan: Plan) -> StepEstimate:
        """Return the estimate of a step.

        Raises:
            InputError: model, plan, batch and cluster do not fit together.
        """
        plan = self.resolved(plan)
        items, spec = self.items(plan), self.time_model.device.spec
        return StepEstimate(
            plan=plan,
            cluster=self.time_model.cluster,
            global_batch=self.global_batch,
            sequence_length=self.sequence_length,
            microbatches=items.microbatches,
            seconds_by_cause=self._causes(items),
            moments=tuple(self._moments(plan)),
            model_flops=self._flops(plan, again=False),
            hardware_flops=self._flops(plan, again=True),
            peak_flops=spec.peak(self.model.compute_dtype),
            items=items,
            uncounted_ops=self._uncounted(plan),
            case=case_of(plan, self.time_model.cluster, self.model.recipe, self.model.compute_dtype),
            simulator=self,
            subject=self.model.subject,
        )

    def on(self, cluster: Cluster) -> StepSimulator:
        """Return a simulator of the same steps on another cluster."""
        other = StepSimulator(self.model, cluster, self.global_batch, self.sequence_length)
        other.applier = self.applier
        return other

    def items(self, plan: Plan) -> StepItems:
        """Return the items of a step with their seconds.

        Raises:
            InputError: model, plan, batch and cluster do not fit together.
        """
        microbatches, stages = plan.microbatches(self.global_batch), self.stages(plan)
        key = self._loads_key(plan, microbatches)
        loads, _ = self._timed(plan, microbatches)
        group = (*key, plan.copies, plan.sharded, plan.shards)
        if group not in self._updates:
            self._updates[group] = self._timer.updates(stages, loads, plan)
        return StepItems(plan, microbatches, loads, self._updates[group])

    def least_seconds(self, plan: Plan) -> float:
        """Return a bound that the seconds of a step are not below, which plans share that differ in what they shard.

        It has what the blocks compute and communicate: nothing is gathered, reduced or sent to another stage.

        Raises:
            InputError: as for ``items``.
        """
        microbatches, stages = plan.microbatches(self.global_batch), self.stages(plan)
        key = (*plan.stages_key, plan.schedule, microbatches)
        if key not in self._least:
            items = StepItems(plan, microbatches, [stage.load for stage in stages], [WeightUpdate()] * plan.pipeline)
            self._least[key] = items.least_seconds() * _ROUNDED_DOWN
        return self._least[key]

    def _timed(self, plan: Plan, microbatches: int) -> tuple[list[StageLoad], list[SecondsByCause]]:
        """Return the load of each stage, and its seconds by cause."""
        key = self._loads_key(plan, microbatches)
        if key not in self._loads:
            self._loads[key] = self._timer.stage_loads(self.stages(plan), plan, microbatches)
        return self._loads[key]

    def _loads_key(self, plan: Plan, microbatches: int) -> tuple[object, ...]:
        stride = min(plan.split_ranks * plan.copies, self.time_model.cluster.devices_per_node)
        fsdp = (plan.copies, plan.shards) if plan.zero_stage == 3 else None
        return plan.stages_key, microbatches > 1, stride, plan.schedule in IN_V, fsdp, plan.devices

    def _causes(self, items: StepItems) -> dict[str, float]:
        """Return the seconds of a step by cause, on the rank that is busy for longest."""
        plan, m = items.plan, items.microbatches
        by_stage = [load.forward + load.backward for load in items.loads]
        busy = [sum(seconds) for seconds in by_rank(by_stage, plan)]
        rank = busy.index(max(busy))
        _, spent = self._timed(plan, m)
        causes = dict.fromkeys(CAUSES, 0.0) | added((of_stage, m) for of_stage in by_rank(spent, plan)[rank])
        return {**causes, **items.causes(rank), "optimizer": items.updates[rank].optimizer}

    def resolved(self, plan: Plan) -> Plan:
        """Return the plan with the blocks that run again, and what they keep, in place of ``checkpoint="operator"``.

        Raises:
            InputError: as for ``items``.
        """
        if plan.checkpoint != "operator":
            return plan
        plain, capacity = replace(plan, checkpoint=None), self.time_model.cluster.memory_bytes
        if self.memory_bytes(plain) <= capacity:
            return plain
        key = plan.rank_key
        if key not in self._operator_checkpoints:
            seconds_of = self.time_model.seconds_of_calls(plan)
            results = self.model.results(plan, self.sequence_length, seconds_of)
            self._operator_checkpoints[key] = OperatorCheckpoints(self._rank_parts[key], results)
        blocks = [(fqn, self.model.kind_of[fqn]) for fqn in self.model.blocks]
        microbatches = plan.microbatches(self.global_batch)
        factor = self.time_model.factors.activations
        return self._operator_checkpoints[key].choose(
            plan, self.stages(plain), blocks, microbatches, self.memory, capacity, factor
        )

    # ----------------------------------------------------------------------------------------- stages

    def _check(self, plan: Plan) -> None:
        """Raise ``InputError`` if a plan does not fit the cluster or the sequence."""
        if plan.devices > self.time_model.cluster.devices:
            raise InputError(
                f"the plan is for {plan.devices} ranks ({plan.describe()}), but the cluster has "
                f"{self.time_model.cluster.devices} devices; use more nodes, or smaller groups"
            )
        if plan.context > 1 and (not self.sequence_length or self.sequence_length % plan.context):
            has = f"sequences of {self.sequence_length}" if self.sequence_length else "inputs without a sequence"
            remedy = f"pass a divisor of {self.sequence_length}" if self.sequence_length else "pass 1"
            raise InputError(
                f"context={plan.context} must divide the sequence length, but the model has {has}; {remedy}"
            )

    def stages(self, plan: Plan) -> list[SimulatedStage]:
        """Return the stages of a plan, in order.

        Raises:
            InputError: model, plan, batch and cluster do not fit together.
        """
        self._check(plan)
        key = plan.stages_key
        if key not in self._stages:
            parts = self.model.parts(plan, self.sequence_length)
            gathers = any(collective.group == "context" for part in parts.values() for collective in part.collectives)
            if plan.context > 1 and not gathers:
                raise InputError(
                    f"context={plan.context} needs a model whose attention is scaled_dot_product_attention; pass 1"
                )
            if plan.rank_key not in self._rank_parts:
                seconds = partial(self.time_model.part, plan=plan)
                self._rank_parts[plan.rank_key] = RankParts(parts, seconds)
            self._stages[key] = stages_of(self.model, self._rank_parts[plan.rank_key], plan)
        return self._stages[key]

    def memory(self, plan: Plan) -> list[RankMemory]:
        """Return the memory of each rank of the pipeline.

        Raises:
            InputError: model, plan, batch and cluster do not fit together.
        """
        return [moments.fullest for moments in self._moments(plan)]

    def _moments(self, plan: Plan) -> list[RankMoments]:
        """Return the memory of each rank of the pipeline at the moments at which it may be fullest."""
        recipe, factors = self.model.recipe, self.time_model.factors
        count = plan.microbatches(self.global_batch)
        return [moments_of(load, activations, plan, recipe, factors, count) for load, activations in self._held(plan)]

    def memory_bytes(self, plan: Plan) -> int:
        """Return the bytes of the fullest rank.

        Raises:
            InputError: as for ``memory``.
        """
        microbatches = plan.microbatches(self.global_batch)
        key = (*plan.stages_key, plan.schedule, microbatches)
        if key not in self._fullest:
            most: dict[RankLoad, int] = {}
            for load, activations in self._held(plan):
                most[load] = max(most.get(load, 0), int(self.time_model.factors.activations * activations))
            self._fullest[key] = most
        shared, bare = plan.shards_key, self._bare
        most_bytes = 0
        for load, nbytes in self._fullest[key].items():
            load_key = id(load), shared, microbatches == 1
            if load_key not in bare:
                recipe, factors = self.model.recipe, self.time_model.factors
                backward, optimizer = moments_of(load, 0, plan, recipe, factors, microbatches)
                bare[load_key] = backward.total, optimizer.total
            most_bytes = max(most_bytes, bare[load_key][0] + nbytes, bare[load_key][1])
        return most_bytes

    def _held(self, plan: Plan) -> list[tuple[RankLoad, int]]:
        """Return what each rank of the pipeline holds, whatever is sharded, and the bytes of its activations."""
        microbatches, stages = plan.microbatches(self.global_batch), self.stages(plan)
        key = (*plan.stages_key, plan.schedule, microbatches)
        if key not in self._ranks:
            ranks = []
            for rank, rank_stages in enumerate(by_rank(stages, plan)):
                ids, kept = tuple(map(id, rank_stages)), [stage.kept_bytes for stage in rank_stages]
                if ids not in self._rank_loads:  # of stages that are kept, too
                    self._rank_loads[ids] = RankLoad.of(rank_stages)
                moments = in_flight(plan.schedule, plan.pipeline, plan.virtual_stages, microbatches, rank)
                activations = max(sum(map(mul, moment, kept)) for moment in moments)
                ranks.append((self._rank_loads[ids], activations))
            self._ranks[key] = ranks
        return self._ranks[key]

    def least_state_bytes(self, plan: Plan) -> float:
        """Return a bound that the bytes of weights, gradients and optimizer on the fullest rank are not below.

        It needs no run of the model: the ranks of the pipeline hold all parameters together.
        """
        key = plan.split_ranks, plan.dispatch_ranks, plan.pipeline, plan.shards_key
        if key not in self._least_states:
            weights, factors = self.model.weights, self.time_model.factors
            divided = weights if plan.dispatch_ranks > 1 else RankWeights(weights.total)
            shares = (
                (RankWeights(divided.shared), plan.split_ranks),
                (RankWeights(experts=divided.experts), plan.dispatch_ranks),
            )
            self._least_states[key] = sum(
                moments_of(RankLoad(share), 0, plan, self.model.recipe, factors, 1).optimizer.total
                / (ranks * plan.pipeline)
                for share, ranks in shares
            )
        return self._least_states[key]

    def _uncounted(self, plan: Plan) -> dict[str, int]:
        """Return the operators of a micro-batch whose work is not known, with the number of their calls."""
        counts = {BEFORE: 1, **self.model.counts, AFTER: 1}
        calls: Counter[str] = Counter()
        for name, part in self.model.parts(plan, self.sequence_length).items():
            calls.update({operator: counts[name] * n for operator, n in part.uncounted.items()})
        return dict(calls)

    def _flops(self, plan: Plan, *, again: bool) -> float:
        """Return the floating point operations of products in a step; with what is recomputed if ``again``.

        They count the forward, and the backward that the trained parameters need. Attention counts densely.
        """
        model = self.model
        parts = model.parts(Plan(micro_batch=plan.micro_batch), self.sequence_length)
        part_counts = (*model.counts.items(), (BEFORE, 1), (AFTER, 1))
        everything = sum(count * (parts[name].flops + parts[name].backward_flops) for name, count in part_counts)
        passed = {kind: count for kind, count in model.counts.items() if parts[kind].has_backward}
        blocks = sum(count * parts[kind].repeated_flops for kind, count in passed.items())
        repeated = sum(count * parts[name].recomputed_flops for name, count in part_counts) if again else 0.0
        if again and plan.checkpoint == "every":
            repeated += blocks
        elif again and plan.checkpoint == "selective":
            repeated += sum(count * _core_flops(parts[kind]) for kind, count in passed.items())
        elif again and isinstance(plan.checkpoint, tuple):
            for fqn, names in plan.checkpoint:
                kind = model.kind_of[fqn]
                part = self._rank_parts[plan.rank_key].parts[kind]
                share = part.keeping(names).repeated_flops / max(part.repeated_flops, 1)
                repeated += share * parts[kind].repeated_flops * part.has_backward
        elif again and isinstance(plan.checkpoint, int):
            repeated += blocks * min(1.0, plan.checkpoint * plan.stages / max(sum(passed.values()), 1))
        return (everything + repeated) * self.global_batch / plan.micro_batch


def _core_flops(part: Part) -> int:
    return sum(times * work.flops for work, times in part.works["core"])


def simulator_of(
    live: LiveModel,
    root: LayerInfo,
    cluster: Cluster,
    global_batch: int,
    sequence_length: int | None,
    recipe: Recipe | None,
    make_plan: MakePlan,
) -> StepSimulator:
    """Return the simulator of the steps of a model, with the defaults of ``Statistics.simulate``.

    Raises:
        InputError: a value is unusable.
    """
    check_cluster(cluster)
    if recipe is not None and not isinstance(recipe, Recipe):
        raise InputError(f"recipe must be a Recipe or None, got {recipe!r:.80}")
    model = StepModel(live, root, recipe or Recipe())
    if sequence_length is not None:
        check_integers(sequence_length=sequence_length)
        if not model.recorded_sequence:
            raise InputError(
                f"sequence_length={sequence_length} needs a first input of tokens (batch x length [x features]); pass "
                "None"
            )
        if sequence_length > model.recorded_sequence:
            model.check_length(sequence_length)
    return StepSimulator(model, cluster, global_batch, sequence_length or model.recorded_sequence, make_plan)

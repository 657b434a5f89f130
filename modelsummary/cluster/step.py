"""``StepSimulator``: the time and memory of a training step of one model on one cluster, for any plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import mul
from typing import NamedTuple

from modelsummary.cluster.applying import Applier, MakePlan
from modelsummary.cluster.estimate import StepEstimate
from modelsummary.cluster.memory import RankLoad, RankMemory, memory_of
from modelsummary.cluster.parts import AFTER, BEFORE, Part
from modelsummary.cluster.pipeline import StageTime, in_flight, least_seconds, pipeline_seconds
from modelsummary.cluster.plan import Plan
from modelsummary.cluster.simulated_stages import SimulatedStage, stages_of
from modelsummary.cluster.stage_times import StageTimer, by_rank
from modelsummary.cluster.step_model import Share, StepModel
from modelsummary.cluster.timing import TimeModel
from modelsummary.cluster.topology import Cluster
from modelsummary.cluster.weights import Weights
from modelsummary.errors import InputError
from modelsummary.split.schedule import IN_V

__all__ = ["Prepared", "StepSimulator"]

_ROUNDING = 1e-9  # less of a step is an error of its sums


class _Layout(NamedTuple):
    """What the stages of a plan depend on."""

    share: Share
    pipeline: int
    virtual_stages: int
    recompute: str | int


@dataclass(frozen=True)
class Prepared:
    """What is known of a plan before its schedule is simulated.

    Attributes:
        plan: the plan.
        microbatches: micro-batches of one copy in a step.
        stages: stages of the pipeline.
        times: their seconds.
        accumulation: seconds in which the rank of each stage adds the gradients of a micro-batch to those before.
        once: seconds after the last backward, of the slowest rank: what gradients wait for, and the optimizer.
    """

    plan: Plan
    microbatches: int
    stages: Sequence[SimulatedStage]
    times: Sequence[StageTime]
    accumulation: Sequence[float]
    once: tuple[float, float]


class StepSimulator:
    """Simulates training steps of one model on one cluster. What several plans share is computed once.

    Args:
        model: the model.
        cluster: the devices.
        global_batch: samples in a step.
        sequence: tokens in a sample; 0 if samples are not sequences.
        make_plan: ``parallel_plan`` of the model's statistics, for estimates that apply themselves.

    Raises:
        InputError: ``global_batch`` is not positive, or the device has no peak for the dtype of the recipe.
    """

    def __init__(
        self,
        model: StepModel,
        cluster: Cluster,
        global_batch: int,
        sequence: int,
        make_plan: MakePlan | None = None,
    ) -> None:
        if type(global_batch) is not int or global_batch < 1:
            raise InputError(f"global_batch must be an integer >= 1, got {global_batch!r}")
        self.model, self.time_model = model, TimeModel(cluster, model.recipe.attention)
        cluster.device.peak(model.compute_dtype, "a Recipe with dtype")  # raises if it is not known
        self._timer = StageTimer(model, self.time_model)
        self.global_batch, self.sequence = global_batch, sequence
        self.applier = None if make_plan is None else Applier(make_plan, model.module, model.recipe)
        self._stages: dict[_Layout, list[SimulatedStage]] = {}
        self._loads: dict[tuple[_Layout, str, int], list[tuple[RankLoad, int]]] = {}
        self._least: dict[tuple[object, ...], float] = {}
        self._times: dict[tuple[object, ...], tuple[list[StageTime], list[float]]] = {}
        self._pipelines: dict[tuple[int, str, int], float] = {}
        self._once: dict[tuple[object, ...], tuple[float, float]] = {}

    def simulate(self, plan: Plan) -> StepEstimate:
        """Return the estimate of a step.

        Raises:
            InputError: model, plan, batch and cluster do not fit together.
        """
        ready = self.prepare(plan)
        spec, dtype = self.time_model.device.spec, self.model.compute_dtype
        return StepEstimate(
            plan=plan,
            cluster=self.time_model.cluster,
            global_batch=self.global_batch,
            sequence=self.sequence,
            microbatches=ready.microbatches,
            seconds_by_cause=_causes(ready),
            memory=tuple(self.memory(plan)),
            model_flops=self._flops(plan, again=False),
            hardware_flops=self._flops(plan, again=True),
            peak_flops=spec.peak(dtype),
            stage_times=tuple(ready.times),
            applier=self.applier,
            uncounted_ops=self._uncounted(plan),
        )

    def prepare(self, plan: Plan) -> Prepared:
        """Return the stages of a plan with their times.

        Raises:
            InputError: model, plan, batch and cluster do not fit together.
        """
        microbatches = plan.microbatches(self.global_batch)
        layout = self._layout(plan)
        stages = self.stages(plan)
        is_in_v = plan.schedule in IN_V
        stride = min(plan.tensor * plan.context * plan.data, self.time_model.cluster.devices_per_node)
        fsdp = (plan.data, plan.shards) if plan.zero == 3 else None
        key = (layout, microbatches > 1, stride, is_in_v, fsdp)
        if key not in self._times:
            self._times[key] = self._timer.stage_times(stages, plan, microbatches)
        times, accumulation = self._times[key]
        group = (*key, plan.data, plan.zero, plan.shards)
        if group not in self._once:
            self._once[group] = self._timer.slowest_once(stages, times, plan)
        return Prepared(plan, microbatches, stages, times, accumulation, self._once[group])

    def seconds(self, plan: Plan) -> float:
        """Return the seconds of a step.

        Raises:
            InputError: model, plan, batch and cluster do not fit together.
        """
        ready = self.prepare(plan)
        key = (id(ready.times), plan.schedule, ready.microbatches)  # the times are kept, so their id is not used again
        if key not in self._pipelines:
            self._pipelines[key] = pipeline_seconds(ready.times, plan, ready.microbatches)
        return self._pipelines[key] + sum(ready.once)

    def least_seconds(self, plan: Plan) -> float:
        """Return a bound that the seconds of a step are not below.

        Raises:
            InputError: model, plan, batch and cluster do not fit together.
        """
        ready = self.prepare(plan)
        key = (self._layout(plan), plan.data, plan.shards if plan.zero == 3 else None, plan.schedule)
        if key not in self._least:
            self._least[key] = least_seconds(ready.times, plan, ready.microbatches)
        return self._least[key] + sum(ready.once)

    # ----------------------------------------------------------------------------------------- stages

    def _layout(self, plan: Plan) -> _Layout:
        if plan.devices > self.time_model.cluster.devices:
            raise InputError(
                f"the plan needs {plan.devices} devices ({plan.describe()}), but the cluster has "
                f"{self.time_model.cluster.devices}; use more nodes, or smaller groups"
            )
        if plan.context > 1 and (not self.sequence or self.sequence % plan.context):
            has = f"sequences of {self.sequence}" if self.sequence else "inputs without a sequence"
            remedy = f"pass a divisor of {self.sequence}" if self.sequence else "pass 1"
            raise InputError(
                f"context={plan.context} must divide the sequence length, but the model has {has}; {remedy}"
            )
        return _Layout(self.share(plan), plan.pipeline, plan.virtual_stages, plan.recompute)

    def share(self, plan: Plan) -> Share:
        """Return what one rank computes of a micro-batch."""
        return Share(
            plan.tensor, plan.sequence_parallel, plan.context, plan.micro_batch, self.sequence, expert=plan.expert
        )

    def stages(self, plan: Plan) -> list[SimulatedStage]:
        """Return the stages of a plan, in order.

        Raises:
            InputError: model, plan, batch and cluster do not fit together.
        """
        layout = self._layout(plan)
        if layout not in self._stages:
            parts = self.model.parts(layout.share)
            gathers = any(collective.group == "context" for part in parts.values() for collective in part.collectives)
            if plan.context > 1 and not gathers:
                raise InputError(
                    f"context={plan.context} needs a model whose attention is scaled_dot_product_attention; pass 1"
                )
            seconds = {name: self.time_model.part(part, plan, self.model.recipe) for name, part in parts.items()}
            self._stages[layout] = stages_of(self.model, parts, seconds, plan)
        return self._stages[layout]

    def memory(self, plan: Plan) -> list[RankMemory]:
        """Return the memory of each rank of the pipeline.

        Raises:
            InputError: model, plan, batch and cluster do not fit together.
        """
        return [memory_of(load, activations, plan, self.model.recipe) for load, activations in self._ranks(plan)]

    def memory_bytes(self, plan: Plan) -> int:
        """Return the bytes of the fullest rank.

        Raises:
            InputError: as for ``memory``.
        """
        fullest: dict[int, tuple[RankLoad, int]] = {}
        for load, activations in self._ranks(plan):
            _, most = fullest.get(id(load), (load, 0))
            fullest[id(load)] = load, max(most, activations)
        return max(memory_of(*rank, plan, self.model.recipe).total for rank in fullest.values())

    def _ranks(self, plan: Plan) -> list[tuple[RankLoad, int]]:
        """Return what each rank of the pipeline holds, whatever its ZeRO stage, and the bytes of its activations."""
        microbatches, stages = plan.microbatches(self.global_batch), self.stages(plan)
        key = (self._layout(plan), plan.schedule, microbatches)
        if key not in self._loads:
            loads = []
            load_of: dict[tuple[int, ...], RankLoad] = {}
            for rank, rank_stages in enumerate(by_rank(stages, plan)):
                ids, kept = tuple(map(id, rank_stages)), [stage.kept_bytes for stage in rank_stages]
                if ids not in load_of:
                    load_of[ids] = RankLoad.of(rank_stages)
                moments = in_flight(plan.schedule, plan.pipeline, plan.virtual_stages, microbatches, rank)
                loads.append((load_of[ids], max(sum(map(mul, moment, kept)) for moment in moments)))
            self._loads[key] = loads
        return self._loads[key]

    def least_state_bytes(self, plan: Plan) -> float:
        """Return a bound that the bytes of weights, gradients and optimizer on the fullest rank are not below.

        It needs no run of the model: the ranks of the pipeline hold all parameters together.
        """
        model, recipe = self.model, self.model.recipe
        experts = model.expert_weights if plan.expert > 1 else Weights()
        least = 0.0
        for weights, less, ranks, copies in (
            (model.weights, experts, plan.tensor, plan.shards),
            (experts, Weights(), plan.expert, plan.expert_copies),
        ):
            masters = 4 * (weights.masters - less.masters)
            sizes = (
                weights.state_bytes(recipe) - less.state_bytes(recipe) + masters,
                weights.gradient_bytes(recipe) - less.gradient_bytes(recipe),
                weights.nbytes - less.nbytes - (weights.narrow - less.narrow if plan.is_fsdp else 0),
            )
            least += sum(size / (copies if plan.zero >= level else 1) for level, size in enumerate(sizes, 1)) / ranks
        return least / plan.pipeline

    def _uncounted(self, plan: Plan) -> dict[str, int]:
        """Return the operators of a micro-batch whose work is not known, with the number of their calls."""
        counts = {BEFORE: 1, **self.model.counts, AFTER: 1}
        calls: Counter[str] = Counter()
        for name, part in self.model.parts(self.share(plan)).items():
            calls.update({operator: counts[name] * n for operator, n in part.uncounted.items()})
        return dict(calls)

    def _flops(self, plan: Plan, *, again: bool) -> float:
        """Return the floating point operations of products in a step; with what is recomputed if ``again``.

        They count the forward, and the backward that the trained parameters need. Attention counts densely.
        """
        model = self.model
        parts = model.parts(Share(1, False, 1, plan.micro_batch, self.sequence))
        part_counts = (*model.counts.items(), (BEFORE, 1), (AFTER, 1))
        everything = sum(count * (parts[name].flops + parts[name].backward_flops) for name, count in part_counts)
        passed = {kind: count for kind, count in model.counts.items() if parts[kind].has_backward}
        blocks = sum(count * parts[kind].flops for kind, count in passed.items())
        repeated = sum(count * parts[name].recomputed_flops for name, count in part_counts) if again else 0.0
        if again and plan.recompute == "full":
            repeated += blocks
        elif again and plan.recompute == "selective":
            repeated += sum(count * _core_flops(parts[kind]) for kind, count in passed.items())
        elif again and isinstance(plan.recompute, int):
            repeated += blocks * min(1.0, plan.recompute * plan.stages / max(sum(passed.values()), 1))
        return (everything + repeated) * self.global_batch / plan.micro_batch


def _causes(ready: Prepared) -> dict[str, float]:
    """Return the seconds of a step by cause, on the rank that is busy for longest."""
    plan, m = ready.plan, ready.microbatches
    indices_by_rank = by_rank(range(len(ready.stages)), plan)
    busiest = max(
        indices_by_rank,
        key=lambda indices: sum(ready.times[index].forward + ready.times[index].backward for index in indices),
    )
    stages = [ready.stages[index] for index in busiest]
    causes = {
        "compute": m * sum(stage.forward + stage.backward for stage in stages),
        "recomputation": m * sum(stage.recomputation for stage in stages),
        "accumulation": m * sum(ready.accumulation[index] for index in busiest),
    }
    for group in ("tensor", "context", "expert"):
        causes[group] = m * sum(
            stage.waits_forward.get(group, 0.0) + stage.waits_backward.get(group, 0.0) for stage in stages
        )
    busy = m * sum(ready.times[index].forward + ready.times[index].backward for index in busiest)
    causes["fsdp"] = busy - sum(causes.values()) if plan.is_fsdp else 0.0
    transfers = any(time.transfer for time in ready.times)
    alone = [replace(time, transfer=0.0) for time in ready.times]
    seconds = pipeline_seconds(ready.times, plan, m)
    without = pipeline_seconds(alone, plan, m) if transfers else seconds
    causes["pipeline"] = seconds - without
    waited = without - busy
    causes["bubble"] = waited if waited > _ROUNDING * without else 0.0
    causes["gradients"], causes["optimizer"] = ready.once
    return causes


def _core_flops(part: Part) -> int:
    return sum(times * work.flops for work, times in part.works["core"])

"""The items of a step: the actions and messages of a schedule, then the reduction of gradients and the optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import le
from typing import Any, NamedTuple

from modelsummary.cluster.plan import Plan
from modelsummary.errors import InputError
from modelsummary.split.event_engine import ItemGraph, Resource, Speed, periodic
from modelsummary.split.schedule import (
    IN_V,
    WORKS,
    Action,
    Simulation,
    StageLoad,
    add_actions,
    checked_per_device,
    order_of,
    seconds_of,
    simulate,
)

__all__ = ["ItemSpan", "StepItems", "WeightUpdate", "by_rank", "in_flight", "rank_of"]

_ROUNDING = 1 + 1e-12  # sums in another order differ by less
_CAUSES = {"device": "bubble", "link": "pipeline", "gradients": "gradients"}  # of waiting for a resource
_NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
_NAMES |= {"device": "optimizer", "link": "message", "gradients": "reduction of gradients"}  # of other items
_ROWS = {"device": "rank"}


class WeightUpdate(NamedTuple):
    """Seconds of what a rank does after its last backward, once in a step.

    Attributes:
        gradients: in which it waits for the reduction of its gradients, and for sharded parameters.
        optimizer: of its optimizer, which begins when the norm of all gradients is known.
    """

    gradients: float = 0.0
    optimizer: float = 0.0


class ItemSpan(NamedTuple):
    """An item of a step in time.

    Attributes:
        row: what runs it, such as ``"rank 0"``.
        name: what it is.
        begin, end: seconds since the begin of the step.
        facts: its stage and micro-batch, if it has some.
    """

    row: str
    name: str
    begin: float
    end: float
    facts: dict[str, Any]


@dataclass(frozen=True)
class StepItems:
    """The items of a step with their seconds, which the engine runs.

    Attributes:
        plan: the plan.
        microbatches: micro-batches of one copy in a step.
        loads: seconds of each stage for one micro-batch; their ``message`` is the one to the next stage.
        updates: what each rank of the pipeline does after its last backward.
    """

    plan: Plan
    microbatches: int
    loads: Sequence[StageLoad]
    updates: Sequence[WeightUpdate]

    def seconds(self, speed: Speed | None = None) -> float:
        """Return the seconds of the step.

        After a few rounds, each further round of as many micro-batches as ranks takes the same time. So schedules of
        many micro-batches run for a few rounds, and the rest is added. Where stages differ, that is a little off; the
        seconds are not below ``least_seconds``.

        Args:
            speed: how fast ranks are that run at the same time, as where processes share cores; None: at full speed.

        Raises:
            InputError: the schedule does not work with that many micro-batches.
        """
        repeated = self._repeated(speed)
        least = 0.0 if speed is not None else self.least_seconds()
        return least if least > repeated * _ROUNDING else repeated

    def _repeated(self, speed: Speed | None = None) -> float:
        """Return the seconds of a few rounds, and of the others as the last one of them."""

        def seconds(count: int) -> float:
            if speed is not None:
                return max(self._run(count, speed)[1])
            ends = _ends_of_ranks(
                tuple(self.loads), replace(self.plan, data=self.plan.batch_ranks, shard=1, sharded=None), count
            )
            reduced = (end + update.gradients for end, update in zip(ends, self.updates, strict=True))
            return max(reduced) + max(update.optimizer for update in self.updates)

        return self._periodic(seconds)

    def causes(self, rank: int) -> dict[str, float]:
        """Return the seconds in which a rank waits, by cause: what it waits for at that time."""

        @lru_cache
        def idle(count: int) -> dict[str, float]:
            graph, ends = self._run(count)
            lost = dict.fromkeys(_CAUSES.values(), 0.0)
            for resource, seconds in graph.idle(Resource("device", (rank,)), ends).items():
                lost[_CAUSES[resource.kind]] += seconds
            return lost

        lost = {cause: self._periodic(lambda count, cause=cause: idle(count)[cause]) for cause in _CAUSES.values()}
        return {**lost, "bubble": lost["bubble"] + self.seconds() - self._repeated()}

    def least_seconds(self) -> float:
        """Return a bound that the seconds of the step are not below.

        A rank is busy with all micro-batches of its stages. Before its first forward, the stages before its first one
        run theirs; after its last backward, they run theirs, or the rank reduces its gradients.
        """
        plan, halves = self.plan, self.plan.schedule == "zb" or self.plan.schedule in IN_V
        busy = [0.0] * plan.pipeline
        for index, load in enumerate(self.loads):
            busy[rank_of(index, plan)] += self.microbatches * (load.forward + load.backward)
        least = before = after = 0.0
        for seconds, load, update in zip(busy, self.loads, self.updates, strict=False):
            least = max(least, before + seconds + max(after, update.gradients))
            before += load.forward + load.message
            after += 0.0 if halves else load.backward + load.message
        return least + max(update.optimizer for update in self.updates)

    @property
    def simulation(self) -> Simulation:
        """The actions of the schedule in time, of fewer micro-batches if it repeats itself."""
        plan = self.plan
        return simulate(self.loads, self._few, plan.schedule, stages_per_device=_per_rank(plan))

    def spans(self) -> Iterator[ItemSpan]:
        """Yield the items in time, of fewer micro-batches if the schedule repeats itself."""
        graph, ends = self._run(self._few)
        begins, actions = graph.begins(ends), _graph(self.plan, self._few).actions
        for number, resource in enumerate(graph.resources, 1):
            row = f"{_ROWS.get(resource.kind, resource.kind)} {' to '.join(map(str, resource.ranks))}"
            name, facts = _NAMES[resource.kind], {}
            if number in actions:
                action = actions[number]
                name = f"{_NAMES[action.kind]} {action.microbatch}"
                facts = {"stage": action.stage, "micro-batch": action.microbatch}
            if ends[number] > begins[number]:
                yield ItemSpan(row, name, begins[number], ends[number], facts)

    def _run(self, count: int, speed: Speed | None = None) -> tuple[ItemGraph, list[float]]:
        graph = _graph(self.plan, count).items
        seconds = [*seconds_of(self.loads), *(value for update in self.updates for value in update)]
        return graph, graph.run(seconds, speed)

    @property
    def _shortest(self) -> int:
        """The number of micro-batches after which the schedule repeats itself; all of them for GPipe."""
        return _rounds(self.plan.schedule, self.plan.pipeline, self.microbatches)

    @property
    def _few(self) -> int:
        is_all = self.microbatches <= self._shortest + self.plan.pipeline
        return self.microbatches if is_all else self._shortest

    def _periodic(self, seconds: Any) -> float:
        return periodic(seconds, self.microbatches, self._shortest, self.plan.pipeline)


def rank_of(stage: int, plan: Plan) -> int:
    """Return the rank of the pipeline that has a stage."""
    if plan.schedule in IN_V:
        return min(stage, plan.stages - 1 - stage)
    return stage % plan.pipeline


def by_rank(values: Sequence[object], plan: Plan) -> list[list]:  # type: ignore[type-arg]
    """Return the values of the stages of each rank of the pipeline."""
    ranks: list[list[object]] = [[] for _ in range(plan.pipeline)]
    for index, value in enumerate(values):
        ranks[rank_of(index, plan)].append(value)
    return ranks


def _rounds(schedule: str, pipeline: int, microbatches: int) -> int:
    return microbatches if schedule == "gpipe" else min(microbatches, 4 * pipeline + microbatches % pipeline)


def _per_rank(plan: Plan) -> int | None:
    return plan.virtual_stages if plan.schedule == "interleaved1f1b" else None


class _StepGraph(NamedTuple):
    """The items of a step.

    Attributes:
        items: the actions and messages of the schedule; then the gradients and the optimizer of each rank.
        actions: number of an item -> the action that it is.
        last: number of the last action of each rank.
    """

    items: ItemGraph
    actions: dict[int, Action]
    last: list[int]


def _graph(plan: Plan, microbatches: int) -> _StepGraph:
    if plan.schedule == "interleaved1f1b" and plan.pipeline > 1 and microbatches % plan.pipeline:
        raise InputError(
            f"schedule='interleaved1f1b' needs a multiple of pipeline={plan.pipeline} micro-batches, got {microbatches}"
        )
    per_rank = checked_per_device(plan.stages, microbatches, plan.schedule, _per_rank(plan))
    return _cached_graph(plan.schedule, plan.stages // per_rank, per_rank, microbatches)


@lru_cache(maxsize=128)
def _cached_graph(schedule: str, n_ranks: int, per_rank: int, microbatches: int) -> _StepGraph:
    """Return the items of a step. Behind the works of the schedule are two for each rank: gradients and optimizer."""
    graph = ItemGraph()
    actions = {item: action for item, _, action in add_actions(graph, schedule, n_ranks, per_rank, microbatches)}
    devices = [Resource("device", (rank,)) for rank in range(n_ranks)]
    last = [graph.last[device] for device in devices]
    works = [len(WORKS) * n_ranks * per_rank + 2 * rank for rank in range(n_ranks)]
    gradients = [
        graph.add(Resource("gradients", device.ranks), work, number)
        for device, work, number in zip(devices, works, last, strict=True)
    ]
    for device, work in zip(devices, works, strict=True):
        graph.add(device, work + 1, *gradients)
    return _StepGraph(graph, actions, last)


@lru_cache(maxsize=4096)
def _ends_of_ranks(loads: tuple[StageLoad, ...], plan: Plan, microbatches: int) -> list[float]:
    """Return when each rank ends its last action, which plans share that differ in what follows."""
    graph = _graph(plan, microbatches)
    ends = graph.items.run([*seconds_of(loads), *[0.0] * (2 * len(graph.last))])
    return [ends[number] for number in graph.last]


def in_flight(
    schedule: str, pipeline: int, virtual_stages: int, microbatches: int, rank: int
) -> Sequence[tuple[int, ...]]:
    """Return how many micro-batches of each of its stages a rank holds, at each moment that may be its fullest.

    The result has a tuple per moment, with a number per stage of the rank.

    >>> [in_flight("1f1b", 4, 1, 8, rank) for rank in range(4)]
    [[(4,)], [(3,)], [(2,)], [(1,)]]
    >>> [max(stage) for stage in zip(*in_flight("interleaved1f1b", 2, 2, 4, 0))]
    [4, 2]
    """
    if schedule == "gpipe":
        return [(microbatches,)]
    if schedule == "zb":  # backwards of the weights are as late as the first stage's backwards in 1F1B
        return [(min(microbatches, pipeline),)]
    if virtual_stages == 1:
        return [(min(microbatches, pipeline - rank),)]
    return _fullest_moments(schedule, pipeline, virtual_stages, _rounds(schedule, pipeline, microbatches), rank)


@lru_cache(maxsize=2**14)
def _fullest_moments(
    schedule: str, pipeline: int, virtual_stages: int, microbatches: int, rank: int
) -> Sequence[tuple[int, ...]]:
    order = order_of(schedule, rank, pipeline, virtual_stages, microbatches)
    stages = sorted({action.stage for action in order})
    held, moments = dict.fromkeys(stages, 0), set()
    for action, after in zip(order, [*order[1:], None], strict=True):
        if action.kind in "FBW":
            held[action.stage] += 1 if action.kind == "F" else -1
        if action.kind == "F" and (after is None or after.kind != "F"):
            moments.add(tuple(held.values()))
    fullest: list[tuple[int, ...]] = []
    for moment in sorted(
        moments, key=sum, reverse=True
    ):  # one at which no stage holds more than at another is never it
        if not any(all(map(le, moment, other)) for other in fullest):
            fullest.append(moment)
    return fullest

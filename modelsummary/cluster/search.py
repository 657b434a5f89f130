"""The search for the best plan: enumerate, prune by memory, simulate what bounds of the time leave, best first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto
from heapq import heapify, heappop, heappush
from itertools import product
from typing import Any, NamedTuple, TypedDict, cast

from modelsummary.capture.run import no_collection
from modelsummary.cluster.plan import Checkpoint, Plan
from modelsummary.cluster.plans import Plans
from modelsummary.cluster.step import StepSimulator
from modelsummary.errors import InputError, StepError, check_integers
from modelsummary.keywords import check_names
from modelsummary.parallel.plan_arguments import LEVELS, level_of
from modelsummary.split.schedule import SCHEDULES

__all__ = ["SearchOptions", "candidates", "checked_options", "find_plans"]

_SCHEDULES = tuple(schedule for schedule in SCHEDULES if schedule != "gpipe")  # which 1F1B beats
_MICRO_BATCHES = (1, 2, 4, 8)
_VALUES = {"sequence": (False, True), "schedules": SCHEDULES}
_APPLICABLE: SearchOptions = {  # the defaults with ``applicable``
    "virtual_stages": [1],
    "schedules": ["1f1b", "zb"],
    "checkpoint": [None, "every"],
    "context": [1],
}
_NUMBERS = frozenset({"devices", "tensor", "context", "expert", "pipeline", "virtual_stages", "micro_batch"})


class SearchOptions(TypedDict, total=False):
    """What ``Statistics.plan`` searches; all options are optional.

    Attributes:
        devices: numbers of devices to use. Default: all of the cluster.
        tensor: ranks of tensor parallelism. Default: powers of two up to the devices of a node.
        sequence: whether its ranks share tokens out. Default: both.
        context: ranks of context parallelism. Default: 1; up to 16 for sequences of 32,768 tokens and more.
        expert: ranks that send tokens to each other's experts. Default: powers of two that divide all stacked experts.
        pipeline: ranks of the pipeline. Default: divisors of the devices up to the number of blocks.
        virtual_stages: stages per rank of the interleaved schedule. Default: 2, 3, 4, and one block per stage.
        sharded: what the ranks that share the data shard, as in ``Plan``; None: nothing. Default: all four.
        shard: ranks over which each copy is sharded, as in ``Plan``; the others are copies. None: all. Default: None.
        micro_batch: samples in a micro-batch. Default: 1, 2, 4, 8.
        checkpoint: what is computed again, as in ``Plan``. Default: nothing, selective and every block.
        schedules: names of schedules. Default: all but GPipe.
        applicable: only plans that ``StepEstimate.apply`` can train by; then by default one stage per rank, one rank of
            context parallelism, and no selective recomputation. Default: False.
        limit: number of plans to return, besides the Pareto set. Default: 10.
    """

    devices: Sequence[int]
    tensor: Sequence[int]
    sequence: Sequence[bool]
    context: Sequence[int]
    expert: Sequence[int]
    pipeline: Sequence[int]
    virtual_stages: Sequence[int]
    sharded: Sequence[str | int | None]
    shard: Sequence[int | None]
    micro_batch: Sequence[int]
    checkpoint: Sequence[Checkpoint]
    schedules: Sequence[str]
    applicable: bool
    limit: int


class _Level(Enum):
    """What the seconds of a candidate are: bounds of increasing cost, then the time of the simulated step."""

    COMPUTED = auto()  # nothing is communicated
    COMMUNICATED = auto()  # every rank begins as early as it can
    SIMULATED = auto()


class _Candidate(NamedTuple):
    """A plan that fits, with the seconds of its step or a bound of them."""

    seconds: float
    memory: int
    devices: int
    position: int
    plan: Plan
    level: _Level = _Level.COMPUTED


def candidates(simulator: StepSimulator, options: SearchOptions) -> Iterator[Plan]:
    """Yield the plans of the search space that use their devices and the batch evenly."""
    cluster, blocks = simulator.time_model.cluster, len(simulator.model.blocks)
    powers = [2**exponent for exponent in range(20)]
    long = simulator.sequence_length >= 32768
    tensors = options.get("tensor", [power for power in powers if power <= cluster.devices_per_node])
    contexts = options.get("context", [power for power in powers if power <= (16 if long else 1)])
    for devices in options.get("devices", [cluster.devices]):
        for tensor, context in product(tensors, contexts):
            rest, uneven = divmod(devices, tensor * context)
            if uneven or not rest:
                continue
            depths = options.get(
                "pipeline", [depth for depth in range(1, min(rest, blocks + 2) + 1) if rest % depth == 0]
            )
            for pipeline in depths:
                if rest % pipeline == 0:
                    yield from _with_stages(simulator, options, tensor, context, pipeline, rest // pipeline)


def _with_stages(
    simulator: StepSimulator, options: SearchOptions, tensor: int, context: int, pipeline: int, data: int
) -> Iterator[Plan]:
    shards = _shards(options, data, copies=data * context)
    sequences = [sequence for sequence in options.get("sequence", (False, True)) if tensor > 1 or not sequence]
    experts = [expert for expert in _experts(simulator, options) if tensor * context * data % expert == 0]
    batches = options.get("micro_batch", _MICRO_BATCHES)
    batches = [batch for batch in batches if simulator.global_batch % (data * batch) == 0]
    stages = list(_stages(simulator, options, pipeline))
    has_core = simulator.model.has_core if "checkpoint" not in options else False
    again = options.get("checkpoint", (None, "selective", "every") if has_core else (None, "every"))
    for (schedule, virtual), sequence, expert, (sharded, shard), batch, checkpoint in product(
        stages, sequences, experts, shards, batches, again
    ):
        if expert == 1 or ((tensor == 1 or sequence) and (not sharded or shard == data)):
            yield Plan(
                tensor=tensor,
                data=data // shard,
                shard=shard,
                pipeline=pipeline,
                expert=expert,
                context=context,
                sequence=sequence,
                sharded=sharded,
                checkpoint=checkpoint,
                micro_batch=batch,
                virtual_stages=virtual,
                schedule=schedule,
            )


def _shards(options: SearchOptions, data: int, copies: int) -> list[tuple[str | None, int]]:
    """Return what is sharded, with the ranks of ``shard``."""
    levels = [level_of(sharded, 1) for sharded in options.get("sharded", (None, *LEVELS))]
    levels = [level for level in levels if copies > 1 or not level]
    wanted = dict.fromkeys(data if shard is None else shard for shard in options.get("shard", [None]))
    shards = [shard for shard in wanted if data % shard == 0]
    return [(level, shard) for level in levels for shard in (shards if level else [1])]


def _experts(simulator: StepSimulator, options: SearchOptions) -> Sequence[int]:
    if "expert" in options:
        return options["expert"]
    n_experts = simulator.model.number_of_experts
    return [2**exponent for exponent in range(n_experts.bit_length()) if n_experts % 2**exponent == 0]


def _stages(simulator: StepSimulator, options: SearchOptions, pipeline: int) -> Iterator[tuple[str, int]]:
    """Yield schedules with their stages per rank."""
    blocks, schedules = len(simulator.model.blocks), options.get("schedules", _SCHEDULES)
    if pipeline == 1:
        yield (schedules[0] if schedules[0] in ("gpipe", "1f1b", "zb") else "1f1b"), 1
        return
    per_rank = max(blocks // pipeline, 1)
    for schedule in schedules:
        if schedule == "interleaved1f1b":
            deepest = (blocks + 2) // pipeline
            for virtual in options.get("virtual_stages", sorted({2, 3, 4, per_rank, deepest})):
                if 1 < virtual <= deepest:
                    yield schedule, virtual
        elif schedule in ("zbv", "dualpipev"):
            if 2 * pipeline <= blocks:
                yield schedule, 2
        else:
            yield schedule, 1


@no_collection()
def find_plans(simulator: StepSimulator, options: SearchOptions) -> Plans:
    """Return the fastest plans that fit, and the Pareto set of time, memory and devices.

    Args:
        simulator: simulates the plans.
        options: as ``checked_options`` returns them.

    Raises:
        InputError: no plan fits.
    """
    if options.get("applicable", False):
        options = {**_APPLICABLE, **options}
    tried = 0
    capacity = simulator.time_model.cluster.memory_bytes
    fitting: list[_Candidate] = []
    leanest: tuple[int, Plan] | None = None
    refused: Counter[str] = Counter()
    resolved: set[Plan] = set()
    for tried, candidate in enumerate(candidates(simulator, options), 1):
        try:
            if simulator.least_state_bytes(candidate) > capacity:
                refused["memory"] += 1
                continue
            plan = simulator.resolved(candidate)
            if plan in resolved:  # two values of checkpoint= may mean the same
                continue
            resolved.add(plan)
            memory = simulator.memory_bytes(plan)
            if memory <= capacity:
                fitting.append(_Candidate(simulator.least_seconds(plan), memory, plan.devices, tried, plan))
            elif leanest is None or memory < leanest[0]:
                leanest = memory, plan
        except (InputError, StepError) as error:
            refused[str(error)] += 1
    if not fitting:
        raise InputError(_nothing_fits(capacity, tried, leanest, refused))
    count, fastest = len(fitting), min(fitting)
    is_applied = options.get("applicable", False)
    reasons: dict[int, str] = {}
    taken, pareto = _best_first(simulator, fitting, options.get("limit", 10), reasons, applicable=is_applied)
    if not taken:
        what = "can be applied, with applicable=True" if is_applied else "can run its schedule"
        raise InputError(f"none of the {count:,} plans that fit {what}; the fastest: {reasons[fastest.position]}")
    steps = {candidate: simulator.simulate(candidate.plan) for candidate in taken}
    return Plans(list(steps.values()), [steps[candidate] for candidate in pareto], tried, count)


def _best_first(
    simulator: StepSimulator, queue: list[_Candidate], limit: int, reasons: dict[int, str], *, applicable: bool
) -> tuple[list[_Candidate], list[_Candidate]]:
    """Return the fastest plans with the Pareto set, and the Pareto set alone, fastest first.

    The plan with the least bound comes first. Its bound becomes tighter, and then the seconds of its step, before it
    is taken: so each plan that is taken is the fastest of all that are left. A plan is dropped if enough plans have
    been taken, and one of them needs neither more memory nor more devices.

    Args:
        simulator: simulates the plans.
        queue: the plans, with the first bound of their seconds; empty afterwards.
        limit: number of plans to return, in addition to the Pareto set.
        reasons: gets why a plan is left out that its schedule, or ``applicable``, does not allow, by its position.
        applicable: only plans that can be applied.
    """
    heapify(queue)
    taken: list[_Candidate] = []
    pareto: list[_Candidate] = []
    leanest: dict[int, int] = {}  # number of devices -> least memory of the plans in the Pareto set
    while queue:
        candidate = heappop(queue)
        is_beaten = any(
            devices <= candidate.devices and memory <= candidate.memory for devices, memory in leanest.items()
        )
        if is_beaten and len(taken) >= limit:
            continue
        if candidate.level is _Level.SIMULATED:
            taken.append(candidate)
            if not is_beaten:
                pareto.append(candidate)
                leanest[candidate.devices] = candidate.memory  # less than before, or it would be beaten
        elif candidate.level is _Level.COMMUNICATED:
            try:
                seconds = simulator.items(candidate.plan).seconds()
            except InputError as error:  # the schedule does not work with that many micro-batches
                reasons[candidate.position] = str(error)
                continue
            heappush(queue, candidate._replace(seconds=seconds, level=_Level.SIMULATED))
        elif applicable and (obstacle := _obstacle(simulator, candidate.plan)):
            reasons[candidate.position] = obstacle
        else:
            seconds = simulator.items(candidate.plan).least_seconds()
            heappush(queue, candidate._replace(seconds=seconds, level=_Level.COMMUNICATED))
    return taken, pareto


def _obstacle(simulator: StepSimulator, plan: Plan) -> str:
    return (
        "" if simulator.applier is None else simulator.applier.obstacle(plan, plan.microbatches(simulator.global_batch))
    )


def _nothing_fits(capacity: int, tried: int, leanest: tuple[int, Plan] | None, refused: Counter[str]) -> str:
    if leanest is not None:
        return (
            f"none of {tried:,} plans fits into {capacity:,} bytes per device: the smallest ({leanest[1].describe()}) "
            f"needs {leanest[0]:,}; use more devices, or search more kinds of parallelism"
        )
    if not tried:
        return (
            "no plan uses all devices and the batch evenly: tensor x context x pipeline must divide the devices, and "
            "data x shard x micro_batch the global batch; widen the options of the search"
        )
    reason = f"; most often: {refused.most_common(1)[0][0]}" if refused else ""
    return f"none of {tried:,} plans is possible{reason}; widen the options of the search"


def checked_options(options: Mapping[str, Any]) -> SearchOptions:
    """Return the options of a search. Raise ``InputError`` for an unknown one, or an unusable value."""
    check_names("plan", options, SearchOptions.__annotations__)
    for name, value in options.items():
        if name == "applicable":
            if not isinstance(value, bool):
                raise InputError(f"applicable must be True or False, got {value!r:.80}")
        elif name == "limit":
            check_integers(limit=value)
        elif isinstance(value, (str, bytes)) or not isinstance(value, Sequence) or not value:
            raise InputError(f"{name} must be a list of values to try, such as [1, 2], got {value!r:.80}")
        elif name in _VALUES and not all(
            type(entry) is type(_VALUES[name][0]) and entry in _VALUES[name] for entry in value
        ):
            raise InputError(f"{name} must be a list with values of {_VALUES[name]}, got {value!r}")
        elif name == "sharded":
            for level in value:
                level_of(level, 1)
        elif name == "shard" and not all(entry is None or (type(entry) is int and entry >= 1) for entry in value):
            raise InputError(f"shard must be a list of integers >= 1 or None, got {value!r}")
        elif name in _NUMBERS and not all(type(entry) is int and entry >= 1 for entry in value):
            raise InputError(f"{name} must be a list of integers >= 1, got {value!r}")
    return cast("SearchOptions", options)

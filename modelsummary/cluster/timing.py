"""Seconds of the parts of a model on one rank, and of what happens once per step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from statistics import NormalDist
from typing import NamedTuple

import torch

from modelsummary.cluster.collectives import Network, RankGroup
from modelsummary.cluster.parts import MicrobatchCollective, Part, Works
from modelsummary.cluster.plan import Plan, Recipe
from modelsummary.cluster.topology import Cluster, calibrated_device
from modelsummary.devices.kernel_time import DeviceModel, device_model
from modelsummary.devices.target import Target, seconds_of_calls
from modelsummary.operators.collective_calls import OPERATIONS, collective_of
from modelsummary.operators.operator_calls import OperatorCall
from modelsummary.operators.operator_work import Work
from modelsummary.split.event_engine import ItemGraph, Resource, Speed

__all__ = ["PartSeconds", "SecondsByCause", "TimeModel", "UnitSeconds"]

_GROUPS = ("tensor", "context", "expert")
_KERNELS = Resource("kernels")
# Standard deviation of the speed of boards of one type, which power and its chip decide. The boards of five clusters,
# some hundreds to thousands each, differ by 8 % from the slowest to the fastest but outliers (Sinha et al. 2022,
# https://arxiv.org/abs/2208.11035): six standard deviations.
_SPREAD_OF_BOARDS = 0.08 / 6
_LEAST_SPEED = 0.1  # of kernels, whatever communicates meanwhile
_MOST_EQUAL = 4  # equal units in a row that are run; each further one adds as much as the last of these

SecondsByCause = Mapping[str, float]
"""Seconds by cause: ``"compute"``, or what was waited for: ``"host"``, ``"tensor"``, ``"context"``, ``"expert"`` ..."""


@dataclass(frozen=True)
class PartSeconds:
    """Seconds of a part of the model for one micro-batch on one rank.

    Attributes:
        forward, backward: by cause.
        again: of recomputation, by cause.
        of_weights: of the backward, what computes gradients of weights alone.
        core: of the kernels that selective recomputation repeats.
    """

    forward: SecondsByCause
    backward: SecondsByCause
    again: SecondsByCause
    of_weights: float
    core: float


class UnitSeconds(NamedTuple):
    """Seconds of a unit of FSDP in one pass over the units of a rank.

    Attributes:
        gather: of gathering its parameters, before it computes.
        compute: of its kernels.
        reduce: of scattering its gradients, after it computed.
        replicas: of reducing the scattered gradients among replicas.
    """

    gather: float = 0.0
    compute: float = 0.0
    reduce: float = 0.0
    replicas: float = 0.0


class TimeModel:
    """The time models of the devices and of the network of a cluster.

    Args:
        cluster: the cluster.
        recipe: what is trained with. Default: ``Recipe()``.
    """

    def __init__(self, cluster: Cluster, recipe: Recipe | None = None) -> None:
        self.cluster, self.recipe = cluster, recipe or Recipe()
        self.device: DeviceModel = device_model(calibrated_device(cluster), attention=self.recipe.attention)
        self.network = Network(cluster)
        self.factors = cluster.factors
        self._work_seconds: dict[Work, float] = {}
        self._groups: dict[tuple[object, ...], dict[str, RankGroup]] = {}

    def slowest(self, ranks: int) -> float:
        """Return the seconds of kernels on the slowest of some boards, over those on a usual one.

        Ranks wait for each other in each step. Devices without a generation, such as CPUs, count as equal.

        >>> times = TimeModel(Cluster("A100"))
        >>> times.slowest(1), round(times.slowest(8), 3), round(times.slowest(1024), 3)
        (1.0, 1.019, 1.043)
        """
        if not self.device.spec.generation:
            return 1.0
        return 1 + _SPREAD_OF_BOARDS * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))  # Blom 1958

    def groups(self, plan: Plan) -> dict[str, RankGroup]:
        """Return the groups in which a rank communicates, by what they share.

        Copies and the ranks of context parallelism reduce ``"gradients"`` together. Where they shard, they gather and
        scatter ``"shards"``, and the ranks with the same shard reduce it among ``"replicas"``; without
        shards, ``"shards"`` are the copies. Ranks that hold the same experts reduce ``"expert_gradients"``.
        """
        split = plan.split_ranks
        key = plan.tensor, split, plan.context, plan.dispatch_ranks, plan.copies, plan.shards, bool(plan.sharded)
        if key not in self._groups:
            group, is_sent = self.network.group, plan.dispatch_ranks > 1
            self._groups[key] = {
                "tensor": group(plan.tensor),
                "context": group(plan.context, split),
                "expert": group(plan.expert, 1 if is_sent else plan.tensor),
                "gradients": group(plan.copies, split),
                "shards": group(plan.shards if plan.sharded else plan.copies, split),
                "replicas": group(plan.replicas, split * plan.shards),
                "expert_gradients": group(plan.expert_copies, plan.dispatch_ranks),
            }
        return self._groups[key]

    def over_copies(self, operation: str, nbytes: float, expert_nbytes: float, plan: Plan) -> float:
        """Return the seconds of collectives of parameters, or gradients, among the ranks that hold the same ones.

        Args:
            operation: as for ``Network.seconds``.
            nbytes: bytes on the rank, before they are sharded over copies, without divided experts.
            expert_nbytes: bytes of divided experts.
            plan: the plan.
        """
        groups = self.groups(plan)
        others = groups["gradients" if operation == "all_reduce" else "shards"]
        seconds = self.network.seconds(operation, nbytes, others)
        return seconds + self.network.seconds(operation, expert_nbytes, groups["expert_gradients"])

    def between_replicas(self, nbytes: float, plan: Plan) -> float:
        """Return the seconds in which replicas reduce the gradients of the shard that they have in common.

        Args:
            nbytes, plan: as for ``over_copies``.
        """
        return self.network.seconds("all_reduce", nbytes / plan.shards, self.groups(plan)["replicas"])

    def part(self, part: Part, plan: Plan) -> PartSeconds:
        """Return the seconds of a part of the model.

        Kernels and collectives follow each other. Meanwhile the host dispatches the operators, until whose end the part
        lasts. With ``overlap_tensor``, the gradient of what column-parallel layers took is reduced while these compute
        the gradient of their weights; under sequence parallelism, what they took is gathered again while they compute
        the gradient of their input. With ``overlap_experts``, a forward and a backward compute side by side while
        tokens travel, and share what both wait for.
        """
        kernels = {phase: self._sum(works) for phase, works in part.works.items()}
        groups, recipe = self.groups(plan), self.recipe
        spent: dict[str, dict[str, float]] = {}
        exchanged: dict[str, float] = {}
        for phase in ("forward", "backward", "again"):
            collectives = [
                collective
                for collective in part.collectives
                if (
                    collective.is_repeated and collective.phase == "forward"
                    if phase == "again"
                    else collective.phase == phase
                )
            ]
            sent = {
                (name, operation): sum(
                    self._collective(collective, groups[name])
                    for collective in collectives
                    if (collective.group, collective.operation) == (name, operation)
                )
                for name in _GROUPS
                for operation in OPERATIONS
            }
            waits = {name: sum(sent[name, operation] for operation in OPERATIONS) for name in _GROUPS}
            if recipe.overlap_experts:
                exchanged[phase] = sent["expert", "all_to_all"]
                waits["expert"] -= exchanged[phase]
            columns = column_weights = gather = reduction = 0.0
            if phase == "backward" and recipe.overlap_tensor:
                columns, column_weights = kernels.get("columns", 0.0), kernels.get("column weights", 0.0)
                reduction = sent["tensor", "reduce_scatter"] or sent["tensor", "all_reduce"]
                gather = sent["tensor", "all_gather"] / 2 if sent["tensor", "reduce_scatter"] else 0.0
                waits["tensor"] -= gather + reduction
            steps = [kernels.get(phase, 0.0) - columns - column_weights, *waits.values(), columns, column_weights]
            host = self.device.host if recipe.host_seconds is None else self.factors.host * recipe.host_seconds
            dispatching = host * part.operators.get(phase, 0)
            if recipe.kernels == "eager":  # a mode in Python sees each operator
                dispatching += host * self.device.policy_share * part.asked.get(phase, 0)
            seconds = [*steps, gather, reduction, dispatching, 0.0]
            ends = _PHASE.run(seconds, self._speed(groups, products=True))
            idle = {resource.kind: lost for resource, lost in _PHASE.idle(_KERNELS, ends).items()}
            compute = kernels.get(phase, 0.0)
            spent[phase] = {"compute": compute, **dict.fromkeys(_GROUPS, 0.0), **idle}
            slower = max(ends) - sum(spent[phase].values())  # by which kernels were slower meanwhile
            spent[phase]["tensor"] += max(0.0, slower)  # else rounding
        if sum(exchanged.values()):
            passes = [spent["forward"], spent["backward"]]
            exchanged.pop("again")
            computing = sum(of_phase["compute"] + of_phase.get("host", 0.0) for of_phase in passes)
            ends = _SIDE_BY_SIDE.run([computing, sum(exchanged.values())], self._speed(groups))
            for phase, seconds_sent in exchanged.items():
                spent[phase]["expert"] = (max(ends) - computing) * seconds_sent / sum(exchanged.values())
            spent["again"]["expert"] = spent["forward"]["expert"]
        share = kernels.get("weights", 0.0) / kernels["backward"] if kernels.get("backward") else 0.0
        there, back, again = spent.values()
        of_weights = share * (back["compute"] + back.get("host", 0.0))
        return PartSeconds(there, back, again, of_weights, kernels.get("core", 0.0))

    def over_units(self, units: Sequence[UnitSeconds], plan: Plan) -> float:
        """Return the seconds of a pass over the units of a rank, forward or backward.

        The next unit is gathered while one computes, and the gradients of the one before it are scattered; both in one
        stream. Replicas reduce in another one. Without ``overlap_gradients``, all follow each other. Of equal units in
        a row, a few are run.

        Args:
            units: the units in the order of the pass.
            plan: the plan.
        """
        runs = [(unit, len([*equal])) for unit, equal in groupby(units)]
        few = [min(count, _MOST_EQUAL) for _, count in runs]
        speed = self._speed(self.groups(plan))
        works = tuple(any(unit[work] for unit, _ in runs) for work in range(len(UnitSeconds._fields)))

        def seconds(counts: Sequence[int]) -> float:
            passed = [unit for (unit, _), count in zip(runs, counts, strict=True) for _ in range(count)]
            graph = _pass(len(passed), works, overlaps=self.recipe.overlap_gradients)
            return max(graph.run([time for unit in passed for time in unit], speed))

        total = of_few = seconds(few)
        for index, (_, count) in enumerate(runs):
            if count > _MOST_EQUAL:
                fewer = [number - (position == index) for position, number in enumerate(few)]
                total += (count - _MOST_EQUAL) * (of_few - seconds(fewer))
        return max(total, sum(unit.compute for unit in units))  # also where a few units differ from many

    def _speed(self, groups: Mapping[str, RankGroup], *, products: bool = False) -> Speed:
        """Return how fast kernels are while groups communicate, whose collectives take units and memory bandwidth.

        Both are lost: training of GPT and Llama on 4 devices lost 0.6 of the seconds of its communication (Lee et al.
        2025, https://arxiv.org/abs/2507.03114: kernels take 18.9 % longer where it overlaps, and steps 10.2 % more than
        that where it does not).

        Args:
            groups: the groups.
            products: only products run beside the collectives: their operands come from the caches.
        """
        taken = {name: self.network.units_taken(group) for name, group in groups.items()}
        if not products:
            taken = {name: share + self.network.bandwidth_taken(groups[name]) for name, share in taken.items()}

        def speed(running: Sequence[Resource]) -> list[float]:
            slowed = max(1 - sum(taken.get(resource.kind, 0.0) for resource in running), _LEAST_SPEED)
            return [slowed if resource == _KERNELS else 1.0 for resource in running]

        return speed

    def _sum(self, works: Works) -> float:
        return sum(times * self._kernel(work) for work, times in works)

    def _kernel(self, work: Work) -> float:
        if work not in self._work_seconds:
            self._work_seconds[work] = self.device.seconds(work)
        return self._work_seconds[work]

    def _collective(self, collective: MicrobatchCollective, group: RankGroup) -> float:
        """Return the seconds of a collective; of tokens, the dispatcher of the recipe may send fewer copies."""
        if (collective.group, collective.operation) == ("context", "all_to_all"):  # to the next rank of the ring
            return self.network.send(collective.nbytes, is_inside=group.nodes == 1)
        is_sent = collective.group == "expert" and collective.operation == "all_to_all"
        copies = self.recipe.copies_of(collective.copies, group.nodes if group.nodes > 1 else group.size)
        share = min(1.0, copies / collective.copies) if is_sent else 1.0
        return self.network.seconds(collective.operation, share * collective.nbytes, group)

    def seconds_of_calls(self, plan: Plan) -> Callable[[OperatorCall, Mapping[str, str]], float]:
        """Return a function from an operator call, and the groups that names mean, to the seconds of its forward."""
        of_kernels = seconds_of_calls(Target(self.device.spec.name, self.device))

        def seconds(call: OperatorCall, groups: Mapping[str, str]) -> float:
            collective = collective_of(call)
            if collective is None:
                return of_kernels(call)
            group = groups.get(collective.group, collective.group)
            sent = MicrobatchCollective(collective.operation, "forward", collective.nbytes, group)
            return self._collective(sent, self.groups(plan)[group])

        return seconds

    def moved(self, name: str, nbytes: float) -> float:
        """Return the seconds of an element-wise kernel that reads and writes ``nbytes``."""
        work = Work(name, "elementwise", torch.float32, (int(nbytes) // 4,), 0, int(nbytes))
        return self.device.seconds(work)


def _phase() -> ItemGraph:
    """Return the items of a forward or backward of a part.

    Kernels, what three groups send, and the kernels of column-parallel layers for their inputs and for their weights;
    what is gathered and reduced during the latter, and what the host does.
    """
    graph = ItemGraph()
    last = graph.add(_KERNELS, 0)
    for work, group in enumerate(_GROUPS, 1):
        last = graph.add(Resource(group), work, last)
    inputs = graph.add(_KERNELS, 4, last)
    gathered = graph.add(Resource("tensor"), 6, last)
    weights = graph.add(_KERNELS, 5, gathered)
    reduced = graph.add(Resource("tensor"), 7, inputs)
    graph.add(_KERNELS, 9, weights, reduced, graph.add(Resource("host"), 8))
    return graph


_PHASE, _SIDE_BY_SIDE = _phase(), ItemGraph()
_SIDE_BY_SIDE.add(_KERNELS, 0)
_SIDE_BY_SIDE.add(Resource("expert"), 1)


@lru_cache(maxsize=512)
def _pass(count: int, works: tuple[bool, ...], *, overlaps: bool) -> ItemGraph:
    """Return the items of a pass over units: for each unit the four kinds of work in ``UnitSeconds``.

    Args:
        count: number of units.
        works: the kinds of work that there are.
        overlaps: communication and kernels overlap; otherwise they follow each other.
    """
    graph = ItemGraph()
    stream, replicas = (Resource(kind) if overlaps else _KERNELS for kind in ("shards", "replicas"))
    gathers, _, reduces, reduces_again = works

    def gather(index: int, kernels: int) -> int:
        return graph.add(stream, 4 * index, kernels) if gathers and index < count else 0

    kernels, gathered = 0, gather(0, 0)
    for index in range(count):
        ahead = gather(index + 1, kernels) if overlaps else 0
        kernels = graph.add(_KERNELS, 4 * index + 1, gathered)
        reduced = graph.add(stream, 4 * index + 2, kernels) if reduces else 0
        if reduces_again:
            graph.add(replicas, 4 * index + 3, reduced)
        gathered = ahead if overlaps else gather(index + 1, kernels)
    return graph

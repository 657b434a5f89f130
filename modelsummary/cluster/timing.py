"""Seconds of the parts of a model on one rank, and of what happens once per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from modelsummary.cluster.collectives import OPERATIONS, Network, RankGroup
from modelsummary.cluster.parts import MicrobatchCollective, Part, Works
from modelsummary.cluster.plan import Plan, Recipe
from modelsummary.cluster.topology import Cluster
from modelsummary.cluster.weights import Weights
from modelsummary.devices.kernel_time import DeviceModel, device_model
from modelsummary.operators.operator_work import Work

__all__ = ["PartSeconds", "TimeModel"]


@dataclass(frozen=True)
class PartSeconds:
    """Seconds of a part of the model for one micro-batch on one rank.

    Attributes:
        forward, backward: of its kernels.
        core: of the kernels that selective recomputation repeats.
        forward_communication, backward_communication: of collectives for which the rank waits, by group:
            ``"tensor"``, ``"context"`` and ``"expert"``.
    """

    forward: float
    backward: float
    core: float
    forward_communication: Mapping[str, float]
    backward_communication: Mapping[str, float]

    @property
    def waits_forward(self) -> float:
        """Seconds that the forward waits for collectives."""
        return sum(self.forward_communication.values())

    @property
    def waits_backward(self) -> float:
        """Seconds that the backward waits for collectives."""
        return sum(self.backward_communication.values())


class TimeModel:
    """The time models of the devices and of the network of a cluster.

    Args:
        cluster: the cluster.
        attention: as in ``Recipe``.
    """

    def __init__(self, cluster: Cluster, attention: str | None = None) -> None:
        self.cluster = cluster
        self.device: DeviceModel = device_model(cluster.device, attention=attention)
        self.network = Network(cluster)
        self._work_seconds: dict[Work, float] = {}

    def groups(self, plan: Plan) -> dict[str, RankGroup]:
        """Return the groups in which a rank communicates, by what they share.

        Copies and the ranks of context parallelism reduce ``"gradients"`` together. They gather and scatter
        ``"shards"``, and the ranks with the same shard reduce it among ``"replicas"``. Ranks that hold the same experts
        reduce ``"expert_gradients"``.
        """
        return {
            "tensor": self.network.group(plan.tensor),
            "context": self.network.group(plan.context, plan.tensor),
            "expert": self.network.group(plan.expert),
            "gradients": self.network.group(plan.copies, plan.tensor),
            "shards": self.network.group(plan.shards, plan.tensor),
            "replicas": self.network.group(plan.replicas, plan.tensor * plan.shards),
            "expert_gradients": self.network.group(plan.expert_copies, plan.expert),
        }

    def over_copies(self, operation: str, nbytes: float, expert_nbytes: float, plan: Plan, units: int = 1) -> float:
        """Return the seconds of collectives of all parameters, or gradients, among the ranks that hold the same ones.

        Args:
            operation: as for ``Network.seconds``.
            nbytes: bytes on the rank, before they are sharded over copies, without divided experts.
            expert_nbytes: bytes of divided experts.
            plan: the plan.
            units: number of collectives into which they are divided.
        """
        groups = self.groups(plan)
        others = groups["gradients" if operation == "all_reduce" else "shards"]
        seconds = self.network.seconds(operation, nbytes / units, others)
        seconds += self.network.seconds(operation, expert_nbytes / units, groups["expert_gradients"])
        return units * seconds

    def between_replicas(self, nbytes: float, plan: Plan, units: int = 1) -> float:
        """Return the seconds in which replicas reduce the gradients of the shard that they have in common.

        Args:
            nbytes, plan, units: as for ``over_copies``.
        """
        shard = nbytes / plan.shards / units
        return units * self.network.seconds("all_reduce", shard, self.groups(plan)["replicas"])

    def part(self, part: Part, plan: Plan, recipe: Recipe) -> PartSeconds:
        """Return the seconds of a part of the model.

        Where the host takes longer to dispatch than the device to compute, collectives run meanwhile.
        """
        seconds = {phase: self._sum(works) for phase, works in part.works.items()}
        groups = self.groups(plan)
        waits: dict[str, dict[str, float]] = {"forward": {}, "backward": {}}
        for name in ("tensor", "context", "expert"):
            collectives = [collective for collective in part.collectives if collective.group == name]
            ahead = [collective for collective in collectives if collective.phase == "forward"]
            behind = [collective for collective in collectives if collective.phase == "backward"]
            waits["forward"][name] = sum(self._collective(collective, groups[name], recipe) for collective in ahead)
            hides = recipe.overlap_tensor and name == "tensor"
            room = seconds.get("columns", 0.0) if hides else 0.0
            waits["backward"][name] = self._backward_wait(behind, groups[name], recipe, room)
        host = self.device.host if recipe.host_seconds is None else recipe.host_seconds
        for phase, count in part.operators.items():
            idle = count * host - seconds.get(phase, 0.0)
            if idle > 0:
                seconds[phase] = count * host
                waiting = sum(waits[phase].values())
                left = max(1 - idle / waiting, 0.0) if waiting else 0.0
                waits[phase] = {name: left * value for name, value in waits[phase].items()}
        if recipe.overlap_experts:
            room = seconds.get("forward", 0.0) + seconds.get("backward", 0.0)
            left = self._left_of_exchange(
                room, [phase_waits["expert"] for phase_waits in waits.values()], groups["expert"]
            )
            for phase_waits in waits.values():
                phase_waits["expert"] *= left
        return PartSeconds(
            seconds.get("forward", 0.0),
            seconds.get("backward", 0.0),
            seconds.get("core", 0.0),
            waits["forward"],
            waits["backward"],
        )

    def _sum(self, works: Works) -> float:
        return sum(times * self._kernel(work) for work, times in works)

    def _kernel(self, work: Work) -> float:
        if work not in self._work_seconds:
            self._work_seconds[work] = self.device.seconds(work)
        return self._work_seconds[work]

    def _collective(self, collective: MicrobatchCollective, group: RankGroup, recipe: Recipe) -> float:
        """Return the seconds of a collective; of tokens, ``recipe`` may say that fewer copies leave a rank."""
        copies = recipe.copies_per_token
        share = 1.0 if collective.group != "expert" or copies is None else min(1.0, copies / collective.copies)
        return self.network.seconds(collective.operation, share * collective.nbytes, group)

    def _backward_wait(
        self, collectives: list[MicrobatchCollective], group: RankGroup, recipe: Recipe, room: float
    ) -> float:
        """Return the seconds that a backward waits for its collectives, or is slowed down by them.

        Args:
            room: seconds of the products in column-parallel layers. While these compute the gradient of their weights,
                the gradient of what they took is reduced; under sequence parallelism it is gathered while they compute
                the gradient of their input.
        """
        by_operation = dict.fromkeys(OPERATIONS, 0.0)
        for collective in collectives:
            by_operation[collective.operation] += self._collective(collective, group, recipe)
        everything = sum(by_operation.values())
        if not room:
            return everything
        hides = by_operation["all_reduce"]
        if by_operation["reduce_scatter"]:
            hides = by_operation["reduce_scatter"] + by_operation["all_gather"] / 2
        else:
            room /= 2
        return everything - hides + self.overlapped(room, hides, group) - room

    def _left_of_exchange(self, room: float, exchanges: Sequence[float], group: RankGroup) -> float:
        """Return the share of the seconds of exchanging tokens that remains if kernels run meanwhile.

        A forward and a backward run side by side, so what they exchange overlaps with what both compute.

        Args:
            room: seconds of the kernels of forward and backward.
            exchanges: seconds in which each of them exchanges tokens.
            group: the ranks of the experts.
        """
        everything = sum(exchanges)
        return (self.overlapped(room, everything, group) - room) / everything if everything else 1.0

    def overlapped(
        self, computing: float, communicating: float, group: RankGroup, *others: tuple[float, RankGroup]
    ) -> float:
        """Return the seconds of computing while groups communicate, which takes units from the kernels.

        Groups communicate side by side, each in its own stream.
        """
        streams = ((communicating, group), *others)
        lost = sum(self.network.units_taken(rank_group) * seconds for seconds, rank_group in streams)
        return max(computing + lost, *(seconds for seconds, _ in streams))

    def moved(self, name: str, nbytes: float) -> float:
        """Return the seconds of an element-wise kernel that reads and writes ``nbytes``."""
        return self.device.seconds(Work(name, "elementwise", torch.float32, (int(nbytes) // 4,), 0, int(nbytes)))

    def accumulation(self, weights: Weights, recipe: Recipe) -> float:
        """Return the seconds of adding the gradients of a micro-batch to their sums: one is read, the other updated."""
        return self.moved("accumulation", weights.trained + 2 * weights.gradient_bytes(recipe))

    def optimizer(self, weights: Weights, recipe: Recipe) -> float:
        """Return the seconds of an optimizer step: it reads and writes trained parameters once.

        Read: gradients (once more for their norm), states, master weights. Written: all but gradients.
        """
        states = weights.state_bytes(recipe) + 4 * weights.masters
        return self.moved("optimizer", 2 * (weights.gradient_bytes(recipe) + states + weights.trained) - weights.narrow)

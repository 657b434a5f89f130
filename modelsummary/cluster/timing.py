"""Seconds of the parts of a model on one rank, and of what happens once per step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from modelsummary.cluster.collectives import Network, RankGroup
from modelsummary.cluster.parts import MicrobatchCollective, Part, Works
from modelsummary.cluster.plan import Plan, Recipe
from modelsummary.cluster.topology import Cluster
from modelsummary.costs.kernel_time import DeviceModel, device_model
from modelsummary.costs.operator_work import Work

__all__ = ["PartSeconds", "TimeModel", "seconds_of"]


@dataclass(frozen=True)
class PartSeconds:
    """Seconds of a part of the model for one micro-batch on one rank.

    Attributes:
        forward, backward: of its kernels.
        core: of the kernels that selective recomputation repeats.
        forward_communication, backward_communication: of collectives for which the rank waits, by group:
            ``"tensor"`` and ``"context"``.
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
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.device: DeviceModel = device_model(cluster.device)
        self.network = Network(cluster)
        self._known: dict[Work, float] = {}

    def groups(self, plan: Plan) -> dict[str, RankGroup]:
        """Return the groups in which a rank communicates: ``"tensor"``, ``"context"`` and ``"gradients"``.

        Copies and the ranks of context parallelism reduce gradients together.
        """
        return {
            "tensor": self.network.group(plan.tensor),
            "context": self.network.group(plan.context, plan.tensor),
            "gradients": self.network.group(plan.context * plan.data, plan.tensor),
        }

    def part(self, part: Part, plan: Plan, recipe: Recipe) -> PartSeconds:
        """Return the seconds of a part of the model.

        Where the host takes longer to dispatch than the device to compute, collectives run meanwhile.
        """
        seconds = {phase: self._sum(works) for phase, works in part.works.items()}
        groups = self.groups(plan)
        waits: dict[str, dict[str, float]] = {"forward": {}, "backward": {}}
        for name in ("tensor", "context"):
            own = [each for each in part.collectives if each.group == name]
            ahead = [each for each in own if each.phase == "forward"]
            behind = [each for each in own if each.phase == "backward"]
            waits["forward"][name] = sum(self._collective(each, groups[name]) for each in ahead)
            hides = recipe.overlap_tensor and name == "tensor"
            room = seconds.get("columns", 0.0) if hides else 0.0
            waits["backward"][name] = self._backward_wait(behind, groups[name], room)
        host = self.device.host if recipe.host_seconds is None else recipe.host_seconds
        for phase, count in part.operators.items():
            idle = count * host - seconds.get(phase, 0.0)
            if idle > 0:
                seconds[phase] = count * host
                waiting = sum(waits[phase].values())
                left = max(1 - idle / waiting, 0.0) if waiting else 0.0
                waits[phase] = {name: left * value for name, value in waits[phase].items()}
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
        if work not in self._known:
            self._known[work] = self.device.seconds(work)
        return self._known[work]

    def _collective(self, each: MicrobatchCollective, group: RankGroup) -> float:
        return self.network.seconds(each.operation, each.nbytes, group)

    def _backward_wait(self, collectives: list[MicrobatchCollective], group: RankGroup, room: float) -> float:
        """Return the seconds that a backward waits for its collectives, or is slowed down by them.

        Args:
            room: seconds of the products in column-parallel layers. While these compute the gradient of their weights,
                the gradient of what they took is reduced; under sequence parallelism it is gathered while they compute
                the gradient of their input.
        """
        by_operation = {"all_reduce": 0.0, "reduce_scatter": 0.0, "all_gather": 0.0}
        for each in collectives:
            by_operation[each.operation] += self._collective(each, group)
        everything = sum(by_operation.values())
        if not room:
            return everything
        hides = by_operation["all_reduce"]
        if by_operation["reduce_scatter"]:
            hides = by_operation["reduce_scatter"] + by_operation["all_gather"] / 2
        else:
            room /= 2
        return everything - hides + self.overlapped(room, hides, group) - room

    def overlapped(self, computing: float, communicating: float, group: RankGroup) -> float:
        """Return the seconds of computing while a group communicates, which takes units from the kernels."""
        return max(communicating, computing + self.network.units_taken(group) * communicating)

    def copies(self, elements: float, nbytes: int) -> float:
        """Return the seconds of copying tensors: ``nbytes`` are read and written per element."""
        return self.device.seconds(
            Work("copies", "elementwise", torch.float32, (int(elements),), 0, int(elements * nbytes))
        )

    def accumulation(self, elements: int, recipe: Recipe, weight_bytes: int) -> float:
        """Return the seconds of adding the gradients of a micro-batch to their sums: one is read, the other updated."""
        gradient = recipe.gradient_dtype.itemsize if recipe.gradient_dtype is not None else weight_bytes
        work = Work(
            "accumulation", "elementwise", torch.float32, (elements,), 0, elements * (weight_bytes + 2 * gradient)
        )
        return self.device.seconds(work)

    def optimizer(self, elements: float, recipe: Recipe, weight_bytes: int) -> float:
        """Return the seconds of an optimizer step over ``elements`` parameters: it reads and writes them once.

        Read: gradients (once more for their norm), states, master weights. Written: all but gradients.
        """
        gradient = recipe.gradient_dtype.itemsize if recipe.gradient_dtype is not None else weight_bytes
        master = 4 if recipe.master_weights and weight_bytes < 4 else 0
        moved = 2 * gradient + 2 * recipe.state_bytes + 2 * master + (1 if master else 2) * weight_bytes
        work = Work("optimizer", "elementwise", torch.float32, (int(elements),), 0, int(elements * moved))
        return self.device.seconds(work)


def seconds_of(time_model: TimeModel, parts: Mapping[str, Part], plan: Plan, recipe: Recipe) -> dict[str, PartSeconds]:
    """Return the seconds of each part."""
    return {name: time_model.part(part, plan, recipe) for name, part in parts.items()}

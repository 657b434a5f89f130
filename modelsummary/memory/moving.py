"""What a block keeps for the backward that may wait in the memory of the host, and how long the block takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from modelsummary.capture.trace import Trace
from modelsummary.devices.target import Target, host_calls
from modelsummary.memory.checkpointing import in_blocks
from modelsummary.memory.saved import Remaking
from modelsummary.memory.timeline import is_held
from modelsummary.operators.kernels import StepOperator
from modelsummary.operators.operator_calls import OperatorCall

__all__ = ["LEAST_MOVED", "BlockTimes", "Movable", "host_cost_on", "movable_in", "times_of"]

LEAST_MOVED = 2**16  # bytes of a storage; to move fewer takes the host longer than it is worth


class Movable(NamedTuple):
    """A storage that a block keeps for the backward, and that may wait in the memory of the host.

    Attributes:
        number: number of the first tensor in it, of all tensors that autograd saves in a call of the block.
        nbytes: its bytes.
        last_use, next_use: the last operator of the forward that touches it, and the first one after the forward.
    """

    number: int
    nbytes: int
    last_use: int
    next_use: int | None

    def is_away(self, operator_number: int) -> bool:
        """Return True if the device need not have it while an operator runs."""
        return self.last_use < operator_number and (self.next_use is None or operator_number < self.next_use)


def movable_in(trace: Trace, fqns: Sequence[str]) -> list[list[Movable]]:
    """Return what each block may move to the host, in the order in which autograd saves it.

    Nothing else may hold it: neither another block, nor the model's result. Nothing may write into it after it was
    saved, which the copy would not see.

    Args:
        trace: a step; storages were followed.
        fqns: names of the blocks.
    """
    n_calls = Counter(call.key[0] for call in trace.calls)
    n_saves = Counter(save.storage for save in trace.saves)
    remaking = Remaking(trace)
    movable: list[list[Movable]] = [[] for _ in fqns]
    for block, saves in enumerate(in_blocks(trace.saves, fqns)):
        seen: set[int] = set()
        n_saves_inside = Counter(save.storage for save in saves)
        for number, save in enumerate(saves if n_calls[fqns[block]] == 1 else ()):
            storage = trace.storages_by_identity.get(save.storage)
            if storage is None or save.storage in seen:
                continue
            seen.add(save.storage)
            is_kept = storage.kind == "activations" and is_held(storage, trace) and storage.nbytes >= LEAST_MOVED
            is_shared = n_saves[save.storage] > n_saves_inside[save.storage] or save.storage in trace.results
            if is_kept and not is_shared and remaking.written_last.get(save.storage, -1) < save.at:
                movable[block].append(Movable(number, storage.nbytes, *remaking.idle(storage)))
    return movable


class BlockTimes(NamedTuple):
    """What a block takes in a step without a plan, on the device and on its host, in the unit of a plan's costs."""

    forward: int = 0
    forward_on_host: int = 0
    backward: int = 0
    backward_on_host: int = 0

    def longer(self, again: int = 0, asked: int = 0, again_on_host: int = 0, transfer: int = 0) -> int:
        """Return how much longer it takes with a plan.

        Of the device and its host, the slower one decides. A transfer runs beside both.

        Args:
            again: what the device runs again.
            asked: time of the host in the forward for what is kept.
            again_on_host: time of the host for what runs again.
            transfer: time in which what is moved passes the link in one direction.

        >>> times = BlockTimes(forward=10, forward_on_host=4, backward=20, backward_on_host=8)
        >>> times.longer(again=5), times.longer(asked=7), times.longer(again=5, transfer=27)
        (5, 1, 24)
        """
        forward = max(self.forward, self.forward_on_host + asked)
        backward = max(self.backward + again, self.backward_on_host + again_on_host)
        plain = max(self.forward, self.forward_on_host) + max(self.backward, self.backward_on_host)
        return max(forward, transfer) + max(backward, transfer) - plain


def times_of(
    trace: Trace,
    fqns: Sequence[str],
    cost_of: Callable[[OperatorCall], int],
    host_cost_of: Callable[[StepOperator], Mapping[str, int]],
) -> list[BlockTimes]:
    """Return what each block takes.

    Args:
        trace: a step without a plan.
        fqns: names of the blocks.
        cost_of: function from an operator call to what it takes on the device.
        host_cost_of: function from an operator to what it takes on the host, by phase.
    """
    times = []
    for operators in in_blocks(trace.operators, fqns):
        on_device: Counter[str] = Counter()  # phase -> cost
        on_host: Counter[str] = Counter()
        for operator in operators:
            if operator.phase in ("forward", "backward"):
                on_device[operator.phase] += cost_of(operator.run.call)
                on_host.update(host_cost_of(operator))
        times.append(BlockTimes(*(cost[phase] for phase in ("forward", "backward") for cost in (on_device, on_host))))
    return times


def host_cost_on(target: Target | None, per_second: float) -> tuple[Callable[[StepOperator], dict[str, int]], int]:
    """Return a function from an operator to what it takes on the host, by phase, and what a policy takes there.

    A CPU dispatches and computes in turns, and its kernels were measured with their dispatch.

    Args:
        target: the device; None: nothing takes time.
        per_second: units of the costs in a second.
    """
    if target is None or target.is_cpu:
        return lambda _: {}, 0
    costs = {kind: round(per_second * seconds) for kind, seconds in target.times.host_seconds.items()}

    def cost(operator: StepOperator) -> dict[str, int]:
        dispatch = "operator" if operator.phase == "forward" else "backward operator"
        kinds = [*host_calls(operator)]
        kinds += [(operator.phase, dispatch)] if operator.run.call.rule.launches_kernel else []
        sums: Counter[str] = Counter()
        for phase, kind in kinds:
            sums[phase] += costs[kind]
        return sums

    return cost, costs["policy"]

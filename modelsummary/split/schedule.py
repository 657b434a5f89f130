"""Simulate pipeline schedules: the time of a step, the bubble, and the activations that each device holds.

A schedule is an order of actions for each device. An action begins when its device is free and its input has arrived:
a forward needs the previous stage, a backward the next one. Between two stages, a link in each direction carries one
message at a time, while the devices compute. Orders: GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019),
interleaved 1F1B (Narayanan et al. 2021), and zero bubble ZB-H1 (Qi et al. 2023), which computes the gradients of inputs
and of weights in separate actions. ZB-V (Qi et al. 2024) and DualPipeV (DeepSeek 2025) have two stages per device;
their orders are torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from modelsummary.errors import InputError, check_integers, is_number
from modelsummary.keywords import choice_of
from modelsummary.split.event_engine import ItemGraph, Resource
from modelsummary.tables import Printed, Report
from modelsummary.units import decimals, duration, percent

__all__ = [
    "IN_V",
    "ORDERS",
    "SCHEDULES",
    "WORKS",
    "Action",
    "Simulation",
    "StageLoad",
    "add_actions",
    "checked_per_device",
    "order_of",
    "seconds_of",
    "simulate",
]

# Schedules whose stages are dealt to devices down and up again; torch makes the order of their actions.
IN_V = {"zbv": "ScheduleZBVZeroBubble", "dualpipev": "ScheduleDualPipeV"}
# Names of the engine's actions -> kinds of ``Action``; the engine's own values are numbers in torch 2.6.
_KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
WORKS = "FIWBM"  # of a stage: the kinds of actions, and the message to a neighbour


@dataclass(frozen=True)
class StageLoad:
    """The time and memory that one micro-batch takes in a stage.

    Attributes:
        forward: time of the forward, in any unit.
        backward_input: time of the gradient of the inputs, in the same unit.
        backward_weight: time of the gradient of the weights, in the same unit.
        crossing_bytes: bytes sent to the next stage, and received from it as gradients. Default: 0.
        activation_bytes: bytes held from the forward to the end of the backward. Default: 0.
        message: time of a message to the next stage, or back, besides its bytes; in the same unit. Default: 0.

    >>> StageLoad(forward=1.0, backward_input=1.0, backward_weight=1.0, activation_bytes=2**20).activation_bytes
    1048576
    """

    forward: float
    backward_input: float
    backward_weight: float
    crossing_bytes: float = 0
    activation_bytes: float = 0
    message: float = 0

    @property
    def backward(self) -> float:
        """Time of a whole backward."""
        return self.backward_input + self.backward_weight


class Action(NamedTuple):
    """An action of a device: ``"F"`` forward, ``"B"`` backward, or its halves ``"I"`` (inputs), ``"W"`` (weights)."""

    kind: str
    stage: int
    microbatch: int
    begin: float = 0.0
    end: float = 0.0


@dataclass(frozen=True, repr=False)
class Simulation(Printed):
    """A simulated training step; ``print`` shows a table with one row per device.

    Attributes:
        schedule: name of the schedule.
        n_microbatches: micro-batches in the step.
        makespan: time from the first forward to the end of the last backward, in the unit of the loads.
        bubble: fraction of the devices' time spent waiting, 0 to 1.
        busy: time that each device computes, in the unit of the loads.
        peak_activation_bytes: the most bytes of activations that each device holds at one time.
        actions: timed actions of each device, in order.
        unit: unit of the loads: ``"s"``, or the cost that stands for the time, such as ``"macs"``; empty if unknown.
    """

    schedule: str
    n_microbatches: int
    makespan: float
    bubble: float
    busy: list[float]
    peak_activation_bytes: list[float]
    actions: list[list[Action]]
    unit: str = ""

    def timeline(self, width: int = 100) -> str:
        """Return the step as text with one line per device: time runs to the right, dots are waiting.

        Digits are forwards, letters backwards: 0 and a are micro-batch 0. Capitals are backwards of the weights.

        Args:
            width: columns for the whole step.

        >>> print(simulate([StageLoad(1, 1, 1)] * 2, n_microbatches=2, schedule="gpipe").timeline(width=27))
          0 000111.........aaaaaabbbbbb
          1 ...000111aaaaaabbbbbb......
        """
        lines = []
        for device, actions in enumerate(self.actions):
            cells = ["."] * width
            for action in actions:
                first, last = (int(time / self.makespan * width) for time in (action.begin, action.end))
                letter = chr(ord("a") + action.microbatch % 26)
                marks = {"F": str(action.microbatch % 10), "W": letter.upper()}
                cells[first:last] = marks.get(action.kind, letter) * (last - first)
            lines.append(f"{device:>3} {''.join(cells)}")
        return "\n".join(lines)

    def _report(self) -> Report:
        rows = [
            [device, self._time(busy), percent(1 - busy / self.makespan), decimals(peak, 0)]
            for device, (busy, peak) in enumerate(zip(self.busy, self.peak_activation_bytes, strict=True))
        ]
        headers = ["Device", "Busy", "Waiting", "Peak activations (B)"]
        summary = f"{self.schedule}, {self.n_microbatches} micro-batches: step {self._time(self.makespan)}"
        return Report(rows, headers, "rrrr", below=[f"{summary}, bubble {percent(self.bubble)}"])

    def _time(self, time: float) -> str:
        """Return a time with its unit."""
        if self.unit == "s":
            return duration(1e3 * time)
        text = f"{time:,.0f}" if time >= 1000 else f"{time:.4g}"
        return f"{text} {self.unit}".rstrip()


def simulate(
    loads: Sequence[StageLoad],
    n_microbatches: int,
    schedule: str = "1f1b",
    *,
    stages_per_device: int | None = None,
    bandwidth: float | None = None,
    unit: str = "",
) -> Simulation:
    """Simulate one training step.

    Args:
        loads: load of each stage for one micro-batch.
        n_microbatches: micro-batches in the step.
        schedule: one of ``SCHEDULES``.
        stages_per_device: stages per device of the interleaved schedule. Default: 2. Device ``d`` of ``p`` has the
            stages d, d + p ... in ``"zbv"`` and ``"dualpipev"`` the stages d and 2 p - 1 - d.
        bandwidth: bytes per unit of time between two stages; None: transfers take no time.
        unit: unit of the loads, for the printed table: ``"s"`` or the name of a cost.

    Raises:
        InputError: an argument is out of range, or the stages cannot be dealt evenly to devices.

    >>> step = simulate([StageLoad(1.0, 1.0, 1.0)] * 4, n_microbatches=8)  # a forward takes 1, a backward 2
    >>> step.makespan, round(step.bubble, 3)  # (p - 1) / (m + p - 1) = 3 / 11
    (33.0, 0.273)
    """
    if bandwidth is not None and not (is_number(bandwidth) and bandwidth > 0):
        raise InputError(
            f"bandwidth must be a finite number > 0 in bytes per unit of time, got {bandwidth!r}; leave it out for "
            "links that take no time"
        )
    schedule = choice_of(schedule, ORDERS, "schedule")
    per_device = checked_per_device(len(loads), n_microbatches, schedule, stages_per_device)
    n_devices = len(loads) // per_device
    graph = ItemGraph()
    order = add_actions(graph, schedule, n_devices, per_device, n_microbatches)
    ends = graph.run(seconds_of(loads, bandwidth))
    begins = graph.begins(ends)
    actions: list[list[Action]] = [[] for _ in range(n_devices)]
    for number, device, action in order:
        actions[device].append(action._replace(begin=begins[number], end=ends[number]))
    makespan = max(action.end for device_actions in actions for action in device_actions)
    busy = [sum(action.end - action.begin for action in device_actions) for device_actions in actions]
    bubble = 1 - sum(busy) / (n_devices * makespan) if makespan else 0.0
    peaks = [_peak(device_actions, loads) for device_actions in actions]
    return Simulation(schedule, n_microbatches, makespan, bubble, busy, peaks, actions, unit)


def checked_per_device(n_stages: int, n_microbatches: int, schedule: str, stages_per_device: int | None) -> int:
    """Return the number of stages per device. Raise ``InputError`` if an argument is out of range."""
    check_integers(n_microbatches=n_microbatches)
    per_device = (stages_per_device or 2) if schedule == "interleaved1f1b" else (2 if schedule in IN_V else 1)
    if stages_per_device is not None and stages_per_device != per_device:
        raise InputError(f"stages_per_device must be 1 for {schedule!r}, got {stages_per_device}; leave it out")
    if not n_stages or n_stages % per_device:
        raise InputError(
            f"schedule={schedule!r} needs a multiple of {per_device} stages, at least {per_device}, got {n_stages}"
        )
    n_devices = n_stages // per_device
    if schedule == "dualpipev" and n_microbatches < n_stages:
        raise InputError(
            f"dualpipev needs as many micro-batches as stages or more, got n_microbatches={n_microbatches} for "
            f"{n_stages} stages"
        )
    if schedule == "interleaved1f1b" and per_device > 1 and n_microbatches % max(1, n_microbatches // n_devices):
        raise InputError(
            f"interleaved1f1b on {n_devices} devices needs equal rounds of micro-batches, which "
            f"n_microbatches={n_microbatches} does not give; pass a multiple of {n_devices}"
        )
    return per_device


# ----------------------------------------------------------------------------------------------- orders


def order_of(schedule: str, device: int, n_devices: int, per_device: int, m: int) -> list[Action]:
    """Return the actions of a device for ``m`` micro-batches, in order.

    >>> [(action.kind, action.microbatch) for action in order_of("1f1b", 1, n_devices=2, per_device=1, m=2)]
    [('F', 0), ('B', 0), ('F', 1), ('B', 1)]
    """
    return ORDERS[schedule](device, n_devices, per_device, m)


def _gpipe(device: int, _n_devices: int, _per_device: int, m: int) -> list[Action]:
    """Return all forwards, then all backwards."""
    return [Action(kind, device, microbatch) for kind in "FB" for microbatch in range(m)]


def _one_forward_one_backward(device: int, n_devices: int, per_device: int, m: int) -> list[Action]:
    """Return a forward and a backward in turn, after the forwards that the later stages need to begin."""
    total = m * per_device
    in_round = m // max(1, m // n_devices) if per_device > 1 else m
    if per_device == 1:
        warmup = min(m, n_devices - device - 1)
    else:
        warmup = min(total, (per_device - 1) * in_round + 2 * (n_devices - 1 - device))

    def step(kind: str, position: int) -> Action:
        round_, within = divmod(position, in_round * per_device)
        chunk, offset = divmod(within, in_round)
        chunk = chunk if kind == "F" else per_device - 1 - chunk
        return Action(kind, device + chunk * n_devices, round_ * in_round + offset)

    order = [step("F", position) for position in range(warmup)]
    for position in range(total - warmup):
        order += [step("F", warmup + position), step("B", position)]
    return order + [step("B", position) for position in range(total - warmup, total)]


def _in_v(schedule: str, device: int, n_devices: int, _per_device: int, m: int) -> list[Action]:
    """Return the actions of a device in the order that torch's engine has."""
    import torch
    from torch.distributed.pipelining import schedules

    from modelsummary._torch import planned_actions

    kind: Any = getattr(schedules, IN_V[schedule], None)
    if kind is None:  # torch 2.6 has the other one
        raise InputError(f"schedule={schedule!r} needs torch >= 2.9, got {torch.__version__}; choose another schedule")
    return [
        Action(_KINDS[action.computation_type.name], action.stage_index, action.microbatch_index)
        for action in planned_actions(kind, device, n_devices, m)
    ]


def _zero_bubble(device: int, n_devices: int, _per_device: int, m: int) -> list[Action]:
    """Return the actions of a device with one stage in ZB-H1.

    The order is 1F1B, but backwards of the weights run ``device`` micro-batches later. So each stage holds as many
    activations as the first stage of 1F1B, and the last backwards of the weights fill the bubble at the end.
    """
    warmup = min(m, n_devices - device)
    order = [Action("F", device, microbatch) for microbatch in range(warmup)]
    for microbatch in range(m):
        order.append(Action("I", device, microbatch))
        if microbatch >= device:
            order.append(Action("W", device, microbatch - device))
        if warmup + microbatch < m:
            order.append(Action("F", device, warmup + microbatch))
    return order + [Action("W", device, microbatch) for microbatch in range(max(0, m - device), m)]


Order = Callable[[int, int, int, int], list[Action]]
ORDERS: dict[str, Order] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved1f1b": _one_forward_one_backward,
    "zb": _zero_bubble,
    **{name: partial(_in_v, name) for name in IN_V},
}
"""Name of a schedule -> the actions of a device: of its number, all devices, stages per device, and micro-batches."""
SCHEDULES = tuple(ORDERS)


def seconds_of(loads: Sequence[StageLoad], bandwidth: float | None = None) -> list[float]:
    """Return the seconds of the works that ``add_actions`` adds."""
    return [
        seconds
        for load in loads
        for seconds in (
            load.forward,
            load.backward_input,
            load.backward_weight,
            load.backward,
            load.message + (load.crossing_bytes / bandwidth if bandwidth is not None else 0.0),
        )
    ]


def add_actions(
    graph: ItemGraph, schedule: str, n_devices: int, per_device: int, m: int
) -> list[tuple[int, int, Action]]:
    """Add the actions of a schedule to a graph, and the messages between neighbouring stages.

    A backward waits for the next stage's, be it whole or the half for the inputs. The half for the weights follows the
    other one on its device. Resources are ``"device"`` and ``"link"``.

    Returns:
        The number of each action's item, its device, and the action.
    """
    orders = [order_of(schedule, device, n_devices, per_device, m) for device in range(n_devices)]
    devices = [Resource("device", (device,)) for device in range(n_devices)]
    n_stages, works = n_devices * per_device, len(WORKS)
    links = {step: [Resource("link", (stage, stage + step)) for stage in range(n_stages)] for step in (1, -1)}
    arrived: dict[tuple[int, int, int], int] = {}  # direction, receiving stage, micro-batch -> message
    added: list[tuple[int, int, Action]] = []
    done, total = [0] * n_devices, sum(map(len, orders))
    while len(added) < total:
        before = len(added)
        for device, order in enumerate(orders):
            for position in range(done[device], len(order)):
                kind, stage, microbatch, _, _ = order[position]
                step = 1 if kind == "F" else -1
                waits = kind != "W" and 0 <= stage - step < n_stages
                message = arrived.get((step, stage, microbatch), 0)
                if waits and not message:
                    break
                work = works * stage + WORKS.index(kind)
                number = graph.add(devices[device], work, *((message,) if waits else ()))
                added.append((number, device, order[position]))
                done[device] = position + 1
                if kind != "W" and 0 <= stage + step < n_stages:
                    work = works * min(stage, stage + step) + WORKS.index("M")
                    arrived[step, stage + step, microbatch] = graph.add(links[step][stage], work, number)
        assert len(added) > before, "the schedule deadlocks"
    return added


def _peak(actions: Sequence[Action], loads: Sequence[StageLoad]) -> float:
    held = peak = 0.0
    for action in actions:
        if action.kind == "F":
            held += loads[action.stage].activation_bytes
            peak = max(peak, held)
        elif action.kind in "BW":
            held -= loads[action.stage].activation_bytes
    return peak

"""``Plans``: the result of a search, as a table and a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, overload

from modelsummary.cluster.estimate import NOT_ALLOCATED, StepEstimate
from modelsummary.cluster.pictures import stacked_bars
from modelsummary.cluster.plan import Plan
from modelsummary.errors import InputError
from modelsummary.extras import Records
from modelsummary.tables import Printed, Report
from modelsummary.units import duration, number_of, percent, scaled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from modelsummary.parallel import ParallelPlan

__all__ = ["Plans"]

_MOST_ROWS = 20


class Plans(Printed, Records, Sequence[StepEstimate]):
    """Plans that fit into memory, fastest first; ``print`` shows a table of the first 20.

    The column "Applies" says which of them ``apply`` and ``to_code`` can train by; "?" where only a plan of the layers
    tells, which ``best``, ``step.applicable`` and a search with ``applicable=True`` make.

    Attributes:
        pareto: the plans that no other one beats in time, memory and devices, fastest first.
        tried: number of plans that were considered.
        fitting: number of plans among them that fit into memory.
    """

    def __init__(
        self,
        steps: Sequence[StepEstimate],
        pareto: Sequence[StepEstimate],
        tried: int,
        fitting: int,
    ) -> None:
        self._steps, self.pareto = list(steps), list(pareto)
        self.tried, self.fitting = tried, fitting

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, index: int) -> StepEstimate: ...
    @overload
    def __getitem__(self, index: slice) -> list[StepEstimate]: ...
    def __getitem__(self, index: int | slice) -> StepEstimate | list[StepEstimate]:
        return self._steps[index]

    def __iter__(self) -> Iterator[StepEstimate]:
        return iter(self._steps)

    @property
    def best(self) -> ParallelPlan:
        """The fastest plan that can be applied, as ``Statistics.parallel_plan`` returns it, with its ``estimate``.

        Raises:
            InputError: none of the plans can be applied.
        """
        step = next((step for step in self._steps if step.applicable), None)
        if step is None:
            raise InputError(
                f"none of the {len(self)} plans can be applied; search with applicable=True; the fastest: "
                f"{self._steps[0].obstacle}"
            )
        return step.parallel_plan()

    def plot(self, axes: Axes | None = None) -> Axes:
        """Draw the plans as stacked bars of seconds by cause.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        return stacked_bars({step.plan.describe(): step.seconds_by_cause for step in self._steps}, axes)

    def to_records(self) -> list[dict[str, Any]]:
        """Return one flat dict per plan: its parallelism, times in seconds and memory in bytes."""
        return [step.to_record() for step in self._steps]

    def _report(self) -> Report:
        shown = self._steps[:_MOST_ROWS]
        differing = [name for name in _PARALLELISM if any(_cell(step.plan, name) for step in shown)]
        if len({step.plan.devices for step in shown}) > 1:
            differing.insert(0, "devices")
        headers = [_PARALLELISM.get(name, "Devices") for name in differing]
        rate = "Tokens/s" if shown and shown[0].sequence_length else "Samples/s"
        headers += ["Step", rate, "MFU", "Bubble", "Memory", "Free", "Pareto", "Applies"]
        reasons: list[str] = []
        rows = [
            [
                *(_cell(step.plan, name) for name in differing),
                duration(1e3 * step.step_seconds),
                f"{step.tokens_per_second:,.{0 if step.tokens_per_second >= 100 else 2}f}",
                percent(step.mfu),
                percent(step.seconds_by_cause["bubble"] / step.step_seconds),
                scaled(step.memory_bytes, "B"),
                percent(1 - step.memory_bytes / step.cluster.memory_bytes),
                "*" if step in self.pareto else "",
                _mark(step.noted_obstacle, reasons),
            ]
            for step in shown
        ]
        rest = len(self._steps) - len(rows)
        below = [f"{number_of(rest, 'slower plan')}: see to_records() or to_pandas()"] if rest else []
        fitting = f"{self.tried:,} plans tried, {self.fitting:,} fit into memory"
        above = []
        if shown:
            cluster, typical = shown[0].cluster, percent(shown[0].error.typical)
            count = "" if "devices" in differing else f"{shown[0].plan.devices} x "
            above = [
                f"Plans for a training step of {shown[0].step} on {count}{cluster.device.name}; typical error {typical}"
            ]
            fitting += f", {scaled(cluster.memory_bytes, 'B')} per device; what is free has to hold {NOT_ALLOCATED}"
        below.append(fitting)
        if any(row[-1] == "?" for row in rows):
            below.append("?: not tried yet; plans.best and step.applicable do")
        below += [f"no ({index}): {reason}" for index, reason in enumerate(reasons, 1)]
        names = ", ".join(f"{_PARALLELISM[name]} {name}" for name in differing if _PARALLELISM.get(name, name) != name)
        below += [f"Columns: {names}"] if names else []
        align = "".join("r" if name in _NUMBERS else "l" for name in differing) + "rrrrrrll"
        optional = ("Pareto", "Bubble", "Tokens/s", "Free", "Applies", "MFU", "VS", "schedule", "checkpoint")
        return Report(rows, headers, align, above=above, below=below, optional=optional)


_PARALLELISM = {
    "tensor": "TP",
    "sequence": "SP",
    "expert": "EP",
    "dispatch": "dispatch",
    "context": "CP",
    "pipeline": "PP",
    "virtual_stages": "VS",
    "blocks": "blocks",
    "data": "DP",
    "shard": "FSDP",
    "zero_stage": "ZeRO",
    "micro_batch": "mb",
    "checkpoint": "checkpoint",
    "schedule": "schedule",
}
_NUMBERS = {name for name, header in _PARALLELISM.items() if header.isupper() and name != "sequence"}
_NUMBERS |= {"devices", "zero_stage", "micro_batch"}
_DEFAULT_OF = {argument.name: argument.default for argument in fields(Plan)}


def _cell(plan: Plan, name: str) -> str:
    """Return what a plan has in a column; empty for what is not split, and other defaults."""
    value = plan.checkpoint_in_short if name == "checkpoint" else getattr(plan, name)
    if name == "zero_stage":
        return str(value) if value else ""
    if name == "sequence":
        return "yes" if value else ""
    return "" if value == _DEFAULT_OF[name] else str(value)


def _mark(obstacle: str | None, reasons: list[str]) -> str:
    """Return whether a plan can be applied, as far as it is noted. The reasons of the others are numbered."""
    if obstacle is None:
        return "?"
    if not obstacle:
        return "yes"
    if obstacle not in reasons:
        reasons.append(obstacle)
    return f"no ({reasons.index(obstacle) + 1})"

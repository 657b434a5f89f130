"""``MemoryEstimate``: the memory of one step as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from modelsummary.extras import axes_for
from modelsummary.memory.reserve import AllocatorReserve
from modelsummary.memory.saved import SavedStorages
from modelsummary.tables import Printed, Report
from modelsummary.units import PREFIXES, auto_prefix, decimals, grouped, scaled, symbol

__all__ = ["CATEGORIES", "MemoryEstimate", "MemoryMeasurement", "TimelinePoint"]

CATEGORIES = ("params", "buffers", "optimizer_state", "grads", "inputs", "activations", "temporary", "workspace")
_BYTES = frozenset(
    "params buffers grads optimizer_state inputs activations held_after_forward peak offloaded graphs".split()
)
_VISIBLE = 1 / 500  # of the height of the plot
_LETTER = 0.011  # of its width


class TimelinePoint(NamedTuple):
    """The memory in use while one operator runs.

    Attributes:
        operator: name of the operator.
        fqn: name of the module whose forward or autograd nodes ran it; ``""`` is the model, None is outside of it.
        phase: ``"forward"``, ``"backward"`` or ``"step"``.
        held: bytes alive by category, in the order of ``CATEGORIES``.
    """

    operator: str
    fqn: str | None
    phase: str
    held: tuple[int, ...]

    @property
    def total(self) -> int:
        """All bytes alive."""
        return sum(self.held)


@dataclass(frozen=True, repr=False)
class MemoryEstimate(Printed):
    """The memory of a training step, or of an inference, in bytes.

    The step is in its steady state: the optimizer already has its state.

    Attributes:
        mode: ``"train"``, ``"compiled"`` or ``"inference"``.
        device: device whose kernels were chosen.
        optimizer: class name of the optimizer, or None.
        params, buffers: storages of the model, each counted once; a tensor in a plain attribute is a buffer.
        grads: gradients of the parameters at the end of the backward.
        optimizer_state: tensors that the optimizer keeps between steps, for parameters that get a gradient.
        inputs: tensors in the inputs, and others from before the step that operators read, such as labels that the
            loss holds.
        activations: storages that the forward keeps for the backward, without parameters, buffers and inputs.
        held_after_forward: all bytes alive at the end of the forward, its result included.
        peak: largest number of bytes alive at one time.
        timeline: bytes alive while each operator runs.
        recomputed_macs: multiply-adds that activation checkpointing, or a compiled backward, does again.
        execution: ``"shape"``: the step ran without data; ``"real"``: it ran on data, for the reason in ``notes``.
        notes: assumptions of the estimate.
        offloaded: bytes of saved tensors that wait for the backward in the memory of the host.
        graphs: bytes among ``activations`` that each compiled graph makes; empty unless the model is compiled.
        saved: the storages behind ``activations``, each with what making it again takes; empty for a rank of a plan.
        reserve: what torch's allocator takes from the device, with ``reserve=True``; else None.
        subject: the model, the sizes of its inputs and its dtype.

    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> memory = Statistics(nn.Linear(4, 8), (16, 4)).memory(optimizer="adamw")
    >>> memory.params, memory.grads, memory.inputs
    (160, 160, 256)
    """

    mode: str
    device: str
    optimizer: str | None
    params: int
    buffers: int
    grads: int
    optimizer_state: int
    inputs: int
    activations: int
    held_after_forward: int
    peak: int
    timeline: list[TimelinePoint] = field(repr=False)
    recomputed_macs: int = 0
    offloaded: int = 0
    execution: str = "shape"
    notes: list[str] = field(default_factory=list)
    graphs: list[int] = field(default_factory=list)
    saved: SavedStorages = field(default_factory=SavedStorages.of, repr=False, compare=False)
    reserve: AllocatorReserve | None = None
    subject: str = ""

    @property
    def step(self) -> str:
        """What was predicted: step, device, subject and optimizer."""
        step = {"train": "training step", "compiled": "compiled training step"}.get(self.mode, self.mode)
        optimizer = [] if self.mode == "inference" else [self.optimizer or "no optimizer"]
        return f"{step} on {self.device}: {', '.join([self.subject, *optimizer])}"

    @property
    def peak_at(self) -> TimelinePoint | None:
        """The first operator that runs with ``peak`` bytes alive; None if the step runs no operator."""
        return next((point for point in self.timeline if point.total == self.peak), None)

    def plot(self, ax: Any = None) -> Any:
        """Draw the bytes alive at each operator of the step, by category, and name the peak, with matplotlib.

        Categories too small to be seen are not in the legend.

        Args:
            ax: axes to draw into; None: new axes.

        Returns:
            The axes.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        axes = axes_for(ax, figsize=(10, 4), layout="constrained")
        prefix = auto_prefix(self.peak)
        series = [[point.held[index] / PREFIXES[prefix] for point in self.timeline] for index in range(len(CATEGORIES))]
        shown = [(name, held) for name, held in zip(CATEGORIES, series, strict=True) if any(held)]
        least = _VISIBLE * max((point.total for point in self.timeline), default=0) / PREFIXES[prefix]
        names = [("" if max(held) >= least else "_") + name.replace("_", " ") for name, held in shown]
        axes.stackplot(range(len(self.timeline)), [held for _, held in shown], labels=names, step="post")
        phases = [point.phase for point in self.timeline]
        for phase in dict.fromkeys(phases):
            begin, length = phases.index(phase), phases.count(phase)
            axes.axvline(begin, color="gray", linewidth=0.5)
            if length >= _LETTER * len(phase) * len(phases):  # the name of the next one follows
                axes.text(begin, 1.0, f" {phase}", transform=axes.get_xaxis_transform(), va="bottom")
        if (point := self.peak_at) is not None:
            where = f"{point.operator} of {point.fqn}" if point.fqn else point.operator
            top, position = self.peak / PREFIXES[prefix], self.timeline.index(point)
            side = "right" if position > len(phases) / 2 else "left"
            axes.plot(position, top, "v", color="black", markersize=4)
            axes.annotate(
                f"{scaled(self.peak, 'B')}: {where}",
                (position, top),
                (0, 5),
                textcoords="offset points",
                ha=side,
                fontsize=8,
            )
            axes.set_ylim(top=1.1 * top)
        axes.set(xlabel="operator", ylabel=symbol(prefix, "B"), xlim=(0, len(self.timeline) - 1))
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        return axes

    def to_dict(self) -> dict[str, Any]:
        """Return the figures without the timeline and the saved storages as a dict that can be written as JSON.

        Names of bytes end in ``_bytes``.
        """
        point = self.peak_at
        others = ("timeline", "saved", "reserve")
        names = [name for name in self.__dataclass_fields__ if name not in others]
        figures = {f"{name}_bytes" if name in _BYTES else name: getattr(self, name) for name in names}
        if self.reserve is not None:
            figures["reserve"] = self.reserve.to_dict()
        where = None if point is None else {"fqn": point.fqn, "phase": point.phase, "operator": point.operator}
        return {**figures, "peak_at": where}

    def _report(self) -> Report:
        rows: list[tuple[str, int]] = [("Parameters", self.params), ("Buffers", self.buffers)]
        if self.mode != "inference":
            rows += [
                ("Gradients", self.grads),
                (f"Optimizer state ({self.optimizer or 'no optimizer'})", self.optimizer_state),
            ]
            rows += [("Activations kept for backward", self.activations)]
        rows += [("Inputs", self.inputs), ("Held after the forward", self.held_after_forward), ("Peak", self.peak)]
        if self.reserve is not None:
            rows += [
                ("Reserved by the allocator", self.reserve.reserved),
                ("Fragmentation", self.reserve.fragmentation),
            ]
        cells = [(name, grouped(value), scaled(value, "B")) for name, value in rows]
        point = self.peak_at
        lines = []
        if point is not None:
            where = f"{point.phase} of {point.fqn or 'the model'}" if point.fqn is not None else point.phase
            lines.append(f"Peak at {point.operator}, {where}")
        if len(self.graphs) > 1:
            graphs = ", ".join(scaled(nbytes, "B") for nbytes in self.graphs)
            lines.append(f"{len(self.graphs)} compiled graphs keep {graphs}")
        if self.offloaded:
            lines.append(f"Moved to the host until the backward: {scaled(self.offloaded, 'B')}")
        if self.recomputed_macs:
            lines.append(f"Recomputed in the backward: {grouped(self.recomputed_macs)} MACs")
        return Report(
            cells, ["", "Bytes", ""], "lrr", above=[f"Memory of one {self.step}"], below=[*lines, *self.notes]
        )


@dataclass(frozen=True, repr=False)
class MemoryMeasurement(Printed):
    """The measured and the predicted memory of one step, in bytes.

    Attributes:
        held_after_forward, peak: measured bytes; parameters, buffers, inputs and optimizer state included.
        predicted: estimate of the same step.
    """

    held_after_forward: int
    peak: int
    predicted: MemoryEstimate

    def _report(self) -> Report:
        rows = [
            (name, grouped(measured), grouped(predicted), decimals(predicted / measured if measured else None, 4))
            for name, measured, predicted in (
                ("Held after the forward", self.held_after_forward, self.predicted.held_after_forward),
                ("Peak", self.peak, self.predicted.peak),
            )
        ]
        return Report(rows, ["", "Measured (B)", "Predicted (B)", "Predicted / measured"], "lrrr")

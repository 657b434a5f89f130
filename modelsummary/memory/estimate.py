"""``MemoryEstimate``: the memory of one step, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from modelsummary.errors import MissingExtraError
from modelsummary.tables import table
from modelsummary.units import PREFIXES, auto_prefix, decimals, grouped, scaled, symbol

__all__ = ["CATEGORIES", "MemoryEstimate", "MemoryMeasurement", "TimelinePoint"]

CATEGORIES = ("params", "buffers", "optimizer_state", "grads", "inputs", "activations", "temporary", "workspace")


class TimelinePoint(NamedTuple):
    """Memory while one operator runs.

    Attributes:
        operator: its name.
        fqn: of the module whose forward, or whose autograd nodes, ran it; ``""`` is the model, None outside of it.
        phase: ``"forward"``, ``"backward"`` or ``"step"``.
        held: bytes that live, by category in the order of ``CATEGORIES``.
    """

    operator: str
    fqn: str | None
    phase: str
    held: tuple[int, ...]

    @property
    def total(self) -> int:
        """Bytes that live."""
        return sum(self.held)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of a training step (or of an inference) in its steady state: the optimizer has its state already.

    Attributes:
        mode: ``"train"`` or ``"inference"``.
        device: whose kernels were chosen.
        optimizer: its class, or None.
        params, buffers: of the model, storages counted once; a tensor in a plain attribute is a buffer.
        grads: of the parameters, at the end of the backward.
        optimizer_state: what the optimizer keeps.
        inputs: tensors that the model is given.
        activations: storages that the forward keeps for the backward, without parameters, buffers and inputs.
        held_after_forward: everything that lives when the forward has ended, its result included.
        peak: the most that lives at a time.
        timeline: what lives while each operator runs.
        recomputed_macs: multiply-adds that activation checkpointing, where asked for, does again in the backward.
        execution: ``"shape"``: without data; ``"real"``: the step ran, and ``notes`` say why.
        notes: what was assumed.
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
    execution: str = "shape"
    notes: list[str] = field(default_factory=list)

    @property
    def peak_at(self) -> TimelinePoint:
        """The first operator that runs with ``peak`` bytes alive."""
        return next(point for point in self.timeline if point.total == self.peak)

    def plot(self, ax: Any = None) -> Any:
        """Draw the bytes that live over the operators of the step, by category, with matplotlib.

        Args:
            ax: where to draw; default: new axes.

        Returns:
            The axes.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise MissingExtraError("matplotlib", "plot") from error
        axes = pyplot.subplots(figsize=(10, 4), layout="constrained")[1] if ax is None else ax
        prefix = auto_prefix(self.peak)
        series = [[point.held[place] / PREFIXES[prefix] for point in self.timeline] for place in range(len(CATEGORIES))]
        shown = [(name, held) for name, held in zip(CATEGORIES, series, strict=True) if any(held)]
        names = [name.replace("_", " ") for name, _ in shown]
        axes.stackplot(range(len(self.timeline)), [held for _, held in shown], labels=names, step="post")
        phases = [point.phase for point in self.timeline]
        for phase in dict.fromkeys(phases):
            axes.axvline(phases.index(phase), color="gray", linewidth=0.5)
            axes.text(phases.index(phase), 1.0, f" {phase}", transform=axes.get_xaxis_transform(), va="bottom")
        axes.set(xlabel="operator", ylabel=symbol(prefix, "B"), xlim=(0, len(self.timeline) - 1))
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        return axes

    def to_dict(self) -> dict[str, Any]:
        """The figures without the timeline, for JSON."""
        point = self.peak_at
        figures = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "timeline"}
        return {**figures, "peak_at": {"fqn": point.fqn, "phase": point.phase, "operator": point.operator}}

    def __str__(self) -> str:
        rows: list[tuple[str, int]] = [("Parameters", self.params), ("Buffers", self.buffers)]
        if self.mode == "train":
            rows += [("Gradients", self.grads), (f"Optimizer state ({self.optimizer})", self.optimizer_state)]
            rows += [("Activations kept for backward", self.activations)]
        rows += [("Inputs", self.inputs), ("Held after the forward", self.held_after_forward), ("Peak", self.peak)]
        cells = [(name, grouped(value), scaled(value, "B")) for name, value in rows]
        point = self.peak_at
        where = f"{point.phase} of {point.fqn or 'the model'}" if point.fqn is not None else point.phase
        lines = [f"Memory of one {'training step' if self.mode == 'train' else 'inference'} on {self.device}"]
        lines.append(table(cells, ["", "Bytes", ""], "lrr"))
        lines.append(f"Peak at {point.operator}, {where}")
        if self.recomputed_macs:
            lines.append(f"Recomputed in the backward: {grouped(self.recomputed_macs)} MACs")
        return "\n".join([*lines, *self.notes])


@dataclass(frozen=True)
class MemoryMeasurement:
    """What a real step took, and what was predicted of it; bytes.

    Attributes:
        held_after_forward, peak: measured, parameters, buffers, inputs and optimizer state included.
        predicted: the estimate of the same step.
    """

    held_after_forward: int
    peak: int
    predicted: MemoryEstimate

    def __str__(self) -> str:
        rows = [
            (name, grouped(real), grouped(guess), decimals(guess / real if real else None, 4))
            for name, real, guess in (
                ("Held after the forward", self.held_after_forward, self.predicted.held_after_forward),
                ("Peak", self.peak, self.predicted.peak),
            )
        ]
        return table(rows, ["", "Measured (B)", "Predicted (B)", "Predicted / measured"], "lrrr")

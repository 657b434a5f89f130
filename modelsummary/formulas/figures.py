"""``FiguresAt``: the figures of a model at other sizes of its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from modelsummary.errors import FormulaError, InputError, close_to
from modelsummary.tables import Printed, Report
from modelsummary.units import NOTHING, grouped, scaled

__all__ = ["CONSTANT", "FIGURES", "FiguresAt", "check_figure"]

FIGURES: dict[str, str] = {
    "macs": "multiply-adds of a forward",
    "flops": "2 x macs",
    "params": "elements of the parameters",
    "trainable_params": "elements of the parameters that require gradients",
    "param_bytes": "bytes of the parameters",
    "buffer_bytes": "bytes of the buffers",
    "input_bytes": "bytes of the tensors in the arguments",
    "output_bytes": "bytes of the tensors in the result",
    "total_output_bytes": "bytes of the results of all calls during which no other module ran",
    "elementwise_ops": "element-wise operations",
    "bytes_read": "bytes that the operators read",
    "bytes_written": "bytes that the operators write",
    "skipped_macs": "the part of macs that block masks skip",
    "activation_bytes": "bytes that a training step keeps for the backward",
}
"""Figures that have formulas, as named in ``LayerInfo`` and ``ModelStatistics``, and what they are."""


CONSTANT = {
    "params": "num_params",
    "trainable_params": "trainable_params",
    "param_bytes": "params_bytes",
    "buffer_bytes": "buffer_bytes",
}
"""Figures that do not depend on the inputs -> their names in ``LayerInfo``."""


def check_figure(figure: str) -> None:
    """Raise ``InputError`` if ``figure`` is unknown."""
    if figure not in FIGURES:
        raise InputError(f"unknown figure {figure!r}; known: {', '.join(FIGURES)}{close_to(figure, FIGURES)}")


class Evaluates(Protocol):
    """The source of figures: formulas of a live model or of a file."""

    def evaluate(self, figure: str, sizes: Mapping[str, int], layer: str = "") -> int:
        """Return a figure at these sizes."""

    def largest(self, figure: str, sizes: Mapping[str, int], layer: str = "", /) -> Mapping[str, int]:
        """Return the largest size of each dimension at which the figure was run; empty if nothing is extrapolated."""


class FiguresAt(Printed):
    """The figures of a model at given sizes, each found when it is read: by a run on shapes, or by its formula.

    ``figures.macs`` and ``figures["macs"]`` return one figure; ``FIGURES`` lists all. ``print`` shows a table, and says
    which sizes are beyond the largest that was run, where a figure may change unseen.

    Attributes:
        sizes: name of a dimension -> size.
        layer: FQN of the layer; ``""`` is the model.

    Raises:
        FormulaError: a figure that is read has no formula; says why.
        InputError: a size is below the smallest for which the formula of a figure holds.

    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> figures = Statistics(nn.Linear(4, 8), (2, 16, 4)).at(batch=3, sequence=100)
    >>> figures.macs, figures.output_bytes, figures.sizes
    (9600, 9600, {'batch': 3, 'sequence': 100})
    >>> figures.beyond("macs"), Statistics(nn.Linear(4, 8), (2, 16, 4)).at(sequence=10**6).beyond("macs")
    ({}, {'sequence': 4901})
    """

    def __init__(self, source: Evaluates, sizes: dict[str, int], layer: str = "") -> None:
        self._source = source
        self.sizes = sizes
        self.layer = layer

    def __getitem__(self, figure: str) -> int:
        return self._source.evaluate(figure, self.sizes, self.layer)

    def __getattr__(self, name: str) -> int:
        if name not in FIGURES:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self[name]

    def beyond(self, figure: str = "macs") -> dict[str, int]:
        """Return the dimensions whose size here is beyond the largest that was run, with that largest size."""
        check_figure(figure)
        largest = self._source.largest(figure, self.sizes, self.layer)
        return {name: size for name, size in largest.items() if self.sizes[name] > size}

    def to_dict(self) -> dict[str, Any]:
        """Return sizes and figures as plain data; None for a figure without a formula for these sizes.

        ``"beyond"`` has figure -> dimension -> the largest size that was run, where a size here is beyond it.
        """
        beyond: dict[str, dict[str, int]] = {}
        figures: dict[str, Any] = {"sizes": dict(self.sizes), "layer": self.layer}
        for figure in FIGURES:
            try:
                figures[figure] = self[figure]
                beyond[figure] = self.beyond(figure)
            except (FormulaError, InputError):
                figures[figure] = None
        return {**figures, "beyond": {figure: sizes for figure, sizes in beyond.items() if sizes}}

    def _report(self) -> Report:
        at = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        rows, reasons = [], []
        unseen: dict[str, int] = {}
        for figure in FIGURES:
            try:
                value = self[figure]
            except (FormulaError, InputError) as error:
                rows.append((figure, NOTHING, ""))
                reasons.append(f"{figure}: {error}")
            else:
                rows.append((figure, grouped(value), scaled(value, _unit(figure))))
                for name, size in self.beyond(figure).items():
                    unseen[name] = min(size, unseen.get(name, size))
        notes = [
            f"{name}={self.sizes[name]} is beyond {size}, the largest that was run: figures are extrapolated"
            for name, size in unseen.items()
        ]
        heading = f"{self.layer or 'The model'} at {at}"
        return Report(rows, ["Figure", "Value", ""], "lrr", above=[heading], below=[*notes, *reasons])


def _unit(figure: str) -> str:
    return "B" if "bytes" in figure else ""

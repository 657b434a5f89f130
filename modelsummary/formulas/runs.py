"""Runs of a model at chosen sizes of its inputs, each made once, and the figures of every layer in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from modelsummary.capture.containers import map_leaves
from modelsummary.capture.inputs import CallArguments, InputSize
from modelsummary.capture.live import LiveModel
from modelsummary.capture.modules import ModelParts
from modelsummary.capture.observe import observe
from modelsummary.capture.run import capture
from modelsummary.capture.step_plan import StepPlan
from modelsummary.errors import ModelSummaryError
from modelsummary.formulas.dimensions import Dimension, held_elements, resized
from modelsummary.layer_info import LayerInfo
from modelsummary.memory.timeline import by_call

__all__ = ["Row", "Runs", "forward_rows", "step_rows", "subtree"]

_MOST_ELEMENTS = 2**26  # of the inputs that hold values


class Row(NamedTuple):
    """The figures of one call.

    Attributes:
        self_figures: of the call without the layers below it; they add up over the rows of a layer.
        whole: figures of the call as a whole.
    """

    fqn: str
    depth: int
    self_figures: Mapping[str, int | None]
    whole: Mapping[str, int]


Rows = tuple[Row, ...]
Sizes = tuple[int, ...]  # one number per dimension


class Runs:
    """The runs of a model, by the sizes of its dimensions.

    Args:
        run: runs the model; raises if it does not accept the sizes.
    """

    def __init__(self, call: CallArguments, run: Callable[[CallArguments], Rows]) -> None:
        self._call = _without_data(call)
        self._run = run
        self._rows: dict[tuple[tuple[Dimension, int], ...], Rows | str] = {}

    def at(self, sizes: Mapping[Dimension, int]) -> Rows | str:
        """Return the rows of the run with these sizes, or why the model does not run with them."""
        key = tuple(sizes.items())
        if key not in self._rows and held_elements(self._call, sizes) > _MOST_ELEMENTS:
            self._rows[key] = f"its indices and masks have more than {_MOST_ELEMENTS} elements"
        if key not in self._rows:
            try:
                self._rows[key] = self._run(resized(self._call, sizes))
            except Exception as error:
                text = " ".join(str(error).split())[:200]
                self._rows[key] = text if isinstance(error, ModelSummaryError) else f"{type(error).__name__}: {text}"
        return self._rows[key]

    def __len__(self) -> int:
        """Return the number of runs so far, failed ones included."""
        return len(self._rows)


def _without_data(call: CallArguments) -> CallArguments:
    """Return the arguments with sizes for floating point tensors, so that large batches are not allocated."""

    def convert(leaf: Any) -> Any:
        if type(leaf) is Tensor and (leaf.is_floating_point() or leaf.is_complex()) and not leaf.requires_grad:
            return InputSize(tuple(leaf.shape), leaf.dtype)
        return leaf

    kwargs = {name: map_leaves(convert, value) for name, value in call.kwargs.items()}
    return replace(call, args=tuple(map_leaves(convert, value) for value in call.args), kwargs=kwargs)


def forward_rows(live: LiveModel, call: CallArguments, routes_evenly: bool) -> Rows:
    """Return the figures of a forward on shapes. Raises the error of a forward that fails."""
    return tuple(map(_row, _root(live, call, routes_evenly).walk()))


def step_rows(live: LiveModel, call: CallArguments, plan: StepPlan, routes_evenly: bool) -> Rows:
    """Return the activation bytes of a training step on shapes, which are figures of its calls."""
    root = _root(live, call, routes_evenly)
    memory_by_call = by_call(observe(live.model, call, plan, storages=True, routes_evenly=routes_evenly), None)
    rows = []
    for row in root.walk():
        step_call = memory_by_call.get(row.key)
        rows.append(Row(row.fqn, row.depth, {"activation_bytes": step_call.activation_bytes if step_call else 0}, {}))
    return tuple(rows)


def _root(live: LiveModel, call: CallArguments, routes_evenly: bool) -> LayerInfo:
    recording = capture(ModelParts.of(live.model), call, "shape", routes_evenly=routes_evenly)
    if recording.error is not None:
        raise recording.error
    return recording.root


def _row(row: LayerInfo) -> Row:
    figures = {
        "macs": row.self_macs,
        "skipped_macs": row.self_skipped_macs,
        "elementwise_ops": row.self_elementwise_ops,
        "bytes_read": row.self_bytes_read,
        "bytes_written": row.self_bytes_written,
        "total_output_bytes": row.output_bytes if row.executed and row.is_leaf else 0,
    }
    return Row(row.fqn, row.depth, figures, {"input_bytes": row.input_bytes, "output_bytes": row.output_bytes})


def subtree(rows: Sequence[Row], fqn: str) -> Sequence[Row]:
    """Return the row of a module's first call and the rows below it; empty if it was not called.

    >>> [row.fqn for row in subtree([Row("", 0, {}, {}), Row("a", 1, {}, {}), Row("a.b", 2, {}, {})], "a")]
    ['a', 'a.b']
    """
    begin = next((index for index, row in enumerate(rows) if row.fqn == fqn), None)
    if begin is None:
        return ()
    end = next((index for index in range(begin + 1, len(rows)) if rows[index].depth <= rows[begin].depth), len(rows))
    return rows[begin:end]

"""``Scaling``: every figure of a live model as a formula of the sizes of its inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from modelsummary.capture.exclusive import exclusive
from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.live import LiveModel
from modelsummary.capture.run import EVEN_ROUTES
from modelsummary.errors import FormulaError, InputError, LayerNotFoundError, check_integers, close_to
from modelsummary.formulas.dimensions import Dimension, DimensionNames, find_dimensions, resized
from modelsummary.formulas.expressions import expression_of
from modelsummary.formulas.figures import CONSTANT, FiguresAt, check_figure
from modelsummary.formulas.fitting import FARTHEST, Fitted, fitted
from modelsummary.formulas.runs import Row, Runs, forward_rows, step_rows, subtree
from modelsummary.keywords import nearest
from modelsummary.layer_info import LayerInfo
from modelsummary.memory.step_options import step_plan

__all__ = ["Scaling"]

_WHOLE = frozenset({"input_bytes", "output_bytes"})


class Scaling:
    """The formulas of a model's figures, found when they are asked for; formulas share runs.

    Args:
        names: names of the dimensions; None: by the kind of the inputs.
        why: why the forward cannot run on shapes, for the error.

    Raises:
        FormulaError: values decide what the forward does, or the model accepts no other sizes.
        InputError: ``names`` is unusable.

    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> stats = Statistics(nn.Linear(4, 8), (2, 16, 4))
    >>> Scaling(stats.live, stats.root).formula("macs")
    32*batch*sequence
    """

    def __init__(
        self, live: LiveModel, root: LayerInfo, names: DimensionNames | None = None, why: str | None = None
    ) -> None:
        if live.execution != "shape":
            reason = f", because {why}" if why else "; leave out execution='real'"
            raise FormulaError(f"a formula needs a forward that runs on shapes; this one ran for real{reason}")
        self._root = root
        self._call = live.call
        evenly = root.note == EVEN_ROUTES
        self._forward = Runs(live.call, lambda call: forward_rows(live, call, evenly))
        plan = step_plan("train", {"workspaces": False}, root)
        self._step = Runs(live.call, lambda call: step_rows(live, call, plan, evenly))
        self.dimensions = find_dimensions(live.model, live.call, live.batch_dim, self._accepts, names)
        self._fitted: dict[tuple[str, str], Fitted | FormulaError] = {}

    def _accepts(self, sizes: Mapping[Dimension, int]) -> str | None:
        values = self._forward.at({replace(dimension, step=1): size for dimension, size in sizes.items()})
        return values if isinstance(values, str) else None

    @property
    def runs(self) -> int:
        """The number of runs so far."""
        return len(self._forward) + len(self._step)

    # -------------------------------------------------------------------------------------- formulas

    @exclusive
    def formula(self, figure: str, layer: str = "") -> Any:
        """Return a figure of a layer's first call as a sympy expression; see ``Statistics.formula``."""
        row = self._row(figure, layer)
        if figure in CONSTANT:
            return expression_of({}, self.dimensions) + getattr(row, CONSTANT[figure])
        if figure == "flops":
            return 2 * self.formula("macs", layer)
        return expression_of(self._fit(figure, layer).terms, self.dimensions)

    def _row(self, figure: str, layer: str) -> LayerInfo:
        """Return the row of a layer's first call. Raise an error for an unknown figure or layer."""
        check_figure(figure)
        row = next((row for row in self._root.walk() if row.fqn == layer), None)
        if row is None:
            fqns = [row.fqn for row in self._root.walk()]
            raise LayerNotFoundError(f"no layer named {layer!r} in {self._root.class_name}{nearest(layer, fqns)}")
        return row

    def at(self, sizes: Mapping[str, int], layer: str = "") -> FiguresAt:
        """Return the figures of a layer at other sizes; sizes that are not given stay as recorded."""
        return FiguresAt(self, {dimension.name: size for dimension, size in self._checked(sizes).items()}, layer)

    def call_at(self, sizes: Mapping[str, int]) -> CallArguments:
        """Return the arguments of the forward with other sizes."""
        return resized(self._call, self._checked(sizes))

    def _checked(self, sizes: Mapping[str, int]) -> dict[Dimension, int]:
        """Return the size of every dimension. Raise ``InputError`` if a name or a size is unusable."""
        names = [dimension.name for dimension in self.dimensions]
        wrong = next((name for name in sizes if name not in names), None)
        if wrong is not None:
            raise InputError(f"no dimension is called {wrong!r}; expected {', '.join(names)}{close_to(wrong, names)}")
        checked = {dimension: sizes.get(dimension.name, dimension.size) for dimension in self.dimensions}
        for dimension, size in checked.items():
            _check_size(dimension, size)
        return checked

    def evaluate(self, figure: str, sizes: Mapping[str, int], layer: str = "") -> int:
        """Return a figure at these sizes: of a run with them, or by its formula.

        Raises:
            InputError: a size is below the smallest that the model accepts.
        """
        measured = self._measured(figure, sizes, layer)
        return self.by_formula(figure, sizes, layer) if measured is None else measured

    def by_formula(self, figure: str, sizes: Mapping[str, int], layer: str = "") -> int:
        """Return a figure at these sizes by its formula; errors as of ``evaluate``."""
        expression = self.formula(figure, layer)
        if figure not in CONSTANT:
            smallest = self._fit(_counted(figure), layer).smallest
            for dimension, least in zip(self.dimensions, smallest, strict=True):
                if sizes[dimension.name] < least:
                    raise InputError(f"{dimension.name} must be >= {least}, got {sizes[dimension.name]}")
        return int(expression.xreplace({symbol: sizes[symbol.name] for symbol in expression.free_symbols}))

    def _measured(self, figure: str, sizes: Mapping[str, int], layer: str) -> int | None:
        """Return a figure of a run with these sizes: one run is quicker than the tens that a formula takes.

        Return None if the formula is known and holds there, or if the model does not run with these sizes.
        """
        self._row(figure, layer)
        counted, numbers = _counted(figure), {dimension: sizes[dimension.name] for dimension in self.dimensions}
        formula = self._fitted.get((counted, layer))
        if isinstance(formula, Fitted) and all(map(int.__ge__, numbers.values(), formula.smallest)):
            return None
        is_far = any(size > FARTHEST * dimension.size for dimension, size in numbers.items())
        if figure in CONSTANT or is_far:
            return None
        values = self._values(counted, layer, numbers, by_call=False)
        return None if isinstance(values, str) else values[None] * (2 if figure == "flops" else 1)

    def largest(self, figure: str, sizes: Mapping[str, int], layer: str = "") -> dict[str, int]:
        """Return the largest size of each dimension at which the figure was run; empty if nothing is extrapolated."""
        if figure in CONSTANT or self._measured(figure, sizes, layer) is not None:
            return {}
        largest = self._fit(_counted(figure), layer).largest
        return {dimension.name: size for dimension, size in zip(self.dimensions, largest, strict=True)}

    def _fit(self, figure: str, layer: str) -> Fitted:
        key = figure, layer
        if key not in self._fitted:
            try:
                self._fitted[key] = self._search(figure, layer)
            except FormulaError as error:
                self._fitted[key] = FormulaError(f"no formula of {figure}{f' of {layer}' if layer else ''}: {error}")
        formula = self._fitted[key]
        if isinstance(formula, FormulaError):
            raise formula
        return formula

    def _search(self, figure: str, layer: str) -> Fitted:
        """Fit the total. If no polynomial explains it, fit the calls one by one, as each has its own roundings."""
        try:
            return fitted(
                lambda sizes: self._values(figure, layer, sizes, by_call=False),
                self.dimensions,
                quick=figure not in _WHOLE,
            )
        except FormulaError:
            if figure in _WHOLE:
                raise
        return fitted(lambda sizes: self._values(figure, layer, sizes, by_call=True), self.dimensions)

    def _values(
        self, figure: str, layer: str, sizes: Mapping[Dimension, int], *, by_call: bool
    ) -> Mapping[Any, int] | str:
        """Return a figure by call, or its total as one part."""
        rows = (self._step if figure == "activation_bytes" else self._forward).at(sizes)
        if isinstance(rows, str):
            return rows
        below = subtree(rows, layer)
        if figure in _WHOLE:
            return {None: below[0].whole[figure] if below else 0}
        parts = _by_call(below, figure)
        if isinstance(parts, str):
            return parts
        return parts if by_call else {None: sum(parts.values())}


def _by_call(rows: Iterable[Row], figure: str) -> dict[tuple[str, int], int] | str:
    """Return a figure by FQN and number of the call."""
    calls: Counter[str] = Counter()
    totals: dict[tuple[str, int], int] = {}
    for row in rows:
        value = row.self_figures[figure]
        if value is None:
            return "its values are not known on shapes"
        totals[row.fqn, calls[row.fqn]] = value
        calls[row.fqn] += 1
    return totals


def _counted(figure: str) -> str:
    """Return the figure of the runs that a figure is computed from."""
    return "macs" if figure == "flops" else figure


def _check_size(dimension: Dimension, size: Any) -> None:
    check_integers(**{dimension.name: size})
    if (size - dimension.size) % dimension.step:
        raise InputError(
            f"{dimension.name}={size}: the model accepts {dimension.size} and sizes a multiple of {dimension.step} away"
        )

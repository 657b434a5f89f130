"""``FormulaStatistics``: the figures of a live model as formulas of the sizes of its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from modelsummary.capture.exclusive import exclusive
from modelsummary.statistics.live_statistics import LiveStatistics

if TYPE_CHECKING:  # imported on first use
    from modelsummary.formulas import DimensionNames, FiguresAt, FlopsPerToken, Scaling

__all__ = ["FormulaStatistics"]


class FormulaStatistics(LiveStatistics):
    """Statistics with a live model, whose figures are formulas; ``GraphStatistics`` adds graphs."""

    _scalings: dict[str, Scaling]

    @exclusive
    def formula(self, figure: str = "macs", layer: str = "", *, dimensions: DimensionNames | None = None) -> Any:
        """Return a figure as a sympy expression of the sizes of the inputs, such as ``32*batch*sequence``.

        The formula is found by runs on shapes, up to some 320 times the recorded size, and checked at six other sizes.
        Beyond the largest size that the model ran with, it is an extrapolation: ``at`` knows that size. It is a
        polynomial of the sizes, of rounded sizes (``floor((height + 1)/2)``), or ``Piecewise`` of these. The first
        formula takes some tens of runs; others share them. ``activation_bytes`` runs training steps as ``memory()``.

        Args:
            figure: a name in ``modelsummary.formulas.FIGURES``: ``"macs"``, ``"output_bytes"``, ``"params"`` ...
            layer: FQN of a layer, whose first call counts, as in ``stats[layer]``; ``""`` is the model.
            dimensions: input -> position in its shape -> name, as ``dynamic_axes`` of ``torch.onnx.export``; positions
                of the same name change together. Default: ``batch`` is the first; ``sequence``, ``length``, ``height``,
                ``width`` or ``frames`` the others that the model accepts at other sizes; equal sizes change together.

        Raises:
            InputError: an argument is unusable.
            LayerNotFoundError: the model has no such layer.
            FormulaError: no polynomial fits, or values decide what the forward does; says why.

        >>> from torch import nn
        >>> from modelsummary import Statistics
        >>> stats = Statistics(nn.Linear(4, 8), (2, 16, 4))
        >>> stats.formula("macs"), stats.formula("output_bytes", dimensions={"input": {0: "n"}})
        (32*batch*sequence, 512*n)
        """
        return self._scaling(dimensions).formula(figure, layer)

    @exclusive
    def at(self, *, layer: str = "", dimensions: DimensionNames | None = None, **sizes: int) -> FiguresAt:
        """Return the figures for other sizes of the inputs, by their formulas, such as ``at(batch=8, sequence=4096)``.

        Where a size is beyond the largest that was run, the result says so when it is printed, and ``beyond()`` has it.

        Args:
            layer, dimensions: as for ``formula``.
            **sizes: name of a dimension -> size; default: as recorded.

        Raises:
            InputError: a dimension is unknown, or a size is unusable.
            FormulaError: as for ``formula``, when a figure is read.

        >>> from torch import nn
        >>> from modelsummary import Statistics
        >>> Statistics(nn.Linear(4, 8), (2, 16, 4)).at(batch=1000).macs
        512000
        """
        return self._scaling(dimensions).at(sizes, layer)

    @exclusive
    def flops_per_token(
        self,
        tokens: int | None = None,
        *,
        loss: Callable[[Any], Tensor] | None = None,
        dimensions: DimensionNames | None = None,
        **sizes: int,
    ) -> FlopsPerToken:
        """Count the model FLOPs per token of a forward, and of a forward with its backward, without recomputation.

        They are given dense, and without the attention scores that causal masks, windows and padding hide; with the
        active and the total parameters of a mixture of experts.

        Args:
            tokens: number of tokens in a call. Default: the elements of the first two-dimensional integer input; for a
                model without one, the samples of the batch.
            loss: as for ``memory``.
            dimensions: as for ``formula``.
            **sizes: other sizes of the inputs, as for ``at``.

        Raises:
            InputError: an argument is unusable, or no result requires a gradient.
            StepError: the model's own forward, the loss or the backward raised.

        >>> from torch import nn
        >>> from modelsummary import Statistics
        >>> Statistics(nn.Linear(4, 8), (2, 4)).flops_per_token().training  # the input requires no gradient
        128.0
        """
        from modelsummary.formulas.tokens import flops_per_token

        live = self._live_for("FLOPs per token")
        call = live.call if not sizes else self._scaling(dimensions).call_at(sizes)
        return flops_per_token(live, self.root, call, tokens, loss)

    def _scaling(self, names: DimensionNames | None) -> Scaling:
        """Return the formulas for these names of dimensions, with the runs that they made so far."""
        from modelsummary.formulas import Scaling

        live, known = self._live_for("a formula"), self.__dict__.setdefault("_scalings", {})
        if repr(names) not in known:
            known[repr(names)] = Scaling(live, self.root, names, self.fallback_reason)
        found: Scaling = known[repr(names)]
        return found

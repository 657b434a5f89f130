"""A callback for PyTorch Lightning: the table of the model when training starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from modelsummary.errors import MissingExtraError
from modelsummary.statistics import Statistics
from modelsummary.statistics.model_statistics import ModelStatistics
from modelsummary.views.columns import check_columns
from modelsummary.views.labels import check_depth

try:
    from lightning.pytorch.callbacks import ModelSummary as _ModelSummary
    from lightning.pytorch.utilities import rank_zero_info
except ImportError as error:
    raise MissingExtraError("lightning", "lightning") from error

__all__ = ["ModelSummary"]


class ModelSummary(_ModelSummary):  # type: ignore[misc]
    """Callback that prints the table of the ``LightningModule`` when a fit starts, instead of Lightning's own table.

    The input is the module's ``example_input_array``; without it the table shows names and parameters only.

    Args:
        max_depth: deepest level shown; None or -1: all levels; 0: print nothing, as in Lightning. Default: 1.
        columns: names from ``modelsummary.views.columns.COLUMNS``. Default: shapes, parameters, mult-adds.

    Attributes:
        statistics: the statistics that were printed; None before a fit.

    Raises:
        InputError: an argument is unusable.
    """

    def __init__(self, max_depth: int | None = 1, columns: Sequence[str] | None = None) -> None:
        super().__init__(max_depth=-1 if max_depth is None else max_depth)
        self._depth = None if max_depth == -1 else check_depth(max_depth)
        self._columns = None if columns is None else check_columns(columns)
        self.statistics: ModelStatistics | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Print the table; the trainer calls this method."""
        if self._depth == 0 or not trainer.is_global_zero:
            return
        example = pl_module.example_input_array
        if example is not None:
            example = pl_module.transfer_batch_to_device(example, pl_module.device, 0)
        self.statistics = Statistics(pl_module, example)
        rank_zero_info(f"\n{self.statistics.table(self._columns, self._depth)}")

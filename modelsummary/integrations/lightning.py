"""Callbacks for PyTorch Lightning: the table of the model when training starts, and MFU while it trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from modelsummary.devices.device_spec import DeviceSpec, Precision
from modelsummary.extras import needs
from modelsummary.formulas.tokens import FlopsPerToken
from modelsummary.integrations.meter import MFUMeter, Reading, tokens_in
from modelsummary.statistics import Statistics
from modelsummary.statistics.model_statistics import ModelStatistics
from modelsummary.views.columns import check_columns
from modelsummary.views.labels import check_depth

with needs("lightning", "lightning"):
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.callbacks import ModelSummary as _ModelSummary
    from lightning.pytorch.utilities import rank_zero_info

__all__ = ["MFUMonitor", "ModelSummary"]


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


class MFUMonitor(Callback):  # type: ignore[misc]
    """Callback that shows MFU and tokens (samples) per second, and logs them as ``mfu`` and ``tokens_per_second``.

    Args:
        flops_per_token: result of ``Statistics.flops_per_token``, or a number.
        tokens: function that returns the tokens in a batch of this process; None: see ``tokens_in``.
        device, dtype, every: as for ``MFUMeter``, in batches; the number of devices is the trainer's.

    Attributes:
        readings: all readings so far.

    Raises:
        InputError: an argument is unusable.
    """

    def __init__(
        self,
        flops_per_token: FlopsPerToken | float,
        tokens: Callable[[Any], int] | None = None,
        device: DeviceSpec | str | None = None,
        dtype: Precision | None = None,
        every: int = 10,
    ) -> None:
        super().__init__()
        self._options: dict[str, Any] = {"device": device, "dtype": dtype, "every": every, "show": rank_zero_info}
        unit = MFUMeter(flops_per_token, **self._options).unit  # refuses unusable arguments before the fit
        self._flops_per_token = flops_per_token
        self._tokens = tokens or (lambda batch: tokens_in(batch, unit))
        self._meter: MFUMeter | None = None
        self.readings: list[Reading] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the meter; the trainer calls this method."""
        self._meter = MFUMeter(self._flops_per_token, **self._options, n_devices=trainer.world_size)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count a batch; the trainer calls this method."""
        assert self._meter is not None
        reading = self._meter.step(self._tokens(batch) * trainer.world_size)
        if reading is None:
            return
        self.readings.append(reading)
        figures = {"mfu": reading.mfu, "tokens_per_second": reading.tokens_per_second}
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=trainer.global_step)

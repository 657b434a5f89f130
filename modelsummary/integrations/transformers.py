"""A callback for the ``Trainer`` of transformers: MFU and tokens per second while it trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from modelsummary.devices.device_spec import DeviceSpec, Precision
from modelsummary.errors import InputError
from modelsummary.extras import needs
from modelsummary.formulas.tokens import FlopsPerToken
from modelsummary.integrations.meter import MFUMeter, Reading

with needs("transformers", "transformers"):
    from transformers import TrainerCallback

__all__ = ["MFUCallback"]


class MFUCallback(TrainerCallback):  # type: ignore[misc]
    """Callback that shows MFU and tokens per second every ``every`` steps.

    Args:
        flops_per_token: result of ``Statistics.flops_per_token``, or a number.
        tokens_per_step: tokens that all devices process per optimizer step; None: what the trainer counts, which needs
            ``TrainingArguments(include_num_input_tokens_seen=True)``.
        device, dtype, every, show: as for ``MFUMeter``; the number of devices is the trainer's.

    Attributes:
        readings: all readings so far.

    Raises:
        InputError: an argument is unusable.
    """

    def __init__(
        self,
        flops_per_token: FlopsPerToken | float,
        tokens_per_step: int | None = None,
        device: DeviceSpec | str | None = None,
        dtype: Precision | None = None,
        every: int = 10,
        show: Callable[[Reading], object] | None = print,
    ) -> None:
        self._options: dict[str, Any] = {"device": device, "dtype": dtype, "every": every}
        MFUMeter(flops_per_token, **self._options)  # refuses unusable arguments before the training
        self._flops_per_token = flops_per_token
        self._tokens_per_step = tokens_per_step
        self._show = show
        self._seen = 0
        self._meter: MFUMeter | None = None
        self.readings: list[Reading] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the meter; the trainer calls this method."""
        counted = getattr(args, "include_num_input_tokens_seen", False) not in (False, "no")
        if self._tokens_per_step is None and not counted:
            raise InputError(
                "pass tokens_per_step=, or TrainingArguments(include_num_input_tokens_seen=True), to count tokens"
            )
        show = self._show if state.is_world_process_zero else None
        self._meter = MFUMeter(self._flops_per_token, **self._options, n_devices=args.world_size, show=show)
        self._seen = state.num_input_tokens_seen

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count an optimizer step; the trainer calls this method."""
        assert self._meter is not None
        tokens = self._tokens_per_step
        if tokens is None:
            tokens, self._seen = state.num_input_tokens_seen - self._seen, state.num_input_tokens_seen
        reading = self._meter.step(tokens)
        if reading is not None:
            self.readings.append(reading)

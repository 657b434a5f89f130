"""``LatencyEstimate``: predicted milliseconds with their parts, their source and their typical error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from modelsummary.devices.device_spec import DeviceSpec
from modelsummary.errors import InputError
from modelsummary.latency.row_times import Columns
from modelsummary.layer_info import CallKey
from modelsummary.tables import screen_of_output

__all__ = ["LatencyEstimate"]

_NAMED = 3  # operators in the printed line


class LatencyEstimate(float):
    """Predicted milliseconds of a forward or a training step: a float with attributes.

    Attributes:
        device: name of the device.
        mode: ``"eager"`` or ``"compiled"``.
        step_ms: the whole step, as the float itself.
        forward_ms, backward_ms, optimizer_ms: its parts; 0 for a part that was not requested.
        source: name of the fit, or of the kernel table of this machine.
        typical_error: mean error of such predictions against measurements they had not seen, as a fraction.
        shares: fraction of the time per source: ``"measured"``, ``"interpolated"`` between measured calls, ``"fit"``.
        limited_by: ``"host"`` if the host takes longer for the step than the kernels on the device, else ``"device"``.
            Forward, backward and optimizer each take the longer of both.
        uncounted_ops: operators whose work is not known -> number of runs. They take the time of their bytes, which is
            a lower bound, and collectives none: their time is the network's.
        calls: FQN and call index -> milliseconds of the forward and of the backward of that call, with everything
            inside it. ``split(by=estimate)`` balances them.
        columns: the figures of each row of the table.
        subject: the model, the sizes of its inputs, its dtype and the step.
        predict_on: predicts the same step on another device; None: it was loaded without its model.

    >>> estimate = LatencyEstimate({"forward": 42.1}, "A100 80GB", "eager", "fit: A100", 0.09)
    >>> print(estimate)
    42.1 ms (fit: A100, typical error 9 %)
    """

    def __new__(
        cls,
        phases: Mapping[str, float],
        device: str,
        mode: str,
        source: str,
        typical_error: float,
        shares: Mapping[str, float] | None = None,
        limited_by: str = "device",
        uncounted_ops: Mapping[str, int] | None = None,
        calls: Mapping[CallKey, tuple[float, float]] | None = None,
        columns: Columns | None = None,
        subject: str = "",
    ) -> LatencyEstimate:
        """Return the sum of the phases, in milliseconds."""
        estimate = super().__new__(cls, sum(phases.values()))
        estimate.forward_ms = phases.get("forward", 0.0)
        estimate.backward_ms = phases.get("backward", 0.0)
        estimate.optimizer_ms = phases.get("step", 0.0)
        estimate.device, estimate.mode, estimate.source, estimate.typical_error = device, mode, source, typical_error
        estimate.shares, estimate.limited_by = dict(shares or {"fit": 1.0}), limited_by
        estimate.uncounted_ops, estimate.calls = dict(uncounted_ops or {}), dict(calls or {})
        estimate.columns, estimate.subject, estimate.predict_on = columns or {}, subject, None
        return estimate

    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    device: str
    mode: str
    source: str
    typical_error: float
    shares: dict[str, float]
    limited_by: str
    uncounted_ops: dict[str, int]
    calls: dict[CallKey, tuple[float, float]]
    columns: Columns
    subject: str
    predict_on: Callable[[DeviceSpec | str], LatencyEstimate] | None

    @property
    def step_ms(self) -> float:
        """The milliseconds of the whole step."""
        return float(self)

    @property
    def seconds(self) -> float:
        """The seconds of the whole step."""
        return 1e-3 * float(self)

    def on(self, device: DeviceSpec | str) -> LatencyEstimate:
        """Return the estimate of the same step on another device, such as a calibrated one.

        Raises:
            InputError: the device is unknown or lacks the dtype, or the estimate was loaded without its model.

        >>> from modelsummary import Statistics
        >>> from torch import nn
        >>> estimate = Statistics(nn.Linear(4096, 4096), (4096, 4096)).estimate_latency("A100", backward=True)
        >>> estimate.on("H100") < estimate < estimate.on("V100")
        True
        """
        if self.predict_on is None:
            raise InputError("the estimate was loaded without its model; call estimate_latency of live statistics")
        return self.predict_on(device)

    def __getnewargs__(self) -> tuple[object, ...]:  # type: ignore[override]
        phases = {"forward": self.forward_ms, "backward": self.backward_ms, "step": self.optimizer_ms}
        device = self.device, self.mode, self.source, self.typical_error
        return phases, *device, self.shares, self.limited_by, self.uncounted_ops, self.calls, self.columns, self.subject

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "predict_on": None}  # it holds the model

    def __str__(self) -> str:
        parts = [self.source]
        shares = [(name, share) for name, share in self.shares.items() if share > 0]
        if len(shares) > 1:
            parts.append(", ".join(f"{share:.0%} {name}" for name, share in shares))
        if self.limited_by == "host":
            parts.append("bound by the host")
        parts.append(f"typical error {100 * self.typical_error:.0f} %")
        if self.uncounted_ops:
            names = sorted(self.uncounted_ops)
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            parts.append(f"a lower bound for {', '.join(names[:_NAMED])}{more}")
        phases = {"forward": self.forward_ms, "backward": self.backward_ms, "optimizer": self.optimizer_ms}
        timed = [f"{name} {value:,.4g}" for name, value in phases.items() if value]
        of_phases = f" = {' + '.join(timed)}" if len(timed) > 1 else ""
        about = f"{self.subject}, {self.mode} on {self.device}: " if self.subject else ""
        return screen_of_output().printed([f"{about}{float(self):,.4g} ms{of_phases} ({', '.join(parts)})"])

    __repr__ = __str__

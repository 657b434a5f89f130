"""What ``ModelStatistics`` says of time: measured, and estimated by rooflines."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from modelsummary.capture.exclusive import exclusive
from modelsummary.capture.inputs import available_device, call_like
from modelsummary.costs.devices import DeviceSpec, Precision
from modelsummary.costs.roofline import Roofline, estimate, roofline
from modelsummary.errors import InputError
from modelsummary.latency.measure import LatencyOverhead, measure_latency
from modelsummary.statistics.live import Live
from modelsummary.views.reports import latency_lines, profile_report

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Measuring"]


class Measuring(Live):
    """The part of ``ModelStatistics`` that is about time.

    Attributes:
        latency_overhead: what measuring cost; None before something was measured.
    """

    latency_overhead: LatencyOverhead | None = None
    _called: nn.Module | None = None  # what to call for the model: a compiled one

    @exclusive
    def measure_latency(
        self,
        x: Any = None,
        warmup: int = 3,
        runs: int = 10,
        backward: bool = False,
        device: torch.device | str | None = None,
    ) -> Self:
        """Run the model for real and time every call; the model and its state are afterwards as before.

        Fills ``latency_ms``, ``self_latency_ms``, ``latency_share`` and ``latency_iqr_ms`` of every row (medians over
        runs, in milliseconds), ``backward_*`` with ``backward=True``, and ``latency_overhead``. Without a backward the
        model runs without gradients. Marks lie around every call of a module; forwards with and without them take
        turns, and what a mark costs on the CPU is taken off.

        Args:
            x: input with values, of the sizes that were recorded; default: the recorded input, sizes as random values.
            warmup: runs that do not count.
            runs: runs that count.
            backward: time the backward of the output, started with ones.
            device: run a copy there; default: the model, where it is.

        Returns:
            These statistics.

        Raises:
            InputError: an argument is unusable, or the model has no values.
        """
        model, call = self._live("measuring")
        if type(warmup) is not int or type(runs) is not int or warmup < 0 or runs < 1:
            raise InputError(f"warmup={warmup!r}, runs={runs!r}; expected integers, warmup >= 0 and runs >= 1")
        place = None if device is None else available_device(device)
        if not isinstance(backward, bool):
            raise InputError(f"backward={backward!r}; expected True or False")
        if x is not None:
            call = call_like(call, model, x)
        options: dict[str, Any] = {"warmup": warmup, "runs": runs, "backward": backward, "device": place}
        self.latency_overhead = measure_latency(
            model if self._called is None else self._called, call, self.root, **options
        )
        return self

    def estimate_latency(self, spec: DeviceSpec | str, dtype: Precision | None = None) -> float:
        """The least time of a forward on a device, by its roofline, without a run; for devices one does not have.

        Fills ``estimated_latency_ms`` of every row; ``split(by="latency")`` and ``plan(by="latency")`` use it where
        nothing was measured.

        Args:
            spec: the device, or its name in the table of ``DeviceSpec.of``.
            dtype: of the computation; default: that of most parameters. ``"tf32"`` for float32 with TF32 products.

        Returns:
            Milliseconds.

        Raises:
            InputError: the device or its peak with this dtype is unknown.
        """
        return estimate(self.root, _device_spec(spec), dtype or self._dtype())

    def roofline(self, spec: DeviceSpec | str, dtype: Precision | None = None, *, depth: int | None = None) -> Roofline:
        """Every called module down to ``depth`` against the roof of a device: bound, what limits it, part reached.

        Args:
            spec, dtype: as for ``estimate_latency``.

        Raises:
            InputError: the device or its peak with this dtype is unknown.
        """
        return roofline(self.root, _device_spec(spec), dtype or self._dtype(), _level("depth", depth))

    def _dtype(self) -> torch.dtype:
        """Floating point dtype of most parameters; float32 without any."""
        counts: dict[torch.dtype, int] = {}
        for parameter in self.root.module.parameters() if self.root.module is not None else ():
            if parameter.dtype.is_floating_point and not is_lazy(parameter):
                counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
        return max(counts, key=lambda dtype: counts[dtype], default=torch.float32)

    def latency_report(self, *, depth: int | None = None, output_file: str | PathLike[str] | None = None) -> str:
        """A line a call, indented by tabs: parameters, latency, share of it, and shapes; also into ``output_file``."""
        return _written(latency_lines(self.root, _level("depth", depth)), output_file)

    def profile_report(
        self,
        *,
        top_modules: int = 1,
        module_depth: int | None = None,
        detailed: bool = True,
        output_file: str | PathLike[str] | None = None,
    ) -> str:
        """Totals, the classes that cost most at each depth, and the model's repr with figures, as DeepSpeed shows them.

        Args:
            top_modules: how many classes.
            module_depth: the deepest level shown; None: all.
            detailed: with the repr.
            output_file: where to write it, too.
        """
        if type(top_modules) is not int or top_modules < 1:
            raise InputError(f"top_modules={top_modules!r}; expected an integer >= 1")
        _level("module_depth", module_depth)
        options: dict[str, Any] = {"top_modules": top_modules, "module_depth": module_depth, "detailed": detailed}
        device = self.latency_overhead.device if self.latency_overhead is not None else ""
        return _written(profile_report(self.root, **options, device=device), output_file)


def _device_spec(spec: DeviceSpec | str) -> DeviceSpec:
    return spec if isinstance(spec, DeviceSpec) else DeviceSpec.of(spec)


def _level(name: str, depth: int | None) -> int | None:
    if depth is not None and (type(depth) is not int or depth < 0):
        raise InputError(f"{name}={depth!r} is no level of the tree; expected an integer >= 0, or None")
    return depth


def _written(text: str, output_file: str | PathLike[str] | None) -> str:
    if output_file is not None:
        Path(output_file).write_text(text + "\n", encoding="utf-8")
    return text

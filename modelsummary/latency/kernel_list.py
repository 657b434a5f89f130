"""``Kernels``: the kernels of a step as a table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, SupportsIndex, overload

from modelsummary.devices.device_spec import DeviceSpec
from modelsummary.devices.target import target_of, timing_on
from modelsummary.extras import Records
from modelsummary.operators.kernels import Kernel
from modelsummary.tables import Printed, Report
from modelsummary.units import duration, number_of, percent, scaled

__all__ = ["Kernels"]

_MOST_ROWS = 40


class Kernels(Printed, Records, tuple[Kernel, ...]):
    """Kernels in the order in which they run; a tuple that prints as a table, one line for kernels of equal work.

    A slice of it has the same methods.

    Args:
        kernels: the kernels.
        tf32: whether float32 products run on tensor cores.
        attention: fused kernels of attention, as in ``TimeOptions``.
        step: what ran, and the name of the device.

    >>> from modelsummary import Statistics
    >>> from torch import nn
    >>> kernels = Statistics(nn.Linear(64, 32), (8, 64)).kernels("A100")
    >>> [(kernel.op_class, kernel.sizes, kernel.flops) for kernel in kernels]
    [('gemm', (1, 8, 32, 64), 32768)]
    """

    tf32: bool
    attention: str | None
    step: tuple[str, str]

    def __new__(
        cls,
        kernels: Iterable[Kernel] = (),
        *,
        tf32: bool = False,
        attention: str | None = None,
        step: tuple[str, str] = ("a step", "a device"),
    ) -> Kernels:
        """Return the kernels as a tuple."""
        self = super().__new__(cls, kernels)
        self.tf32, self.attention, self.step = tf32, attention, step
        return self

    @overload
    def __getitem__(self, index: SupportsIndex) -> Kernel: ...

    @overload
    def __getitem__(self, index: slice) -> Kernels: ...

    def __getitem__(self, index: SupportsIndex | slice) -> Kernel | Kernels:
        """Return a kernel, or several."""
        part = super().__getitem__(index)
        return part if isinstance(part, Kernel) else self._with(part)

    def on(self, device: DeviceSpec | str) -> Kernels:
        """Return the same kernels with their predicted times on another named device.

        Raises:
            InputError: the device is unknown, or lacks the dtype of a kernel.

        >>> from modelsummary import Statistics
        >>> from torch import nn
        >>> kernels = Statistics(nn.Linear(4096, 4096), (4096, 4096)).kernels("A100")
        >>> kernels.on("V100").seconds > kernels.seconds
        True
        """
        target = target_of(device, tf32=self.tf32, attention=self.attention)
        timing = timing_on(target)
        timed = [(kernel, timing(kernel.work, None)) for kernel in self]
        kernels = (replace(kernel, seconds=seconds, source=source) for kernel, (seconds, source) in timed)
        return self._with(kernels, target.name)

    def _with(self, kernels: Iterable[Kernel], device: str | None = None) -> Kernels:
        step, own_device = self.step
        return Kernels(kernels, tf32=self.tf32, attention=self.attention, step=(step, device or own_device))

    @property
    def seconds(self) -> float:
        """The sum of the predicted times in seconds, without waiting for the host."""
        return sum(kernel.seconds or 0.0 for kernel in self)

    def to_records(self) -> list[dict[str, Any]]:
        """Return one dict of plain data per kernel."""
        return [kernel.to_record() for kernel in self]

    def _report(self) -> Report:
        groups: dict[tuple[Any, ...], list[Kernel]] = {}
        for kernel in self:
            groups.setdefault((kernel.phase, *kernel.work), []).append(kernel)
        seconds_of = {key: sum(kernel.seconds or 0.0 for kernel in group) for key, group in groups.items()}
        rows = []
        ranked = sorted(groups, key=lambda key: -seconds_of[key])
        for key in ranked[:_MOST_ROWS]:
            first, seconds = groups[key][0], seconds_of[key]
            dtype, sizes = str(first.dtype).removeprefix("torch."), " x ".join(map(str, first.sizes))
            work = [first.phase, first.name, first.op_class, dtype, sizes]
            work += [scaled(first.flops), scaled(first.moved_bytes, "B")]
            share = f"{seconds / (self.seconds or 1):.1%}"
            rows.append([*work, str(len(groups[key])), f"{1e3 * seconds:,.3f}", share, first.source])
        headers = "Phase Kernel Class Dtype Sizes FLOPs Bytes Runs".split()
        is_unknown = any(kernel.op_class == "other" for kernel in self)
        below = ["The work of kernels of class other is not known: they take the time of their bytes."] * is_unknown
        rest = sum(seconds_of[key] for key in ranked[_MOST_ROWS:])
        if rest:
            more = number_of(len(ranked) - _MOST_ROWS, "further line")
            below.append(f"{more}: {percent(rest / self.seconds)} of the time; see to_records() or to_pandas()")
        step, device = self.step
        above = [f"Kernels of {step} on {device}: {number_of(len(self), 'kernel')}, {duration(1e3 * self.seconds)}"]
        headers += ["All (ms)", "Share", "Source"]
        optional = ("Source", "Class", "Bytes", "FLOPs", "Dtype", "Share")
        return Report(rows, headers, "lllllrrrrrl", above=above, below=below, optional=optional)

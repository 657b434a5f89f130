"""``Kernels``: the kernels of a step as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelsummary.operators.kernels import Kernel
from modelsummary.tables import Printed, Report, data_frame

if TYPE_CHECKING:
    import pandas

__all__ = ["Kernels"]


class Kernels(Printed, tuple[Kernel, ...]):
    """Kernels in the order in which they run; a tuple that prints as a table, one line for kernels of equal work.

    >>> from modelsummary import Statistics
    >>> from torch import nn
    >>> kernels = Statistics(nn.Linear(64, 32), (8, 64)).kernels("A100")
    >>> [(kernel.op_class, kernel.sizes, kernel.flops) for kernel in kernels]
    [('gemm', (1, 8, 32, 64), 32768)]
    """

    @property
    def seconds(self) -> float:
        """The sum of the predicted times in seconds, without waiting for the host."""
        return sum(kernel.seconds or 0.0 for kernel in self)

    def to_records(self) -> list[dict[str, Any]]:
        """Return one dict of plain data per kernel."""
        return [kernel.to_record() for kernel in self]

    def to_pandas(self) -> pandas.DataFrame:
        """Return the records as a ``pandas.DataFrame``.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return data_frame(self.to_records())

    def _report(self) -> Report:
        groups: dict[tuple[Any, ...], list[Kernel]] = {}
        for kernel in self:
            groups.setdefault((kernel.phase, *kernel.work), []).append(kernel)
        seconds_of = {key: sum(kernel.seconds or 0.0 for kernel in group) for key, group in groups.items()}
        rows = []
        for key in sorted(groups, key=lambda key: -seconds_of[key]):
            first, seconds = groups[key][0], seconds_of[key]
            dtype, sizes = str(first.dtype).removeprefix("torch."), " x ".join(map(str, first.sizes))
            work = [first.phase, first.name, first.op_class, dtype, sizes, f"{first.flops:,}", f"{first.moved_bytes:,}"]
            share = f"{seconds / (self.seconds or 1):.1%}"
            rows.append([*work, str(len(groups[key])), f"{1e3 * seconds:,.3f}", share, first.source])
        headers = "Phase Kernel Class Dtype Sizes FLOPs Bytes Runs".split()
        is_unknown = any(kernel.op_class == "other" for kernel in self)
        below = ["The work of kernels of class other is not known: they take the time of their bytes."] * is_unknown
        return Report(rows, [*headers, "All (ms)", "Share", "Source"], "lllllrrrrrl", below=below)

"""What ``ModelStatistics`` shows beyond the table: pictures, the dataflow, a trace, what differs from another model."""

from __future__ import annotations

from modelsummary.measuring import Measuring
from modelsummary.splitting import Splitting
from modelsummary.views.plot import Pictures

__all__ = ["Viewing"]


class Viewing(Measuring, Splitting):
    """The part of ``ModelStatistics`` that shows."""

    @property
    def plot(self) -> Pictures:
        """Pictures with matplotlib: ``stats.plot.treemap(by="macs")``; see ``Pictures`` for all of them."""
        return Pictures(self.root, self._dtype)

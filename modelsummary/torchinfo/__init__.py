"""The drop-in for torchinfo: ``summary`` with torchinfo's arguments, result and exceptions."""

from modelsummary.torchinfo.drop_in import SummaryStatistics, clear_cached_forward_pass, summary
from modelsummary.torchinfo.enums import ColumnSettings, Mode, RowSettings, Units, Verbosity
from modelsummary.torchinfo.formatting import FormattingOptions

__all__ = [
    "ColumnSettings",
    "FormattingOptions",
    "Mode",
    "RowSettings",
    "SummaryStatistics",
    "Units",
    "Verbosity",
    "clear_cached_forward_pass",
    "summary",
]

"""The drop-in for torchinfo: ``summary`` with its arguments, its result and its exceptions."""

from modelsummary.torchinfo.drop_in import SummaryStatistics, clear_cached_forward_pass, summary

__all__ = ["SummaryStatistics", "clear_cached_forward_pass", "summary"]

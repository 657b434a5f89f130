"""What an attribute that does not exist may have meant."""

from __future__ import annotations

from modelsummary.errors import close_to

__all__ = ["is_live", "meant"]


def is_live(name: str) -> bool:
    """Return True for an attribute that only statistics of a live model have.

    >>> is_live("simulate"), is_live("table"), is_live("nonsense")
    (True, False, False)
    """
    from modelsummary.statistics.model_statistics import ModelStatistics
    from modelsummary.statistics.statistics import Statistics

    return not name.startswith("_") and hasattr(Statistics, name) and not hasattr(ModelStatistics, name)


_MEANT = {  # names that people try
    "flops": "total_flops",
    "macs": "total_macs",
    "params": "total_params",
    "num_params": "total_params",
    "parameters": "total_params",
    "layers": "summary_list",
    "summary": "print(stats), or table()",
}


def meant(owner: type, name: str) -> str:
    """Return a suggestion to append to a message; empty if no attribute is close.

    >>> from modelsummary import ModelStatistics
    >>> meant(ModelStatistics, "flops"), meant(ModelStatistics, "tabel")
    ('; did you mean total_flops?', "; did you mean 'table'?")
    """
    known = [] if name.startswith("_") else [each for each in dir(owner) if not each.startswith("_")]
    return f"; did you mean {_MEANT[name]}?" if name in _MEANT else close_to(name, known)

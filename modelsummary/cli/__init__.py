"""The command ``modelsummary``."""

from modelsummary.cli.commands import main, run

__all__ = ["main", "run"]

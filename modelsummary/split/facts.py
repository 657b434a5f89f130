"""Old home of the facts of stages: pickles of version 0.1.0 import them from here."""

from modelsummary.split.stage_facts import Crossing, StageFacts

__all__ = ["Crossing", "StageFacts"]

"""Where stages that version 0.1.0 pickled look for what is known of them."""

from modelsummary.split.stage_facts import Crossing, StageFacts

__all__ = ["Crossing", "StageFacts"]

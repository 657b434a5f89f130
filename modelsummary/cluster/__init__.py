"""Simulate the training of a model on a cluster, and search for the best plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelsummary.cluster.devices import Cluster
from modelsummary.cluster.estimate import StepEstimate
from modelsummary.cluster.plan import Plan, Recipe
from modelsummary.cluster.step import estimate_step
from modelsummary.cluster.step_model import StepModel
from modelsummary.cluster.timing import Timer

if TYPE_CHECKING:
    from modelsummary.capture.live import LiveModel
    from modelsummary.layer_info import LayerInfo

__all__ = ["Cluster", "Plan", "Recipe", "StepEstimate", "simulate", "simulate_live"]


def simulate(
    stats: Any, plan: Plan, cluster: Cluster, global_batch: int, *, sequence: int | None = None, recipe: Recipe | None = None
) -> StepEstimate:
    """Return the time and memory of a training step."""
    return simulate_live(stats.live, stats.root, plan, cluster, global_batch, sequence=sequence, recipe=recipe)


def simulate_live(
    live: LiveModel,
    root: LayerInfo,
    plan: Plan,
    cluster: Cluster,
    global_batch: int,
    *,
    sequence: int | None = None,
    recipe: Recipe | None = None,
) -> StepEstimate:
    """Return the time and memory of a training step; see ``Statistics.simulate``."""
    model = StepModel(live, root, recipe or Recipe())
    length = model.recorded_sequence if sequence is None else sequence
    return estimate_step(model, plan, Timer(cluster), global_batch, length)

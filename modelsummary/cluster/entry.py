"""The functions behind ``Statistics.simulate`` and ``Statistics.plan``: they check what was passed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelsummary.capture.live import LiveModel
from modelsummary.cluster.applying import MakePlan
from modelsummary.cluster.estimate import StepEstimate
from modelsummary.cluster.plan import Plan, Recipe
from modelsummary.cluster.plans import Plans
from modelsummary.cluster.search import SearchOptions, find_plans
from modelsummary.cluster.step import StepSimulator
from modelsummary.cluster.step_model import StepModel
from modelsummary.cluster.topology import Cluster, check_cluster
from modelsummary.errors import InputError, check_integers
from modelsummary.keywords import check_names
from modelsummary.layer_info import LayerInfo

__all__ = ["search", "simulate"]


def simulate(
    live: LiveModel,
    root: LayerInfo,
    plan: Plan,
    cluster: Cluster,
    global_batch: int,
    sequence_length: int | None,
    recipe: Recipe | None,
    make_plan: MakePlan,
) -> StepEstimate:
    """Return the estimate of a step as ``Statistics.simulate`` says."""
    if not isinstance(plan, Plan):
        raise InputError(f"plan must be a Plan, such as Plan(tensor=8, shard=2), got {plan!r:.80}")
    return _simulator(live, root, cluster, global_batch, sequence_length, recipe, make_plan).simulate(plan)


def search(
    live: LiveModel,
    root: LayerInfo,
    cluster: Cluster | None,
    global_batch: int | None,
    sequence_length: int | None,
    recipe: Recipe | None,
    options: Mapping[str, Any],
    make_plan: MakePlan,
) -> Plans:
    """Return the best plans as ``Statistics.plan`` says."""
    check_names("plan", options, SearchOptions.__annotations__)
    simulator = _simulator(live, root, cluster, global_batch, sequence_length, recipe, make_plan)
    return find_plans(simulator, options)  # type: ignore[arg-type]


def _simulator(
    live: LiveModel,
    root: LayerInfo,
    cluster: Any,
    global_batch: Any,
    sequence_length: Any,
    recipe: Any,
    make_plan: MakePlan,
) -> StepSimulator:
    check_cluster(cluster)
    if recipe is not None and not isinstance(recipe, Recipe):
        raise InputError(f"recipe must be a Recipe or None, got {recipe!r:.80}")
    model = StepModel(live, root, recipe or Recipe())
    if sequence_length is not None:
        check_integers(sequence_length=sequence_length)
        if not model.recorded_sequence:
            raise InputError(
                f"sequence_length={sequence_length} needs a first input of tokens (batch x length [x features]); pass "
                "None"
            )
        if sequence_length > model.recorded_sequence:
            model.check_length(sequence_length)
    return StepSimulator(model, cluster, global_batch, sequence_length or model.recorded_sequence, make_plan)

"""The functions behind ``Statistics.simulate`` and ``Statistics.plan``: they check what was passed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from modelsummary.capture.live import LiveModel
from modelsummary.cluster.applying import MakePlan
from modelsummary.cluster.estimate import StepEstimate
from modelsummary.cluster.pipeline_plan import PipelinePlans, cluster_of, make_plans
from modelsummary.cluster.plan import Plan, Recipe, modern_checkpoint
from modelsummary.cluster.plans import Plans
from modelsummary.cluster.search import SearchOptions, find_plans
from modelsummary.cluster.step import StepSimulator
from modelsummary.cluster.step_model import StepModel
from modelsummary.cluster.topology import Cluster
from modelsummary.errors import InputError
from modelsummary.keywords import check_names, warn_renamed
from modelsummary.layer_info import LayerInfo
from modelsummary.parallel.plan_arguments import check_ranks
from modelsummary.split.stage_facts import StageFacts

__all__ = ["Cluster", "is_deprecated", "pipeline_plans", "search", "simulate"]

_DEPRECATED: dict[str, Any] = {
    "devices": None,
    "memory_bytes": None,
    "n_microbatches": (8, 16, 32, 64),
    "schedules": ("gpipe", "1f1b", "interleaved1f1b", "zb"),
    "by": "macs",
    "flops_per_second": 1e14,
    "bandwidth": 25e9,
    "optimizer_states": 2,
}


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
        raise InputError(f"plan must be a Plan, such as Plan(tensor=8, data=2), got {plan!r:.80}")
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
    present = _modern(dict(options))
    sequence_length = present.pop("sequence_length", sequence_length)
    check_names("plan", present, SearchOptions.__annotations__)
    simulator = _simulator(live, root, cluster, global_batch, sequence_length, recipe, make_plan)
    return find_plans(simulator, present)  # type: ignore[arg-type]


def _simulator(
    live: LiveModel,
    root: LayerInfo,
    cluster: Any,
    global_batch: Any,
    sequence_length: Any,
    recipe: Any,
    make_plan: MakePlan,
) -> StepSimulator:
    if not isinstance(cluster, Cluster):
        raise InputError(f"cluster must be a Cluster, such as Cluster.preset('DGX H100', nodes=4), got {cluster!r:.80}")
    if recipe is not None and not isinstance(recipe, Recipe):
        raise InputError(f"recipe must be a Recipe or None, got {recipe!r:.80}")
    model = StepModel(live, root, recipe or Recipe())
    if sequence_length is not None:
        check_ranks(sequence_length=sequence_length)
        if not model.recorded_sequence:
            raise InputError(
                f"sequence_length={sequence_length} needs a first input of tokens (batch x length [x features]); pass "
                "None"
            )
    return StepSimulator(model, cluster, global_batch, sequence_length or model.recorded_sequence, make_plan)


def _modern(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a search whose names may be earlier ones."""
    if type(options.get("sequence")) is int:
        options["sequence_length"] = options.pop("sequence")
        warn_renamed("plan", "sequence", "sequence_length")
    for old, new in {"sequence_parallel": "sequence", "zero": "sharded", "recompute": "checkpoint"}.items():
        if old in options:
            warn_renamed("plan", old, new)
            values = options.pop(old)
            is_list = old == "recompute" and isinstance(values, (list, tuple))
            options[new] = [modern_checkpoint(value) for value in values] if is_list else values
    return options


# ------------------------------------------------------------------------------------------- deprecated


def is_deprecated(options: Mapping[str, Any]) -> bool:
    """Return True if a call of ``plan`` passes arguments of version 0.1."""
    return bool((_DEPRECATED.keys() - {"schedules"}) & options.keys())


def pipeline_plans(
    root: LayerInfo,
    facts: Callable[..., Sequence[StageFacts] | None],
    n_samples: int,
    devices: Any,
    memory_bytes: Any,
    options: Mapping[str, Any],
) -> PipelinePlans:
    """Return the plans of pipeline x data parallelism, for the arguments that version 0.1 had."""
    warnings.warn(
        "plan(devices, memory_bytes, ...) is deprecated: pass plan(Cluster(device, nodes=...), global_batch=...); "
        "Cluster and Recipe replace the other arguments",
        DeprecationWarning,
        stacklevel=5,
    )
    arguments = {"devices": devices, "memory_bytes": memory_bytes}
    values = {**_DEPRECATED, **{name: value for name, value in arguments.items() if value is not None}, **options}
    for name in values:
        if name not in _DEPRECATED:
            raise InputError(f"unknown option {name!r} of plan; expected {', '.join(_DEPRECATED)}")
    names = ("flops_per_second", "devices", "memory_bytes", "bandwidth", "optimizer_states")
    cluster = cluster_of(root, values["by"], *(values[name] for name in names))
    return make_plans(
        partial(facts, by=values["by"]), n_samples, cluster, values["n_microbatches"], values["schedules"]
    )

"""From a plan of the cluster to code and to a sharded model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from modelsummary.cluster.plan import Plan
from modelsummary.errors import InputError

if TYPE_CHECKING:
    from modelsummary.parallel import ParallelPlan

__all__ = ["MakePlan", "parallel_plan", "to_code"]

MakePlan = Callable[..., "ParallelPlan"]  # Statistics.parallel_plan


def parallel_plan(plan: Plan, make: MakePlan | None) -> ParallelPlan:
    """Return the parallel plan of the model for the ranks of a plan.

    Raises:
        InputError: the plan has several stages per rank, context or expert parallelism, recomputation of a part of the
            blocks, or sequence parallelism with stages; or the model was not kept.
    """
    if make is None:
        raise InputError("the estimate was loaded without its model; call plan or simulate in this process")
    for name in ("context", "expert", "virtual_stages"):
        if getattr(plan, name) > 1:
            raise InputError(
                f"parallel_plan does not apply {name}={getattr(plan, name)}; search with {name}=[1] for a plan to apply"
            )
    if plan.recompute not in ("none", "full", 0):
        raise InputError(
            f"parallel_plan does not apply recompute={plan.recompute!r}; search with recompute=['none', 'full'] for a "
            "plan to apply"
        )
    if plan.sequence_parallel and plan.pipeline > 1:
        raise InputError(
            f"parallel_plan does not apply sequence_parallel=True with pipeline={plan.pipeline}; search with "
            "sequence_parallel=[False] or pipeline=[1] for a plan to apply"
        )
    return make(**_arguments(plan))


def _arguments(plan: Plan) -> dict[str, object]:
    is_sharded = plan.zero > 0 and plan.data > 1
    arguments: dict[str, object] = {"tensor": plan.tensor, "pipeline": plan.pipeline}
    if is_sharded:
        arguments["shard"] = plan.shards
    if plan.data > 1 and (not is_sharded or plan.replicas > 1):
        arguments["data"] = plan.replicas if is_sharded else plan.data
    if plan.sequence_parallel:
        arguments["sequence"] = True
    if is_sharded and plan.zero < 3:
        arguments["reshard_after_forward"] = False
    if plan.recompute == "full":
        arguments["checkpoint"] = "every"
    return arguments


def to_code(plan: Plan, make: MakePlan | None) -> str:
    """Return code that trains by a plan; with stages, it needs this library besides torch.

    Raises:
        InputError: as for ``parallel_plan``.
    """
    made = parallel_plan(plan, make)
    if plan.pipeline == 1:
        return made.to_code()
    given = ", ".join(f"{name}={value!r}" for name, value in _arguments(plan).items())
    kind = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "zb": "ScheduleInterleavedZeroBubble"}[plan.schedule]
    return "\n".join(
        [
            f'"""Train {made.model_class} over {plan.devices} ranks, under torchrun."""',
            "",
            f"from torch.distributed.pipelining import {kind}",
            "",
            "from modelsummary import Statistics",
            "",
            "",
            "def make_schedule(model, inputs, loss_fn, n_microbatches, device_type):",
            f"    plan = Statistics(model, inputs).parallel_plan({given})",
            "    stage = plan.apply(model, plan.device_mesh(device_type))",
            f"    return {kind}({'[stage]' if plan.schedule == 'zb' else 'stage'}, n_microbatches, loss_fn=loss_fn)",
            "",
        ]
    )

"""From a plan of the cluster to code and to a sharded model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from modelsummary.cluster.plan import Plan, Recipe
from modelsummary.errors import InputError, ModelSummaryError
from modelsummary.operators.tensor_bytes import is_wrapper
from modelsummary.parallel.code import casts, to_code

if TYPE_CHECKING:
    from modelsummary.parallel import ParallelPlan

__all__ = ["Applier", "MakePlan"]

MakePlan = Callable[..., "ParallelPlan"]  # Statistics.parallel_plan
_ENGINE_CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved1f1b": "ScheduleInterleaved1F1B",
    "zb": "ScheduleInterleavedZeroBubble",
}
_TAKES_LISTS = ("interleaved1f1b", "zb")


class Applier:
    """Makes parallel plans of one model for plans of a cluster.

    The optimizer updates float32 weights if the recipe has master weights: these are the parameters, whole or sharded,
    and FSDP's mixed precision casts the parameters of a unit for its forward and backward. Frozen parameters have the
    dtype of the recipe.

    Args:
        make: ``parallel_plan`` of the model's statistics.
        model: the model.
        recipe: what it is trained with.
    """

    def __init__(self, make: MakePlan, model: nn.Module, recipe: Recipe) -> None:
        self._make, self._model, self._recipe = make, model, recipe
        self._obstacles: dict[object, str] = {}

    def obstacle(self, plan: Plan, microbatches: int) -> str:
        """Return why a step with so many micro-batches cannot be run by a plan; an empty string if it can.

        Plans that differ only in how many ranks share the data are made once.
        """
        noted = self.noted_obstacle(plan, microbatches)
        if noted is not None:
            return noted
        key = self._key(plan)
        try:
            self._make(**dict(key))
            self._obstacles[key] = ""
        except ModelSummaryError as error:
            self._obstacles[key] = str(error)
        return self._obstacles[key]

    def noted_obstacle(self, plan: Plan, microbatches: int) -> str | None:
        """Return the same as ``obstacle`` without making a plan; None if one has to be made to tell."""
        try:
            self._check(plan)
        except InputError as error:
            return str(error)
        if plan.schedule == "1f1b" and microbatches < plan.pipeline:
            return (
                f"torch runs schedule='1f1b' with as many micro-batches as stages or more, not {microbatches} with "
                f"pipeline={plan.pipeline}; use schedule='gpipe', or a larger global_batch"
            )
        return self._obstacles.get(self._key(plan))

    def parallel_plan(self, plan: Plan) -> ParallelPlan:
        """Return the parallel plan of the model for the ranks of a plan.

        Raises:
            InputError: the plan or the recipe has a part that ``parallel_plan`` does not apply.
        """
        self._check(plan)
        applied, dtypes = self._make(**self._arguments(plan)), self._cast_dtypes
        return replace(applied, parameter_dtypes=dtypes) if dtypes else applied  # a copy would read its step again

    def to_code(self, plan: Plan) -> str:
        """Return code that trains by a plan; with stages, it needs this library besides torch.

        Raises:
            InputError: as for ``parallel_plan``.
        """
        applied = self.parallel_plan(plan)
        if plan.pipeline == 1:
            return to_code(applied)
        written = ", ".join(f"{name}={value!r}" for name, value in self._arguments(plan).items())
        kind = _ENGINE_CLASSES[plan.schedule]
        stages = "[stage]" if plan.schedule in _TAKES_LISTS else "stage"
        return "\n".join(
            [
                f'"""Train {applied.model_class} over {plan.devices} ranks, under torchrun."""',
                "",
                *(["import torch"] if applied.parameter_dtypes or self._precision else []),
                f"from torch.distributed.pipelining import {kind}",
                "",
                "from modelsummary import Statistics",
                "",
                "",
                "def make_schedule(model, inputs, loss_fn, n_microbatches, device_type):",
                f"    plan = Statistics(model, inputs).parallel_plan({written})",
                *(f"    {line}" for line in casts(applied)),
                "    stage = plan.apply(model, plan.device_mesh(device_type))",
                f"    return {kind}({stages}, n_microbatches, loss_fn=loss_fn)",
                "",
            ]
        )

    def _key(self, plan: Plan) -> tuple[tuple[str, Any], ...]:
        """Return the arguments of ``parallel_plan`` that decide whether it can be made."""
        arguments = self._arguments(plan)
        left_out = ("data", "sharded", *(() if isinstance(plan.checkpoint, tuple) else ("checkpoint",)))
        kept = {name: value for name, value in arguments.items() if name not in left_out}
        if plan.dispatch_ranks > 1 and plan.shard == 1:
            kept["data"] = plan.dispatch_ranks
        return tuple({**kept, "shard": min(plan.shard, max(2, plan.dispatch_ranks))}.items())

    def _arguments(self, plan: Plan) -> dict[str, Any]:
        """Return the arguments of ``parallel_plan``.

        Where no parameters are sharded, the copies in which they compute stay for a step, as on other ranks the weights
        do. One rank alone frees copies of frozen weights: these have the dtype of the copies already.
        """
        names = ("data", "shard", "context")
        sizes = {name: getattr(plan, name) for name in names if getattr(plan, name) > 1}
        arguments: dict[str, Any] = {"tensor": plan.tensor, "pipeline": plan.pipeline, **sizes}
        if plan.sequence:
            arguments["sequence"] = True
        if plan.expert > 1:
            arguments |= {"expert": plan.expert, "dispatch": plan.dispatch}
        if self._precision is not None:
            arguments["precision"] = self._precision
        is_cast = self._precision is not None and all(parameter.requires_grad for parameter in self._model.parameters())
        if plan.context > 1 and plan.sharded:  # the ranks of context shard, too
            arguments["sharded"] = plan.sharded
        elif not plan.is_fsdp and (plan.shard > 1 or (is_cast and plan.context == 1)):
            arguments["sharded"] = "optimizer" if plan.sharded == "optimizer" else "gradients"
        if plan.checkpoint:
            arguments["checkpoint"] = plan.checkpoint
        return arguments

    # -------------------------------------------------------------------------------------------- dtypes

    @property
    def _trained(self) -> torch.dtype:
        """The dtype in which trained parameters compute: the recipe's, or their own."""
        dtypes = (parameter.dtype for parameter in self._model.parameters() if parameter.requires_grad)
        return self._recipe.precision or next(dtypes, torch.float32)

    @property
    def _stored(self) -> torch.dtype:
        """The dtype in which trained parameters are stored between steps."""
        is_narrow = self._trained.itemsize < torch.float32.itemsize
        return torch.float32 if self._recipe.master_weights and is_narrow else self._trained

    @property
    def _precision(self) -> torch.dtype | None:
        return None if self._trained == self._stored else self._trained

    @property
    def _cast_dtypes(self) -> dict[str, str]:
        """The dtype of trained and frozen parameters, where some of them have another one."""
        wanted = {"trained": self._stored}
        if self._recipe.precision is not None:
            wanted["frozen"] = self._recipe.precision
        return {
            kind: str(dtype).removeprefix("torch.")
            for kind, dtype in wanted.items()
            if any(
                parameter.is_floating_point() and not is_wrapper(parameter) and parameter.dtype != dtype
                for parameter in self._model.parameters()
                if parameter.requires_grad == (kind == "trained")
            )
        }

    def _check(self, plan: Plan) -> None:
        """Raise ``InputError`` if the plan or the recipe has a part that ``parallel_plan`` does not apply."""
        if plan.virtual_stages > 1:
            raise InputError(
                f"parallel_plan does not apply virtual_stages={plan.virtual_stages}; search with virtual_stages=[1] "
                "for a plan to apply"
            )
        if isinstance(plan.blocks, tuple):
            raise InputError(
                f"parallel_plan does not apply blocks={plan.blocks}: it balances the stages by their cost; pass "
                "blocks='cost'"
            )
        if plan.checkpoint == "selective":
            raise InputError(
                "parallel_plan does not apply checkpoint='selective'; search with checkpoint=[None, 'every'] for a "
                "plan to apply"
            )
        if plan.sequence and plan.pipeline > 1:
            raise InputError(
                f"parallel_plan does not apply sequence=True with pipeline={plan.pipeline}; search with "
                "sequence=[False] or pipeline=[1] for a plan to apply"
            )
        recipe = self._recipe
        if plan.sequence and plan.expert == 1 and recipe.sequence == "megatron":
            raise InputError(
                "parallel_plan does not apply Megatron's layers, which Recipe(sequence='megatron') costs; pass "
                "sequence='torch' to the Recipe for a plan to apply"
            )
        if recipe.precision is not None and recipe.precision.itemsize == 1:
            raise InputError(
                f"parallel_plan does not apply Recipe(precision={recipe.precision}): convert the layers with "
                "torchao.float8.convert_to_float8_training, and plan with precision=torch.bfloat16"
            )
        if plan.checkpoint and recipe.early_stop is False:
            raise InputError(
                "parallel_plan does not apply Recipe(early_stop=False): its checkpoints stop when they have what the "
                "backward reads; leave early_stop out for a plan to apply"
            )
        summed = recipe.gradient_dtype or self._trained
        if summed != self._stored:
            raise InputError(
                f"parallel_plan does not apply Recipe(gradient_dtype={recipe.gradient_dtype}): torch gives gradients "
                f"the dtype of the stored weights, here {self._stored}; pass gradient_dtype={self._stored}"
            )

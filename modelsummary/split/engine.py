"""Run stages on torch's own pipeline engine, ``torch.distributed.pipelining``.

Every rank has all stages as modules, moves its own to its device (or creates them there, if the model was built on
meta), and steps a schedule. The shapes of the crossing tensors are known, so nothing is inferred at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from modelsummary import _torch
from modelsummary.capture.materialize import Checkpoint, Init, checkpoint_values, materialize
from modelsummary.capture.templates import BatchSize, holds_objects, leaves_of, map_template, with_leaves
from modelsummary.errors import InputError, SplitError, check_integers
from modelsummary.keywords import choice_of
from modelsummary.split.stage import Slot
from modelsummary.split.stage_facts import Crossing

if TYPE_CHECKING:
    from modelsummary.split.engine_stage import EngineStage, SharedOwners
    from modelsummary.split.stages import Stages

__all__ = ["ENGINE_SCHEDULES", "Pipeline", "pipeline_stages"]


# name -> class in torch.distributed.pipelining, whether it takes one stage per rank, whether stages are dealt in a V
ENGINE_SCHEDULES = {
    "gpipe": ("ScheduleGPipe", True, False),
    "1f1b": ("Schedule1F1B", True, False),
    "interleaved1f1b": ("ScheduleInterleaved1F1B", False, False),
    "loopedbfs": ("ScheduleLoopedBFS", False, False),
    "zb": ("ScheduleInterleavedZeroBubble", False, False),
    "zbv": ("ScheduleZBVZeroBubble", False, True),
}


_OLDEST = (2, 11)  # older engines are untested, or (2.6) wait forever on gloo
_CARRIES_INTEGERS = (2, 13)


def _version() -> tuple[int, ...]:
    return tuple(map(int, torch.__version__.split(".")[:2]))


def rank_of(stage: int, n_ranks: int, *, in_v: bool) -> int:
    """Return the rank that runs a stage. Stages are dealt in turn, or down and up again (a V)."""
    return min(stage, 2 * n_ranks - 1 - stage) if in_v else stage % n_ranks


def pipeline_stages(
    stages: Stages,
    device: torch.device,
    group: dist.ProcessGroup | None,
    *,
    in_v: bool = False,
    microbatch_size: int | None = None,
    checkpoint: Checkpoint | None = None,
    init: Init | None = None,
) -> list[EngineStage]:
    """Return the stages of this rank as ``PipelineStage``, on their device.

    Raises:
        SplitError: the stages cannot be dealt evenly to the ranks of the group.
    """
    from modelsummary.split.engine_stage import EngineStage, RankGradients

    rank, n_ranks = dist.get_rank(group), dist.get_world_size(group)
    if len(stages) % n_ranks or (in_v and len(stages) != 2 * n_ranks):
        expected = f"{2 * n_ranks} stages, two per rank" if in_v else f"a multiple of {n_ranks} stages"
        raise SplitError(f"{len(stages)} stages cannot be dealt to {n_ranks} ranks; split into {expected}")
    stage_indices = [index for index in range(len(stages)) if rank_of(index, n_ranks, in_v=in_v) == rank]
    rank_stages = [stages[index] for index in stage_indices]
    materialize(rank_stages, device, checkpoint_values(rank_stages, checkpoint, init), init)
    size = _checked_size(stages, microbatch_size)
    gradients = RankGradients(_owners(stages, rank, n_ranks, in_v=in_v), group)
    engine_stages = [
        EngineStage(
            stages[index],
            index,
            len(stages),
            device,
            input_args=tuple(crossing.at(size) for crossing in _positional(stages, index)),
            output_args=tuple(crossing.at(size) for crossing in stages.crossing[index + 1]),
            group=group,
            gradients=gradients,
        )
        for index in stage_indices
    ]
    if init is not None:  # which may draw other random numbers on each rank
        gradients.copy_from_first()
    return engine_stages


def _positional(stages: Stages, stage_index: int) -> Sequence[Any]:
    """Return the crossings that a stage takes by position; for the first stage, the model's positional tensors."""
    crossings = stages.crossing[stage_index]
    return crossings if stage_index else crossings[: stages.n_positional_inputs]


def _checked_size(stages: Stages, microbatch_size: int | None) -> int | None:
    """Return the batch size of a micro-batch; None for the recorded one."""
    if microbatch_size is None or microbatch_size == stages.batch_size:
        return None
    check_integers(microbatch_size=microbatch_size)
    if stages.batch_size is None:
        raise SplitError(
            f"microbatch_size={microbatch_size}, but these stages take inputs of the recorded sizes only; leave it "
            f"out, or split with an input of {microbatch_size} samples"
        )
    return microbatch_size


# ------------------------------------------------------------------------------------------- schedules


class Pipeline:
    """A schedule over the stages of this rank. Every rank calls ``step`` with the same arguments.

    Made by ``Stages.schedule``.

    Attributes:
        schedule: the schedule object of ``torch.distributed.pipelining``.
        stages: list of this rank's ``PipelineStage``; ``stage.submod`` is the module.
        n_microbatches: micro-batches in a step.
        microbatch_size: samples in a micro-batch; None if the stages take the recorded sizes only.
    """

    def __init__(
        self,
        stages: Stages,
        name: str,
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None,
        *,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
        microbatch_size: int | None = None,
        checkpoint: Checkpoint | None = None,
        init: Init | None = None,
    ) -> None:
        from torch.distributed import pipelining

        name = choice_of(name, ENGINE_SCHEDULES, "schedule")
        check_integers(n_microbatches=n_microbatches)
        if not dist.is_initialized():
            raise SplitError("no process group: call torch.distributed.init_process_group, or run under torchrun")
        if _version() < _OLDEST:
            raise SplitError(f"the engine needs torch >= {'.'.join(map(str, _OLDEST))}, got {torch.__version__}")
        if holds_objects(stages.inputs.arguments):
            raise SplitError("an argument is an object that holds tensors, which cannot be dealt to micro-batches")
        class_name, is_single, in_v = ENGINE_SCHEDULES[name]
        _check_crossing(stages, name)
        n_ranks = dist.get_world_size(group)
        if is_single and len(stages) != n_ranks:
            raise SplitError(
                f"{name!r} takes one stage per rank, but there are {len(stages)} stages and {n_ranks} ranks; "
                f"split into {n_ranks}, or use 'interleaved1f1b'"
            )
        if name == "1f1b" and n_microbatches < len(stages):
            raise InputError(
                f"n_microbatches={n_microbatches}: torch runs '1f1b' with as many micro-batches as stages or "
                f"more, here {len(stages)}; pass more, or use 'gpipe'"
            )
        rank_device = torch.device(device) if device is not None else _default_device()
        self._all = stages
        self.n_microbatches = n_microbatches
        self.microbatch_size = microbatch_size or stages.batch_size
        self.stages = pipeline_stages(
            stages, rank_device, group, in_v=in_v, microbatch_size=microbatch_size, checkpoint=checkpoint, init=init
        )
        kind = getattr(pipelining, class_name, None)
        if kind is None:
            raise SplitError(f"torch {torch.__version__} has no {class_name}; choose another schedule")
        stage_or_stages: Any = self.stages[0] if is_single else self.stages
        self._batch_dims = _batch_dims(stages)
        args_spec, kwargs_spec = _chunk_specs(stages, self._batch_dims)
        self.schedule: Any = kind(
            stage_or_stages,
            n_microbatches,
            loss_fn=loss_fn,
            args_chunk_spec=args_spec,
            kwargs_chunk_spec=kwargs_spec,
        )
        _torch.merge_by(self.schedule, self._merge)
        for stage in self.stages:
            stage.keeps_results = True

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters of this rank's stages, each once; pass them to the optimizer."""
        unique = {id(parameter): parameter for stage in self.stages for parameter in stage.submod.parameters()}
        return list(unique.values())

    def step(self, *args: Any, target: Any = None, losses: list[Tensor] | None = None, **kwargs: Any) -> Any:
        """Run one step over all micro-batches: forward, and backward if there is a loss.

        The loss of the batch is the mean of the micro-batches' losses. Its gradients are added to ``parameter.grad``.
        Gradients of shared parameters are summed over the ranks that hold them.

        Args:
            *args: the model's arguments, for the whole batch; used on the rank of the first stage.
            **kwargs: the model's keyword arguments, likewise.
            target: second argument of the loss, for the whole batch; used on the rank of the last stage.
            losses: list that gets the loss of each micro-batch on the rank of the last stage.

        Returns:
            The model's result for the whole batch on the rank of the last stage, None on the others.

        Raises:
            SplitError: the batch does not divide into ``n_microbatches`` micro-batches of ``microbatch_size`` samples.
        """
        is_first, is_last = (any(getattr(stage, flag) for stage in self.stages) for flag in ("is_first", "is_last"))
        rank_args: tuple[Any, ...] = ()
        rank_kwargs: dict[str, Any] = {}
        if is_first:
            self._check_batch(self._all.inputs.bind(args, kwargs))
            args, kwargs = map_template(
                lambda leaf: leaf.contiguous() if isinstance(leaf, Tensor) else leaf, (args, kwargs)
            )
            rank_args, rank_kwargs = self._all.inputs.as_recorded(args, kwargs)
        if is_last:
            rank_kwargs = {**rank_kwargs, "target": target, "losses": losses}
        return self.schedule.step(*rank_args, **rank_kwargs)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of this rank by the norm over all stages. Every rank of the pipeline calls it.

        Returns:
            The norm over all parameters of the model, each counted once, as ``torch.nn.utils.clip_grad_norm_`` does.
        """
        norm: Tensor = self.stages[0].clip_grad_norm_(max_norm, norm_type)
        return norm

    def _check_batch(self, values: Mapping[int, Tensor]) -> None:
        size = next((values[index].shape[dim] for index, dim in self._batch_dims.items()), 0)
        fitting = size - size % self.n_microbatches
        if size != fitting:
            raise SplitError(
                f"a batch of {size} cannot be dealt into {self.n_microbatches} equal micro-batches; the engine needs "
                f"equal ones: pass {fitting} or {fitting + self.n_microbatches}"
            )
        if self.microbatch_size is not None and size != self.n_microbatches * self.microbatch_size:
            raise SplitError(
                f"a batch of {size} makes {self.n_microbatches} micro-batches of {size // self.n_microbatches}, but "
                f"the pipeline was made for {self.microbatch_size}; pass {self.n_microbatches * self.microbatch_size}, "
                f"or microbatch_size={size // self.n_microbatches} to schedule()"
            )

    def _merge(self, outputs: list[Any]) -> Any:
        """Return the result for the whole batch. The engine's own merge handles dimension 0 of plain containers only.

        A tensor without a batch dimension becomes the mean over the micro-batches if it is floating point, else the
        last one.
        """
        leaves = zip(*(leaves_of(output) for output in outputs), strict=True)
        crossings = iter(self._all.crossing[-1])
        merged = [
            _merged(parts, next(crossings, None)) if isinstance(parts[0], Tensor) else parts[0] for parts in leaves
        ]
        return with_leaves(outputs[0], merged)


def _merged(parts: Sequence[Tensor], crossing: Crossing | None) -> Tensor:
    dim = next((dim for dim, size in enumerate(crossing.sizes) if isinstance(size, BatchSize)), None) if crossing else 0
    if dim is not None:
        return torch.cat(list(parts), dim)
    return torch.stack(list(parts)).mean(0) if parts[0].dtype.is_floating_point else parts[-1]


def _batch_dims(stages: Stages) -> dict[int, int]:
    """Return a dict from the index of each input with a batch to its batch dimension."""
    leaves = [
        leaf for template in stages.inputs.arguments.values() for leaf in leaves_of(template) if isinstance(leaf, Slot)
    ]
    slots = dict.fromkeys(leaves)
    if stages.batch_size is None:
        return {slot.index: stages.batch_dim for slot in slots}
    dims: dict[int, int] = {}
    for slot, crossing in zip(slots, stages.crossing[0], strict=True):
        dims.update((slot.index, dim) for dim, size in enumerate(crossing.sizes) if isinstance(size, BatchSize))
    return dims


def _chunk_specs(stages: Stages, dims: Mapping[int, int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return how the engine deals arguments to micro-batches: chunks along the batch, or the same value for all."""
    from torch.distributed.pipelining.microbatch import TensorChunkSpec

    def spec(leaf: Any) -> Any:
        is_chunked = isinstance(leaf, Slot) and leaf.index in dims
        return TensorChunkSpec(dims[leaf.index]) if is_chunked else _torch.same_for_all()

    specs = {name: map_template(spec, template) for name, template in stages.inputs.arguments.items()}
    names = list(specs)
    n_positional = stages.inputs.n_positional
    return tuple(specs[name] for name in names[:n_positional]), {
        str(name): specs[name] for name in names[n_positional:]
    }


def _default_device() -> torch.device:
    """Return the accelerator of this process, else the CPU."""
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")


def _check_crossing(stages: Stages, name: str) -> None:
    """Raise ``SplitError`` if the engine cannot send a crossing tensor."""
    inner = stages.crossing[1:-1]
    if name.startswith("zb") and any(len(crossings) > 1 for crossings in inner):
        raise SplitError(
            f"{name!r} carries one tensor between two stages, but {max(map(len, inner))} cross; split with "
            "single_tensor_cuts=True"
        )
    for index, crossings in enumerate(inner, 1):
        if _version() < _CARRIES_INTEGERS and any(not crossing.dtype.is_floating_point for crossing in crossings):
            raise SplitError(
                f"an integer tensor crosses into stage {index}, which the engine of torch {torch.__version__} cannot "
                "carry in training; use torch >= 2.13, or choose other boundaries"
            )


def _owners(stages: Stages, rank: int, n_ranks: int, *, in_v: bool) -> list[SharedOwners]:
    """Return the parameters that a rank shares with other ranks."""
    from modelsummary.split.engine_stage import SharedOwners

    owners = []
    for shared in stages.shared_parameters:
        ranks = sorted({rank_of(stage, n_ranks, in_v=in_v) for stage in shared.stages})
        if rank in ranks and len(ranks) > 1:
            owners.append(SharedOwners(dict(zip(shared.stages, shared.names, strict=True)), ranks))
    return owners

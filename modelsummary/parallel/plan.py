"""``ParallelPlan``: how a model is spread over devices, as plain data that prints, writes code and applies itself."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from modelsummary.errors import InputError, ModelSummaryError
from modelsummary.keywords import choice_of
from modelsummary.operators.collective_calls import Collective
from modelsummary.parallel.plan_entries import LayerPlan, LocalAttribute, WholeCall
from modelsummary.tables import Printed, Report

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack

    from modelsummary.memory.estimate import MemoryEstimate
    from modelsummary.memory.step_options import StepOptions

__all__ = ["MESH_NAMES", "LayerPlan", "ParallelPlan", "with_estimate"]

# Dimensions of the device mesh, outermost first: neighbours in the last one talk most.
MESH_NAMES = ("pipeline", "data", "shard", "context", "expert", "tensor")


@dataclass(frozen=True, repr=False)
class ParallelPlan(Printed):
    """How a model is spread over devices; made by ``Statistics.parallel_plan``.

    Attributes:
        model_class: of the model.
        tensor, data, shard, pipeline, expert, context: number of ranks. Ranks of ``context`` have the same batch, and
            each a part of its tokens.
        dispatch: how tokens meet the experts of other ranks. ``"all_reduce"``: ranks of ``expert`` have the same ones.
            ``"all_to_all"``: they have different ones, and are ranks of ``shard``, or of ``data`` without shards; of
            neither in what a simulated step runs, whose gradients the simulation sums.
        layers: the modules that tensor and expert parallelism shard, in the order of their calls.
        attributes: of modules, with other values on one rank.
        ties: names of each parameter that has several.
        units: FQNs of the modules of each FSDP unit, in the order of their calls; the root is a further one.
        root_gathers: the root gathers parameters that are in none of the ``units``.
        last_unit: the one of the ``units`` that is called behind all blocks. The backward begins with it, so that it
            stays gathered between both, as the root does; empty if there is none.
        unit_calls: how often the recorded forward calls each of the ``units``, and gathers it. Units with 0 have no
            part in prefetching.
        gathered_with_root: FQN of a block, of a large module outside of the blocks, or of a child of a model without
            blocks, that is not a unit -> why.
        averaged: names of parameters without dimensions, which FSDP cannot shard: they are whole on each rank, and the
            optimizer averages their gradients.
        conditional: FQNs of units of which a rank may use other parameters than another one, because their forward
            reads values, as a loop over experts does. FSDP of torch 2.13 reduces zeros for parameters that a rank does
            not use; before, each rank must use all.
        frozen: names of parameters that took no gradient when the plan was made, and whose gradients its collectives
            therefore do not sum; empty without tensor parallelism, experts or stages.
        stored_communication: ``communication`` of a plan that was stored; None if it is still to be read off a trace.
        reshard_after_forward: gathered units are freed after their forward.
        precision: dtype of parameters in the forward and backward, as ``"bfloat16"``; None: as they are.
        parameter_dtypes: ``"trained"`` and ``"frozen"`` -> dtype to which such parameters are cast before they are
            sharded; empty where all have it, and for a plan that was made without a recipe.
        offload: parameters, gradients and optimizer state live on the CPU.
        checkpoint: FQNs of modules that run under activation checkpointing.
        kept: FQNs of some of these modules -> names of the results that they keep beside their input.
        tables: buffers with a row for each token, of which a rank of ``context`` has its own, and the dimension of the
            tokens.
        is_causal: every attention is causal, so that ranks of ``context`` have a piece from the beginning and one from
            the end of the sequence, which balances their work.
        tokens: the longest sequence that ranks of ``context`` share out: the recorded one. A longer one may take
            another way through the forward, as with a window of attention.
        token_arguments: names of the tensors that the model takes where ranks of ``context`` share out the sequence,
            and the dimension of the tokens where the forward needs the tokens of all ranks, as for shifted labels;
            else None.
        whole_calls: functions that get the tokens of all ranks of ``context``, such as positions that the forward
            counts.
        context_shards: the ranks of ``context`` and ``shard`` together shard the parameters; else ranks of ``context``
            hold the same ones.
        loss_parallel: logits stay sharded by the vocabulary; loss and backward run under ``loss_parallel`` of torch.
        boundaries: FQNs of the modules with which the second and each later stage begin.
        replicated: FQN of a ``Linear``, an attention, or of experts, that are whole on each rank -> why.
        params: elements of all parameters of the model.
        params_per_rank: elements that one rank holds after tensor and FSDP sharding; of the largest stage.
    """

    model_class: str
    tensor: int = 1
    data: int = 1
    shard: int = 1
    pipeline: int = 1
    layers: tuple[LayerPlan, ...] = ()
    attributes: tuple[LocalAttribute, ...] = ()
    ties: tuple[tuple[str, ...], ...] = ()
    units: tuple[tuple[str, ...], ...] = ()
    root_gathers: bool = False
    reshard_after_forward: bool = True
    precision: str | None = None
    offload: bool = False
    checkpoint: tuple[str, ...] = ()
    kept: dict[str, tuple[str, ...]] = field(default_factory=dict)
    loss_parallel: bool = False
    boundaries: tuple[str, ...] = ()
    replicated: dict[str, str] = field(default_factory=dict)
    params: int = 0
    params_per_rank: int = 0
    expert: int = 1
    unit_calls: tuple[int, ...] = ()
    gathered_with_root: dict[str, str] = field(default_factory=dict)
    last_unit: tuple[str, ...] = ()
    averaged: tuple[str, ...] = ()
    conditional: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    parameter_dtypes: dict[str, str] = field(default_factory=dict)
    context: int = 1
    tables: tuple[tuple[str, int], ...] = ()
    is_causal: bool = False
    context_shards: bool = False
    tokens: int = 0
    token_arguments: tuple[tuple[str, int | None], ...] = ()
    whole_calls: tuple[WholeCall, ...] = ()
    dispatch: str = "all_reduce"
    stored_communication: tuple[Collective, ...] | None = field(default=None, repr=False, compare=False)
    _live: Any = field(default=None, repr=False, compare=False)
    _stages: Any = field(default=None, repr=False, compare=False)
    _split: Any = field(default=None, repr=False, compare=False)
    _estimate: Any = field(default=None, repr=False, compare=False)
    _blocks: Any = field(default=None, repr=False, compare=False)  # FQN of each block -> FQN of the first equal one

    def __getstate__(self) -> dict[str, Any]:
        stored = None
        with suppress(ModelSummaryError):  # its step may not run on shapes
            stored = self.communication
        return {**self.__dict__, "stored_communication": stored, "_live": None, "_stages": None, "_split": None}

    @property
    def estimate(self) -> Any:
        """The ``cluster.StepEstimate`` of a plan that a simulated step or a search made; else None."""
        return self._estimate

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self._sizes.values())

    @property
    def sends_tokens(self) -> bool:
        """Whether ranks of ``expert`` send their tokens to each other's experts."""
        return self.expert > 1 and self.dispatch == "all_to_all"

    @property
    def _sizes(self) -> dict[str, int]:
        sizes = {name: getattr(self, name) for name in MESH_NAMES}
        if self.sends_tokens and self._joined:
            sizes[self._joined] //= self.expert
        return sizes

    @property
    def mesh_shape(self) -> dict[str, int]:
        """Name and size of each dimension of the mesh; what else FSDP does comes with a ``shard`` of one rank.

        Ranks of ``expert`` that send each other tokens are ranks of ``shard`` or ``data``: ``expert`` divides their
        number.
        """
        needs_fsdp = self.data > 1 or self._joined or self.precision is not None
        always = {"shard"} if needs_fsdp else set()
        always |= {"data"} if self._joined == "data" else set()
        kept = {name: size for name, size in self._sizes.items() if size > 1 or name in always}
        return kept or {"shard": 1}

    @property
    def _joined(self) -> str:
        """The dimension of FSDP's mesh that has the ranks of another one of the mesh, too; empty if there is none."""
        if self.sends_tokens:
            return "shard" if self.shard > 1 else "data" if self.data > 1 else ""
        return ("shard" if self.context_shards else "data") if self.context > 1 else ""

    @property
    def unit_dims(self) -> tuple[tuple[str, ...], ...]:
        """The dimensions of FSDP's mesh: the names of the dimensions of the mesh whose ranks each has."""
        other = "expert" if self.sends_tokens else "context"
        names = (name for name in ("data", "shard") if name in self.mesh_shape)
        return tuple((name, other) if name == self._joined else (name,) for name in names)

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """Return the mesh of the plan, over all ranks of the default process group.

        Args:
            device_type: ``"cuda"``, ``"cpu"``, ...

        Raises:
            InputError: the process group has another number of ranks.
        """
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0
        if ranks != self.world_size:
            have = f"the process group has {ranks}" if ranks else "no process group was initialised"
            raise InputError(f"the plan is for {self.world_size} ranks, but {have}; run it under torchrun with as many")
        return init_device_mesh(device_type, tuple(self.mesh_shape.values()), mesh_dim_names=tuple(self.mesh_shape))

    def apply(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        *,
        checkpoint: Any = None,
        init: Any = None,
    ) -> Any:
        """Shard a model in place, with torch's own functions; every rank calls it.

        Args:
            model: the plan's model, or another of the same class and sizes; with ``pipeline > 1`` the plan's model.
            mesh: as ``device_mesh`` returns it.
            checkpoint: for a model on meta: its whole state dict, or the path of one saved with ``torch.save``.
            init: for a model on meta: called with each module that has a parameter or buffer there, to fill it.

        Returns:
            The model; with ``pipeline > 1`` the ``PipelineStage`` of this rank.

        Raises:
            InputError: mesh or model do not fit the plan, or something on meta would have no values.
        """
        from modelsummary.parallel.applying import apply_plan

        return apply_plan(self, model, mesh, checkpoint=checkpoint, init=init)

    def context_parallel(
        self, model: nn.Module, mesh: DeviceMesh, *tensors: torch.Tensor
    ) -> AbstractContextManager[Sequence[torch.Tensor]]:
        """Return a context for forward, loss and backward with this rank's tokens of tensors; every rank enters it.

        In it, attention is the ring of ``torch.distributed.tensor.experimental.context_parallel``, over the tokens of
        all ranks of ``context``, tables of the model have the rows of this rank's tokens, and positions that the
        forward counts are their positions. ``F.cross_entropy`` returns a rank's share of the loss of all tokens: the
        mean over the ranks is the loss. Without context parallelism the tensors stay as they are, so a loop need not
        ask.

        Args:
            model: to which the plan was applied.
            mesh: to which it was applied.
            tensors: inputs and labels, with the tokens of the whole sequence along the second dimension, or the only
                one. The context gives copies of them, in their order.

        Raises:
            ValueError: on entry, the tensors have different numbers of tokens, more than the recorded ones, or the
                ranks do not divide them; in a forward, the model takes other tensors than the recorded ones, or makes a
                mask.

        >>> from modelsummary import Statistics
        >>> model = nn.Linear(8, 8)
        >>> plan = Statistics(model, (2, 4, 8)).parallel_plan()
        >>> with plan.context_parallel(model, None, torch.ones(2, 4, 8)) as (x,):
        ...     model(x).shape
        torch.Size([2, 4, 8])
        """
        from modelsummary.parallel.code import share_tokens

        return share_tokens(self, model, mesh, tensors)

    def clip_grad_norm_(
        self, model: nn.Module, mesh: DeviceMesh, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Clip the gradients of an applied model by the norm over all its parameters; every rank calls it.

        Needed for experts in lists, of which each rank has its own, and for stacked experts with ``tensor > 1``, whose
        mesh is another one; for other plans it is what ``torch.nn.utils.clip_grad_norm_`` computes.

        Args:
            model: to which the plan was applied, without stages; a stage has a ``clip_grad_norm_`` of its own.
            mesh: to which it was applied.
            max_norm: the largest norm afterwards.
            norm_type: p of the p-norm; ``inf`` for the largest element.

        Returns:
            The norm before, without dimensions.
        """
        from modelsummary.parallel.applying import clip_gradients

        return clip_gradients(self, model, mesh, max_norm, norm_type)

    def memory(
        self,
        rank: int = 0,
        *,
        microbatches: int | None = None,
        schedule: str = "1f1b",
        return_outputs: bool = False,
        **options: Unpack[StepOptions],
    ) -> MemoryEstimate:
        """Predict the memory of a training step on one rank, on this process alone and without data.

        With ``pipeline > 1`` it is the step of the rank's stage, in which the recorded batch is one micro-batch.
        Activations count all micro-batches in flight; inputs include the buffers of torch's engine for what
        a stage receives, one per micro-batch. The timeline shows each kind of action once, where most is held.

        Args:
            rank: of the whole world.
            microbatches: micro-batches in a step of a plan with stages. Default: as many as stages.
            schedule: order of their forwards and backwards: ``"1f1b"``, ``"gpipe"``, ``"zb"`` (ZB-H1), or with two
                stages per rank ``"interleaved1f1b"``, ``"zbv"`` or ``"dualpipev"``: the model is then cut into twice
                as many stages.
            return_outputs: the last stage keeps the results of all micro-batches and joins them, as torch's schedules
                do unless ``step(return_outputs=False)`` is called. Default: False.
            **options: as for ``Statistics.memory``, except ``checkpoint``, which belongs to the plan.

        Raises:
            InputError: an argument is unusable, or the plan was loaded without its model.
        """
        from modelsummary.parallel.memory import memory_of_rank

        return memory_of_rank(self, rank, microbatches, schedule, options, return_outputs=return_outputs)

    @cached_property
    def communication(self) -> tuple[Collective, ...]:
        """What a rank communicates in one step, read off the trace of the step, which runs on shapes when it is asked.

        Of many equal blocks in a row, or groups of blocks, five run, and what the third communicates counts for the
        others.

        It is the step of the recorded call without the optimizer, on the first rank of each dimension of the mesh; of a
        plan with stages, the step of all stages for one micro-batch.

        Raises:
            InputError, StepError: the step does not run on shapes, or the plan was stored without it.
        """
        if self.stored_communication is not None:
            return self.stored_communication
        from modelsummary.parallel.applied_rank import communication_of

        return communication_of(self)

    @property
    def collectives(self) -> dict[tuple[str, str], tuple[int, int]]:
        """``(phase, operation)`` -> how often it runs in a step on one rank, and the bytes of the whole tensors.

        The phase is ``"forward"``, ``"backward"``, or with ``loss_parallel`` also ``"loss"``: the cross-entropy of all
        logits that the model returns. Collectives of FSDP are ``unit_collectives``.
        """
        return self.collectives_over("tensor", "expert", "context")

    def collectives_over(self, *names: str) -> dict[tuple[str, str], tuple[int, int]]:
        """Return the sums of ``communication`` over ranks along these dimensions of the mesh.

        Raises:
            InputError: plans have no dimension of that name.
        """
        for name in names:
            choice_of(name, MESH_NAMES, "a dimension of the mesh")
        totals: dict[tuple[str, str], tuple[int, int]] = {}
        for collective in self.communication:
            if collective.group in names:
                key = collective.phase, collective.operation
                count, nbytes = totals.get(key, (0, 0))
                totals[key] = (count + collective.count, nbytes + collective.nbytes)
        return totals

    @property
    def called_units(self) -> tuple[tuple[str, ...], ...]:
        """The ``units`` that the recorded forward calls: each prefetches the following one."""
        return tuple(unit for unit, n_calls in zip(self.units, self.unit_calls, strict=False) if n_calls)

    @property
    def unit_collectives(self) -> dict[tuple[str, str], tuple[int, int]]:
        """``(phase, operation)`` -> how often the FSDP units cause it in a step, and the bytes of the whole tensors.

        A unit is gathered in the forward, and again in the backward if it was resharded; the root and the last unit are
        not. If the forward calls a unit several times, each call does so; a unit that was not resharded is gathered
        once in the forward, but the backward of each call frees it. Gradients are reduced and scattered, and with
        ``data > 1`` the shards are reduced over the copies.
        """
        return self.collectives_over("data", "shard")

    def to_code(self) -> str:
        """Return Python code that applies the plan with torch alone: a function ``parallelize(model, mesh)``.

        With context parallelism it has ``share_tokens(model, mesh, *tensors)``, too, which is ``context_parallel``.
        """
        from modelsummary.parallel.code import to_code

        return to_code(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain containers."""
        data = asdict(replace(self.without_model(), _estimate=None))
        data = {name: value for name, value in data.items() if not name.startswith("_")}
        return {**data, "mesh": self.mesh_shape}

    def to_json(self, indent: int | None = None) -> str:
        """Return the plan as JSON; ``ParallelPlan.from_json`` reads it."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> ParallelPlan:
        """Read a plan from what ``to_json`` wrote.

        Raises:
            InputError: the text is not a plan; the message names the field that is wrong.
        """
        from modelsummary.parallel.plan_json import plan_from_json

        return plan_from_json(ParallelPlan, MESH_NAMES, text)

    def without_model(self) -> ParallelPlan:
        """Return a copy without the model, which can be pickled."""
        plan = object.__new__(ParallelPlan)
        plan.__dict__.update(self.__getstate__())
        return plan

    def _report(self) -> Report:
        from modelsummary.parallel.plan_table import report

        return report(self)

    @property
    def dtype(self) -> torch.dtype | None:
        """``precision`` as a dtype."""
        return None if self.precision is None else getattr(torch, self.precision)


def with_estimate(plan: ParallelPlan, estimate: Any) -> ParallelPlan:
    """Return a copy of a plan with an estimate of its step, which keeps what was read of the step."""
    twin = object.__new__(ParallelPlan)
    twin.__dict__.update({**plan.__dict__, "_estimate": estimate})
    return twin

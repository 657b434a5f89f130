"""``Plan``: how training is spread over devices; ``Recipe``: what is trained with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from modelsummary.capture.step_plan import check_loss
from modelsummary.devices.attention_time import KERNELS
from modelsummary.errors import InputError, check_integers, is_number
from modelsummary.keywords import autocast_dtype, choice_of, dtype_named, takes_keywords
from modelsummary.memory.checkpointing import CheckpointPlan
from modelsummary.parallel.plan_arguments import (
    LEVELS,
    check_checkpoint,
    check_dispatch,
    check_sequence,
    checkpoint_by_name,
    level_of,
)
from modelsummary.split.schedule import SCHEDULES
from modelsummary.units import number_of

__all__ = ["Checkpoint", "Plan", "Recipe", "check_plan"]

Checkpoint = CheckpointPlan | Mapping[str, Sequence[str]] | Sequence[Any] | str | int | None
"""What a plan computes again, as a user writes it."""

_PER_DEVICE = {"gpipe": 1, "1f1b": 1, "zb": 1, "zbv": 2, "dualpipev": 2}
_DISPATCHERS = ("nccl", "deepep", "hybridep")
_STATES = {"sgd": 0, "sgd-momentum": 1, "adam": 2, "adamw": 2}
_DEFAULT: Any = object()  # a precision that nobody passed
_LEVELS = (None, *LEVELS)  # by the stage of ZeRO


@takes_keywords()
@dataclass(frozen=True)
class Recipe:
    """How a step is computed, apart from its parallelism: dtypes, optimizer, kernels, overlap.

    Attributes:
        precision: dtype of floating-point weights, activations and products; None: as the model has them. One of 8 bits
            is the dtype of the operands of linear layers' products alone: all else is in bfloat16, as with torchao's
            ``convert_to_float8_training``. Default: bfloat16; with ``autocast``, None.
        autocast: ``torch.float16`` or ``torch.bfloat16`` for ``torch.autocast`` around the forward and the loss, as in
            most training loops of DDP. Weights stay as the model has them, so there is no ``precision`` beside it.
            Default: None, no autocast.
        gradient_dtype: dtype in which gradients are summed and reduced; None: dtype of the parameters.
        optimizer: ``"adamw"``, ``"adam"``, ``"sgd-momentum"`` or ``"sgd"``.
        state_dtype: dtype of the optimizer's states.
        master_weights: the optimizer updates float32 copies of trained parameters that compute in fewer bits. Under
            FSDP these copies are the shards; what is gathered has ``precision``.
        kernels: ``"eager"``: one kernel per operator; ``"fused"``: as in Megatron: chains of element-wise operators are
            one kernel, the products that compute gradients of weights add them to their sums, the optimizer is one
            kernel; ``"compiled"``: norms, softmax and reductions join the chains, as by ``torch.compile``.
        attention: fused kernels of attention on an NVIDIA device: ``"flash1"``, ``"flash2"`` or ``"flash3"`` for the
            generations of FlashAttention, ``"cudnn"``, ``"efficient"`` for xFormers' memory-efficient ones, or None:
            what torch prefers there since version 2.10, which is cuDNN on Hopper and data center Blackwell, else
            FlashAttention-2. ``simulate`` and ``plan`` refuse kernels whose speed on the device is not known, such as
            cuDNN's on Ampere.
        loss: function from the model's result to a scalar; None: as for ``Statistics.memory``.
        host_seconds: seconds in which the host dispatches one operator; None: as fitted for eager mode, 28 us, and 8 us
            with GeForce cards. A part of the model takes no less than its operators. Unlike in ``estimate_latency``,
            views, calls of modules, nodes of autograd and parameters take no time of the host.
        overlap_gradients: gradients are reduced, and parameters of FSDP are gathered, while layers compute.
        share_messages: of a tensor that all ranks of tensor parallelism hold, each sends only its share to the next
            stage, where the shares are gathered, as in Megatron. Otherwise each sends it whole, as torch's stages do.
        dispatcher: what sends tokens to experts: ``"nccl"``, by its all-to-all, between kernels that copy rows;
            ``"deepep"``, whose kernels read and write tokens, so that only the ranks of the experts copy rows, which
            sorts them by expert; ``"hybridep"``, which sorts them, too.
        copies_per_token: copies of a token that are sent to experts, on average; None: one for each of its experts with
            NCCL. The others send one to each rank in a node, or to each node of several, that has one of them, which is
            the number expected if all experts are chosen alike.
        overlap_experts: tokens travel to experts and back while the layers of another micro-batch compute, whose
            backward runs beside this one's forward, as in DualPipe and with Megatron's
            ``--overlap-moe-expert-parallel-comm``.
        sequence: layers of tensor parallelism: ``"torch"``: the ones that ``parallel_plan`` applies, which gather the
            logits, and under ``Plan(sequence=True)`` keep what column-parallel layers gather; ``"megatron"``: the loss
            takes shards of the logits where it can, and column-parallel layers keep their share, and gather it again in
            the backward. Where tokens are sent to experts, they are Megatron's; where ranks sum what their experts
            return, they are torch's.
        overlap_tensor: gradients of the inputs of column-parallel layers are reduced while these layers compute the
            gradients of their weights.
        early_stop: recomputation of a block stops when it has what the backward reads, as with
            ``torch.utils.checkpoint.set_checkpoint_early_stop``; False: it repeats the whole block, as before torch 2.1
            and with ``use_reentrant=True``; None: False for ``kernels="fused"``, as in Megatron, else True.

    Raises:
        InputError: a value is unusable.

    >>> Recipe(optimizer="sgd").state_bytes, Recipe(autocast="fp16").precision
    (0, None)
    """

    precision: torch.dtype | None = _DEFAULT
    autocast: torch.dtype | None = None
    gradient_dtype: torch.dtype | None = torch.float32
    optimizer: str = "adamw"
    state_dtype: torch.dtype = torch.float32
    master_weights: bool = True
    kernels: str = "compiled"
    attention: str | None = None
    loss: Callable[[Any], Tensor] | None = None
    host_seconds: float | None = None
    overlap_gradients: bool = True
    dispatcher: str = "nccl"
    copies_per_token: float | None = None
    overlap_experts: bool = False
    overlap_tensor: bool = False
    share_messages: bool = False
    sequence: str = "torch"
    early_stop: bool | None = None

    def __post_init__(self) -> None:
        default = torch.bfloat16 if self.autocast is None else None
        object.__setattr__(self, "precision", default if self.precision is _DEFAULT else self.precision)
        for name in ("precision", "gradient_dtype", "state_dtype"):
            value, may_be_none = getattr(self, name), name != "state_dtype"
            if value is not None or not may_be_none:
                dtype = dtype_named(value, name, end=" or None" if may_be_none else "")
                object.__setattr__(self, name, dtype)
        if self.autocast is not None:
            object.__setattr__(self, "autocast", autocast_dtype(self.autocast))
            if self.precision is not None:
                raise InputError(
                    f"autocast={self.autocast} leaves weights as the model has them, and precision={self.precision} "
                    "casts them; pass one of the two"
                )
        named = {"optimizer": _STATES, "kernels": ("eager", "fused", "compiled"), "dispatcher": _DISPATCHERS}
        for name, choices in named.items():
            object.__setattr__(self, name, choice_of(getattr(self, name), choices, name))
        if self.sequence not in ("torch", "megatron"):
            raise InputError(f"sequence of a Recipe must be 'torch' or 'megatron', got {self.sequence!r:.80}")
        if self.attention not in (None, *KERNELS):
            raise InputError(
                f"attention must be None or one of {', '.join(map(repr, KERNELS))}, got {self.attention!r}"
            )
        for name in ("host_seconds", "copies_per_token"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and value >= 0):
                raise InputError(f"{name} must be a number >= 0 or None, got {value!r}")
        for name in ("master_weights", "overlap_gradients", "overlap_experts", "overlap_tensor", "share_messages"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.early_stop is not None and not isinstance(self.early_stop, bool):
            raise InputError(f"early_stop must be True, False or None, got {self.early_stop!r:.80}")
        check_loss(self.loss)

    @property
    def stored_dtype(self) -> torch.dtype | None:
        """The dtype of weights and activations in memory: ``precision``, or bfloat16 if products compute in 8 bits."""
        has_eight_bits = self.precision is not None and self.precision.itemsize == 1
        return torch.bfloat16 if has_eight_bits else self.precision

    def copies_of(self, n_experts: int, destinations: int) -> float:
        """Return how many copies of a token are sent to so many of its experts on ranks or nodes.

        >>> Recipe().copies_of(8, 4), round(Recipe(dispatcher="deepep").copies_of(8, 4), 2)
        (8, 3.6)
        """
        if self.copies_per_token is not None:
            return self.copies_per_token
        return n_experts if self.dispatcher == "nccl" else destinations * (1 - (1 - 1 / destinations) ** n_experts)

    @property
    def stops_early(self) -> bool:
        """Whether recomputation of a block stops when it has what the backward reads."""
        return self.kernels != "fused" if self.early_stop is None else self.early_stop

    @property
    def adds_in_products(self) -> bool:
        """Whether products add gradients of weights to their sums; otherwise a kernel of its own does."""
        return self.kernels == "fused"

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's states per parameter, without master weights."""
        return _STATES[self.optimizer] * self.state_dtype.itemsize


_OF_RECIPES = {
    name: f"simulate(..., recipe=Recipe({'precision' if name == 'dtype' else name}=...))"
    for name in ("dtype", *(option.name for option in fields(Recipe)))
}


@takes_keywords(_OF_RECIPES)
@dataclass(frozen=True)
class Plan:
    """One way to spread training over devices.

    ``Statistics.parallel_plan`` has the same arguments. Ranks are numbered so that neighbours communicate
    most: first along ``tensor``, then ``context``, ``shard``, ``data`` and ``pipeline``.

    Attributes:
        tensor: ranks over which layers are split.
        data: copies of the model, each on the ranks of all other dimensions.
        shard: ranks over which each copy is sharded (FSDP), next to each other; with ``data > 1``: HSDP.
        pipeline: ranks over which the blocks are split.
        expert: ranks over which the experts of mixtures are divided by their number; each runs its own experts.
        context: ranks over which the sequence is split; attention gathers keys and values. They shard as the ranks of
            ``shard`` do.
        sequence: between the split layers, each rank of ``tensor`` holds a share of the tokens.
        sharded: what the ranks of ``shard`` and ``context`` hold parts of: ``"optimizer"`` states, ``"gradients"`` as
            well, or ``"parameters"`` as well (1, 2 and 3, as the stages of ZeRO, are accepted). Default: parameters if
            ``shard`` is larger than 1, else nothing.
        checkpoint: what the backward computes again: None; ``"selective"``: attention from scores to context, where it
            is not one fused kernel; ``"every"``: all repeated blocks; an integer: that many blocks of each stage; a
            memory plan without ``offload``, its ``checkpoint``, or a list of names: these blocks, except the results
            that they keep; ``"operator"``: what costs each stage least and leaves room for all else on its device,
            operator by operator. ``simulate`` and ``plan`` return plans with the blocks in place of ``"operator"``.
        micro_batch: samples in a micro-batch.
        virtual_stages: stages per rank of the pipeline.
        schedule: order of forwards and backwards: ``"gpipe"``, ``"1f1b"``, ``"interleaved1f1b"``, ``"zb"`` (ZB-H1),
            ``"zbv"`` or ``"dualpipev"``.
        blocks: which blocks each stage has: ``"even"``: as many as the others, and fewer at the ends if they do not
            divide; ``"cost"``: so that the largest stage is the smallest possible, with what precedes and follows the
            blocks; or the number of blocks of each stage.
        dispatch: how tokens meet the experts of other ranks. ``"all_to_all"``: each token is sent to the ranks of its
            experts and back. The ranks of ``expert`` hold different tokens: they are consecutive ranks of ``tensor``,
            ``context``, ``shard`` and ``data``. ``"all_reduce"``, the default of ``parallel_plan``: the ranks of
            ``expert`` have the same tokens, and sum what their experts return. They are a dimension of their own,
            between ``tensor`` and ``context``.

    Raises:
        InputError: a value is out of range, or values do not fit together.

    >>> Plan(tensor=8, shard=2, pipeline=4, micro_batch=1).devices
    64
    """

    tensor: int = 1
    data: int = 1
    shard: int = 1
    pipeline: int = 1
    expert: int = 1
    context: int = field(default=1, kw_only=True)
    sequence: bool = field(default=False, kw_only=True)
    sharded: str | int | None = field(default=None, kw_only=True)
    checkpoint: Checkpoint = field(default=None, kw_only=True)
    micro_batch: int = field(default=1, kw_only=True)
    virtual_stages: int = field(default=1, kw_only=True)
    schedule: str = field(default="1f1b", kw_only=True)
    blocks: str | tuple[int, ...] = field(default="even", kw_only=True)
    dispatch: str = field(default="all_to_all", kw_only=True)

    def __post_init__(self) -> None:
        names = ("tensor", "data", "shard", "pipeline", "expert", "context", "micro_batch", "virtual_stages")
        check_integers(**{name: getattr(self, name) for name in names})
        check_sequence(self.sequence, self.tensor)
        check_dispatch(self.dispatch)
        object.__setattr__(self, "sharded", level_of(self.sharded, self.shard))
        object.__setattr__(self, "schedule", choice_of(self.schedule, SCHEDULES, "schedule"))
        check_checkpoint(self.checkpoint)
        checkpoint = checkpoint_by_name(self.checkpoint, "a Plan")
        if isinstance(checkpoint, dict):  # plans are keys
            object.__setattr__(self, "checkpoint", tuple(checkpoint.items()) or None)
        ranks = self.tensor * self.copies
        if ranks % self.dispatch_ranks:
            raise InputError(
                f"expert={self.expert} must divide tensor x context x shard x data = {ranks}; pass a divisor of it, or "
                "dispatch='all_reduce', with which these ranks are a dimension of their own"
            )
        if self.dispatch_ranks > 1 and self.tensor > 1 and not self.sequence:
            raise InputError(
                f"expert={self.expert} with tensor={self.tensor} needs sequence=True: ranks of expert parallelism have "
                "different tokens"
            )
        if self.dispatch_ranks > 1 and self.sharded and self.data > 1:
            raise InputError(
                f"data={self.data} copies of shards are not costed with expert={self.expert}; pass shard="
                f"{self.data * self.shard} and data=1, or expert=1"
            )
        self._check_blocks()
        needed = _PER_DEVICE.get(self.schedule)
        if needed is not None and self.virtual_stages != needed and max(self.pipeline, self.virtual_stages) > 1:
            raise InputError(f"schedule={self.schedule!r} has virtual_stages={needed}, got {self.virtual_stages}")

    def _check_blocks(self) -> None:
        if self.blocks in ("even", "cost"):
            return
        are_numbers = isinstance(self.blocks, (tuple, list)) and all(
            type(count) is int and count >= 0 for count in self.blocks
        )
        if not are_numbers or len(self.blocks) != self.stages:
            raise InputError(
                f"blocks must be 'even', 'cost' or the number of blocks of each of {self.stages} stages, got "
                f"{self.blocks!r:.80}"
            )
        object.__setattr__(self, "blocks", tuple(self.blocks))

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.split_ranks * self.copies * self.pipeline

    @property
    def dispatch_ranks(self) -> int:
        """The number of ranks that send tokens to each other's experts; 1 if ranks of ``expert`` have the same ones."""
        return self.expert if self.dispatch == "all_to_all" else 1

    @property
    def split_ranks(self) -> int:
        """The number of ranks with the same samples: of ``tensor``, and of ``expert`` if these sum results."""
        return self.tensor * self.expert // self.dispatch_ranks

    @property
    def batch_ranks(self) -> int:
        """The number of ranks with micro-batches of their own."""
        return self.data * self.shard

    @property
    def copies(self) -> int:
        """The number of ranks that without sharding hold the same parameters; for experts, see ``expert_copies``."""
        return self.data * self.shard * self.context

    @property
    def shards(self) -> int:
        """The number of ranks that together hold what is sharded."""
        return self.shard * self.context if self.sharded else 1

    @property
    def replicas(self) -> int:
        """The number of ranks that hold the same shard."""
        return self.copies // self.shards

    @property
    def expert_copies(self) -> int:
        """The number of ranks that hold the same experts, if tokens are sent to them."""
        return self.tensor * self.copies // self.dispatch_ranks

    @property
    def zero_stage(self) -> int:
        """The stage of ZeRO that ``sharded`` is: 0 for None, to 3 for parameters."""
        return _LEVELS.index(self.sharded)

    @property
    def rank_key(self) -> tuple[object, ...]:
        """What the work of one rank for a micro-batch depends on."""
        return self.tensor, self.sequence, self.context, self.expert, self.dispatch_ranks, self.micro_batch

    @property
    def stages_key(self) -> tuple[object, ...]:
        """What the stages of the pipeline depend on."""
        return *self.rank_key, self.pipeline, self.virtual_stages, self.checkpoint, self.blocks

    @property
    def shards_key(self) -> tuple[object, ...]:
        """What the share of a rank in what is sharded depends on."""
        return self.zero_stage, self.shards, self.expert_copies, self.is_fsdp

    @property
    def is_fsdp(self) -> bool:
        """Whether parameters are sharded, and several ranks hold the same ones."""
        return self.zero_stage == 3 and max(self.copies, self.expert_copies if self.dispatch_ranks > 1 else 1) > 1

    @property
    def stages(self) -> int:
        """The number of stages of the pipeline."""
        return self.pipeline * self.virtual_stages

    def microbatches(self, global_batch: int) -> int:
        """Return the micro-batches of one rank in a step.

        Raises:
            InputError: the batch is not an integer >= 1, or the ranks of ``data`` and ``shard`` cannot share it evenly.

        >>> Plan(data=4, micro_batch=2).microbatches(64)
        8
        """
        check_integers(global_batch=global_batch)
        count, rest = divmod(global_batch, self.batch_ranks * self.micro_batch)
        if rest or not count:
            raise InputError(
                f"global_batch={global_batch} cannot be dealt to data x shard = {self.batch_ranks} ranks in micro-"
                f"batches of {self.micro_batch}; pass a multiple of {self.batch_ranks * self.micro_batch}"
            )
        return count

    @property
    def checkpoint_in_short(self) -> Any:
        """The ``checkpoint``; of named blocks, how many there are, and how many results they keep."""
        if not isinstance(self.checkpoint, tuple):
            return self.checkpoint
        n_results = sum(len(names) for _, names in self.checkpoint)
        keeping = f" keeping {number_of(n_results, 'result')}" if n_results else ""
        return f"{number_of(len(self.checkpoint), 'block')}{keeping}"

    def describe(self) -> str:
        """Return the plan as one line: what is not at its default.

        >>> Plan(tensor=2, sequence=True, shard=4, sharded="optimizer").describe()
        'tensor 2, shard 4, sequence, sharded optimizer'
        """
        parts = []
        for name, default in {**_DEFAULTS, "sharded": level_of(None, self.shard)}.items():
            value = getattr(self, name)
            if value is True:
                parts.append(name)
            elif value != default:
                parts.append(f"{name} {self.checkpoint_in_short if name == 'checkpoint' else value}")
        return ", ".join(parts) or "one device"


def check_plan(plan: object) -> None:
    """Raise ``InputError`` for anything but a ``Plan``."""
    if not isinstance(plan, Plan):
        raise InputError(f"plan must be a Plan, such as Plan(tensor=8, shard=2), got {plan!r:.80}")


_DEFAULTS = {argument.name: argument.default for argument in fields(Plan)}

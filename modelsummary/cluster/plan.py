"""``Plan``: how training is spread over devices; ``Recipe``: what is trained with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from modelsummary.devices.attention_time import KERNELS
from modelsummary.errors import InputError, is_number
from modelsummary.split.schedule import check_schedule

__all__ = ["RECOMPUTE", "Plan", "Recipe"]

RECOMPUTE = ("none", "selective", "full")
_PER_DEVICE = {"gpipe": 1, "1f1b": 1, "zb": 1, "zbv": 2, "dualpipev": 2}
_STATES = {"sgd": 0, "sgd-momentum": 1, "adam": 2, "adamw": 2}


@dataclass(frozen=True)
class Plan:
    """One way to spread training over devices.

    Ranks are numbered so that neighbours communicate most: first along ``tensor``, then ``context``, then ``data``,
    then ``pipeline``. The ranks of ``expert`` are consecutive ones of the first three.

    Attributes:
        tensor: ranks over which layers are split.
        sequence_parallel: between the split layers, each of these ranks holds a share of the tokens.
        context: ranks over which the sequence is split; attention gathers keys and values.
        expert: ranks over which stacked experts are divided by their number. They are ranks of ``tensor``, ``context``
            and ``data`` that hold different tokens; each token is sent to the ranks of its experts and back.
        pipeline: ranks over which the blocks are split.
        virtual_stages: stages per rank of the pipeline.
        data: copies of the model.
        zero: what is sharded over the copies: 0: nothing, 1: optimizer states, 2: gradients as well, 3: parameters as
            well (FSDP).
        shard: ranks of ``data`` and ``context`` over which ``zero`` shards, next to each other; None: all of them. The
            groups of ranks that hold all shards together are replicas (with ``zero=3``: HSDP).
        micro_batch: samples in a micro-batch.
        recompute: what the backward computes again: ``"none"``; ``"selective"``: attention from scores to context,
            where it is not one fused kernel; ``"full"``: every block; an integer: that many blocks of each stage.
        schedule: order of forwards and backwards: ``"gpipe"``, ``"1f1b"``, ``"interleaved1f1b"``, ``"zb"`` (ZB-H1),
            ``"zbv"`` or ``"dualpipev"``.

    Raises:
        InputError: a value is out of range, or values do not fit together.

    >>> Plan(tensor=8, pipeline=4, data=2, micro_batch=1).devices
    64
    """

    tensor: int = 1
    sequence_parallel: bool = False
    context: int = 1
    expert: int = 1
    pipeline: int = 1
    virtual_stages: int = 1
    data: int = 1
    zero: int = 0
    micro_batch: int = 1
    recompute: str | int = "none"
    schedule: str = "1f1b"
    shard: int | None = None

    def __post_init__(self) -> None:
        for name in ("tensor", "context", "expert", "pipeline", "virtual_stages", "data", "micro_batch"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InputError(f"{name} must be an integer >= 1, got {value!r}")
        if not isinstance(self.sequence_parallel, bool):
            raise InputError(f"sequence_parallel must be True or False, got {self.sequence_parallel!r}")
        if type(self.zero) is not int or self.zero not in (0, 1, 2, 3):
            raise InputError(f"zero must be 0, 1, 2 or 3, got {self.zero!r}")
        check_schedule(self.schedule)
        is_count = type(self.recompute) is int and self.recompute >= 0
        if self.recompute not in RECOMPUTE and not is_count:
            options = ", ".join(map(repr, RECOMPUTE))
            raise InputError(f"recompute must be one of {options} or a number of blocks, got {self.recompute!r}")
        if self.sequence_parallel and self.tensor == 1:
            raise InputError("sequence_parallel=True needs tensor >= 2, over whose ranks the tokens are split")
        ranks = self.tensor * self.context * self.data
        if ranks % self.expert:
            raise InputError(
                f"expert={self.expert} must divide tensor x context x data = {ranks}; pass a divisor of it"
            )
        if self.expert > 1 and self.tensor > 1 and not self.sequence_parallel:
            raise InputError(
                f"expert={self.expert} with tensor={self.tensor} needs sequence_parallel=True: ranks of expert "
                "parallelism have different tokens"
            )
        self._check_shard()
        needed = _PER_DEVICE.get(self.schedule)
        if needed is not None and self.virtual_stages != needed and max(self.pipeline, self.virtual_stages) > 1:
            raise InputError(f"schedule={self.schedule!r} has virtual_stages={needed}, got {self.virtual_stages}")

    def _check_shard(self) -> None:
        if self.shard is None:
            return
        if type(self.shard) is not int or self.shard < 1:
            raise InputError(f"shard must be an integer >= 1 or None, got {self.shard!r}")
        if not self.zero:
            raise InputError(
                f"shard={self.shard} needs zero=1, 2 or 3, which says what is sharded; zero=0 shards nothing"
            )
        if self.copies % self.shard:
            raise InputError(f"shard={self.shard} must divide data x context = {self.copies}; pass a divisor of it")
        if self.expert > 1:
            raise InputError(f"shard={self.shard} is not costed with expert={self.expert}; pass shard=None or expert=1")

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def copies(self) -> int:
        """The number of ranks that hold the same parameters; for experts, see ``expert_copies``."""
        return self.data * self.context

    @property
    def shards(self) -> int:
        """The number of ranks over which ``zero`` shards what all copies hold."""
        return self.shard or self.copies

    @property
    def replicas(self) -> int:
        """The number of ranks that hold the same shard."""
        return self.copies // self.shards

    @property
    def expert_copies(self) -> int:
        """The number of ranks that hold the same experts, if these are divided."""
        return self.tensor * self.copies // self.expert

    @property
    def is_fsdp(self) -> bool:
        """Whether parameters are sharded: several ranks hold the same ones, and ``zero`` is 3."""
        return self.zero == 3 and max(self.copies, self.expert_copies if self.expert > 1 else 1) > 1

    @property
    def stages(self) -> int:
        """The number of stages of the pipeline."""
        return self.pipeline * self.virtual_stages

    def microbatches(self, global_batch: int) -> int:
        """Return the micro-batches of one copy in a step.

        Raises:
            InputError: the batch is not an integer >= 1, or the copies cannot share it evenly.

        >>> Plan(data=4, micro_batch=2).microbatches(64)
        8
        """
        if type(global_batch) is not int or global_batch < 1:
            raise InputError(f"global_batch must be an integer >= 1, got {global_batch!r}")
        count, rest = divmod(global_batch, self.data * self.micro_batch)
        if rest or not count:
            raise InputError(
                f"global_batch={global_batch} cannot be dealt to data={self.data} copies in micro-batches of "
                f"{self.micro_batch}; pass a multiple of {self.data * self.micro_batch}"
            )
        return count

    def describe(self) -> str:
        """Return the plan as one line: what is not at its default.

        >>> Plan(tensor=2, sequence_parallel=True, data=4).describe()
        'tensor 2, sequence_parallel, data 4'
        """
        parts = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value is True:
                parts.append(field.name)
            elif value != field.default:
                parts.append(f"{field.name} {value}")
        return ", ".join(parts) or "one device"


@dataclass(frozen=True)
class Recipe:
    """How a step is computed, apart from its parallelism: dtypes, optimizer, kernels, overlap.

    Attributes:
        dtype: dtype of floating-point weights, activations and products; None: as the model has them. One of 8 bits is
            the dtype of the operands of linear layers' products alone: all else is in bfloat16, as with torchao's
            ``convert_to_float8_training``.
        gradient_dtype: dtype in which gradients are summed and reduced; None: dtype of the parameters.
        optimizer: ``"adamw"``, ``"adam"``, ``"sgd-momentum"`` or ``"sgd"``.
        state_dtype: dtype of the optimizer's states.
        master_weights: the optimizer updates float32 copies of trained parameters that compute in fewer bits. Under
            FSDP these copies are the shards; what is gathered has ``dtype``.
        kernels: ``"eager"``: one kernel per operator; ``"fused"``: chains of element-wise operators are one kernel, as
            by the fuser of TorchScript that Megatron uses; ``"compiled"``: norms, softmax and reductions join them, as
            by ``torch.compile``.
        attention: fused kernels of attention on an NVIDIA device: ``"flash"`` for FlashAttention-2, ``"cudnn"``, or
            None: what torch prefers there since version 2.10, which is cuDNN on Hopper and data center Blackwell.
            The speed of cuDNN's on Ampere is not known, so ``simulate`` and ``plan`` refuse it there.
        loss: function from the model's result to a scalar; None: as for ``Statistics.memory``.
        host_seconds: seconds in which the host dispatches one operator; None: as fitted for eager mode. A part of the
            model takes no less than its operators.
        overlap_gradients: gradients are reduced, and parameters of FSDP are gathered, while layers compute.
        share_messages: of a tensor that all ranks of tensor parallelism hold, each sends only its share to the next
            stage, where the shares are gathered, as in Megatron. Otherwise each sends it whole, as torch's stages do.
        copies_per_token: copies of a token that leave its rank for experts, on average; None: one for each of its
            experts, as NCCL's all-to-all sends them. DeepEP sends one to each node, and none for a node that has no
            expert of the token.
        overlap_experts: tokens travel to experts and back while the layers of another micro-batch compute, whose
            backward runs beside this one's forward, as in DualPipe and with Megatron's
            ``--overlap-moe-expert-parallel-comm``.
        overlap_tensor: gradients of the inputs of column-parallel layers are reduced while these layers compute the
            gradients of their weights.

    Raises:
        InputError: a value is unusable.

    >>> Recipe(optimizer="sgd").state_bytes
    0
    """

    dtype: torch.dtype | None = torch.bfloat16
    gradient_dtype: torch.dtype | None = torch.float32
    optimizer: str = "adamw"
    state_dtype: torch.dtype = torch.float32
    master_weights: bool = True
    kernels: str = "compiled"
    attention: str | None = None
    loss: Callable[[Any], Tensor] | None = None
    host_seconds: float | None = None
    overlap_gradients: bool = True
    copies_per_token: float | None = None
    overlap_experts: bool = False
    overlap_tensor: bool = False
    share_messages: bool = False

    def __post_init__(self) -> None:
        for name in ("dtype", "gradient_dtype", "state_dtype"):
            value, may_be_none = getattr(self, name), name != "state_dtype"
            is_floating = isinstance(value, torch.dtype) and value.is_floating_point
            if not is_floating and not (value is None and may_be_none):
                options = "a floating point torch.dtype" + (" or None" if may_be_none else "")
                raise InputError(f"{name} must be {options}, got {value!r}")
        if not isinstance(self.optimizer, str) or self.optimizer not in _STATES:
            raise InputError(f"optimizer must be one of {', '.join(map(repr, _STATES))}, got {self.optimizer!r}")
        if self.kernels not in ("eager", "fused", "compiled"):
            raise InputError(f"kernels must be 'eager', 'fused' or 'compiled', got {self.kernels!r}")
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
        if self.loss is not None and not callable(self.loss):
            raise InputError(f"loss must be a function or None, got {self.loss!r:.80}")

    @property
    def stored_dtype(self) -> torch.dtype | None:
        """The dtype of weights and activations in memory: ``dtype``, or bfloat16 if products compute in 8 bits."""
        return torch.bfloat16 if self.dtype is not None and self.dtype.itemsize == 1 else self.dtype

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's states per parameter, without master weights."""
        return _STATES[self.optimizer] * self.state_dtype.itemsize

"""What one step does, and how a user says it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from modelsummary.errors import InputError, close_to
from modelsummary.layer_info import LayerInfo
from modelsummary.memory.checkpointing import blocks_of, square_root

__all__ = ["OPTIMIZERS", "OptimizerLike", "StepOptions", "StepPlan", "step_plan"]

OptimizerLike = str | type[torch.optim.Optimizer] | torch.optim.Optimizer
MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "sgd-momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
}


class StepOptions(TypedDict, total=False):
    """The options of a step, by keyword; each may be left out.

    Attributes:
        optimizer: ``"sgd"``, ``"sgd-momentum"``, ``"adam"``, ``"adamw"``, ``"adafactor"``, a class of ``torch.optim``,
            or an instance, whose settings are taken; None: no step.
        dtype: floating point dtype of parameters, buffers and inputs; None: as they are.
        device: whose kernels to choose; None: the model's, the CPU for a model on meta.
        loss: of the model's result, a scalar; None: its ``loss`` if it has one, else the sum of its tensors.
        checkpoint: FQNs of modules to run under activation checkpointing, or segments of an ``nn.Sequential``, as
            ``apply_checkpoint`` takes them; ``"every"``: all repeated blocks; ``"sqrt"``: of n repeated blocks in an
            ``nn.Sequential`` about sqrt(n) segments.
        autocast: floating point dtype of ``torch.autocast`` around the forward and the loss; None: none.
        accumulates: gradients of earlier micro-batches are there already. Default: False.
        block_bytes: the allocator rounds sizes up to a multiple of this; None: 512 on CUDA, else 1.
    """

    optimizer: OptimizerLike | None
    dtype: torch.dtype | None
    device: torch.device | str | None
    loss: Callable[[Any], Tensor] | None
    checkpoint: Sequence[str] | str | None
    autocast: torch.dtype | None
    accumulates: bool
    block_bytes: int | None


@dataclass(frozen=True)
class StepPlan:
    """What one step does.

    Attributes:
        train: forward, backward and optimizer step; else a forward without gradients.
        make_optimizer: from the parameters that are trained; None: no step.
        device, dtype, loss, autocast, accumulates, block_bytes: see ``StepOptions``.
        checkpoint: modules that run under activation checkpointing, as ``apply_checkpoint`` takes them.
    """

    train: bool = True
    make_optimizer: MakeOptimizer | None = None
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    loss: Callable[[Any], Tensor] | None = None
    checkpoint: tuple[str, ...] = ()
    autocast: torch.dtype | None = None
    accumulates: bool = False
    block_bytes: int | None = None


def step_plan(mode: str, options: StepOptions, root: LayerInfo | None = None) -> StepPlan:
    """Return the plan of a step as a user described it.

    Args:
        mode: ``"train"``, or ``"inference"``: a forward without gradients.
        root: of the model, whose repeated blocks ``checkpoint="every"`` and ``"sqrt"`` mean; None: there are none.

    Raises:
        InputError: an option is unknown, or its value is unusable.
    """
    if mode not in ("train", "inference"):
        raise InputError(f"mode={mode!r}; expected 'train' or 'inference'")
    _check(options)
    checkpoint = options.get("checkpoint")
    if checkpoint in ("every", "sqrt"):
        blocks = blocks_of(root) if root is not None else []
        checkpoint = [row.fqn for row in blocks] if checkpoint == "every" else square_root(blocks)
    if isinstance(checkpoint, str):
        raise InputError(f"checkpoint={checkpoint!r} is one name; pass a list: [{checkpoint!r}], 'every', or 'sqrt'")
    if checkpoint is not None and not isinstance(checkpoint, (list, tuple)):
        raise InputError(f"checkpoint={checkpoint!r}; expected a list of names, 'every', 'sqrt', or None")
    device = options.get("device")
    try:
        place = None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"device={device!r} is no device: {str(error).splitlines()[0]}") from None
    return StepPlan(
        train=mode == "train",
        make_optimizer=_optimizer(options.get("optimizer")) if mode == "train" else None,
        device=place,
        dtype=options.get("dtype"),
        loss=options.get("loss"),
        checkpoint=tuple(checkpoint or ()),
        autocast=options.get("autocast"),
        accumulates=options.get("accumulates", False),
        block_bytes=options.get("block_bytes"),
    )


def _check(options: Mapping[str, Any]) -> None:
    known = StepOptions.__annotations__
    for name in options:
        if name not in known:
            raise InputError(f"{name!r} is no option of a step{close_to(name, known)}; known: {', '.join(known)}")
    for name in ("dtype", "autocast"):
        kind = options.get(name)
        if kind is not None and not (isinstance(kind, torch.dtype) and kind.is_floating_point):
            raise InputError(f"{name}={kind!r}; expected a floating point torch.dtype")
    block = options.get("block_bytes")
    if block is not None and (type(block) is not int or block < 1):
        raise InputError(f"block_bytes={block!r}; expected an integer >= 1")


def _optimizer(optimizer: OptimizerLike | None) -> MakeOptimizer | None:
    if optimizer is None:
        return None
    if isinstance(optimizer, torch.optim.Optimizer):
        return partial(type(optimizer), **optimizer.defaults)
    if isinstance(optimizer, str) and optimizer in OPTIMIZERS:
        return OPTIMIZERS[optimizer]
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        return optimizer
    raise InputError(
        f"optimizer={optimizer!r:.80}; expected one of {', '.join(map(repr, OPTIMIZERS))}, a class of torch.optim, or "
        "an instance"
    )

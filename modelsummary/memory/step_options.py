"""The options of a step, and the plan that is made of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypedDict

import torch
from torch import Tensor

from modelsummary.capture.checkpoints import checked_numbers, kept_results
from modelsummary.capture.devices import available_device, named_device
from modelsummary.capture.step_plan import MakeOptimizer, StepPlan, check_loss
from modelsummary.devices.device_spec import DeviceSpec
from modelsummary.errors import InputError, check_integers
from modelsummary.keywords import autocast_dtype, check_names, choice_of, dtype_named
from modelsummary.layer_info import LayerInfo
from modelsummary.memory.checkpointing import blocks_of, square_root
from modelsummary.memory.optimizers import PART, AdamW8bit, JoinedOptimizers, Lion, MuonWithAdamW

__all__ = ["OPTIMIZERS", "OptimizerLike", "StepOptions", "step_plan"]

OptimizerLike = (
    str | type[torch.optim.Optimizer] | torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | MakeOptimizer
)
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "sgd-momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
    "lion": Lion,
    "adamw-8bit": AdamW8bit,
    **({"muon": MuonWithAdamW} if hasattr(torch.optim, "Muon") else {}),  # since torch 2.9
}


class StepOptions(TypedDict, total=False):
    """The keyword options of a step, all of them optional.

    Attributes:
        optimizer: ``"sgd"``, ``"sgd-momentum"``, ``"adam"``, ``"adamw"``, ``"adafactor"``, ``"lion"``,
            ``"adamw-8bit"`` (as bitsandbytes' ``AdamW8bit``), ``"muon"`` (all matrices, embeddings too; AdamW for
            the rest), a class of any library, a function that returns the optimizer of parameters, or an instance,
            whose class, groups and settings are used, and which steps the parameters that it holds, or a list of
            instances, which step one after the other. Default: None, no optimizer step.
        dtype: floating point dtype of parameters, buffers and inputs. Default: None, their own.
        device: device whose kernels to choose; an accelerator goes by its name, too, such as ``"A100"``. Default:
            None, the model's device, or the CPU for a model on meta.
        loss: function from the model's result to a scalar. Default: None, the result's ``loss`` if it has one, else the
            sum of its tensors; a ``loss`` of several elements is added up.
        checkpoint: FQNs of modules to run under activation checkpointing, or segments of an ``nn.Sequential``, as
            ``apply_checkpoint`` takes them, also with the results that each keeps; ``"every"``: all repeated blocks;
            ``"sqrt"``: about sqrt(n) segments of n repeated blocks in an ``nn.Sequential``. Default: None, no
            checkpointing.
        offload: name of a module -> numbers of the saved tensors that move to the host until the backward, as
            ``apply_checkpoint`` takes them. For ``memory_plan`` and ``memory_curve``, which choose them: True, or the
            bytes per second of the link to the host, in one direction. Default: None, all stay on the device.
        autocast: ``torch.float16`` or ``torch.bfloat16`` for ``torch.autocast`` around forward and loss. Default: None,
            no autocast.
        accumulates: gradients of earlier micro-batches already exist. Default: False.
        block_bytes: the allocator rounds sizes up to a multiple of this. Default: None, 512 on CUDA, else 1.
        workspaces: count what operators allocate for themselves while they run, as far as ``calibrate`` measured it.
            Default: True.

    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> options: StepOptions = {"optimizer": "adamw", "dtype": torch.bfloat16}
    >>> memory = Statistics(nn.Linear(4, 8), (16, 4)).memory(**options)
    >>> memory.optimizer, memory.params
    ('AdamW', 80)
    """

    optimizer: OptimizerLike | None
    dtype: torch.dtype | None
    device: DeviceSpec | torch.device | str | None
    loss: Callable[[Any], Tensor] | None
    checkpoint: Mapping[str, Sequence[str]] | Sequence[str] | str | None
    offload: Mapping[str, Sequence[int]] | float | None
    autocast: torch.dtype | None
    accumulates: bool
    block_bytes: int | None
    workspaces: bool


def step_plan(mode: str, options: StepOptions, root: LayerInfo | None = None) -> StepPlan:
    """Return the plan of a step with the user's options.

    Args:
        mode: ``"train"``; ``"compiled"``: a training step of the model that ``torch.compile`` returns; or
            ``"inference"``: a forward without gradients.
        options: the user's options, see ``StepOptions``.
        root: root of the tree, for the repeated blocks of ``checkpoint="every"`` and ``"sqrt"``; None: there are none.

    Raises:
        InputError: an option is unknown, or its value is unusable.
    """
    if mode not in ("train", "compiled", "inference"):
        hint = f"; an optimizer goes by name: optimizer={mode!r}" if _is_optimizer(mode) else ""
        raise InputError(f"mode must be 'train', 'compiled' or 'inference', got {mode!r:.80}{hint}")
    options = _checked(options)
    checkpoint = options.get("checkpoint")
    if checkpoint in ("every", "sqrt"):
        blocks = blocks_of(root) if root is not None else []
        checkpoint = [row.fqn for row in blocks] if checkpoint == "every" else square_root(blocks)
    if isinstance(checkpoint, str):
        raise InputError(f"checkpoint must be a list of names, 'every' or 'sqrt', got one name; pass [{checkpoint!r}]")
    if checkpoint is not None and not isinstance(checkpoint, (list, tuple, Mapping)):
        raise InputError(f"checkpoint must be a list of names, 'every', 'sqrt' or None, got {checkpoint!r}")
    of_training = [name for name in ("optimizer", "accumulates") if options.get(name)]
    if mode == "inference" and of_training:
        raise InputError(f"an inference has no {of_training[0]}; leave out {of_training[0]}=, or pass mode='train'")
    offload = options.get("offload") or {}
    if offload and mode != "train":
        step = "a compiled step" if mode == "compiled" else "an inference"
        raise InputError(f"{step} moves no saved tensors to the host; leave out offload=, or pass mode='train'")
    dtype, device, optimizer = options.get("dtype"), options.get("device"), options.get("optimizer")
    if mode != "inference" and dtype is not None and dtype.itemsize == 1:
        raise InputError(
            f"dtype={dtype}: no step trains in 8 bits alone, as torch adds no tensors of 8 bits; pass torch.bfloat16, "
            f"cost 8-bit products by simulate(..., recipe=Recipe(precision={dtype})), or run the forward alone"
        )
    return StepPlan(
        train=mode != "inference",
        make_optimizer=_optimizer(optimizer) if mode != "inference" else None,
        optimized_ids=_groups_of(optimizer),
        device=None if device is None else _target(device),
        dtype=dtype,
        loss=options.get("loss"),
        checkpoint=tuple(kept_results(checkpoint or ()).items()),
        offload=tuple((fqn, tuple(sorted(numbers))) for fqn, numbers in checked_numbers(offload).items()),
        autocast=options.get("autocast"),
        accumulates=options.get("accumulates", False),
        block_bytes=options.get("block_bytes"),
        workspaces=options.get("workspaces", True),
        compiled=mode == "compiled",
    )


def _target(device: DeviceSpec | torch.device | str) -> torch.device:
    """Return the device whose kernels to choose: one of this machine, or a CUDA device, whose kernels are known.

    An accelerator that is named, such as ``"A100"``, is a CUDA device.
    """
    if isinstance(device, DeviceSpec):
        return torch.device("cuda")
    try:
        named = named_device(device)
    except InputError as no_device:
        if not isinstance(device, str):
            raise
        try:
            DeviceSpec(device)
        except InputError as no_accelerator:
            raise InputError(f"{no_device}, or an accelerator: {no_accelerator}") from None
        return torch.device("cuda")
    return named if named.type == "cuda" else available_device(named)


def _checked(options: StepOptions) -> StepOptions:
    """Return the options with dtypes for their names. Raise ``InputError`` for an unknown or unusable one."""
    check_names("a step", options, StepOptions.__annotations__)
    options = {**options}
    if options.get("dtype") is not None:
        options["dtype"] = dtype_named(options["dtype"], "dtype")
    if options.get("autocast") is not None:
        options["autocast"] = autocast_dtype(options["autocast"])
    for name in ("accumulates", "workspaces"):
        if not isinstance(options.get(name, False), bool):
            raise InputError(f"{name} must be True or False, got {options[name]!r:.80}")
    check_loss(options.get("loss"))
    block = options.get("block_bytes")
    if block is not None:
        check_integers(block_bytes=block)
    return options


def _accepted(kind: type[torch.optim.Optimizer], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an optimizer that its class takes; 8-bit optimizers add others of their own."""
    parameters = inspect.signature(kind).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return dict(settings)
    return {parameter.name: settings[parameter.name] for parameter in parameters if parameter.name in settings}


def _is_optimizer(value: Any) -> bool:
    if isinstance(value, type):
        return issubclass(value, torch.optim.Optimizer)
    return isinstance(value, torch.optim.Optimizer) or (isinstance(value, str) and value.lower() in OPTIMIZERS)


def _are_optimizers(value: Any) -> bool:
    """Return True for a list of instances of optimizers."""
    return (
        isinstance(value, (list, tuple))
        and bool(value)
        and all(isinstance(member, torch.optim.Optimizer) for member in value)
    )


def _groups_of(optimizer: Any) -> tuple[tuple[list[int], Mapping[str, Any]], ...]:
    """Return the groups of an optimizer, or of several: the ids of the parameters, and the settings."""
    if _are_optimizers(optimizer):
        return tuple(
            (ids, {**settings, PART: number})
            for number, part in enumerate(optimizer)
            for ids, settings in _groups_of(part)
        )
    groups = []
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else ():
        settings = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        groups.append((list(map(id, group["params"])), settings))
    return tuple(groups)


def _optimizer(optimizer: OptimizerLike | None) -> MakeOptimizer | None:
    if optimizer is None:
        return None
    if isinstance(optimizer, torch.optim.Optimizer):
        return partial(type(optimizer), **_accepted(type(optimizer), optimizer.defaults))
    if _are_optimizers(optimizer):
        return partial(JoinedOptimizers, makers=[_optimizer(part) for part in optimizer])  # type: ignore[union-attr, misc]
    if _is_optimizer(optimizer) if isinstance(optimizer, type) else callable(optimizer):
        return optimizer  # type: ignore[return-value]
    others = ", a function from parameters to an optimizer, or an optimizer of any library, as class, instance or list"
    return OPTIMIZERS[choice_of(optimizer, OPTIMIZERS, "optimizer", others)]

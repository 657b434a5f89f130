"""Fold equal blocks: only the first of them runs, and the others return what they take.

A model of any depth then takes the time of its distinct blocks.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modelsummary._torch import tree_leaves
from modelsummary.capture.containers import map_leaves, tensors_of
from modelsummary.equality import kinds_of, patterns
from modelsummary.errors import InputError
from modelsummary.layer_info import LayerInfo, Sizes
from modelsummary.parallel.applying import check_unsharded
from modelsummary.parallel.rank_model import copied

__all__ = ["fold", "kinds_of_blocks", "pass_through", "repeats"]

_FIRST, _LAST = 3, 2  # blocks, or groups, of a run of equal ones that run


def kinds_of_blocks(root: LayerInfo, rows: Sequence[LayerInfo]) -> dict[str, str]:
    """Return the block that runs for each block: the first one that looks the same, and is passed by the same gradient.

    Blocks that follow no trained parameter take no gradient. Leaf layers are not folded: tensor parallelism splits
    neighbours differently. Blocks that return no tensor of a size that they take, as in a U-Net, are not folded either.
    """
    kinds = kinds_of(root)
    kind_of: dict[str, str] = {}
    first: dict[Any, str] = {}
    for row in rows:
        is_folded = not row.is_leaf and any(shape in _shapes(row.input_size) for shape in _shapes(row.output_size))
        looks = (_trains_before(root, row), kinds[id(row)], _settings(row.module)) if is_folded else row.fqn
        kind_of[row.fqn] = first.setdefault(looks, row.fqn)
    return kind_of


def _shapes(sizes: Sizes) -> list[list[int]]:
    leaves = tree_leaves(sizes, is_leaf=lambda value: isinstance(value, list))
    return [leaf for leaf in leaves if isinstance(leaf, list)]


def repeats(kinds: Sequence[Hashable]) -> dict[int, int]:
    """Return position of a block that need not run for what ranks communicate -> position of the one that runs for it.

    Of equal neighbours, or of equal groups of neighbours that alternate, the first three and the last two run: FSDP
    gathers parameters of the next block, and of the one before the last, in the calls of a block. The third stands for
    those between them.

    Args:
        kinds: of the blocks, in the order of their calls.

    >>> repeats("aaaaaaab"), repeats("abababababab")
    ({3: 2, 4: 2}, {6: 4, 7: 5})
    """
    same: dict[int, int] = {}
    numbers: dict[Hashable, int] = {}
    for begin, period, times in patterns([numbers.setdefault(kind, len(numbers)) for kind in kinds]):
        third = begin + (_FIRST - 1) * period
        between = range(third + period, begin + (times - _LAST) * period)
        same |= {position: third + (position - third) % period for position in between}
    return same


def _trains_before(root: LayerInfo, block: LayerInfo) -> bool:
    for row in root.walk():
        if row is block:
            return False
        if row.self_trainable_params and _is_used(row):
            return True
    return False


def _is_used(row: LayerInfo) -> bool:
    """Return True for a module that runs, or that only holds parameters of one that runs, as a ``ParameterDict``."""
    return row.executed or (not row.children and row.parent_info is not None and row.parent_info.executed)


def _settings(module: nn.Module | None) -> tuple[Any, ...]:
    """Return what rows do not show: arguments of layers, names and dtypes of weights, and which are trained."""
    parameters = () if module is None else module.named_parameters()
    return repr(module), tuple((name, parameter.dtype, parameter.requires_grad) for name, parameter in parameters)


def fold(model: nn.Module, same: Mapping[str, str]) -> nn.Module:
    """Return a copy of a model, with parameters on meta, in which blocks return their input.

    Args:
        model: the model; the copy shares its buffers.
        same: FQN of a block that does not run -> FQN of the equal block that runs before it.

    Raises:
        InputError: the model cannot be copied: it is sharded already, has weights in TorchScript, or refuses.
    """
    _check_weights(model)
    # quantised weights, which have a class of their own, are no more than tensors of their shape here
    twin = copied(model, lambda parameter: torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
    pass_through(twin, same)
    return twin


def _check_weights(model: nn.Module) -> None:
    """Raise ``InputError`` for parameters that are sharded, or that TorchScript copies with their values."""
    check_unsharded(model)
    for fqn, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise InputError(
                f"{fqn or 'the model'} is TorchScript, whose parameters cannot be shared out by a plan; pass the model "
                "before torch.jit.script or torch.jit.trace"
            )


def _weak(value: Any) -> Any:
    return weakref.ref(value) if isinstance(value, Tensor) else value


def pass_through(twin: nn.Module, same: Mapping[str, str]) -> None:
    """Let blocks of a copied model return what they take; they hold no parameters then.

    Args:
        twin: the copy.
        same: as for ``fold``.
    """
    kept: dict[str, list[Any]] = {fqn: [] for fqn in same.values()}
    for fqn, notes in kept.items():
        block = twin.get_submodule(fqn)
        block.register_forward_hook(_keep(notes), with_kwargs=True)
    for fqn, first in same.items():
        block = twin.get_submodule(fqn)
        block._modules.clear()  # what does not run need not be copied again
        block._parameters.clear()
        block.forward = _PassThrough(kept[first])


def _keep(notes: list[Any]) -> Any:
    def hook(_module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        positions = _hidden_positions(args, kwargs, out)
        notes[:] = [positions, map_leaves(_weak, out)]

    return hook


def _hidden_positions(args: Any, kwargs: Any, out: Any) -> tuple[int, int]:
    """Return the positions of the tensor that a block passes on, among what it takes and among what it returns."""
    inputs, results = list(tensors_of((args, kwargs))), list(tensors_of(out))
    for output_position, result in enumerate(results):
        for input_position, tensor in enumerate(inputs):
            if tensor.shape == result.shape and tensor.dtype == result.dtype and tensor.dtype.is_floating_point:
                return input_position, output_position
    raise InputError("equal blocks must return a tensor of the size that they take")


class _PassThrough:
    """The forward of a folded block: it returns what it takes, in the form in which the block that ran returned."""

    def __init__(self, notes: list[Any]) -> None:
        self._notes = notes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        (input_position, output_position), form = self._notes
        is_first = not input_position and bool(args) and isinstance(args[0], Tensor)
        hidden = args[0] if is_first else list(tensors_of((args, kwargs)))[input_position]
        position = -1

        def put(reference: Any) -> Any:
            nonlocal position
            if not isinstance(reference, weakref.ref):
                return reference
            position += 1
            return hidden if position == output_position else reference()

        return map_leaves(put, form)

    def __deepcopy__(self, memo: Any) -> _PassThrough:
        return self

"""Run stacked experts as each rank has them, one rank after the other, and compare with the whole module.

Where the forward runs on shapes, the kinds of results are checked. Where it needs values, results and gradients are
compared as well.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from modelsummary._torch import FakeTensorMode, tree_leaves
from modelsummary.capture.containers import map_tensors, tensors_of
from modelsummary.capture.devices import device_of
from modelsummary.capture.live import LiveModel
from modelsummary.capture.modules import modules_of
from modelsummary.capture.run import running
from modelsummary.capture.templates import map_template
from modelsummary.errors import InputError, in_short
from modelsummary.parallel.expert_shards import ExpertShards
from modelsummary.parallel.experts import StackedExperts
from modelsummary.parallel.placements import Blocked
from modelsummary.parallel.rank_model import copied
from modelsummary.parallel.record_calls import Calls
from modelsummary.record.events import Event, Value, values_in

__all__ = ["are_close", "arguments_of", "runs_divided", "twin_of"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_CLOSE = 1e-3  # of the largest element: sums in another order, in single precision


def arguments_of(live: LiveModel, fqns: Sequence[str]) -> dict[str, list[Arguments]]:
    """Return copies of what modules are called with, where the forward needs values; else nothing."""
    arguments: dict[str, list[Arguments]] = {}
    if live.execution != "real" or not fqns:
        return arguments

    def note(fqn: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        arguments.setdefault(fqn, []).append(
            map_tensors(lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), (args, kwargs))
        )

    run = running(modules_of(live.model), live.call, on_shapes=False, grad=True)
    with run as (_, args, kwargs), ExitStack() as hooks:
        for fqn in fqns:
            module = live.model.get_submodule(fqn)
            hooks.enter_context(module.register_forward_pre_hook(partial(note, fqn), with_kwargs=True))
        live.model(*args, **kwargs)
    return arguments


def runs_divided(
    calls: Calls, stacked: StackedExperts, n_ranks: int, arguments: list[Arguments] | None
) -> StackedExperts:
    """Return experts with the parameters of which a rank may have a part. Raises ``Blocked``.

    Parameters with as many rows as experts that hold something else, such as the weight of a router, stay whole.

    Args:
        arguments: of its calls, where it needs values.
    """
    module = calls.modules[stacked.fqn]
    if not stacked.events:
        return stacked
    names = stacked.parameters
    try:
        return _checked(calls, stacked, n_ranks, arguments)
    except Blocked as blocked:
        kept = tuple(name for name in names if module.get_parameter(name).dim() >= 3)
        if kept == names:
            raise
        try:
            best = _checked(calls, _with(stacked, kept), n_ranks, arguments)
        except Blocked:
            raise blocked from None
    for name in (name for name in names if name not in kept):
        try:
            best = _checked(calls, _with(stacked, (*best.parameters, name)), n_ranks, arguments)
        except Blocked:
            continue
    return best


def _with(stacked: StackedExperts, parameters: tuple[str, ...]) -> StackedExperts:
    """Return stacked experts of which only some parameters are divided."""
    others = tuple(name for name in stacked.parameters if name not in parameters)
    return replace(stacked, parameters=parameters, shared=(*stacked.shared, *others))


def _checked(calls: Calls, stacked: StackedExperts, n_ranks: int, arguments: list[Arguments] | None) -> StackedExperts:
    if arguments is None:
        first_and_last = {0, n_ranks - 1}
        kinds = {
            _on_shapes(calls, stacked, event, n_ranks, rank) for event in stacked.events for rank in first_and_last
        }
    else:
        kinds = {_compared(calls, stacked, inputs, n_ranks) for inputs in arguments}
    if len(kinds) > 1:
        raise Blocked(f"the calls of {stacked.fqn} return different parts of the experts; equal calls work")
    (results,) = kinds
    if not any(results):
        raise Blocked(f"the results of {stacked.fqn} do not depend on parameters that can be divided")
    return stacked


def _on_shapes(calls: Calls, stacked: StackedExperts, event: Event, n_ranks: int, rank: int) -> tuple[str, ...]:
    """Return the kinds of results of one rank, from a run on shapes; in half precision if they do not run in their own.

    On shapes torch has no grouped product of float32, which its kernels take.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")  # it prints a traceback
    is_disabled, logger.disabled = logger.disabled, True
    try:
        return _kinds_on_shapes(calls, stacked, event, n_ranks, rank, None)
    except Blocked as blocked:
        with suppress(Blocked):
            return _kinds_on_shapes(calls, stacked, event, n_ranks, rank, torch.bfloat16)
        raise blocked from None
    finally:
        logger.disabled = is_disabled


def _kinds_on_shapes(
    calls: Calls, stacked: StackedExperts, event: Event, n_ranks: int, rank: int, precision: torch.dtype | None
) -> tuple[str, ...]:
    """Return the kinds of results of one rank.

    Args:
        precision: of floating point tensors; None: their own.
    """

    def dtype_of(tensor: Any) -> torch.dtype:
        dtype: torch.dtype = tensor.dtype
        return precision if precision is not None and dtype.is_floating_point else dtype

    module = calls.modules[stacked.fqn]
    device = device_of([*module.parameters()])
    with FakeTensorMode(allow_non_fake_inputs=True):

        def fake(leaf: Any) -> Any:
            tensor = calls.tensor_of(leaf)
            if tensor is None:
                return leaf
            grad = isinstance(leaf, Value) and leaf.requires_grad and leaf.dtype.is_floating_point
            return torch.empty(tuple(tensor.shape), dtype=dtype_of(tensor), device=device, requires_grad=grad)

        def empty(tensor: Tensor, shape: Any) -> Tensor:
            return torch.empty(shape, dtype=dtype_of(tensor), device=device)

        args, kwargs = map_template(fake, event.args), map_template(fake, event.kwargs)
        ran = _run(calls, stacked, (args, kwargs), n_ranks, rank, empty)
        _backward(ran.contributions)
    expected, shapes = [
        [tuple(tensor.shape) for tensor in tensors] for tensors in (values_in(event.result), ran.contributions)
    ]
    if len(shapes) != len(expected):
        raise Blocked(f"{stacked.fqn} returns tensors in an object; a tensor, tuple, list or dict works")
    if shapes != expected:
        raise Blocked(f"{stacked.fqn} returns {expected}, and {shapes} where a rank has a part of its experts")
    return tuple(ran.results)


@dataclass
class _Ran:
    """What one rank made.

    Attributes:
        results: what makes each result whole.
        contributions: what the rank adds to each, in its whole shape.
        shards: its chunks of parameters.
        others: the other parameters.
    """

    results: list[str]
    contributions: list[Tensor]
    shards: list[Tensor]
    others: list[Tensor]

    def tensors(self) -> list[Tensor]:
        """Return the results, and the gradients of what all ranks have."""
        return [*(tensor.detach() for tensor in self.contributions), *self.gradients(self.others)]

    @staticmethod
    def gradients(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in tensors]


def twin_of(
    calls: Calls, stacked: StackedExperts, chunk_of: Any, n_ranks: int
) -> tuple[nn.Module, list[Tensor], list[Tensor]]:
    """Return a copy of a module, its parameters that are divided, and the others.

    Args:
        chunk_of: function of a tensor and the shape of the rank's chunk, that returns the tensor of the copy.
    """
    module = calls.modules[stacked.fqn]
    divided = {id(module.get_parameter(name)) for name in stacked.parameters}
    others = {id(parameter): parameter for parameter in calls.model.parameters()}
    others |= {id(buffer): chunk_of(buffer, buffer.shape) for buffer in module.buffers()}

    def like(parameter: Tensor) -> Tensor:
        rows, *sizes = parameter.shape or (1,)
        is_shard = id(parameter) in divided
        chunk: Tensor = chunk_of(parameter, (rows // n_ranks, *sizes) if is_shard else parameter.shape)
        return chunk

    try:
        twin = copied(module, like, others)
    except InputError as error:
        raise Blocked(f"{stacked.fqn}: {error}") from error
    for parameter in twin.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    shards = [twin.get_parameter(name) for name, _ in module.named_parameters() if name in stacked.parameters]
    shard_ids = set(map(id, shards))
    return twin, [*shards], [parameter for parameter in twin.parameters() if id(parameter) not in shard_ids]


def _whole(calls: Calls, stacked: StackedExperts, arguments: Arguments, dtype: torch.dtype | None, seed: int) -> _Ran:
    """Run a copy of the whole module."""
    twin, shards, others = twin_of(calls, stacked, _chunks(0, dtype), 1)
    args, kwargs = _copied(arguments, dtype)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        result = twin(*args, **kwargs)
    results = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
    _backward(results)
    return _Ran([], results, shards, [*others, *_entered(args, kwargs)])


def _chunks(rank: int, dtype: torch.dtype | None) -> Any:
    def chunk_of(tensor: Tensor, shape: Any) -> Tensor:
        chunk = tensor.detach() if tensor.shape == shape else tensor.detach().narrow(0, rank * shape[0], shape[0])
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return chunk.to(kind, copy=True)

    return chunk_of


def _copied(arguments: Arguments, dtype: torch.dtype | None) -> Arguments:
    def copied(tensor: Tensor) -> Tensor:
        leaf: Tensor = _chunks(0, dtype)(tensor, tensor.shape)
        return leaf.requires_grad_(tensor.requires_grad)

    result: Arguments = map_tensors(copied, arguments)
    return result


def _entered(args: Any, kwargs: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_of((args, kwargs)) if tensor.requires_grad]


def _plus(one: Tensor, other: Tensor) -> Tensor:
    return one + other if one.is_floating_point() else one


def are_close(one: Tensor, other: Tensor) -> bool:
    """Return True if two results are equal apart from the order of sums in their precision."""
    if not one.is_floating_point() or not one.numel():
        return one.shape == other.shape
    close = 1e-6 if one.dtype == torch.float64 else _CLOSE if one.dtype == torch.float32 else 30 * _CLOSE
    return one.shape == other.shape and bool((one - other).abs().max() <= close * one.abs().max().clamp(min=1e-6))


def _run(calls: Calls, stacked: StackedExperts, arguments: Arguments, n_ranks: int, rank: int, chunk_of: Any) -> _Ran:
    """Run a copy of the module with the experts of one rank. Raises ``Blocked``.

    Args:
        chunk_of: as for ``twin_of``.
    """
    twin, shards, others = twin_of(calls, stacked, chunk_of, n_ranks)
    args, kwargs = arguments
    protected = [*tensors_of((args, kwargs)), *twin.buffers()]
    mode = ExpertShards(rank, n_ranks, shards, protected, strict=True)
    try:
        with torch.enable_grad(), mode:
            result = twin(*args, **kwargs)
        held = [tensor for module in twin.modules() for tensor in vars(module).values() if isinstance(tensor, Tensor)]
        if any(mode.kind(tensor) for tensor in held):
            raise Blocked(f"{stacked.fqn} keeps results of experts in an attribute; returning them works")
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        return _Ran(
            [_OPERATIONS[mode.kind(leaf)] for leaf in leaves],
            [mode.sum_of(leaf) for leaf in leaves],
            shards,
            [*others, *_entered(args, kwargs)],
        )
    except ExpertShards.Refused as refused:
        raise Blocked(f"in {stacked.fqn}, {refused}") from None
    except Blocked:
        raise
    except Exception as error:
        raise Blocked(
            f"the forward of {stacked.fqn} does not run on a part of its experts: {in_short(error)}"
        ) from error


_OPERATIONS = {"": "", "shard": "all_gather", "rows": "all_reduce", "sum": "all_reduce"}


def _backward(results: Sequence[Tensor]) -> None:
    losses = [
        (
            result
            * torch.linspace(0.5, 1.5, result.numel(), device=result.device, dtype=result.dtype).view(result.shape)
        ).sum()
        for result in results
        if result.requires_grad
    ]
    if losses:
        torch.stack(losses).sum().backward()


def _compared(calls: Calls, stacked: StackedExperts, arguments: Arguments, n_ranks: int) -> tuple[str, ...]:
    """Return the kinds of results, after comparing the sum over all ranks with the whole module, and gradients."""
    for dtype in (torch.float64, None):  # some products have no kernel for double precision
        try:
            whole, again = (_whole(calls, stacked, arguments, dtype, seed) for seed in (0, 1))
            break
        except Exception as error:
            if dtype is None:
                raise Blocked(f"the forward of {stacked.fqn} cannot be repeated: {in_short(error)}") from error
    rans = [
        _run(calls, stacked, _copied(arguments, dtype), n_ranks, rank, _chunks(rank, dtype)) for rank in range(n_ranks)
    ]
    for ran in rans:
        _backward(ran.contributions)
    sums = [reduce(_plus, parts) for parts in zip(*(ran.tensors() for ran in rans), strict=True)]
    sums += [torch.cat(parts) for parts in zip(*(ran.gradients(ran.shards) for ran in rans), strict=True)]
    expected, other = ([*ran.tensors(), *ran.gradients(ran.shards)] for ran in (whole, again))
    if all(map(are_close, expected, other)) and not all(map(are_close, expected, sums)):  # else it is random
        raise Blocked(f"the sum over the ranks of what {stacked.fqn} computes differs from what it computes as a whole")
    return tuple(rans[0].results)

"""Run repeated structure once: what a module did serves for the next one that is provably the same.

Deep models are a few blocks over and over. Where a module equals an earlier one throughout its submodules (class,
configuration, shapes of parameters and buffers), gets equal arguments and is pure (``purity``), its forward is not run:
the calls inside it and its result are made like those of the earlier one. The rest of the proof is what that one was
seen to do: it read no values, wrote to no argument, changed no module, and returned tensors of its own making.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from modelsummary import _torch
from modelsummary.capture.calls import Call, Costs, Watch
from modelsummary.capture.execution.shape_only import ShapeOnly
from modelsummary.capture.execution.shape_tensor import ShapeTensor, Spec, spec_of
from modelsummary.capture.modules import modules_of, tensors_of_modules
from modelsummary.capture.reuse.equals import NoKeyError, StandIn, key_of_modules, key_of_value, likenesses
from modelsummary.capture.reuse.purity import Purity
from modelsummary.capture.values import tensors_of
from modelsummary.costs.stored import storage_of

__all__ = ["Reuse"]

_CONSTANTS = (bool, int, float, str, type(None))


class _Inner(NamedTuple):
    """A call inside the forward: positions of its module, and of its parent (-1: what called the forward)."""

    module: int
    parent: int
    call: Call


class _Record(NamedTuple):
    """What a forward did. ``outputs`` are the leaves of its result; in place of tensors, their specs."""

    inner: list[_Inner]
    costs: Costs
    outputs: list[Any]
    structure: Any
    writes_buffers: bool


class Reuse:
    """Lets forwards of one run give way to what equal ones did.

    Attributes:
        calls: module calls that were spared, those inside of others included.
    """

    def __init__(self, watch: Watch, execution: ShapeOnly, modules: Sequence[nn.Module]) -> None:
        self.calls = 0
        self._watch = watch
        self._execution = execution
        self._purity = Purity()
        self._likeness = likenesses(modules)
        self._blocks = [module for module in modules if id(module) in self._likeness and module._modules]
        self._kinds: dict[tuple[Any, ...], dict[tuple[Any, ...], _Record | None]] = {}
        self._thread = get_ident()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Context in which forwards may give way; not where somebody else is to see every call and operator."""
        blocks = [] if _is_watched() else [block for block in self._blocks if self._may_give_way(block)]
        try:
            for block in blocks:
                forward = StandIn(self._forward, block)
                functools.update_wrapper(forward, block.forward)  # some ask what arguments it takes
                vars(block)["forward"] = forward
            yield
        finally:
            for block in blocks:
                vars(block).pop("forward", None)

    def _may_give_way(self, block: nn.Module) -> bool:
        return "forward" not in vars(block) and self._purity.of_modules(frozenset({type(block)}))

    def _forward(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(type(block).forward, block, *args, **kwargs)
        arguments = _key_of_arguments(args, kwargs)
        if arguments is None or not self._is_undisturbed():
            return run()
        kind = (self._likeness[id(block)], _switches(), arguments)
        if kind not in self._kinds:
            self._kinds[kind] = {}
            return run()
        records = self._kinds[kind]
        modules = modules_of(block)
        key = self._key_of(modules)
        if key is None:
            return run()
        if key in records:
            record = records[key]
            return run() if record is None else self._again(record, modules)
        records[key] = None  # while it runs, and if it raises
        output, record = self._run(run, modules, (args, kwargs))
        if record is not None and (key, arguments) == (self._key_of(modules), _key_of_arguments(args, kwargs)):
            records[key] = record
        return output

    def _is_undisturbed(self) -> bool:
        """In the run's own thread, and no mode between the model and us."""
        return (
            get_ident() == self._thread
            and _torch.number_of_dispatch_modes() == 1
            and _torch.number_of_function_modes() == 0
            and _torch.functorch_level() is None
        )

    def _key_of(self, modules: Sequence[nn.Module]) -> tuple[Any, ...] | None:
        if not (self._purity.of_modules(frozenset(map(type, modules))) and self._purity.still_holds()):
            return None
        try:
            return key_of_modules(modules)
        except NoKeyError:
            return None

    # --------------------------------------------------------------------------------- the one that runs

    def _run(
        self, run: Callable[[], Any], modules: Sequence[nn.Module], call: tuple[Any, Any]
    ) -> tuple[Any, _Record | None]:
        """Result of a forward, and what it did; None if an equal module might do otherwise."""
        watch, execution = self._watch, self._execution
        caller, first_call, values_read = watch.running, len(watch.calls), execution.values_read
        before = caller.costs()
        with _writes(execution) as written:
            output = run()
        inner = _inner_calls(watch.calls[first_call:], caller, modules)
        leaves, structure = tree_flatten(output)
        given, own = _storages(tensors_of(call)), _storages(tensors_of_modules(modules))
        if inner is None or execution.values_read > values_read or not self._are_new(leaves, given | own):
            return output, None
        changed, buffers = _storages(written), _storages(_buffers_of(modules))
        if changed & (given | own - buffers):
            return output, None
        outputs = [spec_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return output, _Record(inner, caller.costs_since(before), outputs, structure, not buffers.isdisjoint(changed))

    def _are_new(self, leaves: Sequence[Any], known: set[int]) -> bool:
        """Leaves of a result that can be made again: constants, and plain tensors with a storage of their own."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return (
            all(type(leaf) in (ShapeTensor, *_CONSTANTS) for leaf in leaves)
            and all(map(_is_plain, tensors))
            and not any(map(self._execution.knows, tensors))
            and len(set(map(id, tensors))) == len(tensors)
            and _storages(tensors).isdisjoint(known)
        )

    # --------------------------------------------------------------------------------- those that do not

    def _again(self, record: _Record, modules: Sequence[nn.Module]) -> Any:
        """What an equal forward did, with these modules."""
        caller = self._watch.running
        made: list[Call] = []
        for inner in record.inner:
            parent = caller if inner.parent < 0 else made[inner.parent]
            made.append(inner.call.again(modules[inner.module], parent))
        self._watch.calls += made
        self.calls += len(made) + 1
        caller.add_costs(record.costs)
        if record.writes_buffers:
            for buffer in _buffers_of(modules):
                self._execution.overwrite(buffer)
        leaves = [self._execution.like(leaf) if type(leaf) is Spec else leaf for leaf in record.outputs]
        return tree_unflatten(leaves, record.structure)


def _key_of_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    try:
        return key_of_value((args, kwargs))
    except NoKeyError:
        return None


@contextmanager
def _writes(execution: ShapeOnly) -> Iterator[list[Tensor]]:
    """Context that tells, at its end, which tensors were written in place."""
    written: list[Tensor] = []
    outer, execution.written = execution.written, written
    try:
        yield written
    finally:
        execution.written = outer
        if outer is not None:
            outer += written


def _inner_calls(calls: Sequence[Call], caller: Call, modules: Sequence[nn.Module]) -> list[_Inner] | None:
    """The calls inside a forward; None if one failed, or is of a module that is no part of the block."""
    positions = {id(module): position for position, module in enumerate(modules)}
    order = {id(caller): -1} | {id(call): position for position, call in enumerate(calls)}
    if not all(call.finished and id(call.module) in positions for call in calls):
        return None
    return [_Inner(positions[id(call.module)], order[id(call.parent)], call) for call in calls]


def _is_plain(tensor: Tensor) -> bool:
    """``like(spec_of(tensor))`` is just like it."""
    return (
        type(tensor) is ShapeTensor
        and not (tensor.requires_grad or tensor.storage_offset() or tensor.is_conj() or tensor.is_neg())
        and not tensor.__dict__
    )


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return set(map(storage_of, tensors))


def _buffers_of(modules: Sequence[nn.Module]) -> list[Tensor]:
    return [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]


def _switches() -> tuple[Any, ...]:
    """What a forward may ask of torch, and its caller set."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        _torch.is_any_autocast_enabled(),
        _torch.is_flash_sdp_enabled(),
        _torch.is_mem_efficient_sdp_enabled(),
        _torch.is_math_sdp_enabled(),
        _torch.is_cudnn_sdp_enabled(),
    )


def _is_watched() -> bool:
    """Hooks or modes that are not ours are to see every call and operator."""
    hooks = (
        module_hooks._global_forward_pre_hooks,
        module_hooks._global_forward_hooks,
        module_hooks._global_backward_hooks,
        module_hooks._global_backward_pre_hooks,
    )
    modes = _torch.number_of_dispatch_modes() + _torch.number_of_function_modes()
    return any(hooks) or modes > 0

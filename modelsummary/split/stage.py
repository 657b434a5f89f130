"""What runs: ``Stage``, an ``nn.Sequential`` that follows a plan, and ``Function``, a call of torch among its layers.

A stage holds the model's own modules, parameters and buffers at their own paths, so that ``get_submodule``,
``state_dict`` and everything that goes by names works as on the model. Paths are looked up at every call: what replaces
a submodule (``fully_shard``, conversion to SyncBatchNorm) is used from then on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modelsummary.capture.templates import (
    Attribute,
    BatchSize,
    Marker,
    ModeChoice,
    OwnDevice,
    leaves_of,
    map_template,
    taken_apart,
)
from modelsummary.errors import SplitError
from modelsummary.record.events import TorchFunction

__all__ = ["Function", "Inputs", "Slot", "Stage", "StageCall", "StageProgram", "StageScope"]


@dataclass(frozen=True)
class Slot(Marker):
    """A value by its number."""

    index: int


class StageCall(NamedTuple):
    """One call of a stage's plan.

    Attributes:
        path: of the module to call; ``function`` is None then.
        args, kwargs: templates with slots for values.
        binds: position among the leaves of the result -> number of the value it becomes.
        scope: path of the module whose code made the call; its mode decides what depends on the mode.
        grad: gradients were enabled.
        checkpointed: call it under activation checkpointing; a bool, or ``ModeChoice``.
        frees: numbers of the values that nobody needs afterwards.
        n_leaves: how many values the result holds; more or fewer is another result than the recorded one.
        expects: what the result must be, as the forward decided by it; empty if it may be anything.
    """

    path: str
    function: TorchFunction | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    binds: tuple[tuple[int, int], ...]
    scope: str
    grad: bool
    checkpointed: Any
    frees: tuple[int, ...]
    n_leaves: int
    expects: tuple[Any, ...] = ()


Arguments = dict[str | int, Any]


class Inputs(NamedTuple):
    """How a forward was called, to take the same calls again.

    Attributes:
        parameters: names of the forward's positional parameters, in order.
        defaults: default values by name.
        arguments: name (or position, beyond the named ones) -> template.
        sizes: number of a value -> its size where it must be as it was recorded; None where it may differ.
        batches: ``(number, dim, factor)`` of the values that show the batch size.
        smallest_batch: the smallest batch size there may be.
        n_positional: how many of the arguments, the first ones, were given by position.
    """

    parameters: tuple[str, ...]
    defaults: Arguments
    arguments: Arguments
    sizes: dict[int, tuple[int | None, ...]]
    n_positional: int = 0
    batches: tuple[tuple[int, int, int], ...] = ()
    smallest_batch: int = 1

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Tensor]:
        """Number of each value -> tensor. Raises ``SplitError`` if the call is not one like the recorded one."""
        given: Arguments = {**self.defaults, **self.named(args, kwargs)}
        values: dict[int, Tensor] = {}
        recorded: Arguments = {**self.defaults, **self.arguments}
        for name, template in recorded.items():
            if name not in given:
                raise SplitError(
                    f"argument {name!r} is missing: the model was recorded with it; pass it, or split again"
                )
            _match(name, template, given[name], values)
        for name in given:
            if name not in self.arguments and name not in self.defaults:
                raise SplitError(f"argument {name!r} is new: the model was recorded without it; split again with it")
        for index, size in self.sizes.items():
            shape = values[index].shape
            if len(shape) != len(size) or any(own not in (None, each) for own, each in zip(size, shape, strict=True)):
                expected = ["any" if own is None else own for own in size]
                raise SplitError(
                    f"an input has the shape {list(shape)}, but the stages were made for {expected}: the model's "
                    "forward computes with sizes; split again with an input of this shape"
                )
        sizes = {index: values[index].shape[dim] / factor for index, dim, factor in self.batches}
        if len(set(sizes.values())) > 1:
            shapes = [list(values[index].shape) for index in sizes]
            raise SplitError(f"inputs of the shapes {shapes} have different batch sizes; they were recorded with one")
        if sizes and min(sizes.values()) < self.smallest_batch:
            raise SplitError(
                f"a batch of {int(min(sizes.values()))}: the model does other things with it than with at least "
                f"{self.smallest_batch}, for which it was split; split again with a batch of this size"
            )
        return values

    def as_recorded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same arguments, those by position that were recorded by position."""
        self.bind(args, kwargs)
        given: Arguments = {**self.defaults, **self.named(args, kwargs)}
        names = list(self.arguments)
        positional = tuple(given[name] for name in names[: self.n_positional])
        return positional, {str(name): given[name] for name in names[self.n_positional :]}

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Arguments by name where they have one, by position else."""
        by_name: Arguments = {
            self.parameters[position] if position < len(self.parameters) else position: value
            for position, value in enumerate(args)
        }
        twice = next((name for name in kwargs if name in by_name), None)
        if twice is not None:
            raise SplitError(f"argument {twice!r} is given by position and by name; pass it once")
        by_name.update(kwargs)
        return by_name


def _is_alike(one: Any, other: Any) -> bool:
    """Return True for equal constants, and for plain objects of one class with equal attributes."""
    if one is other or bool(one == other):
        return True
    own, others = getattr(one, "__dict__", None), getattr(other, "__dict__", None)
    has_equality = any("__eq__" in vars(kind) for kind in type(one).__mro__[:-1])
    if type(one) is not type(other) or has_equality or not own or not others:
        return False
    return own.keys() == others.keys() and all(_is_alike(own[name], others[name]) for name in own)


def _match(name: str | int, template: Any, value: Any, values: dict[int, Tensor]) -> None:
    expected, given = leaves_of(template), leaves_of(taken_apart(value))
    if len(expected) != len(given):
        raise SplitError(
            f"argument {name!r} holds {len(given)} values, but was recorded with {len(expected)}; split again"
        )
    for leaf, actual in zip(expected, given, strict=True):
        if isinstance(leaf, Slot):
            if not isinstance(actual, Tensor):
                raise SplitError(
                    f"argument {name!r} was recorded as a tensor, but is {actual!r:.80}; split again with it"
                )
            values[leaf.index] = actual
        elif isinstance(actual, Tensor) or not (isinstance(leaf, OwnDevice) or _is_alike(leaf, actual)):
            raise SplitError(
                f"argument {name!r} was recorded as {leaf!r:.80}, but is {actual!r:.80}; split again with it"
            )


class StageScope(nn.Module):
    """A part of an opened module: what of it belongs to this stage. It is not called itself."""

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        """Raises ``SplitError``: the stage calls what is inside."""
        raise SplitError("this module was cut by the split and cannot be called by itself; call the stage")


class Function(nn.Module):
    """A call of a torch function between layers.

    Args:
        function: the function.
        args, kwargs: templates; every slot is the input.
        batch: ``(dim, factor)``: the batch size is ``input.shape[dim] // factor``; None if it is not needed.
    """

    def __init__(
        self, function: TorchFunction, args: tuple[Any, ...], kwargs: dict[str, Any], batch: tuple[int, int] | None
    ) -> None:
        super().__init__()
        self.function, self.args, self.kwargs, self.batch = function, args, kwargs, batch

    def forward(self, input: Tensor) -> Any:
        """Call the function with ``input`` and the recorded constants."""
        size = None if self.batch is None else input.shape[self.batch[0]] // self.batch[1]

        def fill(leaf: Any) -> Any:
            return input if isinstance(leaf, Slot) else constant(leaf, size, input.device, self.training)

        return self.function(*map_template(fill, self.args), **map_template(fill, self.kwargs))

    def _get_name(self) -> str:
        return self.function.name

    def extra_repr(self) -> str:
        """The arguments."""
        given = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs.items())]
        return ", ".join(given).replace(repr(Slot(0)), "input")


@dataclass(frozen=True)
class StageProgram:
    """What a stage does.

    Attributes:
        steps: its calls, in order.
        inputs: of the first stage: how the model is called.
        takes: numbers of the values that it is given.
        gives: template of what it returns.
        batch: ``(value, dim, factor)``: the batch size is ``value.shape[dim] // factor``.
        dtypes: ``(value, dtype)`` that it is bound to: a dtype that the model read is a constant here.
        recorded_mode: the mode it is bound to; None if it is bound to none.
    """

    steps: tuple[StageCall, ...]
    inputs: Inputs | None
    takes: tuple[int, ...]
    gives: Any
    batch: tuple[int, int, int] | None
    dtypes: tuple[tuple[int, torch.dtype], ...]
    recorded_mode: bool | None


class Stage(nn.Sequential):
    """Part of a model that is no chain of layers: it takes the values that cross into it and returns those that leave.

    Called with one tuple, or with its values one by one. The last stage returns what the model returns.
    """

    def __init__(self, plan: StageProgram) -> None:
        super().__init__()
        self._plan = plan  # the only attribute of its own: the children have the names of the model's

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Follow the plan. Raises ``SplitError`` if the call does not fit to what was recorded."""
        if self._plan.recorded_mode is not None and self.training is not self._plan.recorded_mode:
            modes = ("train" if self._plan.recorded_mode else "eval", "train" if self.training else "eval")
            raise SplitError(
                f"split in {modes[0]} mode, and the model does other things in {modes[1]} mode; split again"
            )
        values = self._values(args, kwargs)
        for index, dtype in self._plan.dtypes:
            if values[index].dtype is not dtype:
                raise SplitError(
                    f"the stage was made for {dtype}, which the model reads and computes with, but is given "
                    f"{values[index].dtype}; convert the model before you split it, or split it under the same autocast"
                )
        size = device = None
        for tensor in values.values():
            device = tensor.device
            break
        if self._plan.batch is not None:
            index, dim, factor = self._plan.batch
            size = values[index].shape[dim] // factor
        for step in self._plan.steps:
            self._run(step, values, size, device)
        return self._fill(self._plan.gives, values, size, device, self.training)

    def _values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Tensor]:
        if self._plan.inputs is not None:
            return self._plan.inputs.bind(args, kwargs)
        if len(args) == 1 and isinstance(args[0], (tuple, list)):
            args = tuple(args[0])
        if len(args) != len(self._plan.takes) or kwargs:
            raise SplitError(
                f"the stage takes {len(self._plan.takes)} tensor(s), got {len(args)}{' and keywords' * bool(kwargs)}"
            )
        return dict(zip(self._plan.takes, args, strict=True))

    def _run(self, step: StageCall, values: dict[int, Tensor], size: int | None, device: torch.device | None) -> None:
        training = find(self, step.scope).training if step.scope else self.training
        args = self._fill(step.args, values, size, device, training)
        kwargs = self._fill(step.kwargs, values, size, device, training)
        called = find(self, step.path) if step.function is None else step.function
        if constant(step.checkpointed, None, None, training):
            out = checkpoint(called, *args, use_reentrant=False, **kwargs)
        elif step.grad:
            out = called(*args, **kwargs)
        else:
            with torch.no_grad():
                out = called(*args, **kwargs)
        if step.expects and (expected := self._fill(step.expects[0], values, size, device, training)) != out:
            raise SplitError(
                f"the forward decides by values: {step.function!r} gave {expected!r:.80} when it was recorded, and "
                f"gives {out!r:.80}; split again with such an input"
            )
        if len(step.binds) == 1 and isinstance(out, Tensor):
            values[step.binds[0][1]] = out
        else:
            leaves = leaves_of(taken_apart(out) if step.function is None else out)
            if len(leaves) != step.n_leaves:
                raise SplitError(
                    f"{step.path or step.function!r} gave {len(leaves)} results, but {step.n_leaves} when it was "
                    "recorded; split again with an input of this size"
                )
            for position, index in step.binds:
                values[index] = leaves[position]
        for index in step.frees:
            del values[index]

    def _fill(
        self, template: Any, values: dict[int, Tensor], size: int | None, device: torch.device | None, training: bool
    ) -> Any:
        """``template`` with everything in its place."""
        if isinstance(template, Slot):
            return values[template.index]
        if isinstance(template, Attribute):
            return find(self, template.fqn)
        kind = type(template)
        if kind is tuple or kind is list:
            return kind([self._fill(inner, values, size, device, training) for inner in template])
        if kind is dict:
            return {name: self._fill(inner, values, size, device, training) for name, inner in template.items()}
        if kind in (int, float, bool, str, type(None)):
            return template

        def fill(leaf: Any) -> Any:
            if isinstance(leaf, Slot):
                return values[leaf.index]
            if isinstance(leaf, Attribute):
                return find(self, leaf.fqn)
            return constant(leaf, size, device, training)

        return map_template(fill, template, makes_objects=True)

    def __getitem__(self, index: Any) -> Any:
        """A child by its position; a slice gives a list, for only the whole stage follows the plan."""
        return list(self._modules.values())[index]

    def extra_repr(self) -> str:
        """What the plan calls besides the modules shown."""
        functions = [step.function.short_name for step in self._plan.steps if step.function is not None]
        return f"{len(self._plan.steps)} calls, of these functions: {', '.join(functions) or 'none'}"


def constant(leaf: Any, size: int | None, device: torch.device | None, training: bool) -> Any:
    """What a leaf of a template that is no value of the forward stands for."""
    if isinstance(leaf, BatchSize):
        assert size is not None
        return leaf.at(size)
    if isinstance(leaf, ModeChoice):
        return leaf.in_train if training else leaf.in_eval
    if isinstance(leaf, OwnDevice):
        return device
    if isinstance(leaf, Tensor) and device is not None and leaf.device != device and leaf.dim() > 0:
        return leaf.to(device)
    return leaf


def find(module: nn.Module, path: str) -> Any:
    """What is at a path: a module, a parameter, a buffer, an attribute."""
    found: Any = module
    for name in path.split("."):
        # An attribute or method of the stage may have the name of a child.
        for table in (found._modules, found._parameters, found._buffers):
            if name in table:
                found = table[name]
                break
        else:
            found = getattr(found, name)
    return found


# Names that version 0.1.0 pickled stages with.
Plan, Scope, Step = StageProgram, StageScope, StageCall

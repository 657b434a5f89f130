"""The modules that stages are made of: ``Stage``, which follows a plan, and ``Function``, a torch call between layers.

A stage holds the model's own modules, parameters and buffers at their own paths. So ``get_submodule``, ``state_dict``
and everything that uses names works as on the model. Paths are looked up at every call: a module that replaces a
submodule (``fully_shard``, conversion to SyncBatchNorm) is used from then on.
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
    """A placeholder for a value, by its index."""

    index: int


class StageCall(NamedTuple):
    """One call of a stage's plan.

    Attributes:
        path: path of the module to call; empty for a function.
        function: function to call; None for a module.
        args, kwargs: templates with slots for values.
        binds: pairs of a leaf's position in the result and the index of the value it becomes.
        scope: path of the module whose forward made the call; its mode decides arguments that depend on the mode.
        grad: True if gradients were enabled.
        checkpointed: True if the call runs under activation checkpointing; a bool or a ``ModeChoice``.
        frees: indices of the values that no later call needs.
        n_leaves: number of leaves of the recorded result.
        expects: the result that the forward decided by, as a template in a tuple; empty if any result will do.
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
    """The recorded arguments of a forward, against which later calls are checked.

    Attributes:
        parameters: names of the forward's positional parameters, in order.
        defaults: default values by name.
        arguments: name (or position, beyond the named ones) -> template.
        sizes: index of a value -> its required sizes, with None where any size will do.
        n_positional: number of arguments given by position; they come first in ``arguments``.
        batches: ``(index, dim, factor)`` of the values with a batch: their size along ``dim`` is batch size x factor.
        smallest_batch: the smallest batch size allowed.
    """

    parameters: tuple[str, ...]
    defaults: Arguments
    arguments: Arguments
    sizes: dict[int, tuple[int | None, ...]]
    n_positional: int = 0
    batches: tuple[tuple[int, int, int], ...] = ()
    smallest_batch: int = 1

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Tensor]:
        """Return a dict from the index of each value to its tensor.

        Raise ``SplitError`` if the arguments do not match the recorded ones.
        """
        arguments: Arguments = {**self.defaults, **self.named(args, kwargs)}
        values: dict[int, Tensor] = {}
        recorded: Arguments = {**self.defaults, **self.arguments}
        for name, template in recorded.items():
            if name not in arguments:
                raise SplitError(
                    f"argument {name!r} is missing: the model was recorded with it; pass it, or split again"
                )
            _match(name, template, arguments[name], values)
        for name in arguments:
            if name not in self.arguments and name not in self.defaults:
                raise SplitError(f"argument {name!r} is new: the model was recorded without it; split again with it")
        for index, size in self.sizes.items():
            shape = values[index].shape
            if len(shape) != len(size) or any(
                required not in (None, actual) for required, actual in zip(size, shape, strict=True)
            ):
                expected = ["any" if required is None else required for required in size]
                raise SplitError(
                    f"an input has shape {list(shape)}, but the stages were made for {expected}, because the forward "
                    "computes with sizes; split again with an input of this shape"
                )
        sizes = {index: values[index].shape[dim] / factor for index, dim, factor in self.batches}
        if len(set(sizes.values())) > 1:
            shapes = [list(values[index].shape) for index in sizes]
            raise SplitError(
                f"inputs must have the same batch size, as when they were recorded, got the shapes {shapes}"
            )
        if sizes and min(sizes.values()) < self.smallest_batch:
            raise SplitError(
                f"the batch size must be >= {self.smallest_batch}, got {int(min(sizes.values()))}, for which the "
                "forward runs other operators; split again with a batch of this size"
            )
        return values

    def as_recorded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the same arguments by position or by name, as they were recorded."""
        self.bind(args, kwargs)
        arguments: Arguments = {**self.defaults, **self.named(args, kwargs)}
        names = list(self.arguments)
        positional = tuple(arguments[name] for name in names[: self.n_positional])
        return positional, {str(name): arguments[name] for name in names[self.n_positional :]}

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return a dict from the name of each argument to its value; arguments without a name go by position."""
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
    attributes, other_attributes = getattr(one, "__dict__", None), getattr(other, "__dict__", None)
    has_equality = any("__eq__" in vars(kind) for kind in type(one).__mro__[:-1])
    if type(one) is not type(other) or has_equality or not attributes or not other_attributes:
        return False
    return attributes.keys() == other_attributes.keys() and all(
        _is_alike(attributes[name], other_attributes[name]) for name in attributes
    )


def _match(name: str | int, template: Any, value: Any, values: dict[int, Tensor]) -> None:
    expected_leaves, actual_leaves = leaves_of(template), leaves_of(taken_apart(value))
    if len(expected_leaves) != len(actual_leaves):
        raise SplitError(
            f"argument {name!r} holds {len(actual_leaves)} values, but was recorded with {len(expected_leaves)}; "
            "split again"
        )
    for leaf, actual in zip(expected_leaves, actual_leaves, strict=True):
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
    """The part of an opened module that belongs to one stage. It holds submodules and tensors, and is never called."""

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        """Raise ``SplitError``: the stage calls the modules inside."""
        raise SplitError("this module was cut by the split and cannot be called; call the stage")


class Function(nn.Module):
    """A call of a torch function between layers.

    Args:
        args, kwargs: templates; every slot is the input.
        batch: ``(dim, factor)``, where the batch size is ``input.shape[dim] // factor``; None if it is not needed.
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
        """Return the arguments as text."""
        arguments = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs.items())]
        return ", ".join(arguments).replace(repr(Slot(0)), "input")


@dataclass(frozen=True)
class StageProgram:
    """The plan of a stage.

    Attributes:
        steps: its calls, in order.
        inputs: the model's arguments, for the first stage; None for the others.
        takes: indices of the values that cross into the stage.
        gives: template of the result.
        batch: ``(value, dim, factor)``, where the batch size is ``value.shape[dim] // factor``; None if not known.
        dtypes: ``(value, dtype)`` pairs that the inputs must have, because a dtype that the forward read is a constant.
        recorded_mode: the value that ``training`` must have; None if the stage works in both modes.
    """

    steps: tuple[StageCall, ...]
    inputs: Inputs | None
    takes: tuple[int, ...]
    gives: Any
    batch: tuple[int, int, int] | None
    dtypes: tuple[tuple[int, torch.dtype], ...]
    recorded_mode: bool | None


class Stage(nn.Sequential):
    """A part of a model that is not a chain of layers.

    It takes the values that cross into it, as one tuple or one by one, and returns the values that cross out of it. The
    first stage takes the model's arguments. The last stage returns the model's result.
    """

    def __init__(self, plan: StageProgram) -> None:
        super().__init__()
        self._plan = plan  # the only attribute besides the children, which have the model's names

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Follow the plan. Raise ``SplitError`` if the arguments do not match the recorded ones."""
        if self._plan.recorded_mode is not None and self.training is not self._plan.recorded_mode:
            modes = ("train" if self._plan.recorded_mode else "eval", "train" if self.training else "eval")
            raise SplitError(
                f"the model was split in {modes[0]} mode and is in {modes[1]} mode, in which its forward runs other "
                "operators; split again"
            )
        values = self._values(args, kwargs)
        for index, dtype in self._plan.dtypes:
            if values[index].dtype is not dtype:
                raise SplitError(
                    f"the stage was made for {dtype}, because the forward reads the dtype, but is given "
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

    def calls_inside(self, fqn: str) -> list[str] | None:
        """Return the FQNs of the modules that are called inside of a module that is open; None if it is not."""
        if not isinstance(dict(self.named_modules()).get(fqn), StageScope):
            return None
        paths = (step.path for step in self._plan.steps if step.function is None)
        return [path for path in paths if path.startswith(f"{fqn}.")]

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
                f"gives {out!r:.80} now; split again with this input"
            )
        if len(step.binds) == 1 and isinstance(out, Tensor):
            values[step.binds[0][1]] = out
        else:
            leaves = leaves_of(taken_apart(out) if step.function is None else out)
            if len(leaves) != step.n_leaves:
                raise SplitError(
                    f"{step.path or step.function!r} gave {len(leaves)} results, but {step.n_leaves} when it was "
                    "recorded; split again with this input"
                )
            for position, index in step.binds:
                values[index] = leaves[position]
        for index in step.frees:
            del values[index]

    def _fill(
        self, template: Any, values: dict[int, Tensor], size: int | None, device: torch.device | None, training: bool
    ) -> Any:
        """Return ``template`` with its markers replaced by values."""
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
        """Return a child by its position; a list for a slice, because only the whole stage follows the plan."""
        return list(self._modules.values())[index]

    def extra_repr(self) -> str:
        """Return the functions that the plan calls, as text."""
        functions = [step.function.short_name for step in self._plan.steps if step.function is not None]
        return f"{len(self._plan.steps)} calls, of these functions: {', '.join(functions) or 'none'}"


def constant(leaf: Any, size: int | None, device: torch.device | None, training: bool) -> Any:
    """Return the value of a template's leaf that is not a slot or an attribute.

    Args:
        leaf: marker or constant.
        size: batch size; None if it is not known.
        device: device of the inputs; constant tensors are moved there.
        training: mode of the module whose forward made the call.
    """
    if isinstance(leaf, BatchSize):
        assert size is not None
        return leaf.at(size)
    if isinstance(leaf, ModeChoice):
        return leaf.in_train if training else leaf.in_eval
    if isinstance(leaf, OwnDevice):
        return device
    if isinstance(leaf, Tensor) and device is not None and leaf.device != device and leaf.dim() > 0:
        return leaf if leaf.is_meta else leaf.to(device)  # torch passes tensors without data as examples of a type
    return leaf


def find(module: nn.Module, path: str) -> Any:
    """Return the module, parameter, buffer or attribute at a path."""
    attribute: Any = module
    for name in path.split("."):
        if isinstance(getattr(type(attribute), name, None), property):  # of a sharded parameter, or of the model
            attribute = getattr(attribute, name)
            continue
        # An attribute or method of the stage may have the name of a child.
        for table in (attribute._modules, attribute._parameters, attribute._buffers):
            if name in table:
                attribute = table[name]
                break
        else:
            attribute = getattr(attribute, name)
    return attribute

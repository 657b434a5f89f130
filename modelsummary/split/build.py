"""Build the stages from a sequence of calls and its cuts."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modelsummary.capture.templates import Attribute, BatchSize, ModeChoice, leaves_of, map_template
from modelsummary.record.events import Event, Value, values_in
from modelsummary.split.holdings import holdings
from modelsummary.split.legal_cuts import CallSequence
from modelsummary.split.stage import Function, Inputs, Slot, Stage, StageCall, StageProgram, StageScope
from modelsummary.split.stage_parts import StagePart

__all__ = ["build", "inputs_of"]


def build(model: nn.Module, sequence: CallSequence, parts: Sequence[StagePart], inputs: Inputs) -> list[nn.Sequential]:
    """Return one stage per part: a plain ``nn.Sequential`` if the part is a chain of layers, else a ``Stage``."""
    held = holdings(model, parts, sequence.record.root.result)
    stages: list[nn.Sequential] = []
    for index, part in enumerate(parts):
        is_first, is_last = index == 0, index == len(parts) - 1
        builder = _StageBuilder(model, sequence, part, held[index])
        stage = builder.chain(is_first, is_last, inputs)
        stages.append(stage if stage is not None else builder.stage(is_first, is_last, inputs))
    return stages


def inputs_of(model: nn.Module, sequence: CallSequence, parts: Sequence[StagePart]) -> Inputs:
    """Return the arguments that the model was called with, as templates."""
    record = sequence.record
    names: list[str] = []
    defaults: dict[str | int, Any] = {}
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
        if parameter.default is not parameter.empty:
            defaults[parameter.name] = parameter.default
    values = values_in((record.root.args, record.root.kwargs))
    batches = tuple((value.index, *value.batch) for value in values if value.batch is not None)
    inputs = Inputs(tuple(names), defaults, {}, _fixed_sizes(sequence, parts), batches=batches)
    inputs = inputs._replace(smallest_batch=record.smallest_batch if record.batch_size != 1 else 1)
    arguments = inputs.named(_slots(record.root.args), _slots(record.root.kwargs))
    return inputs._replace(arguments=arguments, n_positional=len(record.root.args))


def _fixed_sizes(sequence: CallSequence, parts: Sequence[StagePart]) -> dict[int, tuple[int | None, ...]]:
    """Return the sizes that inputs must have; empty if they may vary.

    An opened module that reads sizes turns them into constants, so all sizes but the batch size are fixed. A record
    without a batch size fixes all sizes.
    """
    record = sequence.record
    called = {event for part in parts for event in part.events}
    opened = (event for event in sequence.span if event.is_module and event not in called and not _above(event, called))
    if record.batch_size is not None and not any(event.reads_sizes for event in opened):
        return {}
    sizes: dict[int, tuple[int | None, ...]] = {}
    for value in values_in((record.root.args, record.root.kwargs)):
        batch = value.batch if record.batch_size is not None else None
        sizes[value.index] = tuple(
            None if batch is not None and dim == batch[0] else size for dim, size in enumerate(value.shape)
        )
    return sizes


def _above(event: Event, called: set[Event]) -> bool:
    """Return True if a module around an event is called as a whole."""
    while event.parent is not None:
        event = event.parent
        if event in called:
            return True
    return False


def _slots(template: Any) -> Any:
    return map_template(lambda leaf: Slot(leaf.index) if isinstance(leaf, Value) else leaf, template)


class _StageBuilder:
    """A builder of one stage."""

    def __init__(self, model: nn.Module, sequence: CallSequence, part: StagePart, paths: list[str]) -> None:
        self._model = model
        self._record = sequence.record
        self._part = part
        self._paths = paths

    # ---------------------------------------------------------------------------------------- chains

    def chain(self, is_first: bool, is_last: bool, inputs: Inputs) -> nn.Sequential | None:
        """Return a plain ``nn.Sequential``; None if the part is not a chain of layers in the order of the tree."""
        part, root = self._part, self._record.root
        if len(part.takes) != 1 or len(part.gives) != 1 or self._record.no_other_mode:
            return None
        if is_first and (
            inputs.sizes or inputs.smallest_batch > 1 or not _is_sole(root.args, root.kwargs, part.takes[0])
        ):
            return None
        if is_last and root.result is not part.gives[0]:
            return None
        value = part.takes[0]
        for event in part.events:
            if (
                not event.grad
                or event.checkpointed
                or event.dtype_bound
                or not isinstance(event.result, Value)
                or values_in((event.args, event.kwargs)) != [value]
            ):
                return None
            if event.is_module and not _is_sole(event.args, event.kwargs, value):
                return None
            if not event.is_module and not _is_simple(event, value):
                return None
            value = event.result
        if value is not part.gives[0]:
            return None
        tree = self._tree_of_chain()
        if tree is None:
            return None
        modules = {event.fqn for event in part.events if event.is_module}
        if set(self._paths) != modules:
            return None
        return _sequential(tree, self._model, "")

    def _tree_of_chain(self) -> dict[str, Any] | None:
        """Return a nested dict of modules in the order of the calls; None if that differs from the model's tree."""
        tree: dict[str, Any] = {}
        last_path: list[str] = []
        for event in self._part.events:
            owner = event.fqn.rpartition(".")[0] if event.is_module else event.fqn
            path = owner.split(".") if owner else []
            node = tree
            for depth, name in enumerate(path):
                if name in node and (last_path[: depth + 1] != path[: depth + 1] or not isinstance(node[name], dict)):
                    return None
                node = node.setdefault(name, {})
            if event.is_module:
                name = event.fqn.rpartition(".")[2]
                if name in node:
                    return None
                node[name] = self._model.get_submodule(event.fqn)
            else:
                taken = {*node, *self._model.get_submodule(owner)._modules}
                node[_free(event.name, taken)] = self._function(event)
            last_path = path
        return tree

    def _function(self, event: Event) -> Function:
        assert event.function is not None
        args, kwargs = map_template(
            lambda leaf: Slot(0) if isinstance(leaf, Value) else leaf, (tuple(event.args), dict(event.kwargs))
        )
        needs_batch = any(isinstance(leaf, BatchSize) for leaf in leaves_of((args, kwargs)))
        function = Function(
            event.function, args, kwargs, values_in((event.args, event.kwargs))[0].batch if needs_batch else None
        )
        function.training = self._model.get_submodule(event.fqn).training
        return function

    # ---------------------------------------------------------------------------------------- stages

    def stage(self, is_first: bool, is_last: bool, inputs: Inputs) -> Stage:
        """Return a ``Stage`` that follows a plan."""
        part, record = self._part, self._record
        batched = next((value for value in part.takes if value.batch is not None), None)
        plan = StageProgram(
            steps=tuple(self._steps()),
            inputs=inputs if is_first else None,
            takes=tuple(value.index for value in part.takes),
            gives=_slots(record.root.result) if is_last else _one_or_all([Slot(value.index) for value in part.gives]),
            batch=(batched.index, *batched.batch) if batched is not None and batched.batch is not None else None,
            dtypes=_dtypes(part.takes) if self._is_dtype_bound(is_last) else (),
            recorded_mode=self._model.training if record.no_other_mode else None,
        )
        stage = Stage(plan)
        stage.training = self._model.training
        for path in self._paths:
            self._place(stage, path)
        for event in part.events:
            self._place_scope(stage, event.fqn if event.function is not None else _scope_of(event))
        return stage

    def _is_dtype_bound(self, is_last: bool) -> bool:
        """Return True if a call or the model's result holds a dtype as a constant."""
        result = leaves_of(self._record.root.result) if is_last else ()
        return any(event.dtype_bound for event in self._part.events) or any(
            isinstance(leaf, torch.dtype) for leaf in result
        )

    def _steps(self) -> list[StageCall]:
        last_use: dict[Value, int] = {}
        for index, event in enumerate(self._part.events):
            last_use.update(dict.fromkeys(values_in((event.args, event.kwargs, event.result)), index))
        last_use.update(dict.fromkeys(self._part.gives, len(self._part.events)))
        frees: list[list[int]] = [[] for _ in self._part.events]
        for value, index in last_use.items():
            if index < len(frees):
                frees[index].append(value.index)
        return [
            StageCall(
                path=event.fqn if event.is_module else "",
                function=event.function,
                args=tuple(_slots(event.args)),
                kwargs=dict(_slots(event.kwargs)),
                binds=tuple(
                    (position, leaf.index)
                    for position, leaf in enumerate(leaves_of(event.result))
                    if isinstance(leaf, Value)
                ),
                scope=_scope_of(event) if _depends_on_mode(event) else "",
                grad=event.grad,
                checkpointed=event.checkpointed,
                frees=tuple(frees[index]),
                n_leaves=len(leaves_of(event.result)),
                expects=(event.result,) if event.is_decision else (),
            )
            for index, event in enumerate(self._part.events)
        ]

    def _place(self, stage: Stage, path: str) -> None:
        """Put a module or tensor of the model at its own path in the stage."""
        owner_path, _, name = path.rpartition(".")
        owner = self._place_scope(stage, owner_path)
        if owner is None:
            return  # inside a module that is held as a whole
        source = self._model.get_submodule(owner_path)
        if name in source._modules:
            if name not in owner._modules or isinstance(owner._modules[name], StageScope):
                owner._modules[name] = source._modules[name]
        elif name in source._parameters:
            owner._parameters[name] = source._parameters[name]
        elif name in source._buffers:
            owner._buffers[name] = source._buffers[name]
            if name in source._non_persistent_buffers_set:
                owner._non_persistent_buffers_set.add(name)
        else:
            owner.__dict__[name] = source.__dict__[name]

    def _place_scope(self, stage: Stage, path: str) -> nn.Module | None:
        """Return the scope at a path, creating it if needed; None if the path lies inside a module of the model."""
        scope: nn.Module = stage
        source: nn.Module = self._model
        for name in path.split(".") if path else ():
            source = source.get_submodule(name)
            if name not in scope._modules:
                inner = StageScope()
                inner.training = source.training
                scope._modules[name] = inner
            child = scope._modules[name]
            if not isinstance(child, StageScope):
                return None
            scope = child
        return scope


def _is_sole(args: Any, kwargs: Any, value: Value) -> bool:
    """Return True if ``value`` is the only argument."""
    return not kwargs and len(args) == 1 and args[0] is value


def _is_simple(event: Event, value: Value) -> bool:
    """Return True if the arguments are ``value`` and constants, and any batch size they need follows from ``value``."""
    leaves = leaves_of((event.args, event.kwargs))
    if any(isinstance(leaf, (Attribute, Tensor)) for leaf in leaves):
        return False
    return value.batch is not None or not any(isinstance(leaf, BatchSize) for leaf in leaves)


def _scope_of(event: Event) -> str:
    """Return the path of the module whose forward made a call."""
    return event.fqn if event.function is not None else (event.parent.fqn if event.parent is not None else "")


def _depends_on_mode(event: Event) -> bool:
    answer = event.result if event.is_decision else None
    return any(
        isinstance(leaf, ModeChoice) for leaf in leaves_of((event.args, event.kwargs, event.checkpointed, answer))
    )


def _dtypes(values: Sequence[Value]) -> tuple[tuple[int, torch.dtype], ...]:
    return tuple((value.index, value.dtype) for value in values if value.dtype.is_floating_point)


def _one_or_all(slots: list[Slot]) -> Any:
    return slots[0] if len(slots) == 1 else tuple(slots)


def _free(name: str, taken: set[str]) -> str:
    """Return ``name``, or the first free of ``name_1``, ``name_2`` ... if it is taken."""
    suffix, free = 0, name
    while free in taken:
        suffix += 1
        free = f"{name}_{suffix}"
    return free


def _sequential(tree: dict[str, Any], model: nn.Module, path: str) -> nn.Sequential:
    sequential = nn.Sequential()
    for name, node in tree.items():
        inner = f"{path}.{name}" if path else name
        sequential._modules[name] = _sequential(node, model, inner) if isinstance(node, dict) else node
    sequential.training = model.get_submodule(path).training
    return sequential

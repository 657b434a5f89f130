"""Trace one run: every call of a module and of a torch function, with its argument and result tensors.

Tensors are identified by ``id``. No proxies are used, so Python control flow runs as usual. If a module does something
that a list of calls cannot repeat (read values, assign attributes, draw random numbers), this is noted as its obstacle.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from modelsummary import _torch
from modelsummary.capture.containers import tensors_of
from modelsummary.capture.execution.shape_only import ShapeOnly, selects_by_mask
from modelsummary.capture.module_calls import calls_wrapped
from modelsummary.capture.modules import modules_of, named_modules
from modelsummary.capture.operator_mode import Costs, Execution, Operators
from modelsummary.capture.state.held import Held
from modelsummary.capture.state.process_state import surroundings
from modelsummary.capture.templates import (
    Unknown,
    leaves_of,
    map_template,
    objects_in,
    taken_apart,
    tells_dtype,
)
from modelsummary.layer_info import CallKeys
from modelsummary.operators.operator_rules import OpCost, OpRule, tensors_in
from modelsummary.operators.tensor_bytes import storage_of
from modelsummary.record.changes import (
    Generators,
    autograd_functions_wrapped,
    first_difference,
    imports_question,
    noticed,
    numbers_in,
    saved_tensor_hooks,
    state_of,
)
from modelsummary.record.events import Event, TorchFunction, torch_function
from modelsummary.record.obstacles import (
    ASKS_GRADIENTS,
    TAKES_SHAPE,
    is_decision,
    keeps_first,
    obstacle_of_function,
    obstacle_of_module,
    obstacle_of_objects,
    obstacle_of_reading,
    reads_size,
)
from modelsummary.record.tensors import TensorsOfRun, Token, is_tainted
from modelsummary.record.trace_rules import WHOLE_LAYERS, TraceRules, checkpoints_opened, is_of_checkpointing

__all__ = ["Effects", "Noted", "Tracer"]

_WITHOUT_TENSORS = frozenset({torch.Size, int, bool, float, str, torch.dtype, torch.device})
_is_grad_enabled = torch.is_grad_enabled  # during a run, torch's attribute notes that the model asks


class Tracer(TorchFunctionMode):
    """The trace of one run of ``model``.

    Args:
        devices: devices that mean the model's own.
        rules: modules to open, and functions to substitute.
        watches_draws: whether to look at the generators of Python and numpy before and after every opened module, which
            takes a tenth of the run, instead of after the run alone.

    Attributes:
        root: the call of the model.
        draws: whether a number was drawn from these generators since anyone looked.
        tensors: the tensors of the run.
        decides: whether the forward read values of tensors that are known on shapes.
        asks_gradients: whether the model's own code asked whether gradients are computed.
        is_open: whether the running code belongs to a module that could be replaced by its calls.
    """

    def __init__(
        self,
        model: nn.Module,
        execution: Execution,
        devices: Collection[torch.device],
        rules: TraceRules = WHOLE_LAYERS,
        *,
        watches_draws: bool = True,
    ) -> None:
        super().__init__()
        self._model = model
        self._rules = rules
        self._regions: list[int] = []  # of activation checkpointing, around the running code
        self._next_region: Counter[tuple[int, ...]] = Counter()  # regions -> number of the next one inside them
        self._names = {id(module): fqn for fqn, module in named_modules(model)}
        self.tensors = TensorsOfRun(model, devices)
        self._keys = CallKeys()
        self._dtypes: defaultdict[Event, set[torch.dtype]] = defaultdict(set)  # read by a module's forward
        self._on_shapes = isinstance(execution, ShapeOnly)
        self._operators = Operators(Noted(execution, self))
        self.root: Event | None = None
        self.decides = False
        self.asks_gradients = imports_question(modules_of(model))
        self._stack: list[Event] = []
        self._hooks: list[Any] = []  # of saved tensors, at the beginning of each call on the stack
        self.sums = Effects()
        self.is_open = False
        self._surroundings = surroundings()
        self._generators = Generators()
        self._watches_draws = watches_draws
        self.draws = False
        self._thread = get_ident()
        self._states: dict[int, dict[str, Any]] = {}

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, other_mode: bool = False) -> Any:
        """Return the model's result, with ``other_mode`` in its other mode (train or eval). Exceptions propagate."""
        for module in modules_of(self._model) if other_mode else ():
            module.training = not module.training
        self._states = {id(module): state_of(module) for _, module in named_modules(self._model)}
        with self._every_call(), self._operators, self:
            out = self._model(*args, **kwargs)
        self.draws = self._generators.moved()
        return out

    def note_kept(self, *holders: Any) -> None:
        """Note the tensors of the run that objects hold behind it, as attributes or in lists that hooks fill."""
        held = Held()
        held.save(holders)
        assert self.root is not None
        self.root.kept = tuple(map(self.tensors.leaf, filter(self.tensors.knows, held.tensors)))

    @contextmanager
    def _every_call(self) -> Iterator[None]:
        """Return a context in which calls of modules and of autograd functions are traced."""

        def apply_function(cls: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
            substitute = self._rules.substitutes.get(original)
            if substitute is not None and self._sees():
                return substitute(*args, **kwargs)
            if not self._sees() or is_of_checkpointing(cls):
                return original(*args, **kwargs)
            if any(callable(leaf) and not isinstance(leaf, Tensor) for leaf in leaves_of((args, kwargs))):
                # It calls functions that may use any modules and tensors, as torch's checkpointing does.
                self._note_question(f"passes a function to the autograd function {cls.__name__}")
            function = TorchFunction("function", f"{cls.__qualname__}.apply", original)
            return self._function_call(function, original, args, kwargs)

        def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                return self._module_call(original, module, args, kwargs)

            return call

        opened = checkpoints_opened(self._region) if self._rules.opens_checkpoints else nullcontext()
        with calls_wrapped(wrapper), autograd_functions_wrapped(apply_function), noticed(self._note_question), opened:
            yield

    def _note_question(self, reason: str) -> None:
        """Note that the model's own code read or set state of torch, which a list of calls cannot repeat."""
        if self._sees() and reason:
            self._stack[-1].block(reason)
        elif self._sees():
            self.asks_gradients = True

    def _sees(self) -> bool:
        """Return True if the running code belongs to an opened module."""
        return self.is_open and get_ident() == self._thread

    @contextmanager
    def _region(self) -> Iterator[None]:
        """Return a context for a region of activation checkpointing."""
        if not self._sees():
            yield
            return
        self._regions.append(self._next_region[tuple(self._regions)])
        self._next_region[tuple(self._regions[:-1])] += 1
        try:
            yield
        finally:
            self._regions.pop()

    def _module_call(
        self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        fqn = self._names.get(id(module))
        begins = self.root is None and module is self._model
        if get_ident() != self._thread or fqn is None or not (begins or self.is_open):
            return original(module, *args, **kwargs)
        self.is_open = False  # what follows is not the model's code
        is_whole = self._rules.is_whole(module)
        if not is_whole:
            self._at_boundary()
        objects_given = objects_in((args, kwargs)) if begins else ()
        event, before = self._event_of_call(module, fqn, args, kwargs)
        objects = [(held, self.tensors.template(taken_apart(held))) for held in objects_given]
        self._hooks.append(saved_tensor_hooks())
        around, self.sums = self.sums, Effects()
        self._stack.append(event)
        try:
            self.is_open = not is_whole
            run = self._rules.layer_shapes.get(type(module), original)
            out = run(module, *args, **kwargs)
            self.is_open = False
            if not is_whole:
                self._at_boundary()
        finally:
            self._stack.pop()
            self._hooks.pop()
            effects, self.sums = self.sums, around
            self.is_open = not begins
        self.is_open = False
        self._states[id(module)] = state_of(module)
        self._note_state(event, module, before)
        event.macs = effects.macs + sum(child.macs for child in event.children)
        event.writes = (frozenset(effects.writes.union(*(child.writes[0] for child in event.children))),)
        event.result = self._result_of_module(event, out, is_whole=is_whole)
        event.block(obstacle_of_objects(objects, out, self.tensors.template))
        self.is_open = not begins
        return out

    def _event_of_call(
        self, module: nn.Module, fqn: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Event, dict[str, Any]]:
        """Return the event of a call that begins, and the module's state before it."""
        parent = self._stack[-1] if self._stack else None
        event = Event(fqn, None, None, None, parent, self._keys.next_of(fqn)[1], training=module.training)
        if parent is None:
            self.root = event
            for tensor in tensors_of((args, kwargs)):
                self.tensors.new(tensor, tainted=True)
        # Only the inputs of the model are taken apart: layers may share an object and see each other's changes.
        event.args, event.kwargs = self.tensors.template(
            taken_apart((args, kwargs)) if parent is None else (args, kwargs)
        )
        before = state_of(module)
        if before != self._states[id(module)]:  # calling the module again would not be the same
            event.prepared = first_difference(self._states[id(module)], before)
        event.grad = _is_grad_enabled()
        event.regions = tuple(self._regions)
        event.obstacle = obstacle_of_module(module, args, kwargs)
        if parent is not None:
            parent.children.append(event)
            self._note_surroundings(parent)
            self._note_checkpoint(event, module)
            self._note_dtypes(event, parent)
        return event, before

    def _result_of_module(self, event: Event, out: Any, *, is_whole: bool) -> Any:
        inputs = [leaf for leaf in leaves_of((event.args, event.kwargs)) if isinstance(leaf, Token)]
        is_dynamic = any(token.is_dynamic for token in inputs)

        def value_of(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or self.tensors.knows(leaf):
                return self.tensors.leaf(leaf)
            if not is_whole:
                event.block("makes its result outside of torch functions")
            return self.tensors.new(leaf, tainted=True, dynamic=is_dynamic)

        return map_template(value_of, taken_apart(out))

    def _note_state(self, event: Event, module: nn.Module, before: dict[str, Any]) -> None:
        after = self._states[id(module)]
        if before == after:
            return
        name = first_difference(before, after)
        prefix = f"{event.fqn}." if event.fqn else ""
        event.assigned = frozenset(
            prefix + attribute for attribute in after if before.get(attribute, before) != after[attribute]
        )
        is_number = numbers_in(before) != numbers_in(after)
        if is_number:
            for around in self._stack:  # another module may have read the number, which became a constant
                around.block(f"calls {event.fqn!r}, which assigns its attribute {name!r}")
        is_gone = before.keys() - after.keys()
        if is_number or is_gone or name in module._parameters or name in module._buffers:  # may be in a state dict
            event.block(f"assigns its attribute {name!r}")

    def _note_dtypes(self, event: Event, parent: Event) -> None:
        """Note whether an argument is a dtype (or a limit of it) that the caller read from a tensor or was given."""
        read = self._dtypes[parent]
        if read:
            told = {
                dtype for dtype in read for leaf in leaves_of((event.args, event.kwargs)) if tells_dtype(leaf, dtype)
            }
            event.dtype_bound = bool(told)
            self._dtypes[event].update(told)

    def _note_checkpoint(self, event: Event, module: nn.Module) -> None:
        """Note that the caller runs a layer under activation checkpointing, so that stages do the same."""
        hooks = saved_tensor_hooks()
        if hooks is None or hooks == self._hooks[-1]:
            return
        event.obstacle = "is called under activation checkpointing"
        if not hooks[0].__qualname__.startswith(_torch.CHECKPOINT_HOOK):
            event.unknown = (Unknown("hooks for saved tensors by the code that calls it"),)
        calls = (vars(kind).get("__call__") for kind in type(module).__mro__[: -len(nn.Module.__mro__)])
        event.checkpointed = not any(calls)  # a layer with its own __call__ applies the checkpointing itself

    def _at_boundary(self) -> None:
        """Note that the running module drew from Python's or numpy's generators; whole layers do not."""
        if self._watches_draws and self._generators.moved() and self._stack:
            self._stack[-1].block("draws from Python's or numpy's random numbers")

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._sees() or is_of_checkpointing(func):
            return func(*args, **kwargs)
        if func in self._rules.substitutes:
            return self._substituted(func, args, kwargs)
        if getattr(func, "__name__", "") == "__iter__":
            return iter(self._function_call(torch_function(torch.unbind), torch.unbind, args, kwargs))
        return self._function_call(torch_function(func), func, args, kwargs)

    def _substituted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the substitute of a function; inside it, the function is the original."""
        rules, self._rules = self._rules, self._rules.without(func)
        try:
            with self:
                return rules.substitutes[func](*args, **kwargs)
        finally:
            self._rules = rules

    def _function_call(
        self, function: TorchFunction, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.is_open = False  # looking at tensors is not the model's code
        try:
            return self._noted_call(function, func, args, kwargs)
        finally:
            self.is_open = True

    def _noted_call(
        self, function: TorchFunction, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        name = getattr(func, "__name__", "")
        parent = self._stack[-1]
        templates = self.tensors.template(args), self.tensors.template(kwargs)
        inputs = leaves_of(templates)
        around, self.sums = self.sums, Effects()
        func = self._rules.shapes.get(func, func) if self._on_shapes else func
        try:
            out = func(*args, **kwargs)
        finally:
            effects, self.sums = self.sums, around
        if isinstance(out, Iterator):
            out, function = list(out), TorchFunction("list", function.name)
        tensors = [] if type(out) in _WITHOUT_TENSORS else list(tensors_of(out))
        if not tensors and not effects.writes:
            if isinstance(out, torch.dtype) and out.is_floating_point:
                self._dtypes[parent].add(out)
            self.sums.macs += effects.macs
            name = function.name if function.kind == "get" else name
            if self._on_shapes and is_decision(name, inputs, out):
                self.decides = True
                if self._rules.checks_decisions:
                    parent.children.append(self._decision(function, templates, out))
                    return out
            parent.reads_sizes = parent.reads_sizes or reads_size(name, inputs)
            self.asks_gradients = self.asks_gradients or name in ASKS_GRADIENTS
            parent.block(obstacle_of_reading(name, inputs))
            return out
        event = Event(parent.fqn, function, *templates, parent, grad=_is_grad_enabled(), macs=effects.macs)
        event.training, event.regions = parent.training, tuple(self._regions)
        event.writes = (frozenset(effects.writes),)
        parent.children.append(event)
        self._note_function(event, inputs, parent)
        self._note_dtypes(event, parent)
        tainted = effects.is_random or (function.short_name not in TAKES_SHAPE and any(map(is_tainted, inputs)))
        has_dynamic = any(isinstance(leaf, Token) and leaf.is_dynamic for leaf in inputs)
        dynamic = has_dynamic and (not keeps_first(name) or (isinstance(inputs[0], Token) and inputs[0].is_dynamic))
        self.tensors.taint(effects.writes, tainted)
        event.result = self._result_of_function(out, tainted, dynamic or (tainted and effects.is_dynamic))
        if self._on_shapes and (has_dynamic or effects.is_dynamic):
            self._note_sizes(tensors)
        return out

    def _note_sizes(self, tensors: list[Tensor]) -> None:
        """Note a decision for a tensor whose size depends on values: on shapes these values are known."""
        tokens = [(tensor, token) for tensor in tensors if isinstance(token := self.tensors.leaf(tensor), Token)]
        for tensor, token in tokens:
            if token.is_dynamic:
                self.decides = True
                if self._rules.checks_decisions:
                    token.is_dynamic = False
                    decision = self._decision(torch_function(Tensor.size), ((token,), {}), tuple(tensor.shape))
                    self._stack[-1].children.append(decision)

    def _decision(self, function: TorchFunction, templates: tuple[Any, Any], out: Any) -> Event:
        parent = self._stack[-1]
        event = Event(parent.fqn, function, *templates, parent, result=out, grad=_is_grad_enabled())
        event.training, event.regions, event.is_decision = parent.training, tuple(self._regions), True
        event.writes = (frozenset(),)
        return event

    def _note_function(self, event: Event, inputs: list[Any], parent: Event) -> None:
        assert event.function is not None
        parent.block(obstacle_of_function(event.function, inputs))
        if saved_tensor_hooks() != self._hooks[-1]:
            parent.block("calls functions under activation checkpointing, or saves tensors by hooks")
        self._note_surroundings(parent)

    def _note_surroundings(self, parent: Event) -> None:
        if surroundings() != self._surroundings:
            parent.block("switches autocast, inference mode or the attention backend")

    def _result_of_function(self, out: Any, tainted: bool, dynamic: bool) -> Any:
        def value_of(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return None
            if not self.tensors.knows(leaf):
                return self.tensors.new(leaf, tainted=tainted, dynamic=dynamic and leaf.dim() > 0)
            marker = self.tensors.leaf(leaf)
            if isinstance(marker, Token):
                marker.is_tainted = marker.is_tainted or tainted
            return marker

        return map_template(value_of, out)


class Effects(Costs):
    """The effects of the operators of one call, without the calls inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: set[int] = set()
        self.is_random = self.is_dynamic = False


class Noted:
    """An execution that notes the effects of each operator for the running call."""

    def __init__(self, execution: Execution, tracer: Tracer) -> None:
        self._execution = execution
        self._tracer = tracer

    def run(self, func: Any, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, OpCost]:
        """Run one operator and note its effects."""
        was_open, self._tracer.is_open = self._tracer.is_open, False  # not the model's code
        try:
            out, cost = self._execution.run(func, rule, args, kwargs)
        finally:
            self._tracer.is_open = was_open
        counters = self._tracer.sums
        counters.add(cost)
        if rule.may_write:
            counters.writes.update(map(storage_of, tensors_in(rule.written(args, kwargs))))
        counters.is_random = counters.is_random or rule.is_random
        if rule.needs_values or selects_by_mask(rule, args):
            counters.is_dynamic = True
        return out, cost

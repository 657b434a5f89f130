"""Build the nodes of a ``torch.fx.Graph`` from a record of a forward."""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from keyword import iskeyword
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from modelsummary import _torch
from modelsummary.capture.templates import (
    Attribute,
    BatchSize,
    ModeChoice,
    ObjectState,
    OwnDevice,
    Unknown,
    leaves_of,
    make_object,
)
from modelsummary.errors import TraceError
from modelsummary.fx.codegen import MARK, CheckpointCodeGen
from modelsummary.fx.guards import check_decision, check_input, check_mode
from modelsummary.record.events import Event, Record, TorchFunction, Value, values_in
from modelsummary.record.openings import Openings

__all__ = ["Apply", "GraphBuilder"]

# Operators are recorded as tensor methods; these functions make the generated code read like the model's.
_OPERATORS: dict[str, Callable[..., Any]] = {
    name: getattr(operator, name)
    for name in "add sub mul matmul eq ne gt ge lt le getitem setitem neg pow mod floordiv".split()
}
_OPERATORS |= {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
_OPERATORS |= {"invert": operator.invert, "div": operator.truediv}
_OPERATORS |= {f"{name}_": getattr(operator, f"i{name}") for name in ("add", "sub", "mul")}
_OPERATORS |= {f"i{name}": getattr(operator, f"i{name}") for name in "add sub mul matmul truediv floordiv".split()}
_REFLECTED = {f"r{name}": _OPERATORS[name] for name in ("sub", "pow", "matmul", "floordiv", "add", "mul")}
_REFLECTED["rtruediv"] = _REFLECTED["rdiv"] = operator.truediv
# Constants that can be written in the generated code; others become attributes.
_SHOWN: tuple[type, ...] = (int, float, bool, str, bytes, complex, type(None), range, type(Ellipsis), enum.Enum)
_SHOWN += (torch.dtype, torch.device, torch.layout, torch.memory_format)


class GraphBuilder:
    """A builder that turns the record of a model into a graph.

    Args:
        is_leaf: function that returns True for a module that stays one node.
        parameters: name of each argument that stays an input -> its template in the record.
        marks_checkpoints: mark nodes with their regions of activation checkpointing.

    Attributes:
        graph: the graph.
        origins: node -> FQN and call index of the module that it calls, or of the module whose forward called it.
        constants: name -> tensor or object that ``get_attr`` nodes read besides the model's own.
        kept_whole: FQNs of modules that are one node because they cannot be written as a list of calls.

    Raises:
        TraceError: the model cannot be written as a graph.
    """

    def __init__(
        self,
        model: nn.Module,
        record: Record,
        is_leaf: Callable[[nn.Module], bool],
        parameters: Mapping[str, Any],
        *,
        marks_checkpoints: bool,
    ) -> None:
        self._model, self._record, self._is_leaf = model, record, is_leaf
        self._marks_checkpoints = marks_checkpoints
        self._openings = Openings(record.root)
        reason = self._openings.why_closed(record.root)
        if reason and (record.root.children or record.root.obstacle):
            raise TraceError(f"{reason}; no graph can do the same")
        self.graph = Graph()
        self.graph.set_codegen(CheckpointCodeGen())
        self.origins: dict[Node, tuple[str, int]] = {}
        self.constants: dict[str, Any] = {}
        self.kept_whole: set[str] = set()
        self._nodes: dict[Value, Node] = {}
        self._made: dict[Any, Node] = {}  # sizes, modes, the device, tensors of the model
        self._here: tuple[str, int] = ("", 0)
        self._regions: tuple[int, ...] = ()
        self._used = set(values_in(record.root.result))
        self._opened: list[Event] = []
        self._no_grad: Node | None = None  # holds the grad mode from before gradients were disabled
        self._build(parameters)

    def _build(self, parameters: Mapping[str, Any]) -> None:
        root = self._record.root
        events = list(self._events(root))
        for event in events:
            self._used.update(values_in((event.args, event.kwargs)))
        top: Node | None = None
        for name in parameters:
            top = self._node("placeholder", name)
            self._made["placeholder", name] = top
        for name, template in parameters.items():
            self._bind(self._made["placeholder", name], template)
        # the inputs' own nodes: an in-place call rebinds its value to a later node
        self._input_nodes = dict(self._nodes)
        self._top = next(iter(reversed(self.graph.nodes))) if top is not None else None
        self._guard(events)
        for event in events:
            self._here = event.key if event.is_module else (event.fqn, _call_of(event))
            self._regions = event.regions if self._marks_checkpoints else ()
            self._switch_gradients(event)
            node = self._call(event)
            if event.is_decision:
                self._function(check_decision, node, self._argument(event.result, event))
            else:
                self._bind(node, event.result)
        self._here, self._regions = ("", 0), ()
        self._switch_gradients(None)
        self.graph.output(self._argument(root.result, root))
        self.origins[self.graph.output_node()] = self._here

    def _events(self, parent: Event) -> Iterator[Event]:
        """Yield the calls that become nodes: functions, leaves, and modules that cannot be opened."""
        self._opened.append(parent)
        for event in parent.children:
            if self._is_opened(event):
                yield from self._events(event)
            else:
                yield event

    def _is_opened(self, event: Event) -> bool:
        if not event.is_module or self._is_leaf(self._model.get_submodule(event.fqn)):
            return False
        if not self._openings.can_open(event):
            self.kept_whole.add(event.fqn)
            return False
        return True

    def _node(self, op: str, target: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Node:
        if op in ("call_module", "get_attr") and any(map(iskeyword, target.split("."))):
            raise TraceError(f"{target!r} has a keyword of Python in its name, which code cannot contain; rename it")
        node = self.graph.create_node(op, target, args, kwargs or {})
        self.origins[node] = self._here
        if self._regions:
            node.meta[MARK] = self._regions
        return node

    def _function(self, function: Callable[..., Any], *args: Any) -> Node:
        return self._node("call_function", function, args)

    # ------------------------------------------------------------------------------------------- calls

    def _call(self, event: Event) -> Node:
        args = tuple(self._argument(argument, event) for argument in (*event.args, *event.unknown))
        kwargs = {name: self._argument(kwarg, event) for name, kwarg in event.kwargs.items()}
        function = event.function
        if function is None:
            return self._node("call_module", event.fqn, args, kwargs)
        if function.kind == "get":
            return self._function(getattr, args[0], function.name)
        name = function.name.rpartition(".")[2]
        if function.kind == "method":
            bare = name.strip("_") if name.startswith("__") else name
            if not kwargs and bare in _REFLECTED and len(args) == 2:
                return self._function(_REFLECTED[bare], args[1], args[0])
            if not kwargs and bare in _OPERATORS and len(args) == _arity(bare):
                return self._function(_OPERATORS[bare], *args)
            if isinstance(args[0], Node):
                return self._node("call_method", name, args, kwargs)
        return self._node("call_function", _target(function), args, kwargs)

    def _switch_gradients(self, event: Event | None) -> None:
        """Add nodes that disable gradients for calls recorded without them, and restore the mode afterwards."""
        is_off = event is not None and not event.grad
        if is_off and self._no_grad is None:
            self._no_grad = self._function(torch.is_grad_enabled)
            self._function(_torch.set_grad_enabled, False)
        elif not is_off and self._no_grad is not None:
            self._function(_torch.set_grad_enabled, self._no_grad)
            self._no_grad = None

    def _bind(self, node: Node, template: Any) -> None:
        """Map the values in a result or an argument to nodes that read them from ``node``."""
        if isinstance(template, Value):
            self._nodes[template] = node
            return
        accessor: Callable[..., Any] = operator.getitem
        parts: Iterable[tuple[Any, Any]] = ()
        if isinstance(template, ObjectState):
            accessor, parts = getattr, template.attributes.items()
        elif isinstance(template, (tuple, list)):
            parts = enumerate(template)
        elif isinstance(template, dict):
            parts = template.items()
        elif dataclasses.is_dataclass(template):
            accessor = getattr
            parts = [(field.name, getattr(template, field.name)) for field in dataclasses.fields(template)]
        is_unpacked = node.op == "call_module" and isinstance(template, tuple)
        for key, inner in parts:
            if is_unpacked or not self._used.isdisjoint(values_in(inner)):
                self._bind(self._function(accessor, node, key), inner)

    # --------------------------------------------------------------------------------------- arguments

    def _argument(self, template: Any, event: Event) -> Any:
        """Return a template with nodes in place of values and markers."""
        kind = type(template)
        if kind in (tuple, list):
            return kind([self._argument(inner, event) for inner in template])
        if kind is torch.Size:
            return tuple([self._argument(inner, event) for inner in template])
        if kind is dict:
            return {name: self._argument(inner, event) for name, inner in template.items()}
        if kind is slice:
            return slice(*(self._argument(bound, event) for bound in (template.start, template.stop, template.step)))
        if isinstance(template, (Value, Attribute, BatchSize, ModeChoice, OwnDevice)):
            return self._leaf(template, event)
        if isinstance(template, Unknown):
            raise TraceError(
                f"{event.name or 'the model'} passes on or returns {template.reason} which a graph cannot express"
            )
        if isinstance(template, ObjectState):
            return self._function(
                make_object, self._constant(template.kind), self._argument(template.attributes, event)
            )
        if dataclasses.is_dataclass(template) and not isinstance(template, type) and values_in(template):
            fields = {field.name: getattr(template, field.name) for field in dataclasses.fields(template) if field.init}
            fields = {name: self._argument(value, event) for name, value in fields.items() if value is not None}
            return self._node("call_function", kind, (), fields)
        if isinstance(template, tuple) and hasattr(template, "_fields"):
            return self._function(kind, *(self._argument(inner, event) for inner in template))
        if kind.__module__ == "torch.return_types":
            return self._function(kind, [self._argument(inner, event) for inner in template])
        if isinstance(template, dict) and hasattr(template, "move_to_end"):
            return self._function(kind, [(name, self._argument(inner, event)) for name, inner in template.items()])
        held = leaves_of(template)
        if held != [template] and any(isinstance(leaf, (Value, Attribute)) for leaf in held):
            raise TraceError(f"{event.name or 'the model'} passes on or returns a {kind.__name__} that holds tensors")
        return self._constant(template)

    def _leaf(self, leaf: Any, event: Event) -> Any:
        if isinstance(leaf, Value):
            return self._nodes[leaf]
        if isinstance(leaf, Attribute):
            return self._once((leaf, self._regions), lambda: self._node("get_attr", leaf.fqn))
        if isinstance(leaf, BatchSize):
            return self._size(leaf)
        if isinstance(leaf, OwnDevice):
            return self._device()
        scope = event.fqn if not event.is_module else event.parent.fqn if event.parent is not None else ""
        training = self._mode(scope)
        if (leaf.in_train, leaf.in_eval) == (True, False):
            return training
        choices = self._constant(leaf.in_eval), self._constant(leaf.in_train)
        return self._once((leaf, scope, self._regions), lambda: self._function(operator.getitem, choices, training))

    def _once(self, key: Any, make: Callable[[], Node]) -> Node:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _at_top(self, make: Callable[[], Node]) -> Node:
        """Make a node right after the inputs, outside of all modules and regions."""
        around = self._here, self._regions
        self._here, self._regions = ("", 0), ()
        with self.graph.inserting_after(self._top):
            self._top = make()
        self._here, self._regions = around
        return self._top

    def _mode(self, scope: str) -> Node:
        fqn = f"{scope}.training" if scope else "training"
        return self._once(("mode", scope), lambda: self._at_top(lambda: self._node("get_attr", fqn)))

    def _device(self) -> Any:
        value = next(iter(self._input_nodes.values()), None)
        if value is None:
            raise TraceError("the forward reads the model's device, but no input has it; pass a tensor in meta_args")
        return self._once("device", lambda: self._at_top(lambda: self._function(getattr, value, "device")))

    def _size(self, size: BatchSize) -> Any:
        """Return the node that computes an integer from the batch size."""
        if size.factor == 0:
            return size.offset
        node = self._once("batch", self._batch_size)
        if size.factor != 1:
            node = self._computed(operator.mul, node, size.factor)
        if size.offset:
            node = self._computed(operator.add, node, size.offset)
        return self._computed(operator.floordiv, node, size.divisor) if size.divisor != 1 else node

    def _computed(self, function: Callable[..., Any], *args: Any) -> Node:
        """Return the node at the top that computes this, made once."""
        return self._once((function, args), lambda: self._at_top(lambda: self._function(function, *args)))

    def _batch_size(self) -> Node:
        value = next((candidate for candidate in self._input_nodes if candidate.batch is not None), None)
        if value is None or value.batch is None:
            raise TraceError("a size follows the batch, but no input has the batch size")
        dim, factor = value.batch
        node = self._input_nodes[value]
        size = self._at_top(lambda: self._node("call_method", "size", (node, dim)))
        return size if factor == 1 else self._computed(operator.floordiv, size, factor)

    def _constant(self, constant: Any) -> Any:
        if isinstance(constant, (tuple, list)) and type(constant) in (tuple, list):
            return type(constant)([self._constant(inner) for inner in constant])
        if isinstance(constant, dict) and type(constant) is dict:
            return {name: self._constant(inner) for name, inner in constant.items()}
        if isinstance(constant, _SHOWN):
            return constant
        return self._once(("constant", id(constant), self._regions), lambda: self._held(constant))

    def _held(self, constant: Any) -> Node:
        name = next((name for name, value in self.constants.items() if value is constant), None)
        if name is None:
            kind = "tensor" if isinstance(constant, Tensor) else "object"
            name = f"_{kind}_constant{len(self.constants)}"
            self.constants[name] = constant
        return self._node("get_attr", name)

    # ------------------------------------------------------------------------------------------ guards

    def _guard(self, events: list[Event]) -> None:
        """Add checks of the mode, sizes and dtypes that the graph was made for, at its beginning."""
        record = self._record
        if record.no_other_mode:
            self._function(check_mode, self._mode(""), self._model.training)
        smallest = record.smallest_batch if record.batch_size is not None else 1
        reads_sizes = record.batch_size is None or any(event.reads_sizes for event in self._opened)
        is_dtype_bound = any(event.dtype_bound for event in events)
        for value, node in self._input_nodes.items():
            sizes = None
            if reads_sizes or smallest > 1:
                batch_dim = value.batch[0] if value.batch is not None and record.batch_size is not None else None
                sizes = tuple(None if dim == batch_dim else size for dim, size in enumerate(value.shape))
            dtype = value.dtype if is_dtype_bound and value.dtype.is_floating_point else None
            if sizes is not None or dtype is not None:
                more = (dtype, smallest) if smallest > 1 else (dtype,) if dtype is not None else ()
                self._function(check_input, node, sizes, *more)


def _call_of(event: Event) -> int:
    """Return the call index of the module whose forward made this call."""
    return event.parent.call_index if event.parent is not None else 0


def _arity(name: str) -> int:
    return 1 if name in ("neg", "invert") else 3 if name == "setitem" else 2


class Apply:
    """The ``apply`` of an autograd function, named after its class: ``torch.fx`` takes every ``apply`` for torch's."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.__name__ = f"{function.__name__}_apply"
        self.__module__ = function.__module__

    def __call__(self, *args: Any) -> Any:
        """Call the function's ``apply``."""
        return self.function.apply(*args)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Apply) and other.function is self.function

    def __hash__(self) -> int:
        return hash(self.function)

    def __reduce__(self) -> Any:
        return Apply, (self.function,)


def _target(function: TorchFunction) -> Any:
    owner = getattr(function.function, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return Apply(owner)
    return function.function

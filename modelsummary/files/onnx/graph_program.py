"""Turn an ONNX graph into a ``Program``: tensors with shapes, operators with attributes, scopes and costs."""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from modelsummary.errors import ModelFileError, ShapeMismatchError
from modelsummary.files.budget import Budget
from modelsummary.files.onnx.attributes import attributes_of, input_names, value_of
from modelsummary.files.onnx.checks import inputs_of, subgraphs_of
from modelsummary.files.onnx.dtypes import Element, element_of, is_weight_type
from modelsummary.files.onnx.known_values import shown_value
from modelsummary.files.onnx.node_costs import FORMULAS, PER_INPUT, PER_OUTPUT, Called, looks_like_product
from modelsummary.files.onnx.node_types import RUNS, TAKEN
from modelsummary.files.onnx.scopes import class_of_model, scopes_of
from modelsummary.files.program import Operation, Program, Scope, Tensor, count_one_branch
from modelsummary.formulas.expressions import dimension

__all__ = ["program_of"]

_ONNX = ("", "ai.onnx")
_NO_ELEMENT = Element("?", 0)
_LONGEST_NAME = 400
_NO_SIZE = " (size unknown)"
_LOOKS_AT_SHAPES = frozenset({"Shape", "Size"})
_GATHERS = frozenset({"Gather", "GatherElements", "GatherND", "Slice"})


def program_of(model: Any, called: Mapping[str, str], copies: Mapping[str, str], budget: Budget) -> Program:
    """Return the program of a model whose shapes were inferred.

    Args:
        called: path of each call of a function -> the name of the function, as ``inline_functions`` returned it.
        copies: name of a weight -> name of the weight that it repeats.
    """
    return _Builder(model, called, copies, budget).built()


class _Names(NamedTuple):
    """The tensors that the names in a graph refer to, and the values of small constants."""

    tensors: ChainMap[str, Tensor]
    values: ChainMap[str, Any]

    @property
    def is_empty(self) -> bool:
        """True if no name is known yet."""
        return not (self.tensors or self.values)


class _Builder:
    """A program under construction."""

    def __init__(self, model: Any, called: Mapping[str, str], copies: Mapping[str, str], budget: Budget) -> None:
        self.budget = budget
        self.graph = model.graph
        self.called = called
        self.copies = copies
        self.versions = {"" if opset.domain in _ONNX else opset.domain: opset.version for opset in model.opset_import}
        self.operations: list[Operation] = []
        self.constants: Counter[str] = Counter()
        self.taken: dict[str, int] = {}  # name -> number of operators with it
        self.open: dict[str, None] = {}
        self.undecided: list[str] = []  # names of the If whose cost depends on values
        dims = [dim for value in self.graph.input for dim in value.type.tensor_type.shape.dim]
        self.can_bind = not all(dim.HasField("dim_value") for dim in dims)

    def built(self) -> Program:
        graph = self.graph
        names = self._names(graph, _Names(ChainMap(), ChainMap()))
        inputs = [names.tensors[name] for name in inputs_of(graph)]
        for tensor in inputs:
            tensor.kind = "input"
        for copy, original in self.copies.items():
            names.tensors[copy].original = names.tensors[original]
        self._add(graph, names, (), 1)
        self.operations = _with_copies_beside_users(self.operations)
        used = {tensor for operation in self.operations for tensor in operation.inputs}
        unused = [
            tensor for tensor in names.tensors.values() if tensor.kind in ("parameter", "buffer") and tensor not in used
        ]
        outputs = [names.tensors[value.name] for value in graph.output]
        name = class_of_model(graph.node[0]) if graph.node else ""
        return Program(
            name or graph.name or "graph",
            inputs,
            outputs,
            self.operations,
            unused,
            constants=self.constants,
            notes=self._notes(),
        )

    def _notes(self) -> list[str]:
        notes = []
        if self.open:
            listed = ", ".join(name[:40] for name in list(self.open)[:4])
            notes.append(f"open dimensions ({listed}) count as 1: give sizes of the inputs to bind them")
        if self.undecided:
            listed = ", ".join(repr(name[:80]) for name in self.undecided[:4])
            notes.append(f"values decide which branch of {listed} runs: the branch with more multiply-adds counts")
        executed = [operation for operation in self.operations if operation.executed]
        if any((operation.uncounted or "").endswith(_NO_SIZE) for operation in executed):
            without = [
                operation for operation in executed if any(tensor.size is None for tensor in operation.outputs)
            ] or executed
            first = without[0]
            inside = [operation for operation in without if any(scope.key == first.name for scope in operation.scopes)]
            first = inside[0] if inside else first  # inside a branch or loop, not the If or Loop
            notes.append(f"sizes are unknown from {first.name[:80]!r} ({first.op_type}) on")
        return notes + _notes_on_weights(self.operations)

    # ------------------------------------------------------------------------------------------ tensors

    def _names(self, graph: Any, around: _Names) -> _Names:
        names = around if around.is_empty else _Names(around.tensors.new_child(), around.values.new_child())
        tensors = names.tensors.maps[0]
        for weight in graph.initializer:
            tensors[weight.name] = _constant(weight, weight.name)
            names.values[weight.name] = shown_value(weight)
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.name not in tensors:  # older versions list weights among the inputs
                tensors[value.name] = self._declared(value)
        return names

    def _declared(self, value: Any) -> Tensor:
        kind = value.type.WhichOneof("value")
        declared = value.type.sparse_tensor_type if kind == "sparse_tensor_type" else value.type.tensor_type
        element = element_of(declared.elem_type) or _NO_ELEMENT
        if not declared.HasField("shape"):
            return Tensor(value.name, None, None, *element)
        shape: list[int | str] = []
        for dim in declared.shape.dim:
            if dim.dim_value or dim.HasField("dim_value"):
                shape.append(dim.dim_value)
            else:
                shape.append(dim.dim_param or "?")
        names = [dim for dim in shape if isinstance(dim, str)]
        if names and not self.can_bind:  # values decide
            return Tensor(value.name, tuple(shape), None, *element)
        self.open |= dict.fromkeys(names)
        return Tensor(value.name, tuple(shape), tuple(1 if isinstance(dim, str) else dim for dim in shape), *element)

    # ---------------------------------------------------------------------------------------- operators

    def _add(self, graph: Any, names: _Names, scopes: tuple[Scope, ...], repeats: int) -> None:
        for node in graph.node:
            if node.op_type == "Constant" and node.domain in _ONNX:
                self._add_constant(node, names)
                continue
            inputs = [names.tensors.get(name) for name in node.input]
            outputs = [names.tensors.setdefault(name, _unknown(name)) if name else None for name in node.output]
            self.budget.spend(len(node.input) + len(node.output) + len(node.attribute))
            version = self.versions.get("" if node.domain in _ONNX else node.domain, 1)
            _sort_weights(node, inputs, input_names(node.op_type, version, node.domain))
            name = self._unique(node.name or node.op_type)
            operation = Operation(
                name,
                node.op_type if node.domain in _ONNX else f"{node.domain}.{node.op_type}",
                (*scopes, *scopes_of(node, node.name, self.called)),
                [tensor for tensor in inputs if tensor is not None],
                [tensor for tensor in outputs if tensor is not None],
                attributes_of(node, version, names.values),
                repeats=repeats,
                is_free=node.op_type in _LOOKS_AT_SHAPES,
                gathers=node.op_type in _GATHERS,
            )
            _check_inner(operation, inputs)
            _count(operation, inputs, outputs)
            _describe_input(operation, inputs)
            self.operations.append(operation)
            subgraphs = subgraphs_of(node)
            if subgraphs:
                self._add_subgraphs(operation, node, subgraphs, names)

    def _unique(self, name: str) -> str:
        name = base = name[:_LONGEST_NAME]
        while name in self.taken:
            self.taken[base] += 1
            name = f"{base}_{self.taken[base]}"
        self.taken[name] = 1
        return name

    def _add_constant(self, node: Any, names: _Names) -> None:
        self.constants["Constant"] += 1
        for attribute in node.attribute[:1]:
            for name in node.output:
                if attribute.HasField("t"):
                    names.tensors[name], names.values[name] = _constant(attribute.t, name), shown_value(attribute.t)
                    continue
                names.values[name] = value_of(attribute)
                names.tensors.setdefault(name, _unknown(name)).kind = "buffer"

    def _add_subgraphs(self, operation: Operation, node: Any, subgraphs: Mapping[str, Any], names: _Names) -> None:
        """Add the operators of an If, Loop or Scan below it."""
        operation.is_free = True
        marks = {entry.key: entry.value for entry in node.metadata_props if entry.key in (RUNS, TAKEN)}
        times = 1 if operation.op_type == "If" else int(marks[RUNS]) if RUNS in marks else None
        if times is None:
            operation.uncounted = f"{operation.op_type} (unknown number of runs)"
        bodies: dict[str, list[Operation]] = {}
        for key, graph in subgraphs.items():
            start = len(self.operations)
            around = Scope(operation.name, operation.name, operation.op_type)
            body = Scope(f"{operation.name}.{key}", f"{operation.name}.{key}", key)
            inside = self._names(graph, names)
            with self.budget.enter():
                self._add(graph, inside, (*operation.scopes, around, body), operation.repeats * (times or 1))
            bodies[key] = self.operations[start:]
        if operation.op_type == "If":
            operation.attributes["counted"], is_undecided = count_one_branch(bodies, marks.get(TAKEN))
            if is_undecided:
                self.undecided.append(operation.name)


def _with_copies_beside_users(operations: Sequence[Operation]) -> list[Operation]:
    """Return the operators with an Identity of a weight before the first operator that takes it, in the same module.

    Exporters put the copies of weights that several layers share at the beginning of the graph, outside all modules.
    """
    first_user: dict[Tensor, int] = {}
    copies: dict[Tensor, int] = {}  # -> the Identity that makes it
    for index, operation in enumerate(operations):
        for tensor in operation.inputs:
            first_user.setdefault(tensor, index)
        if operation.op_type == "Identity" and all(
            tensor.kind in ("parameter", "buffer") or tensor in copies for tensor in operation.inputs
        ):
            copies |= dict.fromkeys(operation.outputs, index)
    anchors = list(range(len(operations)))
    for index in reversed(copies.values()):
        operation = operations[index]
        users = [first_user[tensor] for tensor in operation.outputs if tensor in first_user]
        scopes = operations[users[0]].scopes if users else ()
        is_in_subgraph = any(scope.class_name in ("If", "Loop", "Scan") for scope in scopes)
        if users and scopes[: len(operation.scopes)] == operation.scopes and not is_in_subgraph:
            anchors[index], operation.scopes = anchors[users[0]], scopes
    return [operations[index] for index in sorted(range(len(operations)), key=lambda index: anchors[index])]


def _notes_on_weights(operations: Sequence[Operation]) -> list[str]:
    """Return why the file stores other weights than the model has."""
    notes = []
    copies = {tensor for operation in operations for tensor in operation.inputs if tensor.original is not None}
    if copies:
        elements = sum(tensor.numel for tensor in copies)
        notes.append(f"{len(copies)} weights with {elements:,} elements repeat others, which count once")
    folded = sum(_has_norm(operation) for operation in operations)
    if folded:
        notes.append(f"{folded} norms are in the weights of convolutions: the model's own parameters differ")
    return notes


def _has_norm(operation: Operation) -> bool:
    """Return True if an exporter multiplied a BatchNorm into the weights of a convolution."""
    if operation.op_type not in ("Conv", "ConvTranspose") or len(operation.inputs) < 2:
        return False
    in_norm = bool(operation.scopes) and "BatchNorm" in operation.scopes[-1].class_name
    return in_norm or operation.inputs[1].name.startswith("onnx::Conv_")


def _unknown(name: str) -> Tensor:
    return Tensor(name, None, None, *_NO_ELEMENT)


def _constant(proto: Any, name: str) -> Tensor:
    """Return a weight: a parameter if it has a dimension and a trainable or quantized type, else a buffer."""
    element, dims = element_of(proto.data_type) or _NO_ELEMENT, tuple(proto.dims)
    is_parameter = is_weight_type(element) and bool(dims)
    return Tensor(name, dims, dims, *element, "parameter" if is_parameter else "buffer", is_parameter)


def _sort_weights(node: Any, inputs: Sequence[Tensor | None], names: Sequence[str]) -> None:
    """Turn running statistics, scales and zero points from parameters into buffers."""
    for position, tensor in enumerate(inputs):
        name = names[position] if position < len(names) else ""
        is_statistic = node.op_type == "BatchNormalization" and position in (3, 4)
        is_helper = is_statistic or name.endswith(("_scale", "_zero_point"))
        if tensor is not None and tensor.kind == "parameter" and is_helper:
            tensor.kind, tensor.trainable = "buffer", False


def _describe_input(operation: Operation, inputs: Sequence[Tensor | None]) -> None:
    """Add kernel and input size of a convolution to its attributes."""
    if operation.op_type not in ("Conv", "ConvTranspose", "ConvInteger") or len(inputs) < 2:
        return
    data, weight = inputs[:2]
    if weight is not None and weight.size is not None and "kernel_shape" not in operation.attributes:
        operation.attributes["kernel_shape"] = list(weight.size[2:])
    if data is not None and data.shape is not None:
        names = (
            "channel",
            *(("width",) if len(data.shape) == 3 else ("depth", "height", "width")[-len(data.shape) + 2 :]),
        )
        operation.attributes |= dict(zip(names, data.shape[1:], strict=False))


def _check_inner(operation: Operation, inputs: Sequence[Tensor | None]) -> None:
    """Check that the dimensions a product sums over are equal; onnx does not check these operators."""
    if operation.op_type not in ("Conv", "Gemm") or len(inputs) < 2:
        return
    left, right = ((tensor.shape if tensor is not None else None) for tensor in inputs[:2])
    if not left or not right or len(left) < 2 or len(right) < 2:
        return
    facts = operation.attributes
    if operation.op_type == "Conv":
        groups = facts.get("group", 1)
        inner: tuple[Any, Any] = left[1], right[1] * groups if type(right[1]) is type(groups) is int else "?"
    else:
        inner = left[0 if facts.get("transA") else 1], right[1 if facts.get("transB") else 0]
    if isinstance(inner[0], int) and isinstance(inner[1], int) and inner[0] != inner[1]:
        sizes = f"{list(left)} and {list(right)}"
        raise ShapeMismatchError(f"its shapes do not fit: {operation.op_type} {operation.name[:80]!r} has {sizes}")


def _count(operation: Operation, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None]) -> None:
    """Set multiply-adds of one operator as a number and, if dimensions are open, as an expression."""
    op_type, times = operation.op_type, operation.repeats
    formula = FORMULAS.get(op_type)
    if formula is None:
        domain, _, name = op_type.rpartition(".")
        operation.uncounted = op_type if looks_like_product(domain, name) else None
    else:
        try:
            sizes = Called(_sizes(inputs), _sizes(outputs), operation.attributes)
            operation.macs = times * int(formula(sizes))
            if any(
                isinstance(dim, str)
                for tensor in (*inputs, *outputs)
                if tensor is not None
                for dim in tensor.shape or ()
            ):
                symbols = Called(_symbols(inputs), _symbols(outputs), operation.attributes)
                operation.macs_expr = times * formula(symbols)
        except (
            TypeError,
            ValueError,
            IndexError,
            KeyError,
            AttributeError,
        ):  # a size is unknown, or the formula does not cover the call
            is_unknown = any(tensor is not None and tensor.size is None for tensor in (*inputs, *outputs))
            operation.uncounted = op_type + _NO_SIZE if is_unknown else op_type
        if operation.macs < 0:
            facts = str(operation.attributes)[:80]
            raise ModelFileError(f"{op_type} {operation.name[:80]!r} has attributes that no runtime takes: {facts}")
    counted = outputs if op_type in PER_OUTPUT else inputs if op_type in PER_INPUT else ()
    if counted and counted[0] is not None:
        operation.elementwise_ops = times * counted[0].numel


def _sizes(tensors: Sequence[Tensor | None]) -> list[tuple[int, ...] | None]:
    return [None if tensor is None else tensor.size for tensor in tensors]


def _symbols(tensors: Sequence[Tensor | None]) -> list[tuple[Any, ...] | None]:
    """Return sizes with a sympy expression for each open dimension."""
    shapes = [None if tensor is None else tensor.shape for tensor in tensors]
    return [
        None if shape is None else tuple(dimension(dim) if isinstance(dim, str) else dim for dim in shape)
        for shape in shapes
    ]

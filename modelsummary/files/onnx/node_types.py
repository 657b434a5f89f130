"""Infer the types of all tensors of an ONNX model, operator by operator, with the values that decide on sizes.

onnx's own inference of a whole graph follows sizes through sums, but not through divisions, into branches, or past
operators of onnxruntime. Here each operator is inferred alone, with the values of its small inputs.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any

from modelsummary.errors import ModelFileError, ShapeMismatchError
from modelsummary.files.budget import Budget
from modelsummary.files.onnx.attributes import attributes_of, schema_of
from modelsummary.files.onnx.checks import quoted, subgraphs_of
from modelsummary.files.onnx.contrib_types import ALIKE, RULES, Kind
from modelsummary.files.onnx.known_values import computed, constant_value
from modelsummary.files.onnx.reading import NODE_STEPS, import_onnx

__all__ = ["RUNS", "TAKEN", "infer_nodes"]

RUNS, TAKEN = "modelsummary.runs", "modelsummary.taken"  # marks on a node: iterations of a Loop, branch of an If
_ONNX = ("", "ai.onnx")

Types = ChainMap[str, Any]
Values = ChainMap[str, Any]


def infer_nodes(
    model: Any, opsets: Mapping[str, int], values: Mapping[str, Any], graph_types: Mapping[str, Any], budget: Budget
) -> None:
    """Write the types of all results into the ``value_info`` of their graphs, and mark ``If`` and ``Loop``.

    Args:
        model: a ``ModelProto``, which is changed.
        opsets: domain -> version of its operators.
        values: name -> array of the inputs whose values are given.
        graph_types: name -> ``TypeProto`` from inference of the whole graph; it fills in dimensions that inference of
            the single operator leaves open.
        budget: what reading the file may cost; bodies of loops are visited more than once.

    Raises:
        ModelFileError: an operator cannot have inputs of these types.
    """
    _Pass(opsets, graph_types, budget).graph(model.graph, ChainMap(), ChainMap(dict(values)), {})


class _Pass:
    """One pass over all graphs."""

    def __init__(self, opsets: Mapping[str, int], graph_types: Mapping[str, Any], budget: Budget) -> None:
        self.onnx = import_onnx()
        self.opsets = opsets
        self.graph_types = graph_types
        self.imports = [self.onnx.helper.make_opsetid(domain, version) for domain, version in opsets.items()]
        self.budget = budget
        self.protos: dict[int, Any] = {}  # identity of an array -> its TensorProto, and the array, which keeps it alive

    def graph(self, graph: Any, around: Types, values: Values, inputs: Mapping[str, Any]) -> Types:
        """Infer the types of a graph; return them by name.

        Args:
            graph: the graph, whose ``value_info`` is replaced.
            around: types in the graphs around it.
            values: known values by name; computed values are added.
            inputs: types of the graph's inputs that the caller knows; others are as declared.
        """
        types = around.new_child()
        is_outer = not around.maps[0] and len(around.maps) == 1
        for tensor in graph.initializer:
            types[tensor.name] = self.onnx.helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
            values[tensor.name] = constant_value(tensor)
        declared = {value.name: value.type for value in graph.value_info} if is_outer else {}
        for value in graph.input:
            if value.name not in types.maps[0]:
                types[value.name] = inputs.get(value.name, value.type)
                values.setdefault(value.name, None)
        for node in graph.node:
            self.budget.spend(NODE_STEPS)
            self._node(node, types, values)
            for name in filter(None, node.output):
                types[name] = _merged(types.maps[0].get(name), self.graph_types.get(name) or declared.get(name))
        self._write(graph, types)
        return types

    def _write(self, graph: Any, types: Types) -> None:
        """Replace the declared types of results by the inferred ones."""
        outputs = {output.name for output in graph.output}
        for output in graph.output:
            if output.name in types and types[output.name] is not None:
                output.type.CopyFrom(
                    _merged(types[output.name], output.type if output.name in self.graph_types else None)
                )
        del graph.value_info[:]
        for node in graph.node:
            for name in node.output:
                if name and name not in outputs and types.get(name) is not None:
                    graph.value_info.add(name=name).type.CopyFrom(types[name])

    # ----------------------------------------------------------------------------------------- operators

    def _node(self, node: Any, types: Types, values: Values) -> None:
        for name in filter(None, node.output):  # another branch may define the same name
            types[name], values[name] = None, None
        if node.domain in _ONNX and node.op_type == "If":
            self._if(node, types, values)
            return
        if node.domain in _ONNX and node.op_type in ("Loop", "Scan"):
            self._loop(node, types, values)
            return
        if node.domain in _ONNX and node.op_type == "Constant":
            self._constant(node, types, values)
        refused = None
        try:
            for name, result_type in self._inferred(node, types, values).items():
                types[name] = result_type
        except ModelFileError as error:  # ignored if the result can be computed anyway
            refused = error
        if node.domain in _ONNX and node.op_type != "Constant":
            sizes = {name: _size(types.get(name)) for name in node.input}
            for name, value in computed(node, values, sizes, self.opsets).items():
                values[name], refused = value, None
                types[name] = self._type_of(value) if types[name] is None else types[name]
        if refused is not None:
            raise refused

    def _constant(self, node: Any, types: Types, values: Values) -> None:
        for attribute in node.attribute:
            if attribute.HasField("t") and node.output:
                tensor = attribute.t
                values[node.output[0]] = constant_value(tensor)
                types[node.output[0]] = self.onnx.helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
            elif attribute.name in ("value_int", "value_ints", "value_float", "value_floats"):
                import numpy as np

                kind = np.int64 if "int" in attribute.name else np.float32
                values[node.output[0]] = np.array(self.onnx.helper.get_attribute_value(attribute), kind)

    def _type_of(self, value: Any) -> Any:
        return self.onnx.helper.make_tensor_type_proto(
            self.onnx.helper.np_dtype_to_tensor_dtype(value.dtype), list(value.shape)
        )

    def _inferred(self, node: Any, types: Types, values: Values) -> dict[str, Any]:
        """Return name -> type of the results of one operator; unknown results are left out."""
        full = node.op_type if node.domain in _ONNX else f"{node.domain}.{node.op_type}"
        if full in RULES:
            return self._by_rule(full, node, types)
        if full in ALIKE:
            return self._by_another(full, node, types)
        schema = self._schema(node)
        if schema is None or any(name and types.get(name) is None for name in node.input):
            return {}
        data = {name: self._proto(values[name]) for name in node.input if name and values.get(name) is not None}
        input_types = {name: types[name] for name in node.input if name}
        try:
            result_types = self.onnx.shape_inference.infer_node_outputs(
                schema, node, input_types, data, None, self.imports
            )
        except self.onnx.shape_inference.InferenceError as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            raise ShapeMismatchError(f"its shapes do not fit: {lines[-1] if lines else quoted(node.name)}") from None
        except Exception:  # onnx cannot infer such a call
            return {}
        return {
            name: result_type
            for name, result_type in result_types.items()
            if name in node.output and result_type.WhichOneof("value")
        }

    def _schema(self, node: Any) -> Any:
        """Return the schema of an operator in the file's opset, else in the newest; None if there is none."""
        domain = "" if node.domain in _ONNX else node.domain
        versions = (self.opsets.get(domain, 1), None)
        return next(filter(None, (schema_of(node.op_type, version, domain) for version in versions)), None)

    def _proto(self, value: Any) -> Any:
        if id(value) not in self.protos:
            self.protos[id(value)] = (self.onnx.numpy_helper.from_array(value), value)
        return self.protos[id(value)][0]

    def _by_another(self, full: str, node: Any, types: Types) -> dict[str, Any]:
        """Infer as the operator in ``ALIKE`` does on floats; results take the element type of the first input."""
        op_type, positions = ALIKE[full]
        names = node.input[positions]
        kinds = [_kind(types.get(name)) for name in names]
        channels_last = any(attribute.name == "channels_last" and attribute.i for attribute in node.attribute)
        if channels_last or not kinds or any(kind is None for kind in kinds):
            return {}
        make = self.onnx.helper.make_tensor_type_proto
        copy = self.onnx.helper.make_node(op_type, names, list(node.output)[:1])
        schema = self._schema(copy)
        copy.attribute.extend(attribute for attribute in node.attribute if attribute.name in schema.attributes)
        floats = {name: make(1, kind.dims) for name, kind in zip(names, kinds, strict=True) if kind is not None}
        result_types = self._inferred(copy, ChainMap(floats), ChainMap())
        element = 1 if full.endswith("ToFloat") or kinds[0] is None else kinds[0].element
        return {
            name: make(element, kind.dims)
            for name, result_type in result_types.items()
            if (kind := _kind(result_type)) is not None
        }

    def _by_rule(self, full: str, node: Any, types: Types) -> dict[str, Any]:
        inputs = [_kind(types.get(name)) if name else None for name in node.input]
        try:
            kinds = RULES[full](inputs, attributes_of(node, 1, {}))
        except (TypeError, ValueError, KeyError, IndexError, AttributeError):  # a size is unknown, or another call
            return {}
        make = self.onnx.helper.make_tensor_type_proto
        pairs = [(name, kind) for name, kind in zip(node.output, kinds, strict=False) if name and kind is not None]
        return {name: make(kind.element, kind.dims) for name, kind in pairs}

    # ----------------------------------------------------------------------------------- operators in operators

    def _if(self, node: Any, types: Types, values: Values) -> None:
        bodies = subgraphs_of(node)
        condition = values.get(node.input[0]) if node.input else None
        if condition is not None and condition.size == 1 and {"then_branch", "else_branch"} <= bodies.keys():
            taken = "then_branch" if condition.item() else "else_branch"
            node.metadata_props.add(key=TAKEN, value=taken)
            bodies = {taken: bodies[taken]}
        results = []
        for body in bodies.values():
            inner = values.new_child()
            with self.budget.enter():
                body_types = self.graph(body, types, inner, {})
            results.append([(body_types.get(output.name), inner.get(output.name)) for output in body.output])
        for name, *branches in zip(node.output, *results, strict=False):
            kinds = [kind for kind, _ in branches]
            types[name] = kinds[0] if len(branches) == 1 else _common(kinds)
            values[name] = branches[0][1] if len(branches) == 1 else None

    def _loop(self, node: Any, types: Types, values: Values) -> None:
        """Infer the body of a Loop or Scan; carried values keep one type in all iterations, or an unknown size."""
        body = subgraphs_of(node).get("body")
        if body is None:
            return
        is_loop = node.op_type == "Loop"
        scanned = 0 if is_loop else _attribute(node, "num_scan_inputs").i
        input_types = [types.get(name) if name else None for name in node.input]
        carried = input_types[2:] if is_loop else input_types[: len(input_types) - scanned]
        runs = values.get(node.input[0]) if is_loop and node.input and node.input[0] else None
        times: Any = int(runs.item()) if runs is not None and runs.size == 1 else None
        make = self.onnx.helper.make_tensor_type_proto
        first = [make(7, []), make(9, [])] if is_loop else []
        slices: list[Any] = []
        if not is_loop:
            axes = _attribute(node, "scan_input_axes").ints or [0] * scanned
            for kind, axis in zip(input_types[len(input_types) - scanned :], axes, strict=False):
                length, element = _without(kind, axis)
                times, slices = times if length is None else length, [*slices, element]
        body_types: Types = types
        for _ in range(2):
            body_inputs = dict(zip((value.name for value in body.input), [*first, *carried, *slices], strict=False))
            body_inputs = {name: kind for name, kind in body_inputs.items() if kind is not None}
            with self.budget.enter():
                body_types = self.graph(body, types, values.new_child(), body_inputs)
            states = [body_types.get(output.name) for output in body.output[1 if is_loop else 0 :]][: len(carried)]
            after = [_common([one, other]) for one, other in zip(carried, states, strict=False)]
            if all(_size(one) == _size(other) for one, other in zip(carried, after, strict=True)):
                break
            carried = after
        if is_loop and not self._goes_on(body):
            times = None
        if times is not None and times >= 0:
            node.metadata_props.add(key=RUNS, value=str(times))
        results = [body_types.get(output.name) for output in body.output[1 if is_loop else 0 :]]
        for position, (name, kind) in enumerate(zip(node.output, results, strict=False)):
            types[name] = carried[position] if position < len(carried) else _stacked(kind, times)

    def _goes_on(self, body: Any) -> bool:
        """Return True if a Loop runs all iterations: its condition is a true constant or passed through."""
        if not body.output:
            return False
        name, makers = body.output[0].name, {output: node for node in body.node for output in node.output}
        for _ in range(8):
            maker = makers.get(name)
            if maker is None:
                break
            if maker.op_type == "Constant":
                return all(
                    bool(constant_value(attribute.t)) for attribute in maker.attribute if attribute.HasField("t")
                )
            if maker.op_type not in ("Identity", "Cast"):
                return False
            name = maker.input[0]
        weights = {weight.name: weight for weight in body.initializer}
        if name in weights:
            return bool(constant_value(weights[name]))
        return (len(body.input) > 1 and name == body.input[1].name) or name not in makers


def _attribute(node: Any, name: str) -> Any:
    """Return an attribute of a node; an empty one if the node lacks it."""
    empty = import_onnx().AttributeProto()
    return next((attribute for attribute in node.attribute if attribute.name == name), empty)


def _declared(kind: Any) -> Any:
    """Return element type and shape of a tensor; None for sequences and unknown types."""
    return kind.tensor_type if kind is not None and kind.WhichOneof("value") == "tensor_type" else None


def _kind(kind: Any) -> Kind | None:
    tensor = _declared(kind)
    if tensor is None:
        return None
    if not tensor.HasField("shape"):
        return Kind(tensor.elem_type, None)
    dims = (dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in tensor.shape.dim)
    return Kind(tensor.elem_type, tuple(dims))


def _size(kind: Any) -> list[int] | None:
    """Return the size of a tensor; None unless every dimension is known."""
    dims = tensor.dims if (tensor := _kind(kind)) is not None else None
    return None if dims is None or not all(isinstance(dim, int) for dim in dims) else list(dims)  # type: ignore[arg-type]


def _merged(kind: Any, other: Any) -> Any:
    """Return a type, with missing dimensions filled in from the other."""
    if _declared(kind) is None:
        return other if kind is None else kind
    tensor, other_tensor = kind.tensor_type, _declared(other)
    if other_tensor is None or not other_tensor.HasField("shape"):
        return kind
    if not tensor.HasField("shape"):
        tensor.shape.CopyFrom(other_tensor.shape)
    elif len(tensor.shape.dim) == len(other_tensor.shape.dim):
        for dim, other_dim in zip(tensor.shape.dim, other_tensor.shape.dim, strict=True):
            if not dim.WhichOneof("value") or (not dim.HasField("dim_value") and other_dim.HasField("dim_value")):
                dim.CopyFrom(other_dim)
    return kind


def _common(kinds: Sequence[Any]) -> Any:
    """Return a type that fits all; dimensions that differ become unknown."""
    onnx = import_onnx()
    tensors = [_kind(kind) for kind in kinds]
    if any(tensor is None for tensor in tensors):
        return next((kind for kind in kinds if kind is not None), None) if not any(tensors) else None
    first = tensors[0]
    assert first is not None
    all_dims = [tensor.dims for tensor in tensors if tensor is not None]
    ranks = {None if dims is None else len(dims) for dims in all_dims}
    if len(ranks) > 1 or None in ranks:
        return onnx.helper.make_tensor_type_proto(first.element, None)
    dims = [dim if all(dim == other for other in others) else None for dim, *others in zip(*all_dims, strict=True)]
    return onnx.helper.make_tensor_type_proto(first.element, dims)


def _without(kind: Any, axis: int) -> tuple[int | None, Any]:
    """Return the length of an axis, and the type without this axis."""
    tensor = _kind(kind)
    if tensor is None or not tensor.dims or not -len(tensor.dims) <= axis < len(tensor.dims):
        return None, None
    dims = list(tensor.dims)
    length = dims.pop(axis)
    element = import_onnx().helper.make_tensor_type_proto(tensor.element, dims)
    return (length if isinstance(length, int) else None), element


def _stacked(kind: Any, times: int | None) -> Any:
    """Return the type of the stacked results of all iterations."""
    tensor = _kind(kind)
    if tensor is None or tensor.dims is None:
        return None
    return import_onnx().helper.make_tensor_type_proto(tensor.element, [times, *tensor.dims])

"""Return attributes of ONNX operators as Python values, with defaults and constant inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from modelsummary.files.onnx.known_values import shown_value
from modelsummary.files.onnx.reading import import_onnx

__all__ = ["attributes_of", "input_names", "schema_of", "value_of"]


def attributes_of(node: Any, version: int, constants: Mapping[str, Any]) -> dict[str, Any]:
    """Return name -> value: the node's attributes, its operator's defaults, and values of small constant inputs.

    Args:
        version: opset version of the node's domain.
        constants: name -> value of the constants around the node.
    """
    types = import_onnx().AttributeProto
    values: dict[str, Any] = dict(_defaults(node.op_type, version, node.domain))
    for attribute in node.attribute:
        if attribute.type not in (types.GRAPH, types.GRAPHS):
            values[attribute.name] = value_of(attribute)
    for name, used in zip(input_names(node.op_type, version, node.domain), node.input, strict=False):
        if (value := constants.get(used)) is not None and name not in values:
            values[name] = value
    return values


def value_of(attribute: Any) -> Any:
    """Return a number, a string or a list of them; for a tensor its value if it is small, else its shape as text."""
    kind, kinds = attribute.type, import_onnx().AttributeProto
    if kind == kinds.INT:
        return attribute.i
    if kind == kinds.INTS:
        return list(attribute.ints)
    if kind == kinds.FLOAT:
        return attribute.f
    if kind == kinds.STRING:
        return attribute.s.decode(errors="replace")
    if kind == kinds.TENSOR:
        value = shown_value(attribute.t)
        return f"tensor {list(attribute.t.dims)}" if value is None else value
    if kind == kinds.STRINGS:
        return [string.decode(errors="replace") for string in attribute.strings]
    return list(attribute.floats)


@lru_cache(4096)
def schema_of(op_type: str, version: int | None, domain: str) -> Any:
    """Return the schema of an operator, the newest if ``version`` is None; None if onnx does not define it."""
    try:
        return import_onnx().defs.get_schema(op_type, *(() if version is None else (version,)), domain)
    except Exception:  # its SchemaError, or other errors for broken names and versions
        return None


@lru_cache(4096)
def _defaults(op_type: str, version: int, domain: str) -> Mapping[str, Any]:
    schema = schema_of(op_type, version, domain)
    attributes = {} if schema is None else schema.attributes
    defaults = {name: attribute.default_value for name, attribute in attributes.items()}
    return {name: value_of(default) for name, default in defaults.items() if default.type}


@lru_cache(4096)
def input_names(op_type: str, version: int, domain: str) -> Sequence[str]:
    """Return the names of an operator's inputs by position; empty for an unknown operator."""
    schema = schema_of(op_type, version, domain)
    return [] if schema is None else [parameter.name for parameter in schema.inputs]

"""Element types of ONNX tensors."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple

from modelsummary.files.onnx.reading import import_onnx

__all__ = ["Element", "element_of", "is_weight_type"]


class Element(NamedTuple):
    """An element type: its name, such as ``float32``, and bits per element; 0 bits for strings."""

    name: str
    bits: int


_SPECIAL = {
    "FLOAT": Element("float32", 32),
    "DOUBLE": Element("float64", 64),
    "BOOL": Element("bool", 8),
    "STRING": Element("string", 0),
}


@lru_cache(4096)
def element_of(data_type: int) -> Element | None:
    """Return the element type with this number in ONNX; None for an undefined number."""
    types: Any = import_onnx().TensorProto.DataType
    if data_type == 0 or data_type not in types.values():
        return None
    name = types.Name(data_type)
    bits = re.search(r"\d+", name)  # FLOAT16, UINT4, FLOAT8E4M3FN
    return _SPECIAL.get(name) or Element(name.lower(), int(bits[0]) if bits else 0)


def is_weight_type(element: Element) -> bool:
    """Return True for floating point and 8-bit or smaller types; wider integers are shapes, axes and indices.

    >>> is_weight_type(Element("int8", 8)), is_weight_type(Element("int64", 64))
    (True, False)
    """
    return element.name not in ("bool", "string") and ("float" in element.name or element.bits <= 8)

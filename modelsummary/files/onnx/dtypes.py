"""Types of the elements of ONNX tensors."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple

from modelsummary.files.onnx.reading import import_onnx

__all__ = ["Element", "element_of", "is_weight_type"]


class Element(NamedTuple):
    """An element type: ``float32`` and the bits of one element; those of a string are not known and count 0."""

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
    """The element type of this number in ONNX; None for an undefined one."""
    types: Any = import_onnx().TensorProto.DataType
    if data_type == 0 or data_type not in types.values():
        return None
    name = types.Name(data_type)
    bits = re.search(r"\d+", name)  # FLOAT16, UINT4, FLOAT8E4M3FN
    return _SPECIAL.get(name) or Element(name.lower(), int(bits[0]) if bits else 0)


def is_weight_type(element: Element) -> bool:
    """Floating point, or the few bits of a quantised weight; other integers are shapes, axes and indices."""
    return element.name not in ("bool", "string") and ("float" in element.name or element.bits <= 8)

"""Read the headers of GGUF files, which are untrusted; the data of tensors are never read.

A file is a magic number, counts, key-value pairs with the facts of the model, a description of each tensor, and, at a
multiple of the alignment, the data. Sizes of a tensor are stored with the innermost first.
"""

from __future__ import annotations

import struct
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from modelsummary.errors import ModelFileError, printable
from modelsummary.files.budget import Budget
from modelsummary.files.weights.stored import (
    StoredTensor,
    WeightStatistics,
    check_layout,
    check_name,
    weight_statistics,
)
from modelsummary.units import grouped

__all__ = ["TYPES", "load_gguf"]

_MAGIC = b"GGUF"
_LARGEST_HEADER = 256 * 2**20  # bytes; vocabularies are in it
_LEAST = 12  # bytes of a tensor or a pair
_STEPS = 4  # of a value
_TENSOR_STEPS = 10
_MOST_DIMENSIONS = 4
_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRUCTS = {order + code: struct.Struct(order + code) for order in "<>" for code in _SCALARS.values()}
_LEAST_OF = {_STRING: 8, _ARRAY: 12}  # bytes of an item of an array
_KEPT = frozenset({"general.alignment", "general.architecture"})
_LONGEST_TEXT = 2**16 - 1  # bytes of a key, as GGUF defines it, or of a name
_KEY_BYTES = 100  # of memory, next to the text itself
_PIECE = 2**16  # bytes that are read at a time
# By order and number of sizes: the sizes, the type and the place of a tensor.
_DESCRIPTIONS = {order: [struct.Struct(f"{order}{n}QIQ") for n in range(_MOST_DIMENSIONS + 1)] for order in "<>"}

# Number of the type -> its name, elements per block, bytes per block.
TYPES = {
    0: ("float32", 1, 4),
    1: ("float16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("int8", 1, 1),
    25: ("int16", 1, 2),
    26: ("int32", 1, 4),
    27: ("int64", 1, 8),
    28: ("float64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("bfloat16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}


def load_gguf(path: Path) -> WeightStatistics:
    """Return the statistics of the tensors in a GGUF file, from its header.

    Raises:
        ModelFileError: the file is broken, truncated, or contradicts itself.
    """
    size = path.stat().st_size
    budget = Budget.of_size(size)
    with path.open("rb", buffering=_PIECE) as file:
        facts, tensors = _Header(file, size, budget).read()
    architecture = facts.get("general.architecture")
    name = architecture if isinstance(architecture, str) and 0 < len(architecture) <= 100 else "Module"
    return weight_statistics(tensors, printable(name), path, budget)


class _Header:
    """A reader of a header that reads nothing outside of it."""

    def __init__(self, file: BinaryIO, size: int, budget: Budget) -> None:
        self._file, self._size, self._budget = file, size, budget
        self._position = 0  # in the file, of what is read next
        self._order = "<"

    def read(self) -> tuple[dict[str, Any], list[StoredTensor]]:
        """Return the kept key-value pairs, and the tensors."""
        if self._take(4) != _MAGIC:
            raise ModelFileError("it is not a GGUF file")
        version = self._number("I")
        if version and not version & 0xFFFF:  # the bytes of each number are in the other order
            self._order, version = ">", int.from_bytes(version.to_bytes(4, "little"), "big")
        if version not in (2, 3):
            raise ModelFileError(f"it has version {version} of GGUF; versions 2 and 3 are read")
        n_tensors, n_pairs = self._number("Q"), self._number("Q")
        if (n_tensors + n_pairs) * _LEAST > self._size:
            raise ModelFileError(f"it declares {grouped(n_tensors)} tensors and {grouped(n_pairs)} key-value pairs")
        self._budget.spend(_TENSOR_STEPS * n_tensors)
        facts = self._pairs(n_pairs)
        tensors: dict[str, StoredTensor] = {}
        alignment = facts.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
            raise ModelFileError(f"the alignment must be a power of two up to 2**20, got {alignment!r:.40}")
        for _ in range(n_tensors):
            tensor = self._tensor(alignment, tensors)
            tensors[tensor.name] = tensor
        begin = -(-self._position // alignment) * alignment
        check_layout(tensors.values(), max(self._size - begin, 0))
        return facts, list(tensors.values())

    def _pairs(self, count: int) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        seen: set[str] = set()
        for _ in range(count):
            key = self._text()
            if key in seen:
                raise ModelFileError(f"two key-value pairs have the key {key[:80]!r}")
            seen.add(key)
            self._budget.take(len(key) + _KEY_BYTES)
            kind = self._number("I")
            value = self._text() if key in _KEPT and kind == _STRING else self._value(kind)
            if key in _KEPT:
                facts[key] = value
        return facts

    def _value(self, kind: int) -> Any:
        """Return a number; skip a text or an array, and return None."""
        self._budget.spend(_STEPS)
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            self._skip(self._number("Q"))
            return None
        if kind != _ARRAY:
            raise ModelFileError(f"a key-value pair has the unknown type {kind}")
        inner, length = self._number("I"), self._number("Q")
        if inner in _SCALARS:
            self._skip(length * _STRUCTS["<" + _SCALARS[inner]].size)
            return None
        self._check(length * _LEAST_OF[inner] if inner in _LEAST_OF else 0)
        self._budget.spend(_STEPS * length)
        with self._budget.enter():
            for _ in range(length):
                if inner == _STRING:
                    self._skip(self._number("Q"))
                else:
                    self._value(inner)
        return None

    def _tensor(self, alignment: int, tensors: dict[str, StoredTensor]) -> StoredTensor:
        name = self._text()
        check_name(name, tensors)
        n_dims = self._number("I")
        if n_dims > _MOST_DIMENSIONS:
            raise ModelFileError(f"tensor {name[:80]!r} has {n_dims} dimensions; at most {_MOST_DIMENSIONS} are known")
        *sizes, kind, begin = self._unpacked(_DESCRIPTIONS[self._order][n_dims])
        if kind not in TYPES:
            raise ModelFileError(f"tensor {name[:80]!r} has the unknown type {kind}")
        dtype, elements, nbytes = TYPES[kind]
        if (sizes[0] if sizes else 1) % elements or begin % alignment:
            raise ModelFileError(
                f"tensor {name[:80]!r}: rows of {sizes[:1]} elements must be whole blocks of {elements}, and the place "
                f"{begin} a multiple of {alignment}"
            )
        return StoredTensor(name, tuple(reversed(sizes)), dtype, begin, prod(sizes) // elements * nbytes)

    def _text(self) -> str:
        length = self._number("Q")
        if length > _LONGEST_TEXT:
            raise ModelFileError(f"a name has {grouped(length)} bytes; GGUF has at most {grouped(_LONGEST_TEXT)}")
        try:
            return self._take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise ModelFileError(f"the text that ends at byte {grouped(self._position)} is not UTF-8") from None

    def _number(self, code: str) -> Any:
        return self._unpacked(_STRUCTS[self._order + code])[0]

    def _unpacked(self, kind: struct.Struct) -> tuple[Any, ...]:
        return kind.unpack(self._take(kind.size))

    def _take(self, nbytes: int) -> bytes:
        self._pass(nbytes)
        data = self._file.read(nbytes)
        if len(data) < nbytes:  # the file was cut since its size was asked for
            raise ModelFileError("it is truncated")
        return data

    def _skip(self, nbytes: int) -> None:
        self._pass(nbytes)
        self._file.seek(nbytes, 1)

    def _pass(self, nbytes: int) -> None:
        """Move the position over the next bytes; raise ``ModelFileError`` if they are not in the header."""
        self._check(nbytes)
        self._position += nbytes

    def _check(self, nbytes: int) -> None:
        if self._position + nbytes > self._size:
            raise ModelFileError(f"it is truncated: its header needs more than its {grouped(self._size)} bytes")
        if self._position + nbytes > _LARGEST_HEADER:
            raise ModelFileError(f"its header has more than {grouped(_LARGEST_HEADER)} bytes")

"""Read an untrusted ONNX file, without its weights: reading them takes longer than all the rest.

In the encoding of Protocol Buffers (protobuf.dev/programming-guides/encoding) a message is a sequence of fields. A
field is a key, made of its number and the kind of its content, and the content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from modelsummary.errors import ModelFileError
from modelsummary.extras import needs
from modelsummary.files.budget import Budget

__all__ = [
    "LONGEST_KEPT",
    "NODE_STEPS",
    "LeftOut",
    "Outline",
    "import_onnx",
    "read_model",
    "read_outline",
    "without_weights",
]

# The limit of Protocol Buffers; larger models keep their weights in separate files.
_LARGEST = 2**31 - 1
_GRAPH, _NODE, _INITIALIZER, _RAW_DATA = 7, 1, 5, 9  # fields of ModelProto, GraphProto, TensorProto in onnx.proto
LONGEST_KEPT = 1024  # bytes of a constant that shape inference may read
NODE_STEPS = 120  # a node costs a hundred microseconds until it is a row of the tree
_FIELD_STEPS = 8  # any other part of a graph
_FIXED = {1: 8, 5: 4}  # kind of content -> its bytes


@cache
def import_onnx() -> Any:
    """Return the onnx library.

    Raises:
        MissingExtraError: onnx is not installed.
    """
    with needs("onnx", "onnx"):
        import onnx
        import onnx.external_data_helper
        import onnx.shape_inference
    return onnx


def read_model(path: Path) -> Any:
    """Return the ``ModelProto`` in a file; external weights are not read.

    Raises:
        ModelFileError: the file cannot be read or parsed.
    """
    return _read(path, import_onnx().ModelProto.FromString)


class LeftOut(NamedTuple):
    """The place of data in a file, in bytes."""

    offset: int
    length: int


class Outline(NamedTuple):
    """An ONNX file without the data of long initializers.

    Attributes:
        data: the encoded ``ModelProto``.
        left_out: position -> place of the data of each initializer whose data were left out.
    """

    data: bytes
    left_out: dict[int, LeftOut]

    def parsed(self) -> Any:
        """Return the ``ModelProto``; raise ``ModelFileError`` if it cannot be decoded."""
        with _decoding():
            return import_onnx().ModelProto.FromString(self.data)


def read_outline(path: Path) -> Outline:
    """Return a file without the data of long initializers, which are not read.

    Raises:
        ModelFileError: the file cannot be read, or its graph is over the budget.
    """

    def stripped(data: Any) -> Outline:
        outline, left_out = without_weights(data, Budget.of_size(len(data)))
        return Outline(bytes(outline), left_out)

    outline: Outline = _read(path, stripped)
    return outline


def _read(path: Path, parse: Callable[[Any], Any]) -> Any:
    with _decoding():
        size = path.stat().st_size
        if size > _LARGEST:
            raise ModelFileError(f"it has {size:,} bytes; an ONNX file has at most {_LARGEST:,}")
        with path.open("rb") as file, _memory_of(file, size) as data:
            return parse(data)


@contextmanager
def _decoding() -> Iterator[None]:
    """Return a context whose errors of Protocol Buffers are a ``ModelFileError``."""
    try:
        yield
    except (OSError, ModelFileError, MemoryError):
        raise
    except Exception:  # the DecodeError of whichever protobuf is installed
        raise ModelFileError("it is not an ONNX file, or is truncated") from None


@contextmanager
def _memory_of(file: BinaryIO, size: int) -> Iterator[memoryview | bytes]:
    """Return a context with the bytes of a file, without copying them."""
    if not size:  # an empty file cannot be mapped
        yield b""
        return
    with mmap(file.fileno(), size, access=ACCESS_READ) as mapped, memoryview(mapped) as view:
        yield view


# ---------------------------------------------------------------------------------- fields of Protocol Buffers


def without_weights(data: Any, budget: Budget) -> tuple[Any, dict[int, LeftOut]]:
    """Remove the raw data of long initializers from an encoded ``ModelProto``, and charge the budget for its graph.

    Returns:
        The data, and position of the initializer -> the place of what was removed. Data that cannot be decoded are
        returned as they are.

    Raises:
        ModelFileError: the graph is over the budget.

    >>> without_weights(b"not a model", Budget())
    (b'not a model', {})
    """
    left_out: dict[int, LeftOut] = {}
    try:
        graphs = [field for field in _fields(data, 0, len(data)) if field[0] == _GRAPH]
        if len(graphs) != 1:
            return data, {}
        _, start, content, end = graphs[0]
        graph = _shorter(data, content, end, left_out, budget)
        return b"".join([data[:start], _encoded(_GRAPH, graph), data[end:]]), left_out
    except ModelFileError:  # a ValueError, too
        raise
    except (ValueError, IndexError):  # parsing reports it
        return data, {}


def _shorter(data: Any, offset: int, end: int, left_out: dict[int, LeftOut], budget: Budget) -> bytes:
    """Return the content of a graph without the raw data of long initializers."""
    parts = []
    position = 0
    for field_number, start, content, after in _fields(data, offset, end):
        budget.spend(NODE_STEPS if field_number == _NODE else _FIELD_STEPS)
        if field_number != _INITIALIZER:
            continue
        raw = [field for field in _fields(data, content, after) if field[0] == _RAW_DATA]
        if len(raw) == 1 and raw[0][3] - raw[0][2] > LONGEST_KEPT:
            _, raw_start, raw_content, raw_end = raw[0]
            left_out[position] = LeftOut(raw_content, raw_end - raw_content)
            tensor = b"".join([data[content:raw_start], data[raw_end:after]])
            parts += [data[offset:start], _encoded(_INITIALIZER, tensor)]
            offset = after
        position += 1
    return b"".join([*parts, data[offset:end]])


def _fields(data: Any, offset: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield number, start, start of the content, and end of each field of a message."""
    while offset < end:
        start = offset
        key, offset = _number(data, offset)
        kind = key & 7
        if kind == 2:
            length, offset = _number(data, offset)
            after = offset + length
        elif kind == 0:
            after = _number(data, offset)[1]
        else:
            after = offset + _FIXED.get(kind, end)  # groups are not used
        if after > end or not key >> 3:  # zeros would decode as endless empty fields
            raise ValueError("a field has no number, or ends after its message")
        yield key >> 3, start, offset, after
        offset = after


def _number(data: Any, offset: int) -> tuple[int, int]:
    """Decode a number stored with seven bits in each byte; return it and the position after it."""
    value = shift = 0
    while True:
        byte = data[offset]
        value |= (byte & 127) << shift
        offset += 1
        if byte < 128:
            return value, offset
        shift += 7
        if shift > 63:
            raise ValueError("a number has more than 64 bits")


def _encoded(field: int, content: bytes) -> bytes:
    """Return the encoding of a field with this content."""
    length, header = len(content), bytearray([field << 3 | 2])
    while length > 127:
        header.append(length & 127 | 128)
        length >>= 7
    header.append(length)
    return bytes(header) + content

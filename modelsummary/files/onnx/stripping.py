"""Leave the weights of an ONNX model out before it is parsed: reading them takes longer than all the rest.

The encoding of Protocol Buffers (protobuf.dev/programming-guides/encoding): a message is a sequence of fields, each a
key, of its number and how its content is stored, and the content.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from modelsummary.errors import ModelFileError

__all__ = ["without_weights"]

_GRAPH, _NODE, _INITIALIZER, _RAW_DATA = 7, 1, 5, 9  # fields of ModelProto, GraphProto, TensorProto in onnx.proto
_LONGEST_KEPT = 1024  # bytes of a constant that shape inference may read
_MOST_NODES = 1_000_000  # of which parsing takes gigabytes, however few bytes they have
_FIXED = {1: 8, 5: 4}  # how a content is stored -> its bytes


def without_weights(data: Any) -> tuple[Any, dict[int, int]]:
    """Data of a ``ModelProto`` without the raw data of long initializers.

    Returns:
        The data, and the length of what was left out by position of the initializer; none where the data are unusual.

    Raises:
        ModelFileError: there are more operators than anyone reads.
    """
    lengths: dict[int, int] = {}
    try:
        graphs = [field for field in _fields(data, 0, len(data)) if field[0] == _GRAPH]
        if len(graphs) != 1:
            return data, {}
        _, start, content, end = graphs[0]
        graph = _shorter(data, content, end, lengths)
        return b"".join([data[:start], _encoded(_GRAPH, graph), data[end:]]), lengths
    except ModelFileError:  # which is a ValueError
        raise
    except (ValueError, IndexError):  # no Protocol Buffer: parsing says so, too
        return data, {}


def _shorter(data: Any, place: int, end: int, lengths: dict[int, int]) -> bytes:
    """The content of a graph, with shorter initializers."""
    parts = []
    position = nodes = 0
    for number, start, content, after in _fields(data, place, end):
        nodes += number == _NODE
        if nodes > _MOST_NODES:
            raise ModelFileError(f"more than {_MOST_NODES:,} operators")
        if number != _INITIALIZER:
            continue
        raw = [field for field in _fields(data, content, after) if field[0] == _RAW_DATA]
        if len(raw) == 1 and raw[0][3] - raw[0][2] > _LONGEST_KEPT:
            _, raw_start, raw_content, raw_end = raw[0]
            lengths[position] = raw_end - raw_content
            tensor = b"".join([data[content:raw_start], data[raw_end:after]])
            parts += [data[place:start], _encoded(_INITIALIZER, tensor)]
            place = after
        position += 1
    return b"".join([*parts, data[place:end]])


def _fields(data: Any, place: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Number, start, start of the content, and end of each field of a message."""
    while place < end:
        start = place
        key, place = _number(data, place)
        kind = key & 7
        if kind == 2:
            length, place = _number(data, place)
            after = place + length
        elif kind == 0:
            after = _number(data, place)[1]
        else:
            after = place + _FIXED.get(kind, end)  # groups are not used
        if after > end or not key >> 3:  # zeros would read as an endless row of empty fields
            raise ValueError("a field has no number, or ends after its message")
        yield key >> 3, start, place, after
        place = after


def _number(data: Any, place: int) -> tuple[int, int]:
    """A number of seven bits a byte, and the place after it."""
    number = shift = 0
    while True:
        byte = data[place]
        number |= (byte & 127) << shift
        place += 1
        if byte < 128:
            return number, place
        shift += 7
        if shift > 63:
            raise ValueError("a number is too long")


def _encoded(field: int, content: bytes) -> bytes:
    """A field with this content."""
    length, number = len(content), bytearray([field << 3 | 2])
    while length > 127:
        number.append(length & 127 | 128)
        length >>= 7
    number.append(length)
    return bytes(number) + content

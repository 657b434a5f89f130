"""Read an untrusted ONNX file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from modelsummary.errors import MissingExtraError, ModelFileError
from modelsummary.files.budget import Budget
from modelsummary.files.onnx.stripping import LeftOut, without_weights

__all__ = ["Outline", "import_onnx", "read_model", "read_outline"]

# The limit of Protocol Buffers; larger models keep their weights in separate files.
_LARGEST = 2**31 - 1


@cache
def import_onnx() -> Any:
    """Return the onnx library.

    Raises:
        MissingExtraError: onnx is not installed.
    """
    try:
        import onnx
        import onnx.external_data_helper
        import onnx.shape_inference
    except ImportError as error:
        raise MissingExtraError("onnx", "onnx") from error
    return onnx


def read_model(path: Path) -> Any:
    """Return the ``ModelProto`` in a file; external weights are not read.

    Raises:
        ModelFileError: the file cannot be read or parsed.
    """
    return _read(path, import_onnx().ModelProto.FromString)


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
    except (OSError, ModelFileError):
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

"""Read an untrusted ONNX file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, BinaryIO

from modelsummary.errors import MissingExtraError, ModelFileError
from modelsummary.files.onnx.stripping import LeftOut, without_weights

__all__ = ["import_onnx", "read_model", "read_outline"]

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


def read_outline(path: Path) -> tuple[Any, dict[int, LeftOut]]:
    """Return the ``ModelProto`` in a file without the data of long initializers, which are not read.

    Returns:
        The model, and position -> place of the data of each initializer whose data were left out.

    Raises:
        ModelFileError: the file cannot be read or parsed.
    """
    parsed = import_onnx().ModelProto.FromString

    def parse(data: Any) -> tuple[Any, dict[int, LeftOut]]:
        outline, left_out = without_weights(data)
        return parsed(outline), left_out

    outline: tuple[Any, dict[int, LeftOut]] = _read(path, parse)
    return outline


def _read(path: Path, parse: Callable[[Any], Any]) -> Any:
    try:
        size = path.stat().st_size
        if size > _LARGEST:
            raise ModelFileError(f"{str(path)!r} has {size:,} bytes; an ONNX file has at most {_LARGEST:,}")
        with path.open("rb") as file, _memory_of(file, size) as data:
            return parse(data)
    except OSError as error:
        raise ModelFileError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except ModelFileError:
        raise
    except Exception:  # the DecodeError of whichever protobuf is installed
        raise ModelFileError(f"{str(path)!r} is not an ONNX file, or is truncated") from None


@contextmanager
def _memory_of(file: BinaryIO, size: int) -> Iterator[memoryview | bytes]:
    """Return a context with the bytes of a file, without copying them."""
    if not size:  # an empty file cannot be mapped
        yield b""
        return
    with mmap(file.fileno(), size, access=ACCESS_READ) as mapped, memoryview(mapped) as view:
        yield view

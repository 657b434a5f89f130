"""``load``: a model that exists as a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from modelsummary.errors import InputError, ModelFileError
from modelsummary.file_statistics import FileStatistics

__all__ = ["is_file", "load"]

Size = Sequence[int]
_TORCHSCRIPT = (".pt", ".pth", ".ts", ".torchscript")


def is_file(name: str) -> bool:
    """The name is that of a file which ``load`` reads, by its ending."""
    return name.endswith((".onnx", ".pt2", *_TORCHSCRIPT))


def load(path: str | PathLike[str], input: Size | Mapping[str, Size] | None = None) -> FileStatistics:
    """What is known of a model in a file: the tree, its totals, every view, and its memory traffic.

    No pickle in a file is run, and nothing is computed. ONNX graphs and exported programs say all sizes themselves. A
    TorchScript module is run on shapes to have them, really only where values decide what happens.

    Args:
        path: of an ONNX file (``.onnx``), an exported program (``.pt2``) or TorchScript (``.pt``).
        input: size of the input, or name -> size of several: they take the place of what the file says, and give
            dimensions a number that it leaves open. Default: as the file says; of TorchScript then only parameters.

    Raises:
        InputError: the name tells no known format, or a size does not fit.
        ModelFileError: the file is broken, or contradicts itself.
        MissingExtraError: onnx is not installed.
    """
    try:
        place = Path(path)
    except TypeError:
        raise InputError(f"expected the path of a model, got {type(path).__name__}: {path!r:.80}") from None
    if not place.is_file():
        raise ModelFileError(f"there is no file {str(place)!r}")
    sizes = _sizes(input)
    if place.suffix == ".onnx":
        from modelsummary.onnx.loading import load_onnx

        return load_onnx(place, sizes)
    if place.suffix == ".pt2":
        from modelsummary.archive.program import load_exported

        return load_exported(place, sizes)
    if place.suffix in _TORCHSCRIPT:
        from modelsummary.archive.torchscript import load_torchscript

        return load_torchscript(place, sizes)
    raise InputError(f"{str(place)!r}: expected a file .onnx, .pt2, or TorchScript .pt")


def _sizes(given: Any) -> dict[str | None, list[int]]:
    named = given if isinstance(given, Mapping) else {} if given is None else {None: given}
    sizes: dict[str | None, list[int]] = {}
    for name, size in named.items():
        if not isinstance(size, Sequence) or not all(type(dim) is int and dim >= 0 for dim in size):
            raise InputError(f"input={given!r:.80}: expected a size such as (1, 3, 224, 224), or a dict of them")
        sizes[name] = list(size)
    return sizes

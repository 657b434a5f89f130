"""``load``: a model that exists as a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from modelsummary.errors import InputError, ModelFileError
from modelsummary.files.statistics import FileStatistics

__all__ = ["is_file", "load"]

Size = Sequence[int] | Tensor
_FORMATS = "file .onnx, .pt2, or TorchScript .pt"
_TORCHSCRIPT = (".pt", ".pth", ".ts", ".torchscript")


def is_file(name: str) -> bool:
    """The name is that of a file which ``load`` reads, by its ending."""
    return name.lower().endswith((".onnx", ".pt2", *_TORCHSCRIPT))


def load(path: str | PathLike[str], input: Size | Sequence[Size] | Mapping[str, Size] | None = None) -> FileStatistics:
    """What is known of a model in a file: the tree, its totals, every view, and its memory traffic.

    No pickle in a file is run, and nothing is computed. ONNX graphs and exported programs say all sizes themselves. A
    TorchScript module is run on shapes to have them, really only where values decide what happens.

    Args:
        path: of an ONNX file (``.onnx``), an exported program (``.pt2``) or TorchScript (``.pt``).
        input: size of the input, a list of the sizes of all, or name -> size of some: they take the place of what the
            file says, and give dimensions a number that it leaves open. A tensor stands for its size, and for its dtype
            in TorchScript, which does not tell it. Default: as the file says; of TorchScript then only parameters.

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
        raise ModelFileError(f"there is no file {str(place)!r}; expected a {_FORMATS}, or the model itself")
    given = _inputs(input)
    sizes = {name: _size(each, input) for name, each in given.items()}
    ending = place.suffix.lower()
    if ending == ".onnx":
        from modelsummary.files.onnx.model_file import load_onnx

        return load_onnx(place, sizes)
    if ending == ".pt2":
        from modelsummary.files.torch.program_file import load_exported

        return load_exported(place, sizes)
    if ending in _TORCHSCRIPT:
        from modelsummary.files.torch.torchscript import load_torchscript

        return load_torchscript(place, sizes, {name: each.dtype for name, each in given.items() if _is_tensor(each)})
    raise InputError(f"{str(place)!r}: expected a {_FORMATS}")


def _inputs(given: Any) -> dict[str | int, Any]:
    """Sizes and tensors by name or position."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return dict(given)
    is_one = _is_tensor(given) or not isinstance(given, Sequence) or all(type(dim) is int for dim in given)
    return dict(enumerate([given] if is_one or isinstance(given, str) else given))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _size(value: Any, given: Any) -> list[int]:
    size = value.shape if _is_tensor(value) else value
    if not isinstance(size, Sequence) or not all(type(dim) is int and dim >= 0 for dim in size):
        raise InputError(f"input={given!r:.80}: expected a size such as (1, 3, 224, 224), a list or a dict of them")
    return list(size)

"""``load``: a model that exists as a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelsummary.errors import InputError, ModelFileError
from modelsummary.files.statistics import FileStatistics

__all__ = ["is_file", "is_torchscript", "load"]

Size = Sequence[int] | Tensor | float
_FORMATS = "file .onnx, .pt2, or TorchScript .pt"
_TORCHSCRIPT = (".pt", ".pth", ".ts", ".torchscript", ".jit")


def is_file(name: str) -> bool:
    """Return True if the name is that of a file which ``load`` reads, by its ending."""
    return name.lower().endswith((".onnx", ".pt2", *_TORCHSCRIPT))


def is_torchscript(name: str) -> bool:
    """Return True if the name is that of a TorchScript file, by its ending."""
    return name.lower().endswith(_TORCHSCRIPT)


def load(
    path: str | PathLike[str],
    input: Size | Sequence[Size] | Mapping[str, Size] | None = None,
    *,
    run: bool = False,
) -> FileStatistics:
    """Return what is known of a model in a file: the tree, its totals, every view, and its memory traffic.

    Nothing in a file is run, and nothing is computed. ONNX graphs and exported programs say all sizes themselves;
    TorchScript is code, and says them only with ``run=True``.

    Args:
        path: of an ONNX file (``.onnx``), an exported program (``.pt2``) or TorchScript (``.pt``).
        input: size of the input, a list of the sizes of all, or name -> size of some: they take the place of what the
            file says, and give dimensions a number that it leaves open. A tensor stands for its size, and for its dtype
            in TorchScript, which does not tell it; a number is an input without dimensions. Of small tensors and
            numbers ONNX graphs follow the values, where they decide on a branch. Default: as the file says.
        run: of TorchScript: run the module on inputs of these sizes, in a process of its own with limits of time and
            memory, after its code was searched for what reaches outside. Default: read parameters and modules only.

    Raises:
        InputError: the name tells no known format, or a size does not fit.
        ModelFileError: the file is broken, or contradicts itself.
        MissingExtraError: onnx is not installed.
    """
    try:
        place = Path(path)
    except TypeError:
        raise InputError(f"expected the path of a model, got {type(path).__name__}: {path!r:.80}") from None
    if not _exists(place):
        raise ModelFileError(f"there is no file {str(place)!r}; expected a {_FORMATS}, or the model itself")
    if run and not is_torchscript(place.name):
        raise InputError(f"run=True is for TorchScript, which is code; nothing in {str(place)!r} needs to run")
    given = _inputs(input)
    sizes = {name: _size(each, input) for name, each in given.items()}
    ending = place.suffix.lower()
    if ending == ".onnx":
        from modelsummary.files.onnx.model_file import load_onnx

        return load_onnx(place, sizes, {name: each for name, each in given.items() if _is_tensor(each)})
    if ending == ".pt2":
        from modelsummary.files.torch.program_file import load_exported

        return load_exported(place, sizes)
    if ending in _TORCHSCRIPT:
        from modelsummary.files.torch.torchscript import load_torchscript

        dtypes = {name: each.dtype for name, each in given.items() if _is_tensor(each)}
        return load_torchscript(place, sizes, dtypes, run=run)
    raise InputError(f"{str(place)!r}: expected a {_FORMATS}")


def _exists(place: Path) -> bool:
    """Return True if there is such a file; a name that no file can have, a longer one say, has none."""
    try:
        return place.is_file()
    except (OSError, ValueError):
        return False


def _inputs(given: Any) -> dict[str | int, Any]:
    """Sizes and tensors by name or position."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return {name: _tensor(value) for name, value in given.items()}
    is_one = _is_tensor(given) or not isinstance(given, Sequence) or all(type(dim) is int for dim in given)
    return dict(enumerate([given] if is_one or isinstance(given, str) else map(_tensor, given)))


def _tensor(value: Any) -> Any:
    """A number as a tensor of it, which is an input without dimensions."""
    return torch.tensor(value) if isinstance(value, (int, float)) else value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _size(value: Any, given: Any) -> list[int]:
    size = value.shape if _is_tensor(value) else value
    if not isinstance(size, Sequence) or not all(type(dim) is int and dim >= 0 for dim in size):
        raise InputError(f"input={given!r:.80}: expected a size such as (1, 3, 224, 224), a list or a dict of them")
    return list(size)

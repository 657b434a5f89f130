"""Load a model from a file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelsummary.capture.run import no_collection
from modelsummary.errors import InputError, ModelFileError
from modelsummary.files.file_errors import reading
from modelsummary.files.statistics import FileStatistics
from modelsummary.files.weights.hub import load_repository, repository_of
from modelsummary.files.weights.safetensors import INDEX

__all__ = ["is_archive", "is_file", "load"]

Size = Sequence[int] | Tensor | float | Sequence[Sequence[int] | Tensor]
_FORMATS = "file .onnx, .pt2, .safetensors, .safetensors.index.json, .gguf, .pth, .ckpt, .bin, or TorchScript .pt"
_NO_FORWARD = "input= needs a forward, which the weights in the file do not have; leave it out"
_WEIGHTS = (".safetensors", INDEX, ".gguf")
_ARCHIVES = (".pt", ".pth", ".ckpt", ".bin", ".tar", ".pkl", ".ts", ".torchscript", ".jit")  # TorchScript, checkpoints


def is_file(name: str) -> bool:
    """Return True if ``load`` reads files with the ending of this name.

    >>> is_file("net.onnx"), is_file("net.txt")
    (True, False)
    """
    return name.lower().endswith((".onnx", ".pt2", *_WEIGHTS, *_ARCHIVES))


def is_archive(name: str) -> bool:
    """Return True if a name has an ending of torch archives: TorchScript, or a checkpoint.

    >>> is_archive("net.pt"), is_archive("net.pt2")
    (True, False)
    """
    return name.lower().endswith(_ARCHIVES)


def load(
    path: str | PathLike[str],
    input: Size | Sequence[Size] | Mapping[str, Size] | None = None,
    *,
    run: bool = False,
) -> FileStatistics:
    """Return the statistics of a model in a file: the tree, its totals, every view, and its memory traffic.

    Without ``run``, nothing in the file is executed and nothing is computed. ONNX graphs and exported programs hold all
    sizes. TorchScript is code; its sizes are known only with ``run=True``. Of files of weights
    (safetensors, GGUF, checkpoints of ``torch.save``) only descriptions are read; ``stats.tensors`` has the shape,
    dtype and bytes of each tensor by FQN.

    Args:
        path: an ONNX file (``.onnx``), an exported program (``.pt2``), TorchScript (``.pt``), or weights
            (``.safetensors``, ``.gguf``, ``.pth``, ``.ckpt``, ``.bin``, ``.pt``); ``.safetensors.index.json`` reads all
            files that the index names, and ``hf:org/name`` the headers of the safetensors files of a repository on the
            Hugging Face Hub.
        input: size of the only input, a list of the sizes of all inputs, or name -> size of some. They replace the
            sizes in the file and bind its open dimensions. A tensor gives its size, and to TorchScript also its dtype.
            A number is an input without dimensions. ONNX graphs also use the values of numbers and small tensors where
            values decide on sizes or branches. An input of TorchScript that is a list of tensors takes a list of sizes:
            ``[[(3, 480, 640), (3, 400, 400)]]``. Default: the sizes in the file.
        run: interpret the code of a TorchScript module on inputs of these sizes. Only operators that compute are run,
            on shapes; a file whose code does anything else is refused. Default: read parameters and modules only.

    Raises:
        InputError: the ending belongs to no known format, a size does not fit, or ``input`` is given for weights.
        ModelFileError: the file does not exist, is broken, or contradicts itself.
        MissingExtraError: onnx is not installed, or huggingface_hub for ``hf:org/name``.

    >>> import tempfile
    >>> import onnx
    >>> from modelsummary.onnx import linear_graph
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     onnx.save(linear_graph(2, 3, 4), f"{folder}/product.onnx")
    ...     load(f"{folder}/product.onnx").total_mult_adds
    24
    """
    repository = repository_of(path) if isinstance(path, str) else None
    try:
        file = Path(path)
    except TypeError:
        raise InputError(
            f"path must be the path of a model file, got {type(path).__name__}: {path!r:.80}; "
            "pass a live model to Statistics"
        ) from None
    if repository is None and not _exists(file):
        is_folder = os.path.isdir(file)  # it raises for no name
        raise ModelFileError(
            f"{'folder' if is_folder else 'file'} {str(file)!r} {'is not a file' if is_folder else 'does not exist'}; "
            f"expected a {_FORMATS}, or the model itself"
        )
    if run and (repository is not None or not is_archive(file.name)):
        raise InputError(f"run=True is for TorchScript only; leave it out for {str(file)!r}, which need not run")
    inputs = {name: _checked(value, input) for name, value in _inputs(input).items()}
    if repository is not None:
        if inputs:
            raise InputError(f"{path!r}: {_NO_FORWARD}")
        return load_repository(repository)
    with no_collection(), reading(file):  # it would walk over all rows again and again
        return _read(file, inputs, run)


def _read(file: Path, inputs: Mapping[str | int, Any], run: bool) -> FileStatistics:
    ending = file.suffix.lower()
    if ending in _ARCHIVES:
        from modelsummary.files.torch.archive_file import load_archive

        return load_archive(file, inputs, run=run)
    for name, value in inputs.items():
        if _is_list_of_sizes(value):
            raise InputError(
                f"input {name!r} must be one size, got {value!r:.80}; only TorchScript takes lists of sizes"
            )
    sizes = {name: list(value.shape if isinstance(value, Tensor) else value) for name, value in inputs.items()}
    if ending == ".onnx":
        from modelsummary.files.onnx.model_file import load_onnx

        return load_onnx(file, sizes, {name: value for name, value in inputs.items() if isinstance(value, Tensor)})
    if ending == ".pt2":
        from modelsummary.files.torch.program_file import load_exported

        return load_exported(file, sizes)
    if not file.name.lower().endswith(_WEIGHTS):
        summary = "; ModelStatistics.from_json reads what to_json wrote" * file.name.lower().endswith(".json")
        raise InputError(f"expected a {_FORMATS}{summary}")
    if sizes:
        raise InputError(_NO_FORWARD)
    from modelsummary.files.weights.gguf import load_gguf
    from modelsummary.files.weights.safetensors import load_index, load_safetensors

    if ending == ".gguf":
        return load_gguf(file)
    return load_index(file) if file.name.lower().endswith(INDEX) else load_safetensors(file)


def _exists(path: Path) -> bool:
    """Return True if there is such a file; False also for names that no file can have, such as too long ones."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _inputs(passed: Any) -> dict[str | int, Any]:
    """Return sizes and tensors by name or position."""
    if passed is None:
        return {}
    if isinstance(passed, Mapping):
        return dict(passed)
    is_one = not isinstance(passed, Sequence) or isinstance(passed, str) or all(type(dim) is int for dim in passed)
    return dict(enumerate([passed] if is_one else passed))


def _checked(value: Any, passed: Any) -> Any:
    """Return an input: a number as a tensor without dimensions, and anything else as it is."""
    if isinstance(value, (int, float)):
        return torch.tensor(value)
    if isinstance(value, Tensor) or _is_size(value) or _is_list_of_sizes(value):
        return value
    raise InputError(f"input must be a size such as (1, 3, 224, 224), a list or dict of sizes, got {passed!r:.80}")


def _is_size(value: Any) -> bool:
    return isinstance(value, Sequence) and all(type(dim) is int and dim >= 0 for dim in value)


def _is_list_of_sizes(value: Any) -> bool:
    """Return True for the sizes of a list of tensors; an empty list is the size of a tensor without dimensions."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    return is_list and all(isinstance(item, Tensor) or _is_size(item) for item in value)

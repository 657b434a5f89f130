"""The weights in an ONNX file: how much the file stores, and which stored matrices repeat others.

A product that needs a weight the other way around makes an exporter store a transposed copy beside the weight itself,
as in language models whose head is tied to the embedding.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from modelsummary.files.onnx.checks import constants_of, graphs_of, tensors_of
from modelsummary.files.onnx.dtypes import element_of, is_weight_type
from modelsummary.files.onnx.reading import LeftOut, import_onnx
from modelsummary.files.program import Stored

__all__ = ["copies_in", "stored_in"]

_MADE_BY_EXPORTER = re.compile(r"(?:onnx::\w+_|val_)?\d+")
_SAMPLED = 64  # elements compared before whole matrices are
_BLOCK = 2**20  # elements compared at a time
_MOST_COMPARED = 2**30  # elements, in all: tensors of a bad file may overlap
_MOST_MATRICES = 10_000


def stored_in(model: Any) -> Stored:
    """Return the elements and bytes of all tensors that a file holds, in graphs and functions, external data included.

    External data that several tensors share count once.
    """
    seen: set[tuple[str, str]] = set()
    elements = nbytes = 0
    for tensor in _all_tensors(model):
        element, storage = element_of(tensor.data_type), _external_place(tensor)
        if element is None or (storage is not None and storage in seen):
            continue
        if storage is not None:
            seen.add(storage)
        numel = prod(max(dim, 0) for dim in tensor.dims)
        elements += numel
        nbytes += (numel * element.bits + 7) // 8
    return Stored(elements, nbytes)


def _all_tensors(model: Any) -> Iterator[Any]:
    for graph in graphs_of(model):
        yield from tensors_of(graph)
    for function in model.functions:
        yield from constants_of(function.node)


def _external_place(tensor: Any) -> tuple[str, str] | None:
    """Return file and offset of external data; None for other tensors."""
    if tensor.data_location != import_onnx().TensorProto.EXTERNAL:
        return None
    facts = {entry.key: entry.value for entry in tensor.external_data}
    return facts.get("location", ""), facts.get("offset", "0")


# ---------------------------------------------------------------------------------------------- copies


class _Matrix(NamedTuple):
    """A stored matrix: its initializer, and its position among the initializers."""

    tensor: Any
    position: int

    @property
    def key(self) -> tuple[int, ...]:
        """Element type and both sizes, the smaller one first: equal for a matrix and its transposed copy."""
        return self.tensor.data_type, *sorted(self.tensor.dims)


def copies_in(graph: Any, path: Path, left_out: Mapping[int, LeftOut]) -> dict[str, str]:
    """Return the name of each matrix that repeats another -> the name of the other.

    Two matrices at the same place of an external file are one. A matrix whose name was made by the exporter repeats a
    matrix with a name of the model's if all elements are equal, transposed or not. Names of the model's are never
    copies: layers that begin with equal values have parameters of their own.

    Args:
        left_out: position of an initializer -> where its data are in the file, for data that were not read.
    """
    matrices = [_Matrix(tensor, position) for position, tensor in enumerate(graph.initializer) if _is_matrix(tensor)]
    copies = _at_one_place(matrices)
    if len(matrices) > _MOST_MATRICES:
        return copies
    reader = _Reader(path, left_out)
    candidates = [matrix for matrix in matrices if _MADE_BY_EXPORTER.fullmatch(matrix.tensor.name)]
    keys = {matrix.key for matrix in candidates}
    samples: dict[Any, _Matrix] = {}
    for matrix in matrices:
        if (
            matrix.key in keys
            and not _MADE_BY_EXPORTER.fullmatch(matrix.tensor.name)
            and matrix.tensor.name not in copies
        ):
            values = reader.values(matrix)
            if values is not None and not _is_constant(sample := _sample(values)):
                samples.setdefault((matrix.tensor.data_type, values.shape, sample.tobytes()), matrix)
    compared = 0
    for matrix in candidates if samples else ():
        values = reader.values(matrix)
        if values is None or compared > _MOST_COMPARED:
            continue
        for seen in (values, values.T):
            other = samples.get((matrix.tensor.data_type, seen.shape, _sample(seen).tobytes()))
            compared += 0 if other is None else values.size
            if other is not None and _are_equal(seen, reader.values(other)):
                copies[matrix.tensor.name] = other.tensor.name
                break
    return copies


def _is_matrix(tensor: Any) -> bool:
    element = element_of(tensor.data_type)
    return len(tensor.dims) == 2 and prod(tensor.dims) > 0 and element is not None and is_weight_type(element)


def _at_one_place(matrices: list[_Matrix]) -> dict[str, str]:
    copies: dict[str, str] = {}
    first: dict[Any, str] = {}
    for matrix in matrices:
        storage = _external_place(matrix.tensor)
        if storage is not None:
            name = first.setdefault((storage, matrix.key), matrix.tensor.name)
            if name != matrix.tensor.name:
                copies[matrix.tensor.name] = name
    return copies


class _Reader:
    """A reader of matrices as arrays of unsigned integers, mapped from their files; each file is opened once."""

    def __init__(self, path: Path, left_out: Mapping[int, LeftOut]) -> None:
        self.path = path
        self.left_out = left_out
        self.files: dict[Path, Any] = {}

    def values(self, matrix: _Matrix) -> Any:
        """Return the elements; None if they cannot be read."""
        tensor, left_out = matrix.tensor, self.left_out.get(matrix.position)
        element = element_of(tensor.data_type)
        if element is None or element.bits not in (8, 16, 32, 64):
            return None
        itemsize, external = element.bits // 8, _external_place(tensor)
        try:
            if left_out is not None:
                data, offset = self._file(self.path), left_out.offset
            elif external is not None:
                data, offset = self._file(self.path.parent / external[0]), int(external[1])
            else:
                return import_onnx().numpy_helper.to_array(tensor).view(f"u{itemsize}")
            shape = tuple(tensor.dims)
            return data[offset : offset + itemsize * prod(shape)].view(f"u{itemsize}").reshape(shape)
        except (OSError, ValueError, TypeError):  # data that were dropped or are missing
            return None

    def _file(self, path: Path) -> Any:
        import numpy as np

        if path not in self.files:
            is_file = path.is_file()  # a pipe would wait for its other end
            self.files[path] = np.memmap(path, np.uint8, "r") if is_file else np.empty(0, np.uint8)
        return self.files[path]


def _sample(values: Any) -> Any:
    import numpy as np

    numbers = np.linspace(0, values.size - 1, _SAMPLED).astype(np.int64)
    return values[np.unravel_index(numbers, values.shape)]


def _is_constant(sample: Any) -> bool:
    return bool((sample == sample[0]).all())


def _are_equal(one: Any, other: Any) -> bool:
    step = max(1, _BLOCK // one.shape[1])
    return other is not None and all(
        bool((one[start : start + step] == other[start : start + step]).all()) for start in range(0, len(one), step)
    )

"""Load an ONNX file as statistics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelsummary.errors import InputError, ModelFileError, ShapeMismatchError
from modelsummary.files.onnx.checks import check_model, check_texts
from modelsummary.files.onnx.functions import inline_functions
from modelsummary.files.onnx.graph_program import program_of
from modelsummary.files.onnx.inputs import bind, name_open_dimensions, values_of_inputs
from modelsummary.files.onnx.reading import read_outline
from modelsummary.files.onnx.shapes import infer_types
from modelsummary.files.onnx.weights import copies_in, stored_in
from modelsummary.files.program import GivenSizes
from modelsummary.files.statistics import FileStatistics

__all__ = ["load_onnx"]


def load_onnx(path: Path, sizes: GivenSizes, tensors: Mapping[str | int, Any]) -> FileStatistics:
    """Return the statistics of the model in an ONNX file; nothing is run, and weights are not read.

    Only matrices that may be copies of others are looked at.

    Args:
        path: the file.
        sizes: sizes of inputs by name or position; other inputs keep the sizes in the file.
        tensors: inputs given as tensors, by name or position; values of small ones are used.

    Raises:
        InputError: a size does not fit.
        ModelFileError: the file is broken.
        MissingExtraError: onnx is not installed.
    """
    model, left_out = read_outline(path)
    try:
        check_texts(model)
        stored = stored_in(model)
        called = inline_functions(model)
        files = check_model(model, path, left_out=left_out, drop_weights=True)
        copies = copies_in(model.graph, path, left_out)
        missing = sorted(name for name in files if not (path.parent / name).exists())
        name_open_dimensions(model.graph)
        if sizes:
            bind(model.graph, sizes)
        values = values_of_inputs(model.graph, tensors) if tensors else {}
        notes = infer_types(model, values)
        program = program_of(model, called, copies)
    except (InputError, ModelFileError) as error:
        is_of_user = isinstance(error, InputError) or (sizes and isinstance(error, ShapeMismatchError))
        kind = InputError if is_of_user else ModelFileError
        raise kind(f"{str(path)!r}: {error}") from None
    if missing:
        notes.append(f"weights are missing: {', '.join(missing)[:80]}")
    program.notes += notes
    program.stored = stored
    return FileStatistics(program, path)

"""Load an ONNX file as statistics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelsummary.errors import InputError, ModelFileError, ShapeMismatchError
from modelsummary.files.budget import Budget
from modelsummary.files.contained import contained, limit_seconds
from modelsummary.files.onnx.checks import check_model, check_texts
from modelsummary.files.onnx.functions import inline_functions
from modelsummary.files.onnx.graph_program import program_of
from modelsummary.files.onnx.inputs import bind, name_open_dimensions, values_of_inputs
from modelsummary.files.onnx.reading import import_onnx, read_outline
from modelsummary.files.onnx.shapes import infer_types
from modelsummary.files.onnx.weights import copies_in, stored_in
from modelsummary.files.program import GivenSizes, Program
from modelsummary.files.statistics import FileStatistics

__all__ = ["load_onnx"]


def load_onnx(path: Path, sizes: GivenSizes, tensors: Mapping[str | int, Any]) -> FileStatistics:
    """Return the statistics of the model in an ONNX file; nothing is run, and weights are not read.

    Only matrices that may be copies of others are looked at.

    Args:
        sizes: sizes of inputs by name or position; other inputs keep the sizes in the file.
        tensors: inputs given as tensors, by name or position; values of small ones are used.

    Raises:
        InputError: a size does not fit.
        ModelFileError: the file is broken.
        MissingExtraError: onnx is not installed.
    """
    import_onnx()
    budget = Budget.of_size(path.stat().st_size)
    values = {name: tensor.detach().cpu() for name, tensor in tensors.items() if not tensor.is_meta}
    try:
        program = contained(lambda: _program(path, sizes, values), budget)
    except ShapeMismatchError as error:
        raise (InputError if sizes else ModelFileError)(str(error)) from None
    return FileStatistics(program, path, budget)


def _program(path: Path, sizes: GivenSizes, tensors: Mapping[str | int, Any]) -> Program:
    outline = read_outline(path)
    budget = Budget.of_size(len(outline.data))  # weights are not read
    limit_seconds(budget)
    model = outline.parsed()
    check_texts(model)
    stored = stored_in(model)
    called = inline_functions(model, budget)
    files = check_model(model, path, budget, left_out=outline.left_out, drop_weights=True)
    copies = copies_in(model.graph, path, outline.left_out)
    missing = sorted(name for name in files if not (path.parent / name).exists())
    name_open_dimensions(model.graph)
    if sizes:
        bind(model.graph, sizes)
    values = values_of_inputs(model.graph, tensors) if tensors else {}
    notes = infer_types(model, values, budget)
    program = program_of(model, called, copies, budget)
    if missing:
        notes.append(f"weights are missing: {', '.join(missing)[:80]}")
    program.notes += notes
    program.stored = stored
    return program

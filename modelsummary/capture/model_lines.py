"""The line of the model's code that an operator comes from."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import CodeType

import torch

from modelsummary.operators.operator_calls import Line

__all__ = ["is_of_model", "model_line"]

_PACKAGE = Path(__file__).parents[1]
_FOREIGN = (f"{Path(torch.__file__).parent}{os.sep}", f"{_PACKAGE}{os.sep}", "<")  # "<": code that was made of a text
_RUNNER = str(Path(__file__).with_name("step.py"))
_ENGINE = "_engine_run_backward"  # the function of torch that runs a backward
# By the id of the code, which is kept: to hash it takes longer. None: the frames below do not belong to the operator.
_kinds: dict[int, tuple[CodeType, bool | None]] = {}


def model_line() -> Line | None:
    """Return the line of the innermost frame that is neither torch's nor this package's.

    None in a node of a backward that C++ runs, and in an observed step of a model of torch's own modules.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        kind = _kinds.get(id(code))
        if kind is None:
            kind = _kinds[id(code)] = code, _kind_of(code)
        is_model = kind[1]
        if is_model is None:
            return None
        if is_model:
            return Line(code.co_filename, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def is_of_model(file: str) -> bool:
    """Return True for a file that is neither torch's nor of this package."""
    return not file.startswith(_FOREIGN)


def _kind_of(code: CodeType) -> bool | None:
    if code.co_filename == _RUNNER or code.co_name == _ENGINE:  # below are the user's own lines
        return None
    return is_of_model(code.co_filename)

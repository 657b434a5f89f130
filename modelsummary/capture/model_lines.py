"""The line of the model's code that an operator comes from."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType

import torch

from modelsummary.operators.operator_calls import Line

__all__ = ["model_line"]

_PACKAGE = Path(__file__).parents[1]
_FOREIGN = (f"{Path(torch.__file__).parent}/", f"{_PACKAGE}/", "<")  # "<": code that was made of a text
_RUNNER = str(Path(__file__).with_name("step.py"))
_kinds: dict[CodeType, bool | None] = {}  # None: it runs the step; the frames below it are the user's, not the model's


def model_line() -> Line | None:
    """Return file and line of the innermost frame of the step that runs which is neither torch's nor this package's.

    None in a backward, which C++ runs, and where a model of torch's own modules has no code.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        try:
            is_model = _kinds[code]
        except KeyError:
            is_model = _kinds[code] = _kind_of(code)
        if is_model is None:
            return None
        if is_model:
            return code.co_filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _kind_of(code: CodeType) -> bool | None:
    if code.co_filename == _RUNNER:
        return None
    return not code.co_filename.startswith(_FOREIGN)

"""What torch's compilers cannot follow: graph breaks, integers that change, and what ``torch.export`` refuses."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from traceback import FrameSummary, extract_tb
from typing import Any

import torch

from modelsummary import _torch
from modelsummary._torch import CompiledRuns
from modelsummary.capture.model_lines import is_of_model
from modelsummary.capture.modules import modules_of, tensors_of_modules
from modelsummary.capture.run import running
from modelsummary.errors import in_short
from modelsummary.findings.evidence import Evidence
from modelsummary.findings.ruleset import Defect, rule
from modelsummary.operators.operator_calls import Line

_RUNS = 3  # the second may compile once more, as for an attribute that the first one sets
_JUMP = "generic_jump"  # torch's word for a branch by the value of a tensor
_BY_VALUE = "decide by shapes, or compute both sides and choose by torch.where"
_CHANGE = "change the forward there"
_ON_VALUES = re.compile(r"data.?dependent|\bu\d+\b", re.IGNORECASE)
_GUARD = re.compile(r"(?:\d+/\d+: )?(?P<guard>[^#]*?)\s*# .*# (?P<file>\S*?):(?P<line>\d+) in ")
_VALUE = re.compile(r" *==.*$")
_MODULE = re.compile(r"\._modules\['([^']+)'\]")
_NO_VALUES = "Graph breaks and recompilations are not checked: they need values, and the model has tensors on meta"
_Failure = tuple[str, Line | None]  # what was raised, and where


@rule("B951", "graph-break", on_request=True)
def graph_break(evidence: Evidence) -> Iterator[Defect]:
    """Yield lines at which ``torch.compile`` ends a graph and returns to Python.

    The model runs three times for real, compiled without generating kernels.
    """
    compiled = _compiled(evidence)
    if isinstance(compiled, tuple):
        what, line = compiled
        yield Defect(f"torch.compile raises {what}", _CHANGE, evidence.row_of(line), line, is_call=False)
        return
    seen: set[tuple[str, Line | None]] = set()
    for reason, stack in compiled.breaks if compiled is not None else ():
        line = _line_of(stack)
        what, remedy = _words(reason)
        if (what, line) not in seen:
            seen.add((what, line))
            yield Defect(f"breaks the graph: {what}", remedy, evidence.row_of(line), line, is_call=False)


@rule("B952", "recompiles", on_request=True)
def recompiles(evidence: Evidence) -> Iterator[Defect]:
    """Yield what makes ``torch.compile`` compile again in each call, as an integer attribute that a forward changes.

    After eight compilations it gives up, and the function runs eagerly.
    """
    compiled = _compiled(evidence)
    if not isinstance(compiled, CompiledRuns) or not compiled.graphs[-1]:
        return
    remedy = "keep it in a tensor, such as a buffer, or pass it as an argument"
    for reason in dict.fromkeys(compiled.recompilations) or [""]:
        match = _GUARD.match(reason)
        file = None if match is None else evidence.file_of(match["file"])
        line = None if match is None or file is None else Line(file, int(match["line"]))
        guard = match["guard"] if match else reason.partition("\n")[0] or "a guard"
        changing = _MODULE.sub(r".\1", _VALUE.sub("", guard))
        what = f"is compiled again in each call: {changing} changes"
        yield Defect(what, remedy, evidence.row_of(line), line, is_call=False)


@rule("B953", "not-exportable", on_request=True)
def not_exportable(evidence: Evidence) -> Iterator[Defect]:
    """Yield the first line that ``torch.export`` refuses."""
    model = evidence.live.model
    with _torch.quiet(), _running(evidence) as (_, args, kwargs):
        failure = _failure(lambda: torch.export.export(model, args, kwargs, strict=False))
    if failure is not None:
        what, line = failure
        remedy = _BY_VALUE if _ON_VALUES.search(what) else _CHANGE if line else "change what it takes or returns"
        yield Defect(f"torch.export raises {what}", remedy, evidence.row_of(line), line, is_call=False)


def _running(evidence: Evidence) -> AbstractContextManager[tuple[object, tuple[Any, ...], dict[str, Any]]]:
    modules = modules_of(evidence.live.model)
    return running(modules, evidence.live.call, on_shapes=False, grad=evidence.trace.train, as_is=True)


def _compiled(evidence: Evidence) -> CompiledRuns | _Failure | None:
    """Return what was compiled, or what was raised; None if the model has no values."""
    if "compiled" not in evidence.answers:
        evidence.answers["compiled"] = _compile(evidence)
    compiled: CompiledRuns | _Failure | None = evidence.answers["compiled"]
    return compiled


def _compile(evidence: Evidence) -> CompiledRuns | _Failure | None:
    model, compiled = evidence.live.model, CompiledRuns()
    if any(tensor.is_meta for tensor in (*tensors_of_modules(modules_of(model)), *evidence.live.call.tensors())):
        evidence.notes.append(_NO_VALUES)
        return None
    with _torch.quiet(), _running(evidence) as (_, args, kwargs):
        failure = _failure(lambda: _torch.compile_runs(lambda: model(*args, **kwargs), _RUNS, compiled))
    return failure or compiled


def _failure(function: Callable[[], object]) -> _Failure | None:
    """Return what a function raises, and the innermost line of the model's code; None if it returns."""
    try:
        function()
    except Exception as error:
        return in_short(error).partition(" (unhinted")[0].partition(". ")[0], _line_of(extract_tb(error.__traceback__))
    return None


def _line_of(stack: list[FrameSummary]) -> Line | None:
    """Return the innermost line of the model's code."""
    frame = next((frame for frame in reversed(stack) if is_of_model(frame.filename)), None)
    return None if frame is None or frame.lineno is None else Line(frame.filename, frame.lineno)


def _words(reason: str) -> tuple[str, str]:
    r"""Return what torch says of a graph break, and what to do.

    >>> _words("Unsupported Tensor.item() call\n  Explanation: ...\n  Hint: Set `capture_scalar_outputs`.")
    ('Unsupported Tensor.item() call', 'Set `capture_scalar_outputs`')
    """
    what, *lines = reason.strip().splitlines()
    if what.startswith(_JUMP) or what.startswith("Data-dependent branching"):
        return "it branches on the value of a tensor", _BY_VALUE
    hints = [line.partition("Hint:")[2].strip().rstrip(".") for line in lines if "Hint:" in line]
    return what.rstrip("."), next(iter(hints), "") or _CHANGE

"""Shared memory and hooks that surprise later; operators without a formula, and runs that had to be real."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from torch import nn

from modelsummary.findings.evidence import Evidence
from modelsummary.findings.ruleset import Defect, rule
from modelsummary.operators.operator_calls import Line

_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}


@rule("T801", "parameters-share-memory", "error")
def parameters_share_memory(evidence: Evidence) -> Iterator[Defect]:
    """Yield different parameters in the same memory: a tie that copies, checkpoints and optimizers do not see.

    ``a.weight.data = b.weight.data`` makes one. The optimizer updates the memory twice, and ``to()`` and
    ``load_state_dict(assign=True)`` undo it. A tie is one parameter under two names.
    """
    ends: dict[int, list[tuple[int, int, str, nn.Parameter]]] = defaultdict(list)
    seen: set[int] = set()
    for name, parameter in evidence.parameters.items():
        if id(parameter) in seen or not _is_dense(parameter):
            continue
        seen.add(id(parameter))
        begin = int(parameter.storage_offset()) * parameter.element_size()
        ends[parameter.untyped_storage()._cdata].append((begin, begin + parameter.nbytes, name, parameter))
    for spans in ends.values():
        spans.sort(key=lambda span: span[:2])
        for (_, end, first, _), (begin, _, second, parameter) in pairwise(spans):
            if begin < end:
                fqn, _, local = second.rpartition(".")
                what = f"{local} has the memory of {first}, but is another parameter"
                yield Defect(
                    what, "assign the parameter itself to tie them", (fqn, 0), nbytes=parameter.nbytes, is_call=False
                )


def _is_dense(parameter: nn.Parameter) -> bool:
    try:
        return parameter.numel() > 0 and parameter.is_contiguous() and bool(parameter.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError, ValueError):  # lazy, sparse or a wrapper
        return False


@rule("T802", "hooks-left", "note")
def hooks_left(evidence: Evidence) -> Iterator[Defect]:
    """Yield modules with hooks of other code than torch's, which run in each call."""
    for fqn, module in evidence.modules.items():
        for attribute, kind in _HOOKS.items():
            functions = [_function(hook) for hook in (getattr(module, attribute, None) or {}).values()]
            foreign = [function for function in functions if not (function.__module__ or "").startswith("torch.")]
            if foreign:
                names = sorted({getattr(function, "__qualname__", type(function).__name__) for function in foreign})
                code = getattr(foreign[0], "__code__", None)
                line = None if code is None else Line(code.co_filename, code.co_firstlineno)
                remedy = "remove it by the handle that registering it returned, if it is not needed"
                yield Defect(f"has a {kind}: {', '.join(names)}", remedy, (fqn, 0), line, is_call=False)


def _function(hook: Any) -> Any:
    """Return the function behind a partial or a bound method."""
    while hasattr(hook, "func"):
        hook = hook.func
    return getattr(hook, "__func__", hook)


@rule("C901", "operator-not-counted", "note")
def operator_not_counted(evidence: Evidence) -> Iterator[Defect]:
    """Yield operators that look like products but have no formula: multiply-adds and times are too small."""
    counts: Counter[tuple[Any, str]] = Counter()
    for index, call in evidence.forward():
        if call.cost.uncounted is not None:
            counts[evidence.row(index), call.cost.uncounted] += 1
    for row, name in counts:
        yield Defect(f"multiply-adds of {name} are not counted", "register a formula by register_op_cost", row)


@rule("C902", "real-run", "note")
def real_run(evidence: Evidence) -> Iterator[Defect]:
    """Yield the reason why the forward could not run on shapes alone."""
    if evidence.fallback_reason is not None:
        remedy = (
            "compilers and exports cannot follow it either: decide by shapes, and register fake implementations of own "
            "operators (torch.library.register_fake)"
        )
        yield Defect(f"runs for real: {evidence.fallback_reason}", remedy, is_call=False)

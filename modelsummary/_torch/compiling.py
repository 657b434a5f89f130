"""What ``torch.compile`` makes of a function. All names hold from torch 2.6 to 2.14; in 2.6, reasons may be missing."""

from __future__ import annotations

import gc
import logging
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from traceback import FrameSummary
from types import CodeType, FunctionType
from typing import Any

import torch

from modelsummary._torch.swapping import swapped

__all__ = ["CompiledRuns", "compile_runs", "isolated_compiling", "quiet"]


@dataclass
class CompiledRuns:
    """What was compiled while a function ran several times.

    Attributes:
        graphs: number of graphs that each run compiled.
        breaks: why a graph ended before its function, and the stack there, innermost frame last.
        recompilations: the guards that failed in the last run, as torch words them.
    """

    graphs: list[int] = field(default_factory=list)
    breaks: list[tuple[str, list[FrameSummary]]] = field(default_factory=list)
    recompilations: list[str] = field(default_factory=list)


def compile_runs(function: Callable[[], object], runs: int, compiled: CompiledRuns) -> None:
    """Compile a function without generating kernels, run it several times, and note what was compiled."""
    from torch._dynamo.utils import get_compilation_metrics

    def backend(graph: Any, _: Any) -> Any:
        compiled.graphs[-1] += 1
        reason = getattr(graph, "compile_subgraph_reason", None)
        if reason is not None and reason.graph_break:
            compiled.breaks.append((reason.reason, list(reason.user_stack)))
        return graph.forward

    with isolated_compiling():
        call = torch.compile(function, backend=backend)
        for _ in range(runs):
            compiled.graphs.append(0)
            earlier = list(get_compilation_metrics())  # holds them, so that ids stay their own
            call()
            seen = set(map(id, earlier))
            metrics = [metric for metric in get_compilation_metrics() if id(metric) not in seen]
            reasons = [getattr(metric, "recompile_reason", None) for metric in metrics]
            compiled.recompilations = [reason for reason in reasons if reason]


@contextmanager
def quiet() -> Iterator[None]:
    """Run the body without the warnings and the log of torch's compilers, and without what is printed."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# -------------------------------------------------------------------------------------------- isolation


@contextmanager
def isolated_compiling(skipped: Sequence[str] = ()) -> Iterator[None]:
    """Run the body with a ``torch.compile`` that has compiled nothing yet, and that forgets what it compiles in it.

    What was compiled before stays compiled.

    Args:
        skipped: files and folders whose functions are not compiled.
    """
    from torch._C._dynamo import eval_frame as entries
    from torch._dynamo import convert_frame, eval_frame, pgo, resume_execution, trace_rules, utils

    codes = [code for code in (code() for code in convert_frame.input_codes.seen) if code is not None]
    kept = {id(code): code for code in codes if entries._debug_get_cache_entry_list(code)}  # equal ones are others
    compiled, made = convert_frame.Tracker(), convert_frame.Tracker()
    resumed = resume_execution.ContinueExecutionCache
    fresh: list[tuple[Any, str, Any]] = [
        (convert_frame, "input_codes", compiled),
        (convert_frame, "output_codes", made),
        (convert_frame, "FRAME_COUNTER", 0),
        (convert_frame, "FRAME_COMPILE_COUNTER", Counter()),
        (pgo, "_CODE_STATE", defaultdict(pgo.CodeState)),
        (pgo, "_INIT_CODE_STATE", None),
        (resumed, "cache", type(resumed.cache)()),
        (trace_rules, "SKIP_DIRS", [*trace_rules.SKIP_DIRS, *skipped]),
        (trace_rules, "SKIP_DIRS_RE", None),
    ]
    counted = (utils.counters, *utils.counters.values())
    with ExitStack() as stack:
        for owner, name, value in fresh:
            stack.enter_context(swapped(owner, name, value))
        trace_rules._recompile_re()
        for contents in (utils.guard_failures, utils.warn_once_cache, eval_frame.cached_backends, *counted):
            stack.enter_context(_restored(contents))
        stack.enter_context(_other_codes(kept.values()))
        n_reasons = len(utils.graph_break_reasons)
        try:
            yield
        finally:
            del utils.graph_break_reasons[n_reasons:]
            for code in (code() for code in (*compiled.seen, *made.seen)):
                if code is not None and id(code) not in kept:
                    entries.reset_code(code)


@contextmanager
def _restored(contents: Any) -> Iterator[None]:
    """Run the body, and give a dict or a set the items back that it had."""
    before = type(contents).copy(contents)
    try:
        yield
    finally:
        contents.clear()  # in place, as other modules of torch hold them
        contents.update(before)


@contextmanager
def _other_codes(codes: Collection[CodeType]) -> Iterator[None]:
    """Run the body with copies of the code objects of all functions that have one of these.

    What is compiled of a function is stored with its code object.
    """
    copies = {id(code): code.replace() for code in codes}
    functions = [function for function in gc.get_referrers(*codes) if type(function) is FunctionType] if codes else []
    before = [(function, function.__code__) for function in functions if id(function.__code__) in copies]
    try:
        for function, code in before:
            function.__code__ = copies[id(code)]
        yield
    finally:
        for function, code in before:
            function.__code__ = code

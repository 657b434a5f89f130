"""What ``torch.compile`` makes of a function. All names hold from torch 2.6 to 2.14; in 2.6, reasons may be missing."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from traceback import FrameSummary
from typing import Any

import torch

__all__ = ["CompiledRuns", "compile_runs", "quiet"]


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
    """Compile a function without generating kernels, run it several times, and note what was compiled.

    As ``torch._dynamo.explain``, it drops what ``torch.compile`` compiled before: compiled functions compile again.
    """
    import torch._dynamo as dynamo
    from torch._dynamo.utils import get_compilation_metrics

    def backend(graph: Any, _: Any) -> Any:
        compiled.graphs[-1] += 1
        reason = getattr(graph, "compile_subgraph_reason", None)
        if reason is not None and reason.graph_break:
            compiled.breaks.append((reason.reason, list(reason.user_stack)))
        return graph.forward

    dynamo.reset()
    try:
        call = torch.compile(function, backend=backend)
        for _ in range(runs):
            compiled.graphs.append(0)
            earlier = list(get_compilation_metrics())  # holds them, so that ids stay their own
            call()
            seen = set(map(id, earlier))
            metrics = [metric for metric in get_compilation_metrics() if id(metric) not in seen]
            reasons = [getattr(metric, "recompile_reason", None) for metric in metrics]
            compiled.recompilations = [reason for reason in reasons if reason]
    finally:
        dynamo.reset()


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

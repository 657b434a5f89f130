"""What ``torch.compile`` makes of a function. Names hold from torch 2.6 to 2.14, unless noted."""

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
from torch import fx

from modelsummary._torch.swapping import swapped
from modelsummary.errors import InputError

__all__ = [
    "CompiledRuns",
    "cause_in_compiler",
    "compile_runs",
    "compiler_settings",
    "inductor_graphs",
    "isolated_compiling",
    "quiet",
    "taken_as_tensors",
]


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


def cause_in_compiler(error: Exception) -> BaseException | None:
    """Return the error that made a compiler raise; None if no compiler raised it."""
    from torch._dynamo.exc import TorchDynamoException

    if not isinstance(error, TorchDynamoException):
        return None
    cause: BaseException = getattr(error, "inner_exception", None) or error
    while (
        earlier := cause.__cause__ or (cause.__context__ if isinstance(cause, TorchDynamoException) else None)
    ) is not None:
        cause = earlier
    return cause


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


def compiler_settings() -> tuple[Any, ...]:
    """Return what tells whether the settings of torch's compilers have changed."""
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config

    return tuple(getattr(torch, name).config.get_hash() for name in ("_dynamo", "_functorch", "_inductor"))


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
    compiled, made_codes = convert_frame.Tracker(), convert_frame.Tracker()
    resumed = resume_execution.ContinueExecutionCache
    fresh: list[tuple[Any, str, Any]] = [
        (convert_frame, "input_codes", compiled),
        (convert_frame, "output_codes", made_codes),
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
            for code in (code() for code in (*compiled.seen, *made_codes.seen)):
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


# ------------------------------------------------------------------------------------- graphs without kernels


@contextmanager
def taken_as_tensors(kind: type) -> Iterator[None]:
    """Run the body with a compiler that takes tensors of a class as plain tensors, as do the graphs that it makes.

    It refuses other classes with a ``__torch_dispatch__``.

    Raises:
        InputError: the compiler of this version cannot be told.
    """
    import torch._functorch.config as functorch
    from torch._dynamo.variables import builder

    if not hasattr(builder, "infer_subclass_type"):
        raise InputError(
            f"a compiled step on shapes needs torch >= 2.11, got {torch.__version__}; "
            "pass execution='real' to Statistics"
        )
    wrappers = builder.VariableBuilder._type_dispatch()
    original = builder.infer_subclass_type
    checks = "check_custom_op_aliasing"  # by a mode that takes no such tensors; older versions of torch have none
    changes = {checks: False} if hasattr(functorch, checks) else {}
    wrappers[kind] = builder.VariableBuilder.wrap_tensor
    try:
        with (
            swapped(builder, "infer_subclass_type", lambda value: None if type(value) is kind else original(value)),
            functorch.patch(changes),
        ):
            yield
    finally:
        del wrappers[kind]


def inductor_graphs(graph: fx.GraphModule, inputs: Any, run: Callable[[fx.GraphModule, bool, list[Any]], Any]) -> Any:
    """Compile a graph as Inductor does, up to the graphs of forward and backward that it makes kernels of.

    Args:
        run: runs such a graph instead of kernels: takes it, whether it is a backward, and the list of its arguments,
            which it empties so that each can be freed after its last use.
    """
    import torch._functorch.config as functorch
    from torch._inductor import compile_fx, config

    def compiled(graph: fx.GraphModule, _: Any, *, is_backward: bool = False, **__: Any) -> Callable[..., Any]:
        def call(args: list[Any]) -> Any:
            return run(graph, is_backward, args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    # padding measures products on the device, and the cache has kernels that were compiled before
    with config.patch(shape_padding=False), functorch.patch(enable_autograd_cache=False):
        return compile_fx.compile_fx(graph, inputs, inner_compile=compiled)  # type: ignore[arg-type]

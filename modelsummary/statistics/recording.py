"""Record a model for its statistics: run it once, or read a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from typing import Any, Literal

from torch import nn

from modelsummary.capture import Recording, capture, check_execution, list_layers
from modelsummary.capture.input_data import call_arguments
from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.live import LiveModel
from modelsummary.capture.modules import ModelParts, is_compiled, unwrap
from modelsummary.capture.run import no_collection
from modelsummary.errors import ForwardError, InputError
from modelsummary.statistics.forward_error import failure
from modelsummary.statistics.model_statistics import ModelStatistics
from modelsummary.views.cells import TableOptions

__all__ = ["Recorded", "live_model", "record_model", "statistics_of_file"]

Recorded = tuple[CallArguments | None, Recording]  # arguments of the call (None without an input), and its recording


def record_model(
    model: Any,
    input_data: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    execution: str,
    **described: Any,
) -> Recorded:
    """Run a model once and return its recording; see ``Statistics`` and ``call_arguments`` for the arguments.

    Raises:
        InputError: an argument is unusable.
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"expected a torch.nn.Module, got {type(model).__name__}: {model!r:.80}{_meant(model, input_data)}"
        )
    with no_collection():
        parts = ModelParts.of(unwrap(model))
    if input_data is None and not args and not kwargs:
        input_data = getattr(parts.model, "example_input_array", None)
    call = call_arguments(parts, input_data, args, kwargs, **described)
    check_execution(execution)
    if call is None:
        return call, list_layers(parts)
    recording = capture(parts, call, execution)
    return replace(call, computes_gradients=recording.computes_gradients), recording


def _meant(model: Any, input_data: Any) -> str:
    """Return what to pass instead of ``model``, which is not a module; empty if that is not clear."""
    if isinstance(model, type):
        return "; pass an instance, not the class"
    if isinstance(input_data, nn.Module):
        return "; the model comes first: Statistics(model, input_data)"
    if isinstance(model, Mapping):
        return "; if these are weights, make the model and call its load_state_dict"
    return ""


def live_model(called: nn.Module, recorded: Recorded, stats: ModelStatistics) -> LiveModel | None:
    """Return the live model, which can run again; None without an input.

    Raises:
        ForwardError: the forward raised; ``error.partial`` holds the facts in ``stats``, recorded up to that call.
    """
    call, recording = recorded
    if call is None:
        return None
    if recording.error is not None:
        if call.nothing_found:
            raise InputError(call.nothing_found) from recording.error
        if isinstance(recording.error, InputError):
            raise recording.error
        partial = ModelStatistics(stats.root, **stats._facts(), options=stats.options)
        raise ForwardError(failure(unwrap(called), call, recording), partial) from recording.error
    compiled = called if is_compiled(called) else None
    return LiveModel(unwrap(called), call, recording.execution, stats.batch_dim, compiled, recording.added)


def statistics_of_file(
    path: str | PathLike[str],
    input_data: Any = None,
    *args: Any,
    branching: bool = True,
    depth: int | Literal["auto"] | None = "auto",
    run: bool = False,
    **options: Any,
) -> ModelStatistics:
    """Return the statistics of a file, as ``Statistics(path)`` does."""
    from modelsummary import load

    if args or options:
        refused = ", ".join(options) or "further positional arguments"
        raise InputError(f"{path!r} is a file, which takes input_data, branching, depth and run only; got {refused}")
    stats = load(path, input_data, run=run)
    stats.options = TableOptions(branching=branching, depth=depth)
    return stats

"""``Statistics``: capture a model."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

import torch
from torch import nn

from modelsummary.capture import Recording, capture, check_execution, list_layers
from modelsummary.capture.exclusive import exclusive
from modelsummary.capture.inputs import CallArguments, call_arguments
from modelsummary.capture.modules import is_compiled, unwrap
from modelsummary.capture.run import no_collection
from modelsummary.errors import DataDependentError, ForwardError, InputError
from modelsummary.memory.estimate import MemoryMeasurement
from modelsummary.statistics.model_statistics import ModelStatistics
from modelsummary.views.cells import TableOptions

__all__ = ["Statistics", "measure_memory"]


class Statistics(ModelStatistics):
    """Run a model once, on shapes by default, and keep what is known of every layer.

    ::

        stats = Statistics(resnet152(), (1, 3, 224, 224))
        print(stats)
        stats["layer1.0.conv1"].macs

    Nothing is computed in shape-only execution: a model of any size takes the time of its Python code.
    The model is afterwards as it was, also after an exception.

    Args:
        model: the model; inside ``torch.compile``, ``DataParallel`` or ``DistributedDataParallel`` the
            wrapped model is summarised. The path of a file gives what ``modelsummary.load`` says of it, with
            ``input_data`` as ``input``; of the options only ``branching`` and ``depth`` apply.
        input_data: a tensor; a tuple or list of the forward's positional arguments; a dict of its keyword
            arguments; a size such as ``(1, 3, 224, 224)`` or a list of sizes; numpy arrays in place of
            tensors. A list is one argument where forward annotates its first parameter as a list.
            None and no further arguments: the ``example_input_array`` of a LightningModule; without one no
            forward, names and parameters only.
        *args: further positional arguments of the forward.
        **kwargs: further arguments by keyword. (One named like an argument of this call, such as ``depth``, goes into
            an ``input_data`` dict.)
        batch_dim: None: sizes include the batch. An integer: a batch of one is inserted there into each
            size, and this dimension is printed as -1. The numbers are those of the batch that ran.
        branching: print the tree; False prints FQNs.
        depth: print the levels down to this one; None prints all. All levels are recorded.
        device: where real execution puts the inputs; default: sizes are made where the model is.
        dtypes: dtype of each size; default: that of the first floating point parameter.
        execution: ``"shape"``: on shapes only; ``"real"``: compute; ``"auto"``: on shapes, and really if
            that is impossible. ``stats.execution`` and ``stats.fallback_reason`` tell what happened.
        latency: run the model for real and time every call: ``measure_latency()`` with its defaults.
        reuse: on shapes, run modules that are provably the same (equal class, configuration, shapes and
            arguments, code that sees nothing else) once; ``stats.reused_calls`` tells how many calls were
            spared. The result is that of running all of them; False runs all of them.

    Raises:
        InputError: an argument is unusable.
        ForwardError: the forward raised; ``error.partial`` holds what was recorded up to there.
    """

    def __new__(cls, model: Any = None, *args: Any, **options: Any) -> Any:
        """A path makes no ``Statistics``, but the statistics of that file."""
        if isinstance(model, (str, PathLike)):
            return _of_file(model, *args, **options)
        return super().__new__(cls)

    @exclusive
    def __init__(
        self,
        model: nn.Module | str | PathLike[str],
        input_data: Any = None,
        *args: Any,
        batch_dim: int | None = None,
        branching: bool = True,
        depth: int | None = None,
        device: torch.device | str | None = None,
        dtypes: torch.dtype | Sequence[torch.dtype] | None = None,
        execution: str = "auto",
        latency: bool = False,
        reuse: bool = True,
        **kwargs: Any,
    ) -> None:
        if not isinstance(model, nn.Module):
            hint = "; pass an instance, not the class" if isinstance(model, type) else ""
            raise InputError(f"expected a torch.nn.Module, got {type(model).__name__}: {model!r:.80}{hint}")
        options = TableOptions(branching=branching, depth=depth)
        called, model = model, unwrap(model)
        if input_data is None and not args and not kwargs:
            input_data = getattr(model, "example_input_array", None)
        with no_collection():
            call = call_arguments(model, input_data, args, kwargs, batch_dim=batch_dim, device=device, dtypes=dtypes)
        check_execution(execution)
        recording = list_layers(model) if call is None else capture(model, call, execution, reuse=reuse)
        with no_collection():
            self._fill(called, call, recording, batch_dim=batch_dim, options=options)
        if latency:
            self.measure_latency()

    def _fill(
        self,
        called: nn.Module,
        call: CallArguments | None,
        recording: Recording,
        *,
        batch_dim: int | None,
        options: TableOptions | None = None,
    ) -> None:
        """Take over what was recorded; raises ``ForwardError`` where the forward did."""
        facts: dict[str, Any] = {
            "execution": recording.execution,
            "fallback_reason": recording.fallback_reason,
            "batch_dim": batch_dim,
            "options": options,
        }
        ModelStatistics.__init__(self, recording.root, **facts)
        self.reused_calls = recording.reused_calls
        self._call = call
        self._called = called if is_compiled(called) else None
        if call is not None and recording.error is not None:
            if call.nothing_found:
                raise InputError(call.nothing_found) from recording.error
            partial = ModelStatistics(recording.root, **facts)
            raise ForwardError(_failure(recording, call.size_dtypes), partial) from recording.error


def measure_memory(model: nn.Module, input_data: Any, mode: str = "train", **options: Any) -> MemoryMeasurement:
    """What a step of ``model`` really takes, beside the prediction: ``Statistics(...).measure_memory(...)``.

    Args:
        model, input_data: as for ``Statistics``.
        mode: as for ``ModelStatistics.memory``.
        **options: as for ``ModelStatistics.memory``.
    """
    return Statistics(model, input_data).measure_memory(mode, **options)


def _of_file(
    path: str | PathLike[str],
    input_data: Any = None,
    *args: Any,
    branching: bool = True,
    depth: int | None = None,
    **options: Any,
) -> ModelStatistics:
    """``Statistics(path)``."""
    from modelsummary import load

    if args or options:
        refused = ", ".join(options) or "further positional arguments"
        raise InputError(f"{path!r} is a file, which takes input_data, branching and depth only; got {refused}")
    stats = load(path, input_data)
    stats.options = TableOptions(branching=branching, depth=depth)
    return stats


def _failure(recording: Recording, size_dtypes: list[torch.dtype]) -> str:
    """One line: which layer failed, with which inputs, and how."""
    error = recording.error
    text = str(error).strip().splitlines()
    what = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    remedy = ""
    if isinstance(error, DataDependentError):
        remedy = "; use execution='auto' or 'real', with a model and inputs that hold values"
    elif size_dtypes and ("dtype" in what or "scalar type" in what):
        given = ", ".join(map(str, size_dtypes))
        remedy = f"; the inputs given by size are {given}: pass dtypes=[...], torch.long for indices"
    if not recording.failed:
        return f"{recording.root.class_name} could not be called: {what}{remedy}"
    layer = recording.failed[0]
    where = f"{layer.fqn} ({layer.class_name})" if layer.fqn else layer.class_name
    return f"forward of {where} failed with input {layer.input_size}: {what}{remedy}"

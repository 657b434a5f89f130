"""``summary``: torchinfo's signature, table and result, made from what ``Statistics`` records."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from modelsummary.capture import capture, list_layers
from modelsummary.capture.containers import is_array
from modelsummary.capture.devices import named_device
from modelsummary.capture.exclusive import exclusive
from modelsummary.capture.input_data import call_arguments
from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.modules import ModelParts, unwrap
from modelsummary.errors import InputError, check_integers, harmless
from modelsummary.layer_info import LayerInfo
from modelsummary.statistics import Statistics
from modelsummary.torchinfo.enums import ColumnSettings, Mode, RowSettings, Verbosity
from modelsummary.torchinfo.formatting import FormattingOptions, render_summary
from modelsummary.torchinfo.rows import SummaryRow, pruned, summary_rows

__all__ = ["SummaryStatistics", "clear_cached_forward_pass", "summary"]

_DEFAULT_COLUMNS = (ColumnSettings.OUTPUT_SIZE, ColumnSettings.NUM_PARAMS)
_NEED_INPUT = (ColumnSettings.INPUT_SIZE, ColumnSettings.OUTPUT_SIZE, ColumnSettings.MULT_ADDS)


@exclusive
def summary(
    model: nn.Module,
    input_size: Sequence[Any] | None = None,
    input_data: Any = None,
    batch_dim: int | None = None,
    cache_forward_pass: bool | None = None,  # noqa: ARG001 - an argument of torchinfo
    col_names: Iterable[str] | None = None,
    col_width: int = 25,
    depth: int = 3,
    device: torch.device | str | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    mode: str | None = None,
    row_settings: Iterable[str] | None = None,
    verbose: int | None = None,
    **kwargs: Any,
) -> SummaryStatistics:
    """Print the table of a model as torchinfo does, and return the statistics.

    Take the arguments of ``torchinfo.summary``; docs/torchinfo.md names the figures that differ. The model is untouched
    afterwards and stays on its device.

    Args:
        model: the model.
        input_size: one size or a sequence of sizes, including the batch. Without ``input_size`` and ``input_data`` the
            model does not run, and the table shows names and parameters only.
        input_data: a tensor or an array; a list or tuple of the forward's positional arguments; a mapping of its
            keyword arguments.
        batch_dim: dimension at which a batch of one is inserted into each of ``input_size``. Default: None, no change.
        cache_forward_pass: ignored; a run on shapes is cheap and is never cached.
        col_names: columns, see ``ColumnSettings``. Default: ``output_size`` and ``num_params``.
        col_width: width of each column but the first, in characters. Default: 25.
        depth: deepest level shown, which includes the parameters and mult-adds below it. Default: 3.
        device: checked, then ignored; the model runs on shapes, or on its own device if it needs values.
        dtypes: dtype of each size. Default: the dtype of the model's first floating point parameter.
        mode: ``"eval"`` (default) or ``"train"`` during the run; ``"same"`` leaves each module in its own mode.
        row_settings: see ``RowSettings``. Default: ``depth``.
        verbose: 0 prints nothing, 1 the table, 2 also each parameter. Default: 1, but 0 in an interactive session,
            which prints the returned value.
        **kwargs: further keyword arguments of the forward.

    Returns:
        The statistics, which print as torchinfo's table.

    Raises:
        InputError: an argument is unusable; it is a ``ValueError``, a ``TypeError`` and a ``RuntimeError``.
        ForwardError: the forward raised; it is a ``RuntimeError``.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    >>> stats = summary(model, (1, 4), col_width=14, verbose=1)
    ====================================================================
    Layer (type:depth-idx)                   Output Shape   Param #
    ====================================================================
    Sequential                               [1, 8]         --
    ├─Linear: 1-1                            [1, 8]         40
    ├─ReLU: 1-2                              [1, 8]         --
    ====================================================================
    Total params: 40
    ...
    >>> stats.total_params, stats.total_mult_adds
    (40, 32)
    """
    with_input = input_size is not None or input_data is not None
    if not isinstance(model, nn.Module):
        raise InputError(f"expected a torch.nn.Module, got {type(model).__name__}: {model!r:.80}")
    if verbose is None:
        verbose = Verbosity.QUIET if getattr(sys, "ps1", "") else Verbosity.DEFAULT
    formatting = FormattingOptions(
        max_depth=depth,
        verbose=verbose,
        col_names=_columns(col_names, with_input),
        col_width=col_width,
        row_settings={
            _member(RowSettings, name, "row_settings")
            for name in _listed(row_settings or [RowSettings.DEPTH], "row_settings")
        },
    )
    _check(verbose, col_width, depth, device)
    if input_size is not None and input_data is not None:
        raise InputError("input_size and input_data are both given; pass only one of them")
    run_mode = Mode.EVAL if mode is None else _member(Mode, mode, "mode")
    if input_size is not None:
        sizes = _sizes(input_size)
        data: Any = sizes
        call = _call(model, sizes, kwargs, batch_dim=batch_dim, dtypes=dtypes)
    else:
        data = _sizes_in(input_data) if with_input else []
        call = _call(model, *_arguments(input_data, kwargs)) if with_input else None
    stats = SummaryStatistics(model, call, run_mode, data, formatting, batch_dim=batch_dim)
    if verbose > Verbosity.QUIET:
        print(stats)
    return stats


def clear_cached_forward_pass() -> None:
    """Do nothing, as no run is cached; torchinfo has this function."""


class SummaryStatistics(Statistics):
    """``ModelStatistics`` printed as torchinfo's table, with torchinfo's attributes; the result of ``summary``.

    Attributes:
        summary_list: rows of the table, including hidden rows and the model, see ``SummaryRow``.
        input_size: size of every tensor in the input, in the structure of the input.
        formatting: ``FormattingOptions``; changes take effect at the next ``print``.
    """

    summary_list: list[SummaryRow]  # type: ignore[assignment]

    def __init__(
        self,
        model: nn.Module,
        call: CallArguments | None,
        mode: Mode,
        input_size: Any,
        formatting: FormattingOptions,
        *,
        batch_dim: int | None,
    ) -> None:
        parts = ModelParts.of(unwrap(model))
        with _in_mode(parts, mode), register_module_forward_hook(_check_output):
            recording = list_layers(parts) if call is None else capture(parts, call, "auto")
        self._fill(model, (call, recording), batch_dim)
        self._pruned = pruned(parts.modules)
        self.summary_list = summary_rows(self.root)
        self.input_size = input_size
        self.formatting = formatting
        formatting.set_layer_name_width(self.summary_list)

    def __iter__(self) -> Iterator[LayerInfo]:
        return (row for row in self.root.walk() if row is not self.root)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def total_params(self) -> int:
        """Elements of all parameters that are not pruned; a tied parameter counts once."""
        return super().total_params - self._pruned.params

    @property
    def trainable_params(self) -> int:
        """Elements of the parameters with ``requires_grad`` that are not pruned."""
        return super().trainable_params - self._pruned.trainable

    @property
    def total_param_bytes(self) -> int:
        """Bytes of all parameter elements that are not pruned, by each parameter's dtype."""
        return super().total_param_bytes - self._pruned.bytes

    @property
    def total_input(self) -> int:
        """``total_input_bytes`` under torchinfo's name."""
        return self.total_input_bytes

    def _of_forward(self, name: str) -> LayerInfo:  # noqa: ARG002
        return self.root  # without a forward torchinfo says 0

    def __str__(self) -> str:
        return harmless(render_summary(self, self.summary_list, self.formatting))

    __repr__ = __str__
    _repr_html_ = None  # type: ignore[assignment]  # a notebook shows the text, as for torchinfo

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": str(self)}


# --------------------------------------------------------------------------------------------- arguments

_Settings = TypeVar("_Settings", bound=Enum)


def _member(kind: type[_Settings], name: str, argument: str) -> _Settings:
    try:
        return kind(name)
    except ValueError:
        names = ", ".join(repr(member.value) for member in kind)
        raise InputError(f"unknown {argument} {name!r}; expected some of: {names}") from None


def _listed(names: Iterable[str], argument: str) -> Iterable[str]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise InputError(f"{argument} must be a list of names, got {names!r}")
    return names


def _columns(names: Iterable[str] | None, with_input: bool) -> tuple[ColumnSettings, ...]:
    if names is None:
        return _DEFAULT_COLUMNS if with_input else (ColumnSettings.NUM_PARAMS,)
    columns = tuple(_member(ColumnSettings, name, "col_names") for name in _listed(names, "col_names"))
    empty = [] if with_input else [column.value for column in columns if column in _NEED_INPUT]
    if empty:
        raise InputError(f"the columns {', '.join(empty)} need a forward; pass input_size or input_data")
    return columns


def _check(verbose: int, col_width: int, depth: int, device: torch.device | str | None) -> None:
    if verbose not in tuple(Verbosity):
        raise InputError(f"verbose must be 0 (nothing), 1 (the table) or 2 (with every parameter), got {verbose!r}")
    check_integers(col_width=col_width)
    check_integers(0, depth=depth)
    if device is not None:
        named_device(device)


def _sizes(input_size: Any) -> list[Any]:
    """Return one or several sizes as a list of sizes."""
    if not isinstance(input_size, (list, tuple)):
        raise InputError(f"input_size must be a size such as (1, 3, 224, 224), or a list of sizes, got {input_size!r}")
    sizes = [input_size] if all(isinstance(dim, int) for dim in input_size) else input_size
    if not all(isinstance(size, (list, tuple)) for size in sizes):
        raise InputError(f"input_size must be one size or hold only sizes, got {input_size!r}")
    if not input_size or any(dim <= 0 for size in sizes for dim in size):
        raise InputError(f"input_size must not be empty, and its numbers must be >= 1, got {input_size!r}")
    return [tuple(size) if size is input_size else size for size in sizes]


def _sizes_in(data: Any) -> Any:
    """Return ``data`` with each tensor or array replaced by its size, and each mapping by a dict."""
    if isinstance(data, Tensor):
        return data.size()
    if is_array(data):
        return torch.Size(data.shape)
    if isinstance(data, Mapping):
        return {key: _sizes_in(value) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*map(_sizes_in, data))
    return type(data)(map(_sizes_in, data)) if isinstance(data, (list, tuple)) else data


def _arguments(input_data: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the forward's positional arguments as a tuple, or its arguments as a dict, and the keyword arguments."""
    if isinstance(input_data, Mapping):
        return dict(input_data), kwargs
    return tuple(input_data) if isinstance(input_data, (list, tuple)) else (input_data,), kwargs


def _call(model: nn.Module, data: Any, kwargs: dict[str, Any], **options: Any) -> CallArguments | None:
    """Return the call of the model, with the inputs on the model's device."""
    parts = ModelParts.of(unwrap(model))
    devices = {tensor.device for tensor in parts.tensors}
    device = next(iter(devices)) if len(devices) == 1 else None
    positional = isinstance(data, tuple) and not any(map(is_array, data))  # numbers in it are arguments, not sizes
    first, others = (None, data) if positional else (data, ())
    return call_arguments(parts, first, others, kwargs, device=device, **options)


# ------------------------------------------------------------------------------------------------ the run


@contextmanager
def _in_mode(parts: ModelParts, mode: Mode) -> Iterator[None]:
    """Run the body with the model in ``mode``, then restore the mode of each module, such as a frozen BatchNorm."""
    modes = [(module, module.training) for module in parts.modules]
    try:
        if mode != Mode.SAME:
            parts.model.train(mode == Mode.TRAIN)
        yield
    finally:
        for module, training in modes:
            if module.training != training:
                module.training = training


def _check_output(module: nn.Module, _args: Any, output: Any) -> None:
    """Raise ``TypeError`` if a module returns a text or a class, which have no size."""
    if isinstance(output, (str, bytes, type)):
        raise TypeError(f"{type(module).__name__} returns {output!r:.80}; expected tensors, or a structure of them")

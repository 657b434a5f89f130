"""``ModelStatistics``: the tree of a model, and everything made from it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from torch import nn

from modelsummary.capture.inputs import CallArguments, available_device, call_like
from modelsummary.capture.latency import LatencyOverhead, measure_latency
from modelsummary.device_spec import DeviceSpec, Precision
from modelsummary.errors import InputError, LayerNotFoundError
from modelsummary.layer_info import LayerInfo, leaf_output_bytes, ledger
from modelsummary.roofline import Roofline, estimate, roofline
from modelsummary.split import By, Cluster, Plans, Stages, Wishes, make_plans
from modelsummary.splitting import ModelSplitter
from modelsummary.views.profile import latency_lines, profile_report
from modelsummary.views.text import TableOptions, render

__all__ = ["ModelStatistics"]


class ModelStatistics:
    """What is known of a model: a tree of ``LayerInfo``, its totals, and views of it.

    Iterating gives the rows in printed order without the root (``summary_list``); ``stats["layer1.conv"]``
    is the first call of a module. It pickles; the rows then have no live module.

    Args:
        root: the row of the model.
        execution: how the numbers came about: ``"shape"``, ``"real"``, or ``"none"`` without a forward.
        fallback_reason: why shape-only execution gave way to real execution, or None.
        batch_dim: dimension that views print as -1, or None.
        options: how ``print`` renders the table.
        call: how the model is called, for what runs it again.
    """

    def __init__(
        self,
        root: LayerInfo,
        *,
        execution: str = "none",
        fallback_reason: str | None = None,
        batch_dim: int | None = None,
        options: TableOptions | None = None,
        call: CallArguments | None = None,
    ) -> None:
        self.root = root
        self.execution = execution
        self.fallback_reason = fallback_reason
        self.batch_dim = batch_dim
        self.options = options or TableOptions()
        self.summary_list = [row for row in root.walk() if row is not root]
        self._call = call
        self._called: nn.Module | None = None  # what to call for the model: a compiled one
        self._cut: ModelSplitter | None = None
        self.latency_overhead: LatencyOverhead | None = None
        self._index: dict[str, list[LayerInfo]] = {}
        for row in root.walk():
            self._index.setdefault(row.fqn, []).append(row)

    # ------------------------------------------------------------------------------------------- access

    def __iter__(self) -> Iterator[LayerInfo]:
        return iter(self.summary_list)

    def __len__(self) -> int:
        return len(self.summary_list)

    def __getitem__(self, fqn: str) -> LayerInfo:
        """First call of the module ``fqn``; ``""`` is the model. Raises ``LayerNotFoundError`` (a KeyError)."""
        return self.calls(fqn)[0]

    def calls(self, fqn: str) -> list[LayerInfo]:
        """All calls of the module ``fqn`` in printed order; one row if it was not called."""
        if not isinstance(fqn, str):
            raise InputError(f"expected a fully qualified name such as 'layer1.0.conv1', got {fqn!r}")
        rows = self._index.get(fqn) or self._index.get(self._first_path(fqn))
        if rows is not None:
            return list(rows)
        close = difflib.get_close_matches(fqn, self._index, n=3)
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise LayerNotFoundError(f"no layer named {fqn!r} in {self.root.class_name}{hint}")

    def _first_path(self, fqn: str) -> str:
        """The FQN of the module that another path leads to; needs the live modules."""
        module = self.root.module
        for name in fqn.split("."):
            module = module._modules.get(name) if module is not None else None
        return next((row.fqn for row in self.root.walk() if module is not None and row.module is module), fqn)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self._index)

    # ------------------------------------------------------------------------------------------- totals

    @property
    def total_params(self) -> int:
        """Elements of all parameters, a tied one counted once."""
        return self.root.num_params

    @property
    def trainable_params(self) -> int:
        """Elements of the parameters with ``requires_grad``."""
        return self.root.trainable_params

    @property
    def total_mult_adds(self) -> int:
        """MACs of one forward of the batch that was passed."""
        return self.root.macs

    @property
    def total_flops(self) -> int:
        """2 x ``total_mult_adds``."""
        return self.root.flops

    @property
    def total_param_bytes(self) -> int:
        """Bytes of all parameters by their dtype."""
        return self.root.params_bytes

    @property
    def total_buffer_bytes(self) -> int:
        """Bytes of all buffers (and packed quantised weights) by their dtype."""
        return self.root.buffer_bytes

    @property
    def total_input_bytes(self) -> int:
        """Bytes of the model's inputs."""
        return self.root.input_bytes

    @property
    def total_output_bytes(self) -> int:
        """Bytes of the outputs of all leaf calls: the forward's activations as modules see them."""
        return leaf_output_bytes(self.root)

    @property
    def uncounted_ops(self) -> dict[str, int]:
        """Operators that look like matrix products and have no MAC formula -> how often each ran."""
        return ledger(self.root)

    # ------------------------------------------------------------------------------------------ latency

    def measure_latency(
        self,
        x: Any = None,
        warmup: int = 3,
        runs: int = 10,
        backward: bool = False,
        device: torch.device | str | None = None,
    ) -> ModelStatistics:
        """Run the model for real and time every call; the model and its state are afterwards as before.

        Fills ``latency_ms``, ``self_latency_ms``, ``latency_share`` and ``latency_iqr_ms`` of every row (medians over
        runs, in milliseconds), ``backward_*`` with ``backward=True``, and ``latency_overhead``. Without a backward the
        model runs without gradients. Marks lie around every call of a module; forwards with and without them take
        turns, and what a mark costs on the CPU is taken off.

        Args:
            x: input with values, of the sizes that were recorded; default: the recorded input, sizes as random values.
            warmup: runs that do not count.
            runs: runs that count.
            backward: time the backward of the output, started with ones.
            device: run a copy there; default: the model, where it is.

        Returns:
            These statistics.

        Raises:
            InputError: an argument is unusable, or the model has no values.
        """
        model, call = self._live("measuring")
        if type(warmup) is not int or type(runs) is not int or warmup < 0 or runs < 1:
            raise InputError(f"warmup={warmup!r}, runs={runs!r}; expected integers, warmup >= 0 and runs >= 1")
        place = None if device is None else available_device(device)
        if x is not None:
            call = call_like(call, model, x)
        options: dict[str, Any] = {"warmup": warmup, "runs": runs, "backward": backward, "device": place}
        self.latency_overhead = measure_latency(self._called or model, call, self.root, **options)
        return self

    def estimate_latency(self, spec: DeviceSpec | str, dtype: Precision | None = None) -> float:
        """The least time of a forward on a device, by its roofline, without a run; for devices one does not have.

        Fills ``estimated_latency_ms`` of every row; ``split(by="latency")`` and ``plan(by="latency")`` use it where
        nothing was measured.

        Args:
            spec: the device, or its name in the table of ``DeviceSpec.of``.
            dtype: of the computation; default: that of most parameters. ``"tf32"`` for float32 with TF32 products.

        Returns:
            Milliseconds.

        Raises:
            InputError: the device or its peak with this dtype is unknown.
        """
        return estimate(self.root, _device_spec(spec), dtype or self._dtype())

    def roofline(self, spec: DeviceSpec | str, dtype: Precision | None = None, *, depth: int | None = None) -> Roofline:
        """Every called module down to ``depth`` against the roof of a device: bound, what limits it, part reached.

        Args:
            spec, dtype: as for ``estimate_latency``.

        Raises:
            InputError: the device or its peak with this dtype is unknown.
        """
        return roofline(self.root, _device_spec(spec), dtype or self._dtype(), depth)

    def _dtype(self) -> torch.dtype:
        """Floating point dtype of most parameters; float32 without any."""
        counts: dict[torch.dtype, int] = {}
        for parameter in self.root.module.parameters() if self.root.module is not None else ():
            if parameter.dtype.is_floating_point:
                counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
        return max(counts, key=lambda dtype: counts[dtype], default=torch.float32)

    def latency_report(self, *, depth: int | None = None, output_file: str | PathLike[str] | None = None) -> str:
        """A line a call, indented by tabs: parameters, latency, share of it, and shapes; also into ``output_file``."""
        return _written(latency_lines(self.root, depth), output_file)

    def profile_report(
        self,
        *,
        top_modules: int = 1,
        module_depth: int | None = None,
        detailed: bool = True,
        output_file: str | PathLike[str] | None = None,
    ) -> str:
        """Totals, the classes that cost most at each depth, and the model's repr with figures, as DeepSpeed shows them.

        Args:
            top_modules: how many classes.
            module_depth: the deepest level shown; None: all.
            detailed: with the repr.
            output_file: where to write it, too.
        """
        options: dict[str, Any] = {"top_modules": top_modules, "module_depth": module_depth, "detailed": detailed}
        device = self.latency_overhead.device if self.latency_overhead is not None else ""
        return _written(profile_report(self.root, **options, device=device), output_file)

    def _live(self, what: str) -> tuple[nn.Module, CallArguments]:
        """The model and its input, for what runs it again."""
        model = self.root.module
        if model is None or self._call is None:
            raise InputError(
                f"{what} needs the live model and an input: Statistics(model, input_data) that was not pickled"
            )
        return model, self._call

    # -------------------------------------------------------------------------------------------- split

    def split(
        self,
        n_stages: int,
        by: By = "macs",
        *,
        max_memory: int | Sequence[int] | None = None,
        boundaries: Sequence[str] | None = None,
        max_crossing_bytes: int | None = None,
        single_tensor_cuts: bool = False,
    ) -> Stages:
        """Cut the model into stages that run one after the other and are together exactly the model.

        Each stage is an ``nn.Sequential`` that holds the model's own modules, parameters and buffers under their own
        names; the model is not changed. The cuts make the dearest stage as cheap as possible; among such cuts those
        with a shorter simulated step, then those that fewer bytes cross.

        Args:
            n_stages: number of stages.
            by: what to balance: ``"macs"``, ``"flops"``, ``"params"``, ``"param_bytes"``, ``"activation_bytes"``,
                ``"latency"`` (in seconds, once measured or estimated); a dict FQN -> cost of the module, everything
                in it included; or a function of the ``LayerInfo`` of a leaf that tells its cost.
            max_memory: bytes that a stage may hold in parameters, buffers and results of its calls; one number, or
                one a stage.
            boundaries: FQNs of modules with which a stage begins.
            max_crossing_bytes: bytes that may cross a cut, for the recorded batch.
            single_tensor_cuts: cut only where one tensor crosses.

        Raises:
            InputError: an argument is unusable.
            SplitError: the model cannot be split like that; says why, and how many stages are possible.
        """
        wishes = Wishes(n_stages, max_memory, boundaries, max_crossing_bytes, single_tensor_cuts)
        return self._splitter().split(by, wishes)

    def plan(
        self,
        devices: int,
        memory_bytes: int,
        *,
        n_microbatches: int | Sequence[int] = (8, 16, 32, 64),
        schedules: Sequence[str] = ("gpipe", "1f1b", "interleaved1f1b", "zb"),
        by: str = "macs",
        flops_per_second: float = 1e14,
        bandwidth: float = 25e9,
        optimizer_states: float = 2,
    ) -> Plans:
        """Rank ways to train the model on a cluster by predicted throughput: pipeline depth x copies x schedule.

        The recorded batch is one micro-batch. A stage's forward takes ``2 x MACs / flops_per_second``, its backward
        twice that; with ``by="latency"`` what was measured, or estimated for a device. Gradients are reduced over the
        copies after the step (ring: 2 (d - 1) / d of their bytes).

        Args:
            devices: number of devices; every depth that divides it is tried.
            memory_bytes: of each device.
            n_microbatches: in a step of one copy; several are tried.
            schedules: which to try.
            by: what the stages are balanced by and timed with: ``"macs"`` or ``"latency"``.
            flops_per_second: that a device sustains; without use if ``by="latency"``.
            bandwidth: bytes per second between two devices.
            optimizer_states: copies of the parameters that the optimizer keeps: 2 for Adam.

        Raises:
            InputError: an argument is unusable.
            SplitError: the model cannot be split, or nothing fits.
        """
        if by not in ("macs", "latency"):
            raise InputError(f"by={by!r}; expected 'macs' or 'latency'")
        options: dict[str, Any] = {}
        if by == "latency" and self.root.latency_ms and self.root.backward_latency_ms:
            options["backward"] = self.root.backward_latency_ms / self.root.latency_ms
        seconds_per_flop = None if by == "latency" else 1 / _positive("flops_per_second", flops_per_second)
        cluster = Cluster(devices, memory_bytes, seconds_per_flop, bandwidth, optimizer_states, **options)
        splitter = self._splitter()
        facts = partial(splitter.facts, by=by)
        return make_plans(facts, splitter.n_samples, cluster, n_microbatches, schedules)

    def _splitter(self) -> ModelSplitter:
        """Made at the first use, and where autocast was switched since."""
        if self._cut is None or not self._cut.is_current():
            rows = [self.root, *self.summary_list]
            self._cut = ModelSplitter(self.root.module, self._call, self.execution, self.batch_dim, rows)
        return self._cut

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_call": None, "_called": None, "_cut": None}

    # -------------------------------------------------------------------------------------------- views

    def table(
        self,
        columns: Sequence[str] | None = None,
        depth: int | EllipsisType | None = ...,
        *,
        branching: bool | None = None,
        var_names: bool = False,
        ascii_only: bool = False,
        hide_recursive: bool = False,
        all_shapes: bool = False,
        units: str | None = None,
    ) -> str:
        """The table as text; see ``modelsummary.views.text.TableOptions`` for the arguments.

        ``depth`` and ``branching`` default to what ``Statistics`` was given; ``depth=None`` shows all levels.
        """
        options = TableOptions(
            columns=columns,
            depth=self.options.depth if isinstance(depth, EllipsisType) else depth,
            branching=self.options.branching if branching is None else branching,
            var_names=var_names,
            ascii_only=ascii_only,
            hide_recursive=hide_recursive,
            all_shapes=all_shapes,
            units=units,
        )
        return self._render(options)

    def __str__(self) -> str:
        return self._render(self.options)

    __repr__ = __str__

    def _render(self, options: TableOptions) -> str:
        return render(
            self.root,
            options,
            execution=self.execution,
            fallback_reason=self.fallback_reason,
            batch_dim=self.batch_dim,
            remarks=[] if self.latency_overhead is None else [str(self.latency_overhead)],
        )


def _device_spec(spec: DeviceSpec | str) -> DeviceSpec:
    return spec if isinstance(spec, DeviceSpec) else DeviceSpec.of(spec)


def _positive(name: str, value: float) -> float:
    if not isinstance(value, (int, float)) or not value > 0:
        raise InputError(f"{name}={value!r}; expected a number > 0")
    return value


def _written(text: str, output_file: str | PathLike[str] | None) -> str:
    if output_file is not None:
        Path(output_file).write_text(text + "\n", encoding="utf-8")
    return text

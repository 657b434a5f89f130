"""``Statistics``: a live model, and everything that runs it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from os import PathLike
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from modelsummary import memory as _memory
from modelsummary.capture import Recording, capture, check_execution, list_layers
from modelsummary.capture.exclusive import exclusive
from modelsummary.capture.inputs import CallArguments, call_arguments
from modelsummary.capture.live import LiveModel
from modelsummary.capture.modules import is_compiled, unwrap
from modelsummary.capture.run import no_collection
from modelsummary.errors import DataDependentError, ForwardError, InputError, NotLiveError
from modelsummary.latency.measure import measure_latency
from modelsummary.memory.checkpointing import CheckpointPlan
from modelsummary.memory.estimate import MemoryEstimate, MemoryMeasurement
from modelsummary.memory.plan import OptimizerLike, StepOptions, step_plan
from modelsummary.statistics.model_statistics import ModelStatistics
from modelsummary.views.cells import TableOptions
from modelsummary.views.rows import check_depth

if TYPE_CHECKING:  # what few ask for is imported for them only
    from torch.fx import GraphModule, Node
    from typing_extensions import Self, Unpack

    from modelsummary.cluster import Plans
    from modelsummary.parallel import ParallelPlan
    from modelsummary.split import By, Stages
    from modelsummary.split.model_splitter import ModelSplitter
    from modelsummary.views.graph import Graph

__all__ = ["Statistics", "as_live", "measure_memory"]


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
        dtypes: dtype of each size; default: the dtype of the first floating point parameter.
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

    _live: LiveModel | None = None
    _splitter: ModelSplitter | None = None

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
        self._splitter, self._live = None, None
        if call is None:
            return
        if recording.error is not None:
            if call.nothing_found:
                raise InputError(call.nothing_found) from recording.error
            partial = ModelStatistics(recording.root, **facts)
            raise ForwardError(_failure(recording, call.size_dtypes), partial) from recording.error
        compiled = called if is_compiled(called) else None
        self._live = LiveModel(unwrap(called), call, recording.execution, batch_dim, compiled)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_live": None, "_splitter": None}

    def _live_for(self, what: str) -> LiveModel:
        """Return the live model. Raises ``NotLiveError`` where there is none, after pickling or without an input."""
        if self._live is None:
            raise NotLiveError(self._not_live(what))
        return self._live

    @property
    def live(self) -> LiveModel:
        """The model and its input, for what runs it again."""
        return self._live_for("live")

    # --------------------------------------------------------------------------------------------- time

    @exclusive
    def measure_latency(
        self,
        x: Any = None,
        warmup: int = 3,
        runs: int = 10,
        backward: bool = False,
        device: torch.device | str | None = None,
    ) -> Self:
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
        options: dict[str, Any] = {"warmup": warmup, "runs": runs, "backward": backward, "device": device}
        self.latency_overhead = measure_latency(self._live_for("measuring"), self.root, x, **options)
        return self

    # ------------------------------------------------------------------------------------------- memory

    @exclusive
    def memory(
        self,
        mode: str = "train",
        optimizer: OptimizerLike | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        loss: Callable[[Any], Tensor] | None = None,
        checkpoint: Sequence[str] | str | None = None,
        *,
        autocast: torch.dtype | None = None,
        accumulates: bool = False,
        block_bytes: int | None = None,
    ) -> MemoryEstimate:
        """Predict the memory of one step without running it: nothing is computed or allocated.

        The forward, the backward and the optimizer's step run on tensors without data, and every storage is followed
        until it is gone. A training step fills ``activation_bytes``, ``self_activation_bytes`` and ``peak_bytes`` of
        every row. Counted are the storages of tensors, not what an operator needs for itself while it runs, nor what an
        allocator keeps in reserve. The model is taken in the modes that its modules have.

        Args:
            mode: ``"train"``, or ``"inference"``: a forward without gradients.
            optimizer, dtype, device, loss, checkpoint, autocast, accumulates, block_bytes: see
                ``modelsummary.memory.plan.StepOptions``.

        Raises:
            InputError: an argument is unusable, or there is nothing to differentiate.
        """
        options: StepOptions = {
            "optimizer": optimizer,
            "dtype": dtype,
            "device": device,
            "loss": loss,
            "checkpoint": checkpoint,
            "autocast": autocast,
            "accumulates": accumulates,
            "block_bytes": block_bytes,
        }
        live = self._live_for("predicting memory")
        return _memory.predict(live, self.root, step_plan(mode, options, self.root))

    @exclusive
    def measure_memory(self, mode: str = "train", **options: Unpack[StepOptions]) -> MemoryMeasurement:
        """Run two steps for real and measure the second; the model is afterwards as before.

        On the CPU the events of torch's profiler count, on CUDA the statistics of the allocator.

        Args:
            mode: as for ``memory``.
            **options: as for ``memory``, which predicts the same step; without ``device`` and ``dtype``.

        Raises:
            InputError: an argument is unusable, or the model has no values.
        """
        live = self._live_for("measuring memory")
        return _memory.measure(live, self.root, step_plan(mode, options, self.root))

    @exclusive
    def suggest_checkpoint(self, budget_bytes: int, **options: Unpack[StepOptions]) -> CheckpointPlan:
        """Choose modules to recompute in the backward so that a training step fits, with the fewest MACs done again.

        Candidates are the repeated blocks of the model.

        Args:
            budget_bytes: that the peak may reach.
            **options: as for ``memory``, without ``checkpoint``.

        Returns:
            The plan, for ``apply_checkpoint(model, plan.fqns)``.

        Raises:
            InputError: an argument is unusable, or recomputing all blocks does not suffice.
        """
        live = self._live_for("predicting memory")
        return _memory.suggest_checkpoint(live, self.root, budget_bytes, step_plan("train", options, self.root))

    @exclusive
    def max_batch_size(self, memory_bytes: int, mode: str = "train", **options: Unpack[StepOptions]) -> int:
        """Find the largest batch whose peak fits; 0 if the smallest one does not.

        Args:
            memory_bytes: that there are.
            mode: as for ``memory``.
            **options: as for ``memory``.

        Raises:
            InputError: an argument is unusable, no input has a batch dimension, or the forward needs values.
        """
        live = self._live_for("predicting memory")
        return _memory.max_batch_size(live, memory_bytes, step_plan(mode, options, self.root))

    # -------------------------------------------------------------------------------------------- stages

    @exclusive
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
        names; the model is not changed. The cuts minimise the cost of the most expensive stage; ties go to
        the shorter simulated step, then to the fewest bytes crossing.

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
        from modelsummary.split import Wishes

        wishes = Wishes(n_stages, max_memory, boundaries, max_crossing_bytes, single_tensor_cuts)
        return self._current_splitter().split(by, wishes)

    @exclusive
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
        from modelsummary.cluster import Cluster, make_plans

        if by not in ("macs", "latency"):
            raise InputError(f"by={by!r}; expected 'macs' or 'latency'")
        options: dict[str, Any] = {}
        if by == "latency" and self.root.latency_ms and self.root.backward_latency_ms:
            options["backward"] = self.root.backward_latency_ms / self.root.latency_ms
        seconds_per_flop = None if by == "latency" else 1 / _positive("flops_per_second", flops_per_second)
        cluster = Cluster(devices, memory_bytes, seconds_per_flop, bandwidth, optimizer_states, **options)
        splitter = self._current_splitter()
        facts = partial(splitter.facts, by=by)
        return make_plans(facts, splitter.n_samples, cluster, n_microbatches, schedules)

    @exclusive
    def parallel_plan(
        self,
        tensor: int = 1,
        data: int = 1,
        shard: int = 1,
        pipeline: int = 1,
        *,
        checkpoint: Sequence[str] | str | None = None,
        precision: torch.dtype | None = None,
        reshard_after_forward: bool = True,
        offload: bool = False,
    ) -> ParallelPlan:
        """Derive from what the forward does how to spread the model over ``tensor x data x shard x pipeline`` ranks.

        A ``Linear`` whose results reach another one only through element-wise work, head reshapes and attention is
        split by columns, that last one by rows; embeddings of tokens and output heads by the vocabulary. Repeated
        blocks are the units of FSDP, and stages begin with one. ``print(plan)`` shows it, ``plan.to_code()`` writes
        it, ``plan.apply(model, mesh)`` does it, ``plan.memory(rank)`` predicts the memory of a rank.

        Args:
            tensor: ranks over which layers are split.
            data: copies of the model.
            shard: ranks of FSDP over which parameters, gradients and optimizer state of each copy are sharded.
            pipeline: stages, balanced by multiply-adds.
            checkpoint: FQNs of modules to run under activation checkpointing; ``"every"``: all repeated blocks.
            precision: dtype of parameters in FSDP's forward and backward; gradients are reduced in float32.
            reshard_after_forward: free gathered units after their forward, and gather them again in the backward.
            offload: keep parameters, gradients and optimizer state on the CPU.

        >>> mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        >>> plan = Statistics(mlp, (1, 8)).parallel_plan(tensor=2)
        >>> [layer.style for layer in plan.layers]
        ['ColwiseParallel', 'RowwiseParallel']

        Raises:
            InputError: an argument is unusable, or ``tensor`` does not divide heads or widths; says what does.
            SplitError: the model cannot be cut into as many stages.
        """
        from modelsummary.parallel.make import block_boundaries, make_plan

        live = self._live_for("a parallel plan")
        stages = None
        if type(pipeline) is int and pipeline > 1:
            stages = self.split(pipeline, boundaries=block_boundaries(self.root, self.split(pipeline).calls))
        return make_plan(
            live,
            self.root,
            tensor=tensor,
            data=data,
            shard=shard,
            pipeline=pipeline,
            stages=stages,
            checkpoint=checkpoint,
            precision=precision,
            reshard_after_forward=reshard_after_forward,
            offload=offload,
        )

    def _current_splitter(self) -> ModelSplitter:
        """Return the one of the first use, or a new one where autocast was switched since."""
        from modelsummary.split.model_splitter import ModelSplitter

        if self._splitter is None or not self._splitter.is_current():
            self._splitter = ModelSplitter(self._live, list(self.root.walk()))
        return self._splitter

    # -------------------------------------------------------------------------------------------- graphs

    @exclusive
    def graph(self, depth: int | EllipsisType | None = ..., *, stages: Stages | None = None) -> Graph:
        """The dataflow: which module's output goes to which module's input, through which functions.

        The forward is recorded once more, as for ``split``. Edges have the shapes of the tensors,
        nodes parameters and multiply-adds; a module whose calls are shown one by one is a group.

        Args:
            depth: levels of nested calls that are shown: 1 has the modules that the model calls as nodes; None: all.
                Default: as many as give no more than 60 nodes. Containers that are never called, such as
                ``nn.ModuleList``, are no level.
            stages: of a split of this model; nodes then have the colours of their stages, and modules that are cut
                are shown one by one.

        Raises:
            InputError: an argument is unusable, or there is no live model with an input.
            SplitError: a parameter is not initialised yet, or the stages were pickled.
        """
        from modelsummary.record.runs import record_once
        from modelsummary.split import Stages, check_initialized
        from modelsummary.views.graph import dataflow_graph

        if not isinstance(depth, EllipsisType):
            check_depth(depth, least=1)
        live = self._live_for("a graph of the dataflow")
        if stages is not None and (not isinstance(stages, Stages) or stages.model is not live.model):
            raise InputError(f"stages={stages!r:.80} are no stages of this model; pass what split() returned")
        check_initialized(live.model)
        record = stages.record if stages is not None else None
        return dataflow_graph(
            self.root,
            record or record_once(live.model, live.call, self.execution),
            None if isinstance(depth, EllipsisType) else depth,
            stages.calls if stages is not None else (),
            readable=isinstance(depth, EllipsisType),
        )

    def graph_module(
        self,
        *,
        trace_act_ckpt: bool = False,
        bias_addition_split: bool = False,
        device: torch.device | str | None = None,
    ) -> GraphModule:
        """The model as a ``torch.fx`` graph, traced and profiled as it was summarised.

        ``node.meta["info"]`` is what is known of a node, ``node.meta["layer_info"]`` the row of the call that it is, or
        that it belongs to; ``nodes_of`` leads back.

        Args:
            trace_act_ckpt, bias_addition_split: as for ``symbolic_trace``.
            device: whose kernels are assumed, as for ``symbolic_profile``.

        Raises:
            InputError: there is no live model with an input.
            TraceError: the forward cannot be written as a graph; says why.
        """
        from modelsummary.fx.rows import graph_module

        options: dict[str, Any] = {"trace_act_ckpt": trace_act_ckpt, "bias_addition_split": bias_addition_split}
        return graph_module(self._live_for("a graph module"), self.calls, **options, device=device)

    def nodes_of(self, graph: GraphModule, fqn: str) -> list[Node]:
        """Return the nodes of a graph of this model that a module calls, is, or has within.

        Raises:
            LayerNotFoundError: the model has no such module.
        """
        from modelsummary.fx.rows import nodes_of

        self.calls(fqn)
        return nodes_of(graph, fqn)


def measure_memory(
    model: nn.Module, input_data: Any, mode: str = "train", **options: Unpack[StepOptions]
) -> MemoryMeasurement:
    """What a step of ``model`` really takes, beside the prediction: ``Statistics(...).measure_memory(...)``.

    Args:
        model, input_data: as for ``Statistics``.
        mode: as for ``Statistics.memory``.
        **options: as for ``Statistics.memory``.
    """
    return Statistics(model, input_data).measure_memory(mode, **options)


def as_live(stats: ModelStatistics, what: str) -> Statistics:
    """Return ``stats`` if they are of a live model. Raises ``NotLiveError`` if they are data."""
    if not isinstance(stats, Statistics):
        raise NotLiveError(stats._not_live(what))
    return stats


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


def _positive(name: str, value: float) -> float:
    if not isinstance(value, (int, float)) or not value > 0:
        raise InputError(f"{name}={value!r}; expected a number > 0")
    return value

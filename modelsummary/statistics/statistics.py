"""``Statistics``: run a model once, keep the facts about its layers, cut it into stages, plan its training."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from modelsummary.capture.exclusive import exclusive
from modelsummary.capture.run import no_collection
from modelsummary.capture.sizes import Dtypes
from modelsummary.errors import SplitError
from modelsummary.statistics.graph_statistics import GraphStatistics
from modelsummary.statistics.recording import Recorded, facts_of, live_model, record_model, statistics_of_file
from modelsummary.views.cells import TableOptions

if TYPE_CHECKING:  # imported on first use
    from modelsummary.cluster import Cluster, Plan, Plans, Recipe, StepEstimate
    from modelsummary.cluster.pipeline_plan import PipelinePlans
    from modelsummary.parallel import ParallelPlan
    from modelsummary.split import By, Stages
    from modelsummary.split.model_splitter import ModelSplitter

__all__ = ["Statistics"]


class Statistics(GraphStatistics):
    """The facts about every layer of a model, from one run that by default works on shapes only.

    Shape-only execution computes nothing: a model of any size takes the time of its Python code. The model stays
    untouched, also after an exception.

    Args:
        model: the model; of a model inside ``torch.compile``, ``DataParallel`` or ``DistributedDataParallel``, the
            wrapped model is summarised. The path of a file returns ``modelsummary.load(path, input_data)``; of
            the options, only ``branching`` and ``depth`` apply.
        input_data: a tensor; a tuple or list of the forward's positional arguments; a dict of its keyword arguments; a
            size such as ``(1, 3, 224, 224)``, a list of sizes or a dict of sizes by argument name; numpy arrays instead
            of tensors. A list is one argument if the forward annotates its first parameter as a list. None without
            further arguments: the ``example_input_array`` of a LightningModule; if there is none, no forward runs, and
            the statistics have names and parameters only. ``input_size`` is another name, unless the forward has an
            argument called so.
        *args: further positional arguments of the forward.
        **kwargs: further keyword arguments of the forward. Pass one with the name of an option, such as ``depth``, in
            an ``input_data`` dict.
        batch_dim: position at which a batch of one is inserted into each size; views print this dimension as -1, and
            the numbers are for the batch that ran. Default: sizes include the batch.
        branching: print the tree; False prints FQNs.
        depth: deepest level that is printed; None: all; ``"auto"``: as many as ``table`` describes. All levels are
            recorded.
        device: device for the inputs of a real execution; default: the model's device.
        dtypes: dtype of all sizes, a list with one per size, or a dict by argument name; ``"long"`` stands for
            ``torch.long``. Default: the dtype of the first floating point parameter.
        execution: ``"shape"``: on shapes only; ``"real"``: compute; ``"auto"``: on shapes, with a fallback to real
            execution. ``stats.execution`` is the one that ran, ``stats.fallback_reason`` the reason of a fallback.
        latency: also run the model for real and time every call: ``measure_latency()`` with its defaults.
        reuse: deprecated and ignored. Every module runs.

    Raises:
        InputError: an argument is unusable.
        ForwardError: the forward raised; ``error.partial`` holds the statistics up to that call.

    >>> stats = Statistics(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4)), (1, 2))
    >>> stats["0"].macs, stats.total_macs, stats.execution
    (16, 48, 'shape')
    """

    _splitter: ModelSplitter | None = None

    def __new__(cls, model: Any = None, *args: Any, **options: Any) -> Any:
        """Return the statistics of a file for a path, else a new ``Statistics``."""
        if isinstance(model, (str, PathLike)):
            return statistics_of_file(model, *args, **options)
        return super().__new__(cls)

    @exclusive
    def __init__(
        self,
        model: nn.Module | str | PathLike[str],
        input_data: Any = None,
        *args: Any,
        batch_dim: int | None = None,
        branching: bool = True,
        depth: int | Literal["auto"] | None = "auto",
        device: torch.device | str | None = None,
        dtypes: Dtypes = None,
        execution: str = "auto",
        latency: bool = False,
        reuse: bool | None = None,
        **kwargs: Any,
    ) -> None:
        if reuse is not None:
            warnings.warn("reuse= is ignored: every module runs; leave it out", DeprecationWarning, stacklevel=3)
        options = TableOptions(branching=branching, depth=depth)
        described: dict[str, Any] = {"batch_dim": batch_dim, "device": device, "dtypes": dtypes}
        recorded = record_model(model, input_data, args, kwargs, execution=execution, **described)
        with no_collection():
            self._fill(model, recorded, batch_dim, options)
        if latency:
            self.measure_latency()

    # The signature that help() and editors show; ``__new__`` would hide it.
    __signature__ = inspect.Signature(list(inspect.signature(__init__).parameters.values())[1:])

    def _fill(
        self, called: Any, recorded: Recorded, batch_dim: int | None, options: TableOptions | None = None
    ) -> None:
        """Fill in the recorded facts. Raise ``ForwardError`` if the forward raised."""
        call, recording = recorded
        facts = facts_of(recording, batch_dim, options)
        super().__init__(**facts)
        self._splitter = None
        self._live = live_model(called, call, recording, facts)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_live": None, "_splitter": None, "_scalings": {}}

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
        """Cut the model into stages that run one after the other and together compute exactly the model.

        Each stage is an ``nn.Sequential`` that holds the model's own modules, parameters and buffers under their own
        names; the model is not changed. The cuts minimise the cost of the most expensive stage. Among equal maxima,
        they prefer the shorter simulated step, then the fewest bytes crossing.

        Args:
            n_stages: number of stages.
            by: the cost to balance: ``"macs"``, ``"flops"``, ``"params"``, ``"param_bytes"``, ``"activation_bytes"``,
                ``"latency"`` (in seconds, once measured or estimated); a dict FQN -> cost of the module with everything
                in it; or a function that returns the cost of a leaf from its ``LayerInfo``.
            max_memory: bytes that a stage may hold in parameters, buffers and results of its calls: one number, or one
                per stage.
            boundaries: FQNs of modules with which a stage begins.
            max_crossing_bytes: most bytes that may cross a cut, for the recorded batch.
            single_tensor_cuts: cut only where a single tensor crosses.

        Raises:
            InputError: an argument is unusable.
            SplitError: the model cannot be split like that; the message gives the reason and the possible numbers of
                stages.

        >>> stats = Statistics(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4)), (1, 2))
        >>> [[name for name, _ in stage.named_parameters()] for stage in stats.split(2)]
        [['0.weight', '0.bias'], ['2.weight', '2.bias']]
        """
        from modelsummary.split import Wishes

        wishes = Wishes(n_stages, max_memory, boundaries, max_crossing_bytes, single_tensor_cuts)
        return self._current_splitter().split(by, wishes)

    @exclusive
    def simulate(
        self,
        plan: Plan,
        cluster: Cluster,
        global_batch: int,
        *,
        sequence: int | None = None,
        recipe: Recipe | None = None,
    ) -> StepEstimate:
        """Simulate a training step that is spread over a cluster: its time by cause, and the memory of each rank.

        One rank's share of the model runs on shapes, equal blocks once; its kernels, collectives and bytes make the
        stages of the pipeline, whose schedule is simulated.

        Args:
            plan: how the step is spread over devices.
            cluster: the devices.
            global_batch: samples in a step.
            sequence: tokens in a sample. Default: the second dimension of the recorded input.
            recipe: dtypes, optimizer, loss and engine. Default: ``Recipe()``: bfloat16, AdamW.

        Raises:
            InputError: model, plan, batch and cluster do not fit together.
            StepError: the forward, the loss or the backward raised.

        >>> from modelsummary.cluster import Cluster, Plan
        >>> model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        >>> plan = Plan(pipeline=2, micro_batch=4)
        >>> step = Statistics(model, (1, 64)).simulate(plan, Cluster("A100"), global_batch=16)
        >>> step.microbatches, step.memory[0].parameters  # two layers in bfloat16
        (4, 16640)
        """
        from modelsummary.cluster.entry import simulate

        live, make = self._tree_for("simulating a step"), self.parallel_plan
        return simulate(live, self.root, plan, cluster, global_batch, sequence, recipe, make)

    @exclusive
    def plan(
        self,
        cluster: Cluster | int | None = None,
        global_batch: int | None = None,
        *,
        sequence: int | None = None,
        recipe: Recipe | None = None,
        **options: Any,
    ) -> Plans | PipelinePlans:
        """Search for the best plans to train the model on a cluster.

        Plans that do not fit into memory are left out. The others are ranked by the time of their step. A plan is
        simulated only if a bound of its time lets it be among the best.

        Args:
            cluster: the devices.
            global_batch: samples in a step.
            sequence: tokens in a sample. Default: the second dimension of the recorded input.
            recipe: dtypes, optimizer, loss and engine. Default: ``Recipe()``: bfloat16, AdamW.
            **options: what is searched, and how many plans are returned; see ``modelsummary.cluster.SearchOptions``.
                ``devices``, ``memory_bytes``, ``n_microbatches``, ``by``, ``flops_per_second``, ``bandwidth`` and
                ``optimizer_states`` are deprecated; ``cluster`` and ``recipe`` replace them.

        Returns:
            The plans, fastest first; each is a ``StepEstimate``.

        Raises:
            InputError: an argument is unusable, or nothing fits.

        >>> from modelsummary.cluster import Cluster
        >>> model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        >>> plans = Statistics(model, (1, 64)).plan(Cluster("A100", devices_per_node=2), global_batch=8)
        >>> plans[0].fits, plans[0].plan.devices <= 2
        (True, True)
        """
        from modelsummary.cluster import entry

        live = self._tree_for("planning")
        if not isinstance(cluster, entry.Cluster) and (isinstance(cluster, int) or entry.is_deprecated(options)):
            splitter = self._current_splitter()
            return entry.pipeline_plans(self.root, splitter.facts, splitter.n_samples, cluster, global_batch, options)
        return entry.search(live, self.root, cluster, global_batch, sequence, recipe, options, self.parallel_plan)

    @exclusive
    def parallel_plan(
        self,
        tensor: int = 1,
        data: int = 1,
        shard: int = 1,
        pipeline: int = 1,
        expert: int = 1,
        *,
        sequence: bool = False,
        loss_parallel: bool = False,
        checkpoint: Sequence[str] | str | None = None,
        precision: torch.dtype | None = None,
        reshard_after_forward: bool = True,
        offload: bool = False,
        context: int = 1,
    ) -> ParallelPlan:
        """Derive from what the forward does how to spread the model over the ranks of a device mesh.

        A ``Linear`` whose results reach another one only through element-wise work, head reshapes and attention is
        split by columns, that last one by rows; embeddings of tokens and output heads by the vocabulary. Repeated
        blocks are the units of FSDP, and stages begin with one. ``print(plan)`` shows it, ``plan.to_code()`` writes
        it, ``plan.apply(model, mesh)`` does it, ``plan.memory(rank)`` predicts the memory of a rank.

        Args:
            tensor: ranks over which layers are split.
            data: copies of the model.
            shard: ranks of FSDP over which parameters, gradients and optimizer state of each copy are sharded.
            pipeline: stages, balanced by multiply-adds.
            expert: ranks that divide the experts of mixtures; all take the same batch, each runs its own experts.
            sequence: between layers that are split, shard activations along the sequence over the ``tensor`` ranks.
            loss_parallel: keep the logits sharded by the vocabulary, for ``loss_parallel()`` of torch.
            checkpoint: FQNs of modules to run under activation checkpointing; ``"every"``: all repeated blocks.
            precision: dtype of parameters in FSDP's forward and backward; gradients are reduced in float32.
            reshard_after_forward: free gathered units after their forward, and gather them again in the backward.
            offload: keep parameters, gradients and optimizer state on the CPU.
            context: 1; attention over a divided sequence is not applied, only costed by ``simulate``.

        >>> mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        >>> plan = Statistics(mlp, (1, 8)).parallel_plan(tensor=2)
        >>> [layer.style for layer in plan.layers]
        ['ColwiseParallel', 'RowwiseParallel']

        Raises:
            InputError: an argument is unusable, or does not divide heads, widths or experts; says what does.
            SplitError: the model cannot be cut into as many stages.
        """
        from modelsummary.parallel.make import make_plan

        return make_plan(
            self._tree_for("a parallel plan"),
            self.root,
            tensor=tensor,
            data=data,
            shard=shard,
            pipeline=pipeline,
            expert=expert,
            sequence=sequence,
            loss_parallel=loss_parallel,
            split=lambda n_stages, whole: self._current_splitter().split_around(n_stages, whole),
            checkpoint=checkpoint,
            precision=precision,
            reshard_after_forward=reshard_after_forward,
            offload=offload,
            context=context,
        )

    def _current_splitter(self) -> ModelSplitter:
        """Return the splitter of the first use, or a new one if autocast was switched since."""
        from modelsummary.split.model_splitter import ModelSplitter

        if self._splitter is None or not self._splitter.is_current():
            live = self._live if self._live is None else self._tree_for("a split", SplitError)
            self._splitter = ModelSplitter(live, list(self.root.walk()))
        return self._splitter

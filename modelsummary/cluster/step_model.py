"""``StepModel``: a model ready to be costed under many plans. Equal blocks run once, and results are kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property, partial
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor, nn

from modelsummary import _torch
from modelsummary.capture.containers import tensors_of
from modelsummary.capture.execution.cuda_autocast import cuda_autocast
from modelsummary.capture.execution.cuda_kernels import cuda_kernels
from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.live import LiveModel
from modelsummary.capture.modules import modules_of
from modelsummary.capture.observe import check_initialized, observe
from modelsummary.capture.operator_mode import Operators
from modelsummary.capture.run import running
from modelsummary.capture.step_error import NeedsValuesError, as_step_error
from modelsummary.capture.step_plan import StepPlan
from modelsummary.capture.trace import Trace
from modelsummary.cluster.megatron import with_local_layers, with_sharded_logits, with_shared_tokens
from modelsummary.cluster.parts import AFTER, BEFORE, Observed, Part, parts_of
from modelsummary.cluster.plan import Plan, Recipe
from modelsummary.cluster.weights import RankWeights, Weight, weight_of
from modelsummary.errors import DataDependentError, InputError, ModelSummaryError, StepError
from modelsummary.layer_info import LayerInfo
from modelsummary.memory.checkpointing import blocks_of
from modelsummary.memory.planning import Planner
from modelsummary.operators.kernels import StepOperator
from modelsummary.operators.operator_calls import OperatorCall
from modelsummary.parallel.applied_rank import rank_of, sharded_copy
from modelsummary.parallel.context import length_of, with_tokens
from modelsummary.parallel.equal_blocks import fold, kinds_of_blocks
from modelsummary.parallel.expert_plans import sending_tokens
from modelsummary.parallel.experts import StackedExperts, find_experts, routing_of
from modelsummary.parallel.make import make_plan
from modelsummary.parallel.placements import Blocked
from modelsummary.parallel.plan import LayerPlan, ParallelPlan
from modelsummary.parallel.rank_model import copied, on_meta
from modelsummary.parallel.record_calls import TRACE_RULES, Calls
from modelsummary.record.events import Value
from modelsummary.record.runs import record_once
from modelsummary.subject import dtype_name, dtype_of

__all__ = ["StepModel"]

_REMEDIES = {
    "loss": "; pass Recipe(loss=...), a function from the model's result to the scalar that you train on",
    "backward": "; pass Recipe(loss=...), a function from the model's result to the scalar that you train on",
}


class StepModel:
    """A model whose training step is costed on one rank, for any share of the work.

    Args:
        live: the model and its call.
        root: root of the tree of its statistics.
        recipe: what it is trained with.

    Attributes:
        blocks: FQNs of its blocks in the order of their calls.
        kind_of: FQN of a block -> FQN of the equal block that runs for it.
        recorded_batch: samples in the recorded input.
        recorded_sequence: length of the recorded sequences; 0 if the first input is neither token numbers (batch x
            length) nor features of tokens (batch x length x features).

    Raises:
        InputError: the model cannot be copied, or is not initialised.
    """

    def __init__(self, live: LiveModel, root: LayerInfo, recipe: Recipe) -> None:
        check_initialized(live)
        self.recipe, self._root, self._live = recipe, root, live
        rows = blocks_of(root)
        self.blocks = [row.fqn for row in rows]
        self.kind_of = kinds_of_blocks(root, rows)
        same = {fqn: kind for fqn, kind in self.kind_of.items() if fqn != kind}
        self._folded = fold(live.model, same)
        args, kwargs = live.call.on_meta(lambda tensor: tensor.detach().to("meta").requires_grad_(tensor.requires_grad))
        self._call = replace(live.call, args=args, kwargs=kwargs)
        self._batch_dim = live.batch_dim or 0
        size = self._call.size_along(self._batch_dim)
        if size == 0:
            raise InputError("the recorded input has a batch of 0, which no step has; record a batch of 1 or more")
        self.recorded_batch = size or 1
        self.recorded_sequence = length_of(self._call)
        self._plans: dict[tuple[int, int, bool, bool], ParallelPlan] = {}
        self._parts: dict[tuple[object, ...], dict[str, Part]] = {}
        self._failed: dict[tuple[object, ...], ModelSummaryError] = {}

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self._live.model

    @cached_property
    def weights(self) -> RankWeights:
        """All parameters of the model, and its buffers; its experts are the stacked ones."""
        experts = {f"{stacked.fqn}.{name}" for stacked in self._stacked_experts for name in stacked.parameters}

        def is_expert(name: str) -> bool:
            block = next((fqn for fqn in self.blocks if name.startswith(f"{fqn}.")), "")
            return bool(experts) and f"{self.kind_of.get(block, '')}{name[len(block) :]}" in experts

        model = self._live.model
        return RankWeights.of(
            weight_of(tensor, tensor, self.recipe, _kind_of(tensor), is_expert=is_expert(name))
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
        )

    @cached_property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the products: the recipe's, or the dtype that most floating-point parameters have."""
        return self.recipe.autocast or self.recipe.precision or dtype_of(self._live.model)

    @cached_property
    def _weight_dtype(self) -> torch.dtype:
        return self.recipe.stored_dtype or dtype_of(self._live.model)

    @cached_property
    def subject(self) -> str:
        """The model, its dtype, and what it is trained with."""
        recipe = self.recipe
        masters = ", float32 master weights" if self.weights.total.masters else ""
        dtype = dtype_name(self.compute_dtype) + (" autocast" if recipe.autocast else "")
        return f"{self._root.class_name}, {dtype}, {recipe.kernels} kernels, {recipe.optimizer}{masters}"

    @cached_property
    def has_core(self) -> bool:
        """Whether attention runs as several kernels, so that selective recomputation frees memory."""
        parts = self.parts(Plan(micro_batch=self.recorded_batch))
        return any(part.core_bytes for part in parts.values())

    @cached_property
    def counts(self) -> dict[str, int]:
        """Kind of block -> how many blocks are of that kind."""
        counts: dict[str, int] = {}
        for kind in self.kind_of.values():
            counts[kind] = counts.get(kind, 0) + 1
        return counts

    def parallel_plan(
        self, tensor: int, expert: int = 1, *, sequence: bool = False, dispatch: str = "all_to_all"
    ) -> ParallelPlan:
        """Return how the folded model is split over ranks.

        Experts to which tokens are sent are whole on their rank.

        Args:
            tensor: ranks over which layers are split.
            expert: ranks over which experts are divided.
            sequence: the layers of the plan shard activations along the sequence.
            dispatch: as in ``Plan``.

        Raises:
            InputError: it cannot be split over that many.
        """
        is_sent = expert > 1 and dispatch == "all_to_all"
        key = tensor, expert, sequence, is_sent
        if key not in self._plans:
            live = LiveModel(self._folded, self._call, "shape", self._live.batch_dim)
            if is_sent:
                whole = self.parallel_plan(tensor)
                with _without_values():
                    self._plans[key] = sending_tokens(whole, live, self._calls, expert)
            else:
                with _without_values():
                    self._plans[key] = make_plan(
                        live, self._root, tensor=tensor, expert=expert, sequence=sequence, dispatch=dispatch
                    )
        return self._plans[key]

    @cached_property
    def number_of_experts(self) -> int:
        """The largest number of ranks over which all stacked experts can be divided; 1 without experts."""
        return gcd(*(stacked.number for stacked in self._stacked_experts)) or 1

    @cached_property
    def _stacked_experts(self) -> tuple[StackedExperts, ...]:
        """The stacked experts of the folded model to which tokens can be sent; empty if it cannot be recorded."""
        if not _may_have_experts(self._folded):
            return ()
        try:
            return tuple(stacked for stacked in find_experts(self._calls).stacked if _choices(stacked))
        except ModelSummaryError:
            return ()

    def parts(self, plan: Plan, sequence_length: int | None = None) -> dict[str, Part]:
        """Return the parts of the model on one rank: what precedes the blocks, each kind of block, what follows.

        Args:
            plan: how the step is spread over devices.
            sequence_length: tokens in a sample. Default: as recorded.

        Raises:
            InputError: the model or its input cannot be shared so.
            StepError: the step raised, also without sharing the model.
        """
        length = self.recorded_sequence if sequence_length is None else sequence_length
        key = (*plan.rank_key, length)
        if key in self._failed:
            raise self._failed[key]
        if key not in self._parts:
            try:
                self._parts[key] = self._parts_of(plan, *self._observed(plan, length))
            except ModelSummaryError as error:
                self._failed[key] = error
                raise
        return self._parts[key]

    def operators(self, plan: Plan, sequence_length: int | None = None) -> Sequence[StepOperator]:
        """Return the operators of one rank's forward and backward of a micro-batch; equal blocks run once.

        Args:
            plan, sequence_length: as for ``parts``.

        Raises:
            InputError, StepError: as for ``parts``.
        """
        length = self.recorded_sequence if sequence_length is None else sequence_length
        return self._observed(plan, length)[0].operators

    def results(
        self, plan: Plan, length: int, seconds_of: Callable[[OperatorCall, Mapping[str, str]], float]
    ) -> dict[str, list[tuple[str, ...]]]:
        """Return the sets of results that a checkpoint around each kind of block may keep on a rank.

        Of these sets, none beats another in both the bytes that it keeps and the seconds that it costs.

        Args:
            plan: how the step is spread over devices.
            length: tokens in a sample.
            seconds_of: function from an operator call to its seconds on the rank; it also takes the name of each
                process group -> what its ranks share out.

        Raises:
            InputError, StepError: as for ``parts``.
        """
        with self._rank(self._plan_of_rank(plan, length)) as (module, groups), self._on_shapes():
            live = LiveModel(module, self._call_of(plan, length), "shape", self._live.batch_dim)

            def seconds(call: OperatorCall) -> float:
                return seconds_of(call, groups)

            return Planner(live, self._root, self._step, None, "operator", lambda: None, seconds_of=seconds).results

    def _observed(self, plan: Plan, length: int) -> tuple[Observed, nn.Module]:
        """Run a step of one rank; if Megatron's raises, run it with whole logits, which the loss may need."""
        alone = Plan(micro_batch=plan.micro_batch)
        applied = self._plan_of_rank(plan, length)
        try:
            return self._run(applied, plan, length)
        except StepError as error:
            if plan.rank_key == alone.rank_key:
                phase = error.phase
                with as_step_error(lambda: phase, _REMEDIES):
                    raise error.__cause__ or error from None
            failed: ModelSummaryError = error
        except InputError as error:  # it needs values, or the rank's share of them
            if plan.rank_key == alone.rank_key:
                raise
            failed = error
        if self._is_megatrons(plan):
            with suppress(StepError, InputError):
                return self._run(self._plan_of_rank(plan, length, shards_logits=False), plan, length)
        self._observed(alone, length)  # raises if the model does not run on one device either
        raise InputError(_does_not_share(plan, failed)) from failed

    def _is_megatrons(self, plan: Plan) -> bool:
        """Return True for a plan whose rank runs Megatron's layers, not the ones of ``parallel_plan``."""
        return plan.dispatch_ranks > 1 or (self.recipe.sequence == "megatron" and plan.expert == 1)

    def _plan_of_rank(self, plan: Plan, length: int, *, shards_logits: bool = True) -> ParallelPlan:
        """Return the layers that a rank runs.

        Args:
            plan, length: as for ``parts``.
            shards_logits: Megatron's heads return shards of the logits.

        Raises:
            InputError: the model cannot be split so.
        """
        is_megatrons = self._is_megatrons(plan)
        try:
            applied = self.parallel_plan(
                plan.tensor, plan.expert, sequence=plan.sequence and not is_megatrons, dispatch=plan.dispatch
            )
        except InputError as error:
            if is_megatrons or plan.expert > 1 or not plan.sequence:
                raise
            advice = "Recipe(sequence='megatron') costs Megatron's layers, which step.apply does not apply"
            raise InputError(f"{error}; {advice}") from error
        if is_megatrons and plan.sequence:
            shape_of = partial(self._shape_in_step, micro_batch=plan.micro_batch, tokens=length // plan.context)
            applied = with_shared_tokens(applied, self._calls, self.blocks, shape_of)
        if is_megatrons and shards_logits:
            applied = with_sharded_logits(applied)
        return with_local_layers(applied, self._folded, like_dtensor=not is_megatrons)

    def _shape_in_step(self, value: Value, micro_batch: int, tokens: int) -> list[int]:
        """Return the shape that a recorded tensor has in a step of other sizes: its batch comes first."""
        batch, sequence = {self.recorded_batch: micro_batch}, {self.recorded_sequence: tokens}
        merged = {self.recorded_batch * self.recorded_sequence: micro_batch * tokens}
        sizes = [merged | sequence | batch, *[merged | batch | sequence] * len(value.shape)]
        return [changed.get(size, size) for changed, size in zip(sizes, value.shape, strict=False)]

    @contextmanager
    def _rank(self, applied: ParallelPlan) -> Iterator[tuple[nn.Module, Mapping[str, str]]]:
        """Return a context with the model of one rank, and the name of each process group -> what its ranks share out.

        Args:
            applied: the layers that it runs.
        """
        if applied.world_size == 1:
            yield copied(self._folded, on_meta), {}
            return
        in_world = rank_of(applied, 0, applied.world_size, "the step of a rank")
        with in_world, sharded_copy(applied, self._folded, None) as (module, (groups, _)):
            yield module, groups

    def _run(self, applied: ParallelPlan, plan: Plan, length: int) -> tuple[Observed, nn.Module]:
        """Run a step of one rank on shapes.

        Raises:
            InputError, StepError: the layers cannot be applied, or the step does not run.
        """
        entered: dict[str, tuple[int, int]] = {}
        with self._rank(applied) as (module, groups):
            _note_entered(module, self.counts, entered)
            trace = self._step_of(module, entered, plan, length)
        gathering = {layer.fqn for layer in applied.layers if layer.role == "output"}
        cut = {layer.fqn for layer in applied.layers if layer.role == "input" and _cuts(layer)} - gathering
        choices = {stacked.fqn: _choices(stacked) for stacked in self._stacked_experts if plan.dispatch_ranks > 1}
        return Observed.of(trace, groups, frozenset(cut.intersection(self.counts)), choices), module

    def _step_of(self, module: nn.Module, entered: Mapping[str, tuple[int, int]], plan: Plan, length: int) -> Trace:
        call = self._call_of(plan, length)
        with self._on_shapes():
            # what entered blocks is forgotten when the run is over
            evenly, note = plan.dispatch_ranks > 1, lambda: dict(entered)
            return observe(module, call, self._step, storages=True, note=note, routes_evenly=evenly)

    def _call_of(self, plan: Plan, length: int) -> CallArguments:
        """Return the arguments of a micro-batch."""
        call = self._call.with_batch(self._batch_dim, self.recorded_batch, plan.micro_batch)
        tokens = length // plan.context
        return with_tokens(call, tokens) if tokens and tokens != self.recorded_sequence else call

    @property
    def _step(self) -> StepPlan:
        return StepPlan(dtype=self.recipe.stored_dtype, loss=self.recipe.loss, autocast=self.recipe.autocast)

    @contextmanager
    def _on_shapes(self) -> Iterator[None]:
        with cuda_kernels(), cuda_autocast() if self.recipe.autocast else nullcontext(), _without_values():
            yield

    def check_length(self, tokens: int) -> None:
        """Raise ``InputError`` for sequences that are longer than a table of positions, which the forward indexes."""
        call = with_tokens(self._call, tokens)
        on_shapes = running(modules_of(self._folded), call, on_shapes=True, grad=False)
        try:
            with on_shapes as (execution, args, kwargs):
                execution.checks_indices_of = self._folded  # type: ignore[union-attr]
                with Operators(execution):
                    self._folded(*args, **kwargs)
        except IndexError as error:
            raise InputError(
                f"sequence_length={tokens} is longer than {self._root.class_name} accepts: {error}"
            ) from None
        except Exception:  # what else the forward raises, the step raises, too
            return

    def _parts_of(self, plan: Plan, observed: Observed, module: nn.Module) -> dict[str, Part]:
        kinds = list(self.counts)
        layers = self.parallel_plan(plan.tensor, plan.expert, dispatch=plan.dispatch).layers
        experts = {
            id(parameter)
            for layer in layers
            if plan.dispatch_ranks > 1 and layer.mesh == "expert"
            for name, parameter in module.get_submodule(layer.fqn).named_parameters()
            if layer.is_list or layer.shards.get(name) is not None
        }
        return parts_of(
            observed,
            kinds,
            self._weights(module, kinds, experts),
            [layer.fqn for layer in layers if layer.role in ("column", "head")],
            self.recipe.kernels,
            token_shares=plan.tensor if plan.sequence and self._is_megatrons(plan) else 1,
            context=plan.context,
            sends_round=self.recipe.kernels != "fused" and self.recipe.sequence == "torch",
            eight_bits=self.recipe.precision if self.recipe.stored_dtype != self.recipe.precision else None,
            dispatcher=self.recipe.dispatcher,
            sum_dtype=(self.recipe.gradient_dtype or self._weight_dtype) if self.recipe.adds_in_products else None,
            stops_early=self.recipe.stops_early,
        )

    @cached_property
    def _calls(self) -> Calls:
        with _without_values():
            return Calls(self._folded, record_once(self._folded, self._call, "shape", rules=TRACE_RULES))

    @cached_property
    def _shared_parameters(self) -> frozenset[str]:
        """The names of the parameters that a block shares with another one, or with what is outside of the blocks."""
        holders: dict[int, dict[str, str]] = {}  # id of a parameter -> its names, each with the block that holds it
        for name, parameter in self._live.model.named_parameters(remove_duplicate=False):
            block = next((fqn for fqn in self.blocks if name.startswith(f"{fqn}.")), "")
            holders.setdefault(id(parameter), {})[name] = block
        return frozenset(name for names in holders.values() if len(set(names.values())) > 1 for name in names)

    def _weights(
        self, module: nn.Module, kinds: Sequence[str], experts: Collection[int]
    ) -> dict[str, dict[int, Weight]]:
        """Return the parameters and buffers of each part. A parameter that both ends hold has one id.

        What several blocks hold, such as a table of positions or the weight of a tied head, counts for what precedes
        the blocks.
        """
        weights: dict[str, dict[int, Weight]] = {name: {} for name in (BEFORE, *kinds, AFTER)}
        first = {row.fqn: position for position, row in enumerate(self._root.walk())}
        begin = min((first.get(fqn, 0) for fqn in self.blocks), default=0)
        inside = tuple(f"{fqn}." for fqn in self.blocks)
        whole = dict(self._live.model.named_parameters(remove_duplicate=False))
        parameters = list(module.named_parameters(remove_duplicate=False))
        buffers = list(module.named_buffers(remove_duplicate=False))
        holders = Counter(id(buffer) for name, buffer in buffers if name.startswith(inside))
        for name, tensor in (*parameters, *buffers):
            kind = next((fqn for fqn in kinds if name.startswith(f"{fqn}.")), None)
            if kind is None and (not name.startswith(inside) or holders[id(tensor)] > 1):
                owner = name.rpartition(".")[0]
                is_before = bool(self.blocks) and (first.get(owner, begin) < begin or not owner)
                kind = BEFORE if is_before else AFTER
            elif kind is not None and (holders[id(tensor)] > 1 or name in self._shared_parameters):
                kind = BEFORE
            if kind is not None:
                model_tensor = whole.get(name, tensor)
                is_expert = id(tensor) in experts
                local = _torch.local_part(tensor)
                weight = weight_of(local, model_tensor, self.recipe, _kind_of(tensor), is_expert=is_expert)
                weights[kind][id(tensor)] = weight
        return weights


def _may_have_experts(model: nn.Module) -> bool:
    """Return True if a class that is not torch's has several matrices in one parameter."""
    return any(
        parameter is not None and parameter.dim() >= 3 and parameter.shape[0] > 1
        for module in model.modules()
        if not type(module).__module__.startswith("torch.nn.")
        for parameter in module._parameters.values()
    )


def _choices(stacked: StackedExperts) -> int:
    """Return the number of experts that each token goes to; 0 for experts whose calls do not show it."""
    try:
        routes = {routing_of(event) for event in stacked.events}
    except Blocked:
        return 0
    if len(routes) != 1:
        return 0
    ((index, weight),) = routes
    event = stacked.events[0]
    arguments: dict[Any, Any] = {**dict(enumerate(event.args)), **event.kwargs}
    tokens = next((arguments[key] for key in stacked.summed if key != weight), None)
    return 0 if tokens is None else prod(arguments[index].shape) // max(prod(tokens.shape[:-1]), 1)


def _note_entered(model: nn.Module, blocks: Iterable[str], entered: dict[str, tuple[int, int]]) -> None:
    """Note the bytes with which blocks are called, with a gradient, and for a stage that begins with the block."""

    def noting(fqn: str) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            tensors = map(_torch.local_part, tensors_of((args, kwargs)))
            taken = {id(tensor): tensor for tensor in tensors if tensor.is_floating_point()}
            held = sum(tensor.numel() * tensor.dtype.itemsize for tensor in taken.values() if tensor.requires_grad)
            everything = sum(tensor.numel() * tensor.dtype.itemsize for tensor in taken.values())
            entered[fqn] = held, held or everything

        return hook

    for fqn in blocks:  # a ScriptModule refuses hooks by its own method, but runs them
        nn.Module.register_forward_pre_hook(model.get_submodule(fqn), noting(fqn), with_kwargs=True)


def _cuts(layer: LayerPlan) -> bool:
    """Return True if a module takes a chunk of a tensor that is whole where it is called."""
    return any("Shard" in str(value) for name, value in layer.options.items() if name.startswith("desired"))


def _kind_of(tensor: Tensor) -> str:
    if not isinstance(tensor, nn.Parameter):
        return "buffer"
    return "trained" if tensor.requires_grad else "frozen"


@contextmanager
def _without_values() -> Iterator[None]:
    """Replace the advice to run the step for real, which no rank of a plan can."""
    try:
        yield
    except (NeedsValuesError, DataDependentError) as error:
        needs = (
            error.reason if isinstance(error, NeedsValuesError) else f"{error.operator} needs the values of a tensor"
        )
        raise InputError(
            f"{needs}, but plans are simulated on shapes alone; pass a model and an input whose forward runs on shapes"
        ) from None


def _does_not_share(plan: Plan, error: ModelSummaryError) -> str:
    """Return the message for a model that runs on one device, but not with the share of one rank."""
    sizes = {"tensor": plan.tensor, "context": plan.context, "expert": plan.expert}
    arguments = [f"{name}={size}" for name, size in sizes.items() if size > 1]
    arguments += ["sequence=True"] if plan.sequence else []
    remedy = "sequence=False" if plan.sequence else "1"
    reason = f"{type(error.__cause__).__name__}: {error.__cause__}" if isinstance(error, StepError) else str(error)
    return f"{', '.join(arguments)}: the step does not run with the share of one rank ({reason:.160}); pass {remedy}"

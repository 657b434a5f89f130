"""Make a plan from what a model does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from modelsummary.capture.checkpoints import check_kept
from modelsummary.capture.live import LiveModel
from modelsummary.capture.run import no_collection
from modelsummary.errors import InputError, ModelSummaryError, StepError, UndividedError, check_integers, close_to
from modelsummary.layer_info import LayerInfo
from modelsummary.memory.checkpointing import CheckpointPlan, blocks_of
from modelsummary.parallel.applied_rank import check_runs, device_of_rank, step_of_rank
from modelsummary.parallel.applying import check_unsharded, ties_of
from modelsummary.parallel.context import ring_plan
from modelsummary.parallel.derive import Derivation, derive, layer_plans
from modelsummary.parallel.equal_blocks import kinds_of_blocks
from modelsummary.parallel.expert_plans import does_not_divide, expert_plans, uncalled_plans
from modelsummary.parallel.fsdp_units import fsdp_units, read_from_outside
from modelsummary.parallel.layer_plans import in_call_order, nested_encoders
from modelsummary.parallel.local_check import alike, check_locally, chunks_failure
from modelsummary.parallel.loss import shard_logits
from modelsummary.parallel.placements import Blocked
from modelsummary.parallel.plan import LayerPlan, ParallelPlan
from modelsummary.parallel.plan_arguments import (
    check_checkpoint,
    check_sending,
    check_sequence,
    checkpoint_by_name,
    level_of,
)
from modelsummary.parallel.plan_entries import LocalAttribute
from modelsummary.parallel.rank_model import local_shapes
from modelsummary.parallel.record_calls import TRACE_RULES, Calls
from modelsummary.parallel.sequence import find_chunks
from modelsummary.record.events import Event, values_in
from modelsummary.record.runs import record_of

__all__ = ["make_plan"]

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_MOST_TRIES = 12  # each is checked by a run on shapes


@no_collection()
def make_plan(
    live: LiveModel,
    root: LayerInfo,
    *,
    tensor: int = 1,
    data: int = 1,
    shard: int = 1,
    pipeline: int = 1,
    expert: int = 1,
    sequence: bool = False,
    loss_parallel: bool = False,
    split: Callable[..., Any] | None = None,
    checkpoint: CheckpointPlan | Mapping[str, Sequence[str]] | Sequence[str] | str | int | None = None,
    precision: torch.dtype | None = None,
    sharded: str | int | None = None,
    offload: bool = False,
    context: int = 1,
    dispatch: str = "all_reduce",
) -> ParallelPlan:
    """Return a plan as ``Statistics.parallel_plan`` says.

    Args:
        root: of the model's tree.
        split: function from a number of stages and the FQNs of modules that are not cut to the model's stages; needed
            for ``pipeline > 1``.
    """
    check_integers(tensor=tensor, data=data, shard=shard, pipeline=pipeline, expert=expert, context=context)
    check_sending(dispatch, expert, tensor=tensor, data=data, shard=shard, pipeline=pipeline, context=context)
    _check_precision(precision, live.model)
    check_sequence(sequence, tensor)
    level = level_of(sharded, shard)
    _check_together(tensor, pipeline, context, sequence=sequence, loss_parallel=loss_parallel)
    context_shards = context > 1 and level is not None
    shards = shard * context if context_shards else shard
    model = live.model
    check_unsharded(model)
    check_checkpoint(checkpoint)
    stages = cut = None
    if split is not None and pipeline > 1:  # a stage that begins with a block cuts nothing that is sharded
        cut = cache(partial(split, whole=frozenset(row.fqn for row in blocks_of(root))))
        stages = cut(pipeline)
    boundaries = () if stages is None else tuple(_stage_begins(root, stages.calls))
    checkpointed, kept = _checkpoint(checkpoint, root, model, boundaries)
    layers: list[LayerPlan] = []
    attributes: list[LocalAttribute] = []
    reasons: dict[str, str] = {}
    calls = _calls(live) if tensor > 1 or expert > 1 or context > 1 else None
    rings, attentions = ({}, ()) if calls is None or context == 1 else _rings(live, calls, context)
    if calls is not None and expert > 1:
        layers, reasons = expert_plans(live, calls, expert, dispatch)
    if calls is not None and tensor > 1:
        derivation = derive(calls, exchanges=shards > 1)
        _keep_whole(derivation, boundaries, layers)
        _check(live, derivation, tensor, shard=shards, sequence=sequence, loss_parallel=loss_parallel)
        sharded_layers = layer_plans(derivation, [row.fqn for row in blocks_of(root)])
        reasons, attributes = derivation.reasons | reasons, derivation.attributes
        layers = in_call_order(calls, [*layers, *sharded_layers, *uncalled_plans(calls, sharded_layers)])
        if not sharded_layers:
            raise UndividedError(
                f"tensor={tensor}: no layer of {type(model).__name__} can be split over {tensor} ranks"
                f"{''.join(f'; {fqn}: {why}' for fqn, why in list(reasons.items())[:1])}",
                reasons,
            )
    _check_held(layers, checkpointed, stages, cut)
    ranks = {"tensor": tensor, "expert": expert}
    shapes = local_shapes(model, layers, ranks)
    layers = _on_first_rank(model, layers, shapes)
    sent = _experts(model, layers) if dispatch == "all_to_all" else {}
    # the mixed precision is FSDP's, if only over one rank
    has_units = max(shard, data, context) > 1 or precision is not None
    units: dict[str, Any] = {}
    if has_units:
        calls = _calls(live) if calls is None else calls
        units = fsdp_units(model, root, calls, sent)
    plan = ParallelPlan(
        model_class=type(model).__name__,
        tensor=tensor,
        data=data,
        shard=shard,
        pipeline=pipeline,
        expert=expert,
        context=context,
        **rings,
        dispatch=dispatch if expert > 1 else "all_reduce",
        context_shards=context_shards,
        layers=tuple(layers),
        attributes=tuple(attributes),
        ties=tuple(map(tuple, ties_of(model))),
        **units,
        conditional=() if calls is None else tuple(_conditional(calls, units.get("units", ()))),
        # FSDP over one rank, which has the root alone, cannot shard them either.
        averaged=tuple(
            name
            for name, parameter in model.named_parameters()
            if not parameter.dim() and (has_units or tensor * pipeline * expert == 1)
        ),
        frozen=tuple(
            name
            for name, parameter in model.named_parameters()
            if tensor * expert * pipeline > 1 and not parameter.requires_grad
        ),
        reshard_after_forward=level in (None, "parameters"),
        precision=None if precision is None else str(precision).removeprefix("torch."),
        offload=offload,
        checkpoint=checkpointed,
        kept=kept,
        loss_parallel=loss_parallel,
        boundaries=boundaries,
        replicated={fqn: why for fqn, why in reasons.items() if fqn not in {layer.fqn for layer in layers}},
        params=sum(parameter.numel() for parameter in model.parameters()),
        params_per_rank=_params_per_rank(model, shapes, shards, stages, dict.fromkeys(sent, max(1, shards // expert))),
        _live=live,
        _stages=stages,
        _split=cut,
        _blocks=_kinds(live, root, calls),
    )
    if offload and "shard" not in plan.mesh_shape:
        raise InputError(
            f"offload=True moves what FSDP shards to the CPU, and tensor={tensor}, expert={expert}, pipeline={pipeline}"
            " have no FSDP; pass shard=, data= or precision=, too"
        )
    if context > 1:
        _check_rings(plan, attentions)
    _check_kept(plan)
    return _running(plan)


def _check_together(tensor: int, pipeline: int, context: int, *, sequence: bool, loss_parallel: bool) -> None:
    """Raise ``InputError`` for kinds of parallelism that do not go together."""
    if context > 1 and pipeline > 1:
        raise InputError(
            f"context={context} with pipeline={pipeline}: stages are recorded with whole sequences, and torch's stages "
            "take tensors of the recorded shapes alone; use pipeline=1, or context=1"
        )
    if sequence and pipeline > 1:
        raise InputError("sequence=True: whole activations cross between stages; use pipeline=1, or sequence=False")
    if loss_parallel and tensor == 1:
        raise InputError(
            "loss_parallel=True shards the logits over the ranks of tensor parallelism; pass tensor > 1, too"
        )


def _rings(live: LiveModel, calls: Calls, context: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return what ``ring_plan`` does. Raises ``InputError`` for a model that does not run on chunks."""
    _check_reads_nothing(live, calls, f"context={context}")
    return ring_plan(live, calls, context)


def _check_rings(plan: ParallelPlan, attentions: Sequence[str]) -> None:
    """Refuse a plan whose step does not run as rings, or in which an attention stays with the tokens of its rank."""
    where = f"context={plan.context}: {plan.model_class}"
    error = _unknown(plan)
    if error is not None:
        without = _unknown(replace(plan, context=1, context_shards=False))
        if without is not None:
            raise InputError(
                f"{where} does not run on shapes, without context parallelism either: {without}"
            ) from error
        cause = error.__cause__ or error
        raise InputError(
            f"{where} does not run with torch's ring attention, which is of CUDA's fused kernels alone: in half "
            "precision (precision=torch.bfloat16), or in float32 with multiples of 64 tokens on each rank and as many "
            f"heads of keys as of queries; torch says {type(cause).__name__}: {' '.join(str(cause).split()):.200}"
        ) from error
    rings = {
        (collective.fqn, collective.operation)
        for collective in plan.communication
        if collective.group == "context" and getattr(torch, collective.dtype).is_floating_point
    }
    alone = next((fqn for fqn in attentions if (fqn, "all_gather") not in rings), None)
    if alone is not None:
        raise InputError(
            f"{where}: {alone or 'the model'} calls scaled_dot_product_attention by a name of its own, which torch's "
            "ring attention does not replace; call it as torch.nn.functional.scaled_dot_product_attention"
        )


def _running(plan: ParallelPlan) -> ParallelPlan:
    """Return a plan; refuse a precision, or checkpoints, with which its step raises, and without which it runs."""
    without: dict[str, dict[str, Any]] = {}
    if plan.precision is not None:
        without[f"precision=torch.{plan.precision}"] = {"precision": None}
    if plan.checkpoint:
        without[f"checkpoint of {', '.join(plan.checkpoint):.80}"] = {"checkpoint": ()}
    failure = _failure(plan) if without else None
    for argument, changes in without.items():
        if failure is not None and _failure(replace(plan, **changes)) is None:
            cause = failure.__cause__
            raise InputError(
                f"{argument}: the {failure.phase} of a rank raises {type(cause).__name__}: {cause}; it runs with "
                f"{next(iter(changes))}=None"
            ) from failure
    return plan


def _unknown(plan: ParallelPlan) -> ModelSummaryError | None:
    """Return why it is not known what the step of a plan communicates; None if it is."""
    try:
        plan.communication  # noqa: B018
    except ModelSummaryError as error:
        return error
    return None


def _failure(plan: ParallelPlan) -> StepError | None:
    """Return what the step of a plan raises; None if it runs, or if shapes do not tell."""
    error = _unknown(plan)
    return error if isinstance(error, StepError) else None


def _kinds(live: LiveModel, root: LayerInfo, calls: Calls | None) -> dict[str, str]:
    """Return FQN of each block -> FQN of the first block that communicates alike, as far as that is known.

    A block that runs several times, or of which a function outside takes a parameter, is equal to no other.
    """
    if calls is None or live.execution == "real":
        return {}
    rows = blocks_of(root)
    read = read_from_outside(live.model, calls, [row.fqn for row in rows])
    kinds = kinds_of_blocks(root, rows)
    return {fqn: fqn if fqn in read or calls.n_calls[fqn] != 1 else kind for fqn, kind in kinds.items()}


def _check_held(layers: Sequence[LayerPlan], checkpointed: Sequence[str], stages: Any, split: Any) -> None:
    """Refuse stages that hold no parameters, or that cut a module apart whose forward takes sizes or runs again.

    Args:
        split: function from a number of stages to them.
    """
    if stages is None:
        return
    empty = _without_parameters(stages)
    if empty is not None:
        works = next((n for n in range(len(stages) - 1, 1, -1) if _without_parameters(split(n)) is None), 1)
        raise InputError(
            f"pipeline={len(stages)}: stage {empty} of 0 to {len(stages) - 1} would hold no parameters, and optimizers "
            f"need some; pass pipeline={works}, the largest number below it whose stages all hold some"
        )
    held = {fqn for stage in stages for fqn, _ in stage.named_modules()}
    cut_apart = next((layer.fqn for layer in layers if layer.role == "sizes" and layer.fqn not in held), None)
    if cut_apart is not None:
        raise InputError(
            f"the stages cut {cut_apart} apart, whose forward takes sizes of the whole model; pass pipeline=1, or write"
            " these sizes as -1"
        )
    for stage in stages:
        opened = [fqn for fqn in checkpointed if hasattr(stage, "calls_inside") and stage.calls_inside(fqn) is not None]
        if opened:
            raise InputError(
                f"checkpoint: {opened[0]} cannot run again, as a stage calls the layers inside of it: it changes an "
                "argument, such as a cache of keys and values; call the model with use_cache=False, or pass "
                "checkpoint=None"
            )


def _without_parameters(stages: Any) -> int | None:
    """Return the index of the first stage that holds no parameters; None if all hold some."""
    return next((index for index, stage in enumerate(stages) if next(stage.parameters(), None) is None), None)


def _stage_begins(root: LayerInfo, calls: Sequence[Sequence[Event]]) -> list[str]:
    """Return the blocks, or modules outside of all blocks, with which the second and each later stage begin.

    Args:
        calls: of each stage.
    """
    blocks = [row.fqn for row in blocks_of(root)]

    def begin(part: Sequence[Event]) -> str:
        for call in part:
            block = next((fqn for fqn in blocks if f"{call.fqn}.".startswith(f"{fqn}.")), "")
            if block or call.is_module:
                return block or call.fqn
        return part[0].name

    return [begin(part) for part in calls[1:]]


def _check_precision(precision: torch.dtype | None, model: nn.Module) -> None:
    """Refuse anything but a dtype, and batch norms, of which FSDP casts the weight and not the running statistics."""
    if precision is None:
        return
    if precision.itemsize == 1:
        raise InputError(
            f"precision={precision!r}; expected a floating point torch.dtype of 16 bits or more, or None; for 8-bit "
            "products, convert layers with torchao.float8"
        )
    for fqn, module in model.named_modules():
        statistics = module.running_mean if isinstance(module, _BATCH_NORMS) else None
        if statistics is not None and statistics.dtype is not precision:
            raise InputError(
                f"precision={precision}: torch refuses {fqn} ({type(module).__name__}) with a weight of that dtype and "
                f"running statistics of {statistics.dtype}; train in torch.autocast instead, or use a group norm"
            )


def _checkpoint(
    checkpoint: Any, root: LayerInfo, model: nn.Module, boundaries: Sequence[str]
) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Return the FQNs of the modules that run under activation checkpointing, and what some of them keep.

    Args:
        boundaries: FQNs of the modules with which the second and each later stage begin.
    """
    checkpoint = checkpoint_by_name(checkpoint, "parallel_plan")
    kept = checkpoint if isinstance(checkpoint, dict) else {}
    names = _checkpointed(checkpoint, root, model, boundaries)
    return tuple(names), {fqn: results for fqn, results in kept.items() if results}


def _check_kept(plan: ParallelPlan) -> None:
    """Refuse names of results that no operator of the module has on a rank, on the model's device or on CUDA."""
    refused = None
    for device in (device_of_rank(plan), torch.device("cuda")) if plan.kept else ():
        with suppress(ModelSummaryError):  # a step that does not run tells nothing about names
            check_runs(plan, "names of results")
            trace, _ = step_of_rank(plan, device)
            try:
                check_kept(plan.kept.items(), trace)
            except InputError as error:
                refused = refused or error
            else:
                return
    if refused is not None:
        raise refused


def _checkpointed(checkpoint: Any, root: LayerInfo, model: nn.Module, boundaries: Sequence[str]) -> Iterable[str]:
    blocks = [row.fqn for row in blocks_of(root)]
    if checkpoint is None or checkpoint == "every":
        return blocks if checkpoint else ()
    if isinstance(checkpoint, str):
        raise InputError(
            f"parallel_plan does not apply checkpoint={checkpoint!r}; pass 'every', a number of blocks of each stage, "
            "a list of names, or a memory plan"
        )
    if isinstance(checkpoint, int):
        return _first_blocks(checkpoint, root, blocks, boundaries)
    modules = [name for name, _ in model.named_modules()]
    for name in checkpoint:
        if name not in modules:
            raise InputError(
                f"checkpoint={name!r} names no module of {type(model).__name__}; pass 'every', or names of modules"
                f"{close_to(name, modules)}"
            )
    return list(checkpoint)


def _first_blocks(count: int, root: LayerInfo, blocks: Sequence[str], boundaries: Sequence[str]) -> Iterator[str]:
    """Yield the first ``count`` blocks of each stage through which the backward passes."""
    left, has_backward = count, False
    for row in root.walk():
        left = count if row.fqn in boundaries else left
        is_block = row.fqn in blocks
        has_backward = has_backward or bool(row.trainable_params if is_block else row.self_trainable_params)
        if is_block and has_backward and left:
            left -= 1
            yield row.fqn


def _experts(model: nn.Module, layers: Sequence[LayerPlan]) -> dict[int, str]:
    """Return id of a parameter of divided experts -> FQN of their module."""
    experts = (layer.fqn for layer in layers if layer.mesh == "expert")
    return {id(parameter): fqn for fqn in experts for parameter in model.get_submodule(fqn).parameters()}


def _params_per_rank(
    model: nn.Module, shapes: Mapping[int, Sequence[int]], shard: int, stages: Any, shards: Mapping[int, int]
) -> int:
    """Return the elements of parameters on the first rank of the largest stage: FSDP gives it the most rows.

    Args:
        shapes: id of a parameter -> its shape after tensor and expert parallelism.
        shard: ranks over which FSDP shards a parameter.
        shards: id of a parameter that other ranks shard -> their number.
    """

    def elements(parameter: nn.Parameter) -> int:
        shape, n_ranks = shapes.get(id(parameter), parameter.shape), shards.get(id(parameter), shard)
        return math.prod([-(-shape[0] // n_ranks), *shape[1:]]) if shape else 1

    return max(sum(map(elements, part.parameters())) for part in ([model] if stages is None else stages))


def _on_first_rank(
    model: nn.Module, layers: Sequence[LayerPlan], shapes: Mapping[int, Sequence[int]]
) -> list[LayerPlan]:
    """Return plans of layers with the parameters of the first rank.

    Experts may be sharded over two dimensions of the mesh, or be on another rank.
    """
    experts = {layer.fqn for layer in layers if layer.mesh == "expert"}
    plans = []
    for layer in layers:
        module = model.get_submodule(layer.fqn)
        sizes = {name: math.prod(shapes[id(parameter)]) for name, parameter in module.named_parameters()}
        plans.append(
            replace(layer, params=sum(sizes[name] for name in (sizes if layer.fqn in experts else layer.shards)))
        )
    return plans


# ---------------------------------------------------------------------------------------- tensor parallel


def _calls(live: LiveModel) -> Calls:
    return Calls(live.model, record_of(live, TRACE_RULES))


def _keep_whole(derivation: Derivation, boundaries: Sequence[str], experts: Sequence[LayerPlan]) -> None:
    """Leave activations whole that stages would send in parts, and layers that stacked experts hold.

    All ranks of ``expert`` sum the gradients of the parameters of these layers.

    Args:
        boundaries: FQNs of the modules with which the second and each later stage begin.
        experts: plans of experts that are divided by number.
    """
    _keep_crossing_whole(derivation, boundaries)
    for stack in (layer.fqn for layer in experts if not layer.is_list):
        for fqn in [fqn for fqn in derivation.layers if fqn.startswith(f"{stack}." if stack else "")]:
            if fqn in derivation.layers and fqn != stack:
                derivation.drop(fqn, f"{stack} holds it, whose experts are divided; a layer beside them can be split")


def _keep_crossing_whole(derivation: Derivation, boundaries: Sequence[str]) -> None:
    """Leave activations whole of which a stage would send a part, such as a bias that the first block makes for all.

    Keys and values in a cache that the model returns go through all later stages.

    Args:
        boundaries: FQNs of the modules with which the second and each later stage begin.
    """
    calls = derivation.calls
    results = set(values_in(calls.record.root.result))
    for begin in boundaries:
        cut = next(
            (position for position, event in enumerate(calls.events) if f"{event.fqn}.".startswith(f"{begin}.")), -1
        )
        for region in list(derivation.regions):
            later = (value for value in region.shards if value in results or calls.last_use.get(value, -1) >= cut)
            sent = next((value for value in later if calls.position[calls.maker[value]] < cut), None)
            if sent is not None:
                maker = calls.maker[sent]
                what = f"the result of {maker.name} in {maker.fqn or 'the model'}"
                works = "a model that is called without a cache, or pipeline=1, works" if sent in results else ""
                works = works or "pipeline=1 works"
                derivation.gather(region, f"{what} goes to the stage that begins with {begin}; {works}")


def _check(
    live: LiveModel, derivation: Derivation, n_ranks: int, *, shard: int, sequence: bool, loss_parallel: bool
) -> None:
    """Check a derivation for a number of ranks, and note the attributes that have to change."""
    _check_divides(derivation, n_ranks, shard)
    check_locally(live, derivation, n_ranks)
    if loss_parallel:
        shard_logits(derivation)
    if sequence:
        _add_chunks(live, derivation, n_ranks)
    encoders = nested_encoders(derivation.calls, set(derivation.layers))
    switches = (("inplace", derivation.in_place), ("use_nested_tensor", encoders))
    derivation.attributes += [LocalAttribute(fqn, name, True, False) for name, fqns in switches for fqn in fqns]


def _add_chunks(live: LiveModel, derivation: Derivation, n_ranks: int) -> None:
    """Shard activations between the regions along the sequence. Raises ``InputError`` if that is not possible."""
    _check_reads_nothing(live, derivation.calls, "sequence=True")
    obstacle = ""
    ways: list[tuple[bool, bool, frozenset[int]]] = [
        (embeddings, inputs, frozenset()) for embeddings, inputs in ((True, False), (False, True), (False, False))
    ]
    for _ in range(_MOST_TRIES):
        if not ways:
            break
        with_embeddings, cuts_inputs, whole = ways.pop(0)
        try:
            chunks = find_chunks(
                derivation, n_ranks, with_embeddings=with_embeddings, cuts_inputs=cuts_inputs, whole=whole
            )
        except Blocked as blocked:
            obstacle = obstacle or str(blocked)
            continue
        obstacle, position = chunks_failure(live, derivation, chunks, n_ranks)
        if not obstacle:
            derivation.chunks = chunks
            return
        if position >= 0 and position not in whole:  # this call may take a whole tensor
            ways.append((with_embeddings, cuts_inputs, whole | {position}))
    raise InputError(f"sequence=True: {type(live.model).__name__} does not run on chunks of the sequence: {obstacle}")


def _check_reads_nothing(live: LiveModel, calls: Calls, argument: str) -> None:
    """Raise ``InputError`` for a forward that reads values, which a copy on shapes lacks."""
    if live.execution == "real":
        reads = next((event for event in calls.events if _reads_values(event)), None)
        where = f" ({reads.name}() in {reads.fqn or 'the model'})" if reads is not None else ""
        off = "sequence=False" if argument.startswith("sequence") else "context=1"
        raise InputError(
            f"{argument}: the forward of {type(live.model).__name__} reads values{where}, so no copy can be run on "
            f"chunks of the sequence; use {off}, or a forward that runs on shapes"
        )


def _reads_values(event: Event) -> bool:
    """Return True for a function whose result, or its shape, depends on values."""
    is_condition = event.name == "where" and len(event.args) == 1
    return (
        event.is_decision
        or is_condition
        or event.name in ("nonzero", "argwhere", "masked_select", "unique", "bincount")
    )


def _conditional(calls: Calls, units: Sequence[Sequence[str]]) -> list[str]:
    """Return the first module of each unit whose forward reads values."""
    readers = {event.fqn for event in calls.events if _reads_values(event)}
    return [unit[0] for unit in units if any(f"{reader}.".startswith(f"{fqn}.") for reader in readers for fqn in unit)]


def _check_divides(derivation: Derivation, n_ranks: int, shard: int) -> None:
    """Refuse a number of ranks that does not divide heads or widths.

    A region in which only smaller extents do not divide (heads of keys and values) is gathered instead, and so is one
    beside equal regions with other numbers of heads, which divide. Raises ``InputError`` with the numbers that would
    work.
    """
    heads: dict[str, Any] = {fqn: derivation.calls.modules[fqn] for fqn in derivation.attentions}
    works = math.gcd(
        *(math.gcd(*region.sizes) for region in derivation.regions), *(module.num_heads for module in heads.values())
    )
    for region in list(derivation.regions):
        wrong = [size for size in region.sizes if size % n_ranks]
        if not wrong:
            continue
        if region.pieces:
            first = next(iter(region.pieces))
            reason = f"{min(wrong)} heads or features of each piece of {first} do not divide by {n_ranks}"
            derivation.gather(region, f"{reason}; divisors of {min(wrong)} work")
            continue
        fqn, (fewer, more) = (region.columns or [region.module])[0], region.groups
        if more and more % n_ranks == 0 and wrong == [fewer]:
            other = derivation.share(region)
            if any(size % n_ranks for size in other.sizes):
                derivation.gather(
                    other, f"{fewer} heads of keys and values do not divide by {n_ranks}; divisors of {fewer} work"
                )
            continue
        extent = more if more % n_ranks else min(wrong)
        what = "features" if region.sizes == {extent} else "heads or features"
        if any(not any(size % n_ranks for size in other.sizes) for other in alike(derivation.regions, region)):
            derivation.gather(region, f"{extent} {what} do not divide by {n_ranks}; divisors of {extent} work")
            continue
        raise does_not_divide(f"tensor={n_ranks}", f"{extent} {what} of {fqn}", works)
    for fqn, module in heads.items():
        if module.num_heads % n_ranks:
            raise does_not_divide(f"tensor={n_ranks}", f"{module.num_heads} heads of {fqn}", works)
    for layer in [layer for layer in derivation.layers.values() if layer.role not in ("norm", "local", "heads")]:
        module = derivation.calls.modules[layer.fqn]
        cut = ((module.get_parameter(name).shape, dim) for name, dim in layer.shards.items() if dim is not None)
        size, obstacle = next(shape[dim] for shape, dim in cut if len(shape) == 2), ""
        if layer.role in ("embedding", "head"):
            obstacle = _vocabulary_obstacle(size, n_ranks, shard)
        elif size % n_ranks:
            obstacle = f"do not divide by {n_ranks}; divisors of {size} work"
        if obstacle:
            derivation.drop(layer.fqn, f"the {size} rows of {layer.fqn} {obstacle}")


def _vocabulary_obstacle(rows: int, n_ranks: int, shard: int) -> str:
    """Return why the rows of a vocabulary cannot be chunks of which the last ones are shorter; empty if they can.

    >>> _vocabulary_obstacle(50257, 2, 2), _vocabulary_obstacle(9, 8, 1)
    ('', 'leave no row to the last of 8 ranks; fewer ranks work')
    """
    chunks = _chunks(rows, n_ranks)
    if not all(chunks):
        return f"leave no row to the last of {n_ranks} ranks; fewer ranks work"
    # FSDP cuts each chunk. DTensor gathers a rank's parts of all chunks as if they were cut again, into equal parts.
    for parts in zip(*(_chunks(chunk, shard) for chunk in chunks), strict=True):
        if list(parts) != _chunks(sum(parts), n_ranks):
            multiple = math.lcm(n_ranks, shard)
            return (
                f"are cut by FSDP where DTensor does not expect it, with tensor={n_ranks} and shard={shard}; multiples "
                f"of {multiple} rows, or shard=1, work"
            )
    return ""


def _chunks(size: int, n_chunks: int) -> list[int]:
    """Return the sizes of the chunks that ``DTensor`` cuts a dimension into: the last ones are shorter, or empty."""
    longest = -(-size // n_chunks)
    return [max(0, min(longest, size - longest * index)) for index in range(n_chunks)]

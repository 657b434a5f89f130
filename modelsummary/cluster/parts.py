"""The parts of a model on one rank: the kernels, collectives and bytes of its ends and of each kind of block.

A step of the rank's model runs once on shapes. Its operators are dealt to the part of the model that they belong to:
what precedes the blocks, the blocks, and what follows them. Operators of a backward go with their forward.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from typing import NamedTuple

import torch

from modelsummary.capture.trace import Storage, Trace
from modelsummary.cluster.kept import KeptStorage, keepers, kept_storages
from modelsummary.cluster.megatron import tokens_first
from modelsummary.cluster.weights import RankWeights, Weight
from modelsummary.errors import InputError
from modelsummary.layer_info import CallKey
from modelsummary.memory.block_reruns import DETACH
from modelsummary.memory.estimate import CATEGORIES, TimelinePoint
from modelsummary.memory.kept_results import result_names
from modelsummary.memory.timeline import timeline_of
from modelsummary.operators.attention import scores_again
from modelsummary.operators.collective_calls import collective_of
from modelsummary.operators.kernels import StepOperator, kernels_of
from modelsummary.operators.operator_calls import OperatorCall, TensorSpec
from modelsummary.operators.operator_work import Work, work_of
from modelsummary.operators.table import NO_FACTS, TABLE
from modelsummary.operators.weight_gradients import of_weights_alone

__all__ = ["AFTER", "BEFORE", "MicrobatchCollective", "Part", "parts_of"]

BEFORE, AFTER = "before the blocks", "after the blocks"
_PLAIN, _CORE, _COLUMN, _WEIGHTS, _LAST = 0, 1, 2, 4, 8  # marks of operators, which add up


class MicrobatchCollective(NamedTuple):
    """A collective of one micro-batch.

    Attributes:
        operation: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"`` or ``"all_to_all"``.
        phase: ``"forward"`` or ``"backward"``.
        nbytes: bytes of the whole tensor.
        group: ``"tensor"``, ``"context"`` or ``"expert"``.
        copies: experts that each token is sent to; else 1.
        is_repeated: recomputation of its part runs it again; in a backward always.
    """

    operation: str
    phase: str
    nbytes: int
    group: str = "tensor"
    copies: int = 1
    is_repeated: bool = True


Works = tuple[tuple[Work, int], ...]  # distinct kernels, and how often each runs


_KernelsByPart = tuple[defaultdict[tuple[str, str], Counter[Work]], Counter[tuple[str, str]]]


class Result(NamedTuple):
    """What an operator of the forward of a part makes, which a checkpoint around the part may keep.

    Attributes:
        nbytes: bytes of the storages that it makes, but for one that leaves the part, which is there as the input of
            what follows; 0 of a view.
        sent_bytes: bytes of what leaves it, which a checkpoint keeps where nothing follows on the rank.
        saved_bytes: bytes of both that the part keeps for the backward without a checkpoint.
        operator: the operator, if recomputation repeats it; else None.
        collective: position of the collective that it is, in ``Part.collectives``; None for another operator.
    """

    nbytes: int
    sent_bytes: int
    saved_bytes: int
    operator: StepOperator | None
    collective: int | None


@dataclass(frozen=True)
class Part:
    """What one rank does and holds for a part of the model and one micro-batch.

    Attributes:
        works: ``"forward"`` and ``"backward"`` -> kernels; ``"again"``: kernels of the forward that recomputation
            repeats; ``"core"``: kernels of the forward from the scores to the context of attention; ``"weights"``:
            kernels of the backward that compute gradients of weights alone; ``"columns"`` and ``"column weights"``: the
            products in the backward of column-parallel layers, for gradients of their input, and of their weights.
        operators: ``"forward"``, ``"backward"`` and ``"again"`` -> number of operators that the host dispatches.
        collectives: what is communicated for tensor, context and expert parallelism.
        kept_bytes: bytes kept for the backward, or cached; before the blocks, with the inputs.
        cached_bytes: bytes that its forward makes and the result of the model holds, as the keys and values of a cache.
        outliving_bytes: bytes among ``kept_bytes`` that the result of the model holds, so that no backward frees them.
        held_bytes: bytes that are there in the optimizer's step: inputs, and all that the result of the model holds.
        core_bytes: bytes among them that attention between scores and context makes.
        entered_bytes: bytes of the tensors with a gradient that it takes.
        result_bytes: bytes of the results that the checkpoint around it keeps, without results that leave it.
        sent_bytes: bytes of results that leave it and that the checkpoint keeps.
        again_bytes: bytes of activations that exist only while it runs again.
        crossing_bytes: bytes that a stage takes which begins with it: the same, or if nothing of it has a gradient, as
            behind frozen layers, its floating-point tensors.
        temporary_bytes: most bytes that are alive for a moment while it runs.
        first_temporary_bytes: the same in the first micro-batch, with the gradients of its weights.
        weights: id of a parameter or buffer -> what the rank holds of it.
        flops: floating point operations of products in the forward.
        backward_flops: the same in the backward, as far as its trained layers, and those before it, need them; without
            scores of attention that are computed again.
        recomputed_flops: the same of what checkpoints of the model itself compute again in the backward.
        uncounted: operators whose work is not known -> number of calls.
        asked: operators of the forward, and of its recomputation, at which torch asks whether the checkpoint around
            them keeps the result.
        results: name of a result, as ``apply_checkpoint`` takes it -> what it is.
        again: function from operators to their kernels, as ``works`` has them, and how many the host dispatches.
    """

    works: Mapping[str, Works] = field(default_factory=dict)
    operators: Mapping[str, int] = field(default_factory=dict)
    collectives: tuple[MicrobatchCollective, ...] = ()
    kept_bytes: int = 0
    cached_bytes: int = 0
    outliving_bytes: int = 0
    held_bytes: int = 0
    core_bytes: int = 0
    entered_bytes: int = 0
    result_bytes: int = 0
    sent_bytes: int = 0
    again_bytes: int = 0
    crossing_bytes: int = 0
    temporary_bytes: int = 0
    first_temporary_bytes: int = 0
    weights: Mapping[int, Weight] = field(default_factory=dict)
    flops: int = 0
    backward_flops: int = 0
    recomputed_flops: int = 0
    uncounted: Mapping[str, int] = field(default_factory=dict)
    asked: Mapping[str, int] = field(default_factory=dict)
    results: Mapping[str, Result] = field(default_factory=dict, repr=False)
    again: Callable[[Sequence[StepOperator]], tuple[Works, int]] = field(default=lambda _: ((), 0), repr=False)

    def keeping(self, names: Sequence[str]) -> Part:
        """Return the part as it is under a checkpoint that keeps results of these names.

        Raises:
            InputError: it has no result of such a name.
        """
        if not names:
            return self
        unknown = next((name for name in names if name not in self.results), None)
        if unknown is not None:
            raise InputError(
                f"checkpoint keeps {unknown!r}, which no operator of the block makes on a rank of this plan; names hold"
                " for the dtypes, the device and the split layers of the plan that they come from: make it for these"
            )
        kept = [self.results[name] for name in names]
        repeated = [
            result.operator
            for name, result in self.results.items()
            if result.operator is not None and name not in names
        ]
        works, count = self.again(repeated)
        positions = {result.collective for result in kept}
        collectives = tuple(
            collective._replace(is_repeated=collective.is_repeated and position not in positions)
            for position, collective in enumerate(self.collectives)
        )
        return replace(
            self,
            works={**self.works, "again": works},
            operators={**self.operators, "again": count},
            collectives=collectives,
            result_bytes=sum(result.nbytes for result in kept),
            sent_bytes=sum(result.sent_bytes for result in kept),
            again_bytes=self.again_bytes - sum(result.saved_bytes for result in kept),
            asked={"forward": len(self.results), "again": len(repeated)},
        )

    @cached_property
    def held(self) -> RankWeights:
        """The sums of its weights."""
        return RankWeights.of(self.weights.values())

    @property
    def repeated_flops(self) -> int:
        """Floating point operations of products that recomputation runs again."""
        return sum(work.flops * times for work, times in self.works["again"])

    @property
    def has_backward(self) -> bool:
        """Whether the backward passes through it: it has trained parameters, or follows some."""
        return bool(self.works.get("backward"))


class Observed(NamedTuple):
    """What a step on shapes showed.

    Attributes:
        operators: in the order in which they ran.
        saved: storages kept for the backward.
        outliving: storages that the forward makes and that outlive the step.
        timeline: bytes alive at each operator.
        callers: call of a module -> the call around it.
        entered: FQN of a block -> its ``entered_bytes`` and ``crossing_bytes``.
        gradients: storages of the gradients of parameters.
        groups: name of a process group -> what its ranks share out, if the name is another one.
        cut_once: blocks whose input is cut; the others take chunks, so this counts for what precedes the blocks.
        choices: FQN of experts to which tokens are sent -> experts that each token goes to.
    """

    operators: Sequence[StepOperator]
    saved: Sequence[Storage]
    outliving: Sequence[Storage]
    timeline: list[TimelinePoint]
    callers: Mapping[CallKey, CallKey | None]
    entered: Mapping[str, tuple[int, int]]
    gradients: frozenset[int]
    groups: Mapping[str, str]
    cut_once: frozenset[str]
    choices: Mapping[str, int]

    @classmethod
    def of(
        cls, trace: Trace, groups: Mapping[str, str], cut_once: frozenset[str], choices: Mapping[str, int]
    ) -> Observed:
        """Return the facts of a trace, whose note is ``entered``."""
        callers = {call.key: call.parent for call in trace.calls}
        gradients = frozenset(storage.identity for storage in trace.storages if storage.kind == "grads")
        outliving = [
            storage
            for storage in trace.storages
            if storage.kind in ("activations", "temporary")
            and storage.born >= 0
            and (storage.died is None or storage.died >= len(trace.operators))
            and trace.operators[storage.born].phase == "forward"
        ]
        return cls(
            trace.operators,
            trace.saved,
            outliving,
            timeline_of(trace, None),
            callers,
            trace.noted or {},
            gradients,
            groups,
            cut_once,
            choices,
        )


def parts_of(
    observed: Observed,
    blocks: Sequence[str],
    weights: Mapping[str, Mapping[int, Weight]],
    columns: Iterable[str],
    mode: str,
    *,
    token_shares: int = 1,
    context: int = 1,
    sends_round: bool = True,
    eight_bits: torch.dtype | None = None,
    dispatcher: str = "nccl",
    sum_dtype: torch.dtype | None = None,
    stops_early: bool = True,
) -> dict[str, Part]:
    """Return the parts of a step: ``BEFORE``, each block that ran, ``AFTER``.

    Args:
        observed: what the step showed.
        blocks: FQNs of the blocks that ran, in order.
        weights: part -> its weights.
        columns: FQNs of column-parallel layers.
        mode: ``"eager"``, ``"fused"`` or ``"compiled"``.
        token_shares: ranks that keep a share of the tokens that they gather, as in Megatron; 1: they keep all of them.
        context: ranks over which the sequence is split; attention sees keys of all of them.
        sends_round: gradients of keys and values go round the ranks of ``context``, as in torch's ring; otherwise they
            are summed by one reduce-scatter.
        eight_bits: dtype of 8 bits in which the products of linear layers compute; None: as the tensors have it.
        dispatcher: as in ``Recipe``.
        sum_dtype: dtype of the sums that products add gradients of weights to; None: a kernel of its own adds them.
        stops_early: recomputation of a part stops when it has what the backward reads.
    """
    part_names = _part_names(observed, blocks)
    marks = _marks(observed.operators, set(columns))
    for index in of_weights_alone(observed.operators, part_names, observed.gradients):
        marks[index] += _WEIGHTS
    kept_by = keepers(observed.operators, observed.saved, part_names, BEFORE)
    if stops_early:
        for index in _after_the_last_kept(observed, part_names, kept_by):
            marks[index] += _LAST
    copies, gathered = tokens_first(observed.operators) if token_shares > 1 else (frozenset(), frozenset())
    if dispatcher != "nccl":
        copies |= _copies_of_rows(observed, sorts=dispatcher == "hybridep")
    cuts = _cuts(observed)
    labelled = {
        index: operator._replace(row=(BEFORE if index in cuts else part_name, mark))
        for index, (operator, part_name, mark) in enumerate(zip(observed.operators, part_names, marks, strict=True))
        if index not in copies
    }
    kernels = partial(_kernels_by_part, mode=mode, context=context, eight_bits=eight_bits, sum_dtype=sum_dtype)
    works, counts = kernels(list(labelled.values()))
    collectives, positions = _collectives(observed, part_names, marks, context, sends_round=sends_round)
    for storage, part_name in zip(observed.saved, kept_by, strict=True):
        if storage.born in gathered:
            collectives[part_name].append(MicrobatchCollective("all_gather", "backward", storage.nbytes))
    between = frozenset(index for index, mark in enumerate(marks) if mark & _CORE)
    shares = _kept_shares(observed, gathered, token_shares, has_eight_bits=eight_bits is not None and mode == "fused")
    storages = kept_storages(
        observed.operators,
        observed.saved,
        part_names,
        kept_by,
        between,
        shares,
        compiled=mode == "compiled",
    )
    caches = _of_caches(observed, part_names, blocks)
    kept_identities = {storage.identity for storage in storages}
    storages += [
        KeptStorage(part_names[storage.born], storage.identity, storage.nbytes, is_core=False)
        for storage in caches
        if storage.identity not in kept_identities
    ]
    inputs = CATEGORIES.index("inputs")
    input_bytes = max((point.held[inputs] for point in observed.timeline), default=0)
    kept = _sums([(BEFORE, input_bytes), *((storage.part_name, storage.nbytes) for storage in storages)])
    core = _sums((storage.part_name, storage.nbytes * storage.is_core) for storage in storages)
    cached = _sums((part_names[storage.born], storage.nbytes) for storage in caches)
    identities = {storage.identity for storage in observed.outliving}
    outliving = _sums((storage.part_name, storage.nbytes) for storage in storages if storage.identity in identities)
    held = _sums([(BEFORE, input_bytes), *((part_names[result.born], result.nbytes) for result in observed.outliving)])
    results = _results(observed.operators, part_names, labelled, positions, storages)
    temporary, first_temporary = _temporary(
        observed.timeline, part_names, caches, adds_in_products=sum_dtype is not None
    )
    backward_flops: Counter[str] = Counter()
    recomputed_flops: Counter[str] = Counter()
    uncounted: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for operator, part_name in zip(observed.operators, part_names, strict=True):
        call = operator.run.call
        if call.cost.uncounted is not None:
            uncounted[part_name][call.name] += 1
        if operator.phase == "backward" and operator.run.with_grad:
            recomputed_flops[part_name] += 2 * call.cost.macs
        elif operator.phase == "backward":
            backward_flops[part_name] += 2 * (call.cost.macs - scores_again(call.rule, call.bound))
    parts = {}
    for name in (BEFORE, *blocks, AFTER):
        phases = ("forward", "backward", "again", "core", "weights", "columns", "column weights")
        entered_bytes, crossing_bytes = observed.entered.get(name, (0, 0))
        parts[name] = Part(
            works={phase: tuple(works[name, phase].items()) for phase in phases},
            operators={phase: counts[name, phase] for phase in phases[:3]},
            collectives=tuple(collectives[name]),
            kept_bytes=kept[name],
            cached_bytes=cached[name],
            outliving_bytes=outliving[name],
            held_bytes=held[name],
            core_bytes=core[name],
            entered_bytes=entered_bytes,
            again_bytes=kept[name] - entered_bytes,
            crossing_bytes=crossing_bytes,
            temporary_bytes=temporary[name],
            first_temporary_bytes=first_temporary[name],
            weights=weights.get(name, {}),
            flops=sum(work.flops * times for work, times in works[name, "forward"].items()),
            backward_flops=backward_flops[name],
            recomputed_flops=recomputed_flops[name],
            uncounted=uncounted[name],
            results=results[name],
            again=partial(_again, name, kernels),
        )
    return parts


# ------------------------------------------------------------------------------------------------- dealing


def _kernels_by_part(
    operators: Sequence[StepOperator],
    mode: str,
    context: int,
    eight_bits: torch.dtype | None,
    sum_dtype: torch.dtype | None,
) -> _KernelsByPart:
    """Return the kernels of each part and phase, as ``Part.works`` has them, and how many the host dispatches.

    Args:
        operators: their rows are a part and a mark.
        mode, context, eight_bits, sum_dtype: as for ``parts_of``.
    """
    works: defaultdict[tuple[str, str], Counter[Work]] = defaultdict(Counter)
    counts: Counter[tuple[str, str]] = Counter()
    for kernel in kernels_of(operators, mode):
        assert kernel.row is not None
        part_name, mark = kernel.row
        phases = _phases_of(kernel.phase, is_repeated=not mark & _LAST)
        work = _with_context(kernel.work, context)
        is_of_weights = bool(mark & _WEIGHTS) or (kernel.phase == "backward" and work.part in ("weight", "bias"))
        if sum_dtype is not None and is_of_weights and work.op_class == "gemm":
            work = _added(work, sum_dtype)
        if eight_bits is not None and _may_have_eight_bits(work):
            work = _in_eight_bits(work, eight_bits)
        for name in phases:
            works[part_name, name][work] += 1
            counts[part_name, name] += kernel.n_operators if mode == "eager" else 1
        if mark & _CORE and kernel.phase == "forward":
            works[part_name, "core"][work] += 1
        if is_of_weights:
            works[part_name, "weights"][work] += 1
        if mark & _COLUMN and kernel.flops:
            works[part_name, "column weights" if is_of_weights else "columns"][work] += 1
    for operator, spec in _cast_operands(operators, mode) if eight_bits is not None else ():
        assert operator.row is not None
        part_name, mark = operator.row
        for name in _phases_of(operator.phase, is_repeated=not mark & _LAST):
            works[part_name, name].update(_cast(spec))
            counts[part_name, name] += len(_cast(spec))
    return works, counts


def _again(
    part_name: str, kernels: Callable[[Sequence[StepOperator]], _KernelsByPart], operators: Sequence[StepOperator]
) -> tuple[Works, int]:
    """Return the kernels of operators of a part that run again, and how many the host dispatches.

    Args:
        part_name: the part.
        kernels: ``_kernels_by_part`` with the options of the step.
        operators: labelled operators of its forward.
    """
    works, counts = kernels(operators)
    return tuple(works[part_name, "forward"].items()), counts[part_name, "forward"]


def _results(
    operators: Sequence[StepOperator],
    part_names: Sequence[str],
    labelled: Mapping[int, StepOperator],
    positions: Mapping[int, int],
    storages: Iterable[KeptStorage],
) -> defaultdict[str, dict[str, Result]]:
    """Return what the operators of the forward of each part make, by name.

    Args:
        operators: operators of the step.
        part_names: part that each operator belongs to.
        labelled: index of an operator -> the same with its part and its mark.
        positions: index of an operator -> position of the collective that it is, among the ones of its part.
        storages: what the parts keep for the backward.
    """
    saved = {(part_name, identity): nbytes for part_name, identity, nbytes, _ in storages}
    readers: defaultdict[int, set[str]] = defaultdict(set)  # storage -> parts whose forward reads it
    indices_by_part: defaultdict[str, list[int]] = defaultdict(list)
    for index, (operator, part_name) in enumerate(zip(operators, part_names, strict=True)):
        if operator.phase == "forward" and operator.run.call.func is not DETACH:
            indices_by_part[part_name].append(index)
            for key in operator.run.reads:
                readers[key].add(part_name)
    results: defaultdict[str, dict[str, Result]] = defaultdict(dict)
    for part_name, indices in indices_by_part.items():
        names = result_names([operators[index].run.call for index in indices])
        for name, index in zip(names, indices, strict=True):
            run, repeated = operators[index].run, labelled.get(index)
            made: dict[int, int] = {}
            for key, spec in zip(run.makes, run.call.outputs, strict=False):
                if key not in run.reads:
                    made[key] = max(made.get(key, 0), spec.nbytes)
            if repeated is not None and repeated.row is not None and repeated.row[1] & _LAST:
                repeated = None
            nbytes = sum(size for key, size in made.items() if readers[key] <= {part_name})
            saved_bytes = sum(saved.get((part_name, key), 0) for key in made)
            sent_bytes = sum(made.values()) - nbytes
            results[part_name][name] = Result(nbytes, sent_bytes, saved_bytes, repeated, positions.get(index))
    return results


def _phases_of(phase: str, *, is_repeated: bool) -> tuple[str, ...]:
    """Return the phases in which a kernel or a collective runs: recomputation repeats what runs in the forward."""
    return (phase, "again") if phase == "forward" and is_repeated else (phase,)


def _part_names(observed: Observed, blocks: Sequence[str]) -> list[str]:
    """Return the part that each operator belongs to: to a block, if the block runs while it runs."""
    operators, names = observed.operators, frozenset(blocks)
    block_of: dict[CallKey | None, str | None] = {None: None}
    for key, caller in observed.callers.items():  # in the order in which they began
        block_of[key] = key[0] if key[0] in names else block_of.get(caller)
    operator_blocks = [block_of.get(operator.row) for operator in operators]
    forward = [index for index, operator in enumerate(operators) if operator.phase == "forward"]
    last = max((index for index in forward if operator_blocks[index] is not None), default=-1)
    ends: dict[str, str] = {}  # FQN of a module outside of the blocks -> its part
    part_names = []
    for index, (operator, block) in enumerate(zip(operators, operator_blocks, strict=True)):
        if block is not None:
            part_names.append(block)
        elif operator.phase == "forward":
            part_name = BEFORE if index < last else AFTER
            if operator.row is not None and operator.row[0]:
                ends.setdefault(operator.row[0], part_name)
            part_names.append(part_name)
        else:
            part_names.append("")
    backward = [index for index, operator in enumerate(operators) if operator.phase == "backward"]
    first = min((index for index in backward if operator_blocks[index] is not None), default=len(operators))
    for index in backward:
        if operator_blocks[index] is None:
            row = operators[index].row
            end = ends.get(row[0]) if row is not None else None
            part_names[index] = end or (AFTER if index < first or not blocks else BEFORE)
    return [part_name or AFTER for part_name in part_names]


def _copies_of_rows(observed: Observed, *, sorts: bool) -> frozenset[int]:
    """Return the operators that copy rows of tokens for a dispatcher that reads and writes tokens itself.

    They gather rows to send, or add up the ones that come back: the first and the last of their kind in a forward or a
    backward, as the experts have their own in between, unless what arrives is sorted by expert (``sorts``).
    """
    gathers: dict[tuple[CallKey | None, str], list[int]] = {}
    sums: dict[tuple[CallKey | None, str], list[int]] = {}
    makers: dict[int, int] = {}
    for index, operator in enumerate(observed.operators):
        row, run = operator.row, operator.run
        call, rule = run.call, run.call.rule
        result = call.outputs[0] if call.outputs else None
        if row is None or row[0] not in observed.choices or result is None or len(result.shape) < 2:
            continue
        if not call.cost.bytes_read:
            makers.update(dict.fromkeys(run.makes, index))
        is_into = rule.op_class == "index" and not rule.facts.chooses and call.tensors[0].shape == result.shape
        if result.dtype.is_floating_point and (rule.gathers or is_into):
            (gathers if rule.gathers else sums).setdefault((row, operator.phase), []).append(index)
    taken = [index for indices in gathers.values() for index in (indices if sorts else indices[:1])]
    added = [index for indices in sums.values() for index in (indices if sorts else indices[-1:])]
    zeros = [makers.get(key) for index in added for key in observed.operators[index].run.reads[:1]]
    return frozenset([*taken, *added, *(index for index in zeros if index is not None)])


def _cuts(observed: Observed) -> frozenset[int]:
    """Return the operators that copy a chunk of a block's input, where only the first block takes all of it."""
    first: dict[CallKey, int] = {}
    for index, operator in enumerate(observed.operators):
        row, rule = operator.row, operator.run.call.rule
        if operator.phase == "forward" and row is not None and row[0] in observed.cut_once and not rule.is_view:
            first.setdefault(row, index)
    return frozenset(index for index in first.values() if observed.operators[index].run.call.rule.facts.copies)


def _marks(operators: Sequence[StepOperator], columns: set[str]) -> list[int]:
    """Mark the operators of the forward between scores and context, and the backward of column-parallel layers."""
    marks = [_PLAIN] * len(operators)
    products: defaultdict[CallKey, list[int]] = defaultdict(list)
    for index, operator in enumerate(operators):
        if operator.phase == "forward" and operator.row is not None and _multiplies_activations(operator.run.call):
            products[operator.row].append(index)
        if operator.phase == "backward" and operator.row is not None and operator.row[0] in columns:
            marks[index] = _COLUMN
    for indices in products.values():
        if len(indices) > 1:
            first, last = indices[0], indices[-1]
            marks[first : last + 1] = [_CORE] * (last + 1 - first)
    return marks


def _after_the_last_kept(observed: Observed, part_names: Sequence[str], kept_by: Sequence[str]) -> list[int]:
    """Return the indices of the operators of the forward behind the last one whose result their part keeps.

    Recomputation ends when it has all that the backward of its part reads (``set_checkpoint_early_stop`` in
    torch/utils/checkpoint.py); a compiled one leaves out what nothing reads.
    """
    operators, last = observed.operators, dict.fromkeys(part_names, -1)
    for storage, keeper in zip(observed.saved, kept_by, strict=True):
        if 0 <= storage.born < len(operators) and part_names[storage.born] == keeper:
            last[keeper] = max(last[keeper], storage.born)
    return [
        index
        for index, (operator, part_name) in enumerate(zip(operators, part_names, strict=True))
        if operator.phase == "forward" and index > last[part_name]
    ]


def _multiplies_activations(call: OperatorCall) -> bool:
    return call.rule.facts.multiplies == "batches" and not any(spec.is_param for spec in call.tensors)


def _with_context(work: Work, context: int) -> Work:
    """Return the work of attention whose keys and values come from all ranks of context parallelism."""
    if context == 1 or work.op_class != "attention":
        return work
    outer, queries, keys, size = work.sizes
    return work._replace(sizes=(outer, queries, keys * context, size), flops=work.flops * context)


def _may_have_eight_bits(work: Work) -> bool:
    """Return True for the product of two matrices whose sizes divide by 16, as kernels with 8 bits need it."""
    is_half = work.dtype in (torch.bfloat16, torch.float16)
    is_product = TABLE.get(work.operator, NO_FACTS).multiplies == "matrices"
    return is_half and is_product and all(size % 16 == 0 for size in work.sizes[1:])


def _in_eight_bits(work: Work, dtype: torch.dtype) -> Work:
    """Return a product with operands of 8 bits, and a result of its own dtype."""
    _, m, n, k = work.sizes
    return work._replace(dtype=dtype, nbytes=m * k + k * n + work.dtype.itemsize * m * n)


def _cast_operands(operators: Sequence[StepOperator], mode: str) -> Iterator[tuple[StepOperator, TensorSpec]]:
    """Yield the operands that are cast to 8 bits, with the products that take them.

    In eager mode each product casts both, as torchao's do; a compiled pass casts a tensor once. Transformer Engine
    keeps what the forward cast for the backward, and casts weights once per step, which is left out.
    """
    cast: set[tuple[int, str]] = set()
    for operator in operators:
        call, reads = operator.run.call, operator.run.reads
        if not any(map(_may_have_eight_bits, work_of(call))):
            continue
        for storage, spec in list(zip(reads, call.tensors, strict=True))[-2:]:  # a bias comes before the operands
            key = storage, operator.phase if mode == "compiled" else ""
            if mode == "eager" or not (key in cast or (mode == "fused" and spec.is_param)):
                cast.add(key)
                yield operator, spec


def _kept_shares(
    observed: Observed, gathered: Iterable[int], token_shares: int, *, has_eight_bits: bool
) -> dict[int, float]:
    """Return operators -> what a rank keeps of their results for the backward, relative to all of it.

    Args:
        observed: what the step showed.
        gathered: operators that gather tokens, of which each of ``token_shares`` ranks keeps its own.
        has_eight_bits: Transformer Engine keeps the cast operand of a product instead of the tensor in 16 bits, or
            beside it if other operators of the backward read it.
    """
    shares = dict.fromkeys(gathered, 1 / token_shares)
    products: set[int] = set()
    others: set[int] = set()
    for operator in observed.operators if has_eight_bits else ():
        if operator.phase == "backward" and operator.run.call.rule.launches_kernel:
            is_product = any(map(_may_have_eight_bits, work_of(operator.run.call)))
            (products if is_product else others).update(operator.run.reads)
    for storage in observed.saved:
        if storage.identity in products:
            shares[storage.born] = shares.get(storage.born, 1) * (1.5 if storage.identity in others else 0.5)
    return shares


def _cast(spec: TensorSpec) -> list[Work]:
    """Return the kernels that cast an operand of a product to 8 bits.

    One reads it for the largest absolute value, which its scale follows from; another reads it again, and writes a byte
    for each element.
    """
    return [
        Work("amax", "reduction", spec.dtype, (1, spec.numel), 0, spec.nbytes),
        Work("cast", "elementwise", spec.dtype, (spec.numel,), 0, spec.nbytes + spec.numel),
    ]


def _added(work: Work, dtype: torch.dtype) -> Work:
    """Return a product that adds its result to a sum of a dtype, instead of writing it."""
    elements = prod(work.sizes[:3])
    return work._replace(nbytes=work.nbytes + elements * (2 * dtype.itemsize - work.dtype.itemsize), is_added=True)


def _collectives(
    observed: Observed, part_names: Sequence[str], marks: Sequence[int], context: int, *, sends_round: bool
) -> tuple[defaultdict[str, list[MicrobatchCollective]], dict[int, int]]:
    """Return the collectives of each part, and of the operators that are or need one its position there."""
    collectives: defaultdict[str, list[MicrobatchCollective]] = defaultdict(list)
    positions: dict[int, int] = {}
    for index, (operator, part_name, mark) in enumerate(zip(observed.operators, part_names, marks, strict=True)):
        call, fqn = operator.run.call, "" if operator.row is None else operator.row[0]
        collective = collective_of(call, operator.phase)
        if collective is not None:
            is_cut = fqn in observed.cut_once
            part_name = BEFORE if is_cut else part_name  # noqa: PLW2901
            operation, group, _, nbytes = collective
            group = observed.groups.get(group, group)
            copies = observed.choices.get(fqn, 1) if operation == "all_to_all" else 1
            is_repeated = not mark & _LAST
            if not is_cut:
                positions[index] = len(collectives[part_name])
            collectives[part_name].append(
                MicrobatchCollective(operation, operator.phase, nbytes, group, copies, is_repeated)
            )
        elif context > 1 and "scaled_dot_product" in call.name:
            keys = _keys(call)
            whole = context * sum(spec.nbytes for spec in keys)
            positions[index] = len(collectives[part_name])
            collectives[part_name].append(MicrobatchCollective("all_gather", operator.phase, whole, "context"))
            if operator.phase == "backward" and sends_round:  # sums of gradients in float32, once to each rank
                sums = sum(4 * prod(spec.shape) for spec in keys)
                collectives[part_name] += [MicrobatchCollective("all_to_all", "backward", sums, "context")] * context
            elif operator.phase == "backward":
                collectives[part_name].append(MicrobatchCollective("reduce_scatter", "backward", whole, "context"))
    return collectives, positions


def _keys(call: OperatorCall) -> Sequence[TensorSpec]:
    """Return the keys and values that an attention takes."""
    tensors = [spec for spec in call.tensors if len(spec.shape) >= 3]
    first = 2 if "backward" in call.name else 1
    return tensors[first : first + 2]


def _sums(nbytes: Iterable[tuple[str, int]]) -> Counter[str]:
    """Return the sum of the bytes of each part."""
    sums: Counter[str] = Counter()
    for part_name, value in nbytes:
        sums[part_name] += value
    return sums


def _of_caches(observed: Observed, part_names: Sequence[str], blocks: Collection[str]) -> list[Storage]:
    """Return the storages of blocks that outlive the step and are not read behind the block, as its result is.

    Equal blocks run once, so each of them makes as many.
    """
    of_blocks = {storage.identity: storage for storage in observed.outliving if part_names[storage.born] in blocks}
    for operator, part_name in zip(observed.operators, part_names, strict=True):
        if operator.phase == "forward":
            for identity in of_blocks.keys() & set(operator.run.reads):
                if part_names[of_blocks[identity].born] != part_name:
                    del of_blocks[identity]
    return list(of_blocks.values())


def _temporary(
    timeline: Sequence[TimelinePoint],
    part_names: Sequence[str],
    caches: Sequence[Storage],
    *,
    adds_in_products: bool,
) -> tuple[Counter[str], Counter[str]]:
    """Return the bytes of each part that are alive for a moment, in addition to what is kept as its backward begins.

    A gradient of a weight is there until it is added to its sum, unless the product that computes it adds. In the first
    micro-batch, for which the second result is, it stays as the sum.

    Args:
        timeline: bytes alive at each operator.
        part_names: part that each operator belongs to.
        caches: what outlives the step, which is kept beside what autograd saves.
        adds_in_products: products add gradients of weights to their sums.
    """
    of_kept, of_moment, of_grads = map(CATEGORIES.index, ("activations", "temporary", "grads"))
    kept: Counter[str] = Counter()
    most: Counter[str] = Counter()
    first: Counter[str] = Counter()
    before: dict[str, int] = {}  # gradients as the backward of a part begins
    summed = 0
    for index, (point, part_name) in enumerate(zip(timeline, part_names, strict=False)):
        in_caches = sum(storage.nbytes for storage in caches if storage.born <= index and not storage.is_saved)
        gradient = 0 if adds_in_products else max(point.held[of_grads] - summed, 0)
        if point.phase == "backward":
            before.setdefault(part_name, summed)
            kept[part_name] = max(kept[part_name], point.held[of_kept])
        summed = point.held[of_grads]
        alive = point.held[of_kept] + point.held[of_moment] - in_caches
        most[part_name] = max(most[part_name], alive + gradient)
        first[part_name] = max(first[part_name], alive + summed - before.get(part_name, summed))
    return most - kept, first - kept

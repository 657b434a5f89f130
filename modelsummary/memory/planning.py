"""The memory plan: which blocks run again in the backward, and which of their results they keep, for a budget.

A block that runs under a checkpoint keeps what goes into it, and runs its operators again in the backward, except those
whose results it keeps. What each costs, saves and needs while it runs is read off observed steps: one without
checkpoints, and one for each distinct block, with a checkpoint around it. A choice is exact for these figures, from
which the peak of any plan follows; a plan is simulated before it is returned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from modelsummary.capture.live import LiveModel
from modelsummary.capture.observe import check_initialized, observed
from modelsummary.capture.step_plan import StepPlan
from modelsummary.capture.trace import Trace
from modelsummary.devices.device_spec import DeviceSpec
from modelsummary.devices.target import Target, names_own_device, seconds_of_calls, target_of
from modelsummary.equality import kinds_of
from modelsummary.errors import InputError, StepError
from modelsummary.layer_info import LayerInfo
from modelsummary.memory.checkpointing import CheckpointPlan, MemoryCurve, block_of, blocks_of, bytes_by_block
from modelsummary.memory.estimate import MemoryEstimate
from modelsummary.memory.kept_inputs import BlockInput, inputs_of, kept_only_by_checkpoint
from modelsummary.memory.kept_results import DETACH, KeptGroup, RecomputedBlock
from modelsummary.memory.least_cost import Option, least_cost, least_peak, peak_of, undominated_options
from modelsummary.memory.predict import memory_of
from modelsummary.memory.step_options import StepOptions, step_plan
from modelsummary.memory.timeline import libraries_of, recomputed_calls, recomputed_operators, workspaces_on
from modelsummary.operators.operator_calls import OperatorCall
from modelsummary.progress import counted
from modelsummary.subject import subject_of
from modelsummary.units import parse_bytes

__all__ = ["GRANULARITIES", "memory_curve", "memory_plan"]

GRANULARITIES = ("operator", "block")
_INTERVALS, _HALVINGS = 64, 4  # of the range of peaks; of an interval
_MOST_OPTIONS = 64  # of a block; they are spread evenly over their costs
_NANOSECONDS = 1e9
_LEAVE = Option(0, 0)
_WRITTEN_LATER = "would compute something else, as what it reads is written in place later"


def memory_plan(
    live: LiveModel,
    root: LayerInfo,
    budget_bytes: int | str,
    granularity: str,
    by: str | None,
    options: StepOptions,
) -> CheckpointPlan:
    """Return the plan with the least recomputation whose simulated peak is at most ``budget_bytes``.

    Args:
        live, root: the model and its tree.
        budget_bytes, granularity, by, options: as for ``Statistics.memory_plan``.

    Raises:
        InputError: an argument is unusable, or recomputing all blocks does not suffice.
    """
    budget_bytes = parse_bytes(budget_bytes, "budget_bytes")
    with counted("checkpoint plan", "estimate") as done:
        return _planner(live, root, granularity, by, options, done).plan(budget_bytes)


def memory_curve(
    live: LiveModel, root: LayerInfo, points: int, granularity: str, by: str | None, options: StepOptions
) -> MemoryCurve:
    """Return plans from the peak without checkpoints down to the least one, of which none beats another.

    Args:
        live, root: the model and its tree.
        points, granularity, by, options: as for ``Statistics.memory_curve``.

    Raises:
        InputError: an argument is unusable.
    """
    if type(points) is not int or points < 2:
        raise InputError(f"points must be an integer >= 2, got {points!r:.80}")
    with counted("memory curve", "estimate") as done:
        return MemoryCurve(_planner(live, root, granularity, by, options, done).curve(points))


def _planner(
    live: LiveModel,
    root: LayerInfo,
    granularity: str,
    by: str | None,
    options: StepOptions,
    done: Callable[[], object],
) -> Planner:
    check_initialized(live)
    if options.get("checkpoint"):
        raise InputError("a memory plan chooses the modules to recompute; leave out checkpoint=")
    if granularity not in GRANULARITIES:
        raise InputError(f"granularity must be 'operator' or 'block', got {granularity!r:.80}")
    device = options.get("device")
    target = _target(device, by)
    if not names_own_device(device):
        options = {**options, "device": "cuda"}
    return Planner(live, root, step_plan("train", options, root), target, granularity, done)


def _target(device: DeviceSpec | torch.device | str | None, by: str | None) -> Target | None:
    """Return the device whose seconds count; None if multiply-adds count instead."""
    if by not in (None, "macs", "latency"):
        raise InputError(f"by must be 'latency', predicted for the device, or 'macs', got {by!r:.80}")
    if by == "macs" or (by is None and names_own_device(device)):
        return None
    return target_of(device)


Kept = dict[str, tuple[str, ...]]  # block -> names of the results that it keeps
_Candidate = tuple[Option, list[KeptGroup]]  # what a block costs and saves if it keeps these results


class _Way(NamedTuple):
    """One of the ways in which a block may run.

    Attributes:
        option: its cost, its saving, and how much higher the peak of the block is than without a checkpoint, as if what
            goes into it were kept anyway.
        macs: multiply-adds that run again.
        kept: names of the results that are kept; None: it runs without a checkpoint.
        libraries: of matrix products, which get a workspace in the backward as it runs them again.
    """

    option: Option
    macs: int
    kept: tuple[str, ...] | None
    libraries: frozenset[str] = frozenset()


_PLAIN = _Way(_LEAVE, 0, None)


@dataclass(frozen=True)
class _Choices:
    """The ways in which a block may run.

    Attributes:
        ways: the first is to run without a checkpoint.
        inputs: what a checkpoint keeps of what goes into it.
        obstacle: why it must not run again, as the end of a sentence about the block; empty if it may.
        futility: why running it again would free nothing, likewise.
        can_run_whole: it computes the same outputs and gradients if all of its operators run again.
    """

    ways: list[_Way]
    inputs: Sequence[BlockInput] = ()
    obstacle: str = ""
    futility: str = ""
    can_run_whole: bool = False


class Planner:
    """The plans of one step.

    Args:
        live, root: the model and its tree.
        step: the step without checkpoints.
        target: the device whose seconds count; None: multiply-adds count.
        granularity: ``"operator"``: blocks may keep results; ``"block"``: they run again as a whole.
        done: called after each simulated step.
    """

    def __init__(
        self,
        live: LiveModel,
        root: LayerInfo,
        step: StepPlan,
        target: Target | None,
        granularity: str,
        done: Callable[[], object],
    ) -> None:
        self._live, self._step, self._target, self._done = live, step, target, done
        self._cost_of = _macs_of if target is None else _nanoseconds_on(target)
        self._simulated: dict[tuple[tuple[str, tuple[str, ...]], ...], CheckpointPlan] = {}
        self._trace, plain = self._simulate(step, {})
        self._plain = replace(plain, subject=subject_of(root, step.dtype, step.autocast))
        self._products = workspaces_on(torch.device(self._trace.device)).products if step.workspaces else {}
        self._libraries = _libraries_of(run.call for run, phase, _ in self._trace.operators if phase == "backward")
        self._has_checkpoints = bool(recomputed_operators(self._trace))  # the model has some itself
        called = {call.key for call in self._trace.calls}  # the step may call other modules than the tree's forward
        blocks = [row for row in blocks_of(root) if row.key in called]
        kinds, runs = kinds_of(root), _operators_of(self._trace, [row.fqn for row in blocks])
        inside, self._between = bytes_by_block(self._plain, [row.fqn for row in blocks])
        distinct: dict[Hashable, _Choices] = {}
        self._blocks: dict[str, _Choices] = {}
        self._options: list[list[Option]] = []
        self._inputs: list[dict[int, int]] = []  # what the checkpoint of each block alone keeps: storage -> bytes
        for row, operators, peak in zip(blocks, runs, inside, strict=True):
            kind = kinds[id(row)], operators
            if kind not in distinct:
                distinct[kind] = self._choices_of(row.fqn, peak, whole=granularity == "block")
            self._blocks[row.fqn] = distinct[kind]
            self._inputs.append(kept_only_by_checkpoint(self._trace, row.fqn, distinct[kind].inputs))
            nbytes = sum(self._inputs[-1].values())
            options = (way.option for way in distinct[kind].ways[1:])
            with_inputs = (Option(cost, saving - nbytes, peak + more + nbytes) for cost, saving, more in options)
            self._options.append([Option(0, 0, peak), *with_inputs])
        # A choice is made as if all libraries had their workspaces.
        self._reserved = self._workspace(way for block in self._blocks.values() for way in block.ways)

    # ------------------------------------------------------------------------------------------- simulated steps

    def _simulate(self, step: StepPlan, kept: Kept) -> tuple[Trace, MemoryEstimate]:
        step = replace(step, checkpoint=tuple(kept.items()))
        trace = observed(self._live, step, storages=True)
        self._done()
        return trace, memory_of(trace, step)[0]

    def _plan_of(self, kept: Kept) -> CheckpointPlan:
        """Return the plan of these blocks, with the peak and the recomputation of its simulated step."""
        key = tuple(kept.items())
        if key not in self._simulated:
            trace, estimate = self._simulate(self._step, kept)
            cost = self._cost(recomputed_calls(trace))
            self._simulated[key] = self._plan(kept, estimate.peak, estimate.recomputed_macs, cost)
        return self._simulated[key]

    def _plan(self, kept: Kept, peak: int, macs: int, cost: int) -> CheckpointPlan:
        return CheckpointPlan(
            tuple(kept),
            peak,
            self._plain.peak,
            macs,
            {fqn: names for fqn, names in kept.items() if names},
            None if self._target is None else cost / _NANOSECONDS,
            None if self._target is None else self._target.name,
            self._plain.case,
        )

    def _workspace(self, ways: Iterable[_Way]) -> int:
        """Return the bytes of workspaces that the backward has for what runs again alone."""
        return sum(self._products.get(library, 0) for library in {name for way in ways for name in way.libraries})

    def _cost(self, calls: list[OperatorCall]) -> int:
        return sum(map(self._cost_of, calls))

    # ---------------------------------------------------------------------------------------------- ways of a block

    def _choices_of(self, fqn: str, peak: int, *, whole: bool) -> _Choices:
        """Return the ways in which a block may run: without a checkpoint, and with one that keeps some of its results.

        Args:
            fqn: name of the block.
            peak: the most bytes alive while it runs in the step without checkpoints.
            whole: it keeps no results.
        """
        step = replace(self._step, make_optimizer=None)  # the state of the optimizer is there while the block runs
        try:
            trace, estimate = self._simulate(step, {fqn: ()})
        except StepError as error:  # such as one whose input is written in place
            return _Choices([_PLAIN], obstacle=f"does not run under a checkpoint: {error}")
        again = [index for index in recomputed_operators(trace) if trace.operators[index].run.call.func is not DETACH]
        region = RecomputedBlock.of(trace, fqn, again, estimate.timeline)
        if region is None:
            return _Choices([_PLAIN], obstacle=_WRITTEN_LATER)
        if not (whole or region.can_keep):
            obstacle = "changes the model, such as statistics of batch norm, or communicates, and would do so twice"
            return _Choices([_PLAIN], obstacle=obstacle, can_run_whole=True)
        calls = [trace.operators[index].run.call for index in again]
        inputs = inputs_of(self._trace, trace, fqn)
        nbytes = sum(kept_only_by_checkpoint(self._trace, fqn, inputs).values())
        state = self._plain.optimizer_state - estimate.optimizer_state
        cost, saving = self._cost(calls), self._plain.held_after_forward - estimate.held_after_forward - state + nbytes
        candidates = [(Option(cost, saving), [])] if whole else _best(self._candidates(region, cost, saving))
        workspace = self._workspace([_Way(_LEAVE, 0, (), _libraries_of(calls) - self._libraries)])
        ways = []
        for option, groups in candidates:
            again_calls = _without(calls, [call for group in groups for call in group.calls])
            ways.append(
                _Way(
                    option._replace(peak=region.peak_keeping(groups) + state - nbytes - peak - workspace),
                    sum(map(_macs_of, again_calls)),
                    tuple(name for group in groups for name in group.names),
                    _libraries_of(again_calls) - self._libraries,
                )
            )
        if ways:
            futility = ""
        elif region.has_backward:
            futility = "keeps nothing for the backward that a checkpoint would free"
        else:
            futility = "has no backward, as neither its parameters nor its input need a gradient"
        return _Choices([_PLAIN, *ways], inputs, futility=futility, can_run_whole=True)

    def _candidates(self, region: RecomputedBlock, cost: int, saving: int) -> list[_Candidate]:
        """Return sets of results that a block may keep, each with what it then costs and saves.

        Args:
            region: what runs again.
            cost, saving: of the block if it keeps nothing.
        """
        candidates = []
        for groups in region.kept_at_least():
            free = [group for group in region.free if group not in groups]
            items = [[_LEAVE, Option(self._cost(group.calls), group.nbytes)] for group in free]
            all_kept = [*groups, *free]
            cost_kept = cost - sum(self._cost(group.calls) for group in all_kept)
            saving_kept = saving - sum(group.nbytes for group in all_kept)
            for option, choice in undominated_options(items):
                again_too = {id(group) for group, is_again in zip(free, choice, strict=True) if is_again}
                total = Option(cost_kept + option.cost, saving_kept + option.saving)
                candidates.append((total, [group for group in all_kept if id(group) not in again_too]))
        return candidates

    # ----------------------------------------------------------------------------------------------------- plans

    def plan(self, budget_bytes: int) -> CheckpointPlan:
        """Return the cheapest of the simulated plans whose peak is at most the budget.

        The cheapest plan whose predicted peak fits is simulated, and returned if the simulated peak is not far lower
        and fits, too. Otherwise, targets for the predicted peak are tried one after the other, from just above the
        budget down, until a simulated peak fits. The interval before this target is then halved. If no target fits,
        the plan that saves most is tried.

        Raises:
            InputError: no plan suffices.
        """
        most, least = self._plain.peak, self._least_peak()
        if most <= budget_bytes:
            return self._plan_of({})
        width = max((most - least) // _INTERVALS, 1)
        if least <= budget_bytes:
            choice = self._chosen_for(budget_bytes)
            best = self._plan_of(self._kept(choice))
            if self._predicted(choice).peak - width // 2**_HALVINGS <= best.peak <= budget_bytes:
                return best
        targets = [*range(most, least, -width), least]
        for index in range(min((most - budget_bytes) // width, len(targets) - 1), len(targets)):
            if self._plan_of(self._kept(self._chosen_for(targets[index]))).peak <= budget_bytes:
                self._try_between(targets[index], targets[max(index - 1, 0)], budget_bytes)
                break
        else:
            ways = {fqn: max(block.ways, key=lambda way: way.option.saving) for fqn, block in self._blocks.items()}
            best = self._plan_of({fqn: way.kept for fqn, way in ways.items() if way.kept is not None})
            if best.peak > budget_bytes:
                raise InputError(self._refusal(budget_bytes, best))
        fitting = [plan for plan in self._simulated.values() if plan.peak <= budget_bytes]
        return min(fitting, key=lambda plan: (plan.cost, plan.peak))

    def _refusal(self, budget_bytes: int, best: CheckpointPlan) -> str:
        """Return the message for a budget that the plan with the least peak exceeds."""
        if not self._blocks:
            text = f"budget_bytes={budget_bytes:,} is too little: a step takes {best.peak:,} bytes, and the model has "
            return f"{text}no module that could run again; pass a larger budget or a smaller batch"
        count = len(best.fqns)
        blocks = f"all {count}" if count == len(self._blocks) else f"{count} of {len(self._blocks)}"
        text = f"budget_bytes={budget_bytes:,} is too little: with {blocks} blocks recomputed a step takes "
        text += f"{best.peak:,} bytes"
        if self._has_checkpoints:
            text += ", as the model has checkpoints of its own"
        else:
            obstacles = [(fqn, block.obstacle) for fqn, block in self._blocks.items() if block.obstacle]
            others = [(fqn, block.futility) for fqn, block in self._blocks.items() if block.futility]
            link = ", as" if obstacles or not best.fqns else ";"  # what would free nothing does not take the bytes
            text += next((f"{link} {fqn!r} {reason}" for fqn, reason in obstacles or others), "")
        whole: Kept = {fqn: () for fqn, block in self._blocks.items() if block.can_run_whole}
        peak = self._simulate(self._step, whole)[1].peak  # not one of the plans, as effects run twice
        if peak < best.peak:
            twice = "what changes the model, as batch norm does, runs twice"
            text += f"; granularity='block' takes {peak:,} bytes, but {twice}"
        return f"{text}; pass a larger budget or a smaller batch"

    def _try_between(self, low: int, high: int, budget_bytes: int) -> None:
        """Simulate plans of targets between one whose plan fits and one whose plan does not."""
        for _ in range(_HALVINGS):
            middle = (low + high) // 2
            fits = self._plan_of(self._kept(self._chosen_for(middle))).peak <= budget_bytes
            low, high = (middle, high) if fits else (low, middle)

    def curve(self, points: int) -> list[CheckpointPlan]:
        """Return the plans of so many targets, evenly from the peak without checkpoints to the least one.

        Plans that another one beats in both peak and cost are left out. The middle and the last plan are simulated; if
        the simulated figures differ from the predicted ones, all plans are.
        """
        low, high = self._least_peak(), self._plain.peak
        targets = [high - (high - low) * number // (points - 1) for number in range(points)]
        choices = [[0] * len(self._blocks) if target == high else self._chosen_for(target) for target in targets]
        best = _undominated(map(self._predicted, choices))
        checked = best[len(best) // 2], best[-1]
        if any(self._plan_of(plan.checkpoint) != plan for plan in checked):
            best = _undominated(self._plan_of(self._kept(choice)) for choice in choices)
        return best

    def _least_peak(self) -> int:
        return least_peak(self._options, self._between) + self._reserved

    def _chosen_for(self, budget: int) -> list[int]:
        """Return the number of the way in which each block runs, for the least cost at a predicted peak."""
        choice = least_cost(self._options, self._between, budget - self._reserved)
        assert choice is not None
        return choice

    def _chosen_ways(self, choice: list[int]) -> dict[str, _Way]:
        return {fqn: block.ways[number] for (fqn, block), number in zip(self._blocks.items(), choice, strict=True)}

    def _kept(self, choice: list[int]) -> Kept:
        """Return the blocks of a choice that run again, and what they keep."""
        return {fqn: way.kept for fqn, way in self._chosen_ways(choice).items() if way.kept is not None}

    def _predicted(self, choice: list[int]) -> CheckpointPlan:
        """Return the plan of a choice, with figures that follow from the figures of its blocks."""
        ways = self._chosen_ways(choice).values()
        options: list[Option] = []
        kept_before: set[int] = set()
        for block, number, inputs in zip(self._options, choice, self._inputs, strict=True):
            option = block[number]
            if number:  # blocks may keep the same input, such as a mask
                twice = sum(nbytes for storage, nbytes in inputs.items() if storage in kept_before)
                option = Option(option.cost, option.saving + twice, option.peak - twice)
                kept_before.update(inputs)
            options.append(option)
        macs = self._plain.recomputed_macs + sum(way.macs for way in ways)
        peak = peak_of(options, self._between) + self._workspace(ways)
        return self._plan(self._kept(choice), peak, macs, sum(option.cost for option in options))


def _without(calls: Iterable[OperatorCall], others: Iterable[OperatorCall]) -> list[OperatorCall]:
    """Return calls without others, each left out as often as it is among them: equal runs share a call."""
    counts = Counter(map(id, others))
    rest = []
    for call in calls:
        if counts[id(call)]:
            counts[id(call)] -= 1
        else:
            rest.append(call)
    return rest


def _libraries_of(calls: Iterable[OperatorCall]) -> frozenset[str]:
    return frozenset(library for call in calls for library in libraries_of(call))


def _macs_of(call: OperatorCall) -> int:
    return call.cost.macs


def _nanoseconds_on(target: Target) -> Callable[[OperatorCall], int]:
    seconds_of = seconds_of_calls(target)
    return lambda call: round(_NANOSECONDS * seconds_of(call))


def _operators_of(trace: Trace, fqns: Sequence[str]) -> list[Hashable]:
    """Return the operators of each block, forward and backward: equal blocks may differ in what needs a gradient."""
    numbers = {fqn: number for number, fqn in enumerate(fqns)}
    operators: list[list[Any]] = [[] for _ in fqns]
    for run, phase, row in trace.operators:
        number = block_of(None if row is None else row[0], numbers)
        if number is not None:
            operators[number].append((phase, run.call.func))
    return list(map(tuple, operators))


def _best(candidates: list[_Candidate]) -> list[_Candidate]:
    """Return the candidates that save something and that no other one beats, at most so many; the first keeps most."""
    better: list[_Candidate] = []
    for option, groups in sorted(candidates, key=lambda candidate: (candidate[0].cost, -candidate[0].saving)):
        if option.saving > (better[-1][0].saving if better else 0):
            better.append((option, groups))
    if len(better) > _MOST_OPTIONS:
        step = (len(better) - 1) / (_MOST_OPTIONS - 1)
        better = [better[round(step * number)] for number in range(_MOST_OPTIONS)]
    return better


def _undominated(plans: Iterable[CheckpointPlan]) -> list[CheckpointPlan]:
    """Return the plans that no other one beats in both peak and cost, by cost."""
    best: list[CheckpointPlan] = []
    for plan in sorted(plans, key=lambda plan: (plan.cost, plan.peak)):
        if not best or plan.peak < best[-1].peak:
            best.append(plan)
    return best

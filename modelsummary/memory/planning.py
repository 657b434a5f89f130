"""The memory plan: which blocks run again in the backward, and which of their results they keep, for a budget.

A block that runs under a checkpoint keeps what goes into it, and runs its operators again in the backward, except those
whose results it keeps. What each costs and saves is read off observed steps: one without checkpoints, and one for each
distinct block, with a checkpoint around it. A choice is exact for these figures; the peak of each plan is simulated
before it is returned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

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
from modelsummary.memory.checkpointing import CheckpointPlan, MemoryCurve, blocks_of, bytes_by_block
from modelsummary.memory.estimate import MemoryEstimate
from modelsummary.memory.kept_results import DETACH, RecomputedBlock
from modelsummary.memory.least_cost import Option, least_cost, undominated_options
from modelsummary.memory.predict import memory_of
from modelsummary.memory.step_options import StepOptions, step_plan
from modelsummary.memory.timeline import recomputed_calls
from modelsummary.operators.operator_calls import OperatorCall
from modelsummary.progress import counted
from modelsummary.units import parse_bytes

__all__ = ["GRANULARITIES", "memory_curve", "memory_plan"]

GRANULARITIES = ("operator", "block")
_INTERVALS, _HALVINGS = 64, 4  # of the range of peaks; of an interval
_MOST_OPTIONS = 32  # of a block; they are spread evenly over their costs
_NANOSECONDS = 1e9
_LEAVE = Option(0, 0)


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


@dataclass(frozen=True)
class _Choices:
    """The options of a block.

    Attributes:
        options: the first is to run without a checkpoint.
        kept: names of the results that each other option keeps.
        obstacle: why it has only this option, as the end of a sentence about the block.
        can_run_whole: it computes the same outputs and gradients if all of its operators run again.
    """

    options: list[Option]
    kept: list[tuple[str, ...]]
    obstacle: str = ""
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
        trace, self._plain = self._simulate({})
        self._has_checkpoints = bool(recomputed_calls(trace))  # the model has some itself
        kinds = kinds_of(root)
        distinct: dict[int, _Choices] = {}
        self._blocks: dict[str, _Choices] = {}
        for row in blocks_of(root):
            kind = kinds[id(row)]
            if kind not in distinct:
                distinct[kind] = self._choices_of(row.fqn, whole=granularity == "block")
            self._blocks[row.fqn] = distinct[kind]
        self._peaks = bytes_by_block(self._plain, list(self._blocks))

    # ------------------------------------------------------------------------------------------- simulated steps

    def _simulate(self, kept: Kept) -> tuple[Trace, MemoryEstimate]:
        step = replace(self._step, checkpoint=tuple(kept.items()))
        trace = observed(self._live, step, storages=True)
        self._done()
        return trace, memory_of(trace, step)[0]

    def _plan_of(self, kept: Kept) -> CheckpointPlan:
        """Return the plan of these blocks, with the peak and the recomputation of its simulated step."""
        key = tuple(kept.items())
        if key not in self._simulated:
            trace, estimate = self._simulate(kept)
            seconds = None if self._target is None else self._cost(recomputed_calls(trace)) / _NANOSECONDS
            self._simulated[key] = CheckpointPlan(
                tuple(kept),
                estimate.peak,
                self._plain.peak,
                estimate.recomputed_macs,
                {fqn: names for fqn, names in kept.items() if names},
                seconds,
                None if self._target is None else self._target.name,
            )
        return self._simulated[key]

    def _cost(self, calls: list[OperatorCall]) -> int:
        return sum(map(self._cost_of, calls))

    # --------------------------------------------------------------------------------------------------- options

    def _choices_of(self, fqn: str, *, whole: bool) -> _Choices:
        """Return the options of a block: without a checkpoint, and with one that keeps some of its results."""
        try:
            trace, estimate = self._simulate({fqn: ()})
        except StepError as error:  # such as one whose input is written in place
            return _Choices([_LEAVE], [], f"does not run under a checkpoint: {error}")
        again = [call for call in recomputed_calls(trace) if call.func is not DETACH]
        region = RecomputedBlock.of(trace, fqn, again)
        if region is None:
            return _Choices([_LEAVE], [], "would compute something else, as what it reads is written in place later")
        cost = self._cost(again)
        saving = self._plain.activations - estimate.activations
        if whole:
            return _Choices([_LEAVE, Option(cost, saving)], [()], can_run_whole=True)
        if not region.can_keep:
            obstacle = "changes the model, such as statistics of batch norm, or communicates, and would do so twice"
            return _Choices([_LEAVE], [], obstacle, can_run_whole=True)
        options, kept = [_LEAVE], []
        for groups in region.kept_at_least():
            free = [group for group in region.free if group not in groups]
            items = [[_LEAVE, Option(self._cost(group.calls), group.nbytes)] for group in free]
            all_kept = [*groups, *free]
            cost_kept = cost - sum(self._cost(group.calls) for group in all_kept)
            saving_kept = saving - sum(group.nbytes for group in all_kept)
            for option, choice in undominated_options(items):
                again_too = {id(group) for group, is_again in zip(free, choice, strict=True) if is_again}
                options.append(Option(cost_kept + option.cost, saving_kept + option.saving))
                kept.append(tuple(name for group in all_kept if id(group) not in again_too for name in group.names))
        options, kept = _best(options, kept)
        obstacle = "" if kept else "keeps nothing for the backward that a checkpoint would free"
        return _Choices(options, kept, obstacle, can_run_whole=True)

    # ----------------------------------------------------------------------------------------------------- plans

    def plan(self, budget_bytes: int) -> CheckpointPlan:
        """Return the cheapest plan whose simulated peak is at most the budget.

        Targets for the predicted peak are tried one after the other, from just above the budget down, until a simulated
        peak fits. The interval before this target is then halved. Targets are the same for all budgets, so a larger
        budget stops no later, and never gets a plan that costs more.

        Raises:
            InputError: no plan suffices.
        """
        best = self._plan_of({})
        if best.peak <= budget_bytes:
            return best
        width = max((best.peak - self._least_peak()) // _INTERVALS, 1)
        targets = [*range(best.peak, self._least_peak(), -width), self._least_peak()]
        for index in range(min((best.peak - budget_bytes) // width, len(targets) - 1), len(targets)):
            best = self._plan_of(self._chosen_for(targets[index]))
            if best.peak <= budget_bytes:
                return self._between(targets[index], targets[max(index - 1, 0)], budget_bytes) or best
        best = self._plan_of({fqn: block.kept[-1] for fqn, block in self._blocks.items() if block.kept})
        if best.peak > budget_bytes:
            raise InputError(self._refusal(budget_bytes, best))
        return best

    def _refusal(self, budget_bytes: int, best: CheckpointPlan) -> str:
        """Return the message for a budget that the plan with the least peak exceeds."""
        count = len(best.fqns)
        blocks = f"all {count}" if count == len(self._blocks) else f"{count} of {len(self._blocks)}"
        text = f"budget_bytes={budget_bytes:,} is too little: with {blocks} blocks recomputed a step takes "
        text += f"{best.peak:,} bytes"
        if self._has_checkpoints:
            text += ", as the model has checkpoints of its own"
        else:
            obstacles = ((fqn, block.obstacle) for fqn, block in self._blocks.items() if block.obstacle)
            text += next((f", as {fqn!r} {obstacle}" for fqn, obstacle in obstacles), "")
        whole: Kept = {fqn: () for fqn, block in self._blocks.items() if block.can_run_whole}
        peak = self._plan_of(whole).peak
        if peak < best.peak:
            twice = "what changes the model, as batch norm does, runs twice"
            text += f"; granularity='block' takes {peak:,} bytes, but {twice}"
        return f"{text}; pass a larger budget or a smaller batch"

    def _between(self, low: int, high: int, budget_bytes: int) -> CheckpointPlan | None:
        """Return the plan of the largest target between two whose simulated peak fits; None if none does."""
        best = None
        for _ in range(_HALVINGS):
            middle = (low + high) // 2
            plan = self._plan_of(self._chosen_for(middle))
            if plan.peak <= budget_bytes:
                best, low = plan, middle
            else:
                high = middle
        return best

    def curve(self, points: int) -> list[CheckpointPlan]:
        """Return the plans of so many targets, evenly from the peak without checkpoints to the least one.

        Plans that another one beats in both peak and cost are left out.
        """
        low, high = self._least_peak(), self._plan_of({}).peak
        targets = [high - (high - low) * number // (points - 1) for number in range(points)]
        plans = [self._plan_of({} if target == high else self._chosen_for(target)) for target in targets]
        best: list[CheckpointPlan] = []
        for plan in sorted(plans, key=lambda plan: (plan.cost, plan.peak)):
            if not best or plan.peak < best[-1].peak:
                best.append(plan)
        return best

    def _least_peak(self) -> int:
        """Return the least peak that any choice is predicted to have."""
        saved, peaks = 0, [self._peaks[0]]
        for block, peak in zip(self._blocks.values(), self._peaks[1:], strict=True):
            saved += max(option.saving for option in block.options)
            peaks.append(peak - saved)
        return max(peaks)

    def _chosen_for(self, peak: int) -> Kept:
        """Return the blocks that run again, and what they keep, for the least cost at a predicted peak."""
        choice = least_cost([block.options for block in self._blocks.values()], [most - peak for most in self._peaks])
        assert choice is not None
        chosen = zip(self._blocks.items(), choice, strict=True)
        return {fqn: block.kept[number - 1] for (fqn, block), number in chosen if number}


def _macs_of(call: OperatorCall) -> int:
    return call.cost.macs


def _nanoseconds_on(target: Target) -> Callable[[OperatorCall], int]:
    seconds_of = seconds_of_calls(target)
    return lambda call: round(_NANOSECONDS * seconds_of(call))


def _best(options: list[Option], kept: list[tuple[str, ...]]) -> tuple[list[Option], list[tuple[str, ...]]]:
    """Return the options that no other one beats, at most so many, with what they keep; the first keeps all."""
    order = sorted(range(1, len(options)), key=lambda index: (options[index].cost, -options[index].saving))
    better: list[int] = []
    for index in order:
        if options[index].saving > (options[better[-1]].saving if better else 0):
            better.append(index)
    if len(better) > _MOST_OPTIONS:
        step = (len(better) - 1) / (_MOST_OPTIONS - 1)
        better = [better[round(step * number)] for number in range(_MOST_OPTIONS)]
    return [options[0], *(options[index] for index in better)], [kept[index - 1] for index in better]

"""The memory plan: which blocks run again in the backward, which of their results they keep or move, for a budget.

A block that runs under a checkpoint keeps what goes into it, and runs its operators again in the backward, except those
whose results it keeps. What a block keeps, with a checkpoint or without one, may wait on the host. What each costs,
saves and needs while it runs is read off two observed steps: one without checkpoints, and one with a checkpoint around
one block of each kind. A choice is exact for these figures, from which the peak of any plan follows; a plan is
simulated before it is returned.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeVar

import torch

from modelsummary.capture.live import LiveModel
from modelsummary.capture.observe import CUDA_BLOCK, check_initialized, observed
from modelsummary.capture.step_plan import StepPlan
from modelsummary.capture.trace import Trace
from modelsummary.devices.device_spec import DeviceSpec
from modelsummary.devices.target import Target, names_own_device, seconds_of_calls, target_of
from modelsummary.equality import kinds_of
from modelsummary.errors import InputError, StepError, is_number
from modelsummary.layer_info import LayerInfo
from modelsummary.memory.block_reruns import DETACH, BlockInput, BlockRerun, kept_only_by_checkpoint, reruns_of
from modelsummary.memory.checkpointing import CheckpointPlan, MemoryCurve, blocks_of, bytes_by_block, in_blocks
from modelsummary.memory.estimate import MemoryEstimate
from modelsummary.memory.kept_results import KeptGroup, RecomputedBlock
from modelsummary.memory.least_cost import Option, least_cost, least_peak, peak_of, undominated_options
from modelsummary.memory.moving import LEAST_MOVED, BlockTimes, Movable, host_cost_on, movable_in, times_of
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
_SHARES = (1, 2, 4, 10**18)  # parts of what a block could move that it may move
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
        step, target, link = _checked(live, root, granularity, by, options)
        plain = _plain_step(live, root, step, done)
        if plain[1].peak <= budget_bytes:  # how blocks may run is not asked
            return _plan_without_checkpoints(plain[1], target)
        return Planner(live, root, step, target, granularity, done, link, plain=plain).plan(budget_bytes)


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
        step, target, link = _checked(live, root, granularity, by, options)
        return MemoryCurve(Planner(live, root, step, target, granularity, done, link).curve(points))


def _checked(
    live: LiveModel, root: LayerInfo, granularity: str, by: str | None, options: StepOptions
) -> tuple[StepPlan, Target | None, float | None]:
    """Return the step without checkpoints, the device whose seconds count, and the link to the host, for a planner."""
    check_initialized(live)
    if options.get("checkpoint"):
        raise InputError("a memory plan chooses the modules to recompute; leave out checkpoint=")
    if granularity not in GRANULARITIES:
        raise InputError(f"granularity must be 'operator' or 'block', got {granularity!r:.80}")
    device = options.get("device")
    target = _target(device, by)
    link = _link(options.get("offload"), device, target)
    options = {**options, "offload": None}
    return step_plan("train", options, root), target, link


def _plain_step(
    live: LiveModel, root: LayerInfo, step: StepPlan, done: Callable[[], object]
) -> tuple[Trace, MemoryEstimate]:
    """Return the trace and the memory of a step as it is."""
    trace = observed(live, step, storages=True)
    done()
    return trace, replace(memory_of(trace, step), subject=subject_of(root, step.dtype, step.autocast))


def _plan_without_checkpoints(plain: MemoryEstimate, target: Target | None) -> CheckpointPlan:
    """Return the plan in which no block runs again."""
    seconds, device = (None, None) if target is None else (0.0, target.name)
    return CheckpointPlan((), plain.peak, plain.peak, plain.recomputed_macs, {}, seconds, device, plain.step, {}, 0)


def _target(device: DeviceSpec | torch.device | str | None, by: str | None) -> Target | None:
    """Return the device whose seconds count; None if multiply-adds count instead."""
    if by not in (None, "macs", "latency"):
        raise InputError(f"by must be 'latency', predicted for the device, or 'macs', got {by!r:.80}")
    if by == "macs" or (by is None and names_own_device(device)):
        return None
    return target_of(device)


def _link(offload: Any, device: Any, target: Target | None) -> float | None:
    """Return the bytes per second of the link to the host, in one direction; None if nothing moves there."""
    if offload is None or offload is False:
        return None
    if offload is not True and not (is_number(offload) and offload > 0):
        raise InputError(
            "a memory plan chooses what moves to the host; pass offload=True, or the bytes per second of the link in "
            f"one direction, got {offload!r:.80}"
        )
    if names_own_device(device) if target is None else target.is_cpu:
        raise InputError(
            f"offload= moves tensors from an accelerator to its host, by seconds, but device={device!r:.80}; pass the "
            "name of an accelerator, such as device='A100'"
        )
    if target is None:
        raise InputError("offload= weighs seconds, but by='macs' counts multiply-adds; pass by='latency'")
    if offload is not True:
        return float(offload)
    bandwidth = None if target.model is None else target.model.spec.host_bandwidth
    if bandwidth is None:
        raise InputError(
            f"the link of {target.name} to its host is not known; pass its bytes per second in one direction, such as "
            "offload=25e9"
        )
    return bandwidth


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
        again: cost of what the device runs again.
        moved: the storages that wait on the host.
    """

    option: Option
    macs: int
    kept: tuple[str, ...] | None
    libraries: frozenset[str] = frozenset()
    again: int = 0
    moved: tuple[Movable, ...] = ()

    @property
    def nbytes(self) -> int:
        """The bytes that wait on the host."""
        return sum(storage.nbytes for storage in self.moved)

    def moving(self, moved: Sequence[Movable], cost: int) -> _Way:
        """Return this way with storages that wait on the host, at this cost."""
        saving = self.option.saving + sum(storage.nbytes for storage in moved)
        return self._replace(option=self.option._replace(cost=cost, saving=saving), moved=tuple(moved))


_PLAIN = _Way(_LEAVE, 0, None)
_Priced = TypeVar("_Priced", _Candidate, _Way)  # its first item is an ``Option``


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


class _Chosen(NamedTuple):
    """The ways in which the blocks of a plan run.

    Attributes:
        kept: blocks that run again -> names of the results that they keep.
        moved: blocks -> numbers of the saved tensors that move to the host.
        cost, again: predicted cost, and the part of it that the device has with what runs again.
    """

    kept: Kept
    moved: dict[str, tuple[int, ...]]
    cost: int = 0
    again: int = 0

    @classmethod
    def of(cls, ways: Mapping[str, _Way]) -> _Chosen:
        """Return the ways of the blocks of a plan."""
        return cls(
            {fqn: way.kept for fqn, way in ways.items() if way.kept is not None},
            {fqn: tuple(storage.number for storage in way.moved) for fqn, way in ways.items() if way.moved},
            sum(way.option.cost for way in ways.values()),
            sum(way.again for way in ways.values()),
        )


_NOTHING = _Chosen({}, {})


class Planner:
    """The plans of one step.

    Args:
        live, root: the model and its tree.
        step: the step without checkpoints.
        target: the device whose seconds count; None: multiply-adds count.
        granularity: ``"operator"``: blocks may keep results; ``"block"``: they run again as a whole.
        done: called after each simulated step.
        link: bytes per second of the link to the host, in one direction; None: nothing moves there.
        seconds_of: function from an operator call to its seconds on a rank of a plan, whose collectives may run again;
            None: the target decides, and collectives run once.
        plain: the trace and the memory of the step; None: it is observed.
    """

    def __init__(
        self,
        live: LiveModel,
        root: LayerInfo,
        step: StepPlan,
        target: Target | None,
        granularity: str,
        done: Callable[[], object],
        link: float | None = None,
        seconds_of: Callable[[OperatorCall], float] | None = None,
        plain: tuple[Trace, MemoryEstimate] | None = None,
    ) -> None:
        self._live, self._step, self._target, self._done, self._link = live, step, target, done, link
        self._communicates_again = seconds_of is not None
        if seconds_of is None and target is not None:
            seconds_of = seconds_of_calls(target)
        self._cost_of = _macs_of if seconds_of is None else _nanoseconds_of(seconds_of)
        self._host_cost_of, self._policy = host_cost_on(target, _NANOSECONDS)
        self._trace, self._plain = plain or _plain_step(live, root, step, done)
        self._simulated: dict[Hashable, CheckpointPlan] = {((), ()): _plan_without_checkpoints(self._plain, target)}
        self._plain_again = self._cost(recomputed_calls(self._trace))
        self._products = workspaces_on(torch.device(self._trace.device)).products if step.workspaces else {}
        self._libraries = _libraries_of(run.call for run, phase, _ in self._trace.operators if phase == "backward")
        self._has_checkpoints = bool(recomputed_operators(self._trace))  # the model has some itself
        called = {call.key for call in self._trace.calls}  # the step may call other modules than the tree's forward
        blocks = [row for row in blocks_of(root) if row.key in called]
        fqns = [row.fqn for row in blocks]
        kinds = kinds_of(root)
        # forward and backward: equal blocks may differ in what needs a gradient
        runs = [
            tuple((phase, run.call.func) for run, phase, _ in operators)
            for operators in in_blocks(self._trace.operators, fqns)
        ]
        inside, self._between = bytes_by_block(self._plain, fqns)
        times = times_of(self._trace, fqns, self._cost_of, self._host_cost_of)
        can_move = link is not None and not self._has_checkpoints
        movable = movable_in(self._trace, fqns) if can_move else [[] for _ in fqns]
        keys = [
            (kinds[id(row)], operators, tuple((storage.number, storage.nbytes) for storage in storages))
            for row, operators, storages in zip(blocks, runs, movable, strict=True)
        ]
        first = dict(reversed([*zip(keys, range(len(blocks)), strict=True)]))  # of each kind
        running = [fqns[number] for number in sorted(first.values()) if runs[number] != ()]
        # what may move depends on what other checkpoints keep
        groups = [[fqn] for fqn in running] if can_move else [running]
        reruns = {fqn: rerun for group in groups for fqn, rerun in self._reruns(group).items()}
        distinct: dict[Hashable, _Choices] = {}
        for key, number in first.items():
            fqn, peak, spent = fqns[number], inside[number], times[number]
            choices = _Choices([_PLAIN], futility="runs no operators")  # as a block that passes on what it takes
            if fqn in reruns:
                choices = self._choices_of(fqn, reruns[fqn], peak, spent, whole=granularity == "block", moves=can_move)
            ways = [*choices.ways, *self._moving_ways(fqn, peak, spent, movable[number])]
            distinct[key] = replace(choices, ways=sorted(ways, key=attrgetter("nbytes")))
        self._blocks = {fqn: distinct[key] for fqn, key in zip(fqns, keys, strict=True)}
        self._peaks = inside
        # what the checkpoint of each block alone keeps: storage -> bytes
        self._inputs = [kept_only_by_checkpoint(self._trace, fqn, block.inputs) for fqn, block in self._blocks.items()]
        keepers = Counter(chain.from_iterable(self._inputs))
        self._shared = frozenset(storage for storage, count in keepers.items() if count > 1)
        # A choice is made as if all libraries had their workspaces.
        ways = [way for block in self._blocks.values() for way in block.ways]
        self._reserved = self._workspace(ways)
        # What is on its way to the host or back takes as many bytes as one block moves at most: so much room, and the
        # options of each block that do with it. Ways that move more come later.
        most = max((way.nbytes for way in ways), default=0)
        self._rooms = sorted({most // share for share in _SHARES} if most else {0})

    # ------------------------------------------------------------------------------------------- simulated steps

    def _simulate(self, step: StepPlan, chosen: _Chosen) -> tuple[Trace, MemoryEstimate]:
        step = replace(step, checkpoint=tuple(chosen.kept.items()), offload=tuple(chosen.moved.items()))
        trace = observed(self._live, step, storages=True)
        self._done()
        return trace, memory_of(trace, step)

    def _plan_of(self, ways: Mapping[str, _Way]) -> CheckpointPlan:
        """Return the plan of these blocks, with the peak and the recomputation of its simulated step."""
        chosen = _Chosen.of(ways)
        key = tuple(chosen.kept.items()), tuple(chosen.moved.items())
        if key not in self._simulated:
            trace, estimate = self._simulate(self._step, chosen)
            again = sum(map(self._cost_of, recomputed_calls(trace))) - self._plain_again
            cost = chosen.cost + again - chosen.again
            self._simulated[key] = self._plan(chosen, estimate.peak, estimate.recomputed_macs, cost, estimate.offloaded)
        return self._simulated[key]

    def _plan(self, chosen: _Chosen, peak: int, macs: int, cost: int, offloaded: int) -> CheckpointPlan:
        return CheckpointPlan(
            tuple(chosen.kept),
            peak,
            self._plain.peak,
            macs,
            {fqn: names for fqn, names in chosen.kept.items() if names},
            None if self._target is None else cost / _NANOSECONDS,
            None if self._target is None else self._target.name,
            self._plain.step,
            chosen.moved,
            offloaded,
        )

    def _workspace(self, ways: Iterable[_Way]) -> int:
        """Return the bytes of workspaces that the backward has for what runs again alone."""
        return sum(self._products.get(library, 0) for library in {name for way in ways for name in way.libraries})

    def _cost(self, calls: Iterable[OperatorCall]) -> int:
        return sum(map(self._cost_of, calls))

    # ---------------------------------------------------------------------------------------------- ways of a block

    def _reruns(self, fqns: Sequence[str]) -> dict[str, BlockRerun | str]:
        """Return how blocks run under checkpoints, or as the end of a sentence about a block why it does not.

        All of them run in one step. If it raises, or does not tell the blocks apart, each half of them runs in a step.
        """
        if not fqns:
            return {}
        step = replace(self._step, make_optimizer=None)  # the state of the optimizer is there while blocks run
        try:
            simulated = self._simulate(step, _NOTHING._replace(kept=dict.fromkeys(fqns, ())))
            reruns = reruns_of(self._trace, self._plain, *simulated, fqns)
            if reruns is not None:
                return {**reruns}
        except StepError as error:  # such as one whose input is written in place
            if len(fqns) == 1:
                return {fqns[0]: f"does not run under a checkpoint: {error}"}
        middle = len(fqns) // 2
        return self._reruns(fqns[:middle]) | self._reruns(fqns[middle:])

    def _choices_of(
        self, fqn: str, rerun: BlockRerun | str, peak: int, times: BlockTimes, *, whole: bool, moves: bool
    ) -> _Choices:
        """Return the ways in which a block may run: without a checkpoint, and with one that keeps some of its results.

        Args:
            fqn: name of the block.
            rerun: how it runs under a checkpoint, or why it does not.
            peak: the most bytes alive while it runs in the step without checkpoints.
            times: what it takes there.
            whole: it keeps no results.
            moves: what its checkpoint keeps may move to the host.
        """
        if isinstance(rerun, str):
            return _Choices([_PLAIN], obstacle=rerun)
        trace, again, nbytes, saving = rerun.trace, rerun.again, rerun.input_bytes, rerun.saving
        region = RecomputedBlock.of(rerun, fqn, communicates_again=self._communicates_again)
        if region is None:
            return _Choices([_PLAIN], obstacle=_WRITTEN_LATER)
        if not (whole or region.can_keep):
            obstacle = "changes the model, such as statistics of batch norm, or communicates, and would do so twice"
            return _Choices([_PLAIN], obstacle=obstacle, can_run_whole=True)
        calls = {index: trace.operators[index].run.call for index in again}
        cost = self._cost(calls.values())
        candidates: list[_Candidate] = [] if whole else _best(self._candidates(region, cost, saving))
        if whole or not region.kept_at_least()[0]:  # to keep nothing needs no policy, which the host is asked for
            candidates.append((Option(cost, saving), []))
        libraries = _libraries_of(recomputed_calls(trace)) - self._libraries  # also of other blocks
        workspace = self._workspace([_Way(_LEAVE, 0, (), libraries)])
        call = trace.first_call(fqn)
        asked = self._policy * sum(run.call.func is not DETACH for run, *_ in trace.operators[call.begin : call.end])
        asked_again = self._policy * len(again)
        inputs_kept = movable_in(trace, [fqn])[0] if moves else []
        n_inputs = len(in_blocks(trace.saves, [fqn])[0])
        ways: list[_Way] = []
        for option, groups in candidates:
            left_out = {index for group in groups for index in group.again}
            left = [index for index in again if index not in left_out]
            on_host = sum(self._host_cost_of(trace.operators[index]).get("backward", 0) for index in left)
            names = tuple(name for group in groups for name in group.names)
            again_calls = [calls[index] for index in left]
            way = _Way(
                option._replace(peak=region.peak_keeping(groups) - nbytes - peak - workspace),
                sum(map(_macs_of, again_calls)),
                names,
                _libraries_of(again_calls) - self._libraries,
                option.cost,
            )
            movable = [*inputs_kept, *(_moved_results(groups, calls, n_inputs) if moves else ())]
            for moved in _beginnings(movable):
                on_host_with = on_host + (asked_again if names else 0)
                longer = times.longer(option.cost, asked if names else 0, on_host_with, self._transfer(moved))
                ways.append(way.moving(moved, longer))
        staying = [way for way in ways if not way.moved]
        ways = [*(staying if whole else _best(staying)), *_best([way for way in ways if way.moved])]
        if ways:
            futility = ""
        elif region.has_backward:
            futility = "keeps nothing for the backward that a checkpoint would free"
        else:
            futility = "has no backward, as neither its parameters nor its input need a gradient"
        return _Choices([_PLAIN, *ways], rerun.inputs, futility=futility, can_run_whole=True)

    def _transfer(self, moved: Iterable[Movable]) -> int:
        """Return the time in which storages pass the link to the host in one direction."""
        nbytes = sum(storage.nbytes for storage in moved)
        return round(_NANOSECONDS * nbytes / self._link) if nbytes and self._link else 0

    def _moving_ways(self, fqn: str, peak: int, times: BlockTimes, storages: Sequence[Movable]) -> list[_Way]:
        """Return the ways in which a block runs without a checkpoint and moves some of what it keeps to the host.

        Args:
            fqn, peak, times: as for ``_choices_of``.
            storages: what may move.
        """
        held = {
            index: point.total
            for index, point in enumerate(self._plain.timeline)
            if f"{point.fqn}.".startswith(f"{fqn}.")
        }
        ways = []
        for moved in _beginnings(storages)[1:]:
            away = (
                total - sum(storage.nbytes for storage in moved if storage.is_away(index))
                for index, total in held.items()
            )
            option = Option(0, 0, max(away) - peak)
            ways.append(_PLAIN._replace(option=option).moving(moved, times.longer(transfer=self._transfer(moved))))
        return _best(ways)

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

    @property
    def results(self) -> dict[str, list[tuple[str, ...]]]:
        """The sets of results that a checkpoint around each block may keep; none of a block that must not run again."""
        return {
            fqn: list(dict.fromkeys(way.kept for way in block.ways if way.kept is not None))
            for fqn, block in self._blocks.items()
        }

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
        width = max((most - least) // _INTERVALS, 1)
        if least <= budget_bytes:
            choice = self._chosen_for(budget_bytes)
            best = self._plan_of(self._chosen_ways(choice))
            if self._predicted(choice).peak - width // 2**_HALVINGS <= best.peak <= budget_bytes:
                return best
        targets = [*range(most, least, -width), least]
        for index in range(min((most - budget_bytes) // width, len(targets) - 1), len(targets)):
            if self._plan_of(self._chosen_ways(self._chosen_for(targets[index]))).peak <= budget_bytes:
                self._try_between(targets[index], targets[max(index - 1, 0)], budget_bytes)
                break
        else:
            ways = {fqn: max(block.ways, key=lambda way: way.option.saving) for fqn, block in self._blocks.items()}
            best = self._plan_of(ways)
            if best.peak > budget_bytes:
                raise InputError(self._refusal(budget_bytes, best))
        fitting = [plan for plan in self._simulated.values() if plan.peak <= budget_bytes]
        return min(fitting, key=_cost_and_peak)

    def _refusal(self, budget_bytes: int, best: CheckpointPlan) -> str:
        """Return the message for a budget that the plan with the least peak exceeds."""
        if not self._blocks:
            text = f"budget_bytes={budget_bytes:,} is too little: a step takes {best.peak:,} bytes, and the model has "
            return f"{text}no module that could run again; pass a larger budget or a smaller batch"
        count = len(best.fqns)
        blocks = f"all {count}" if count == len(self._blocks) else f"{count} of {len(self._blocks)}"
        moved = f" and {best.offloaded:,} bytes on the host" if best.offload else ""
        text = f"budget_bytes={budget_bytes:,} is too little: with {blocks} blocks recomputed{moved} a step takes "
        text += f"{best.peak:,} bytes"
        if self._has_checkpoints:
            text += ", as the model has checkpoints of its own"
        else:
            obstacles = [(fqn, block.obstacle) for fqn, block in self._blocks.items() if block.obstacle]
            others = [(fqn, block.futility) for fqn, block in self._blocks.items() if block.futility]
            link = ", as" if obstacles or not best.fqns else ";"  # what would free nothing does not take the bytes
            text += next((f"{link} {fqn!r} {reason}" for fqn, reason in obstacles or others), "")
        whole: Kept = {fqn: () for fqn, block in self._blocks.items() if block.can_run_whole}
        peak = self._simulate(self._step, _NOTHING._replace(kept=whole))[1].peak  # no plan: effects run twice
        if peak < best.peak:
            twice = "what changes the model, as batch norm does, runs twice"
            text += f"; granularity='block' takes {peak:,} bytes, but {twice}"
        return f"{text}; pass a larger budget or a smaller batch"

    def _try_between(self, low: int, high: int, budget_bytes: int) -> None:
        """Simulate plans of targets between one whose plan fits and one whose plan does not."""
        for _ in range(_HALVINGS):
            middle = (low + high) // 2
            fits = self._plan_of(self._chosen_ways(self._chosen_for(middle))).peak <= budget_bytes
            low, high = (middle, high) if fits else (low, middle)

    def curve(self, points: int) -> list[CheckpointPlan]:
        """Return the plans of so many targets, evenly from the peak without checkpoints to the least one.

        Plans that another one beats in both peak and cost are left out. The middle and the last plan are simulated; if
        the simulated figures differ from the predicted ones, all plans are.
        """
        low, high = self._least_peak(), self._plain.peak
        targets = [high - (high - low) * number // (points - 1) for number in range(points)]
        choices = [[0] * len(self._blocks) if target == high else self._chosen_for(target) for target in targets]
        predicted = [(self._predicted(choice), choice) for choice in choices]
        best = _undominated((plan for plan, _ in predicted), _cost_and_peak)
        checked = best[len(best) // 2], best[-1]
        if any(self._plan_of(self._chosen_ways(choice)) != plan for plan, choice in predicted if plan in checked):
            best = _undominated((self._plan_of(self._chosen_ways(choice)) for choice in choices), _cost_and_peak)
        return best

    def _least_peak(self) -> int:
        """Return the least peak for which ``_chosen_for`` has a choice."""
        kept_sets = {self._shared, frozenset()}
        least = (least_peak(*self._options(kept, room)) + room for kept in kept_sets for room in self._rooms)
        return min(least) + self._reserved

    def _chosen_for(self, budget: int) -> list[int]:
        """Return the number of the way in which each block runs, for the least cost at a predicted peak.

        Storages that the checkpoints of several blocks keep are taken as kept from the first of these blocks on. If no
        chosen block keeps some of them, blocks are chosen again without these.
        """
        kept = self._shared
        choice = self._cheapest(budget, kept)
        while kept and kept != (used := kept.intersection(self._inputs_kept(choice))):
            kept = used
            choice = self._cheapest(budget, kept) or choice
        assert choice is not None
        return choice

    def _inputs_kept(self, choice: list[int] | None) -> set[int]:
        """Return the storages from before blocks that only the checkpoints of a choice keep."""
        ways = () if choice is None else self._chosen_ways(choice).values()
        pairs = zip(self._inputs, ways, strict=False)
        return {storage for inputs, way in pairs if way.kept is not None for storage in inputs}

    def _cheapest(self, budget: int, kept: frozenset[int]) -> list[int] | None:
        """Return the same if these storages are taken as kept; None if no choice fits.

        Of the others, each block that runs again is taken to keep its own copy.
        """
        choices = []
        for room in self._rooms:
            options, between = self._options(kept, room)
            choice = least_cost(options, between, budget - self._reserved - room)
            if choice is not None:
                cost = sum(block[number].cost for block, number in zip(options, choice, strict=True))
                choices.append((cost, choice))
        return min(choices, key=itemgetter(0), default=(0, None))[1]

    def _options(self, kept: frozenset[int], room: int) -> tuple[list[list[Option]], list[int]]:
        """Return the options of each block that move at most some bytes, and the bytes between the blocks.

        Args:
            kept: storages that are kept from the first block on whose checkpoint keeps them.
            room: the bytes.
        """
        blocks: list[list[Option]] = []
        between = [self._between[0]]
        kept_before: set[int] = set()
        nbytes_before = 0
        for block, peak, inputs, after in zip(
            self._blocks.values(), self._peaks, self._inputs, self._between[1:], strict=True
        ):
            alone = sum(nbytes for storage, nbytes in inputs.items() if storage not in kept)
            first = sum(nbytes for storage, nbytes in inputs.items() if storage in kept - kept_before)
            blocks.append([])
            n_ways = bisect_right(block.ways, room, key=attrgetter("nbytes"))  # they are in the order of these bytes
            for way in block.ways[:n_ways]:
                cost, saving, more = way.option
                again, begins = (0, 0) if way.kept is None else (alone, first)
                blocks[-1].append(Option(cost, saving - again, peak + nbytes_before + more + again + begins))
            kept_before.update(inputs)
            nbytes_before += first
            between.append(after + nbytes_before)
        return blocks, between

    def _chosen_ways(self, choice: list[int]) -> dict[str, _Way]:
        return {fqn: block.ways[number] for (fqn, block), number in zip(self._blocks.items(), choice, strict=True)}

    def _predicted(self, choice: list[int]) -> CheckpointPlan:
        """Return the plan of a choice, with figures that follow from the figures of its blocks."""
        by_block = self._chosen_ways(choice)
        ways, chosen = by_block.values(), _Chosen.of(by_block)
        options: list[Option] = []
        kept_before: set[int] = set()
        for way, peak, inputs in zip(ways, self._peaks, self._inputs, strict=True):
            again = inputs.keys() if way.kept is not None else set()  # blocks may keep the same input, such as a mask
            nbytes = sum(inputs[storage] for storage in again - kept_before)
            kept_before |= again
            cost, saving, more = way.option
            options.append(Option(cost, saving - nbytes, peak + more + nbytes))
        macs = self._plain.recomputed_macs + sum(way.macs for way in ways)
        room = max((way.nbytes for way in ways), default=0)
        peak = peak_of(options, self._between) + self._workspace(ways) + room
        return self._plan(chosen, peak, macs, chosen.cost, sum(way.nbytes for way in ways))


_T = TypeVar("_T")


def _beginnings(items: Sequence[_T]) -> list[Sequence[_T]]:
    """Return the first items, from none of them to all."""
    return [items[:count] for count in range(len(items) + 1)]


def _moved_results(groups: Iterable[KeptGroup], calls: Mapping[int, OperatorCall], n_inputs: int) -> list[Movable]:
    """Return the results that a checkpoint keeps and that may move to the host, in the order in which they are made.

    A result that is written in place later is kept beside autograd, whose hooks would refuse it.

    Args:
        groups: what it keeps.
        calls: number of an operator that runs again -> its call.
        n_inputs: number of the tensors that it keeps before them.
    """
    group_of = {index: group for group in groups for index in group.again}
    if any(len(group.names) > 1 for group in group_of.values()):
        return []
    results: list[Movable] = []
    number = n_inputs
    for index in sorted(group_of):
        for spec in calls[index].outputs:
            if spec.nbytes >= LEAST_MOVED and group_of[index].nbytes:
                results.append(Movable(number, -(-spec.nbytes // CUDA_BLOCK) * CUDA_BLOCK, index, index))
            number += 1
    return results


def _libraries_of(calls: Iterable[OperatorCall]) -> frozenset[str]:
    return frozenset(library for call in calls for library in libraries_of(call))


def _macs_of(call: OperatorCall) -> int:
    return call.cost.macs


def _nanoseconds_of(seconds_of: Callable[[OperatorCall], float]) -> Callable[[OperatorCall], int]:
    return lambda call: round(_NANOSECONDS * seconds_of(call))


def _best(candidates: list[_Priced]) -> list[_Priced]:
    """Return the candidates that save something and that no other one beats, at most so many; the first keeps most."""
    saving = (candidate for candidate in candidates if candidate[0].saving > 0)
    better = _undominated(saving, lambda candidate: (candidate[0].cost, -candidate[0].saving))
    if len(better) > _MOST_OPTIONS:
        step = (len(better) - 1) / (_MOST_OPTIONS - 1)
        better = [better[round(step * number)] for number in range(_MOST_OPTIONS)]
    return better


def _undominated(entries: Iterable[_T], figures: Callable[[_T], tuple[float, float]]) -> list[_T]:
    """Return the entries that no other one beats in both of two figures, of which less is better, by the first one."""
    best: list[_T] = []
    for entry in sorted(entries, key=figures):
        if not best or figures(entry)[1] < figures(best[-1])[1]:
            best.append(entry)
    return best


def _cost_and_peak(plan: CheckpointPlan) -> tuple[float, int]:
    return plan.cost, plan.peak

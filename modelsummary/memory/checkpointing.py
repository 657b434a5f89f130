"""Activation checkpointing: the plan, and the blocks among which it chooses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import getsource
from itertools import groupby, pairwise
from pprint import pformat
from typing import Any, TypeVar

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from modelsummary import _torch
from modelsummary.capture.checkpoints import (
    AppliedCheckpoint,
    apply_checkpoint,
    checkpointed,
    copied,
    keeping,
    segment_of,
)
from modelsummary.capture.offloading import HostStorage, Offloading, SavedView, offloaded, to_device, to_host
from modelsummary.capture.templates import make_object
from modelsummary.capture.trace import TracedSave
from modelsummary.extras import Records, axes_for
from modelsummary.layer_info import LayerInfo
from modelsummary.memory.estimate import MemoryEstimate
from modelsummary.operators.kernels import StepOperator
from modelsummary.tables import Printed, Report, folded_names
from modelsummary.units import NOTHING, duration, grouped, number_of, percent, scaled

_InModule = TypeVar("_InModule", StepOperator, TracedSave)
_CODE_WIDTH = 100  # characters of a line of code

__all__ = [
    "CheckpointPlan",
    "MemoryCurve",
    "block_of",
    "blocks_of",
    "bytes_by_block",
    "in_blocks",
    "square_root",
    "under_policy",
]


@dataclass(frozen=True, repr=False)
class CheckpointPlan(Printed):
    """Modules to run under activation checkpointing, and what each keeps.

    Attributes:
        fqns: names of these modules.
        peak: simulated peak of a step with checkpointing, in bytes.
        peak_without: peak of a step without it, in bytes.
        recomputed_macs: multiply-adds that each step does again.
        kept: module -> names of the results that it keeps beside its input, as ``apply_checkpoint`` takes them; modules
            that keep no results are left out.
        seconds: predicted time that each step takes longer; None without a device.
        device: device of this time.
        step: the step that was planned: its device, model, sizes, dtype and optimizer.
        offload: module -> numbers of the saved tensors that move to the host until the backward, as
            ``apply_checkpoint`` takes them.
        offloaded: bytes that these take on the host.

    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> blocks = [nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(2)]
    >>> plan = Statistics(nn.Sequential(*blocks), (256, 8)).memory_plan(300_000)
    >>> plan.fqns, plan.kept, plan.recomputed_macs
    (('0',), {}, 131072)
    >>> plan.peak < 300_000 < plan.peak_without
    True
    """

    fqns: tuple[str, ...]
    peak: int
    peak_without: int
    recomputed_macs: int
    kept: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    seconds: float | None = None
    device: str | None = None
    step: str = ""
    offload: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    offloaded: int = 0

    @property
    def checkpoint(self) -> dict[str, tuple[str, ...]]:
        """The modules with what they keep, for ``memory(checkpoint=...)`` and ``apply_checkpoint``."""
        return {fqn: tuple(self.kept.get(fqn, ())) for fqn in self.fqns}

    @property
    def cost(self) -> float:
        """What each step takes longer: predicted seconds on the device, or multiply-adds without a device."""
        return self.recomputed_macs if self.seconds is None else self.seconds

    def apply(self, model: nn.Module) -> AppliedCheckpoint:
        """Run the modules of ``model`` as planned until ``undo()`` of the result is called.

        Outputs and gradients stay the same, bit for bit.

        Raises:
            InputError: the model lacks a module, or it is checkpointed already; the model is not changed then.

        >>> import torch
        >>> from torch import nn
        >>> from modelsummary import Statistics
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(2)))
        >>> applied = Statistics(model, (256, 8)).memory_plan(300_000).apply(model)
        >>> model(torch.ones(256, 8)).sum().backward()
        >>> applied.undo()
        """
        return apply_checkpoint(model, self.checkpoint, offload=self.offload)

    def to_code(self) -> str:
        """Return code that does what ``apply`` does, and needs torch alone; ``model`` is the model.

        >>> print(CheckpointPlan(("0",), 10, 20, 0).to_code().splitlines()[-1])
            module.forward = partial(checkpointed, module.forward, options)
        """
        functions = "\n\n".join(getsource(function) for function in (make_object, copied, keeping, checkpointed))
        code = _CODE.format(functions=functions, kept=pformat(self.checkpoint, width=_CODE_WIDTH, sort_dicts=False))
        if not self.offload:
            return code
        moving = (to_host, to_device, HostStorage, SavedView, Offloading, offloaded)
        functions = "\n\n".join(getsource(function) for function in moving)
        moved = pformat(dict(self.offload), width=_CODE_WIDTH, sort_dicts=False)
        return f"{code}\n\n{_OFFLOAD_CODE.format(hooks=_torch.TOP_HOOKS, functions=functions, moved=moved)}"

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as a dict that can be written as JSON."""
        kept = {fqn: list(names) for fqn, names in self.kept.items()}
        moved = {fqn: list(numbers) for fqn, numbers in self.offload.items()}
        return {**vars(self), "fqns": list(self.fqns), "kept": kept, "offload": moved}

    def _report(self) -> Report:
        figures = [("Peak", self.peak), ("Peak without checkpointing", self.peak_without)]
        rows = [(name, grouped(value), scaled(value, "B")) for name, value in figures]
        rows.append(("MACs recomputed in each step", grouped(self.recomputed_macs), scaled(self.recomputed_macs)))
        title = f"Checkpoint {number_of(len(self.fqns), 'module')}: {folded_names(self.fqns)}"
        title = title if self.fqns else "No checkpoint is needed"
        lines = []
        if self.seconds is not None:
            lines.append(f"Predicted time that a step takes longer on {self.device}: {duration(1e3 * self.seconds)}")
        modules: dict[tuple[str, ...], list[str]] = {}
        for fqn, names in self.kept.items():
            modules.setdefault(names, []).append(fqn)
        lines += [f"Kept in {folded_names(fqns)}: {', '.join(names)}" for names, fqns in modules.items()]
        if self.offload:
            rows.append(("Waits on the host", grouped(self.offloaded), scaled(self.offloaded, "B")))
            by_numbers: dict[tuple[int, ...], list[str]] = {}
            for fqn, numbers in self.offload.items():
                by_numbers.setdefault(numbers, []).append(fqn)
            lines += [
                f"Moved to the host in {folded_names(fqns)}: saved tensors {', '.join(map(str, numbers))}"
                for numbers, fqns in by_numbers.items()
            ]
        return Report(rows, ["Figure", "Value", ""], "lrr", above=[f"Memory plan of a {self.step}", title], below=lines)


class MemoryCurve(Printed, Records, tuple[CheckpointPlan, ...]):
    """Plans of which none beats another in both peak and cost, from the cheapest to the one with the least peak.

    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> blocks = [nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(4)]
    >>> curve = Statistics(nn.Sequential(*blocks), (256, 8)).memory_curve(4)
    >>> [(plan.peak, plan.recomputed_macs) for plan in curve][0]
    (477128, 0)
    >>> all(plan.peak > other.peak for plan, other in zip(curve, curve[1:]))
    True
    """

    def to_records(self) -> list[dict[str, Any]]:
        """Return one dict of plain data per plan."""
        return [plan.to_dict() for plan in self]

    def plot(self, ax: Any = None) -> Any:
        """Draw what each plan costs over its peak, with matplotlib.

        Args:
            ax: axes to draw into; None: new axes.

        Returns:
            The axes.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        axes = axes_for(ax, layout="constrained")
        device = self[0].device
        axes.plot([plan.peak / 1e9 for plan in self], [plan.cost for plan in self], marker="o", drawstyle="steps-post")
        label = "MACs recomputed" if device is None else f"seconds longer on {device}"
        axes.set(xlabel="peak (GB)", ylabel=label)
        return axes

    def _report(self) -> Report:
        moves = any(plan.offloaded for plan in self)
        rows = [
            [
                scaled(plan.peak, "B"),
                percent(plan.peak / plan.peak_without),
                scaled(plan.recomputed_macs),
                NOTHING if plan.seconds is None else duration(1e3 * plan.seconds),
                str(len(plan.fqns)),
                str(sum(map(len, plan.kept.values()))),
                *([scaled(plan.offloaded, "B")] if moves else []),
            ]
            for plan in self
        ]
        headers = ["Peak", "Of the peak without", "MACs again", "Longer by", "Modules", "Results kept"]
        headers += ["On the host"] if moves else []
        above = [f"Memory plans of a {self[0].step}"]
        above += [] if self[0].device is None else [f"Longer by: predicted for {self[0].device}"]
        return Report(rows, headers, "r" * len(headers), above=above, optional=("Results kept", "MACs again"))


_CODE = """from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


{functions}

for fqn, kept in {kept}.items():
    module = model.get_submodule(fqn)
    options = {{"use_reentrant": False}}
    if kept:  # a mode in Python sees each operator
        options["context_fn"] = partial(keeping, kept)
    module.forward = partial(checkpointed, module.forward, options)
"""


_OFFLOAD_CODE = """from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
{hooks}


{functions}

offloading = Offloading()
for fqn, numbers in {moved}.items():
    module = model.get_submodule(fqn)
    module.forward = partial(offloaded, module.forward, offloading, numbers)
"""


def bytes_by_block(estimate: MemoryEstimate, fqns: Sequence[str]) -> tuple[list[int], list[int]]:
    """Return the most bytes alive while each block runs, forward or backward, and before each and after the last one.

    Operators after the backward of the first block, and in the optimizer's step, count as before the first block.
    """
    numbers = {fqn: number for number, fqn in enumerate(fqns)}
    inside, between = [0] * len(fqns), [0] * (len(fqns) + 1)
    position, phase = 0, "forward"
    for point in estimate.timeline:
        if point.phase != phase:
            phase, position = point.phase, len(fqns) if point.phase == "backward" else 0
        number = block_of(point.fqn, numbers)
        if number is None:
            between[position] = max(between[position], point.total)
        else:
            inside[number] = max(inside[number], point.total)
            position = number + (phase == "forward")
    return inside, between


def block_of(fqn: str | None, numbers: Mapping[str, int]) -> int | None:
    """Return the number of the block that a module is or belongs to; None if there is none.

    >>> block_of("layers.1.mlp", {"layers.0": 0, "layers.1": 1}), block_of("head", {"layers.0": 0})
    (1, None)
    """
    while fqn:
        if fqn in numbers:
            return numbers[fqn]
        fqn = fqn.rpartition(".")[0]
    return None


def in_blocks(entries: Iterable[_InModule], fqns: Sequence[str]) -> list[list[_InModule]]:
    """Return the operators, or the tensors that autograd saves, of the calls of each block, in order."""
    numbers = {fqn: number for number, fqn in enumerate(fqns)}
    by_block: list[list[_InModule]] = [[] for _ in fqns]
    for entry in entries:
        number = block_of(None if entry.row is None else entry.row[0], numbers)
        if number is not None:
            by_block[number].append(entry)
    return by_block


def under_policy(checkpoint: Mapping[str, Sequence[str]], model: nn.Module) -> Callable[[StepOperator], bool]:
    """Return a function that tells at which operators torch asks whether the checkpoint around them keeps the result.

    Args:
        checkpoint: modules and segments that run under activation checkpointing -> names of the results that they keep.
        model: the model; the function takes operators of its step with these checkpoints.
    """
    names = [name for fqn, kept in checkpoint.items() if kept for name in _modules_in(fqn, model)]
    numbers = {name: number for number, name in enumerate(names)}

    def asks(operator: StepOperator) -> bool:
        runs_checkpoint = operator.phase == "forward" or operator.run.with_grad
        return runs_checkpoint and operator.row is not None and block_of(operator.row[0], numbers) is not None

    return asks


def _modules_in(fqn: str, model: nn.Module) -> list[str]:
    """Return the names of a module, or of the modules of a segment."""
    container, segment = segment_of(fqn)
    if segment is None:
        return [fqn]
    children = [name for name, _ in model.get_submodule(container).named_children()]
    return [f"{container}.{children[index]}".lstrip(".") for index in segment]


def blocks_of(root: LayerInfo) -> list[LayerInfo]:
    """Return the repeated parts of a model: the outermost called modules in containers that call submodules.

    Return the called children of the model if there are none. Modules that are called more than once, and
    parametrizations, are left out.

    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> root = Statistics(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), (1, 2)).root
    >>> [row.fqn for row in blocks_of(root)]
    ['0', '1']
    """
    blocks: list[LayerInfo] = []
    pending = list(reversed(root.children))
    while pending:
        row = pending.pop()
        is_whole = not isinstance(row.module, (nn.Sequential, ParametrizationList))
        if row.executed and _is_in_container(row) and not row.is_leaf and is_whole:
            blocks.append(row)
        else:
            pending.extend(reversed(row.children))
    blocks = blocks or [row for row in root.children if row.executed]
    return [row for row in blocks if row.call_index == 0]


def _is_in_container(row: LayerInfo) -> bool:
    """Return True for a module in a container, or in a module there of which the model calls only submodules."""
    parent = row.parent_info
    if parent is None or isinstance(parent.module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        return parent is not None
    return not parent.executed and _is_in_container(parent)


def square_root(blocks: Sequence[LayerInfo]) -> list[str]:
    """Return names for ``apply_checkpoint`` that cut n blocks of an ``nn.Sequential`` into about sqrt(n) segments.

    The memory kept at a time is then about 2 sqrt(n) blocks' worth (Chen et al. 2016, https://arxiv.org/abs/1604.06174).
    Blocks in other containers cannot be joined; each is named alone.
    """
    names: list[str] = []
    for parent, group in groupby(blocks, key=lambda row: row.parent_info):
        rows = list(group)
        container = parent.module if parent is not None else None
        if parent is None or container is None or type(container).forward is not nn.Sequential.forward:
            names += [row.fqn for row in rows]
            continue
        indices_by_id = {id(child): index for index, child in enumerate(container.children())}
        indices = [indices_by_id[row.layer_id] for row in rows]
        for run in _runs(indices):
            count = max(round(math.sqrt(len(run))), 1)
            edges = [run.start + len(run) * part // count for part in range(count + 1)]
            names += [
                f"{parent.fqn}[{first}:{end}]" if end - first > 1 else rows[indices.index(first)].fqn
                for first, end in pairwise(edges)
            ]
    return names


def _runs(numbers: Sequence[int]) -> Iterator[range]:
    """Yield ascending numbers as ranges without gaps."""
    first = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            yield range(numbers[first], numbers[index - 1] + 1)
            first = index

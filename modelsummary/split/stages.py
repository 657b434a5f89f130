"""``Stages``: a model cut into ``nn.Sequential`` parts that together compute the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.distributed as dist
from torch import nn

from modelsummary.capture.materialize import Checkpoint, Init
from modelsummary.capture.templates import leaves_of
from modelsummary.errors import InputError, LayerNotFoundError, SplitError
from modelsummary.record.events import Event, Record
from modelsummary.split.choose import Limit
from modelsummary.split.engine import Pipeline, pipeline_stages
from modelsummary.split.schedule import Simulation, simulate
from modelsummary.split.stage import Inputs, Slot, Stage
from modelsummary.split.stage_facts import Crossing, StageFacts, load_of, loads_of, stage_table
from modelsummary.split.verify import StageVerification, verify
from modelsummary.tables import Printed, Report
from modelsummary.units import PREFIXES, auto_prefix, number_of, percent

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

__all__ = ["SharedParameter", "Stages"]

_COUNTS = ("macs", "flops", "params", "param_bytes", "activation_bytes")


@dataclass(frozen=True)
class SharedParameter:
    """A parameter that several stages hold, such as a tied weight.

    Attributes:
        fqn: its first name in the model.
        stages: numbers of the stages.
        names: its name in each stage.
    """

    fqn: str
    stages: tuple[int, ...]
    names: tuple[str, ...]


class Stages(Printed, Sequence[nn.Sequential]):
    """The stages of a model, in order. Calling them runs one after the other and returns the model's result.

    Each stage is an ``nn.Sequential`` with the model's own modules, parameters and buffers under their own names.
    Training a stage trains the model. Made by ``Statistics.split``; ``print`` shows a table with one row per stage.

    Attributes:
        facts: a ``StageFacts`` per stage.
        by: the kind of cost that was balanced, such as ``"macs"``.
        ideal: mean cost of a stage.
        limits: a ``Limit`` per call that keeps the largest stage more than 5 % above ``ideal``; empty if none does.
        record: record of the forward that was cut; None after pickling.
        calls: recorded calls of each stage; empty after pickling.
        batch_size: batch size of the recorded input; None if the stages take inputs of the recorded sizes only.
        batch_dim: batch dimension of the inputs.
        inputs: the recorded arguments of the model.
        n_positional_inputs: number of input tensors given by position.
        crossing: a ``Crossing`` per tensor that enters each stage, and at the end per tensor in the result.

    >>> from modelsummary import Statistics
    >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    >>> stages = Statistics(model, (4, 8)).split(2)
    >>> [list(stage.state_dict()) for stage in stages]
    [['0.weight', '0.bias'], ['2.weight', '2.bias']]
    >>> stages.verify(torch.rand(16, 8)).outputs
    0.0
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[nn.Sequential],
        facts: Sequence[StageFacts],
        inputs: Inputs,
        *,
        by: str,
        limits: Sequence[Limit],
        crossing: Sequence[Sequence[Crossing]],
        record: Record,
        calls: Sequence[Sequence[Event]],
    ) -> None:
        self._model: nn.Module | None = model
        self._stages = list(stages)
        self.inputs = inputs
        self.facts = list(facts)
        self.by = by
        self.ideal = sum(stage.cost for stage in facts) / len(facts)
        self.limits = list(limits)
        positional = list(inputs.arguments.values())[: inputs.n_positional]
        self.n_positional_inputs = sum(
            isinstance(leaf, Slot) for template in positional for leaf in leaves_of(template)
        )
        self.crossing = [tuple(crossings) for crossings in crossing]
        self.batch_size = record.batch_size
        self.batch_dim = record.batch_dim
        self.record: Record | None = record
        self._validity = _validity(record, any(event.is_decision for part in calls for event in part))
        self.calls = [list(part) for part in calls]
        inside = (event.assigned for part in calls for call in part for event in call.walk())
        self._not_assigned = sorted(record.unread.difference(*inside))
        self._class_name = type(model).__name__
        self._keys = list(model.state_dict(keep_vars=True))

    # ------------------------------------------------------------------------------------- sequence

    def __len__(self) -> int:
        return len(self._stages)

    @overload
    def __getitem__(self, index: int) -> nn.Sequential: ...
    @overload
    def __getitem__(self, index: slice) -> list[nn.Sequential]: ...
    def __getitem__(self, index: int | slice) -> nn.Sequential | list[nn.Sequential]:
        return self._stages[index]

    def __iter__(self) -> Iterator[nn.Sequential]:
        return iter(self._stages)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stages one after the other. Return the model's result."""
        first = self._stages[0]
        value = first(*args, **kwargs) if isinstance(first, Stage) else first(*self.inputs.bind(args, kwargs).values())
        for stage in self._stages[1:]:
            value = stage(*value) if isinstance(value, tuple) else stage(value)
        return value

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_model": None, "record": None, "calls": []}

    @property
    def model(self) -> nn.Module:
        """The model that was split. Raise ``SplitError`` after pickling, which leaves the model out."""
        if self._model is None:
            raise SplitError("these stages were pickled without the model; call split() again")
        return self._model

    def verify(self, *args: Any, **kwargs: Any) -> StageVerification:
        """Run the model and the stages on the same inputs, forward and backward, and compare their results.

        The stages run detached from one another, as in a pipeline. Gradients, buffers and generators are restored.

        Returns:
            The largest differences; 0.0 means bit-equal. Gradients may differ by rounding: the gradient of a tensor
            that crosses into several stages is summed in another order.

        Raises:
            SplitError: values differ by more than rounding, are missing on one side, or a tensor is on meta.
        """
        return verify(self.model, self, self.inputs, args, kwargs)

    def predict(
        self,
        n_microbatches: int,
        schedule: str = "1f1b",
        *,
        bandwidth: float | None = None,
        backward: float = 2.0,
        seconds: Sequence[Sequence[float]] | None = None,
    ) -> Simulation:
        """Simulate a training step with one stage per device (two with ``"interleaved1f1b"``).

        A micro-batch is the recorded batch. The times of a stage are ``seconds`` if given, else those measured by
        ``measure_latency(backward=True)`` before the split, else its cost. Of a measured backward, the gradients of the
        weights take what their kernels take in a step on shapes, by multiply-adds; of a cost they take half.

        Args:
            n_microbatches: micro-batches in the step.
            schedule: ``"gpipe"``, ``"1f1b"``, ``"interleaved1f1b"``, ``"zb"``, ``"zbv"`` or ``"dualpipev"``.
            bandwidth: bytes per unit of time between two stages; None: transfers take no time.
            backward: time of a backward as a multiple of its forward, if the times are costs. Default: 2.0.
            seconds: times of each stage for one micro-batch: (forward, gradient of the inputs, gradient of the
                weights), or (forward, backward), where each gradient takes half of the backward.

        Raises:
            InputError: an argument is out of range.

        >>> from modelsummary import Statistics
        >>> stages = Statistics(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), (4, 8)).split(2)
        >>> round(stages.predict(4, seconds=[(0.1, 0.2), (0.1, 0.2)]).bubble, 6)  # (p - 1) / (m + p - 1) = 1 / 5
        0.2
        """
        if not isinstance(backward, (int, float)) or not 0 <= backward < float("inf"):
            raise InputError(f"backward must be a number >= 0, as a multiple of the forward's time, got {backward!r}")
        if seconds is None and all(None not in (stage.forward_seconds, stage.backward_seconds) for stage in self.facts):
            seconds = [_measured(stage) for stage in self.facts]
        if seconds is None:
            loads = loads_of(self.facts, lambda stage: stage.cost, backward)
        else:
            loads = [
                load_of(*arguments)
                for arguments in zip(self.facts, *zip(*self._checked(seconds), strict=True), strict=True)
            ]
        unit = "s" if seconds is not None else self.by if self.by in _COUNTS else ""
        return simulate(loads, n_microbatches, schedule, bandwidth=bandwidth, unit=unit)

    def _checked(self, seconds: Sequence[Sequence[float]]) -> list[tuple[float, float, float]]:
        """Return the three times of each stage. Raise ``InputError`` if ``seconds`` does not have them."""
        usable = isinstance(seconds, Sequence) and len(seconds) == len(self)
        if not usable or not all(
            isinstance(times, Sequence)
            and len(times) in (2, 3)
            and all(isinstance(time, (int, float)) and 0 <= time < float("inf") for time in times)
            for times in seconds
        ):
            raise InputError(
                f"seconds must hold (forward, input gradient, weight gradient) or (forward, backward) for each of the "
                f"{len(self)} stages, got {seconds!r:.80}"
            )
        return [
            (times[0], times[1], times[2]) if len(times) == 3 else (times[0], times[1] / 2, times[1] / 2)
            for times in seconds
        ]

    # ---------------------------------------------------------------------------------------- engine

    def pipeline_stage(
        self,
        rank: int,
        device: torch.device | str,
        group: dist.ProcessGroup | None = None,
        *,
        microbatch_size: int | None = None,
        checkpoint: Checkpoint | None = None,
        init: Init | None = None,
    ) -> PipelineStage:
        """Return stage ``rank`` as a ``torch.distributed.pipelining.PipelineStage``, for one stage per rank.

        Only this stage is moved to ``device``. Gradients of ``shared_parameters`` are summed, as by ``schedule``.

        Args:
            rank: rank of this process in the group.
            device: device of this process.
            group: process group of the pipeline; None: the default group.
            microbatch_size: samples in a micro-batch. Default: the recorded batch size.
            checkpoint, init: values for a model built on meta, as for ``schedule``.

        Raises:
            SplitError: ``rank`` is not the rank of this process, or there are not as many stages as ranks.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise SplitError("no process group: call torch.distributed.init_process_group, or run under torchrun")
        if rank != dist.get_rank(group) or len(self) != dist.get_world_size(group):
            raise SplitError(
                f"rank={rank} of {len(self)} stages, but this process is rank {dist.get_rank(group)} of "
                f"{dist.get_world_size(group)}; pass this process's rank, and split into one stage per rank"
            )
        options: dict[str, Any] = {"microbatch_size": microbatch_size, "checkpoint": checkpoint, "init": init}
        return pipeline_stages(self, torch.device(device), group, **options)[0]

    def schedule(
        self,
        name: str,
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        *,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
        microbatch_size: int | None = None,
        checkpoint: Checkpoint | None = None,
        init: Init | None = None,
    ) -> Pipeline:
        """Return a schedule over this rank's stages on ``torch.distributed.pipelining``; its ``step`` trains a batch.

        Args:
            name: ``"gpipe"``, ``"1f1b"`` (one stage per rank), ``"interleaved1f1b"``, ``"loopedbfs"``, ``"zb"`` (any
                number per rank) or ``"zbv"`` (two per rank). ``"zb"`` and ``"zbv"`` need a split with
                ``single_tensor_cuts=True``.
            n_microbatches: micro-batches in a step.
            loss_fn: function of the model's result and the target; None: forward only.
            device: device of this rank. Default: its accelerator, else the CPU.
            group: process group of the pipeline; None: the default group.
            microbatch_size: samples in a micro-batch. Default: the recorded batch size.
            checkpoint: state dict of a model built on meta, or its path; each rank takes its own keys.
            init: function called with each module that has meta tensors, to fill them.

        Raises:
            InputError: an argument is out of range.
            SplitError: the stages cannot be dealt to the ranks, or the engine cannot send a crossing tensor.
        """
        options: dict[str, Any] = {"microbatch_size": microbatch_size, "checkpoint": checkpoint, "init": init}
        return Pipeline(self, name, n_microbatches, loss_fn, device=device, group=group, **options)

    # ------------------------------------------------------------------------------------ parameters

    @property
    def shared_parameters(self) -> list[SharedParameter]:
        """Parameters that several stages hold, such as tied weights."""
        holders: dict[int, dict[int, str]] = {}
        for index, stage in enumerate(self._stages):
            for name, parameter in stage.named_parameters(remove_duplicate=False):
                holders.setdefault(id(parameter), {}).setdefault(index, name)
        return [
            SharedParameter(min(held.values(), key=self._position), tuple(held), tuple(held.values()))
            for held in holders.values()
            if len(held) > 1
        ]

    def _position(self, fqn: str) -> int:
        return self._keys.index(fqn) if fqn in self._keys else len(self._keys)

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state dict: every key once, in the model's order."""
        state: dict[str, Any] = {}
        for stage in self._stages:
            state.update(stage.state_dict())
        return {key: state[key] for key in [*self._keys, *state] if key in state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of the model. Raise ``SplitError`` if keys are missing or unexpected."""
        if not isinstance(state_dict, Mapping):
            raise InputError(f"state_dict must be a dict, got {type(state_dict).__name__}")
        keys = {key for stage in self._stages for key in stage.state_dict(keep_vars=True)}
        if keys != set(state_dict):
            missing, unexpected = sorted(keys - set(state_dict)), sorted(set(state_dict) - keys)
            raise SplitError(f"state_dict needs the model's keys: missing {missing[:3]}, unexpected {unexpected[:3]}")
        for stage in self._stages:
            stage.load_state_dict({key: state_dict[key] for key in stage.state_dict(keep_vars=True)})

    def stage_of(self, fqn: str) -> int:
        """Return the number of the first stage that holds a module, parameter or buffer of the model.

        Raises:
            LayerNotFoundError: no stage holds it.
        """
        for index, stage in enumerate(self._stages):
            names = (name for name, _ in (*stage.named_modules(), *stage.named_parameters(), *stage.named_buffers()))
            if fqn and fqn in names:
                return index
        raise LayerNotFoundError(f"no stage holds {fqn!r}; pass the name of a called module, parameter or buffer")

    def train(self, mode: bool = True) -> Stages:
        """Set the mode of all stages. Return self."""
        for stage in self._stages:
            stage.train(mode)
        return self

    def eval(self) -> Stages:
        """Set eval mode in all stages. Return self."""
        return self.train(False)

    # ----------------------------------------------------------------------------------------- views

    @property
    def balance(self) -> float:
        """Cost of the largest stage divided by ``ideal``."""
        return max(stage.cost for stage in self.facts) / self.ideal

    def to_records(self) -> list[dict[str, Any]]:
        """Return one dict per stage: its number and its facts."""
        return [{"stage": index, **asdict(stage)} for index, stage in enumerate(self.facts)]

    def _report(self) -> Report:
        summary = [f"{self._class_name} in {number_of(len(self), 'stage')} by {self.by}: {self._balance_line()}"]
        for limit in self.limits:
            summary.append(f"Limited by {limit.name}, {percent(limit.share)} of the cost: {limit.reason}")
        if self._validity:
            summary.append(f"Valid for {self._validity}")
        if self._not_assigned:
            names = ", ".join(self._not_assigned)
            summary.append(f"Not assigned by the stages, because the forward does not read it: {names}")
        for shared in self.shared_parameters:
            summary.append(f"Shared: {shared.fqn} by the stages {', '.join(map(str, shared.stages))}")
        return stage_table(self.facts, self.by, summary)

    def _balance_line(self) -> str:
        largest = max(stage.cost for stage in self.facts)
        prefix = auto_prefix(largest)
        return f"largest stage {largest / PREFIXES[prefix]:.4g}{prefix}, {self.balance:.3f} of the ideal"


def _validity(record: Record, decides: bool) -> str:
    """Return which inputs and mode the stages hold for; empty if they hold for all."""
    mode = "train" if record.root.training else "eval"
    holds = []
    if record.batch_size is None:
        holds.append("inputs of the recorded sizes only")
    elif record.smallest_batch > 1 and record.batch_size != 1:
        holds.append(f"batches of {record.smallest_batch} or more")
    if decides:
        holds.append("inputs whose values lead to the same decisions")
    if record.no_other_mode:
        holds.append(f"{mode} mode only")
    return " and ".join(holds)


def _measured(stage: StageFacts) -> tuple[float, ...]:
    """Return the measured seconds of a stage: forward, gradients of inputs, and of weights; else the whole backward."""
    forward, backward = stage.forward_seconds or 0.0, stage.backward_seconds or 0.0
    if stage.weight_seconds is None:
        return forward, backward
    return forward, backward - stage.weight_seconds, stage.weight_seconds

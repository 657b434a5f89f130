"""What ``ModelStatistics`` does to cut a live model: record it, cut the record, check the stages against the model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from modelsummary.capture.changes import surroundings
from modelsummary.capture.exclusive import exclusive
from modelsummary.capture.fingerprint import fingerprint
from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.record import record
from modelsummary.errors import InputError, SplitError
from modelsummary.layer_info import LayerInfo
from modelsummary.live import Live
from modelsummary.split import By, Cluster, Plans, Splitter, Stages, Wishes, check_initialized, make_plans
from modelsummary.split.facts import StageFacts

__all__ = ["ModelSplitter", "Splitting"]


class Splitting(Live):
    """The part of ``ModelStatistics`` that cuts."""

    execution: str
    _cut: ModelSplitter | None = None

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
        names; the model is not changed. The cuts make the dearest stage as cheap as possible; among such cuts those
        with a shorter simulated step, then those that fewer bytes cross.

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
        wishes = Wishes(n_stages, max_memory, boundaries, max_crossing_bytes, single_tensor_cuts)
        return self._splitter().split(by, wishes)

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
        if by not in ("macs", "latency"):
            raise InputError(f"by={by!r}; expected 'macs' or 'latency'")
        options: dict[str, Any] = {}
        if by == "latency" and self.root.latency_ms and self.root.backward_latency_ms:
            options["backward"] = self.root.backward_latency_ms / self.root.latency_ms
        seconds_per_flop = None if by == "latency" else 1 / _positive("flops_per_second", flops_per_second)
        cluster = Cluster(devices, memory_bytes, seconds_per_flop, bandwidth, optimizer_states, **options)
        splitter = self._splitter()
        facts = partial(splitter.facts, by=by)
        return make_plans(facts, splitter.n_samples, cluster, n_microbatches, schedules)

    def _splitter(self) -> ModelSplitter:
        """Made at the first use, and where autocast was switched since."""
        if self._cut is None or not self._cut.is_current():
            rows = list(self.root.walk())
            self._cut = ModelSplitter(self.root.module, self._call, self.execution, self.batch_dim, rows)
        return self._cut


def _positive(name: str, value: float) -> float:
    if not isinstance(value, (int, float)) or not value > 0:
        raise InputError(f"{name}={value!r}; expected a number > 0")
    return value


class ModelSplitter:
    """Cuts one model as it is called in one way.

    Args:
        model: None if it is no longer there.
        call: how it is called; None if that is not known.
        execution: ``"shape"`` or ``"real"``, whichever is known to work.
        batch_dim: dimension of the inputs that is the batch; None: to be found.
        rows: of its tree.

    Raises:
        SplitError: there is no live model with an input, or a parameter of it has no shape yet.
    """

    def __init__(
        self,
        model: nn.Module | None,
        call: CallArguments | None,
        execution: str,
        batch_dim: int | None,
        rows: Sequence[LayerInfo],
    ) -> None:
        if model is None or call is None:
            raise SplitError(
                "splitting needs the live model and an input: Statistics(model, input_data) that was not pickled"
            )
        check_initialized(model)
        self._model, self._call = model, call
        # Autocast does nothing to tensors on meta.
        under_autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        self._execution = "real" if under_autocast else execution
        self._surroundings = surroundings()
        self._splitter = Splitter(model, record(model, call, self._execution, batch_dim), rows)
        self.n_samples = call.size_along(batch_dim or 0) or 1

    def is_current(self) -> bool:
        """Autocast and the like are as they were: the record holds."""
        return self._surroundings == surroundings()

    def split(self, by: By, wishes: Wishes) -> Stages:
        """Stages as ``ModelStatistics.split`` says, checked."""
        stages = self._splitter.split(by, wishes)
        self._check(stages)
        return stages

    def facts(self, n_stages: int, by: By) -> list[StageFacts] | None:
        """What the stages would be, without making them; None if there are no so many."""
        return self._splitter.facts(n_stages, by)

    def _check(self, stages: Stages) -> None:
        """Stages run the operators of the model: at the sample, at another batch size, in the other mode."""
        recorded, model, call = stages.record, self._model, self._call
        assert recorded is not None
        modules = list({id(each): each for part in (model, *stages) for each in part.modules()}.values())

        def difference(call: CallArguments, *, grad: bool, other_mode: bool = False) -> str:
            options: dict[str, Any] = {"grad": grad, "other_mode": other_mode}
            try:
                of_model = fingerprint(model, modules, call, self._execution, **options)
            except RuntimeError:
                if grad:
                    raise
                return ""  # a forward that takes gradients does not run without them
            of_stages = fingerprint(stages, modules, call, self._execution, **options)
            return of_stages.differs_from(of_model)

        found = difference(call, grad=True)
        if not found and difference(call, grad=False):
            raise SplitError(
                "the model does other things without gradients; it can only be run as one stage", possible=1
            )
        if recorded.batch_size is not None:
            call = call.with_batch(recorded.batch_dim, recorded.batch_size, 3 * recorded.batch_size + 2)
            found = found or difference(call, grad=False)
        if not recorded.no_other_mode:
            found = found or difference(call, grad=False, other_mode=True)
        if found:
            raise SplitError(
                f"the stages are not the model: they run {found}. Its forward does what cannot be recorded between "
                "layers (a TorchScript function, a global hook, an overridden __call__): move that into a layer"
            )

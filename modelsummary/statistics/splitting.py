"""How ``ModelStatistics`` is cut: into stages, and into the stages that train best on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from modelsummary.capture.exclusive import exclusive
from modelsummary.errors import InputError
from modelsummary.statistics.live import Live

if TYPE_CHECKING:  # modelsummary.split takes as long to import as the rest
    from modelsummary.cluster import Plans
    from modelsummary.split import By, Stages
    from modelsummary.split.model_splitter import ModelSplitter

__all__ = ["Splitting"]


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
        from modelsummary.split import Wishes

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
        from modelsummary.cluster import Cluster, make_plans

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
        from modelsummary.split.model_splitter import ModelSplitter

        if self._cut is None or not self._cut.is_current():
            rows = list(self.root.walk())
            self._cut = ModelSplitter(self.root.module, self._call, self.execution, self.batch_dim, rows)
        return self._cut


def _positive(name: str, value: float) -> float:
    if not isinstance(value, (int, float)) or not value > 0:
        raise InputError(f"{name}={value!r}; expected a number > 0")
    return value

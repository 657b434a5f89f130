"""Record a live model, cut the record, check the stages against the model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from modelsummary.capture.live import LiveModel
from modelsummary.capture.run import no_collection
from modelsummary.capture.state.process_state import surroundings
from modelsummary.errors import SplitError
from modelsummary.layer_info import LayerInfo
from modelsummary.record.fingerprint import compared, difference
from modelsummary.record.runs import kept_records
from modelsummary.split import By, Splitter, Stages, Wishes, check_initialized
from modelsummary.split.stage_facts import StageFacts

__all__ = ["ModelSplitter"]


class ModelSplitter:
    """A splitter of one live model, called with one input.

    Args:
        live: the model and its input; None after pickling, or if no input was given.
        rows: rows of the model's tree.

    Raises:
        SplitError: ``live`` is None, or a parameter is not initialised.
    """

    def __init__(self, live: LiveModel | None, rows: Sequence[LayerInfo]) -> None:
        if live is None:
            raise SplitError(
                "splitting needs the live model and an input: Statistics(model, input_data) that was not pickled"
            )
        check_initialized(live.model)
        self._model, self._call = live.model, live.call
        # Autocast has no effect on meta tensors.
        under_autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        self._execution = "real" if under_autocast else live.execution
        self._surroundings = surroundings()
        self._splitter = Splitter(live.model, partial(kept_records, live, self._execution), rows)
        self.n_samples = live.call.size_along(live.batch_dim or 0) or 1

    def is_current(self) -> bool:
        """Return True if autocast and other process-wide settings are unchanged, so that the record still holds."""
        return self._surroundings == surroundings()

    def split(self, by: By, wishes: Wishes) -> Stages:
        """Return the stages that ``Statistics.split`` returns, checked against the model."""
        with self._paused_collection():
            stages = self._splitter.split(by, wishes)
            self._check(stages)
        return stages

    def split_around(self, n_stages: int, whole: frozenset[str]) -> Stages:
        """Return stages balanced by multiply-adds, none of which begins inside one of the named modules."""
        return self.split("macs", Wishes(n_stages, whole=whole))

    def facts(self, n_stages: int, by: By) -> list[StageFacts] | None:
        """Return the facts of the stages without building them; None if the model has too few places to cut."""
        with self._paused_collection():
            return self._splitter.facts(n_stages, by)

    def _paused_collection(self) -> AbstractContextManager[None]:
        """Return a context without garbage collection, except in real runs, whose tensors need memory."""
        return no_collection() if self._execution == "shape" else nullcontext()

    def _check(self, stages: Stages) -> None:
        """Raise ``SplitError`` unless the stages run the same operators as the model."""
        assert stages.record is not None
        differs = partial(difference, self._model, stages, stages, execution=self._execution)
        others, is_without_gradients = compared(stages.record, self._call, differs)
        if is_without_gradients:
            raise SplitError(
                "the model runs other operators without gradients; it can only be run as one stage", possible=1
            )
        if others:
            raise SplitError(
                f"the stages differ from the model: they run {others}. The forward does something between its layers "
                "that cannot be recorded (a TorchScript function, a global hook, an overridden __call__); move it into "
                "a layer"
            )

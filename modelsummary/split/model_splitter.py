"""``ModelSplitter``: record a live model, cut the record, check the stages against the model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from modelsummary.capture.live import LiveModel
from modelsummary.capture.state.process_state import surroundings
from modelsummary.errors import SplitError
from modelsummary.layer_info import LayerInfo
from modelsummary.record.fingerprint import difference
from modelsummary.record.runs import record
from modelsummary.split import By, Splitter, Stages, Wishes, check_initialized
from modelsummary.split.stage_facts import StageFacts

__all__ = ["ModelSplitter"]


class ModelSplitter:
    """Cuts one model as it is called in one way.

    Args:
        live: None after pickling, or where the model had no input.
        rows: of its tree.

    Raises:
        SplitError: there is no live model with an input, or a parameter of it has no shape yet.
    """

    def __init__(self, live: LiveModel | None, rows: Sequence[LayerInfo]) -> None:
        if live is None:
            raise SplitError(
                "splitting needs the live model and an input: Statistics(model, input_data) that was not pickled"
            )
        check_initialized(live.model)
        self._model, self._call = live.model, live.call
        # Autocast does nothing to tensors on meta.
        under_autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        self._execution = "real" if under_autocast else live.execution
        self._surroundings = surroundings()
        make_records = partial(record, live.model, live.call, self._execution, live.batch_dim)
        self._splitter = Splitter(live.model, make_records, rows)
        self.n_samples = live.call.size_along(live.batch_dim or 0) or 1

    def is_current(self) -> bool:
        """Autocast and the like are as they were: the record holds."""
        return self._surroundings == surroundings()

    def split(self, by: By, wishes: Wishes) -> Stages:
        """Stages as ``Statistics.split`` says, checked."""
        stages = self._splitter.split(by, wishes)
        self._check(stages)
        return stages

    def facts(self, n_stages: int, by: By) -> list[StageFacts] | None:
        """What the stages would be, without making them; None if there are no so many."""
        return self._splitter.facts(n_stages, by)

    def _check(self, stages: Stages) -> None:
        """Raise ``SplitError`` unless the stages run the model's operators.

        Compared are the sample without gradients, another batch size with them, and the other mode.
        """
        recorded, model, call = stages.record, self._model, self._call
        assert recorded is not None
        differs = partial(difference, model, stages, stages, execution=self._execution)
        other = call
        if recorded.batch_size is not None:
            other = call.with_batch(recorded.batch_dim, recorded.batch_size, 3 * recorded.batch_size + 2)
        found = differs(call=other, grad=True)
        if not found and differs(call=call, grad=False):
            found = differs(call=call, grad=True)
            if not found:
                raise SplitError(
                    "the model does other things without gradients; it can only be run as one stage", possible=1
                )
        if not recorded.no_other_mode:
            found = found or differs(call=other, grad=False, other_mode=True)
        if found:
            raise SplitError(
                f"the stages are not the model: they run {found}. Its forward does what cannot be recorded between "
                "layers (a TorchScript function, a global hook, an overridden __call__): move that into a layer"
            )

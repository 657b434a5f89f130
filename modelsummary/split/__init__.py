"""Cut a recorded model into stages that run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn
from torch.nn.parameter import is_lazy

from modelsummary.dataflow import Record
from modelsummary.errors import SplitError
from modelsummary.layer_info import LayerInfo
from modelsummary.split.analyse import CallSequence, analyse
from modelsummary.split.build import build, inputs_of
from modelsummary.split.choose import Wishes, choose_cuts
from modelsummary.split.costs import By, call_costs, held_by_calls
from modelsummary.split.facts import Crossing, StageFacts, facts_of_parts
from modelsummary.split.parts import parts_of
from modelsummary.split.plan import Cluster, Plan, Plans, make_plans
from modelsummary.split.schedule import Simulation, StageLoad, simulate
from modelsummary.split.stages import Stages

__all__ = [
    "By",
    "Cluster",
    "Plan",
    "Plans",
    "Simulation",
    "Splitter",
    "StageLoad",
    "Stages",
    "Wishes",
    "check_initialized",
    "make_plans",
    "simulate",
]


@dataclass(frozen=True)
class Splitter:
    """Cuts one model.

    Attributes:
        sequence: its calls, from the first record that can be opened.
        rows: of its tree.
    """

    model: nn.Module
    sequence: CallSequence
    rows: Sequence[LayerInfo]

    @classmethod
    def of(cls, model: nn.Module, records: Iterable[Record], rows: Sequence[LayerInfo]) -> Splitter:
        """Raises ``SplitError`` if none of the records can be opened: with the reason of the first, which says most."""
        first_error: SplitError | None = None
        for record in records:
            try:
                return cls(model, analyse(record), rows)
            except SplitError as error:
                first_error = first_error or error
        assert first_error is not None
        raise first_error

    def split(self, by: By, wishes: Wishes) -> Stages:
        """Stages as ``ModelStatistics.split`` says."""
        costs = call_costs(by, self.sequence, self.model, self.rows)
        cuts = choose_cuts(self.sequence, costs, wishes, self.model)
        parts = parts_of(self.sequence, cuts)
        inputs = inputs_of(self.model, self.sequence, parts)
        stages = build(self.model, self.sequence, parts, inputs)
        held = [[*stage.parameters(), *stage.buffers()] for stage in stages]
        crossing = [*(part.takes for part in parts), parts[-1].gives]
        return Stages(
            self.model,
            stages,
            facts_of_parts(self.sequence, costs, cuts, parts, held),
            inputs,
            by=costs.name,
            ideal=max(sum(costs.costs) / len(parts), *costs.costs) * costs.unit,
            crossing=[[Crossing.of(value) for value in values] for values in crossing],
            record=self.sequence.record,
        )

    def facts(self, n_stages: int) -> list[StageFacts] | None:
        """What the stages would be, by MACs, without making them; None if there are no so many."""
        costs = call_costs("macs", self.sequence, self.model, self.rows)
        try:
            cuts = choose_cuts(self.sequence, costs, Wishes(n_stages), self.model)
        except SplitError:
            return None
        bounds = [0, *cuts, len(self.sequence.calls)]
        calls = held_by_calls(self.sequence, self.model)
        held = [[tensor for call in calls[begin:end] for tensor in call] for begin, end in pairwise(bounds)]
        return facts_of_parts(self.sequence, costs, cuts, parts_of(self.sequence, cuts), held)


def check_initialized(model: nn.Module) -> None:
    """Raise ``SplitError`` if a parameter has no shape yet."""
    lazy = next((fqn for fqn, parameter in model.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None:
        raise SplitError(f"parameter {lazy!r} is not initialised; run the model once, then split it")

"""Cut a recorded model into stages that run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

from torch import nn
from torch.nn.parameter import is_lazy

from modelsummary.dataflow import Record
from modelsummary.errors import InputError, SplitError
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

Result = TypeVar("Result")

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


class Splitter:
    """Cuts one model.

    Args:
        records: makes those of its forward, from the one that holds for most; the next is used where one cannot be cut
            as asked.
        rows: of its tree.
    """

    def __init__(self, model: nn.Module, records: Callable[[], Iterator[Record]], rows: Sequence[LayerInfo]) -> None:
        self.model = model
        self._rows = rows
        self._make_records, self._records = records, records()
        self._tried: list[CallSequence | SplitError] = []

    def split(self, by: By, wishes: Wishes) -> Stages:
        """Stages as ``ModelStatistics.split`` says."""
        return self._first(lambda sequence: self._split(sequence, by, wishes))

    def facts(self, n_stages: int, by: By) -> list[StageFacts] | None:
        """What the stages would be, without making them; None if there are no so many."""
        try:
            return self._first(lambda sequence: self._facts(sequence, n_stages, by))
        except SplitError:
            return None

    def _first(self, attempt: Callable[[CallSequence], Result]) -> Result:
        """What the first record gives that allows it; else raises the error of the first, which says most."""
        first_error: Exception | None = None
        for sequence in self._sequences():
            try:
                if isinstance(sequence, SplitError):
                    raise sequence
                return attempt(sequence)
            except (SplitError, InputError) as error:
                first_error = first_error or error
        assert first_error is not None
        raise first_error

    def _sequences(self) -> Iterator[CallSequence | SplitError]:
        """The calls of each record, or why it cannot be opened; records are made when they are needed."""
        yield from self._tried
        while (record := self._next_record()) is not None:
            try:
                self._tried.append(analyse(record))
            except SplitError as error:
                self._tried.append(error)
            yield self._tried[-1]

    def _next_record(self) -> Record | None:
        try:
            return next(self._records, None)
        except BaseException:  # the forward raised, or was interrupted: a later call begins anew
            self._records, self._tried = self._make_records(), []
            raise

    def _split(self, sequence: CallSequence, by: By, wishes: Wishes) -> Stages:
        costs = call_costs(by, sequence, self.model, self._rows)
        cuts = choose_cuts(sequence, costs, wishes, self.model)
        parts = parts_of(sequence, cuts)
        inputs = inputs_of(self.model, sequence, parts)
        stages = build(self.model, sequence, parts, inputs)
        held = [[*stage.parameters(), *stage.buffers()] for stage in stages]
        crossing = [*(part.takes for part in parts), parts[-1].gives]
        return Stages(
            self.model,
            stages,
            facts_of_parts(sequence, costs, cuts, parts, held),
            inputs,
            by=costs.name,
            ideal=max(sum(costs.costs) / len(parts), *costs.costs) * costs.unit,
            crossing=[[Crossing.of(value) for value in values] for values in crossing],
            record=sequence.record,
            calls=[part.events for part in parts],
        )

    def _facts(self, sequence: CallSequence, n_stages: int, by: By) -> list[StageFacts]:
        costs = call_costs(by, sequence, self.model, self._rows)
        cuts = choose_cuts(sequence, costs, Wishes(n_stages), self.model)
        bounds = [0, *cuts, len(sequence.calls)]
        calls = held_by_calls(sequence, self.model)
        held = [[tensor for call in calls[begin:end] for tensor in call] for begin, end in pairwise(bounds)]
        return facts_of_parts(sequence, costs, cuts, parts_of(sequence, cuts), held)


def check_initialized(model: nn.Module) -> None:
    """Raise ``SplitError`` if a parameter has no shape yet."""
    lazy = next((fqn for fqn, parameter in model.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None:
        raise SplitError(f"parameter {lazy!r} is not initialised; run the model once, then split it")

"""Cut a recorded model into stages that run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import nn
from torch.nn.parameter import is_lazy

from modelsummary.errors import InputError, SplitError, close_to
from modelsummary.layer_info import LayerInfo
from modelsummary.record.events import Record
from modelsummary.record.merging import alone
from modelsummary.record.recording_error import as_forward_error
from modelsummary.split.build import build, inputs_of
from modelsummary.split.call_costs import By, call_costs, check_by, held_by_calls
from modelsummary.split.choose import AS_GOOD, Choice, Wishes, choose_cuts
from modelsummary.split.legal_cuts import CallSequence, analyse
from modelsummary.split.schedule import Simulation, StageLoad, simulate
from modelsummary.split.stage_facts import Crossing, StageFacts, facts_of_parts
from modelsummary.split.stage_parts import parts_of, written_before
from modelsummary.split.stages import Stages

__all__ = [
    "By",
    "Simulation",
    "Splitter",
    "StageLoad",
    "Stages",
    "Wishes",
    "check_initialized",
    "simulate",
]


class Splitter:
    """A splitter of one model.

    Args:
        records: function that records the forward. The first record holds for the most inputs. A later one is used if
            the earlier ones cannot be cut as asked, or only less evenly.
        rows: rows of the model's tree.
    """

    def __init__(self, model: nn.Module, records: Callable[[], Iterator[Record]], rows: Sequence[LayerInfo]) -> None:
        self.model = model
        self._rows = rows
        self._make_records, self._records = records, records()
        self._tried: list[CallSequence | SplitError] = []
        self._alone: CallSequence | None = None  # of the first run alone

    def split(self, by: By, wishes: Wishes) -> Stages:
        """Return the stages that ``Statistics.split`` returns."""
        self._check(by, wishes)
        return self._stages(self._best(by, wishes))

    def facts(self, n_stages: int, by: By) -> list[StageFacts] | None:
        """Return the facts of the stages without building them; None if the model has too few places to cut."""
        check_by(by, self._rows)
        try:
            return self._facts(self._best(by, Wishes(n_stages)))
        except SplitError:
            return None

    def _check(self, by: By, wishes: Wishes) -> None:
        """Raise ``InputError`` for unknown names before anything is recorded."""
        check_by(by, self._rows)
        names = {row.fqn for row in self._rows}
        for fqn in wishes.boundaries or ():
            if fqn not in names:
                raise InputError(
                    f"boundaries names {fqn!r}, but no layer of this name was called{close_to(fqn, names)}"
                )

    def _best(self, by: By, wishes: Wishes) -> Choice:
        """Return the cuts of the first record that balances as well as any other, within ``AS_GOOD``.

        Records come in order, from the one that holds for the most inputs and modes. A later one pays only if it opens
        modules that the earlier ones keep whole, and if that makes the largest stage smaller. If no record can be cut
        as asked, raise the error of the first record, which is the most informative.
        """
        first_error: Exception | None = None
        choices: list[Choice] = []
        for sequence in self._sequences():
            try:
                if isinstance(sequence, SplitError):
                    raise sequence
                choices.append(self._choice(sequence, by, wishes))
            except (SplitError, InputError) as error:
                first_error = first_error or error
                continue
            if choices[-1].largest <= AS_GOOD * max(choices[-1].could_be, self._least(choices[-1], by, wishes)):
                break
        if not choices:
            assert first_error is not None
            raise first_error
        smallest = min(choice.largest for choice in choices)
        return next(choice for choice in choices if choice.largest <= AS_GOOD * smallest)

    def _least(self, choice: Choice, by: By, wishes: Wishes) -> float:
        """Return the largest stage of the record of one run alone, in which most can be cut; 0.0 if it is not known."""
        if choice.largest <= AS_GOOD * choice.could_be:
            return 0.0
        try:
            if self._alone is None and (record := alone(choice.sequence.record)) is not None:
                self._alone = analyse(record)
            return 0.0 if self._alone is None else self._choice(self._alone, by, wishes).largest
        except (SplitError, InputError):
            return 0.0

    def _choice(self, sequence: CallSequence, by: By, wishes: Wishes) -> Choice:
        costs = call_costs(by, sequence, self.model, self._rows)
        return Choice(sequence, costs, choose_cuts(sequence, costs, wishes, self.model))

    def _sequences(self) -> Iterator[CallSequence | SplitError]:
        """Yield the calls of each record, or the error that says why it cannot be opened. Record on demand."""
        yield from self._tried
        while (record := self._next_record()) is not None:
            try:
                self._tried.append(analyse(record))
            except SplitError as error:
                self._tried.append(error)
            yield self._tried[-1]

    def _next_record(self) -> Record | None:
        try:
            with as_forward_error(self.model):
                return next(self._records, None)
        except BaseException:  # the forward raised or was interrupted: the next call must start again
            self._records, self._tried, self._alone = self._make_records(), [], None
            raise

    def _stages(self, choice: Choice) -> Stages:
        sequence, parts = choice.sequence, parts_of(choice.sequence, choice.cuts)
        inputs = inputs_of(self.model, sequence, parts)
        stages = build(self.model, sequence, parts, inputs)
        held = [[*stage.parameters(), *stage.buffers()] for stage in stages]
        crossing = [*(part.takes for part in parts), parts[-1].gives]
        return Stages(
            self.model,
            stages,
            facts_of_parts(choice, parts, held, self._rows),
            inputs,
            by=choice.costs.name,
            limits=choice.limits(),
            crossing=[
                [Crossing.of(value, written) for value in values]
                for values, written in zip(crossing, written_before(parts), strict=True)
            ],
            record=sequence.record,
            calls=[part.events for part in parts],
        )

    def _facts(self, choice: Choice) -> list[StageFacts]:
        calls = held_by_calls(choice.sequence, self.model)
        held = [[tensor for call in calls[begin:end] for tensor in call] for begin, end in choice.ranges]
        return facts_of_parts(choice, parts_of(choice.sequence, choice.cuts), held, self._rows)


def check_initialized(model: nn.Module) -> None:
    """Raise ``SplitError`` if a parameter has no shape yet."""
    lazy = next((fqn for fqn, parameter in model.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None:
        raise SplitError(f"parameter {lazy!r} is not initialised; run the model once, then split it")

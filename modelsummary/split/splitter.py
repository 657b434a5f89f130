"""Record a live model, cut the record into stages, and check the stages against the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from modelsummary.capture.live import LiveModel
from modelsummary.capture.observe import observed
from modelsummary.capture.run import no_collection
from modelsummary.capture.step_plan import StepPlan
from modelsummary.capture.trace import Trace
from modelsummary.errors import InputError, ModelSummaryError, SplitError
from modelsummary.keywords import nearest
from modelsummary.layer_info import LayerInfo
from modelsummary.record.events import Record
from modelsummary.record.fingerprint import compared, difference
from modelsummary.record.merging import alone
from modelsummary.record.runs import kept_records
from modelsummary.split.build import build, inputs_of
from modelsummary.split.call_costs import By, call_costs, check_by
from modelsummary.split.choose import AS_GOOD, Choice, Wishes, choose_cuts
from modelsummary.split.legal_cuts import CallSequence, analyse
from modelsummary.split.stage_facts import Crossing, facts_of_parts
from modelsummary.split.stage_parts import parts_of, written_before
from modelsummary.split.stages import Stages

__all__ = ["Splitter"]


class Splitter:
    """A splitter of one live model, called with one input.

    Its records come in order: the first holds for the most inputs. A later one is used if the earlier ones cannot be
    cut as asked, or only less evenly.

    Args:
        live: the model and its input; the splitter is of no use after a change of the model.
    """

    def __init__(self, live: LiveModel, rows: Sequence[LayerInfo]) -> None:
        self._live, self._rows = live, rows
        # Autocast has no effect on meta tensors.
        under_autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        self._execution = "real" if under_autocast else live.execution
        self._begin()

    def _begin(self) -> None:
        """Record from the start."""
        self._records = kept_records(self._live, self._execution)
        self._tried: list[CallSequence | SplitError] = []
        self._alone: CallSequence | None = None  # of the first run alone

    def split(self, by: By, wishes: Wishes) -> Stages:
        """Return the stages that ``Statistics.split`` returns, checked against the model."""
        with self._paused_collection():
            self._check(by, wishes)
            stages = self._stages(self._best(by, wishes))
            self._compare(stages)
        return stages

    def split_around(self, n_stages: int, whole: frozenset[str]) -> Stages:
        """Return stages balanced by multiply-adds, none of which begins inside one of the named modules."""
        return self.split("macs", Wishes(n_stages, whole=whole))

    def _paused_collection(self) -> AbstractContextManager[None]:
        """Return a context without garbage collection, except in real runs, whose tensors need memory."""
        return no_collection() if self._execution == "shape" else nullcontext()

    def _check(self, by: By, wishes: Wishes) -> None:
        """Raise ``InputError`` for unknown names before anything is recorded."""
        check_by(by, self._rows)
        names = {row.fqn for row in self._rows}
        for fqn in wishes.boundaries or ():
            if fqn not in names:
                raise InputError(
                    f"boundaries names {fqn!r}, but no layer of this name was called{nearest(fqn, sorted(names))}"
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
        costs = call_costs(by, sequence, self._live.model, self._rows)
        return Choice(sequence, costs, choose_cuts(sequence, costs, wishes, self._live.model))

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
            return next(self._records, None)
        except BaseException:  # the forward raised or was interrupted: the next call must start again
            self._begin()
            raise

    def _stages(self, choice: Choice) -> Stages:
        sequence, parts = choice.sequence, parts_of(choice.sequence, choice.cuts)
        inputs = inputs_of(self._live.model, sequence, parts)
        stages = build(self._live.model, sequence, parts, inputs)
        held = [[*stage.parameters(), *stage.buffers()] for stage in stages]
        crossing = [*(part.takes for part in parts), parts[-1].gives]
        return Stages(
            self._live.model,
            stages,
            facts_of_parts(choice, parts, held, self._rows, self._step),
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

    def _step(self) -> Trace | None:
        """Return the trace of a training step; None if the model has none, or only with a loss of its own."""
        try:
            return observed(self._live, StepPlan(), storages=True)
        except ModelSummaryError:
            return None

    def _compare(self, stages: Stages) -> None:
        """Raise ``SplitError`` unless the stages run the same operators as the model."""
        assert stages.record is not None
        differs = partial(difference, self._live.model, stages, stages, execution=self._execution)
        others, is_without_gradients = compared(stages.record, self._live.call, differs)
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

"""``Finding`` and ``Findings``: what is wrong with a model, as plain data and as a table."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from modelsummary.errors import InputError
from modelsummary.extras import Records
from modelsummary.findings.sarif import sarif_log
from modelsummary.operators.operator_calls import Line
from modelsummary.tables import Printed, Report, starred
from modelsummary.units import NOTHING, number_of, scaled

__all__ = ["Finding", "Findings", "Kind"]

Kind = tuple[str, str, str]
_LEVELS = ("error", "warning", "note")
_NAMED_PLACES = 2


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, at one place.

    Attributes:
        code, rule: code and name of the rule, such as ``"G101"`` and ``"parameter-never-used"``.
        level: ``"error"``: the step fails or does not train what it should; ``"warning"``: it costs time or memory, or
            hurts later; ``"note"``: to be known.
        fqn: module; ``""`` is the model, None is outside of it, such as in the loss.
        call_index: running number of the call among the calls of the module; None if no call is meant.
        file, line: the line of the model's code; None if it is not known.
        what: what is wrong.
        remedy: what to do.
        nbytes: bytes that it costs; 0 if it costs none, or the number is not known.
        seconds: predicted time that it costs in a step; 0.0 if it costs none, or the time is not known.
    """

    code: str
    rule: str
    level: str
    fqn: str | None
    call_index: int | None
    file: str | None
    line: int | None
    what: str
    remedy: str
    nbytes: int = 0
    seconds: float = 0.0

    @property
    def kind(self) -> Kind:
        """Code, what is wrong and what to do, alike in equal blocks: the numbers in the names of modules are stars.

        >>> where = "fc", None, None, None
        >>> Finding("B955", "not-an-fsdp-unit", "warning", *where, "Net reads blocks.3.up.weight", "pass it on").kind
        ('B955', 'Net reads blocks.*.up.weight', 'pass it on')
        """
        return self.code, starred(self.what), starred(self.remedy)


class Findings(Printed, Records, tuple[Finding, ...]):
    """The findings of one check, the most expensive ones first; a tuple that prints as a table.

    Equal findings of one rule, also of equal blocks, are one line of the table, with the number of places.

    Attributes:
        device: device of the predicted times.
        step_seconds: predicted time of the kernels of the step that was checked.
        mode: ``"train"`` or ``"inference"``: the step that was checked.
        rules: code -> name and meaning of each rule that was asked.
        notes: assumptions, and what could not be checked.
        subject: the model, the sizes of its inputs and its dtype.
        lines_around: FQN -> file and first line of the forward around a module, for findings whose own line is unknown.

    >>> import torch
    >>> from modelsummary import Statistics
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
    >>> findings = Statistics(model, (4, 3, 32, 32)).check()
    >>> [(finding.code, finding.fqn) for finding in findings]
    [('N601', '0')]
    """

    device: str
    step_seconds: float
    mode: str
    rules: Mapping[str, tuple[str, str]]
    notes: tuple[str, ...]
    subject: str
    lines_around: Mapping[str | None, Line]

    @classmethod
    def of(
        cls,
        findings: list[Finding],
        *,
        device: str,
        step_seconds: float,
        mode: str,
        rules: Mapping[str, tuple[str, str]],
        notes: tuple[str, ...] = (),
        subject: str = "a model",
        lines_around: Mapping[str | None, Line] | None = None,
    ) -> Findings:
        """Return findings in order: errors, then by the cost of all places where the same is wrong."""
        seconds: defaultdict[Kind, float] = defaultdict(float)
        nbytes: defaultdict[Kind, int] = defaultdict(int)
        for finding in findings:
            seconds[finding.kind] += finding.seconds
            nbytes[finding.kind] += finding.nbytes

        def rank(finding: Finding) -> tuple[Any, ...]:
            kind = finding.kind
            return finding.level != "error", -seconds[kind], -nbytes[kind], _LEVELS.index(finding.level), kind

        ordered = cls(sorted(findings, key=rank))
        ordered.device, ordered.step_seconds, ordered.mode = device, step_seconds, mode
        ordered.rules, ordered.notes, ordered.subject = dict(rules), notes, subject
        ordered.lines_around = dict(lines_around or {})
        return ordered

    def since(self, earlier: Findings | str | PathLike[str]) -> Findings:
        """Return the findings that an earlier check did not have: the ones that a project has not accepted.

        A finding is the same if rule, module and what is wrong are, whatever its line and its cost. Of equal ones in
        a module, as many as there were before are left out.

        Args:
            earlier: the findings of that check, or a file of them in JSON, as ``modelsummary check`` writes it.

        Raises:
            InputError: the file holds no findings.

        >>> import torch
        >>> from modelsummary import Statistics
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        >>> findings = Statistics(model, (4, 3, 8, 8)).check()
        >>> len(findings), len(findings.since(findings))
        (1, 0)
        """
        records = earlier.to_records() if isinstance(earlier, Findings) else _records_in(earlier)
        accepted = Counter((record["code"], record["fqn"], record["what"]) for record in records)
        new: list[Finding] = []
        for finding in self:
            key = finding.code, finding.fqn, finding.what
            if accepted[key]:
                accepted[key] -= 1
            else:
                new.append(finding)
        left_out = number_of(len(self) - len(new), "finding")
        notes = (*self.notes, f"{left_out} of an earlier check left out")
        facts: dict[str, Any] = {**vars(self), "notes": notes}
        return Findings.of(new, **facts)

    def to_records(self) -> list[dict[str, Any]]:
        """Return one dict of plain data per finding."""
        return [asdict(finding) for finding in self]

    def to_json(self) -> str:
        """Return the findings and what was checked as JSON."""
        rules = {code: name for code, (name, _) in self.rules.items()}
        facts = {"device": self.device, "mode": self.mode, "step_seconds": self.step_seconds, "rules": rules}
        return json.dumps({**facts, "notes": self.notes, "findings": self.to_records()}, indent=2)

    def to_sarif(self) -> str:
        """Return the findings as a log in SARIF 2.1.0, which code hosts show beside the lines."""
        return json.dumps(sarif_log(self.to_records(), self.rules, self.lines_around), indent=2)

    def _report(self) -> Report:
        groups: dict[Kind, list[Finding]] = {}
        for finding in self:
            groups.setdefault(finding.kind, []).append(finding)
        rows: list[list[str]] = []
        remedies: defaultdict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for group in groups.values():
            first = group[0]
            what, remedy = (_common([getattr(finding, name) for finding in group]) for name in ("what", "remedy"))
            nbytes, seconds = sum(finding.nbytes for finding in group), sum(finding.seconds for finding in group)
            cost = scaled(nbytes, "B") if nbytes else NOTHING, f"{1e6 * seconds:,.1f}" if seconds else NOTHING
            rows.append([first.code, _places(group), str(len(group)), *cost, what])
            remedies[first.code][remedy].append(_places(group))
        advice = [
            f"{code} ({'; '.join(places)}): {remedy}" if len(by_remedy) > 1 else f"{code}: {remedy}"
            for code, by_remedy in remedies.items()
            for remedy, places in by_remedy.items()
        ]
        step = "training step" if self.mode == "train" else "forward"
        checked = f"{len(self.rules)} rules on a {step}; times on {self.device}, of {1e3 * self.step_seconds:,.3f} ms"
        headers = ["Code", "Where", "Places", "Bytes", "Time (us)", "What"]
        title = "Findings" if rows else "No findings"
        above = [f"{title} in {self.subject}: {checked}"]
        return Report(rows, headers, "llrrrp", above=above, below=[*advice, *self.notes], optional=("Bytes", "Places"))


def _records_in(path: str | PathLike[str]) -> list[dict[str, Any]]:
    """Return the findings in a file that ``Findings.to_json`` wrote, as plain data."""
    try:
        records: list[dict[str, Any]] = json.loads(Path(path).read_text(encoding="utf-8"))["findings"]
        figures = [record[name] for record in records for name in ("code", "fqn", "what")]
        is_sound = all(figure is None or isinstance(figure, str) for figure in figures)
    except (OSError, TypeError, ValueError, KeyError, AttributeError):
        is_sound = False
    if not is_sound:
        raise InputError(
            f"expected a file of findings in JSON, got {str(path)!r:.200}; write one by modelsummary check ... "
            "--format json --output FILE"
        )
    return records


def _common(texts: list[str]) -> str:
    """Return a text that equal blocks have in common."""
    return texts[0] if len(set(texts)) == 1 else starred(texts[0])


def _places(group: list[Finding]) -> str:
    places = list(dict.fromkeys((_module(finding), _line(finding)) for finding in group))
    named = places if len(places) <= _NAMED_PLACES else [places[0], ("...", ""), places[-1]]
    (_, line) = places[0]
    if all(other == line for _, other in places):
        return ", ".join(module for module, _ in named) + line
    return ", ".join(f"{module}{line}" for module, line in named)


def _module(finding: Finding) -> str:
    return "outside of the model" if finding.fqn is None else finding.fqn or "the model"


def _line(finding: Finding) -> str:
    return "" if finding.file is None else f" ({Path(finding.file).name}:{finding.line})"

"""The rules: each is a function from the evidence to its defects, registered by a code and a name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from modelsummary.errors import InputError, RegistrationError
from modelsummary.findings.evidence import Evidence
from modelsummary.findings.finding import Finding
from modelsummary.keywords import nearest
from modelsummary.layer_info import CallKey
from modelsummary.operators.operator_calls import Line

__all__ = ["RULES", "Defect", "Rule", "chosen", "reason_and_remedy", "rule"]


class Defect(NamedTuple):
    """What a rule finds at one place.

    Attributes:
        what: what is wrong, the same words wherever the same is wrong.
        remedy: what to do.
        row: key of the module call; None outside of the model.
        line: the line of the model's code.
        nbytes, seconds: what it costs, as far as it is known.
        is_call: whether the call is meant, not the module.
    """

    what: str
    remedy: str
    row: CallKey | None = ("", 0)
    line: Line | None = None
    nbytes: int = 0
    seconds: float = 0.0
    is_call: bool = True


Check = Callable[[Evidence], Iterable[Defect]]


@dataclass(frozen=True)
class Rule:
    """A rule.

    Attributes:
        code: a letter for its family, and a number.
        name: a short name.
        level: as of a ``Finding``.
        check: yields its defects.
        is_priced: it is about time alone: what costs less than a thousandth of the step is left out.
        on_request: it runs the model again, or plans with it, and is asked only if ``select`` names it.
    """

    code: str
    name: str
    level: str
    check: Check
    is_priced: bool = False
    on_request: bool = False

    @property
    def meaning(self) -> str:
        """The first line of the docstring of its function."""
        return (self.check.__doc__ or "").strip().splitlines()[0].removeprefix("Yield ").removesuffix(".")

    def findings(self, evidence: Evidence) -> Iterator[Finding]:
        """Yield the findings."""
        for defect in self.check(evidence):
            fqn, call_index = (None, None) if defect.row is None else defect.row
            file, line = (None, None) if defect.line is None else defect.line
            call = call_index if defect.is_call else None
            what = self.code, self.name, self.level, fqn, call, file, line, defect.what, defect.remedy
            yield Finding(*what, defect.nbytes, defect.seconds)


def reason_and_remedy(message: str) -> tuple[str, str]:
    """Return the two parts of a message of this library: what is wrong, and what to do; the latter may be empty.

    >>> reason_and_remedy("relu() in blocks.0 writes into what it takes; x = x + y instead of x += y works")
    ('relu() in blocks.0 writes into what it takes', 'x = x + y instead of x += y works')
    """
    reason, _, remedy = message.partition("; ")
    return reason, remedy


RULES: dict[str, Rule] = {}
"""The rules by code."""


def rule(
    code: str, name: str, level: str = "warning", *, is_priced: bool = False, on_request: bool = False
) -> Callable[[Check], Check]:
    """Register a function as a rule.

    Raises:
        RegistrationError: the code or the name is taken.
    """

    def register(check: Check) -> Check:
        if code in RULES or name in {rule.name for rule in RULES.values()}:
            raise RegistrationError(f"rule {code} {name!r} is registered already; choose another code and name")
        RULES[code] = Rule(code, name, level, check, is_priced, on_request)
        return check

    return register


def chosen(select: Sequence[str] | str | None, ignore: Sequence[str] | str | None) -> list[Rule]:
    """Return the rules that are selected and not ignored, by code.

    Args:
        select, ignore: codes, beginnings of codes such as ``"G"``, or names; None: all but the ones on request, and
            none.

    Raises:
        InputError: no rule is called so.
    """
    usual = {rule.code for rule in RULES.values() if not rule.on_request}
    selected = usual if select is None else _codes(select, "select")
    ignored = set() if ignore is None else _codes(ignore, "ignore")
    return [RULES[code] for code in sorted(RULES) if code in selected and code not in ignored]


def _codes(choices: Sequence[str] | str, name: str) -> set[str]:
    codes: set[str] = set()
    listed = [choices] if isinstance(choices, str) or not isinstance(choices, Collection) else choices
    for choice in listed:
        meant = {
            rule.code
            for rule in RULES.values()
            if isinstance(choice, str) and choice and (rule.code.startswith(choice) or rule.name == choice)
        }
        if not meant:
            names = [*RULES, *(rule.name for rule in RULES.values())]
            raise InputError(
                f"{name} takes codes of rules, their beginnings or names, got {choice!r:.80}{nearest(choice, names)}"
            )
        codes |= meant
    return codes

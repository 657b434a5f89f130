"""The calls of a record that only the first run made, because an equal call stood for them in the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container
from dataclasses import dataclass, field

__all__ = ["EqualCalls"]


@dataclass
class EqualCalls:
    """Calls that are equal to an earlier one.

    Attributes:
        first_of: FQN of a module -> FQN of the module with the equal, earlier call. Both are called once.
        differing: FQN of a module inside an earlier call -> attributes in which the equal modules differ from it.
        problem: how the calls differ in a later run; empty if they are equal there, too.
    """

    first_of: dict[str, str] = field(default_factory=dict)
    differing: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    problem: str = ""

    def without(self, opened: Container[str]) -> EqualCalls:
        """Return the equal calls without the calls of some modules; the first one left runs for the others.

        >>> EqualCalls({"b": "a", "c": "a", "d": "a"}).without(["a", "c"]).first_of
        {'d': 'b'}
        """
        groups: defaultdict[str, list[str]] = defaultdict(list)
        for fqn, first in self.first_of.items():
            groups[first] += [fqn] if groups[first] else [first, fqn]
        kept = EqualCalls()
        for first, members in groups.items():
            left = [each for each in members if each not in opened]
            kept.first_of |= dict.fromkeys(left[1:], left[0]) if left else {}
            for fqn, names in self.differing.items():
                if left and f"{fqn}.".startswith(f"{first}."):
                    kept.differing[left[0] + fqn[len(first) :]] = names
        return kept

    def block(self, reason: str) -> None:
        """Note how the calls differ in a later run. The first reason is kept."""
        self.problem = self.problem or reason

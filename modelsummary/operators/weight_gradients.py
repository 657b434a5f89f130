"""The operators of a backward that compute gradients of weights alone, which a schedule may run later."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

from modelsummary.operators.kernels import StepOperator

__all__ = ["of_weights_alone"]


def of_weights_alone(
    operators: Sequence[StepOperator], parts: Sequence[Hashable], gradients: frozenset[int]
) -> set[int]:
    """Return the indices of the operators in the backward on which no gradient of what enters their part depends.

    Args:
        parts: part of the model that each operator belongs to.
        gradients: storages of the gradients of parameters.
    """
    alone: set[int] = set()
    readers: defaultdict[int, set[Hashable]] = defaultdict(set)  # storage -> parts whose later operators read it
    passed_on: set[int] = set()  # storages from which the gradient of what enters a part is computed
    for index in range(len(operators) - 1, -1, -1):
        run, part = operators[index].run, parts[index]
        if operators[index].phase != "backward":
            continue
        adds_up = run.call.rule.facts.accumulates and not gradients.isdisjoint(run.makes)  # of a weight in two parts
        is_passed_on = any(key in passed_on or readers[key] - {part} for key in run.makes)
        if not is_passed_on:
            alone.add(index)
        for key in () if adds_up else run.reads:
            readers[key].add(part)
            if is_passed_on:
                passed_on.add(key)
    return alone

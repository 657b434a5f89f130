"""Factors by which measured steps correct predictions: few, and near 1 unless the measurements ask for more.

A device has factors, and a cluster has further ones; both are fitted here.

The logarithms of the factors are the most likely ones if each has a normal distribution around 0, as wide as
``SPREADS`` says, and each measurement one around its prediction: a ridge regression of logarithms, by Gauss-Newton. A
measurement that is far off counts less, from the first round on, so that one odd step does not spoil the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import exp, log
from typing import Any

import torch

from modelsummary.errors import InputError, is_number
from modelsummary.tables import Printed, Report
from modelsummary.units import percent

__all__ = ["OF_DEVICES", "SPREADS", "Factors", "calibrated_factors", "factors_of", "fitted"]

# How far each of them is usually off, as standard deviations of logarithms, in addition to what a machine is slower or
# faster in all that takes time; products differ by 20 % between boards of one type.
SPREADS = {"products": 0.1, "attention": 0.2, "kernels": 0.2, "communication": 0.3, "host": 0.3, "activations": 0.2}
OF_DEVICES = ("products", "attention", "kernels", "host")
_COMMON = {name: 0.15 for name in SPREADS if name != "activations"}
_NOISE, _FAR = 0.08, 2.0  # standard deviation of a measurement, and in how many of them it begins to count less
_ROUNDS, _STEP = 5, 0.05  # of Gauss-Newton, and the change of a logarithm that derivatives are taken over


@dataclass(frozen=True, repr=False)
class Factors(Printed):
    """Factors on predicted seconds and bytes; ``print`` shows them as a table.

    A device has factors on its kernels and its host. The factors of a cluster come in addition.

    Attributes:
        products: on the seconds of products and convolutions.
        attention: on the seconds of fused attention.
        kernels: on the seconds of all other kernels.
        communication: on the seconds of collectives and messages.
        host: on the seconds in which the host dispatches operators.
        activations: on the bytes of what is neither weights, gradients, optimizer states nor buffers.
        steps: number of measured steps that they were fitted to.
        before, after: mean error of the predicted seconds of these steps, without and with the factors.

    Raises:
        InputError: a factor is not a number > 0.

    >>> print(Factors(products=1.25, steps=1, before=0.2, after=0.02))
    Factor           Value
    products         1.250
    attention        1.000
    kernels          1.000
    communication    1.000
    host             1.000
    activations      1.000
    Fitted to 1 measured step: mean error of its seconds 20.0% before, 2.0% after
    """

    products: float = 1.0
    attention: float = 1.0
    kernels: float = 1.0
    communication: float = 1.0
    host: float = 1.0
    activations: float = 1.0
    steps: int = 0
    before: float = 0.0
    after: float = 0.0

    def __post_init__(self) -> None:
        for name in SPREADS:
            value = getattr(self, name)
            if not is_number(value) or value <= 0:
                raise InputError(f"factors: {name} must be a number > 0, got {value!r:.80}")
        if type(self.steps) is not int or self.steps < 0:
            raise InputError(f"factors: steps must be an integer >= 0, got {self.steps!r:.80}")

    def __repr__(self) -> str:
        return f"Factors({', '.join(f'{name}={value!r}' for name, value in self.values.items())})"

    def of(self, op_class: str) -> float:
        """Return the factor on the seconds of a kernel."""
        if op_class in ("gemm", "conv"):
            return self.products
        return self.attention if op_class == "attention" else self.kernels

    def times(self, others: Factors) -> Factors:
        """Return the factors of both together.

        >>> Factors(products=1.5).times(Factors(products=2.0, host=3.0)).values
        {'products': 3.0, 'host': 3.0}
        """
        return replace(self, **{name: getattr(self, name) * getattr(others, name) for name in SPREADS})

    @property
    def values(self) -> dict[str, Any]:
        """The attributes that are not at their defaults."""
        present = {attribute.name: (getattr(self, attribute.name), attribute.default) for attribute in fields(self)}
        return {name: value for name, (value, default) in present.items() if value != default}

    def _report(self) -> Report:
        rows = [[name, f"{getattr(self, name):.3f}"] for name in SPREADS]
        many = (
            f"{self.steps} measured steps: mean error of their"
            if self.steps != 1
            else "1 measured step: mean error of its"
        )
        errors = f"{percent(self.before)} before, {percent(self.after)} after"
        return Report(
            rows, ["Factor", "Value"], "lr", below=[f"Fitted to {many} seconds {errors}"] if self.steps else []
        )


def factors_of(values: Mapping[str, Any]) -> Factors:
    """Return the factors that a table of a file describes. Raise ``InputError`` for an unknown one.

    >>> factors_of({"products": 1.2}) == Factors(products=1.2)
    True
    """
    try:
        return Factors(**values)
    except TypeError as error:
        raise InputError(f"factors: {error}") from error


def calibrated_factors(
    predict: Callable[[Factors], Sequence[float]],
    seconds: Sequence[float],
    further: Sequence[float] = (),
    names: Sequence[str] = tuple(SPREADS),
) -> Factors:
    """Return the factors that measured steps ask for, with the errors of their seconds before and after.

    Args:
        predict: factors -> the predicted seconds of each step, then a prediction for each further measurement.
        seconds: measured seconds of each step.
        names: of the factors that are fitted; the others stay 1.

    >>> factors = calibrated_factors(lambda factors: [factors.products], [1.3], names=["products"])
    >>> 1.2 < factors.products < 1.3, factors.steps, round(factors.before, 2)
    (True, 1, 0.23)
    """

    def of(values: Sequence[float]) -> Factors:
        by_name: dict[str, Any] = dict(zip(names, values, strict=True))
        return Factors(**by_name)

    spreads, common = [SPREADS[name] for name in names], [_COMMON.get(name, 0.0) for name in names]
    factors = of(fitted(lambda values: predict(of(values)), [*seconds, *further], spreads, common))
    before, after = (_error(predict(assumed), seconds) for assumed in (Factors(), factors))
    return replace(factors, steps=len(seconds), before=before, after=after)


def _error(predicted: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the mean error of the first predictions, which are of steps."""
    ratios = [prediction / measured for prediction, measured in zip(predicted, seconds, strict=False)]
    return sum(abs(ratio - 1) for ratio in ratios) / len(ratios)


def fitted(
    predict: Callable[[Sequence[float]], Sequence[float]],
    measured: Sequence[float],
    spreads: Sequence[float],
    common: Sequence[float],
) -> list[float]:
    """Return the factors with which predictions meet measurements, as far as their spreads allow.

    Args:
        predict: factors -> a prediction > 0 for each measurement.
        spreads: standard deviation of the logarithm of each factor, by itself.
        common: the same of what all factors have in common, such as a slower clock.

    >>> both = fitted(lambda factors: [3 * factors[0], 3 * factors[0] + factors[1]], [6.0, 7.0], [1.0, 1.0], [0.0, 0.0])
    >>> [round(factor, 1) for factor in both]
    [2.0, 1.0]
    """
    wanted = [log(value) for value in measured]
    logarithms = [0.0] * len(spreads)

    def predicted(at: Sequence[float]) -> list[float]:
        return [log(value) for value in predict([exp(value) for value in at])]

    base, columns = predicted(logarithms), []
    for index in range(len(spreads)):
        moved = [_STEP * (position == index) for position in range(len(spreads))]
        columns.append([(after - before) / _STEP for after, before in zip(predicted(moved), base, strict=True)])
    slopes = torch.tensor(columns, dtype=torch.float64)  # of a few logarithms that are nearly linear: taken once
    shared = torch.tensor(common, dtype=torch.float64)
    stiffness = torch.linalg.inv(torch.diag(torch.tensor(spreads, dtype=torch.float64) ** 2) + shared.outer(shared))
    for _ in range(_ROUNDS):
        missing = torch.tensor([goal - value for goal, value in zip(wanted, base, strict=True)], dtype=torch.float64)
        trust = 1 / (1 + (missing / (_FAR * _NOISE)) ** 2)
        weighted = slopes * trust / _NOISE**2
        pull = weighted @ missing - stiffness @ torch.tensor(logarithms, dtype=torch.float64)
        change = torch.linalg.solve(weighted @ slopes.T + stiffness, pull)
        logarithms = [value + float(step) for value, step in zip(logarithms, change, strict=True)]
        base = predicted(logarithms)
    return [exp(value) for value in logarithms]

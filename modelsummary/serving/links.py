"""The time of collectives between the devices of a node."""

from __future__ import annotations

from collections.abc import Callable

from modelsummary.errors import InputError
from modelsummary.latency.predict import Target

__all__ = ["communication"]

# Fitted to all-reduces of 1 MiB to 1 GiB among 2 to 8 A100 with NVLink, each size doubled (vTrain, MICRO 2024,
# https://github.com/VIA-Research/vTrain, MIT): mean error 6.0 %; of odd groups 5.8 % when fitted to even ones.
_BASE, _STEP = 39.9e-6, 1.88e-6
_EFFICIENCY = 0.711
_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


def communication(target: Target, ranks: int) -> Callable[[str, int], float] | None:
    """Return the function from a collective and its bytes to seconds; None for a single device.

    A ring moves ``(n - 1) / n`` of the bytes per pass; an all-reduce takes two passes.

    Raises:
        InputError: the links between devices are not known.
    """
    if ranks == 1:
        return None
    if target.model is None or target.model.spec.interconnect is None:
        raise InputError(f"tensor={ranks}: the links between devices are not known for {target.name}")
    bandwidth = target.model.spec.interconnect / 2 * _EFFICIENCY

    def seconds(name: str, nbytes: int) -> float:
        passes = _PASSES[name]
        return _BASE + passes * (ranks - 1) * (_STEP + nbytes / ranks / bandwidth)

    return seconds

"""The error of a step that raised: its phase, torch's error, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from modelsummary.errors import ModelSummaryError, StepError, in_short

__all__ = ["as_step_error"]

_REMEDIES = {
    "forward": "; mode='inference' runs the forward without gradients",
    "loss": "; loss takes the model's result and returns the scalar that you train on",
    "backward": "; pass loss=, a function from the model's result to the scalar that you train on, or mode='inference'",
    "step": "; pass another optimizer",
}


@contextmanager
def as_step_error(doing: Callable[[], str], remedies: Mapping[str, str] = _REMEDIES) -> Iterator[None]:
    """Run a step in the body. Raise ``StepError`` if it raises anything but the library's own errors.

    Args:
        doing: returns what runs: ``"forward"``, ``"loss"``, ``"backward"``, or ``"step"`` for the optimizer's.
        remedies: phase -> what to do; default: for ``memory`` and the predictions that run the same step.

    >>> with as_step_error(lambda: "backward"):
    ...     raise NotImplementedError("derivative for aten::nextafter is not implemented")
    Traceback (most recent call last):
    modelsummary.errors.StepError: the backward of the step failed: NotImplementedError: derivative for ...
    """
    try:
        yield
    except ModelSummaryError:
        raise
    except Exception as error:
        raise StepError(_message(error, doing(), remedies), doing()) from error


def _message(error: Exception, phase: str, remedies: Mapping[str, str]) -> str:
    what = "optimizer" if phase == "step" else phase
    remedy = remedies.get(phase, "")
    if "more than 1 value per channel" in str(error):
        remedy = "; batch normalisation that trains needs a batch of two or more, or call model.eval()"
    return f"the {what} of the step failed: {in_short(error)}{remedy}"

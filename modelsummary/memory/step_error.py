"""The error of a step that raised: its phase, torch's error, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from modelsummary.errors import ModelSummaryError, StepError

__all__ = ["explained"]

_REMEDIES = {
    "forward": "; mode='inference' runs the forward without gradients",
    "loss": "; loss takes the model's result and returns the scalar that you train on",
    "backward": "; pass loss=, a function from the model's result to the scalar that you train on, or mode='inference'",
    "step": "; pass another optimizer",
}


@contextmanager
def explained(doing: Callable[[], str], remedies: Mapping[str, str] = _REMEDIES) -> Iterator[None]:
    """Run a step in the body. Raise ``StepError`` if it raises anything but the library's own errors.

    Args:
        doing: returns what runs: ``"forward"``, ``"loss"``, ``"backward"``, or ``"step"`` for the optimizer's.
        remedies: phase -> what to do; default: for ``memory`` and the predictions that run the same step.

    >>> with explained(lambda: "backward"):
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
    text = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    what = "optimizer" if phase == "step" else phase
    remedy = remedies.get(phase, "")
    if "more than 1 value per channel" in text:
        remedy = "; batch normalisation that trains needs a batch of two or more, or call model.eval()"
    return f"the {what} of the step failed: {type(error).__name__}: {text}{remedy}"

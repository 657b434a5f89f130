"""The error of a step that raised: its phase, torch's error, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch.utils.checkpoint import CheckpointError

from modelsummary.capture.observer import OverwrittenError
from modelsummary.errors import InputError, ModelSummaryError, StepError, in_short

__all__ = ["NeedsValuesError", "as_step_error", "remedies_for"]


class NeedsValuesError(InputError):
    """Error for a step that needs the values of tensors, of a model that has none.

    Attributes:
        reason: the operator that needs them.
        phase: what ran: ``"forward"``, ``"loss"``, ``"backward"``, or ``"step"`` for the optimizer's.
    """

    def __init__(self, reason: str, device: object, phase: str = "forward") -> None:
        super().__init__(
            f"{reason}, so the step must run for real: on the model's device ({device}), with its dtype, and with "
            "values"
        )
        self.reason, self.phase = reason, phase


_RUNS_AGAIN = (
    "a checkpointed module runs again and must do the same: turn off a cache that it fills, as by use_cache=False"
)
_CONVERTED = (
    "dtype= converts parameters, buffers and inputs, but not what the forward casts or creates itself: "
    "pass autocast= instead"
)


def remedies_for(
    *, train: bool, forward_only: str = "mode='inference'", converted: bool = False, checkpointed: bool = False
) -> dict[str, str]:
    """Return what to do, by phase; a forward without gradients in the model's own dtype leaves nothing to change.

    Args:
        train: the step has a backward.
        forward_only: argument with which the caller runs the forward alone; empty if it has none.
        converted: the step runs in another dtype than the model's own.
        checkpointed: modules run under activation checkpointing.

    >>> remedies_for(train=True)["forward"]
    "mode='inference' runs the forward without gradients"
    """
    converting = _CONVERTED if converted else ""
    alone = f"{forward_only} runs the forward without gradients" if forward_only else ""
    if not train:
        return {"forward": converting}
    return {
        "forward": "; ".join(filter(None, (converting, alone))),
        "loss": "loss takes the model's result and returns the scalar that you train on",
        "backward": _RUNS_AGAIN
        if checkpointed
        else "pass loss=, a function from the model's result to the scalar that you train on"
        + (f", or {forward_only}" if forward_only else ""),
        "step": "pass another optimizer, or a function from parameters to an optimizer",
    }


@contextmanager
def as_step_error(doing: Callable[[], str], remedies: Mapping[str, str], owner: str = "the step") -> Iterator[None]:
    """Run a step in the body. Raise ``StepError`` if it raises anything but the library's own errors.

    Args:
        doing: returns what runs: ``"forward"``, ``"loss"``, ``"backward"``, or ``"step"`` for the optimizer's.
        remedies: phase -> what to do, as returned by ``remedies_for``.
        owner: what runs, for the message: the step, or the name of one of several models.

    >>> with as_step_error(lambda: "backward", {}):
    ...     raise NotImplementedError("derivative for aten::nextafter is not implemented")
    Traceback (most recent call last):
    modelsummary.errors.StepError: the backward of the step failed: NotImplementedError: derivative for ...
    """
    try:
        yield
    except ModelSummaryError:
        raise
    except Exception as error:
        phase = doing()
        what = "optimizer" if phase == "step" else phase
        line = error.line if isinstance(error, OverwrittenError) else None
        remedy = _remedy(error) or remedies.get(phase, "")
        raise StepError(f"the {what} of {owner} failed: {in_short(error)}", phase, line, remedy) from error


def _remedy(error: Exception) -> str:
    """Return what to do about an error that tells; an empty string for another one."""
    if "modified by an inplace operation" in str(error) or "modified inplace" in str(error):
        return "the forward must write a new tensor there (x = x + 1 for x += 1), or change a clone"
    if "more than 1 value per channel" in str(error):
        return "batch normalisation that trains needs a batch of two or more, or call model.eval()"
    return _RUNS_AGAIN if isinstance(error, CheckpointError) else ""

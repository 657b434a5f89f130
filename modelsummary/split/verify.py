"""Compare stages with the model that they were cut from: outputs, gradients, buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import nan
from typing import Any

import torch
from torch import Tensor, nn

from modelsummary.capture.containers import tensors_of
from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.modules import modules_of
from modelsummary.capture.run import running
from modelsummary.capture.templates import leaves_of, structure_of, taken_apart
from modelsummary.errors import SplitError
from modelsummary.split.stage import Inputs, Stage

__all__ = ["StageVerification", "run_detached", "verify"]


@dataclass(frozen=True)
class StageVerification:
    """The largest absolute differences between a model and its stages; 0.0 means bit-equal.

    Attributes:
        outputs: largest difference between the results.
        gradients: largest difference between the gradients of parameters and inputs; nan if the model's own backward
            raises an error.
        buffers: largest difference between the buffers after the run.
        compared: number of tensors compared.
    """

    outputs: float
    gradients: float
    buffers: float
    compared: int


def verify(
    model: nn.Module, stages: Sequence[nn.Sequential], inputs: Inputs, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> StageVerification:
    """Run and compare a model and its stages, as ``Stages.verify`` does."""
    inputs.bind(args, kwargs)
    _check_values(model, (args, kwargs))
    call = CallArguments(args, kwargs, None)

    def run(
        forward: Callable[..., tuple[Any, Callable[[list[Tensor]], None]]], *, differentiates: bool
    ) -> dict[str, dict[str, Tensor]]:
        with running(modules_of(model), call, on_shapes=False, grad=True, as_is=True) as (_, args_copy, kwargs_copy):
            for parameter in model.parameters():
                parameter.grad = None
            out, backward = forward(args_copy, kwargs_copy)
            out = taken_apart(out)
            outputs = [leaf for leaf in leaves_of(out) if isinstance(leaf, Tensor)]
            if differentiates:
                backward(outputs)
            input_tensors = [leaf for leaf in leaves_of((args_copy, kwargs_copy)) if isinstance(leaf, Tensor)]
            tensors = [
                *model.named_parameters(),
                *((f"input {index}", tensor) for index, tensor in enumerate(input_tensors)),
            ]
            return {
                "structure": {str(structure_of(out)): torch.zeros(())},
                "outputs": {str(index): output.detach().clone() for index, output in enumerate(outputs)},
                "gradients": {name: tensor.grad.clone() for name, tensor in tensors if tensor.grad is not None},
                "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
            }

    def whole(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Callable[[list[Tensor]], None]]:
        return model(*args, **kwargs), _backward

    def parts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Callable[[list[Tensor]], None]]:
        return run_detached(stages, inputs, args, kwargs)

    differentiates = True
    try:
        expected = run(whole, differentiates=True)
    except RuntimeError:  # probably the backward; an error of the forward is raised again
        expected, differentiates = run(whole, differentiates=False), False
    actual = run(parts, differentiates=differentiates)
    differences = {kind: _difference(kind, expected[kind], actual[kind]) for kind in expected}
    compared = sum(map(len, expected.values())) - 1
    gradients = differences["gradients"] if differentiates else nan
    return StageVerification(differences["outputs"], gradients, differences["buffers"], compared)


def _check_values(model: nn.Module, inputs: Any) -> None:
    """Raise ``SplitError`` if a tensor of the model or an input has no values."""
    tensors = chain(
        model.named_parameters(), model.named_buffers(), (("an input", tensor) for tensor in tensors_of(inputs))
    )
    name = next((name for name, tensor in tensors if tensor.is_meta), "")
    if name or torch.get_default_device().type == "meta":
        where = f"{name} is on meta" if name else 'torch.device("meta") is the default device'
        raise SplitError(
            f"verify compares values, and {where}, which has none; run it on a model and inputs with values"
        )


def run_detached(
    stages: Sequence[nn.Sequential], inputs: Inputs, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Callable[[list[Tensor]], None]]:
    """Run each stage with its own autograd graph. Return the result, and a function that runs the backward of all."""
    links: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []  # results of a stage, inputs of the next one
    first = stages[0]
    value = first(*args, **kwargs) if isinstance(first, Stage) else first(*inputs.bind(args, kwargs).values())
    for stage in stages[1:]:
        sent = value if isinstance(value, tuple) else (value,)
        received = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in sent)
        links.append((sent, received))
        value = stage(*received)

    def backward(outputs: list[Tensor]) -> None:
        _backward(outputs)
        for sent, received in reversed(links):
            pairs = [(tensor, leaf.grad) for tensor, leaf in zip(sent, received, strict=True) if leaf.grad is not None]
            if pairs:
                torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])

    return value, backward


def _backward(outputs: list[Tensor]) -> None:
    """Run the backward from all outputs, with a different gradient for each element."""
    with_grad = list({id(output): output for output in outputs if output.requires_grad}.values())
    if with_grad:
        grads = [
            torch.cos(torch.arange(output.numel(), device=output.device)).view(output.shape).to(output)
            for output in with_grad
        ]
        torch.autograd.backward(with_grad, grads)


def _difference(kind: str, expected: dict[str, Tensor], actual: dict[str, Tensor]) -> float:
    """Return the largest difference. Raise ``SplitError`` if it exceeds rounding."""
    if expected.keys() != actual.keys():
        wrong = sorted(expected.keys() ^ actual.keys())
        raise SplitError(
            f"the stages differ from the model: {kind} {wrong[:3]} exist on one side only; please report this"
        )
    largest = 0.0
    for name, one in expected.items():
        other = actual[name]
        if one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other):
            continue
        try:
            # A tensor that crosses into several stages sums its gradients in another order: allow rounding errors
            # relative to the largest value.
            size = _size(one)
            scaled = (other / size, one / size) if size > 1 else (other, one)
            torch.testing.assert_close(*scaled, equal_nan=True)
        except AssertionError as error:
            detail = " ".join(str(error).split())[:200]
            raise SplitError(
                f"the stages differ from the model: {kind} {name!r} differ: {detail}; please report this"
            ) from None
        largest = max(largest, float((one.double() - other.double()).abs().nan_to_num().max()))
    return largest


def _size(tensor: Tensor) -> float:
    """Return the largest absolute value, at least 1; 1 for integers, which must be equal."""
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return 1.0
    return max(float(tensor.abs().nan_to_num(posinf=0.0).max()), 1.0)

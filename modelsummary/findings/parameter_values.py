"""Values of parameters with which a model does not train, where there are values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import sqrt

import torch
from torch import Tensor

from modelsummary.findings.evidence import Evidence
from modelsummary.findings.ruleset import Defect, rule

_SAMPLE = 65_536  # elements of a weight that are looked at first
_LARGEST, _SMALLEST = 10.0, 0.01  # standard deviation times the square root of the inputs; usual rules give 0.4 to 1.8
_FEWEST = 256  # elements of which a standard deviation says something
_KEEPS_ZERO = frozenset("aten.relu aten.gelu aten.silu aten.tanh aten.leaky_relu".split())


@rule("P701", "weight-constant", "error")
def weight_constant(evidence: Evidence) -> Iterator[Defect]:
    """Yield trained weights of products and convolutions that all have the same value, apart from zero.

    All outputs of such a layer are equal and get equal gradients, so they stay equal.
    """
    for _, name, weight, inputs in _weights(evidence):
        if 1 < inputs < weight.numel() and (value := _constant(weight)):
            fqn, _, local = name.rpartition(".")
            what = f"all elements of {local} are {value:.4g}, so that all outputs stay equal"
            yield Defect(what, "initialise it randomly", (fqn, 0), nbytes=weight.nbytes, is_call=False)


@rule("P702", "zero-after-zero", "error")
def zero_after_zero(evidence: Evidence) -> Iterator[Defect]:
    """Yield layers with a weight of zeros whose input is the result of zeros: neither ever gets a gradient.

    A single layer of zeros trains, as at the end of a residual branch; two in succession do not.
    """
    zeros = {
        storage
        for name, storage in evidence.trace.tensors.items()
        if name in evidence.parameters
        and _has_values(evidence.parameters[name])
        and _constant(evidence.parameters[name]) == 0
    }
    if not zeros:
        return
    silent: set[int] = set()  # storages whose elements are zero because of weights
    for index, call in evidence.forward():
        run = evidence.run(index)
        if not run.reads or not run.makes:
            continue
        weights = [storage for storage in run.reads if storage in evidence.weights]
        if call.cost.macs and weights:
            matrices = [storage for storage in weights if evidence.parameters[evidence.weights[storage]].dim() > 1]
            if matrices and zeros.issuperset(matrices) and not silent.isdisjoint(run.reads):
                what = "has zeros for weights, and its input comes from zeros, so that neither gets a gradient"
                yield Defect(what, "initialise one of the two randomly", evidence.row(index), is_call=False)
            if zeros.issuperset(weights):
                silent.update(run.makes)
        elif (call.name in _KEEPS_ZERO or call.rule.facts.casts or call.rule.facts.copies) and run.reads[0] in silent:
            silent.update(run.makes)


@rule("P703", "weight-scale")
def weight_scale(evidence: Evidence) -> Iterator[Defect]:
    """Yield weights of products and convolutions that let values grow far, and layers in succession that shrink them.

    The variance of results is the one of inputs times the inputs of each output times the variance of weights; rules
    for initialisation (Glorot and Bengio 2010; He et al. 2015) keep the product near one. A single layer near zero
    trains as one of zeros does, as at the end of a branch. Weights that are embeddings as well are left out, and
    weights of one value, which have rules of their own.
    """
    gains: dict[int, float] = {}
    for index, name, weight, inputs in _weights(evidence):
        storage = evidence.trace.tensors[name]
        is_embedding = any(evidence.call(reader).rule.gathers for reader in evidence.readers[storage])
        if weight.numel() < _FEWEST or not weight.is_floating_point() or is_embedding:
            continue
        gain = gains[index] = float(_sample(weight).float().std()) * sqrt(inputs)
        if gain > _LARGEST or (0 < gain < _SMALLEST and _follows_small(evidence, index, gains)):
            fqn, _, local = name.rpartition(".")
            factor = "grow" if gain > 1 else "shrink once more"
            what = f"the spread of {local} lets values {factor} by about {gain:.2g}; usual rules give about 1"
            yield Defect(what, "initialise it by torch.nn.init.kaiming_uniform_ or the like", (fqn, 0), is_call=False)


def _follows_small(evidence: Evidence, index: int, gains: Mapping[int, float]) -> bool:
    """Return True if the input of an operator comes from a weight that shrinks values, with nothing to undo it."""
    inputs = [storage for storage in evidence.run(index).reads if storage not in evidence.weights]
    makers = [list(evidence.chain(storage)) for storage in inputs]
    return any(chain and gains.get(chain[-1], 1.0) < _SMALLEST for chain in makers)


def _weights(evidence: Evidence) -> Iterator[tuple[int, str, Tensor, int]]:
    """Yield operator, name, weight, and inputs of each output, of the trained weights of products and convolutions."""
    seen: set[int] = set()
    for index, call in evidence.forward():
        run = evidence.run(index)
        if not call.cost.macs or not call.outputs or not call.outputs[0].numel:
            continue
        for spec, storage in zip(call.tensors, run.reads, strict=False):
            name = evidence.weights.get(storage)
            if name is None or storage in seen or len(spec.shape) < 2:
                continue
            seen.add(storage)
            weight = evidence.parameters[name]
            if weight.requires_grad and _has_values(weight) and weight.dim() >= 2:
                yield index, name, weight.detach(), call.cost.macs // call.outputs[0].numel


def _has_values(tensor: Tensor) -> bool:
    return not tensor.is_meta and tensor.layout is torch.strided and type(tensor) in (Tensor, torch.nn.Parameter)


def _sample(tensor: Tensor) -> Tensor:
    """Return some elements, evenly spread."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(flat.numel() // _SAMPLE, 1)]


def _constant(tensor: Tensor) -> float | None:
    """Return the value of all elements; None if they differ."""
    flat = tensor.detach().reshape(-1)
    if not flat.numel():
        return None
    is_constant = all(bool((part == flat[0]).all()) for part in (flat[:64], _sample(flat), flat))
    return float(flat[0]) if is_constant else None

"""Batch norms: biases that they subtract, statistics of few values, and statistics that change though frozen."""

from __future__ import annotations

from collections.abc import Iterator

from modelsummary import _torch
from modelsummary.findings.evidence import Evidence
from modelsummary.findings.ruleset import Defect, rule
from modelsummary.operators.operator_calls import OperatorCall, TensorSpec
from modelsummary.operators.operator_work import Work

_FEWEST = 32  # values of a variance: its standard error is then a quarter of it


@rule("N601", "bias-before-batch-norm")
def bias_before_batch_norm(evidence: Evidence) -> Iterator[Defect]:
    """Yield biases of layers before a batch norm or an instance norm, which subtracts them again."""
    for index, call in evidence.forward():
        if call.rule.op_class != "batch_norm" or not evidence.run(index).reads:
            continue
        source = evidence.run(index).reads[0]
        maker = evidence.maker.get(source)
        if maker is None or evidence.readers[source] != [index] or evidence.is_held(source):
            continue
        bias = _bias_of(evidence.call(maker))
        # a norm over several rows of channels, as an instance norm of a flattened tensor, subtracts them as well
        if bias is None or bias.numel != evidence.call(maker).outputs[0].shape[1]:
            continue
        result = evidence.call(maker).outputs[0]
        seconds = 0.0
        if evidence.trace.train:  # its gradient is a sum over the gradient of the result
            sizes = bias.numel, result.numel // max(bias.numel, 1)
            work = Work("aten.sum", "reduction", result.dtype, sizes, 0, result.nbytes, is_backward=True)
            seconds = evidence.seconds_of(work)
        kind = "instance" if isinstance(evidence.module(index), _torch.InstanceNorm) else "batch"
        yield Defect(
            f"has a bias that the {kind} norm after it subtracts",
            "pass bias=False",
            evidence.row(maker),
            nbytes=bias.nbytes,
            seconds=seconds,
            is_call=False,
        )


def _bias_of(call: OperatorCall) -> TensorSpec | None:
    """Return the bias that a convolution or a product adds; None if it adds none."""
    if not call.cost.macs:
        return None
    bound = call.bound
    bias = bound.get("bias", bound.get("self") if "mat1" in bound else None)
    return bias if isinstance(bias, TensorSpec) and len(bias.shape) == 1 else None


@rule("N602", "few-values-in-batch-norm")
def few_values_in_batch_norm(evidence: Evidence) -> Iterator[Defect]:
    """Yield batch norms in training mode whose statistics are of one sample, or of less than 32 values."""
    for index, call in evidence.forward():
        if call.rule.op_class != "batch_norm" or not call.tensors:
            continue
        bound, spec = call.bound, call.tensors[0]
        trains = bound.get("training", bound.get("train")) is True
        # without running statistics it normalises samples or weights, as instance norms do
        if not trains or not isinstance(bound.get("running_mean"), TensorSpec) or len(spec.shape) < 2:
            continue
        if isinstance(evidence.module(index), _torch.InstanceNorm):
            continue
        values = spec.numel // max(spec.shape[1], 1)
        remedy = "train with a larger batch, use a group norm, or call eval() on it"
        if spec.shape[0] == 1:
            yield Defect("normalises one sample by itself in training mode", remedy, evidence.row(index), is_call=False)
        elif values < _FEWEST:
            what = f"has statistics of {values} values per channel in training mode"
            yield Defect(what, remedy, evidence.row(index), is_call=False)


@rule("N603", "frozen-batch-norm-trains")
def frozen_batch_norm_trains(evidence: Evidence) -> Iterator[Defect]:
    """Yield batch norms with frozen parameters whose running statistics still change, beside trained parameters."""
    if not any(parameter.requires_grad for parameter in evidence.parameters.values()):
        return
    for fqn, module in evidence.modules.items():
        if not isinstance(module, _torch.BatchNorm) or fqn not in evidence.called:
            continue
        is_frozen = module.weight is not None and not module.weight.requires_grad
        if is_frozen and module.training and module.track_running_stats:
            what = "is frozen, but in training mode, so that its running statistics change"
            yield Defect(what, "call eval() on it after model.train()", (fqn, 0), is_call=False)

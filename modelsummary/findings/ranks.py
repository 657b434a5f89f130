"""What keeps a model on one device: what a split, FSDP and tensor parallelism refuse, as their own answers say."""

from __future__ import annotations

from collections.abc import Iterator

from modelsummary.errors import ModelSummaryError, SplitError, UndividedError
from modelsummary.findings.evidence import Evidence
from modelsummary.findings.ruleset import Defect, reason_and_remedy, rule
from modelsummary.layer_info import CallKey

_RANKS = 2
_LEAST_SHARE = 0.01  # of the multiply-adds of the model


@rule("B954", "not-split", on_request=True)
def not_split(evidence: Evidence) -> Iterator[Defect]:
    """Yield why ``split(2)`` refuses the model, or modules that it cannot cut and that make its stages uneven."""
    try:
        stages = evidence.split(_RANKS)
    except SplitError as error:
        if not type(evidence.live.model).__module__.startswith("torch."):
            yield Defect(f"split() refuses it: {error}", "change the forward, or run it as one stage", is_call=False)
        return
    for limit in stages.limits:
        if limit.name in evidence.parents:
            what = f"is kept whole by split(): {limit.reason}"
            yield Defect(what, "change its forward, or split elsewhere", (limit.name, 0), is_call=False)


@rule("B955", "not-an-fsdp-unit", on_request=True)
def not_an_fsdp_unit(evidence: Evidence) -> Iterator[Defect]:
    """Yield blocks that FSDP2 cannot wrap, so that their parameters stay gathered with the model's."""
    try:
        plan = evidence.make_plan(shard=_RANKS)
    except ModelSummaryError as error:
        yield from _refused(error)
        return
    for fqn, why in plan.gathered_with_root.items():
        if fqn in evidence.parents or fqn not in evidence.called:  # a layer by itself is too small to be a unit
            what, remedy = reason_and_remedy(why)
            nbytes = sum(parameter.nbytes for parameter in evidence.modules[fqn].parameters())
            what = f"fully_shard cannot wrap it: {what}"
            yield Defect(what, remedy or "change the forward", (fqn, 0), nbytes=nbytes, is_call=False)


@rule("B956", "whole-activations", on_request=True)
def whole_activations(evidence: Evidence) -> Iterator[Defect]:
    """Yield layers that keep whole activations when ``parallel_plan(tensor=2)`` divides the others.

    Layers of less than a hundredth of the multiply-adds, and heads whose result the model returns, are left out.
    """
    large = _large_products(evidence)
    if not large:
        return
    try:
        plan = evidence.make_plan(tensor=_RANKS)
        reasons = plan.replicated | {layer.fqn: layer.reason for layer in plan.layers if layer.reason}
    except UndividedError as error:
        if not error.reasons:
            yield from _refused(error)
            return
        reasons = error.reasons
    except ModelSummaryError as error:
        yield from _refused(error)
        return
    results = evidence.trace.results
    heads = {evidence.row(evidence.maker[storage]) for storage in results if storage in evidence.maker}
    for fqn, why in reasons.items():
        calls = [key for key in large.keys() - heads if f"{key[0]}.".startswith(f"{fqn}.")]
        if calls:
            what, remedy = reason_and_remedy(why)
            what = f"is not divided by tensor parallelism: {what}"
            yield Defect(
                what, remedy or "change the forward", (fqn, 0), nbytes=sum(large[key] for key in calls), is_call=False
            )


def _large_products(evidence: Evidence) -> dict[CallKey, int]:
    """Return the calls of linear layers with a share of the multiply-adds, and the bytes of their results."""
    total = sum(call.cost.macs for _, call in evidence.forward())
    large: dict[CallKey, int] = {}
    for index, call in evidence.forward():
        row = evidence.row(index)
        if row is not None and call.rule.facts.multiplies and call.cost.macs >= _LEAST_SHARE * total > 0:
            large[row] = large.get(row, 0) + sum(spec.nbytes for spec in call.outputs)
    return large


def _refused(error: ModelSummaryError) -> Iterator[Defect]:
    what, remedy = reason_and_remedy(str(error))
    yield Defect(what, remedy or "change the forward", is_call=False)

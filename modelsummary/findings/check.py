"""Check a model: observe one step, and ask each rule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from modelsummary.capture.live import LiveModel
from modelsummary.capture.observe import observed
from modelsummary.capture.run import no_collection
from modelsummary.capture.step_error import NeedsValuesError
from modelsummary.capture.step_plan import StepPlan
from modelsummary.capture.trace import Trace
from modelsummary.devices.device_spec import DeviceSpec
from modelsummary.errors import InputError, StepError
from modelsummary.findings import (  # noqa: F401  (they register their rules)
    compilers,
    gradients,
    hazards,
    norm_modes,
    parameter_values,
    precision,
    ranks,
    repeated_work,
    tensor_cores,
    unused,
)
from modelsummary.findings.evidence import Evidence, Failure
from modelsummary.findings.finding import Finding, Findings, Kind
from modelsummary.findings.ruleset import RULES, chosen, reason_and_remedy
from modelsummary.latency import TimeOptions, target, time_plan
from modelsummary.layer_info import LayerInfo
from modelsummary.operators.operator_calls import Line
from modelsummary.subject import subject_of

if TYPE_CHECKING:
    from modelsummary.parallel import ParallelPlan
    from modelsummary.split import Stages

__all__ = ["check_model"]

_WITHOUT_GRADIENTS = "mend the forward: without gradients it runs"
_LEAST_SHARE = 1e-3  # of the step's time, for rules about time alone


def check_model(
    live: LiveModel,
    root: LayerInfo,
    device: DeviceSpec | torch.device | str,
    options: TimeOptions,
    select: Sequence[str] | str | None = None,
    ignore: Sequence[str] | str | None = None,
    fallback_reason: str | None = None,
    *,
    split: Callable[[int], Stages],
    make_plan: Callable[..., ParallelPlan],
) -> Findings:
    """Return what the rules find in one step, with its backward if a parameter is trained.

    Args:
        split, make_plan: ``Statistics.split`` and ``parallel_plan`` of the model, for rules on request.

    Raises:
        InputError: an argument is unusable.
        StepError: the loss raised, or the forward also without gradients.
    """
    rules = chosen(select, ignore)
    prediction_target = target(device, options)
    trains = any(parameter.requires_grad for parameter in live.model.parameters())
    plan = time_plan(trains, None, options, root, device)
    with no_collection():
        plan, trace, failure = _observed(live, plan)
        planning: dict[str, Any] = {"split": split, "make_plan": make_plan}
        evidence = Evidence(live, plan, trace, prediction_target, failure, fallback_reason, **planning)
        findings = {rule.code: list(rule.findings(evidence)) for rule in rules}
        priced = [code for code, members in findings.items() if members and RULES[code].is_priced]
        for code in priced:
            findings[code] = _worth(findings[code], _LEAST_SHARE * evidence.step_seconds)
        all_findings = [finding for members in findings.values() for finding in members]
        _mark(root, all_findings)
        around = {finding.fqn: evidence.first_line_around(finding.fqn) for finding in all_findings}
        return Findings.of(
            all_findings,
            device=prediction_target.name,
            step_seconds=evidence.step_seconds,
            mode="train" if trace.train else "inference",
            rules={rule.code: (rule.name, rule.meaning) for rule in rules},
            notes=(*trace.notes, *evidence.notes),
            subject=subject_of(root, plan.dtype, plan.autocast),
            lines_around={fqn: line for fqn, line in around.items() if line is not None},
        )


def _mark(root: LayerInfo, findings: Sequence[Finding]) -> None:
    """Write the codes of the findings into the rows: of a call, or of all calls of a module."""
    codes: defaultdict[tuple[str | None, int | None], set[str]] = defaultdict(set)
    for finding in findings:
        codes[finding.fqn, finding.call_index].add(finding.code)
    for row in root.walk():
        row.findings = ", ".join(sorted(codes[row.fqn, row.call_index] | codes[row.fqn, None]))


def _worth(findings: list[Finding], least: float) -> list[Finding]:
    """Return the findings of kinds that cost at least so many seconds in all places together."""
    seconds: defaultdict[Kind, float] = defaultdict(float)
    for finding in findings:
        seconds[finding.kind] += finding.seconds
    return [finding for finding in findings if seconds[finding.kind] >= least]


def _observed(live: LiveModel, plan: StepPlan) -> tuple[StepPlan, Trace, Failure | None]:
    """Return the step that could be observed, and why it is not the one that was asked for."""
    try:
        return plan, _on_device(live, plan), None
    except NeedsValuesError:
        raise
    except (StepError, InputError) as error:
        is_of_user = plan.loss is not None and (isinstance(error, InputError) or error.phase == "loss")
        if not plan.train or is_of_user:
            raise
        forward = replace(plan, train=False, loss=None, checkpoint=())
        if isinstance(error, StepError):
            line = None if error.line is None else Line(*error.line)
            failure = Failure(error.message, error.remedy or _WITHOUT_GRADIENTS, line)
        else:
            failure = Failure(*reason_and_remedy(str(error)))
        return forward, _on_device(live, forward), failure


def _on_device(live: LiveModel, plan: StepPlan) -> Trace:
    """Return the trace on a device, or where the model is if the step needs values."""
    try:
        return observed(live, plan, storages=True, forward_only="")
    except NeedsValuesError:
        return observed(live, replace(plan, device=None), storages=True, forward_only="")

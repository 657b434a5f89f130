"""Modules that never run, buffers and results that nobody reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch.nn.parameter import is_lazy

from modelsummary import _torch
from modelsummary.findings.evidence import Evidence
from modelsummary.findings.ruleset import Defect, rule
from modelsummary.layer_info import CallKey
from modelsummary.operators.operator_calls import Line

__all__ = ["Origin", "by_origin", "modules_around", "silent_modules"]

_NAMED = 4  # operators in a message
_LEAST_SHARE = 1e-5  # of the bytes of parameters and buffers


def silent_modules(evidence: Evidence) -> set[str]:
    """Return the FQNs of the outermost modules with tensors that never run, and whose tensors nobody reads."""
    tensors = {name for name, storage in evidence.trace.tensors.items() if storage >= 0}
    read = {name for name in tensors if evidence.trace.tensors[name] in evidence.touched}
    read_in = {around for name in read for around in modules_around(name)}
    with_tensors = {around for name in evidence.trace.tensors for around in modules_around(name)}
    silent: set[str] = set()
    for fqn in evidence.modules:  # outer ones come first
        is_dead = fqn in with_tensors and fqn not in evidence.called and fqn not in read_in
        if is_dead and silent.isdisjoint(modules_around(fqn)):
            silent.add(fqn)
    return silent


def modules_around(name: str) -> Iterator[str]:
    """Yield the FQNs of the modules around a module, a parameter or a buffer, the model left out.

    >>> list(modules_around("block.fc.weight"))
    ['block.fc', 'block']
    """
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


@rule("U201", "module-never-runs", "error")
def module_never_runs(evidence: Evidence) -> Iterator[Defect]:
    """Yield modules with parameters or buffers that the forward never calls, and whose tensors nobody reads."""
    if not evidence.is_complete:
        return
    for fqn in sorted(silent_modules(evidence)):
        module = evidence.modules[fqn]
        tensors = [*module.parameters(), *module.buffers()]
        names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        missing = f"; no gradient for {', '.join(names[:4])}{' ...' if len(names) > 4 else ''}" if names else ""
        remedy = "call it or remove it; DistributedDataParallel waits for gradients of its parameters"
        nbytes = sum(tensor.nbytes for tensor in tensors)
        yield Defect(f"never runs{evidence.mode}{missing}", remedy, (fqn, 0), nbytes=nbytes, is_call=False)


@rule("U202", "buffer-never-read")
def buffer_never_read(evidence: Evidence) -> Iterator[Defect]:
    """Yield buffers of several elements that no operator of the forward reads, in modules that run.

    Counters and markers of one element are left out, and what is less than 1/100,000 of the model's bytes, such as the
    copy of frequencies that a rotary embedding keeps for longer texts.
    """
    if not evidence.is_complete:
        return
    silent = silent_modules(evidence)
    model = evidence.live.model
    total = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()) if not is_lazy(tensor))
    for fqn, module in evidence.modules.items():
        if fqn in silent or not silent.isdisjoint(modules_around(fqn)):
            continue
        for name, buffer in module._buffers.items():
            storage = evidence.trace.tensors.get(f"{fqn}.{name}".lstrip("."), -1)
            if buffer is None or buffer.numel() <= 1 or storage < 0 or storage in evidence.touched:
                continue
            if buffer.nbytes < _LEAST_SHARE * total:
                continue
            if isinstance(module, _torch.NormBase):  # the mode decides whether it reads its statistics
                continue
            remedy = "remove it, or compute it where it is used"
            yield Defect(f"buffer {name} is never read", remedy, (fqn, 0), nbytes=buffer.nbytes, is_call=False)


@rule("U203", "result-never-read", is_priced=True)
def result_never_read(evidence: Evidence) -> Iterator[Defect]:
    """Yield work whose result nobody reads: neither a later operator, nor the loss, nor the caller.

    Results that torch's own functions drop, and constants, are left out.
    """
    if not evidence.is_complete:
        return
    lines: defaultdict[tuple[CallKey | None, Line | None], set[int]] = defaultdict(set)
    for index, call in evidence.forward():
        if call.rule.launches_kernel:
            lines[evidence.row(index), evidence.line(index)].add(index)
    for origin in by_origin(evidence, evidence.dead):
        is_whole_line = lines[origin.row, origin.line] <= evidence.dead and evidence.is_of_model(origin.indices[0])
        if origin.is_call or is_whole_line:
            yield from origin.defects(evidence, "computes", "which nobody reads", "leave it out, or use it")


class Origin(NamedTuple):
    """Operators of one origin.

    Attributes:
        row: key of the module call.
        line: the line of the model's code.
        indices: the operators.
        is_call: whether they are all operators of the call.
    """

    row: CallKey | None
    line: Line | None
    indices: list[int]
    is_call: bool

    def defects(self, evidence: Evidence, verb: str, why: str, remedy: str) -> Iterator[Defect]:
        """Yield what these operators cost, unless they only make constants."""
        calls = [evidence.call(index) for index in self.indices]
        if not any(spec.numel > 1 for call in calls if not call.rule.overwrites for spec in call.tensors):
            return
        names = list(dict.fromkeys(call.name.rpartition(".")[2].strip("_") for call in calls))
        listed = ", ".join(names[:_NAMED]) + (" ..." if len(names) > _NAMED else "")
        nbytes, seconds = sum(call.cost.bytes_written for call in calls), sum(map(evidence.seconds, self.indices))
        yield Defect(f"{verb} {listed}, {why}", remedy, self.row, self.line, nbytes, seconds)


def by_origin(evidence: Evidence, indices: Iterable[int]) -> Iterator[Origin]:
    """Yield operators together that come from one module call: the outermost of which all operators are among them.

    Operators of calls that have others as well are together by their line.
    """
    chosen = set(indices)
    covered: set[int] = set()
    for call in evidence.trace.calls if chosen else ():  # outer ones come first
        span = range(call.begin, call.end)
        inside = {
            index for index in span if not evidence.run(index).is_view and evidence.call(index).rule.launches_kernel
        }
        if inside and chosen.issuperset(inside) and covered.isdisjoint(inside):
            members = [index for index in span if index in chosen]
            covered.update(members)
            yield Origin(call.key, evidence.line(members[0]), members, is_call=True)
    groups: defaultdict[tuple[CallKey | None, Line | None], list[int]] = defaultdict(list)
    for index in sorted(chosen - covered):
        groups[evidence.row(index), evidence.line(index)].append(index)
    for (row, line), members in groups.items():
        yield Origin(row, line, members, is_call=False)

"""Parameters that get no gradient, and gradients that nobody needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from modelsummary.findings.evidence import Evidence
from modelsummary.findings.ruleset import Defect, rule
from modelsummary.findings.unused import modules_around, silent_modules
from modelsummary.operators.operator_calls import Line

_UNREAD = "unread"
_NO_GRAD, _DETACHED, _INTEGERS = "no_grad", "detached", "integers"
_WORST_FIRST = (_DETACHED, _NO_GRAD, _INTEGERS, _UNREAD)
_Fate = tuple[str, Line | None]


@rule("G100", "step-fails", "error")
def step_fails(evidence: Evidence) -> Iterator[Defect]:
    """Yield a training step that raises, such as one that overwrites a tensor that the backward needs."""
    if evidence.failure is not None:
        what, remedy, line = evidence.failure
        yield Defect(what, remedy or "mend the forward", line=line, is_call=False)


@rule("G101", "parameter-never-used", "error")
def parameter_never_used(evidence: Evidence) -> Iterator[Defect]:
    """Yield trained parameters that no operator of the forward reads, in modules that run.

    They get no gradient. ``DistributedDataParallel`` waits for it and raises.
    """
    if not evidence.is_complete:
        return
    silent = silent_modules(evidence)
    unused = [
        name
        for name, storage in evidence.trained.items()
        if storage >= 0 and storage not in evidence.touched and silent.isdisjoint(modules_around(name))
    ]
    for fqn, names in _by_module(unused).items():
        what = f"{_listed(names)}: trained, but never used{evidence.mode}"
        nbytes = sum(evidence.parameters[f"{fqn}.{name}".lstrip(".")].nbytes for name in names)
        remedy = "use the parameter or remove it; DistributedDataParallel needs find_unused_parameters=True as it is"
        yield Defect(what, remedy, (fqn, 0), nbytes=nbytes, is_call=False)


@rule("G102", "parameter-under-no-grad", "error")
def parameter_under_no_grad(evidence: Evidence) -> Iterator[Defect]:
    """Yield trained parameters that are used only where gradients are off, so that they get none."""
    remedy = "run it with gradients, or say requires_grad_(False)"
    yield from _cut_off(evidence, _NO_GRAD, "trained, but used under no_grad alone", remedy)


@rule("G103", "parameter-detached", "error")
def parameter_detached(evidence: Evidence) -> Iterator[Defect]:
    """Yield trained parameters whose results are detached, so that they get no gradient."""
    yield from _cut_off(
        evidence, _DETACHED, "trained, but detached", "leave out detach(), or say requires_grad_(False)"
    )


@rule("G104", "result-not-in-loss", "error")
def result_not_in_loss(evidence: Evidence) -> Iterator[Defect]:
    """Yield trained parameters whose results do not reach the loss, so that they get no gradient."""
    remedy = "use the result in the loss (loss= is what check() trains on), or leave it out"
    yield from _cut_off(evidence, _UNREAD, "trained, but its result is not in the loss", remedy)


@rule("G105", "parameter-behind-integers", "error")
def parameter_behind_integers(evidence: Evidence) -> Iterator[Defect]:
    """Yield trained parameters that reach the loss through integers or comparisons alone, which have no gradient."""
    yield from _cut_off(
        evidence, _INTEGERS, "trained, but behind an operator without a gradient", "use a differentiable operator"
    )


@rule("G106", "frozen-layer-keeps-activations")
def frozen_layer_keeps_activations(evidence: Evidence) -> Iterator[Defect]:
    """Yield modules that keep activations for the backward though nothing up to them is trained.

    The backward runs through them for the gradient of an input that requires one.
    """
    without = set(evidence.trace.without_gradient)
    trained = {storage for name, storage in evidence.trained.items() if name not in without}
    first = min((reads for storage in trained for reads in evidence.readers[storage][:1]), default=0)
    before = {call.key for call in evidence.trace.calls if call.end <= first}
    nbytes: defaultdict[tuple[str, int], int] = defaultdict(int)
    for storage in evidence.trace.saved:
        is_needed_later = any(reader >= first for reader in evidence.readers[storage.identity])
        if storage.row in before and 0 <= storage.born < first and not is_needed_later:
            nbytes[storage.row] += storage.nbytes
    for row, kept in nbytes.items():
        what = "keeps activations, though nothing up to it is trained: an input requires a gradient"
        yield Defect(what, "run the frozen part under torch.no_grad(), or leave requires_grad off", row, nbytes=kept)


def _cut_off(evidence: Evidence, reason: str, what: str, remedy: str) -> Iterator[Defect]:
    """Yield the parameters without a gradient for one reason, by module."""
    if not evidence.trace.without_gradient or not evidence.is_complete:
        return
    fates = _fates(evidence)
    names_by_line: defaultdict[Line | None, list[str]] = defaultdict(list)
    for name in evidence.trace.without_gradient:
        storage = evidence.trace.tensors.get(name, -1)
        if storage in evidence.touched:
            fate, line = fates.get(storage, (_UNREAD, None))
            if fate == reason:
                names_by_line[line].append(name)
    for line, names in names_by_line.items():
        for fqn, locals_ in _by_module(names).items():
            yield Defect(f"{_listed(locals_)}: {what}{evidence.mode}", remedy, (fqn, 0), line, is_call=False)


def _fates(evidence: Evidence) -> dict[int, _Fate]:
    """Return why no gradient comes back to each storage: the worst reason on the paths from it, and its line."""
    fates: dict[int, _Fate] = {}
    for index in reversed(range(evidence.end)):
        run = evidence.run(index)
        line = run.line
        if run.is_view:
            if run.call.name != "aten.detach":
                continue
            fate: _Fate = _DETACHED, line
        elif not run.with_grad:
            fate = _NO_GRAD, line
        elif run.call.outputs and not any(spec.dtype.is_floating_point for spec in run.call.outputs):
            fate = _INTEGERS, line
        else:
            onward = [fates[storage] for storage in run.makes if storage in fates]
            fate = _worst(onward) if onward else (_UNREAD, line)
        for storage in evidence.reads(index):
            fates[storage] = _worst([fate, fates[storage]]) if storage in fates else fate
    return fates


def _worst(fates: list[_Fate]) -> _Fate:
    return min(fates, key=lambda fate: _WORST_FIRST.index(fate[0]))


def _by_module(names: list[str]) -> dict[str, list[str]]:
    modules: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        fqn, _, local = name.rpartition(".")
        modules[fqn].append(local)
    return modules


def _listed(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")

"""What must hold of every model. Each check gives facts; ``verdicts`` says which of them are as they should be."""

from __future__ import annotations

import copy
import inspect
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

import modelsummary
from modelsummary import DataDependentError, SplitError, Statistics, TraceError
from modelsummary.memory.step_options import OPTIMIZERS
from tests.untouched import untouched
from tests.zoo.counting import Count, count
from tests.zoo.example import Example
from tests.zoo.real_step import loss_of, real_step, tensors_in

__all__ = ["CHECKS", "UNTOUCHED", "Finding", "check", "warm_up"]

OPTIMIZER = "sgd-momentum"
BALANCE = 1.15
PEAK = 0.03


@dataclass
class Finding:
    """What one check found.

    Attributes:
        verdict: ``"yes"``; ``"no"``; ``"refused"``: the package said why it does not; ``"limit"``: nobody could;
            ``"none"``: there is nothing to judge.
        reason: why not yes, in a line.
        facts: the figures that were compared.
        seconds: that the check took.
    """

    verdict: str
    reason: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


class Subject:
    """A model under the checks, with what several of them need, made once."""

    def __init__(self, example: Example) -> None:
        self.example = example
        self._stats: Statistics | None = None
        self._counted: tuple[Count, int | None] | None = None
        self._stages: dict[int, Any] = {}

    @property
    def stats(self) -> Statistics:
        if self._stats is None:
            self._stats = statistics(self.example)
        return self._stats

    @property
    def counted(self) -> tuple[Count, int | None]:
        if self._counted is None:
            with own_randomness():
                self._counted = count(self.example)
        return self._counted

    def stages(self, n_stages: int) -> Any:
        """Stages, or the error that refused them."""
        if n_stages not in self._stages:
            try:
                by = "macs" if self.stats.total_mult_adds else "activation_bytes"
                self._stages[n_stages] = self.stats.split(n_stages, by=by)
            except SplitError as error:
                self._stages[n_stages] = error
        return self._stages[n_stages]


def statistics(example: Example) -> Statistics:
    """Summarise; everything by keyword in a dict, so that no argument is taken for one of ``Statistics``."""
    if example.args:
        return Statistics(example.model, example.args, **example.kwargs)
    return Statistics(example.model, example.kwargs)


def twin_call(example: Example) -> Any:
    """Run a copy of the model on copies of the inputs: a run may change a buffer, or a cache among the inputs."""
    return copy.deepcopy(example)()


@contextmanager
def own_randomness() -> Iterator[None]:
    """Put the random generators back after a run of the gate itself, so that only those of the package are judged."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(python)
    np.random.set_state(numpy)


def line(error: BaseException) -> str:
    """Type and text of an error, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


# ------------------------------------------------------------------------------------------ the checks


def summarised(subject: Subject) -> Finding:
    """``Statistics`` returns, and leaves the model as it was."""
    subject.stats  # noqa: B018
    return Finding("yes")


def on_shapes(subject: Subject) -> Finding:
    """Without computing; else the operator that forced a real run."""
    stats = subject.stats
    return Finding("yes" if stats.execution == "shape" else "no", stats.fallback_reason or "")


def macs(subject: Subject) -> Finding:
    """The multiply-adds of a real run, counted apart."""
    counted, torchs = subject.counted
    ours = subject.stats.total_mult_adds
    facts = {"macs": ours, "independent": counted.macs, "torch": torchs, "by_name": dict(counted.by_name)}
    if ours == counted.macs:
        return Finding("yes", facts=facts)
    return Finding("no", f"{ours:,} for {counted.macs:,} (torch's own counter: {torchs})", facts)


def params(subject: Subject) -> Finding:
    """The elements of the distinct parameters."""
    ours = subject.stats.total_params
    truth = sum({id(each): elements(each) for each in subject.example.model.parameters()}.values())
    return Finding("yes" if ours == truth else "no", "" if ours == truth else f"{ours:,} for {truth:,}")


def elements(parameter: Tensor) -> int:
    return 0 if isinstance(parameter, torch.nn.parameter.UninitializedTensorMixin) else parameter.numel()


def ledger(subject: Subject) -> Finding:
    """No operator is left uncounted."""
    names = {str(name): int(number) for name, number in subject.stats.uncounted_ops.items()}
    return Finding("no" if names else "yes", ", ".join(names), {"ledger": names})


def memory(subject: Subject) -> Finding:
    """Held after the forward and peak of a training step, against a real one on the CPU."""
    if not any(each.requires_grad for each in subject.example.model.parameters()):
        return Finding("none", "nothing is trained")
    for training in (True, False):  # a detector asks for targets in training
        example = copy.deepcopy(subject.example)
        example.model.train(training)
        try:
            with own_randomness():
                measured = real_step(copy.deepcopy(example), OPTIMIZERS[OPTIMIZER])
            break
        except Exception as error:
            failed = line(error)
    else:
        return Finding("none", f"a real step fails: {failed[:160]}")
    stats = statistics(example)
    with untouched(example.model):
        ours = stats.memory(optimizer=OPTIMIZER, loss=loss_of)
    before = ours.params + ours.buffers + ours.inputs + measured.optimizer_state
    facts = {
        "before": before,
        "held": ours.held_after_forward - before,
        "real_held": measured.held,
        "peak": ours.peak - before,
        "real_peak": measured.peak,
        "real_peak_without_workspace": measured.peak_without_workspace,
        "execution": ours.execution,
        "training": training,
    }
    facts["held_exact"] = facts["held"] == measured.held
    facts["peak_ratio"] = (before + facts["peak"]) / (before + measured.peak)
    facts["peak_ratio_without_workspace"] = (before + facts["peak"]) / (before + measured.peak_without_workspace)
    facts["step_ratio_without_workspace"] = facts["peak"] / max(measured.peak_without_workspace, 1)
    close = abs(facts["peak_ratio_without_workspace"] - 1) <= PEAK
    texts = []
    at = ours.peak_at
    if not (facts["held_exact"] and close):
        with own_randomness():
            for seed in (random.seed, np.random.seed, torch.manual_seed):
                seed(1)
            again = real_step(copy.deepcopy(example), OPTIMIZERS[OPTIMIZER])
        if again.held != measured.held:
            return Finding("none", f"by chance, a real step holds {measured.held:,} or {again.held:,} bytes", facts)
    if not facts["held_exact"]:
        texts.append(f"held {facts['held']:,} for {measured.held:,}")
    if not close:
        texts.append(
            f"peak {facts['peak']:,} for {measured.peak_without_workspace:,} over {before:,}"
            f" (at {at.operator} of {at.fqn}, {at.phase})"
        )
    return Finding("yes" if not texts else "no", "; ".join(texts), facts)


def split(n_stages: int) -> Callable[[Subject], Finding]:
    """The stages are the model, bit for bit, or there is a reason why there are none."""

    def run(subject: Subject) -> Finding:
        stages = subject.stages(n_stages)
        if isinstance(stages, SplitError):
            return Finding("refused", line(stages))
        example = subject.example
        try:
            found = stages.verify(*example.args, **example.kwargs)
        except SplitError as error:
            return Finding("no", line(error))
        facts = {"outputs": found.outputs, "gradients": found.gradients, "buffers": found.buffers}
        same = found.outputs == 0 and found.buffers == 0
        return Finding("yes" if same else "no", "" if same else f"differs: {facts}", facts)

    run.__doc__ = f"``split({n_stages})``: {split.__doc__}"
    return run


def balance(n_stages: int) -> Callable[[Subject], Finding]:
    """The largest stage against max(total / n, the largest operator of the real run)."""

    def run(subject: Subject) -> Finding:
        stages = subject.stages(n_stages)
        if isinstance(stages, SplitError):
            return Finding("none", line(stages))
        counted = subject.counted[0]
        if not counted.macs:
            return Finding("none", "no multiply-adds")
        largest = max(each.macs for each in stages.facts)
        ideal = max(counted.macs / n_stages, *counted.of_each)
        facts = {"stages": [each.macs for each in stages.facts], "ideal": ideal, "ratio": largest / ideal}
        facts["possible"] = best_in_order(counted.of_each, n_stages) / ideal
        if largest <= BALANCE * ideal:
            return Finding("yes", facts=facts)
        if facts["ratio"] <= facts["possible"]:
            return Finding("limit", "no cuts between its operators, in their order, are better", facts)
        return Finding("no", f"{facts['ratio']:.2f} of the ideal, {facts['possible']:.2f} is possible", facts)

    run.__doc__ = f"``split({n_stages})``: {balance.__doc__}"
    return run


def best_in_order(costs: list[int], n_parts: int) -> int:
    """Return the least possible cost of the most expensive of so many consecutive parts."""
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        parts, held = 1, 0
        for cost in costs:
            parts, held = (parts, held + cost) if held + cost <= middle else (parts + 1, cost)
        low, high = (low, middle) if parts <= n_parts else (middle + 1, high)
    return low


def trace(subject: Subject) -> Finding:
    """The graph gives the model's result, or there is a reason why there is none."""
    example = subject.example
    names = list(inspect.signature(example.model.forward).parameters)
    given = {**dict(zip(names, example.args, strict=False)), **example.kwargs}
    try:
        graph = modelsummary.symbolic_trace(example.model, meta_args=given)
    except TraceError as error:
        return Finding("refused", line(error))
    placeholders = [node.target for node in graph.graph.nodes if node.op == "placeholder"]
    if not set(placeholders) <= given.keys():
        return Finding("no", f"the graph takes {placeholders}, the model {list(given)}")
    with torch.no_grad(), own_randomness():
        torch.manual_seed(0)
        wanted = list(tensors_in(twin_call(example)))
        torch.manual_seed(0)
        inputs = {name: given[name] for name in placeholders}
        found = list(tensors_in(copy.deepcopy(graph)(**copy.deepcopy(inputs))))
    same = len(wanted) == len(found) and all(
        torch.equal(a, b) or (a.shape == b.shape and torch.equal(a.isnan(), b.isnan()) and _same_but_nan(a, b))
        for a, b in zip(wanted, found, strict=True)
    )
    return Finding("yes" if same else "no", "" if same else "the graph's result differs")


def _same_but_nan(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num())


def on_meta(subject: Subject) -> Finding:
    """Moved to meta, with meta inputs: the same figures, and ``split(2)`` works there if it does here."""
    example = to_meta(subject.example)
    try:
        stats = statistics(example)
    except Exception as error:
        if subject.stats.execution != "shape" or isinstance(error.__cause__, DataDependentError):
            return Finding("refused", f"needs values: {line(error)}")
        return Finding("no", line(error))
    if stats.total_mult_adds != subject.stats.total_mult_adds:
        return Finding("no", f"{stats.total_mult_adds:,} multiply-adds for {subject.stats.total_mult_adds:,}")
    here = subject.stages(2)
    try:
        stages = stats.split(2, by="macs" if stats.total_mult_adds else "activation_bytes")
    except SplitError as error:
        if isinstance(here, SplitError):
            return Finding("yes")
        return Finding("no", f"split(2) is refused on meta only: {line(error)}")
    if not isinstance(here, SplitError) and [f.macs for f in stages.facts] != [f.macs for f in here.facts]:
        return Finding("no", "split(2) gives other stages")
    return Finding("yes")


def to_meta(example: Example) -> Example:
    """A copy of the model and its inputs on meta."""
    args, kwargs = copy.deepcopy((example.args, example.kwargs))
    return Example(copy.deepcopy(example.model).to("meta"), _moved(args), _moved(kwargs))


def _moved(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, dict):
        return type(value)({key: _moved(inner) for key, inner in value.items()}) if type(value) is dict else value
    if type(value) in (list, tuple):
        return type(value)(_moved(inner) for inner in value)
    if hasattr(value, "__dict__") and not isinstance(value, (type, torch.nn.Module)):  # a cache of keys and values
        for name, inner in list(vars(value).items()):
            vars(value)[name] = _moved(inner)
    return value


CHECKS: dict[str, Callable[[Subject], Finding]] = {
    "summarised": summarised,
    "on shapes": on_shapes,
    "macs": macs,
    "params": params,
    "ledger": ledger,
    "memory": memory,
    "split(2)": split(2),
    "split(4)": split(4),
    **{f"balance({n})": balance(n) for n in (2, 3, 4, 8)},
    "trace": trace,
    "meta": on_meta,
}


UNTOUCHED = "untouched"


def check(example: Example) -> Iterator[tuple[str, Finding]]:
    """Run all checks, one after the other; what raises is a no. Last: did they leave everything as it was?"""
    given = (example.args, example.kwargs)
    inputs = [each.detach().clone() for each in tensors_in(given, objects=True)]
    try:
        with untouched(example.model):
            yield from _checked(Subject(example))
    except AssertionError as error:
        yield UNTOUCHED, Finding("no", f"changed: {' '.join(str(error).split())[:200]}")
        return
    after = list(tensors_in(given, objects=True))
    same = len(inputs) == len(after) and all(map(torch.equal, inputs, after))
    yield UNTOUCHED, Finding("yes" if same else "no", "" if same else "changed: a tensor among the inputs")


def warm_up() -> None:
    """Import what the checks import when they first run, so that processes forked later need not."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2))
    stats = Statistics(model, (2, 2))
    stats.split(2).verify(torch.ones(2, 2))
    stats.memory(optimizer=OPTIMIZER)
    modelsummary.symbolic_trace(model, meta_args={"input": torch.ones(2, 2)})
    count(Example(model, (torch.ones(2, 2),)))


def _checked(subject: Subject) -> Iterator[tuple[str, Finding]]:
    for name, run in CHECKS.items():
        begin = time.perf_counter()
        try:
            finding = run(subject)
        except Exception as error:
            finding = Finding("no", line(error)[:300])
        finding.seconds = round(time.perf_counter() - begin, 3)
        yield name, finding
        if name == "summarised" and finding.verdict == "no":
            return

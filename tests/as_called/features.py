"""Each feature of the package, asked as a user does, with what an independent tool says of it."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from modelsummary import ForwardError, ModelStatistics, ModelSummaryError, Statistics, StepError, compare_values
from modelsummary.capture.containers import map_tensors
from modelsummary.cluster import Cluster, Plan
from tests.as_called.ways import Way
from tests.untouched import untouched
from tests.zoo.checks import elements
from tests.zoo.counting import count
from tests.zoo.example import Example
from tests.zoo.real_step import loss_of, real_step

__all__ = ["EQUAL", "FEATURES", "REFUSED", "UNTOUCHED", "WRONG", "Answer", "ask_all"]

EQUAL, ANSWERED, REFUSED, WRONG = "equal", "answered", "refused", "wrong"
UNTOUCHED = "untouched"
_NO_REASONS = ("AttributeError", "KeyError", "AssertionError", "IndexError", "TypeError")  # of our own code, mostly


@dataclass
class Answer:
    """What a feature said.

    Attributes:
        verdict: ``"equal"`` to an independent figure; ``"answered"``, where there is none; ``"refused"`` with a reason;
            ``"wrong"``: another figure, or an error that is not the package's.
        text: the reason, or the figures that differ.
    """

    verdict: str
    text: str = ""


@dataclass
class Asked:
    """A way of calling, and what several features need of it."""

    way: Way
    stats: Statistics
    truths: dict[str, Any] = field(default_factory=dict)

    @property
    def example(self) -> Example:
        return self.way.independent()

    def truth(self, name: str, make: Callable[[], Any]) -> Any:
        """Return an independent figure, found once; None if it cannot be found. The user's generators stay."""
        if name in self.way.unlike:
            return None
        if name not in self.truths:
            states = random.getstate(), np.random.get_state()
            with torch.random.fork_rng(devices=[]):
                try:
                    with torch.inference_mode(False), torch.enable_grad():
                        self.truths[name] = make()
                except Exception:  # a model that cannot be copied, or does not train
                    self.truths[name] = None
            random.setstate(states[0])
            np.random.set_state(states[1])
        return self.truths[name]

    @property
    def macs(self) -> int | None:
        return self.truth("macs", lambda: count(self.example)[0].macs)


def compared(*pairs: tuple[str, Any, Any]) -> Answer:
    """Compare figures with their truths, where there is one."""
    known = [pair for pair in pairs if pair[2] is not None]
    wrong = [f"{name} {ours!r} for {truth!r}" for name, ours, truth in known if ours != truth]
    if wrong:
        return Answer(WRONG, "; ".join(wrong))
    return Answer(EQUAL if known else ANSWERED)


def table(asked: Asked) -> Answer:
    stats = asked.stats
    assert len(str(stats).splitlines()) > 5
    params = sum({id(each): elements(each) for each in asked.example.model.parameters()}.values())
    figures = ("params", stats.total_params, params), ("macs", stats.total_macs, asked.macs)
    return compared(*figures, ("ledger", dict(stats.uncounted_ops), {}))


def memory(asked: Asked) -> Answer:
    """Bytes that a step of SGD with momentum holds after the forward, against a real one."""
    ours = asked.stats.memory(optimizer="sgd-momentum", loss=loss_of)
    assert str(ours)
    before = ours.params + ours.buffers + ours.inputs + ours.optimizer_state
    make = lambda parameters: torch.optim.SGD(parameters, 1e-3, momentum=0.9)  # noqa: E731
    real = asked.truth("step", lambda: real_step(copy.deepcopy(asked.example), make))
    if real is None:
        return Answer(ANSWERED)
    state = ("state", ours.optimizer_state, real.optimizer_state)
    return compared(("held", ours.held_after_forward - before, real.held), state)


def inference(asked: Asked) -> Answer:
    ours = asked.stats.memory("inference")
    tensors = {id(each): each for each in asked.example.model.parameters()}.values()
    plain = all(type(each) in (torch.nn.Parameter, torch.Tensor) for each in tensors)
    return compared(("params", ours.params, sum(each.nbytes for each in tensors) if plain else None))


def latency(asked: Asked) -> Answer:
    estimate = asked.stats.estimate_latency("A100", backward=True)
    assert min(estimate, estimate.backward_ms, asked.stats.estimate_latency("A100")) > 0
    return Answer(ANSWERED)


def measured(asked: Asked) -> Answer:
    assert asked.stats.measure_latency(warmup=0, runs=1).root.latency_ms > 0
    return Answer(ANSWERED)


def kernels(asked: Asked) -> Answer:
    listed = asked.stats.kernels("A100")
    assert str(listed)
    products = [each for each in listed if each.op_class in ("gemm", "conv", "attention")]
    return compared(("flops", sum(each.flops for each in products), None if asked.macs is None else 2 * asked.macs))


def roofline(asked: Asked) -> Answer:
    rows = asked.stats.roofline("A100")
    assert str(rows)
    return compared(("flops", rows[0].flops, None if asked.macs is None else 2 * asked.macs))


def split(asked: Asked) -> Answer:
    """Two stages against the model, bit for bit."""
    stages = asked.stats.split(2)
    example = asked.way
    if any(each.is_meta for each in example.model.parameters()):
        return Answer(ANSWERED)
    call = asked.example
    run = stages.verify(*call.args, **call.kwargs)
    return compared(("outputs", run.outputs, 0.0), ("buffers", run.buffers, 0.0))


def graph(asked: Asked) -> Answer:
    drawn = asked.stats.graph()
    assert str(drawn)
    assert drawn.nodes
    return Answer(ANSWERED)


def planned(asked: Asked, **sizes: int) -> Answer:
    plan = asked.stats.parallel_plan(**sizes)
    assert str(plan)
    compile(plan.to_code(), "plan", "exec")
    assert json.dumps(plan.to_dict())
    return Answer(ANSWERED)


def tensor_plan(asked: Asked) -> Answer:
    return planned(asked, tensor=2)


def shard_plan(asked: Asked) -> Answer:
    return planned(asked, shard=2)


def simulate(asked: Asked) -> Answer:
    batch = asked.stats.live.call.size_along(0) or 1
    step = asked.stats.simulate(Plan(micro_batch=batch), Cluster("A100"), global_batch=batch)
    assert step.step_seconds > 0
    return Answer(ANSWERED)


def formula(asked: Asked) -> Answer:
    """The formula at the recorded size, and at five times the batch, against a run at that size."""
    figures = asked.stats.at()
    more = {"batch": 5 * figures.sizes["batch"]} if "batch" in figures.sizes else {}
    larger = _five_times(asked) if more else asked.macs
    return compared(("macs", figures.macs, asked.macs), ("larger", asked.stats.at(**more).macs, larger))


def _five_times(asked: Asked) -> int | None:
    """Return the multiply-adds of five times the batch."""

    def repeated() -> int:
        example = copy.deepcopy(asked.example)
        example.args, example.kwargs = _repeat(example.args), _repeat(example.kwargs)
        return count(example)[0].macs

    return asked.truth("larger", repeated)


def _repeat(value: Any) -> Any:
    if isinstance(value, tuple) and any(map(is_dataclass, value)):
        return tuple(map(_repeat, value))
    if is_dataclass(value):
        return replace(value, **{each.name: _repeat(getattr(value, each.name)) for each in fields(value)})
    return map_tensors(lambda each: each.repeat(5, *[1] * (each.dim() - 1)), value)


def flops_per_token(asked: Asked) -> Answer:
    """Forward and backward against torch's own counter."""
    per = asked.stats.flops_per_token(loss=loss_of)

    forward = None if asked.macs is None else 2 * asked.macs

    def real() -> int | None:
        example = copy.deepcopy(asked.example)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            output = example()
            counted = counter.get_total_flops()
            loss_of(output).backward()
        return counter.get_total_flops() if counted == forward else None  # it does not know all operators

    trains = asked.truth("training", real)
    return compared(("forward", per.forward_flops, forward), ("training", per.training_flops, trains))


def json_round_trip(asked: Asked) -> Answer:
    back = ModelStatistics.from_json(asked.stats.to_json())
    ours = [(row.fqn, row.class_name, row.num_params, row.macs, row.output_size) for row in asked.stats]
    assert str(back) == str(ModelStatistics.from_json(back.to_json()))
    theirs = [(row.fqn, row.class_name, row.num_params, row.macs, row.output_size) for row in back]
    return compared(("rows", str(theirs), str(ours)))


def diff(asked: Asked) -> Answer:
    return compared(("differs", bool(asked.stats.diff(asked.way.statistics())), False))


def check(asked: Asked) -> Answer:
    findings = asked.stats.check()
    assert str(findings)
    assert len(json.loads(findings.to_json())["findings"]) == len(findings)
    return Answer(ANSWERED)


def values(asked: Asked) -> Answer:
    """The parameters that get a gradient in a step, against a real one; nothing in it is NaN."""
    of_step = asked.stats.values(loss=loss_of)
    assert str(of_step)

    def real() -> int:
        example = copy.deepcopy(asked.example)
        example.model.zero_grad()
        loss_of(example()).backward()
        return sum(parameter.grad is not None for parameter in example.model.parameters())

    bad = of_step.first_bad()
    return compared(("gradients", len(of_step.parameters), asked.truth("gradients", real)), ("bad", str(bad), "None"))


def compare(asked: Asked) -> Answer:
    """The model against itself."""
    call = asked.way.independent()
    divergence = compare_values(asked.way.model, asked.way.model, call.kwargs or list(call.args))
    assert str(divergence)
    return compared(("differs", divergence.place, ""))


FEATURES: dict[str, Callable[[Asked], Answer]] = {
    "table": table,
    "memory": memory,
    "inference": inference,
    "estimate_latency": latency,
    "measure_latency": measured,
    "kernels": kernels,
    "roofline": roofline,
    "split": split,
    "graph": graph,
    "tensor=2": tensor_plan,
    "shard=2": shard_plan,
    "simulate": simulate,
    "formula": formula,
    "flops_per_token": flops_per_token,
    "json": json_round_trip,
    "diff": diff,
    "check": check,
    "values": values,
    "compare_values": compare,
}


def ask_all(way: Way) -> dict[str, Answer]:
    """Ask every feature; what raises anything but the package's own error in one line is wrong."""
    answers: dict[str, Answer] = {}
    try:
        with untouched(way.model):
            answers = {name: _asked(way, feature) for name, feature in _with_statistics(way).items()}
    except AssertionError as error:
        answers[UNTOUCHED] = Answer(WRONG, " ".join(str(error).split())[:200])
    else:
        answers[UNTOUCHED] = Answer(EQUAL)
    return answers


def _with_statistics(way: Way) -> dict[str, Callable[[], Answer]]:
    """Return the features to ask, which share one ``Statistics`` that the first of them makes."""
    made: list[Asked] = []

    def ask(feature: Callable[[Asked], Answer]) -> Callable[[], Answer]:
        def call() -> Answer:
            if not made:
                with way.around():
                    made.append(Asked(way, way.statistics()))
            with way.around():
                return feature(made[0])

        return call

    return {name: ask(feature) for name, feature in FEATURES.items()}


def _asked(way: Way, feature: Callable[[], Answer]) -> Answer:
    try:
        answer: Answer = way.run(feature)
    except ModelSummaryError as error:
        passed_on = isinstance(error, (ForwardError, StepError)) and any(name in str(error) for name in _NO_REASONS)
        is_reason = "\n" not in str(error) and not passed_on
        return Answer(REFUSED if is_reason else WRONG, f"{type(error).__name__}: {error}")
    except Exception as error:
        return Answer(WRONG, f"{type(error).__name__}: {' '.join(str(error).split())}"[:300])
    return answer

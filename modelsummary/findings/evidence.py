"""``Evidence``: what rules read: the trace of a step, with its operators by the storages that they read and make."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from modelsummary.capture.live import LiveModel
from modelsummary.capture.model_lines import is_of_model
from modelsummary.capture.modules import named_modules
from modelsummary.capture.step_plan import StepPlan
from modelsummary.capture.trace import Trace
from modelsummary.devices.target import Target, seconds_of_calls, timing_on
from modelsummary.latency.predict import time_operators
from modelsummary.layer_info import CallKey
from modelsummary.memory.saved import Remaking
from modelsummary.operators.operator_calls import Line, OperatorCall, OperatorRun, TensorSpec
from modelsummary.operators.operator_work import Work, work_of

if TYPE_CHECKING:
    from modelsummary.parallel import ParallelPlan
    from modelsummary.split import Stages

__all__ = ["HALF", "Evidence", "Failure", "is_pointwise"]

HALF = (torch.float16, torch.bfloat16)


class Failure(NamedTuple):
    """A step that raised: what was raised, what to do, and the line to change as far as they are known."""

    what: str
    remedy: str
    line: Line | None = None


class Evidence:
    """What rules read. Operators are named by their numbers in the trace; views count as the storages behind them.

    Args:
        trace: the step; storages were followed.
        failure: why the step with a backward that was to be observed did not run; None if it ran.
        fallback_reason: why the table needed a real run; None if it did not.
        split, make_plan: ``Statistics.split`` and ``parallel_plan`` of the model, for rules on request.

    Attributes:
        modules: FQN -> module.
        operators: all operators of the step.
        end: number of the first operator after forward and loss.
        readers: storage -> operators of forward and loss that read it, without views.
        maker: storage -> the operator of forward and loss that made it.
        writers: storage -> operators of forward and loss that write it in place.
        touched: storages that any operator of forward and loss reads, also to make a view.
        storages: identity -> storage.
        notes: what could not be asked.
        answers: what several rules on request read, by name.
    """

    def __init__(
        self,
        live: LiveModel,
        plan: StepPlan,
        trace: Trace,
        target: Target,
        failure: Failure | None = None,
        fallback_reason: str | None = None,
        *,
        split: Callable[[int], Stages],
        make_plan: Callable[..., ParallelPlan],
    ) -> None:
        self.live, self.plan, self.trace, self.target = live, plan, trace, target
        self.split, self.make_plan = split, make_plan
        self.notes: list[str] = []
        self.answers: dict[str, Any] = {}
        self.failure, self.fallback_reason = failure, fallback_reason
        self.modules: dict[str, nn.Module] = dict(named_modules(live.model))
        self.operators = trace.operators
        self.end = trace.end_of_forward
        self.storages = trace.storages_by_identity
        self.readers: defaultdict[int, list[int]] = defaultdict(list)
        remaking = Remaking(trace)
        self.maker, self.writers = remaking.makers, remaking.writers
        self.touched: set[int] = set()
        for index in range(self.end):
            run = self.run(index)
            self.touched.update(run.reads)
            if not run.is_view:
                for storage in set(self.reads(index)):
                    self.readers[storage].append(index)
        self._seconds_of_call = seconds_of_calls(target)
        self._timing = timing_on(target)

    # ------------------------------------------------------------------------------------------- the run

    def run(self, index: int) -> OperatorRun:
        """Return the run of an operator."""
        return self.operators[index].run

    def call(self, index: int) -> OperatorCall:
        """Return the call of an operator."""
        return self.operators[index].run.call

    def reads(self, index: int) -> Sequence[int]:
        """Return the storages of which an operator reads elements: not of an empty part of a result."""
        run = self.run(index)
        specs = run.call.tensors
        if len(specs) != len(run.reads) or all(spec.numel for spec in specs):
            return run.reads
        return [storage for spec, storage in zip(specs, run.reads, strict=True) if spec.numel]

    def forward(self) -> Iterator[tuple[int, OperatorCall]]:
        """Yield the operators of forward and loss with their calls, without views."""
        for index in range(self.end):
            run = self.run(index)
            if not run.is_view:
                yield index, run.call

    def row(self, index: int) -> CallKey | None:
        """Return the key of the module call that an operator belongs to."""
        return self.operators[index].row

    def line(self, index: int) -> Line | None:
        """Return the line of the model's code that an operator comes from."""
        return self.run(index).line

    def place(self, index: int) -> tuple[CallKey | None, Line | None]:
        """Return the module call and the line that an operator comes from."""
        return self.row(index), self.line(index)

    def module(self, index: int) -> nn.Module | None:
        """Return the module that an operator belongs to."""
        row = self.row(index)
        return None if row is None else self.modules.get(row[0])

    def file_of(self, end: str) -> str | None:
        """Return the file of a forward whose path ends so; None if there is none.

        torch cuts paths after as many letters as they share with its own, so in the middle of a folder, too
        (``shorten_filename`` in torch/utils/_traceback.py).
        """
        codes = (getattr(type(module).forward, "__code__", None) for module in self.modules.values())
        return next((code.co_filename for code in codes if code and code.co_filename.endswith(end)), None)

    def row_of(self, line: Line | None) -> CallKey:
        """Return the key of the first call of a module whose forward has a line; the model's if none has."""
        for fqn, module in self.modules.items() if line is not None else ():
            code = getattr(type(module).forward, "__code__", None)
            if code is None or line is None or code.co_filename != line.file or fqn not in self.called:
                continue
            if code.co_firstlineno <= line.number <= max(number or 0 for *_, number in code.co_lines()):
                return fqn, 0
        return "", 0

    def first_line_around(self, fqn: str | None) -> Line | None:
        """Return the first line of the forward of a module, or of the nearest one around it that is not torch's.

        It is the model's if all are torch's, or the FQN is None; None if that has no code in Python.
        """
        fqns = [] if fqn is None else [fqn]
        while fqns and fqns[-1]:
            fqns.append(fqns[-1].rpartition(".")[0])
        codes = [getattr(type(self.modules[name]).forward, "__code__", None) for name in fqns if name in self.modules]
        outermost = getattr(type(self.live.model).forward, "__code__", None)
        code = next((code for code in codes if code is not None and is_of_model(code.co_filename)), outermost)
        return None if code is None else Line(code.co_filename, code.co_firstlineno)

    def is_of_model(self, index: int) -> bool:
        """Return True for an operator that the model's own code asks for, and not a module of torch inside itself."""
        module = self.module(index)
        return self.line(index) is not None and not (
            module is not None and type(module).__module__.startswith("torch.")
        )

    @cached_property
    def called(self) -> frozenset[str]:
        """The FQNs of the modules that ran, and of those around them."""
        fqns: set[str] = {""}
        for call in self.trace.calls:
            fqn = call.key[0]
            while fqn not in fqns:
                fqns.add(fqn)
                fqn = fqn.rpartition(".")[0]
        return frozenset(fqns)

    @cached_property
    def parents(self) -> frozenset[str]:
        """The FQNs of the modules of the model, apart from itself, that call others."""
        return frozenset(call.parent[0] for call in self.trace.calls if call.parent is not None) - {""}

    @property
    def mode(self) -> str:
        """Words for the mode of the model, where it may be the reason: empty in training mode."""
        return "" if self.live.model.training else " in evaluation mode"

    @property
    def is_complete(self) -> bool:
        """True if all that ran was observed."""
        return bool(self.trace.calls) and not self.trace.n_in_other_threads and not self.trace.failed

    @property
    def is_on_target(self) -> bool:
        """True if torch chose kernels for the device of the plan; False if the step had to run for real elsewhere."""
        return self.plan.device is None or torch.device(self.trace.device).type == self.plan.device.type

    def lives_on(self, storage: int) -> bool:
        """Return True if a storage lives on after forward and loss: as a result, for the backward, or in an object."""
        record = self.storages.get(storage)
        return record is None or record.died is None or record.died > self.end

    @cached_property
    def dead(self) -> frozenset[int]:
        """The operators of forward and loss of which nothing is used.

        Storages that live on count as used, and those whose elements Python read without an operator.
        """
        needed: set[int] = {*self.trace.results, *self.trace.read}
        dead: set[int] = set()
        for index in reversed(range(self.end)):
            run = self.run(index)
            # an allocation; a question about values, such as a condition, has no storage and needs what it reads
            is_allocation = not run.call.rule.launches_kernel and not run.call.rule.is_collective and bool(run.makes)
            if run.is_view or is_allocation:
                continue
            results = {*run.makes, *run.writes}
            is_asked = run.call.rule.needs_values  # Python has the shape of its result
            if results and not is_asked and not any(storage in needed or self.lives_on(storage) for storage in results):
                dead.add(index)
            else:
                needed.update(self.reads(index))
        return frozenset(dead)

    def is_held(self, storage: int) -> bool:
        """Return True if something else than the backward holds a storage after forward and loss."""
        record = self.storages.get(storage)
        return storage in self.trace.results or ((record is None or not record.is_saved) and self.lives_on(storage))

    def chain(self, storage: int) -> Iterator[int]:
        """Yield the operators that made a storage one after the other, the last first, while each is pointwise.

        The first that is not pointwise ends the chain and belongs to it.
        """
        seen: set[int] = set()
        while (index := self.maker.get(storage)) is not None and index not in seen:
            seen.add(index)
            yield index
            if not is_pointwise(self.call(index)) or not self.run(index).reads:
                return
            storage = _largest(self.run(index))

    # ----------------------------------------------------------------------------------------- parameters

    @cached_property
    def trained(self) -> dict[str, int]:
        """The parameters that require a gradient, by name, with their storages."""
        trained = {name for name, parameter in self.parameters.items() if parameter.requires_grad}
        return {name: storage for name, storage in self.trace.tensors.items() if name in trained}

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters by name, tied ones under all their names."""
        return {
            f"{fqn}.{name}".lstrip("."): parameter
            for fqn, module in self.modules.items()
            for name, parameter in module._parameters.items()
            if parameter is not None
        }

    @cached_property
    def weights(self) -> dict[int, str]:
        """The storages of parameters with a name of each."""
        return {self.trace.tensors[name]: name for name in self.parameters if name in self.trace.tensors}

    @cached_property
    def half(self) -> torch.dtype | None:
        """The half-precision dtype in which most of the model is, or to which autocast casts; else None."""
        if self.plan.autocast is not None:
            return self.plan.autocast
        if self.plan.dtype is not None:
            return self.plan.dtype if self.plan.dtype in HALF else None
        numels: defaultdict[torch.dtype, int] = defaultdict(int)
        for parameter in {id(parameter): parameter for parameter in self.parameters.values()}.values():
            if parameter.is_floating_point():
                numels[parameter.dtype] += parameter.numel()
        dtype = max(numels, key=numels.__getitem__, default=None)
        return dtype if dtype in HALF else None

    # ----------------------------------------------------------------------------------------------- cost

    def seconds(self, index: int) -> float:
        """Return the predicted seconds of an operator."""
        return self._seconds_of_call(self.call(index))

    def seconds_of(self, work: Work) -> float:
        """Return the predicted seconds of a kernel."""
        return self._timing(work, None)[0] or 0.0

    def seconds_in(self, call: OperatorCall, dtype: torch.dtype) -> float:
        """Return the predicted seconds of a call in another dtype."""
        works = [
            work._replace(dtype=dtype, nbytes=work.nbytes * dtype.itemsize // work.dtype.itemsize)
            for work in work_of(call)
        ]
        return sum(map(self.seconds_of, works))

    @cached_property
    def step_seconds(self) -> float:
        """The predicted seconds of the kernels of the step."""
        return sum(kernel.seconds or 0.0 for kernel in time_operators(self.live, self.operators, self.target, "eager"))


def is_pointwise(call: OperatorCall) -> bool:
    """Return True for an operator that computes each element from one element of each argument, a cast or a copy."""
    return call.rule.is_pointwise or call.rule.op_class == "copy"


def _largest(run: OperatorRun) -> int:
    """Return the storage of the largest argument."""
    specs: list[TensorSpec] = list(run.call.tensors)
    return max(zip(specs, run.reads, strict=False), key=lambda pair: pair[0].numel)[1]

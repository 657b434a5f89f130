"""One step of a model, run while it is observed; ``observe`` chooses the execution."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from modelsummary import _torch
from modelsummary.capture.backward import BackwardNodes
from modelsummary.capture.calls import Call, Watch
from modelsummary.capture.compiled import CompiledGraphs
from modelsummary.capture.containers import map_tensors, tensors_of
from modelsummary.capture.execution.shape_tensor import ShapeTensor
from modelsummary.capture.modules import modules_of, named_modules, tensors_in_attributes
from modelsummary.capture.observer import Level, Observer
from modelsummary.capture.step_plan import ParameterGroup, StepPlan
from modelsummary.capture.trace import Trace, TracedCall, TracedSave, storages_of
from modelsummary.errors import InputError
from modelsummary.layer_info import CallKey
from modelsummary.operators.kernels import StepOperator
from modelsummary.operators.operator_calls import spec_of
from modelsummary.operators.tensor_bytes import inner_tensors, stored_tensors

__all__ = ["StepRun", "casting", "loss_of"]


class StepRun:
    """One step on shapes or for real, and what was observed of it.

    Args:
        groups: what the optimizer steps, see ``StepPlan.groups_of``; None: there is none.

    Attributes:
        graphs: what the model is compiled to; None if it is not.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        plan: StepPlan,
        device: torch.device,
        block_bytes: int = 1,
        *,
        level: Level,
        groups: Sequence[ParameterGroup] | None = None,
    ) -> None:
        self.model, self.plan = model, plan
        self._args, self._kwargs, self._device = args, kwargs, device
        self._follows = level == "storages"
        self.observer = Observer(block_bytes, level)
        self.graphs = CompiledGraphs(self._n_operators) if plan.compiled else None
        self._trained = [tensor for tensor in model.parameters() if tensor.requires_grad] if plan.train else []
        self._groups = groups or ()
        self._optimizer: torch.optim.Optimizer | None = None
        self._watches: list[Watch] = []  # one per forward
        self._backwards: list[BackwardNodes] = []
        self._phases: list[tuple[str, int]] = []  # name, number of its first operator
        self._after_forward = 0
        self._tensors: dict[str, int] = {}  # name -> identity of its storage
        self._results: set[int] = set()  # identities of storages
        self._without_gradient: list[nn.Parameter] = []
        self.doing = "step"  # what runs: also "forward", "loss", "backward"; the optimizer's state is made first

    def _n_operators(self) -> int:
        return len(self.observer.inside)

    def step(self) -> None:
        """Prepare the state before a step, and run the step."""
        self._hold_state(tensors_of((self._args, self._kwargs)))
        with self.observer:
            self._prepare()
            output, loss = self._forward(has_loss=self.plan.train)
            if loss is not None:
                self._train(loss, output)
            else:
                self._after_forward = self.observer.held()
        self._mark_gradients()

    def _hold_state(self, inputs: Iterable[Tensor]) -> None:
        """Follow what lives before the step, except the state of the optimizer."""
        follow = self.observer
        follow.hold((parameter for parameter in self.model.parameters() if not is_lazy(parameter)), "params")
        follow.hold(self.model.buffers(), "buffers")
        if self._follows:  # finding them takes long, and only bytes depend on them
            follow.hold(tensors_in_attributes(modules_of(self.model)), "buffers")
        follow.hold(inputs, "inputs")
        if self._follows:
            self._tensors = {name: follow.identity(tensor) for name, tensor in _named_tensors(self.model)}

    def _saving(self) -> AbstractContextManager[Any]:
        """Return a context in which tensors that are saved for the backward are noted."""
        if not (self.plan.train and self._follows):
            return nullcontext()
        return _saving_outside_of_transforms(self.observer.save, self.observer.unpack)

    def _begin(self, phase: str) -> None:
        self._phases.append((phase, self._n_operators()))
        self.doing = phase

    def _prepare(self) -> None:
        """Make the state of the optimizer, as its first step does, and gradients if they accumulate."""
        self._optimizer = self.plan.optimizer_of(self._groups, dict(self.model.named_parameters()))
        if self._optimizer is not None:
            is_on_cuda = (self.plan.device or self._device).type == "cuda"
            if is_on_cuda:
                _choose_foreach(self._optimizer)
            self._made_at_once = frozenset(map(id, self._optimizer.state))
            self._first_step(self._optimizer)
            self._hold_optimizer_state(self._optimizer, is_on_cuda=is_on_cuda)
        for parameter in self._trained:
            parameter.grad = torch.zeros_like(parameter) if self.plan.accumulates else None
        self._given = _GivenGradients(self._trained)
        self._mark_gradients()

    def _hold_optimizer_state(self, optimizer: torch.optim.Optimizer, *, is_on_cuda: bool) -> None:
        """Follow the state in the order in which a first step makes it: parameter by parameter.

        The numbers of steps stay on the host of a CUDA device, unless the optimizer is capturable or fused ("special
        device hosting for step" in torch/optim/adam.py). What belongs to no parameter comes last.
        """
        states: list[Tensor] = []
        on_host: list[Tensor] = []
        for group in optimizer.param_groups:
            hosts_numbers = is_on_cuda and not (group.get("capturable") or group.get("fused"))
            for parameter in group["params"]:
                values = list(optimizer.state[parameter].values()) if parameter in optimizer.state else []
                tensors = [inner for tensor in tensors_of(values) for inner in inner_tensors(tensor)]
                states += tensors
                on_host += [tensor for tensor in tensors if hosts_numbers and not tensor.dim()]
        owners = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        others = tensors_of([state for owner, state in optimizer.state.items() if id(owner) not in owners])
        states += [inner for tensor in others for inner in inner_tensors(tensor)]
        self.observer.hold_state(states)
        self.observer.leave_out(on_host, ())

    def _first_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer's state; on shapes, it steps one parameter per shape and dtype and copies the state."""
        alike: dict[Any, list[nn.Parameter]] = defaultdict(list)
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                alike[(index, spec_of(parameter)) if type(parameter) is ShapeTensor else id(parameter)].append(
                    parameter
                )
        embeddings = (module for module in self.model.modules() if getattr(module, "sparse", False) is True)
        sparse = {id(weight) for module in embeddings for weight in module._parameters.values()}
        for first, *_ in alike.values():
            zeros = torch.zeros_like(first)  # a real step continues with these parameters
            first.grad = zeros.to_sparse(1) if id(first) in sparse else zeros
        optimizer.step()
        attributes = [value for name, value in vars(optimizer).items() if name not in ("state", "param_groups")]
        shared = frozenset(map(id, tensors_of(attributes)))  # such as the tables of 8-bit optimizers
        for first, *others in alike.values():
            for parameter in others if first in optimizer.state else ():
                optimizer.state[parameter] = map_tensors(
                    lambda state: state if id(state) in shared else state.clone(), optimizer.state[first]
                )

    def _mark_gradients(self) -> None:
        for gradient in [parameter.grad for parameter in self._trained if parameter.grad is not None]:
            for allocation in map(self.observer.of, stored_tensors(gradient)):
                if allocation is not None and not allocation.kind:
                    allocation.kind = "grads"

    def _forward(self, *, has_loss: bool) -> tuple[Any, Tensor | None]:
        """Run the forward; return its result, and the loss if there is one."""
        self._begin("forward")
        self.observer.watch = Watch(self.model, self.observer.inside.__len__, within=self.graphs is None)
        self._watches.append(self.observer.watch)
        with self._saving(), casting(self.plan.autocast, self._device):
            with self._generator_states():
                output = self.watch.call(self._args, self._kwargs, None if self.graphs is None else self.graphs.call)
            strided = (tensor for tensor in tensors_of(output) if tensor.layout is torch.strided)
            self._results = {self.observer.identity(tensor) for tensor in strided} if self._follows else set()
            if not has_loss:
                return output, None
            self.doing = "loss"
            return output, loss_of(output, self.plan.loss)

    def _generator_states(self) -> AbstractContextManager[Any]:
        """Return a context in which the CPU generator's states are followed: each checkpointed region keeps one."""
        if self.observer.host_is_apart or self.graphs is not None:  # a compiler keeps one while it compiles
            return nullcontext()
        original = torch.get_rng_state

        def get_rng_state() -> Tensor:
            state = original()
            self.observer.keep(state)
            return state

        return _torch.swapped(torch, "get_rng_state", get_rng_state)

    def _train(self, loss: Tensor, output: Any) -> None:
        backward = self._nodes(output)
        self.observer.forward_ended((*tensors_of(output), loss))
        self._after_forward = self.observer.held()
        self._begin("backward")
        loss.backward()
        backward.detach()
        self._mark_gradients()
        self._step_optimizer()

    def _nodes(self, output: Any) -> BackwardNodes:
        """Return the autograd nodes of the last forward, whose operators belong to its calls."""
        nodes = BackwardNodes(self.watch.tree(), output, self._n_operators, self.observer.note_node)
        self._backwards.append(nodes)
        return nodes

    def _step_optimizer(self) -> None:
        self._leave_out_unused()
        if self._optimizer is not None:
            self._begin("step")
            self._optimizer.step()

    def _leave_out_unused(self) -> None:
        """Do not count gradients and optimizer states of parameters that get no gradient: no loop ever makes them.

        States that the optimizer makes for all parameters before its first step, as Adagrad does, are counted.
        """
        states = {} if self._optimizer is None else self._optimizer.state
        unused: list[Any] = []
        self._without_gradient = self._given.unused()
        for parameter in self._without_gradient:
            unused.append(parameter.grad)
            parameter.grad = None
            if states and id(parameter) not in self._made_at_once:
                unused.append(states.pop(parameter, None))
        self._after_forward -= self.observer.leave_out(tensors_of(unused), tensors_of(list(states.values())))

    # -------------------------------------------------------------------------------------------- results

    @property
    def watch(self) -> Watch:
        """The watch of the last forward."""
        return self._watches[-1]

    def trace(self, names: Mapping[int, str], **facts: Any) -> Trace:
        """Return what was observed.

        Args:
            names: id of a module -> its FQN.
            facts: the fields of ``Trace`` that say how the step ran.
        """
        first = self._phases[0][1]  # operators before it make the state that exists before the step
        keys: dict[Call, CallKey] = {}
        for watch in self._watches:
            keys_of_forward, calls = TracedCall.all_of(watch.calls, names, first)
            keys.update(keys_of_forward)
        inside = list(self.observer.inside)
        for backward in self._backwards:
            for call, begin, end in backward.intervals():
                inside[begin:end] = [call] * (end - begin)
        phases = [""] * len(inside)
        for name, begin in self._phases:
            phases[begin:] = [name] * (len(phases) - begin)
        operators = zip(self.observer.log.runs, phases, inside, strict=True)
        return self._kind(
            train=self.plan.train,
            calls=calls,
            operators=[
                StepOperator(run, phase, None if call is None else keys[call])
                for run, phase, call in list(operators)[first:]
            ],
            phases=[(name, begin - first) for name, begin in self._phases],
            level=self.observer.level,
            storages=storages_of(self.observer.every, keys, first),
            clones={
                operator_number - first: nbytes
                for operator_number, nbytes in self.observer.clones.items()
                if operator_number >= first
            },
            held_after_forward=self._after_forward,
            optimizer=None if self._optimizer is None else _name_of(self._optimizer),
            failed=[keys[call] for call in self.watch.failed if id(call.module) in names],
            n_in_other_threads=self.watch.n_in_other_threads,
            tensors=self._tensors,
            results=frozenset(self._results),
            read=frozenset(self.observer.read),
            without_gradient=self._names_without_gradient(),
            saves=[
                TracedSave(None if call is None else keys[call], storage, operator_number - first)
                for call, storage, operator_number in self.observer.saves
            ],
            offloaded=self.observer.offloaded,
            **({} if self.graphs is None else self.graphs.since(first)),
            **facts,
        )

    def _names_without_gradient(self) -> list[str]:
        """Return the names of the trained parameters that got no gradient, tied ones under all their names."""
        missing = set(map(id, self._without_gradient))
        return [name for name, tensor in _named_tensors(self.model) if id(tensor) in missing] if missing else []

    _kind: ClassVar[type[Trace]] = Trace


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers by name, tied ones under all their names."""
    for fqn, module in named_modules(model):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and not is_lazy(tensor):
                yield f"{fqn}.{name}".lstrip("."), tensor


@contextmanager
def _saving_outside_of_transforms(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Iterator[None]:
    """Return a context in which tensors that autograd saves are packed, except inside ``torch.func.grad`` and the like.

    These refuse to run under hooks. What they save is followed as other storages are.
    """
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
    disabled = torch.autograd.graph.disable_saved_tensors_hooks
    depth = 0

    @contextmanager
    def without_hooks(message: str) -> Iterator[None]:
        nonlocal depth
        if not depth:
            hooks.__exit__()
        depth += 1
        try:
            with disabled(message):
                yield
        finally:
            depth -= 1
            if not depth:
                hooks.__enter__()

    with hooks, _torch.swapped(torch.autograd.graph, "disable_saved_tensors_hooks", without_hooks):
        yield


def _choose_foreach(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer update all tensors at once, as torch does by default on CUDA, also of distributed tensors.

    See ``_default_to_fused_or_foreach`` in torch/optim/optimizer.py, which does not know shape tensors. Optimizers that
    do not ask it, such as Adafactor, update one tensor after the other everywhere.
    """
    for part in getattr(optimizer, "parts", ()):
        _choose_foreach(part)
    kinds = [kind for kind in type(optimizer).__mro__ if kind is not torch.optim.Optimizer]
    if not any(hasattr(sys.modules.get(kind.__module__), "_default_to_fused_or_foreach") for kind in kinds):
        return
    for group in optimizer.param_groups:
        is_open = group.get("foreach", False) is None and not (group.get("fused") or group.get("differentiable"))
        if is_open:
            group["foreach"] = True


_Writes = list[tuple["ref[Tensor]", int]]  # of a gradient and its inner tensors: each with the number of writes to it


class _GivenGradients:
    """The gradients that parameters have before a backward; they are not kept alive.

    >>> model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    >>> for parameter in model.parameters():
    ...     parameter.grad = torch.zeros_like(parameter)
    >>> given = _GivenGradients(model.parameters())
    >>> model[0](torch.ones(1, 2)).sum().backward()
    >>> [parameter is model[1].weight for parameter in given.unused()]
    [True]
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._given: list[tuple[nn.Parameter, _Writes]] = [
            (parameter, [(ref(tensor), tensor._version) for tensor in _tensors(parameter.grad)])
            for parameter in parameters
        ]

    def unused(self) -> list[nn.Parameter]:
        """Return the parameters whose gradient was neither made nor written since."""
        return [parameter for parameter, writes in self._given if _are_same(_tensors(parameter.grad), writes)]


def _tensors(grad: Tensor | None) -> list[Tensor]:
    """Return a gradient and its inner tensors; autograd counts writes to the former, and FSDP2 writes to the latter."""
    return [] if grad is None else [grad, *inner_tensors(grad)]


def _are_same(tensors: list[Tensor], writes: _Writes) -> bool:
    return len(tensors) == len(writes) and all(
        before() is tensor and version == tensor._version
        for tensor, (before, version) in zip(tensors, writes, strict=True)
    )


def casting(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[Any]:
    """Return ``torch.autocast`` if a dtype is given, else an empty context."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def loss_of(output: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    """Return the scalar that the backward of a step begins with. Raise ``InputError`` if there is none."""
    if loss is not None:
        value = loss(output)
    elif isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
        value = output["loss"]
        value = value if value.numel() == 1 else value.sum()  # some models return the loss of each sample
    else:
        tensors = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
        if not tensors:
            raise InputError(
                "nothing in the model's result requires a gradient; run the forward alone, unfreeze parameters, or "
                "pass loss=, if the loss is elsewhere"
            )
        return torch.stack([tensor.sum() for tensor in tensors]).sum() if len(tensors) > 1 else tensors[0].sum()
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        raise InputError(f"loss must return a scalar tensor that requires a gradient, got {value!r:.80}")
    return value


def _name_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of the class of an optimizer, or of each one that it joins."""
    return " and ".join(type(part).__name__ for part in getattr(optimizer, "parts", [optimizer]))

"""Watch the values that flow through a model while any code runs it: forwards, backwards, steps of optimizers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from math import nan
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from modelsummary import _torch
from modelsummary.capture.backward import node_ranges
from modelsummary.capture.calls import Call, Watch, keys_of
from modelsummary.capture.containers import tensors_of
from modelsummary.capture.module_calls import ModuleCall, unwrap_calls, wrap_calls
from modelsummary.capture.modules import is_compiled, named_modules, unwrap
from modelsummary.capture.operator_mode import Operators
from modelsummary.capture.run import nothing_hidden
from modelsummary.errors import InputError
from modelsummary.layer_info import CallKey
from modelsummary.values.contents import Content, Contents, TensorContent
from modelsummary.values.origins import NodeMakers, bad_values
from modelsummary.values.tensor_statistics import Readings, Readout, TensorStatistics, as_plain, sample_of, unseen
from modelsummary.values.watched import CallValues, ParameterValues, StepValues, Values

if TYPE_CHECKING:
    from modelsummary.capture.operator_mode import Execution

__all__ = ["Watching"]

_MOST_CALLS = 10_000  # of a step; a longer one is divided
_MOST_OPERATORS = 100_000  # that wait for their bounds
_SAMPLE = 65_536  # elements of a weight whose change is measured


class _Tensor:
    """A tensor in the result of a call: statistics of it and of its gradient."""

    __slots__ = ("gradient", "is_hooked", "statistics")

    def __init__(self) -> None:
        self.statistics: TensorStatistics | None = None
        self.gradient: TensorStatistics | None = None
        self.is_hooked = False


class _Step:
    """The calls of one step, while it runs."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.roots: list[Call] = []  # of forwards and of recomputations
        self.originals: dict[Call, Call] = {}  # of calls that a checkpoint ran again
        self.tensors: dict[Call, list[_Tensor]] = {}
        self.parameters: dict[str, ParameterValues] = {}
        self.stepped: set[int] = set()  # parameters that an optimizer has changed
        self.results: list[Content] = []  # of the model, and gradients
        self.has_failed = False  # a forward raised
        self.makers = NodeMakers()
        self.n_calls = 0
        self.has_graph = self.has_backward = False  # of a call, of which a backward may follow
        self.handles: list[Any] = []
        self._ranges: tuple[list[int], list[Any], int] = [], [], 0

    def call_of(self, node_number: int) -> Call | None:
        """Return the innermost call that made an autograd node."""
        starts, calls, n_roots = self._ranges
        for root in self.roots[n_roots:]:
            numbers, inside = node_ranges(root)
            starts, calls = starts + numbers, calls + inside
        self._ranges = starts, calls, len(self.roots)
        index = bisect_right(starts, node_number) - 1
        return calls[index] if index >= 0 else None

    def original(self, call: Call) -> Call | None:
        """Return the call that a checkpoint runs again as ``call``; the call itself if it is the first."""
        root = call
        while root.parent is not None:
            root = root.parent
        if root not in self.originals:
            return call
        if call is root or call in self.originals:
            return self.originals[call]
        parent = None if call.parent is None else self.original(call.parent)
        if parent is None or call.parent is None:
            return None
        index = call.parent.children.index(call)
        if index >= len(parent.children) or parent.children[index].module is not call.module:
            return None
        self.originals[call] = parent.children[index]
        return self.originals[call]


def _add_to_parent(call: Call, _arguments: Any) -> None:
    """Note a call below the one around it, which ``Watch.tree`` does after a run: a checkpoint asks within one."""
    if call.parent is not None:
        call.parent.children.append(call)


class Watching:
    """A context that watches the values of a model; ``with`` returns the ``Values``.

    Module calls are seen by the one wrapper of ``nn.Module.__call__``, operators by the dispatch mode, gradients of
    results by hooks on autograd nodes, and steps by the hooks that torch calls for all optimizers. All are removed at
    the end, also after an exception. Compiled models run eagerly meanwhile. Modules that other threads call are not
    watched, except in a backward.

    Args:
        model: the model.
        execution: runs the operators; None: they run as they are.
    """

    def __init__(self, model: nn.Module, execution: Execution | None = None) -> None:
        self.model = model
        self.values = Values()
        self._execution = execution
        self._stack: ExitStack | None = None

    def __getattr__(self, name: str) -> Any:
        hint = "; write with stats.watch() as values: and read it from values" if hasattr(Values, name) else ""
        raise AttributeError(f"watch() has no attribute {name!r}{hint}")

    def __enter__(self) -> Values:
        if self._stack is not None:
            raise InputError("this watch() has been entered before; call watch() again for a new one")
        modules = named_modules(self.model)
        self._modules = {id(module): fqn for fqn, module in modules}
        self._parameters: dict[int, str] = {}
        self._storages: dict[int, str] = {}  # what the memory of parameters and buffers is
        for fqn, module in modules:
            prefix = f"{fqn}." if fqn else ""
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._parameters.setdefault(id(parameter), prefix + name)
                    self._name_storage(parameter, f"parameter {prefix + name!r}")
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    self._name_storage(buffer, f"buffer {prefix + name!r}")
        self._thread = get_ident()
        self._watch: Watch | None = None
        self._is_recomputed = False
        self._is_stepping = False
        self._samples: dict[int, tuple[Tensor, TensorContent | None]] = {}
        self._latest = Readings(self._read)
        self._step = _Step(0)
        self._readout = Readout()
        self._contents = Contents(self._readout, self._running, self._name_of, self._is_ignored)
        if self._execution is not None:
            self._contents.around(self._execution)
        self.values._refresh = self._refresh
        with ExitStack() as stack:
            stack.callback(self._end)
            stack.enter_context(nothing_hidden())
            wrap_calls(self, self._wrapper)
            stack.callback(unwrap_calls, self)
            for register, hook in (
                (register_optimizer_step_pre_hook, self._before_step),
                (register_optimizer_step_post_hook, self._after_step),
            ):
                stack.callback(register(hook).remove)
            stack.enter_context(Operators(self._contents))
            self._stack = stack.pop_all()
        return self.values

    def __exit__(self, *_: object) -> None:
        assert self._stack is not None
        try:
            self._close()
        finally:
            self._stack.close()

    def _end(self) -> None:
        """Let go of the model and of all tensors."""
        for handle in self._step.handles:
            handle.remove()
        self.values._refresh = lambda: None
        del self._contents, self._readout, self._step, self._latest, self._samples

    # ---------------------------------------------------------------------------------------------- calls

    def _running(self) -> Call | None:
        """Return the module call that runs now; None outside of the model."""
        return None if self._watch is None else self._watch.innermost

    def _name_of(self, tensor: Tensor) -> str:
        """Return what a tensor is that no operator made."""
        plain = as_plain(tensor)
        name = None if plain is None else self._storages.get(plain.untyped_storage()._cdata)
        return name or f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} that no operator made"

    def _name_storage(self, tensor: Tensor, name: str) -> None:
        plain = None if is_lazy(tensor) else as_plain(tensor)
        if plain is not None:
            self._storages.setdefault(plain.untyped_storage()._cdata, name)

    def _is_ignored(self) -> bool:
        """Return True for the operators of an optimizer: its step counts as one."""
        return self._is_stepping and self._watch is None and _torch.running_backward() == -1

    def _wrapper(self, call_module: Callable[..., Any]) -> Callable[..., Any]:
        modules, thread, is_compiling = self._modules, self._thread, torch.compiler.is_compiling

        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._watch is None and is_compiled(module) and id(unwrap(module)) in modules:
                return unwrap(module)(*args, **kwargs)  # it keeps the ``__call__`` that it found when it was made
            if self._watch is not None or id(module) not in modules or is_compiling():
                return call_module(module, *args, **kwargs)
            is_recomputed = _torch.running_backward() != -1
            if get_ident() != thread and not is_recomputed:
                return call_module(module, *args, **kwargs)
            return self._call(call_module, module, args, kwargs, is_recomputed=is_recomputed)

        return watched

    def _call(
        self,
        call_module: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_recomputed: bool,
    ) -> Any:
        """Run a call of the model, or of a part of it that is called by itself."""
        self._is_stepping = False  # of an optimizer that raised, or that calls the model
        is_full = self._step.n_calls > _MOST_CALLS
        is_next = module is self.model and self._step.roots and not torch.is_grad_enabled()
        is_over = is_full or self._step.stepped or (is_next and not self._step.has_graph)
        if is_over and not is_recomputed:
            self._close()
        elif len(self._contents.log) > _MOST_OPERATORS:
            self._refresh()
        watch = Watch(module, began=_add_to_parent, ended=self._ended, must_run=False)
        step, self._is_recomputed = self._step, is_recomputed
        step.has_graph |= torch.is_grad_enabled()
        step.roots.append(watch.root)
        if is_recomputed:
            step.originals[watch.root] = self._original(module) or watch.root
        self._watch = watch
        try:
            output = watch.call(args, kwargs, call_module)
        except BaseException:
            step.has_failed |= not is_recomputed  # a checkpoint stops early by an exception
            raise
        finally:
            self._watch = None
            watch.root.nodes = watch.root.nodes[0], max(watch.root.nodes[1], _torch.next_node_number())
            step.n_calls += len(watch.calls)
            self._latest.forget()
        if not is_recomputed:
            for tensor in tensors_of(output):
                self._reached(tensor)
        return output

    def _reached(self, tensor: Tensor) -> None:
        """Note what a result of the model, or a gradient, holds: it is not absorbed."""
        content = self._contents.content_of(tensor)
        if content is not None:
            self._step.results.append(content)

    def _original(self, module: nn.Module) -> Call | None:
        """Return the call that a checkpoint runs again: around, or next to, the node whose backward needs it."""
        node = _torch.current_node()
        around: Call | None = None if node is None else self._step.call_of(node._sequence_nr())
        again = set(self._step.originals.values())
        first: Call | None = None
        while around is not None:
            for call in (around, *around.children):
                if call.module is module:
                    if call not in again:
                        return call
                    first = first or call
            around = around.parent
        return first

    def _ended(self, call: Call, output: Any) -> None:
        """Read the tensors in the result of a call; hook their gradients."""
        step, kept = self._step, self._step.tensors
        original = step.original(call) if self._is_recomputed else call
        if original is None:
            return
        seen = kept.get(original)
        tensors = [tensor for tensor in tensors_of(output) if not is_lazy(tensor)]
        if seen is None:
            with unseen():
                seen = kept[original] = [read for tensor in tensors if (read := self._latest.of(tensor)) is not None]
        readable = [tensor for tensor in tensors if as_plain(tensor) is not None]
        for tensor, read in zip(readable, seen, strict=False):
            if not read.is_hooked and tensor.requires_grad and tensor.grad_fn is not None:
                read.is_hooked = True
                step.handles.append(tensor.grad_fn.register_prehook(self._gradient_hook(read, tensor.output_nr)))

    def _read(self, plain: Tensor) -> _Tensor:
        read = _Tensor()
        self._take(plain, read, "statistics")
        return read

    def _take(self, plain: Tensor, holder: object, name: str) -> None:
        """Set an attribute to the statistics of a plain tensor, now or when they are fetched."""
        self._readout.add(plain, partial(setattr, holder, name), self._contents.bounds_and_sums_of(plain))

    def _gradient_hook(self, read: _Tensor, output_number: int) -> Callable[[Sequence[Tensor | None]], None]:
        def hook(gradients: Sequence[Tensor | None]) -> None:
            gradient = gradients[output_number] if output_number < len(gradients) else None
            plain = None if gradient is None else as_plain(gradient)
            if plain is not None:
                with unseen():
                    self._take(plain, read, "gradient")
                    self._reached(plain)

        return hook

    # ----------------------------------------------------------------------------------------- optimizers

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Read the gradients, and keep a sample of the weights until the step is over."""
        trained = self._trained_by(optimizer)
        if not self._step.stepped.isdisjoint(map(id, trained)):
            self._close()
        self._samples = {}
        with unseen():
            for parameter in trained:
                plain = as_plain(parameter)
                if plain is None:
                    continue
                if parameter.grad is not None:
                    self._read_gradient(parameter)
                content = self._contents.content_of(parameter)
                before = None if content is None else TensorContent.of(content, parameter)
                self._samples[id(parameter)] = sample_of(plain, _SAMPLE), before
        self._is_stepping = bool(self._samples)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Read the weights and how much they changed, and the gradients if a closure made them within the step."""
        if not self._samples:
            return
        has_called, self._is_stepping = not self._is_stepping, False
        with unseen():
            for parameter in self._trained_by(optimizer):
                sample, before = self._samples.pop(id(parameter), (None, None))
                plain = as_plain(parameter)
                if sample is None or plain is None or parameter.grad is None:
                    continue
                if has_called or self._parameters[id(parameter)] not in self._step.parameters:
                    self._read_gradient(parameter)
                after = self._contents.write(parameter)
                if after is not None:
                    gradient = parameter.grad
                    content = None if gradient is None else self._contents.content_of(gradient)
                    read = [] if content is None or gradient is None else [TensorContent.of(content, gradient)]
                    read += [] if before is None else [before]
                    self._contents.note(f"{type(optimizer).__name__}.step", read, [after], "optimizer")
                self._read_weight(parameter, plain, sample)
                self._step.stepped.add(id(parameter))
        self._samples = {}

    def _trained_by(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the parameters of the model that an optimizer trains."""
        return [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) in self._parameters and parameter.requires_grad
        ]

    def _row(self, parameter: Tensor) -> ParameterValues:
        name = self._parameters[id(parameter)]
        return self._step.parameters.setdefault(name, ParameterValues(name))

    def _read_gradient(self, parameter: Tensor) -> None:
        plain = None if parameter.grad is None else as_plain(parameter.grad)
        if plain is not None:
            self._take(plain, self._row(parameter), "gradient")
            self._reached(plain)

    def _read_weight(self, parameter: Tensor, plain: Tensor, before: Tensor | None = None) -> None:
        row = self._row(parameter)
        self._take(plain, row, "weight")
        if before is None:
            return
        after = sample_of(plain, _SAMPLE)
        if before.shape != after.shape or not after.dtype.is_floating_point:
            return
        old, new = before.float(), after.float()

        def receive_norms(norms: list[float]) -> None:
            change, weight = norms
            row.update_ratio = change / weight if weight else nan

        self._readout.receive([(new - old).norm(), old.norm()], receive_norms)

    # ------------------------------------------------------------------------------------------ the step

    def _refresh(self) -> None:
        """Fetch the numbers so far, find bad values, and show the current step."""
        step = self._step
        with unseen():
            self._readout.fetch()
        log = self._contents.settle()
        step.has_backward |= any(run.phase == "backward" for run in log)
        step.makers.resolve(log, step.call_of)
        first = [root for root in step.roots if root not in step.originals]
        keys = keys_of((call for root in first for call in root.walk()), self._modules)

        def key_of(call: ModuleCall) -> tuple[CallKey, str] | None:
            original = step.original(call) if isinstance(call, Call) else None
            return None if original is None else (keys[original], type(original.module).__name__)

        bad_values_of_step = bad_values(log, key_of, step.number)
        self.values._bad += bad_values_of_step
        for bad in bad_values_of_step:
            bad.is_final |= step.has_failed and bad.kind == "nan"  # nothing shows that it was absorbed
        is_sound = not self.values._bad or self.values._bad[-1].step != step.number
        for content in step.results + ([] if is_sound else self._state()):
            for layer in content.layers():
                if layer.bad is not None:
                    layer.bad.is_final |= layer.bad.loss_scale is None
        calls = [
            CallValues(
                *key,
                type(call.module).__name__,
                [tensor.statistics for tensor in step.tensors.get(call, ()) if tensor.statistics is not None],
                [tensor.gradient for tensor in step.tensors.get(call, ()) if tensor.statistics is not None],
            )
            for call, key in keys.items()
        ]
        if calls or step.parameters:
            order = [name for name in self._parameters.values() if name in step.parameters]
            self.values._add_step(StepValues(step.number, calls, [step.parameters[name] for name in order]))

    def _state(self) -> list[Content]:
        """Return what is known of parameters and buffers that hold NaN."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        contents = (None if is_lazy(tensor) else self._contents.content_of(tensor) for tensor in tensors)
        return [content for content in contents if content is not None and content.has_nan]

    def _close(self) -> None:
        """End the step."""
        self._refresh()
        if self._step.has_backward and not self._step.parameters:
            with unseen():
                for parameter in self._trained():
                    self._read_gradient(parameter)
                    plain = as_plain(parameter)
                    if plain is not None:
                        self._read_weight(parameter, plain)
            self._refresh()
        if self.values._bad:
            self.values._forget(self._contents.causes())
        for handle in self._step.handles:
            handle.remove()
        is_empty = not self._step.roots and not self._step.parameters
        self._step = _Step(self._step.number + (not is_empty))
        self._latest.forget()

    def _trained(self) -> list[Tensor]:
        """Return the parameters of the model with a gradient."""
        parameters = {id(parameter): parameter for parameter in self.model.parameters() if not is_lazy(parameter)}
        return [p for key, p in parameters.items() if key in self._parameters and p.grad is not None]

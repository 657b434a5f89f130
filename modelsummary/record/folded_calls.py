"""Run the first of equal module calls, and let the others return a result like it.

A run at another batch size then takes the time of the distinct blocks. It must not depend on what equal modules do not
share: while a first module runs, the attributes that it reads are noted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from modelsummary import _torch
from modelsummary.capture.execution.shape_only import ShapeOnly
from modelsummary.capture.execution.shape_tensor import ShapeTensor, Spec, new_tensor, spec_of
from modelsummary.capture.module_calls import calls_wrapped
from modelsummary.capture.modules import named_modules
from modelsummary.capture.state.held import Held
from modelsummary.capture.templates import leaves_of, map_template, same_constant, same_structure
from modelsummary.errors import in_short
from modelsummary.operators.tensor_bytes import storage_of
from modelsummary.record.call_comparison import is_constant
from modelsummary.record.events import EqualCalls

__all__ = ["FoldedCalls"]

Run = Callable[..., Any]
_PACKAGE = __name__.partition(".")[0] + "."


class _Kept(NamedTuple):
    """What the first of equal calls was given and returned, and the operators that it ran, if they are logged.

    Attributes:
        given, out: copies of the containers, which the forward may change later.
        versions: of each leaf in ``given``, the number of writes to it before the call.
    """

    given: tuple[Any, Any]
    out: Any
    log: list[Any]
    versions: list[int]


class FoldedCalls:
    """The calls of one run on shapes that are replaced by the result of an equal call.

    If they turn out to differ in this run, ``equal`` gets a problem, and the run is not valid.
    """

    def __init__(self, model: nn.Module, equal: EqualCalls, execution: ShapeOnly) -> None:
        self._equal = equal
        self._first_of = equal.first_of
        self._firsts = set(equal.first_of.values())
        self._execution = execution
        self._kept: dict[str, _Kept] = {}  # by the FQN of the first of equal calls
        self._modules = named_modules(model)
        modules = dict(self._modules)
        self._names = {id(module): fqn for fqn, module in self._modules}
        self._differing = {id(modules[fqn]): names for fqn, names in equal.differing.items()}
        self._running = 0  # first calls that run

    def first_of(self, fqn: str) -> str:
        """Return the FQN of the module whose call stands for the call of this one; empty if this one runs."""
        return self._first_of.get(fqn, "")

    def outer_modules(self) -> list[tuple[str, nn.Module]]:
        """Return the FQN and the module of each module that is not inside one whose call is left out."""
        blocks: list[tuple[str, nn.Module]] = []
        left_out = ""
        for fqn, module in self._modules:  # each parent is before its children
            if not left_out or not fqn.startswith(left_out):
                blocks.append((fqn, module))
                left_out = f"{fqn}." if fqn in self._first_of else ""
        return blocks

    def around(self, fqn: str, run: Run) -> Run:
        """Return the function that makes the result of a module, called with the module and its arguments."""
        if fqn in self._first_of:
            return partial(self._like_first, fqn, run)
        return partial(self._first, fqn, run) if fqn in self._firsts else run

    @contextmanager
    def folding(self) -> Iterator[None]:
        """Return a context in which only the first of equal calls runs."""

        def wrapper(original: Run) -> Run:
            def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                fqn = self._names.get(id(module))
                return (original if fqn is None else self.around(fqn, original))(module, *args, **kwargs)

            return call

        with self.checked(), self.reads_noted(), calls_wrapped(wrapper):
            yield

    @contextmanager
    def reads_noted(self) -> Iterator[None]:
        """Return a context in which no first call may read an attribute in which equal modules differ.

        No other code overrides ``__getattribute__`` here: modules of a class that has another one are never equal.
        """

        def read(module: object, name: str) -> Any:
            differing = self._differing.get(id(module)) if self._running else None
            if differing and (name in differing or name == "__dict__"):
                reader = str(sys._getframe(1).f_globals.get("__name__"))
                finds_tensors = name == "__dict__" and reader == nn.Module.__module__
                if not (finds_tensors or reader.startswith(_PACKAGE)):
                    self._equal.block(f"reads {name!r}, in which equal modules differ")
            return object.__getattribute__(module, name)

        with _torch.swapped(nn.Module, "__getattribute__", read):
            yield

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Return a context for the run; if it raises, the reason may be a call that was left out."""
        try:
            yield
        except Exception as error:
            self._equal.block(f"failed with {in_short(error)}")
            raise

    def _first(self, fqn: str, run: Run, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        log = self._execution.log
        begin = len(log or ())
        arguments, versions = _copied((args, kwargs)), _versions((args, kwargs))
        held = _held(module)
        self._running += 1
        try:
            out = run(module, *args, **kwargs)
        finally:
            self._running -= 1
        if held.has_changed():  # the modules that do not run would have changed it, too
            self._equal.block(f"calls {fqn!r}, which changes attributes or globals")
        self._kept[fqn] = _Kept(arguments, _copied(out), [] if log is None else log[begin:], versions)
        return out

    def _like_first(self, fqn: str, run: Run, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return a result like the result of the first call. If the calls differ in this run, run the module."""
        first = self._kept.get(self._first_of[fqn])
        with _torch.DisableTorchFunction():  # the trace would otherwise record questions as calls of the model
            tensors = None if first is None else self._corresponding(first, (args, kwargs))
            results = None if first is None or tensors is None else self._made(first.given, first.out, tensors)
        if first is None or results is None:
            self._equal.block(f"calls {fqn!r} in another way than the module that it equals")
            return run(module, *args, **kwargs)
        if self._execution.log is not None:
            self._execution.log += first.log
        return map_template(lambda leaf: results[id(leaf)] if isinstance(leaf, Tensor) else leaf, first.out)

    def _corresponding(self, first: _Kept, own: Any) -> dict[int, Tensor] | None:
        """Return the id of each tensor that the first call got -> the tensor of this call; None if they differ."""
        if not same_structure(first.given, own):
            return None
        tensors: dict[int, Tensor] = {}
        leaves = zip(leaves_of(first.given), leaves_of(own), first.versions, _versions(own), strict=True)
        for one, other, version, latest in leaves:
            if one is other and version != latest:  # a forward may decide by the values, which have changed
                return None
            if not isinstance(one, Tensor) or not isinstance(other, Tensor):
                if not (is_constant(one) and same_constant(one, other)):
                    return None
            elif tensors.setdefault(id(one), other) is not other or not self._are_alike(one, other):
                return None
        return tensors if len({id(tensor) for tensor in tensors.values()}) == len(tensors) else None

    def _are_alike(self, one: Tensor, other: Tensor) -> bool:
        if one is other:
            return True
        if not (self._is_plain(one) and self._is_plain(other)) or one.requires_grad is not other.requires_grad:
            return False
        return spec_of(one) == spec_of(other) and one.device == other.device

    def _is_plain(self, tensor: Tensor) -> bool:
        """Return True if all that a forward can find out about a tensor is its spec and its device."""
        is_usual = type(tensor) is ShapeTensor and tensor.layout is torch.strided and not vars(tensor)
        return is_usual and not self._execution.knows_values_of(tensor)

    def _made(self, args: Any, result: Any, given: dict[int, Tensor]) -> dict[int, Tensor] | None:
        """Return the id of each tensor in the first result -> the tensor of this one; None if it cannot be made."""
        results: dict[int, Tensor] = {}
        storages = {storage_of(argument) for argument in leaves_of(args) if isinstance(argument, Tensor)}
        for leaf in leaves_of(result):
            if not isinstance(leaf, Tensor):
                if not is_constant(leaf):
                    return None
            elif id(leaf) in given:
                results[id(leaf)] = given[id(leaf)]
            elif id(leaf) not in results:
                if not self._is_plain(leaf) or storage_of(leaf) in storages:
                    return None
                storages.add(storage_of(leaf))
                results[id(leaf)] = _new_like(leaf)
        return results


# In these functions, the trace would otherwise record what they do as calls of the model.


def _held(module: nn.Module) -> Held:
    """Return what the forward of ``module`` can reach."""
    held = Held()
    with _torch.DisableTorchFunction():
        held.save([module])
    return held


def _copied(value: Any) -> Any:
    """Return ``value`` with copies of its containers."""
    with _torch.DisableTorchFunction():
        return map_template(lambda leaf: leaf, value)


def _versions(value: Any) -> list[int]:
    """Return the number of writes to each tensor in ``value`` until now; 0 for other leaves."""
    with _torch.DisableTorchFunction():
        tensors = (leaf if isinstance(leaf, Tensor) else None for leaf in leaves_of(value))
        return [0 if tensor is None or tensor.is_inference() else tensor._version for tensor in tensors]


def _new_like(tensor: Tensor) -> Tensor:
    """Return a new tensor of the same spec, with a ``grad_fn`` if ``tensor`` has one."""
    like = new_tensor(spec_of(tensor), tensor.device)
    if not tensor.requires_grad:
        return like
    like.requires_grad_()
    with torch.enable_grad():
        return like if tensor.grad_fn is None else _Made.apply(like, spec_of(tensor))


class _Made(torch.autograd.Function):
    """A function that makes a tensor which requires a gradient and is not a leaf."""

    @staticmethod
    def forward(_ctx: Any, source: Tensor, spec: Spec) -> Tensor:
        """Return a tensor of the given spec."""
        return new_tensor(spec, source.device)

    @staticmethod
    def backward(_ctx: Any, *_grads: Any) -> Any:
        """Raise an error: nothing runs a backward on shapes of a record."""
        raise NotImplementedError("a folded call has no backward")

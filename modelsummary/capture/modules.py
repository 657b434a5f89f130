"""The modules of a model, and the tensors that they hold."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from modelsummary.capture.containers import tensors_of

__all__ = [
    "ModelParts",
    "cycle_in",
    "is_compiled",
    "modules_of",
    "named_modules",
    "own_tensors",
    "tensors_in_attributes",
    "tensors_of_modules",
    "unwrap",
]


_NO_TENSORS = frozenset({bool, int, float, str, type(None), dict, OrderedDict, set})  # most attributes of modules
_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})


@dataclass(frozen=True)
class ModelParts:
    """The modules and tensors of a model, found by one walk; they hold until the model changes.

    Attributes:
        model: the model.
        names: id of each module -> its FQN.
        modules: every module once, in the order of ``model.modules()``.
        tensors: the parameters and buffers, a tied one each time that it is registered.

    >>> parts = ModelParts.of(nn.Sequential(nn.Linear(4, 2), nn.ReLU()))
    >>> list(parts.names.values()), len(parts.tensors), parts.are_on_meta
    (['', '0', '1'], 2, False)
    """

    model: nn.Module
    names: dict[int, str]
    modules: list[nn.Module]
    tensors: list[Tensor]

    @classmethod
    def of(cls, model: nn.Module) -> ModelParts:
        """Return the parts that a model has now."""
        names: dict[int, str] = {}
        modules: list[nn.Module] = []
        for fqn, module in named_modules(model):
            names[id(module)] = fqn
            modules.append(module)
        return cls(model, names, modules, list(tensors_of_modules(modules)))

    @property
    def are_on_meta(self) -> bool:
        """Whether a parameter or buffer is on meta, and has no values."""
        return any(tensor.is_meta for tensor in self.tensors)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside ``torch.compile``, ``DataParallel`` and ``DistributedDataParallel``.

    >>> type(unwrap(nn.DataParallel(nn.ReLU()))).__name__
    'ReLU'
    """
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif is_compiled(model):
            model = model._modules["_orig_mod"] or model
        else:
            return model


def is_compiled(model: nn.Module) -> bool:
    """Return True if ``model`` is a result of ``torch.compile``."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # absent: nothing is compiled
    return dynamo is not None and isinstance(model, getattr(dynamo, "OptimizedModule", ()))


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the items of ``model.named_modules()``, in a tenth of the time on deep models."""
    items: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    pending = [("", model)]
    while pending:
        fqn, module = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        items.append((fqn, module))
        if not (children := module._modules):  # true of most modules
            continue
        prefix = f"{fqn}." if fqn else ""
        pending += [(prefix + name, child) for name, child in reversed(children.items()) if child is not None]
    return items


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return every module of the model once, in the order of ``model.modules()``."""
    return [module for _, module in named_modules(model)]


def cycle_in(model: nn.Module) -> str | None:
    """Return the path of a child that is one of the modules around it; None if the modules are a tree.

    >>> inner = nn.Linear(4, 2)
    >>> model = nn.Sequential(inner)
    >>> inner.parent = model
    >>> cycle_in(model), cycle_in(nn.Sequential(nn.ReLU()))
    ('0.parent', None)
    """
    done: set[int] = set()
    around: set[int] = set()
    pending: list[tuple[str, nn.Module]] = [("", model)]
    while pending:
        path, module = pending[-1]
        children = [] if id(module) in around else list(module._modules.items())
        around.add(id(module))
        for name, child in reversed(children):
            if child is not None and id(child) in around:
                return f"{path}.{name}".lstrip(".")
            if child is not None and id(child) not in done:
                pending.append((f"{path}.{name}".lstrip("."), child))
        if pending[-1][1] is module:
            pending.pop()
            around.discard(id(module))
            done.add(id(module))
    return None


def tensors_of_modules(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Yield the parameters and buffers of these modules, a tied one each time that it is registered."""
    for module in modules:
        for tensors in (module._parameters, module._buffers):
            for tensor in tensors.values():
                if tensor is not None:
                    yield tensor


def own_tensors(module: nn.Module) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Return each parameter, buffer and plain tensor attribute of a module: the dict that holds it, its name, itself.

    >>> [name for _, name, _ in own_tensors(nn.Linear(4, 2))]
    ['weight', 'bias']
    """
    holders: tuple[Any, ...] = (module._parameters, module._buffers, vars(module))
    return [
        (holder, name, value)
        for holder in holders
        if isinstance(holder, dict)  # a ScriptModule keeps them elsewhere
        for name, value in holder.items()
        if type(value) not in _NO_TENSORS and isinstance(value, Tensor)
    ]


def tensors_in_attributes(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Yield the tensors in plain attributes of these modules, without parameters and buffers."""
    without: set[int] = set()  # objects that many modules share, such as a configuration
    for module in modules:
        for name, value in vars(module).items():
            if name in _REGISTRIES or id(value) in without or (type(value) in _NO_TENSORS and not value):
                continue
            tensors = list(tensors_of(value))
            yield from tensors
            if not tensors:
                without.add(id(value))

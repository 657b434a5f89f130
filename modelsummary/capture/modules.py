"""Facts of a model's modules that do not depend on a run: names, parameters, buffers, kernel sizes."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Collection, Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from modelsummary.capture.execution.shape_tensor import ShapeTensor
from modelsummary.capture.values import tensors_of
from modelsummary.operators.tensor_bytes import nbytes_of, numel_of, shape_of

__all__ = [
    "ModuleFacts",
    "Owned",
    "Totals",
    "cycle_in",
    "groups_of",
    "kernel_size_of",
    "module_facts",
    "modules_of",
    "named_modules",
    "own_tensors",
    "tensors_in_attributes",
    "tensors_of_modules",
    "totals",
    "unwrap",
]


class Owned(NamedTuple):
    """One parameter or buffer. ``shape`` is None while a lazy module has not initialised it."""

    name: str
    key: int
    shape: list[int] | None
    numel: int
    nbytes: int
    trainable: bool


class Totals(NamedTuple):
    """Elements and bytes of a set of parameters or buffers, each tensor counted once."""

    numel: int
    trainable: int
    nbytes: int


_NOTHING = Totals(0, 0, 0)


@dataclass(slots=True)
class Below:
    """The parameters or buffers of a module and its submodules, each counted once.

    Attributes:
        single: sums over tensors that one module registers and to which one path leads.
        tied: the other tensors, by ``Owned.key``.
    """

    single: Totals = _NOTHING
    tied: dict[int, Owned] = field(default_factory=dict)

    @classmethod
    def of(cls, owned: list[Owned], tied: Container[int]) -> Below:
        """Return what a module registers itself."""
        if not owned:  # true of most modules
            return cls()
        others = {entry.key: entry for entry in owned if entry.key in tied}
        return cls(totals([entry for entry in owned if entry.key not in others] if others else owned), others)

    def add(self, other: Below) -> None:
        """Add what is below a child."""
        self.single = _plus(self.single, other.single)
        self.tied |= other.tied

    def totals(self) -> Totals:
        """Return the sums."""
        return _plus(self.single, totals(self.tied.values()))


@dataclass(slots=True)
class ModuleFacts:
    """The facts of one module, independent of its calls.

    Attributes:
        fqn: first path in ``named_modules()``.
        children: id of each child module -> its attribute name (the first, if it has several).
        parameters, buffers: tensors that the module registers itself.
        all_parameters, all_buffers: the same with the tensors of its submodules.
        has_uninitialized: whether some of these are lazy and have no shape yet.
    """

    fqn: str
    module: nn.Module
    children: dict[int, str]
    parameters: list[Owned]
    buffers: list[Owned]
    all_parameters: Below = field(default_factory=Below)
    all_buffers: Below = field(default_factory=Below)
    has_uninitialized: bool = False


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
    for module in modules:
        for name, value in vars(module).items():
            if name not in _REGISTRIES:
                yield from tensors_of(value)


def module_facts(model: nn.Module) -> dict[int, ModuleFacts]:
    """Return the facts of every module of ``model`` by ``id(module)``, in the order of ``named_modules()``.

    >>> facts = module_facts(nn.Sequential(nn.Linear(4, 2)))
    >>> [(entry.fqn, entry.all_parameters.totals().numel) for entry in facts.values()]
    [('', 10), ('0', 10)]
    """
    facts: dict[int, ModuleFacts] = {}
    for fqn, module in named_modules(model):
        children: dict[int, str] = {}
        for name, child in module._modules.items():
            if child is not None:
                children.setdefault(id(child), name)
        facts[id(module)] = ModuleFacts(
            fqn=fqn,
            module=module,
            children=children,
            parameters=[
                _owned(name, parameter) for name, parameter in module._parameters.items() if parameter is not None
            ],
            buffers=[_owned(name, buffer) for name, buffer in module._buffers.items() if buffer is not None]
            + _packed_weights(module),
        )
    _collect(facts)
    return facts


def _collect(facts: dict[int, ModuleFacts]) -> None:
    """Fill ``all_parameters`` and ``all_buffers``, descendants first, without recursion as models can be deep.

    A child that refers to a module around it, as ``self.parent = parent`` does, does not count that module's tensors.
    """
    tied = _tied(facts)
    begun: set[int] = set()
    done: set[int] = set()
    pending = [next(iter(facts))]
    while pending:
        parent = facts[pending[-1]]
        if pending[-1] not in begun:
            begun.add(pending[-1])
            missing = [child for child in parent.children if child not in begun]
            if missing:
                pending.extend(reversed(missing))
                continue
        key = pending.pop()
        if key in done:
            continue
        done.add(key)
        parent.all_parameters = Below.of(parent.parameters, tied)
        parent.all_buffers = Below.of(parent.buffers, tied)
        parent.has_uninitialized = any(entry.shape is None for entry in (*parent.parameters, *parent.buffers))
        for child in map(facts.__getitem__, parent.children):
            parent.all_parameters.add(child.all_parameters)
            parent.all_buffers.add(child.all_buffers)
            parent.has_uninitialized |= child.has_uninitialized


def _tied(facts: dict[int, ModuleFacts]) -> set[int]:
    """Return the keys of tensors that are registered twice, or by a module to which several paths lead."""
    paths = Counter(child for parent in facts.values() for child in parent.children)
    paths[next(iter(facts))] += 1
    shared = {module for module, count in paths.items() if count > 1}
    tensors: Counter[int] = Counter()
    for module, parent in facts.items():  # a module before its children
        keys = [entry.key for entry in (*parent.parameters, *parent.buffers)]
        tensors.update(keys)
        if module in shared:
            shared.update(parent.children)
            tensors.update(keys)
    return {key for key, count in tensors.items() if count > 1}


def _owned(name: str, tensor: Tensor) -> Owned:
    if type(tensor) is ShapeTensor and "quant_state" not in vars(tensor):  # on shapes, and not packed
        numel = tensor.numel()
        return Owned(name, id(tensor), list(tensor.shape), numel, numel * tensor.itemsize, tensor.requires_grad)
    if is_lazy(tensor):
        return Owned(name, id(tensor), None, 0, 0, tensor.requires_grad)
    return Owned(name, id(tensor), list(shape_of(tensor)), numel_of(tensor), nbytes_of(tensor), tensor.requires_grad)


def _packed_weights(module: nn.Module) -> list[Owned]:
    """Return the weight and bias of a quantised layer, which torch packs into an object that is not a tensor."""
    packed = vars(module).get("_packed_params")
    if not isinstance(packed, torch.ScriptObject) or not hasattr(module, "_weight_bias"):
        return []
    weight_and_bias: Any = module._weight_bias
    tensors = zip(("weight", "bias"), weight_and_bias(), strict=False)
    # Unpacking makes new tensors each time, so the packed object identifies them.
    return [
        _owned(name, tensor)._replace(key=id(packed) + position, trainable=False)
        for position, (name, tensor) in enumerate(tensors)
        if tensor is not None
    ]


def groups_of(module: nn.Module) -> int | None:
    """Return the groups of a convolution; None for other modules."""
    groups = vars(module).get("groups")
    return groups if type(groups) is int else None


def kernel_size_of(module: nn.Module) -> list[int]:
    """Return the kernel size of a convolution or pooling; empty for other modules.

    >>> kernel_size_of(nn.Conv2d(3, 8, kernel_size=(3, 5))), kernel_size_of(nn.MaxPool2d(2))
    ([3, 5], [2])
    """
    size: Any = vars(module).get("kernel_size")
    if isinstance(size, Tensor) and not size.is_meta:  # audio codecs keep it in a tensor
        size = size.tolist()
    if type(size) is int:
        return [size]
    if isinstance(size, (tuple, list)) and all(type(length) is int for length in size):
        return list(size)
    return []


_NO_TENSORS = frozenset({bool, int, float, str, type(None), dict, OrderedDict, set})  # most attributes of modules
_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})


def totals(owned: Collection[Owned]) -> Totals:
    """Return the sums over parameters or buffers."""
    if not owned:  # true of most modules
        return _NOTHING
    numel = trainable = nbytes = 0
    for entry in owned:
        numel += entry.numel
        nbytes += entry.nbytes
        if entry.trainable:
            trainable += entry.numel
    return Totals(numel, trainable, nbytes)


def _plus(one: Totals, other: Totals) -> Totals:
    if one is _NOTHING or other is _NOTHING:
        return one if other is _NOTHING else other
    return Totals(one.numel + other.numel, one.trainable + other.trainable, one.nbytes + other.nbytes)

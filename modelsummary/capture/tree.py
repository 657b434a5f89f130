"""The tree of ``LayerInfo`` of a trace, or of a model without a run, and the facts of modules that its rows show."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from modelsummary.capture.execution.shape_tensor import ShapeTensor
from modelsummary.capture.modules import named_modules
from modelsummary.capture.operator_mode import Costs
from modelsummary.capture.trace import Trace, TracedCall
from modelsummary.layer_info import UNKNOWN, CallKey, LayerInfo, total
from modelsummary.operators.operator_rules import NO_COST
from modelsummary.operators.tensor_bytes import nbytes_of, numel_of, shape_of

__all__ = ["Below", "ModuleFacts", "Owned", "call_tree", "finish_tree", "module_facts", "static_tree", "totals"]

_OTHER_THREAD = "calls in another thread"


def call_tree(facts: dict[int, ModuleFacts], trace: Trace) -> LayerInfo:
    """Return the tree with one row per call, below its caller's, and one row per module that was not called.

    A module that the forward makes is not part of the model and has no row: its operators belong to the row in which
    it ran.
    """
    tree = _Tree(facts)
    for call in trace.calls:
        tree.add_call(call)
    tree.add_uncalled()
    tree.add_costs(trace)
    return finish_tree(tree.root, facts)


def static_tree(facts: dict[int, ModuleFacts]) -> LayerInfo:
    """Return the tree of the registered modules, without a run. A shared module is expanded only once."""
    tree = _Tree(facts)
    pending = [(tree.root_facts, tree.root)]
    expanded: set[int] = set()
    while pending:
        module_facts, row = pending.pop()
        if id(module_facts.module) in expanded:
            continue
        expanded.add(id(module_facts.module))
        added = [(facts[child], tree.add_row(facts[child], row, name)) for child, name in module_facts.children.items()]
        pending.extend(reversed(added))
    return finish_tree(tree.root, facts)


class _Tree:
    """Rows under construction."""

    def __init__(self, facts: dict[int, ModuleFacts]) -> None:
        self.facts = facts
        self.root_facts = next(iter(facts.values()))
        self._by_fqn = {module_facts.fqn: module_facts for module_facts in facts.values()}
        self._first_row: dict[int, LayerInfo] = {}  # by id of the module
        self._row_of_call: dict[CallKey, LayerInfo] = {}
        self._containers: dict[tuple[int, str], LayerInfo] = {}
        self.root = self.add_row(self.root_facts, None, "")

    def add_row(self, module_facts: ModuleFacts, parent: LayerInfo | None, name: str) -> LayerInfo:
        row = LayerInfo(
            fqn=module_facts.fqn,
            name=name,
            class_name=_class_name(module_facts.module),
            layer_id=id(module_facts.module),
            module=module_facts.module,
            training=getattr(module_facts.module, "training", False),
            parent_info=parent,
            inner_layers={parameter.name: parameter.shape for parameter in module_facts.parameters},
            kernel_size=kernel_size_of(module_facts.module),
            groups=groups_of(module_facts.module),
        )
        if parent is not None:
            parent.children.append(row)
        self._first_row.setdefault(id(module_facts.module), row)
        return row

    def add_call(self, call: TracedCall) -> None:
        if call.parent is None:
            row = self.root
        else:
            module_facts = self._by_fqn[call.key[0]]
            row = self.add_row(module_facts, *self._place(module_facts, self._row_of_call[call.parent]))
        _fill(row, call)
        row.call_order = len(self._row_of_call)
        self._row_of_call[call.key] = row

    def add_costs(self, trace: Trace) -> None:
        """Add the cost of each operator to the row of its call."""
        costs: defaultdict[CallKey, Costs] = defaultdict(Costs)
        for run, _, key in trace.operators:
            if run.call.cost is not NO_COST:
                costs[self.root.key if key is None else key].add(run.call.cost)
        for key, sums in costs.items():
            row = self._row_of_call[key]
            row.self_macs, row.self_elementwise_ops = sums.macs, sums.elementwise_ops
            row.self_bytes_read, row.self_bytes_written = sums.bytes_read, sums.bytes_written
            row.self_skipped_macs, row.uncounted_ops = sums.skipped_macs, sums.uncounted
        if trace.n_in_other_threads:
            self.root.uncounted_ops[_OTHER_THREAD] = trace.n_in_other_threads

    def _place(self, module_facts: ModuleFacts, around: LayerInfo) -> tuple[LayerInfo, str]:
        """Return the parent row and the name for a call from ``around``, adding rows for containers without a call."""
        caller = self.facts[around.layer_id]
        if (name := caller.children.get(id(module_facts.module))) is not None:
            return around, name
        prefix = f"{caller.fqn}." if caller.fqn else ""
        if not module_facts.fqn.startswith(prefix) or module_facts is caller:
            return around, module_facts.fqn.rpartition(".")[2]  # shared with another part of the model
        *containers, name = module_facts.fqn[len(prefix) :].split(".")
        for container in containers:
            fqn = prefix + container
            prefix = f"{fqn}."
            key = (id(around), fqn)
            if key not in self._containers:
                self._containers[key] = self.add_row(self._by_fqn[fqn], around, container)
            around = self._containers[key]
        return around, name

    def add_uncalled(self) -> None:
        """Add rows for modules without one, in the order of registration, below the first row of their parent."""
        for module_facts in self.facts.values():
            if id(module_facts.module) not in self._first_row:
                parent_fqn, _, name = module_facts.fqn.rpartition(".")
                parent = self._first_row[id(self._by_fqn[parent_fqn].module)]
                row = self.add_row(module_facts, parent, name)
                if isinstance(parent.module, torch.jit.ScriptModule):
                    row.note = "runs inside TorchScript, where calls cannot be seen"


def _class_name(module: nn.Module) -> str:
    return str(module.original_name) if isinstance(module, torch.jit.ScriptModule) else type(module).__name__


def _fill(row: LayerInfo, call: TracedCall) -> None:
    row.executed, row.call_index = True, call.key[1]
    row.training = call.training
    row.input_size, row.input_bytes = call.input_size, call.input_bytes
    row.output_size, row.output_bytes = call.output_size, call.output_bytes
    if not call.finished:
        row.note, row.output_size = "raised an exception", UNKNOWN


def finish_tree(root: LayerInfo, facts: dict[int, ModuleFacts]) -> LayerInfo:
    """Fill in the fields that depend on the whole tree (depths, first appearances, sums) and return ``root``."""
    rows: list[LayerInfo] = []
    at_depth: Counter[int] = Counter()
    seen_modules: set[int] = set()
    seen: set[int] = set()

    def first_seen(owned: list[Owned]) -> list[Owned]:
        new = [entry for entry in owned if entry.key not in seen]
        seen.update(entry.key for entry in new)
        return new

    for row in root.walk():
        rows.append(row)
        if row.parent_info is not None:
            row.depth = row.parent_info.depth + 1
        at_depth[row.depth] += 1
        row.depth_index = at_depth[row.depth]
        module_facts = facts[row.layer_id]
        row.num_params, row.trainable_params, row.params_bytes = module_facts.all_parameters.totals()
        row.num_buffers, _, row.buffer_bytes = module_facts.all_buffers.totals()
        row.has_uninitialized = module_facts.has_uninitialized
        row.is_recursive = row.layer_id in seen_modules
        seen_modules.add(row.layer_id)
        if module_facts.parameters:
            new = first_seen(module_facts.parameters)
            row.self_params, row.self_trainable_params, row.self_params_bytes = totals(new)
            row.is_recursive |= not new
        if module_facts.buffers:
            row.self_buffers, _, row.self_buffer_bytes = totals(first_seen(module_facts.buffers))
        row.macs, row.elementwise_ops = row.self_macs, row.self_elementwise_ops
        row.bytes_read, row.bytes_written = row.self_bytes_read, row.self_bytes_written
        row.skipped_macs = row.self_skipped_macs
    for row in reversed(rows):
        if (parent := row.parent_info) is not None:
            parent.macs += row.macs
            parent.elementwise_ops += row.elementwise_ops
            parent.bytes_read += row.bytes_read
            parent.bytes_written += row.bytes_written
            parent.skipped_macs = total(parent.skipped_macs, row.skipped_macs)
    return root


# ----------------------------------------------------------------------------------- facts of modules


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


class Below(NamedTuple):
    """The parameters or buffers of a module and its submodules, each counted once.

    Attributes:
        tied: tensors that several modules register, or to which several paths lead, by ``Owned.key``.
        single: sums over the other tensors.
    """

    tied: dict[int, Owned]
    single: Totals = _NOTHING

    @classmethod
    def of(cls, owned: list[Owned], tied: Container[int], children: Iterable[Below]) -> Below:
        """Return what a module registers itself, and what is below its children."""
        parts = [child for child in children if child is not _NOTHING_BELOW]
        if owned:
            others = {entry.key: entry for entry in owned if entry.key in tied}
            single = totals([entry for entry in owned if entry.key not in others] if others else owned)
            parts.append(cls(others, single))
        if len(parts) < 2:  # true of most modules
            return parts[0] if parts else _NOTHING_BELOW
        sums = (sum(column) for column in zip(*(part.single for part in parts), strict=True))
        return cls({key: entry for part in parts for key, entry in part.tied.items()}, Totals(*sums))

    def totals(self) -> Totals:
        """Return the sums."""
        if not self.tied:
            return self.single
        return Totals(*map(sum, zip(self.single, totals(self.tied.values()), strict=True)))


_NOTHING_BELOW = Below({})


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
    all_parameters: Below = _NOTHING_BELOW
    all_buffers: Below = _NOTHING_BELOW
    has_uninitialized: bool = False


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
        children = [facts[child] for child in parent.children]
        parent.all_parameters = Below.of(parent.parameters, tied, [child.all_parameters for child in children])
        parent.all_buffers = Below.of(parent.buffers, tied, [child.all_buffers for child in children])
        parent.has_uninitialized = any(child.has_uninitialized for child in children) or any(
            entry.shape is None for entry in (*parent.parameters, *parent.buffers)
        )


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

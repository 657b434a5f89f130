"""The tree of ``LayerInfo`` of a trace, or of a model without a run."""

from __future__ import annotations

from collections import Counter, defaultdict

import torch

from modelsummary.capture.modules import ModuleFacts, Owned, groups_of, kernel_size_of, totals
from modelsummary.capture.operator_mode import Costs
from modelsummary.capture.trace import Trace, TracedCall
from modelsummary.layer_info import UNKNOWN, CallKey, LayerInfo, total
from modelsummary.operators.operator_facts import NO_COST

__all__ = ["call_tree", "finish_tree", "static_tree"]

_OTHER_THREAD = "calls in another thread"

Facts = dict[int, ModuleFacts]


def call_tree(facts: Facts, trace: Trace) -> LayerInfo:
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


def static_tree(facts: Facts) -> LayerInfo:
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

    def __init__(self, facts: Facts) -> None:
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
                costs[self.root.key if key is None else key] += run.call.cost
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


def _class_name(module: torch.nn.Module) -> str:
    return str(module.original_name) if isinstance(module, torch.jit.ScriptModule) else type(module).__name__


def _fill(row: LayerInfo, call: TracedCall) -> None:
    row.executed, row.call_index = True, call.key[1]
    row.training = call.training
    row.input_size, row.input_bytes = call.input_size, call.input_bytes
    row.output_size, row.output_bytes = call.output_size, call.output_bytes
    if not call.finished:
        row.note, row.output_size = "raised an exception", UNKNOWN


def finish_tree(root: LayerInfo, facts: Facts) -> LayerInfo:
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

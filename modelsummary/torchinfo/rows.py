"""The rows of torchinfo's table, made from a LayerInfo tree: calls in the order in which they ran."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from modelsummary.errors import harmless
from modelsummary.layer_info import LayerInfo, Sizes, first_shape, rows_around
from modelsummary.torchinfo.enums import ColumnSettings

__all__ = ["SummaryRow", "pruned", "summary_rows"]

_RECURSIVE = "(recursive)"


def _of_info(name: str, doc: str) -> Any:
    """Return a property that is an attribute of the row's ``info``."""
    return property(lambda row: getattr(row.info, name), doc=doc)


@dataclass(eq=False, repr=False)
class SummaryRow:
    """One row of ``summary``'s table, with the attributes of torchinfo's ``LayerInfo``.

    Attributes:
        info: the ``LayerInfo`` of the call, with all its facts.
        var_name: attribute under which the parent holds the module; the class name for the model.
        depth: level in the tree, 0 for the model.
        depth_index: number of the row among the rows of its depth, from 1.
        is_recursive: True if the module, or every parameter it owns, is in an earlier row.
        is_leaf_layer: True if the module has no submodules.
        kernel_size: the module's ``kernel_size``, an integer or a list of integers; None if it has none.
        num_params, trainable_params, param_bytes: elements and bytes of the module and its submodules, without
            elements masked by ``torch.nn.utils.prune``.
        own_params, own_trainable_params: summands of the column of parameters: elements of the module itself and of
            submodules without a row, each tensor in its first row.
        parent_info: row of the module that made the call; None for the model.
        children: rows below this one, of all depths.
    """

    info: LayerInfo
    var_name: str
    depth: int
    is_recursive: bool
    is_leaf_layer: bool
    kernel_size: int | list[int] | None
    num_params: int
    trainable_params: int
    param_bytes: int
    own_params: int
    own_trainable_params: int
    parent_info: SummaryRow | None = None
    depth_index: int = 0
    children: list[SummaryRow] = field(default_factory=list)

    class_name = _of_info("class_name", "Class name of the module.")
    layer_id = _of_info("layer_id", "``id()`` of the module.")
    module = _of_info("module", "The live module; None after unpickling.")
    executed = _of_info("executed", "True if the module was called.")
    groups = _of_info("groups", "Groups of a convolution; None for other modules.")
    output_bytes = _of_info("output_bytes", "Bytes of all tensors in the result.")
    macs = _of_info("macs", "Multiply-adds of the call, including the calls inside it.")
    trainable = _of_info("trainable", '``"True"``, ``"False"``, ``"Partial"``, or ``"--"`` without parameters.')
    contains_lazy_param = _of_info("has_uninitialized", "True if a parameter of the module is not initialised.")

    @property
    def input_size(self) -> list[int]:
        """Shape of the first tensor in the arguments; empty if there is none."""
        return _shape(self.info.input_size)

    @property
    def output_size(self) -> list[int]:
        """Shape of the first tensor in the result, or of the last tensor in a dict; empty if there is none."""
        size = self.info.output_size
        last = list(size.values())[-1] if isinstance(size, Mapping) and size else None
        return _shape(last if isinstance(last, list) else size)

    @property
    def inner_layers(self) -> dict[str, dict[ColumnSettings, str]]:
        """Cells of the parameters that ``verbose=2`` lists, including submodules except in the model's row."""
        counts = {name: (shape, count) for name, shape, count in self._parameters()}
        cells = {}
        for position, (name, (shape, count)) in enumerate(counts.items(), start=1):
            swapped = name == "weight" and len(shape) > 1  # inputs first
            text = str([shape[1], shape[0], *shape[2:]] if swapped else shape)
            branch = "└─" if position == len(counts) else "├─"
            cells[name] = {ColumnSettings.KERNEL_SIZE: text, ColumnSettings.NUM_PARAMS: f"{branch}{count:,}"}
        return cells

    def _parameters(self) -> Iterator[tuple[str, list[int], int]]:
        """Yield name, shape and number of elements of each parameter."""
        if self.module is None:  # unpickled: only its own parameters are known
            shapes = ((name, shape) for name, shape in self.info.inner_layers.items() if shape is not None)
            yield from ((name, shape, prod(shape)) for name, shape in shapes)
            return
        for name, parameter in self.module.named_parameters(recurse=self.parent_info is not None):
            shape = self.info.inner_layers.get(name) if is_lazy(parameter) else list(parameter.shape)
            if shape is None:
                continue
            owner, _, attribute = name.rpartition(".")
            mask = _mask(self.module.get_submodule(owner), attribute)
            count = prod(shape) if mask is None else int(mask.count_nonzero())
            yield (name if mask is None else name.removesuffix("_orig")), shape, count

    def leftover_params(self) -> int:
        """Return the number of parameters that no row below shows."""
        return self.own_params

    def leftover_trainable_params(self) -> int:
        """Return the number of ``leftover_params`` with ``requires_grad``."""
        return self.own_trainable_params

    def get_layer_name(self, show_var_name: bool, show_depth: bool) -> str:
        """Return the class name, optionally with the attribute name and the position in the tree."""
        name = f"{self.class_name} ({self.var_name})" if show_var_name and self.var_name else self.class_name
        return f"{name}: {self.depth}-{self.depth_index}" if show_depth and self.depth else name

    def num_params_to_str(self, reached_max_depth: bool) -> str:
        """Return the cell of the parameters, in parentheses if all of them are frozen."""
        if not self.num_params:
            return "--"
        count = self._shown(reached_max_depth)
        is_whole = reached_max_depth or self.is_leaf_layer
        if not count:
            return _RECURSIVE if self.is_recursive or is_whole else "--"
        return f"({count:,})" if is_whole and not self.trainable_params else f"{count:,}"

    def params_percent(self, total_params: int, reached_max_depth: bool, precision: int = 2) -> str:
        """Return the cell with the share of all parameters."""
        nothing = "     --"
        if not total_params:
            return nothing
        count = self._shown(reached_max_depth)
        if not count:
            return _RECURSIVE if self.is_recursive else nothing
        return f"{count / total_params:>{precision + 5}.{precision}%}"

    def macs_to_str(self, reached_max_depth: bool) -> str:
        """Return the cell of the mult-adds, without rows below that are shown."""
        rows = [self, *self.children] if reached_max_depth else [self]
        count = sum(row.info.self_macs for row in rows)
        return f"{count:,}" if count else "--"

    def _shown(self, reached_max_depth: bool) -> int:
        rows = [self, *self.children] if reached_max_depth else [self]
        return sum(row.own_params for row in rows)

    def __repr__(self) -> str:
        return harmless(f"{self.class_name}: {self.depth}")


# ------------------------------------------------------------------------------------------- from the tree


def summary_rows(root: LayerInfo) -> list[SummaryRow]:
    """Return the rows of the tree below ``root`` as torchinfo lists them.

    After a run, rows are calls in the order in which they began. A container that is never called precedes the calls of
    its children, and is repeated if other calls come between them. Modules that did not run have no row; the row above
    counts their parameters. Without a run, each module is listed as often as it is registered.

    >>> from modelsummary import Statistics
    >>> root = Statistics(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), (1, 4)).root
    >>> [(row.class_name, row.depth, row.own_params) for row in summary_rows(root)]
    [('Sequential', 0, 0), ('Linear', 1, 40), ('ReLU', 1, 0)]
    """
    rows = _ran(root) if root.executed else _registered(root)
    at_depth: dict[int, int] = {}
    for position, row in enumerate(rows):
        row.depth_index = at_depth[row.depth] = at_depth.get(row.depth, 0) + 1
        end = position + 1
        while end < len(rows) and rows[end].depth > row.depth:
            end += 1
        row.children = rows[position + 1 : end]
    if root.executed:
        _join_occurrences(rows)
    return rows


def _ran(root: LayerInfo) -> list[SummaryRow]:
    """Return rows of calls, and of containers each time they are entered."""
    hidden = _hidden_shares(root)
    rows: list[SummaryRow] = []
    last: dict[int, SummaryRow] = {}  # by id of the LayerInfo

    def add(info: LayerInfo) -> None:
        earlier = last.get(id(info))
        row = _row(info, last.get(id(info.parent_info)), hidden.get(id(info), []))
        last[id(info)] = row if earlier is None else replace(row, own_params=0, own_trainable_params=0)
        rows.append(last[id(info)])

    current: list[LayerInfo] = []  # the row last listed at each depth
    calls = (row for row in root.walk() if row.call_order is not None)
    for call in sorted(calls, key=lambda row: row.call_order or 0):
        for info in (*reversed(list(_containers(call))), call):
            if info is call or len(current) <= info.depth or current[info.depth].layer_id != info.layer_id:
                del current[info.depth :]
                current.append(info)
                add(info)
        for child in call.children:  # calls inside TorchScript cannot be seen
            for info in child.walk():
                if info.note and not info.executed:
                    add(info)
    return rows


def _join_occurrences(rows: list[SummaryRow]) -> None:
    """Give all rows of a container that is entered again the last row's number, and mark them ``(recursive)``."""
    seen: dict[int, SummaryRow] = {}
    for row in reversed(rows):
        last = seen.setdefault(id(row.info), row)
        if last is not row:
            row.depth_index = last.depth_index
            row.is_recursive = last.is_recursive = True


def _registered(root: LayerInfo) -> list[SummaryRow]:
    """Return one row for each time a module is registered."""
    first: dict[int, LayerInfo] = {}
    for info in root.walk():
        first.setdefault(info.layer_id, info)
    rows: list[SummaryRow] = []
    seen: set[int] = set()
    pending: list[tuple[LayerInfo, str, SummaryRow | None]] = [(root, root.class_name, None)]
    while pending:
        info, name, above = pending.pop()
        row = replace(_row(info, above, []), var_name=name, depth=0 if above is None else above.depth + 1)
        if info.layer_id in seen:
            row = replace(row, is_recursive=True, own_params=0, own_trainable_params=0)
        seen.add(info.layer_id)
        rows.append(row)
        children = info.module._modules.items() if info.module is not None else ()
        below = [(first[id(child)], name, row) for name, child in children if child is not None]
        pending.extend(reversed(below))
    return rows


def _containers(call: LayerInfo) -> Iterator[LayerInfo]:
    """Return the containers above a call, which are never called, up to the module that made the call."""
    return takewhile(lambda above: not above.executed, rows_around(call))


def _hidden_shares(root: LayerInfo) -> dict[int, list[LayerInfo]]:
    """Return the rows without a row in the table, by the ``id`` of the nearest row above that has one."""
    shown: set[int] = set()
    for row in root.walk():
        if row.executed or row.note:
            for above in (row, *rows_around(row)):
                if id(above) in shown:
                    break
                shown.add(id(above))
    hidden: dict[int, list[LayerInfo]] = {}
    nearest: dict[int, int] = {}
    for row in root.walk():
        nearest[id(row)] = id(row) if id(row) in shown or row.parent_info is None else nearest[id(row.parent_info)]
        if nearest[id(row)] != id(row):
            hidden.setdefault(nearest[id(row)], []).append(row)
    return hidden


def _row(info: LayerInfo, above: SummaryRow | None, hidden: list[LayerInfo]) -> SummaryRow:
    shares = [info, *hidden]
    all_pruned = pruned(info.module.modules()) if info.module is not None else _NONE_PRUNED
    shares_pruned = pruned(row.module for row in shares if row.module is not None and row.self_params)
    return SummaryRow(
        info=info,
        var_name=info.name if info.parent_info is not None else info.class_name,
        depth=info.depth,
        is_recursive=info.is_recursive,
        is_leaf_layer=info.module is None or not any(info.module.children()),
        kernel_size=_kernel_size(info),
        num_params=info.num_params - all_pruned.params,
        trainable_params=info.trainable_params - all_pruned.trainable,
        param_bytes=info.params_bytes - all_pruned.bytes,
        own_params=sum(row.self_params for row in shares) - shares_pruned.params,
        own_trainable_params=sum(row.self_trainable_params for row in shares) - shares_pruned.trainable,
        parent_info=above,
    )


def _kernel_size(info: LayerInfo) -> int | list[int] | None:
    size: Any = vars(info.module).get("kernel_size") if info.module is not None else None
    return size if type(size) is int else info.kernel_size or None


def _shape(sizes: Sizes) -> list[int]:
    shape = first_shape(sizes)
    return list(shape) if isinstance(shape, list) else []


# ------------------------------------------------------------------------------------------------ pruning


@dataclass(frozen=True)
class _Pruned:
    params: int = 0
    trainable: int = 0
    bytes: int = 0


_NONE_PRUNED = _Pruned()


def pruned(modules: Iterable[nn.Module]) -> _Pruned:
    """Return the elements, trainable elements and bytes that ``torch.nn.utils.prune`` masks in own parameters."""
    params = trainable = size = 0
    for module in modules:
        for name, parameter in module._parameters.items():
            mask = _mask(module, name)
            if parameter is None or mask is None:
                continue
            masked = mask.numel() - int(mask.count_nonzero())
            params += masked
            trainable += masked if parameter.requires_grad else 0
            size += masked * parameter.element_size()
    return _Pruned(params, trainable, size)


def _mask(module: nn.Module, name: str) -> Tensor | None:
    """Return the mask of a pruned parameter: ``prune`` turns ``weight`` into ``weight_orig`` and ``weight_mask``."""
    mask = module._buffers.get(f"{name.removesuffix('_orig')}_mask") if name.endswith("_orig") else None
    return None if mask is None or mask.is_meta else mask

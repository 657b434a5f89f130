"""The kind of operator that a node of the explorer is, by the table of operators."""

from __future__ import annotations

import re
from functools import cache

import torch

from modelsummary.operators.names import class_by_name
from modelsummary.operators.operator_rules import op_rule
from modelsummary.views.explorer.nodes import ExplorerNode

__all__ = ["kind_of"]

_PRODUCTS = {  # kind of an operator with multiply-adds -> a pattern of names
    "convolution": re.compile("conv"),
    "attention": re.compile("attention|attn"),
    "recurrent": re.compile("lstm|gru|rnn"),
}
_MULTIPLIES = re.compile("linear|conv|attention|attn|lstm|gru|rnn")
_KINDS = {  # class of operator -> kind
    "norm": "normalization",
    "batch_norm": "normalization",
    "softmax": "softmax",
    "pool": "pooling",
    "reduction": "reduction",
    "index": "lookup",
    "copy": "views and copies",
    "elementwise": "element-wise",
}
_CONVERSIONS = {"getitem", "float", "double", "half", "bfloat16", "int", "long", "bool", "type_as", "cast", "identity"}


def kind_of(node: ExplorerNode) -> str:
    """Return the kind of operator of a function, of a layer or of an operator of a file; empty if it has none.

    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> from modelsummary.views.explorer.nodes import nodes_of
    >>> stats = Statistics(nn.Sequential(nn.Conv2d(3, 4, 1), nn.LayerNorm(8), nn.ReLU()), (1, 3, 8, 8))
    >>> [kind_of(node) for node in nodes_of(stats.root, stats._dataflow().steps)][1:-1]
    ['', 'convolution', 'normalization', 'element-wise']
    """
    multiplies = node.row is not None and node.row.self_macs > 0  # itself, as attention does beside its layers
    is_leaf = not node.children or (multiplies and all(child.kind == "module" for child in node.children))
    if not is_leaf or node.kind not in ("module", "function"):
        return ""
    if node.row is None:
        macs = 0 if node.step is None else node.step.macs
        names = [node.name]
    else:
        macs = node.row.self_macs
        classes = [] if node.row.module is None else type(node.row.module).__mro__
        names = [_operator(name) for name in (node.row.class_name, *(cls.__name__ for cls in classes))]
    if macs:
        kinds = (kind for kind, pattern in _PRODUCTS.items() if any(map(pattern.search, names)))
        return next(kinds, "matrix product")
    if node.row is not None and any(map(_MULTIPLIES.search, names)):  # another layer takes its weights, or none does
        return ""
    return next(filter(None, map(_kind_by_name, names)), "")


def _operator(name: str) -> str:
    """Return the name of a layer, or of an operator of a file, as torch writes the name of the operator.

    >>> _operator("RMSNorm"), _operator("ReduceMean"), _operator("aten.relu.default")
    ('rms_norm', 'mean', 'relu')
    """
    name = name.removeprefix("aten.").partition(".")[0].removeprefix("Reduce")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


@cache
def _kind_by_name(name: str) -> str:
    packets = [getattr(torch.ops.aten, base, None) for base in (name, name.replace("_", ""))]  # re_lu
    packet = next(filter(None, packets), None)
    if name in _CONVERSIONS:
        return _KINDS["copy"]
    if packet is None:
        return _KINDS.get(class_by_name("aten", name) or "", "")
    rule = op_rule(getattr(packet, packet.overloads()[0]))
    return _KINDS["copy"] if rule.is_view else _KINDS.get(rule.op_class, "")

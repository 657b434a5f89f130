"""Split layers and functions that add a bias into two nodes: the product, and the addition."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Graph, GraphModule, Node

from modelsummary._torch import ConvNd, ConvTransposeNd
from modelsummary.fx.meta_info import info_of

__all__ = ["split_bias_additions"]

_CONVOLUTIONS: dict[Any, tuple[Callable[..., Any], int]] = {
    nn.Conv1d: (F.conv1d, 1),
    nn.Conv2d: (F.conv2d, 2),
    nn.Conv3d: (F.conv3d, 3),
    nn.ConvTranspose1d: (F.conv_transpose1d, 1),
    nn.ConvTranspose2d: (F.conv_transpose2d, 2),
    nn.ConvTranspose3d: (F.conv_transpose3d, 3),
}
_DIMS_OF: dict[Any, int] = dict(_CONVOLUTIONS.values())
_FUNCTIONS = {F.linear, torch.addmm, torch.addbmm, torch.Tensor.addmm, torch.Tensor.addbmm, *_DIMS_OF}


def split_bias_additions(gm: GraphModule) -> int:
    """Split Linear, Conv1-3d, ConvTranspose1-3d, addmm and addbmm nodes into product and addition, in place.

    These nodes stay as they are: layers without bias, with hooks or of a derived class, transposed convolutions called
    with an ``output_size``, and functions with ``beta=0`` or ``out``. Results are equal up to rounding.

    Returns:
        Number of nodes that were split. Call ``gm.recompile()`` afterwards.
    """
    split = 0
    for node in list(gm.graph.nodes):
        with gm.graph.inserting_before(node):
            new = _split_module(gm, node) if node.op == "call_module" else _split_function(gm.graph, node)
        if new is None:
            continue
        for inner in _until(new, node):
            inner.meta.update(node.meta)
            inner.meta["info"] = info_of(node).fresh()
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
        split += 1
    return split


def _until(new: Node, old: Node) -> list[Node]:
    """Return the nodes that replace ``old``: they precede it, and have no ``meta["info"]`` yet."""
    nodes = [new]
    before = new.prev
    while before is not old and "info" not in before.meta and before.op not in ("placeholder", "root"):
        nodes.append(before)
        before = before.prev
    return nodes


def _split_module(gm: GraphModule, node: Node) -> Node | None:
    module = gm.get_submodule(str(node.target))
    kind = type(module)
    if kind is not nn.Linear and kind not in _CONVOLUTIONS:
        return None
    assert isinstance(module, (nn.Linear, ConvNd))
    if module.bias is None or node.kwargs or len(node.args) != 1 or module._forward_hooks or module._forward_pre_hooks:
        return None
    graph, x = gm.graph, node.args[0]
    weight, bias = (graph.get_attr(f"{node.target}.{name}") for name in ("weight", "bias"))
    if isinstance(module, nn.Linear):
        return _added(graph, graph.call_function(F.linear, (x, weight)), bias)
    function, dims = _CONVOLUTIONS[kind]
    padding: Any = module.padding
    if module.padding_mode != "zeros":
        x = graph.call_function(F.pad, (x, module._reversed_padding_repeated_twice), {"mode": module.padding_mode})
        padding = 0
    options: tuple[Any, ...] = (None, module.stride, padding)
    if isinstance(module, ConvTransposeNd):
        options += (module.output_padding, module.groups, module.dilation)
    else:
        options += (module.dilation, module.groups)
    return _added(graph, graph.call_function(function, (x, weight, *options)), _as_channels(graph, bias, dims))


def _split_function(graph: Graph, node: Node) -> Node | None:
    function: Any = node.target
    if node.op == "call_method" and node.target in ("addmm", "addbmm"):
        function = getattr(torch, str(node.target))
    try:
        if node.op not in ("call_function", "call_method") or function not in _FUNCTIONS:
            return None
    except TypeError:  # the function is not hashable
        return None
    if function in (torch.addmm, torch.addbmm, torch.Tensor.addmm, torch.Tensor.addbmm):
        return _split_add(graph, node, function)
    bias = node.kwargs.get("bias", node.args[2] if len(node.args) > 2 else None)
    if not isinstance(bias, Node):
        return None
    args = (*node.args[:2], None, *node.args[3:]) if len(node.args) > 2 else node.args
    kwargs = {name: value for name, value in node.kwargs.items() if name != "bias"}
    product = graph.call_function(function, args, kwargs)
    return _added(graph, product, bias if function is F.linear else _as_channels(graph, bias, _DIMS_OF[function]))


def _split_add(graph: Graph, node: Node, function: Any) -> Node | None:
    """Return nodes for ``beta * input + alpha * (a @ b)``, summed over the batch for addbmm."""
    if "out" in node.kwargs or node.kwargs.get("beta") == 0:  # beta=0 ignores the input, but 0 * NaN is NaN
        return None
    arguments = _ADD.bind(*node.args, **node.kwargs).arguments
    product = graph.call_function(
        torch.bmm if "bmm" in function.__name__ else torch.mm, (arguments["a"], arguments["b"])
    )
    if "bmm" in function.__name__:
        product = graph.call_method("sum", (product, 0))
    if arguments.get("alpha", 1) != 1:
        product = graph.call_function(operator.mul, (product, arguments["alpha"]))
    bias = arguments["input"]
    if arguments.get("beta", 1) != 1:
        bias = graph.call_function(operator.mul, (bias, arguments["beta"]))
    return _added(graph, product, bias)


def _signature(input: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> None:
    """Declare the arguments of addmm and addbmm."""


_ADD = inspect.signature(_signature)


def _as_channels(graph: Graph, bias: Any, dims: int) -> Node:
    return graph.call_method("view", (bias, -1, *[1] * dims))


def _added(graph: Graph, product: Node, bias: Any) -> Node:
    return graph.call_function(operator.add, (product, bias))

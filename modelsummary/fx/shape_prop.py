"""Run a graph node by node on tensors without data, and note the shapes of each node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.nn.utils.rnn import PackedSequence

from modelsummary._torch import tensor_metadata, tree_map
from modelsummary.capture.containers import map_tensors, tensors_of
from modelsummary.capture.devices import device_of, is_there
from modelsummary.capture.exclusive import exclusive
from modelsummary.capture.execution.recurrent import fused_recurrent
from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.modules import modules_of, tensors_of_modules
from modelsummary.capture.operator_mode import Operators
from modelsummary.capture.run import running
from modelsummary.errors import InputError, TraceError, in_short
from modelsummary.fx import registry
from modelsummary.fx.meta_info import MetaInfo, info_of
from modelsummary.operators.operator_rules import OpCost

__all__ = ["NodeRunner", "ShapeProp", "checked", "in_order", "note_shapes", "without_data"]


class NodeRunner(Interpreter):
    """An interpreter that runs a graph and notes the shapes of each node."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False  # the error names the node

    def run_node(self, n: Node) -> Any:
        """Run one node. Raise ``TraceError`` if it fails."""
        try:
            self.begin(n)
            result = super().run_node(n)
        except (InputError, TraceError):
            raise
        except Exception as error:
            raise TraceError(f"node {n.name!r} ({n.op} {n.target}) failed: {in_short(error)}") from error
        info = n.meta["info"] = info_of(n).fresh()
        first = next(tensors_of(result), None)
        info.shape = tuple(first.shape) if first is not None else None
        if first is not None:
            n.meta["tensor_meta"] = _metadata(result)
            n.meta["type"] = type(result)
        return result

    def begin(self, node: Node) -> None:
        """Prepare to run a node."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function, or its registered shape implementation."""
        impl = registry.find_impl(registry.shape_impls, target)
        return target(*args, **kwargs) if impl is None else _opaque(impl, args, kwargs)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method, or its registered shape implementation."""
        impl = registry.find_impl(registry.shape_impls, getattr(Tensor, target, None))
        return super().call_method(target, args, kwargs) if impl is None else _opaque(impl, args, kwargs)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module, or its registered shape implementation."""
        module = self.fetch_attr(target)
        impl = registry.find_impl(registry.leaf_impls, module)
        return module(*args, **kwargs) if impl is None else _opaque(impl, (module, *args), kwargs)


def _opaque(impl: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of an implementation. It depends on the inputs, so that earlier nodes have a backward."""
    result = impl(*args, **kwargs)
    modules = [argument for argument in args[:1] if isinstance(argument, nn.Module)]
    tensors = [*tensors_of((args, kwargs)), *(parameter for module in modules for parameter in module.parameters())]
    needing = [tensor for tensor in tensors if tensor.requires_grad]
    if not needing:
        return result
    return map_tensors(
        lambda tensor: _Connected.apply(tensor, *needing) if tensor.is_floating_point() else tensor, result
    )


class _Connected(torch.autograd.Function):
    """An identity whose result depends on other tensors in an unknown way."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, *tensors: Tensor) -> Tensor:
        """Return a copy of the first tensor."""
        ctx.specs = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        return result.detach().clone()

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> Any:
        """Return empty gradients of the right shapes."""
        return None, *(torch.empty(size, dtype=dtype, device=device) for size, dtype, device in ctx.specs)


class ShapeProp:
    """A pass that fills ``meta["tensor_meta"]`` and ``meta["info"].shape`` of every node without computing anything.

    Args:
        module: the graph. Its functions need a meta kernel, or a shape registered by ``register_shape_impl``.

    Raises:
        InputError: ``module`` is not a graph module.

    >>> gm = torch.fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()))
    >>> ShapeProp(gm).propagate(torch.empty(2, 3, 16, 16)).shape
    torch.Size([2, 8, 14, 14])
    """

    def __init__(self, module: GraphModule) -> None:
        self.module = checked(module)

    @exclusive
    def propagate(self, *args: Any, device: torch.device | str | None = None) -> Any:
        """Run the graph on tensors like ``args``, without data.

        Args:
            *args: inputs of the graph; only their shapes and dtypes matter.
            device: device that the tensors report, present or not. Default: the device of the module.

        Returns:
            The graph's result, with tensors without data.

        Raises:
            TraceError: a node failed.
        """
        target = torch.device(device) if device is not None else None
        with without_data(self.module, CallArguments(args, {}, None), target) as (positional, kwargs):
            return NodeRunner(self.module).run(*in_order(self.module, positional, kwargs))


def checked(module: GraphModule) -> GraphModule:
    """Return a graph module unchanged. Raise ``InputError`` for anything else."""
    if not isinstance(module, GraphModule):
        hint = "; trace it first: symbolic_trace(model, meta_args={...})" if isinstance(module, nn.Module) else ""
        raise InputError(f"expected a torch.fx.GraphModule, got {type(module).__name__}: {module!r:.80}{hint}")
    return module


def _metadata(result: Any) -> Any:
    """Return a result with metadata instead of tensors; a ``PackedSequence``, which holds only tensors, as a tuple."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            return tuple(map(of, leaf))
        return tensor_metadata(leaf) if isinstance(leaf, Tensor) else leaf

    return tree_map(of, result, is_leaf=lambda leaf: isinstance(leaf, PackedSequence))


def note_shapes(
    module: GraphModule, call: CallArguments, origins: Mapping[Node, tuple[str, int]], execution: str
) -> None:
    """Note the shapes and the origin of every node.

    Args:
        origins: node -> FQN and call index of its module.
        execution: ``"shape"`` on meta tensors, ``"real"`` on data.
    """
    for node in module.graph.nodes:
        node.meta["info"] = MetaInfo(*origins.get(node, ("", 0)))
    with without_data(module, call, None, really=execution == "real") as (args, kwargs):
        NodeRunner(module).run(*in_order(module, args, kwargs))


def in_order(module: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments in the order of the placeholders. Raise ``TraceError`` if they do not match."""
    names = [str(node.target) for node in module.graph.nodes if node.op == "placeholder"]
    positional = [*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs)]
    if len(positional) != len(names) or not kwargs.keys() <= set(names):
        raise TraceError(f"the graph takes {len(names)} argument(s) {names}, got {len(args)} and {sorted(kwargs)}")
    return positional


@contextmanager
def without_data(
    module: nn.Module,
    call: CallArguments,
    device: torch.device | None,
    count: Callable[[OpCost], object] | None = None,
    *,
    really: bool = False,
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Run the body with a module, and yielded arguments, on tensors without data and with gradients.

    The tensors report ``device``, present or not, so that its kernels are chosen. The module is restored afterwards.

    Args:
        device: device of the tensors; None: the device of the module.
        count: gets the cost of each operator; None: costs are not added up.
        really: run on data, on the module's own device.
    """
    leaves = {id(tensor): tensor if tensor.is_leaf else tensor.detach().requires_grad_() for tensor in call.tensors()}
    call = CallArguments(*call.on_meta(lambda tensor: leaves.get(id(tensor), tensor)), call.device, call.nothing_found)
    modules = modules_of(module)
    tensors = [*tensors_of_modules(modules), *call.tensors()]
    target = device or device_of(iter(tensors))
    grad = really or is_there(target)  # autograd asks a device for its stream
    with (
        torch.inference_mode(False),
        running(modules, call, on_shapes=not really, grad=grad, device=target) as (execution, args, kwargs),
        nullcontext() if really else fused_recurrent(),
        Operators(execution, count),
    ):
        yield args, kwargs

"""Run a graph without data, node by node: shapes, and what else can be seen of each node while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.utils._pytree import tree_map

from modelsummary.capture.devices import device_of, is_there
from modelsummary.capture.exclusive import exclusive
from modelsummary.capture.execution.recurrent import fused_lstm
from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.modules import modules_of, tensors_of_modules
from modelsummary.capture.operators import Counting, Operators, Uncounted
from modelsummary.capture.run import running
from modelsummary.capture.values import map_tensors, tensors_of
from modelsummary.errors import DataDependentError, InputError, TraceError
from modelsummary.fx import registry
from modelsummary.fx.meta_info import MetaInfo

__all__ = ["NodeRunner", "ShapeProp", "checked", "in_order", "needs_values", "note_shapes", "said", "without_data"]


class NodeRunner(Interpreter):
    """Runs a graph and notes the shapes of each node."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False  # the error names the node

    def run_node(self, n: Node) -> Any:
        """Run one node. Raises ``TraceError`` if that fails."""
        try:
            with self.around(n):
                result = super().run_node(n)
        except (InputError, TraceError):
            raise
        except Exception as error:
            raise TraceError(f"node {n.name!r} ({n.op} {n.target}) failed: {said(error)}") from error
        info = n.meta["info"] = n.meta["info"].fresh() if isinstance(n.meta.get("info"), MetaInfo) else MetaInfo()
        first = next(tensors_of(result), None)
        info.shape = tuple(first.shape) if first is not None else None
        if first is not None:
            n.meta["tensor_meta"] = tree_map(
                lambda each: _extract_tensor_metadata(each) if isinstance(each, Tensor) else each, result
            )
            n.meta["type"] = type(result)
        self.after(n, result)
        return result

    def around(self, node: Node) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Context in which a node runs."""
        return nullcontext()

    def after(self, node: Node, result: Any) -> None:
        """A node has run."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function, or what is registered to give its shape."""
        impl = registry.find_impl(registry.shape_impls, target)
        return target(*args, **kwargs) if impl is None else _opaque(impl, args, kwargs)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method, or what is registered to give the shape of that of tensors."""
        impl = registry.find_impl(registry.shape_impls, getattr(Tensor, target, None))
        return super().call_method(target, args, kwargs) if impl is None else _opaque(impl, args, kwargs)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module, or what is registered to give its shape."""
        module = self.fetch_attr(target)
        impl = registry.leaf_impl(module)
        return module(*args, **kwargs) if impl is None else _opaque(impl, (module, *args), kwargs)


def _opaque(impl: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an implementation gives; gradients pass through, so that what comes before has a backward."""
    result = impl(*args, **kwargs)
    modules = [each for each in args[:1] if isinstance(each, nn.Module)]
    given = [*tensors_of((args, kwargs)), *(each for module in modules for each in module.parameters())]
    needing = [each for each in given if each.requires_grad]
    if not needing:
        return result
    return map_tensors(lambda each: _Connected.apply(each, *needing) if each.is_floating_point() else each, result)


class _Connected(torch.autograd.Function):
    """A tensor that depends on others in a way that is not known."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, *given: Tensor) -> Tensor:
        """The first tensor."""
        ctx.given = [(each.shape, each.dtype, each.device) for each in given]
        return result.detach().clone()

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> Any:
        """Gradients of the right shapes."""
        return None, *(torch.empty(size, dtype=dtype, device=device) for size, dtype, device in ctx.given)


class ShapeProp:
    """Gives every node ``meta["tensor_meta"]`` and ``meta["info"].shape`` without computing anything.

    Args:
        module: the graph, which may hold functions that have a ``register_shape_impl`` only.
    """

    def __init__(self, module: GraphModule) -> None:
        self.module = checked(module)

    @exclusive
    def propagate(self, *args: Any, device: torch.device | str | None = None) -> Any:
        """Run the graph on tensors like ``args``, without data.

        Args:
            device: that the tensors say they are on, which need not be there; None: that of the module.

        Returns:
            The result, of tensors without data.

        Raises:
            TraceError: a node failed.
        """
        place = torch.device(device) if device is not None else None
        with without_data(self.module, CallArguments(args, {}, None), place, Uncounted()) as (own, kwargs):
            return NodeRunner(self.module).run(*in_order(self.module, own, kwargs))


def checked(module: GraphModule) -> GraphModule:
    """The graph module. Raises ``InputError`` if it is none."""
    if not isinstance(module, GraphModule):
        hint = "; trace it first: symbolic_trace(model, meta_args={...})" if isinstance(module, nn.Module) else ""
        raise InputError(f"expected a torch.fx.GraphModule, got {type(module).__name__}: {module!r:.80}{hint}")
    return module


def note_shapes(
    module: GraphModule, call: CallArguments, origins: Mapping[Node, tuple[str, int]], execution: str
) -> None:
    """Note the shapes of every node, and where it comes from.

    Args:
        execution: ``"shape"``: on meta, ``"real"``: with values.
    """
    for node in module.graph.nodes:
        node.meta["info"] = MetaInfo(*origins.get(node, ("", 0)))
    modules = modules_of(module)
    on_shapes = execution == "shape"
    with (
        running(modules, call, on_shapes=on_shapes, grad=True) as (executes, args, kwargs),
        Operators(Uncounted(), executes),
    ):
        NodeRunner(module).run(*in_order(module, args, kwargs))


def in_order(module: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Arguments as the placeholders take them. Raises ``TraceError`` if they are not those of the graph."""
    names = [str(node.target) for node in module.graph.nodes if node.op == "placeholder"]
    given = [*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs)]
    if len(given) != len(names) or not kwargs.keys() <= set(names):
        raise TraceError(f"the graph takes {len(names)} argument(s) {names}, got {len(args)} and {sorted(kwargs)}")
    return given


@contextmanager
def without_data(
    module: nn.Module,
    call: CallArguments,
    device: torch.device | None,
    counting: Counting,
    *,
    really: bool = False,
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Context in which a module runs with gradients on tensors without data; yields the arguments.

    The tensors are on ``device``, which need not be there, so that its kernels are chosen. The module is afterwards as
    it was.

    Args:
        device: None: that of the module.
        counting: gets the costs of the operators.
        really: run with values, on the module's own device.
    """
    leaves = {id(each): each if each.is_leaf else each.detach().requires_grad_() for each in call.tensors()}
    call = CallArguments(*call.on_meta(lambda tensor: leaves.get(id(tensor), tensor)), call.device, call.nothing_found)
    modules = modules_of(module)
    own = [*tensors_of_modules(modules), *call.tensors()]
    place = device or device_of(iter(own))
    grad = really or is_there(place)  # autograd asks a device for its stream
    with (
        torch.inference_mode(False),
        running(modules, call, on_shapes=not really, grad=grad, device=place) as (execution, args, kwargs),
        nullcontext() if really else fused_lstm(),
        Operators(counting, execution),
    ):
        yield args, kwargs


def said(error: Exception) -> str:
    """Kind of an error, and the first line of what it says."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}"


def needs_values(error: BaseException | None) -> bool:
    """What failed is an operator whose result depends on the values of tensors."""
    return isinstance(error, DataDependentError)

"""Profile a graph without data: the memory that each node keeps for the backward, and its costs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from modelsummary import _torch
from modelsummary._torch import tree_leaves
from modelsummary.capture.backward import gradients_of
from modelsummary.capture.containers import map_tensors
from modelsummary.capture.devices import device_of, is_there
from modelsummary.capture.exclusive import exclusive
from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.modules import modules_of, tensors_of_modules
from modelsummary.capture.operator_mode import Costs
from modelsummary.capture.run import no_collection
from modelsummary.errors import InputError, TraceError, in_short
from modelsummary.fx import registry
from modelsummary.fx.meta_info import TensorSet, info_of, sim_env
from modelsummary.fx.profile_table import profile_table
from modelsummary.fx.shape_prop import NodeRunner, checked, in_order, without_data
from modelsummary.fx.traced_module import FunctionModule
from modelsummary.operators.operator_rules import OpCost

__all__ = ["FlopProfiler", "GraphProfiler", "flop_count", "profile_call", "symbolic_profile"]


def symbolic_profile(
    gm: GraphModule, *args: Any, device: torch.device | str | None = None, verbose: bool = False, **kwargs: Any
) -> GraphModule:
    """Profile every node of a graph in its current mode: memory and FLOPs of forward and backward.

    The graph runs once on tensors without data. A graph that needs values runs on data, and is restored afterwards.

    Args:
        gm: graph of ``symbolic_trace``, or any other graph module.
        *args: its inputs; only their shapes, dtypes and devices matter.
        **kwargs: its inputs by name.
        device: device whose kernels are assumed. Default: the module's own; the CPU if it is not present. Attention
            keeps its scores on ``"meta"``; on other devices the fused kernel is assumed.
        verbose: print the table of ``profile_table``.

    Returns:
        ``gm``, with the ``MetaInfo`` of its nodes (``node.meta["info"]``) filled.

    Raises:
        InputError: ``gm`` is not a graph module.
        TraceError: a node failed.

    >>> from modelsummary.fx import symbolic_trace
    >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    >>> gm = symbolic_trace(model, meta_args={"input": (x := torch.rand(4, 8))})
    >>> [node.meta["info"].fwd_flop for node in symbolic_profile(gm, x).graph.nodes if node.op == "call_module"]
    [2048, 0, 2048]
    """
    profile_call(gm, CallArguments(args, kwargs, None), device)
    if verbose:
        print(profile_table(gm))
    return gm


class GraphProfiler:
    """A profiler of memory: it fills the sizes in the ``MetaInfo`` of each node.

    Args:
        module: the graph.
    """

    def __init__(self, module: GraphModule) -> None:
        self.module = module

    def propagate(self, *args: Any, device: torch.device | str | None = None, **kwargs: Any) -> Any:
        """Run the graph without data. Arguments are as for ``symbolic_profile``. Return the graph's result."""
        return profile_call(self.module, CallArguments(args, kwargs, None), device, counts=False)


class FlopProfiler:
    """A profiler of costs: it fills the FLOPs, and registered costs, in the ``MetaInfo`` of each node.

    Args:
        module: the graph.
    """

    def __init__(self, module: GraphModule) -> None:
        self.module = module

    def propagate(self, *args: Any, device: torch.device | str | None = None, **kwargs: Any) -> Any:
        """Run the graph forward and backward without data. Arguments are as for ``symbolic_profile``."""
        return profile_call(self.module, CallArguments(args, kwargs, None), device, keeps_memory=False)


@exclusive
def flop_count(
    module: nn.Module | Callable[..., Any],
    *args: Any,
    device: torch.device | str | None = None,
    verbose: bool = False,
    **kwargs: Any,
) -> tuple[int, int]:
    """Return the FLOPs of products in a forward, and in the backward from all of its results: 2 per multiply-add.

    Costs registered for operators (``register_op_cost``) count, costs registered for nodes
    (``register_flop_count_impl``) do not.

    Args:
        module: module, or function of tensors. It runs once, without data unless it needs values.
        *args: its arguments. Inputs of a module get gradients if they require them, inputs of a function always.
        **kwargs: its arguments by name.
        device: device whose kernels are assumed. Default: the device of the module and the inputs.
        verbose: print both figures, and the operators that have no formula.

    Raises:
        InputError: ``module`` is not a module or function.
        TraceError: the call failed; the original exception is ``__cause__``.

    >>> flop_count(nn.Linear(8, 16), torch.rand(4, 8))  # 2 x 4 x 8 x 16; the input takes no gradient
    (1024, 1024)
    """
    if not callable(module) or isinstance(module, type):
        raise InputError(f"expected a module or a function, got {type(module).__name__}: {module!r:.80}")
    called = module if isinstance(module, nn.Module) else FunctionModule(module)
    call = CallArguments(args, kwargs, None)
    target = _place(called, call, device)

    def run(*, really: bool) -> tuple[Costs, Costs]:
        phases = [Costs()]

        def count(cost: OpCost) -> None:
            phases[-1].add(cost)

        with without_data(called, call, target, count, really=really) as (
            positional,
            named,
        ):
            arguments = (positional, named) if called is module else _with_gradients((positional, named))
            result = called(*arguments[0], **arguments[1])
            phases.append(Costs())
            _backward(result)
        return phases[0], phases[1]

    try:
        forward, backward = _run(run, device)
    except Exception as error:
        raise TraceError(f"{getattr(module, '__name__', type(module).__name__)} failed: {in_short(error)}") from error
    if verbose:
        uncounted = ", ".join({**forward.uncounted, **backward.uncounted}) or "none"
        print(f"Forward {2 * forward.macs:,} FLOPs\nBackward {2 * backward.macs:,} FLOPs")
        print(f"Not counted: {uncounted}")
    return 2 * forward.macs, 2 * backward.macs


def _with_gradients(value: Any) -> Any:
    """Return copies of the tensors that require gradients and can be written in place."""
    copies: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() and not tensor.is_complex():
            return tensor
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().requires_grad_().clone()
        return copies[id(tensor)]

    return map_tensors(copy, value)


def _run(run: Callable[..., Any], device: torch.device | str | None) -> Any:
    """Return the result of ``run`` without data; on data if ``device`` is None and an operator cannot run on shapes."""
    try:
        return run(really=False)
    except Exception:
        if device is None:
            with suppress(Exception):  # the first error says more: a model on meta has no data
                return run(really=True)
        raise


def _place(module: nn.Module, call: CallArguments, device: torch.device | str | None) -> torch.device:
    """Return the device to assume; the CPU if that device is not present, because autograd needs one that is."""
    tensors = [*tensors_of_modules(modules_of(module)), *call.tensors()]
    target = torch.device(device) if device is not None else device_of(iter(tensors))
    return target if is_there(target) else torch.device("cpu")


@exclusive
def profile_call(
    gm: GraphModule,
    call: CallArguments,
    device: torch.device | str | None,
    *,
    keeps_memory: bool = True,
    counts: bool = True,
) -> Any:
    """Fill the sizes and costs of a graph's nodes. Return the graph's result."""
    target = _place(checked(gm), call, device)

    def run(*, really: bool) -> Any:
        costs = _CostsOfNodes()
        pause = nullcontext() if really else no_collection()
        with pause, without_data(gm, call, target, costs.add, really=really) as (positional, named):
            profiler = _ProfilingRunner(gm, costs)
            result = profiler.profile(in_order(gm, positional, named), runs_backward=counts)
        if keeps_memory:
            profiler.write_sizes()
        if counts:
            profiler.write_costs()
        return result

    return _run(run, device)


class _CostsOfNodes:
    """The costs of each node: of the one that runs, and in the backward, of the one that made the autograd node."""

    def __init__(self) -> None:
        self.forward: dict[Node, Costs] = {}
        self.backward: dict[Node, Costs] = {}
        self._begins: list[int] = []  # number of the first autograd node that each node may create
        self._end: int | None = None  # number of the first one after the forward
        self._sums = Costs()

    def begin(self, node: Node) -> None:
        """Let operators count for a node from now on."""
        self._begins.append(int(_torch.next_node_number()))
        self._sums = self.forward[node] = Costs()

    def begin_backward(self) -> None:
        """Let operators count for the nodes whose backward they are."""
        self._end = int(_torch.next_node_number())
        self._nodes = list(self.forward)

    def add(self, cost: OpCost) -> None:
        """Add the cost of an operator."""
        autograd_node = None if self._end is None else _torch.current_node()
        if autograd_node is not None and autograd_node._sequence_nr() < self._end:  # others are computed again
            index = bisect_right(self._begins, autograd_node._sequence_nr()) - 1
            self._sums = self.backward.setdefault(self._nodes[max(index, 0)], Costs())
        self._sums.add(cost)


class _ProfilingRunner(NodeRunner):
    """An interpreter that runs a graph forward and backward, and collects the saved tensors and costs of each node."""

    def __init__(self, module: GraphModule, costs: _CostsOfNodes) -> None:
        super().__init__(module)
        self._costs = costs
        self._env = sim_env(module)
        self._saved: dict[Node, TensorSet] = {}
        self._results: dict[Node, Any] = {}  # all stay alive, so that their memory is not reused
        self._inputs: dict[Node, list[Tensor]] = {}
        self._registered: dict[Node, tuple[int, ...]] = {}
        self._state_memory = {memory for memory, _ in (*self._env.param_ctx, *self._env.buffer_ctx)}

    def profile(self, args: list[Any], *, runs_backward: bool) -> Any:
        """Run forward, and backward if asked for. Return the result."""
        with self._env:
            result = self.run(*args)
        if runs_backward:
            self._costs.begin_backward()
            _backward(result)
        return result

    def run_node(self, n: Node) -> Any:
        """Run one node, and keep its result."""
        self._results[n] = super().run_node(n)
        return self._results[n]

    def begin(self, node: Node) -> None:
        """Attribute saved tensors and costs to a node from now on."""
        self._env.ctx = self._saved[node] = TensorSet()
        self._costs.begin(node)
        values = [self.env.get(leaf) for leaf in tree_leaves((node.args, node.kwargs)) if isinstance(leaf, Node)]
        self._inputs[node] = [value for value in values if isinstance(value, Tensor)]
        self._register(node)

    def _register(self, node: Node) -> None:
        """Note the costs that the user registered for a node."""
        if node.op not in ("call_module", "call_function", "call_method"):
            return
        target: Any = node.target
        if node.op != "call_function":
            target = self.fetch_attr(target) if node.op == "call_module" else getattr(Tensor, target, None)
        impl = registry.find_impl(registry.profile_impls, target) or registry.find_impl(registry.flop_impls, target)
        if impl is None:
            return
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        costs = impl(*((target, *args) if node.op == "call_module" else args), **kwargs)
        is_known = isinstance(costs, (tuple, list)) and len(costs) in (2, 4)
        if not is_known or any(type(cost) is not int or cost < 0 for cost in costs):
            expected = "(fwd_flop, bwd_flop) or (fwd_flop, bwd_flop, fwd_comm, bwd_comm), integers"
            raise InputError(f"{impl} gave {costs!r:.80} for {node.name}; expected {expected}")
        self._registered[node] = tuple(costs)

    # ------------------------------------------------------------------------------------------- results

    def write_sizes(self) -> None:
        """Fill the sizes of each node's ``MetaInfo``."""
        later = TensorSet()
        for node in reversed(self._results):
            info = info_of(node)
            info.saved = self._saved[node]
            info.outputs = TensorSet() if node.op == "get_attr" else TensorSet.of(self._results[node])
            info.kept = later.intersect(info.outputs)
            info.param_size, info.backward_size = self._param_size(node), self._backward_size(node)
            # a result that this node makes and saves is its own: earlier nodes do not keep it
            later = later.union(info.saved.subtract(info.outputs))
        held, so_far = TensorSet(), 0
        for node in self._results:
            info = info_of(node)
            new = info.saved.union(info.kept).subtract(held)
            held.update(new)
            so_far += new.nbytes
            info.incremental_size, info.accumulate_size = new.nbytes, so_far

    def _param_size(self, node: Node) -> int:
        if node.op == "call_module":
            return sum(parameter.nbytes for parameter in self.fetch_attr(str(node.target)).parameters())
        parameters = {id(tensor): tensor for tensor in self._inputs[node] if isinstance(tensor, nn.Parameter)}
        return sum(parameter.nbytes for parameter in parameters.values())

    def _backward_size(self, node: Node) -> int:
        def gets_gradient(tensor: Tensor) -> bool:
            return tensor.is_floating_point() and not any(key in self._state_memory for key, _ in TensorSet.of(tensor))

        return sum(tensor.numel() * tensor.element_size() for tensor in self._inputs[node] if gets_gradient(tensor))

    def write_costs(self) -> None:
        """Fill the costs of each node's ``MetaInfo``."""
        for node in self._results:
            info = info_of(node)
            forward, backward = self._costs.forward[node], self._costs.backward.get(node, Costs())
            info.fwd_flop, info.bwd_flop = 2 * forward.macs, 2 * backward.macs
            info.elementwise_ops = forward.elementwise_ops
            info.uncounted = {**forward.uncounted, **backward.uncounted}
            if node in self._registered:
                info.fwd_flop, info.bwd_flop, info.fwd_comm, info.bwd_comm = (*self._registered[node], 0, 0)[:4]


def _backward(result: Any) -> None:
    """Run the backward from all results."""
    roots, ones = gradients_of(result)
    if roots:
        torch.autograd.backward(roots, ones)

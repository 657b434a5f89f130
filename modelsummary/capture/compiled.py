"""Run a model as ``torch.compile`` compiles it: the graphs of its operators run in place of the kernels made of them.

Dynamo finds the graphs of the forward, AOTAutograd adds their backwards and decides what is kept for them, with the
passes of Inductor. These read shapes alone, as dynamo itself replaces tensors by ones without data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from modelsummary import _torch
from modelsummary.capture.execution.shape_tensor import ShapeTensor
from modelsummary.capture.operator_mode import Operators
from modelsummary.errors import StepError, in_short

__all__ = ["CompiledGraphs", "OperatorsOfGraphs"]

_PACKAGE = Path(__file__).parents[1]
# Functions that torch calls between two graphs: hooks of saved tensors, callbacks of storages that are freed.
_NOT_COMPILED = tuple(str(_PACKAGE / name) for name in ("capture/observer.py", "capture/execution/", "operators/"))


class OperatorsOfGraphs(Operators):
    """A mode that runs the operators of compiled graphs, and those between them, through ``execution``."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: the mode sees the operators of graphs, and the compiler does not see the mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs)


class CompiledGraphs:
    """The graphs that a compiler makes of a model.

    Args:
        position: returns the number of operators that have run so far.

    Attributes:
        ranges: numbers of the first operator of each graph of the forward, and of the first one after it.
        backward_ranges: the same of their backwards.
        recomputed: numbers of the operators of backward graphs that graphs of the forward have, too.
    """

    def __init__(self, position: Callable[[], int]) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.backward_ranges: list[tuple[int, int]] = []
        self.recomputed: set[int] = set()
        self._position = position

    def since(self, first: int) -> dict[str, Any]:
        """Return what a ``Trace`` says of graphs; operators count from ``first``."""
        return {
            "graphs": [(begin - first, end - first) for begin, end in self.ranges],
            "fused": [(begin - first, end - first) for begin, end in (*self.ranges, *self.backward_ranges)],
            "recomputed": frozenset(number - first for number in self.recomputed),
        }

    @contextmanager
    def compiling(self, *, on_shapes: bool) -> Iterator[None]:
        """Return a context in which models can be called, and the backwards of their results can run."""
        taking = _torch.taken_as_tensors(ShapeTensor) if on_shapes else nullcontext()
        with taking, _torch.isolated_compiling(_NOT_COMPILED):
            yield

    def call(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a model that is compiled.

        Raises:
            StepError: it cannot be compiled.
        """

        def forward(*args: Any, **kwargs: Any) -> Any:
            return model(*args, **kwargs)

        def backend(graph: fx.GraphModule, inputs: Any) -> Any:
            return _torch.inductor_graphs(graph, inputs, _Graph(self, self._position).run)

        try:
            return torch.compile(forward, backend=backend)(*args, **kwargs)
        except Exception as error:
            cause = _torch.cause_in_compiler(error)
            if cause is None:
                raise
            raise StepError(
                f"torch.compile cannot compile the forward: {in_short(cause)}; mode='train' predicts an eager step",
                "forward",
            ) from error


class _Graph:
    """One graph of a forward, and its backward."""

    def __init__(self, graphs: CompiledGraphs, position: Callable[[], int]) -> None:
        self._graphs, self._position = graphs, position
        self._names: frozenset[str] = frozenset()  # of the nodes of the forward

    def run(self, graph: fx.GraphModule, is_backward: bool, args: list[Any]) -> Any:
        """Run a graph; each result lives until its last use."""
        begin = self._position()
        if is_backward:
            result = _Backward(graph, self._names, self._graphs.recomputed, self._position).boxed_run(args)
            self._graphs.backward_ranges.append((begin, self._position()))
            return result
        self._names = frozenset(node.name for node in graph.graph.nodes)
        result = fx.Interpreter(graph).boxed_run(args)
        self._graphs.ranges.append((begin, self._position()))
        return result


class _Backward(fx.Interpreter):
    """A run of the graph of a backward, which notes the operators that the forward ran, too."""

    def __init__(
        self, graph: fx.GraphModule, names: frozenset[str], recomputed: set[int], position: Callable[[], int]
    ) -> None:
        super().__init__(graph)
        self._names, self._recomputed, self._position = names, recomputed, position

    def run_node(self, n: fx.Node) -> Any:
        begin = self._position()
        result = super().run_node(n)
        if n.name in self._names:
            self._recomputed.update(range(begin, self._position()))
        return result

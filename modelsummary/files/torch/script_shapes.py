"""Execution of the operators of a TorchScript program, on shapes, with values where they decide; and their record."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor

from modelsummary._torch import disable_current_modes
from modelsummary.capture.execution.shape_only import ShapeOnly
from modelsummary.capture.execution.shape_tensor import new_tensor
from modelsummary.capture.operator_mode import Execution
from modelsummary.errors import ModelFileError
from modelsummary.files.budget import Budget
from modelsummary.files.program import Operation, Program, Scope
from modelsummary.files.program import Tensor as Listed
from modelsummary.files.torch.script_operators import MOST_RESULTS
from modelsummary.operators.operator_calls import spec_of
from modelsummary.operators.operator_rules import OpCost, OpRule, op_rule, tensors_in

__all__ = ["ScriptRecord", "ScriptShapes"]

_CPU = torch.device("cpu")
_STEPS = 25  # of an operator
_MOST_ELEMENTS = 2**26  # of one tensor whose values are followed
_MOST_BOXES = 20_000  # non-maximum suppression compares all pairs

# Operators whose values are computed: their time and memory follow from the sizes of their arguments and results, and
# they check their indices. Pointwise operators and views are computed, too.
_COMPUTED = frozenset(
    f"aten.{name}"
    for name in "arange linspace zeros zeros_like ones ones_like full full_like new_zeros new_ones new_full eye"
    " scalar_tensor tril triu tril_indices triu_indices clone _to_copy _unsafe_view copy_ copy fill fill_"
    " zero zero_ cat stack index index_put index_put_ index_select gather scatter scatter_ scatter_add"
    " scatter_add_ index_add index_add_ where sum mean prod amax amin max min argmax argmin any all cumsum"
    " cumprod sort topk nonzero _unique2 unique_dim unique_consecutive bincount repeat repeat_interleave"
    " roll flip constant_pad_nd mm bmm addmm baddbmm mv dot convolution _convolution native_layer_norm"
    " native_batch_norm native_group_norm _native_batch_norm_legit _native_batch_norm_legit_no_training"
    " _softmax _log_softmax max_pool2d_with_indices avg_pool2d avg_pool1d _adaptive_avg_pool2d"
    " upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d upsample_linear1d"
    " upsample_bicubic2d embedding _local_scalar_dense equal masked_select var std var_mean"
    " linalg_vector_norm count_nonzero searchsorted bucketize diag isin item is_nonzero lift_fresh"
    " pixel_shuffle glu _scaled_dot_product_flash_attention_for_cpu masked_fill masked_fill_ argsort"
    " aminmax unfold im2col reflection_pad2d replication_pad2d grid_sampler_2d lift alias detach"
    " floor_divide floor_divide_ _prelu_kernel log_sigmoid_forward __and__ __or__ __xor__ __lshift__"
    " __rshift__ float_power hardswish hardswish_ gelu_ rsub addr polar complex".split()
) | {"torchvision.nms", "torchvision.roi_align"}
_DIVIDING = frozenset(
    f"aten.{name}{copy}"
    for name in "unbind split split_with_sizes unsafe_split unsafe_split_with_sizes chunk unsafe_chunk".split()
    for copy in ("", "_copy")
)
_EMPTY = frozenset({"aten.empty", "aten.new_empty", "aten.empty_like", "aten.empty_strided"})
_ZEROS = torch.ops.aten.zeros.default
# Searches: they take some 20 times as long for an element as others, and up to eight integers.
_SEARCHES = frozenset(
    f"aten.{name}"
    for name in "sort topk argsort _unique2 unique_dim unique_consecutive isin searchsorted bucketize index_put"
    " index_put_ index_add index_add_ scatter_add scatter_add_ nonzero".split()
)
_OF_SEARCH, _SEARCH_BYTES = 20, 64
_REFUSED_STARTS = (
    "aten.special_",
    "aten.digamma",
    "aten.lgamma",
    "aten.erfinv",
    "aten.gcd",
    "aten.lcm",
    "aten.i0",
    "aten.igamma",
    "aten.polygamma",
    "aten.mvlgamma",
    "aten._unsafe_index",
    "aten._unsafe_masked",
    "aten.as_strided_",
)


class ScriptShapes(ShapeOnly):
    """An execution on shapes that spends a budget for each operator.

    Args:
        follows: compute the values of large tensors, too, as far as the program asks for them.
        most_bytes: memory of all values that are computed.
        most_work: multiply-adds and elements of all operators whose values are followed.

    Attributes:
        is_used_up: True if the memory or the work did not suffice for the values of an operator.
    """

    def __init__(self, budget: Budget, *, follows: bool, most_bytes: int, most_work: int) -> None:
        super().__init__(_CPU)
        self._budget, self._bytes_left, self._work_left = budget, most_bytes, most_work
        self.most_bytes = most_bytes
        self.is_used_up = False
        if follows:
            self.follow_values(_MOST_ELEMENTS)

    def run(self, func: Any, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, OpCost]:
        """Run one operator and return its result and cost."""
        self._budget.spend(_STEPS)
        self._budget.look()
        if rule.name in _DIVIDING:
            self._check_count(rule, args, kwargs)
        out, cost = super().run(func, rule, args, kwargs)
        if rule.name in _EMPTY:  # its values are whatever memory held; here they are zeros
            zeros = op_rule(_ZEROS)
            if self.computes(_ZEROS, zeros, (), cost, out):
                self._known.follow(_ZEROS, zeros, (list(out.shape),), {"dtype": out.dtype}, out)
        return out, cost

    def _check_count(self, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise ``ModelFileError`` if an operator divides a tensor into very many."""
        size = args[1] if len(args) > 1 else kwargs.get("split_size", 1)
        longest = max(args[0].shape, default=1)
        count = len(size) if isinstance(size, (list, tuple)) else longest
        if type(size) is int and "split" in rule.name:
            count = -(-longest // max(size, 1))
        if count > MOST_RESULTS:
            raise ModelFileError(f"{rule.name} divides a tensor into {count:,}")
        self._budget.spend(3 * count)

    def with_values(self, value: Tensor) -> Tensor:
        """Return a shape tensor whose values are known."""
        twin = new_tensor(spec_of(value), _CPU)
        self._known.set(twin, value)
        return twin

    def numbers(self, tensor: Tensor, asker: str) -> Any:
        """Return the values of a tensor as a number or as nested lists; raise ``DataDependentError`` if not known."""
        values = self.values(tensor, asker)
        with disable_current_modes():
            return values.tolist()

    def computes(self, func: Any, rule: OpRule, args: Any, cost: OpCost | None = None, out: Any = None) -> bool:
        """Return True if the values of this operator may be computed, in time and memory that are left."""
        is_safe = rule.name in _COMPUTED or rule.is_view or torch.Tag.pointwise in getattr(func, "tags", ())
        if not is_safe or rule.name.startswith(_REFUSED_STARTS):
            return False
        inputs, outputs = list(tensors_in(args)), list(tensors_in(out))
        work = sum(tensor.numel() for tensor in (*inputs, *outputs)) + (cost.macs if cost else 0)
        if "pool" in rule.name and isinstance(args[1], (list, tuple)):
            work += prod(args[1]) * sum(tensor.numel() for tensor in outputs)
        if rule.name == "torchvision.nms":
            work += inputs[0].shape[0] ** 2 if inputs[0].shape[0] <= _MOST_BOXES else self._work_left + 1
        nbytes = 0 if rule.is_view else sum(tensor.nbytes for tensor in outputs)
        if rule.name in _SEARCHES:
            nbytes += _SEARCH_BYTES * sum(tensor.numel() for tensor in inputs)
            work *= _OF_SEARCH
        if work > self._work_left or nbytes > self._bytes_left:
            self.is_used_up = True
            return False
        self._work_left -= work
        self._bytes_left -= nbytes
        return self._is_bounded(rule, args)

    def _is_bounded(self, rule: OpRule, args: Any) -> bool:
        """Return False if values make the result large, or the time long."""
        if rule.name == "aten.bincount":
            counted = self.known_value(args[0])
            return counted is not None and (not counted.numel() or int(counted.max()) < _MOST_ELEMENTS)
        if rule.name == "aten.repeat_interleave":
            repeats = self.known_value(next(tensor for tensor in reversed(list(tensors_in(args)))))
            return repeats is not None and int(repeats.sum()) < _MOST_ELEMENTS
        if rule.name == "torchvision.roi_align":
            boxes = self.known_value(args[1])
            ratio = args[5] if len(args) > 5 else -1
            return boxes is not None and ratio <= 16 and bool((boxes.abs() * args[2] < 1e5).all())
        return True


Scopes = tuple[Scope, ...]


class ScriptRecord:
    """The operators of one run, in order.

    Attributes:
        scopes: the modules whose methods are running, outermost first, without the model.
    """

    def __init__(self, execution: Execution) -> None:
        self.scopes: Scopes = ()
        self.operations: list[Operation] = []
        self.inputs: list[Listed] = []
        self._execution = execution
        self._tensors: dict[int, tuple[weakref.ref[Tensor], Listed]] = {}
        self._quantized: dict[Listed, str] = {}  # the dtypes of quantized tensors
        self._within: list[OpCost] | None = None  # costs inside an operator that is recorded as a whole

    def add(self, tensor: Tensor, listed: Listed, quantized: str = "") -> None:
        """Note which tensor of the program a tensor of the run is."""
        key = id(tensor)
        self._tensors[key] = (weakref.ref(tensor, lambda _: self._tensors.pop(key, None)), listed)
        if quantized:
            self._quantized[listed] = quantized

    def add_inputs(self, inputs: Sequence[Tensor]) -> None:
        """Record the arguments of the run."""
        self.inputs = [self.listed(tensor, f"input_{index}", "input") for index, tensor in enumerate(inputs)]

    def listed(self, tensor: Tensor, name: str, kind: Any = "activation", quantized: str = "") -> Listed:
        """Return the tensor of the program that a tensor of the run is; a new one if it is not listed."""
        if id(tensor) not in self._tensors:
            size, dtype = tuple(tensor.shape), quantized or str(tensor.dtype).removeprefix("torch.")
            bits = (32 if "32" in quantized else 8) if quantized else 8 * tensor.element_size()
            self.add(tensor, Listed(name, size, size, dtype, bits, kind), quantized)
        return self._tensors[id(tensor)][1]

    def quantized(self, tensor: Any) -> str:
        """Return the dtype of a quantized tensor; an empty text for others."""
        listed = self._tensors.get(id(tensor))
        return "" if listed is None else self._quantized.get(listed[1], "")

    def run(self, func: Any, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, OpCost]:
        """Run one operator and record it."""
        out, cost = self._execution.run(func, rule, args, kwargs)
        if self._within is not None:
            self._within.append(cost)
            return out, cost
        results = list(tensors_in(out))
        inputs = [self.listed(tensor, "constant", "buffer") for tensor in tensors_in((args, kwargs))]
        is_free = cost.bytes_read == cost.bytes_written == 0
        if is_free and len(inputs) == len(results) == 1 and inputs[0].kind == "parameter":
            self.add(results[0], inputs[0])  # a view of a weight
        elif results:
            operation = self._append(rule.name, inputs, results, cost)
            operation.is_free = is_free
            operation.aliases = bool(inputs) and (is_free or 0 in rule.writes)
            operation.gathers = rule.gathers
        return out, cost

    def whole(self, name: str, run: Callable[[], Any], inputs: Sequence[Tensor], quantized: str = "") -> Any:
        """Run several operators and record them as one.

        Args:
            name: of the operator, with its namespace.
            inputs: the tensors that it reads.
            quantized: dtype of its results, if they are quantized.
        """
        with self.unrecorded() as costs:
            out = run()
        results = list(tensors_in(out))
        listed = [self.listed(tensor, "constant", "buffer") for tensor in inputs]
        for tensor in results:
            self._tensors.pop(id(tensor), None)
            self.listed(tensor, f"{name.rpartition('.')[2]}_{len(self.operations)}", quantized=quantized)
        if results:
            total = OpCost(sum(cost.macs for cost in costs), 0, 0, 0, None)
            self._append(name, listed, results, total)
        return out

    @contextmanager
    def unrecorded(self) -> Iterator[list[OpCost]]:
        """Return a context whose operators are not recorded, and the list of their costs."""
        outer, self._within = self._within, []
        try:
            yield self._within
        finally:
            self._within = outer

    def _append(self, name: str, inputs: list[Listed], results: Sequence[Tensor], cost: OpCost) -> Operation:
        last = f"{name.rpartition('.')[2]}_{len(self.operations)}"
        quantized = (
            self._quantized.get(inputs[0], "")
            if inputs and all(result.is_floating_point() for result in results)
            else ""
        )
        outputs = [self.listed(result, last, quantized=quantized) for result in results]
        operation = Operation(last, name, self.scopes, inputs, outputs)
        operation.macs, operation.elementwise_ops, operation.uncounted = cost.macs, cost.elementwise_ops, cost.uncounted
        self.operations.append(operation)
        return operation

    def program(self, name: str, outputs: Sequence[Tensor]) -> Program:
        """Return the recorded operators."""
        results = [self.listed(tensor, "result") for tensor in outputs]
        return Program(name, self.inputs, results, self.operations)

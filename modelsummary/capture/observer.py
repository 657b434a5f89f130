"""Observe a run: its operators, the storages that they make, and the time when these are freed."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from modelsummary import _torch
from modelsummary._torch import FakeTensor, disable_current_modes, tree_map
from modelsummary.capture import offloading
from modelsummary.capture.execution.shape_only import WAITS
from modelsummary.capture.execution.shape_tensor import ShapeTensor, without_history
from modelsummary.capture.model_lines import model_line
from modelsummary.capture.operator_mode import Execution
from modelsummary.operators.operator_calls import Line, OperatorLog
from modelsummary.operators.operator_rules import OpCost, OpRule, op_rule, tensors_in
from modelsummary.operators.products import factors
from modelsummary.operators.tensor_bytes import inner_tensors, is_distributed, stored_tensors

if TYPE_CHECKING:
    from typing import Self

    from modelsummary.capture.calls import Call, Watch

__all__ = ["Allocation", "Level", "Observer", "OverwrittenError", "SavedTensor"]

Level = Literal["costs", "arguments", "storages"]
"""What is noted of operators: their costs; their arguments as well; also the storages that they make."""

_KEEP_NUMBERS = frozenset({"MulBackward0", "DivBackward0"})
_COMPILED = "CompiledFunctionBackward"
_INDEX_PUT = torch.ops.aten.index_put.default
_ALIAS = torch.ops.aten.alias.default
_LAYERS = ((nn.functional, "linear"), *((_torch.VF, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")))
_REAL = frozenset({Tensor, nn.Parameter})
_PLAIN = _REAL | {ShapeTensor}
_LIFT_FRESH = torch.ops.aten.lift_fresh.default  # of values that Python has
# By these, code gets the elements of a tensor without an operator; ``torch.tensor([tensor])`` asks for a number.
_READING = ("tolist", "numpy", "__index__", "__int__", "__float__", "__repr__", "__dlpack__", "data_ptr")


class Allocation:
    """A storage and its lifetime.

    Attributes:
        nbytes: size in bytes.
        born: number of the operator that made it.
        died: number of the operator before which it was freed; None while it lives.
        kind: purpose, such as ``"params"``, set by the caller; empty for results of operators.
        made_in: module call in which it was made; None outside of the model.
        is_saved: whether it is kept for the backward.
        saved_in: module call in which it was first saved for the backward, or was made if something else keeps it.
        reused_by: number of the operator that writes its result here if nothing else holds this storage.
    """

    __slots__ = ("born", "died", "is_saved", "kind", "made_in", "nbytes", "reused_by", "saved_in")

    def __init__(self, nbytes: int, born: int, kind: str = "", made_in: Call | None = None) -> None:
        self.nbytes, self.born, self.kind, self.made_in = nbytes, born, kind, made_in
        self.died: int | None = None
        self.is_saved = False
        self.saved_in: Call | None = None
        self.reused_by: int | None = None

    @property
    def category(self) -> str:
        """Its purpose: ``"activations"`` for what is kept for the backward, ``"temporary"`` for other results."""
        return self.kind or ("activations" if self.is_saved else "temporary")

    def save(self, call: Call | None) -> None:
        """Note that it is kept for the backward since a module call; the first one counts."""
        if not self.is_saved:
            self.is_saved, self.saved_in = True, call


class SavedTensor(NamedTuple):
    """A tensor that autograd saves, packed by ``saved_tensors_hooks``.

    Torch itself compares versions only if no hooks are set.

    Attributes:
        tensor: the tensor without its history: with it, a node that saves its own result would keep itself alive
            through ``grad_fn``.
        version: how often the tensor had changed in place when it was saved.

    >>> tensor = torch.ones(2)
    >>> saved = SavedTensor.of(tensor)
    >>> tensor = tensor.add_(1)
    >>> saved.unpack()
    Traceback (most recent call last):
    RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation: ...
    """

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> SavedTensor:
        """Return a tensor as it is now."""
        return cls(without_history(tensor), tensor._version)

    def unpack(self) -> Tensor:
        """Return the tensor. Raise torch's error if it has changed in place since it was saved."""
        now = self.tensor._version
        if now != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.dtype} {list(self.tensor.shape)}] is at version {now}; expected version "
                f"{self.version} instead"
            )
        return self.tensor


class _Identities:
    """Numbers that identify storages that are not followed."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}  # held, so that no two share an address

    def of(self, tensor: Tensor) -> int:
        """Return the number of the storage behind a tensor."""
        if type(tensor) is not ShapeTensor and is_distributed(type(tensor)):
            (tensor,) = inner_tensors(tensor)
        storage = tensor.untyped_storage()
        key: int = storage._cdata
        self._storages[key] = storage
        return key


class OverwrittenError(RuntimeError):
    """Error for a tensor that changed in place after autograd saved it, with torch's message.

    Attributes:
        line: file and line of the model's code that wrote it last; None if it is not known.
    """

    def __init__(self, message: str, line: Line | None) -> None:
        super().__init__(message)
        self.line = line


class Observer:
    """An execution around another one that notes the operators that it runs, between ``__enter__`` and ``__exit__``.

    Arguments count as alive while their operator runs. Workspaces of operators are not seen.

    Args:
        block_bytes: multiple that sizes are rounded up to.
        level: what is noted. Below ``"storages"``, views are noted without arguments: they run no kernel, and their
            results have the storage of an argument.

    Attributes:
        watch: the watch of the forward that runs or ran last, by which operators and tensors belong to module calls;
            None: they belong to none.
        inside: the module call in which each operator ran; None outside of the model.
        log: the runs of the operators with their arguments.
        every: all storages.
        clones: number of an operator -> bytes of the matrices that it copies.
        read: identities of the storages whose elements Python got without an operator, if storages are followed.
        saves: the tensors that autograd saves and that stay on the device, in order: the fields of a ``TracedSave``,
            with the module call itself.
        offloaded: bytes that were moved to the host.
        host_is_apart: the memory of the host is not the memory that is observed, so that these count no bytes.
    """

    def __init__(self, block_bytes: int = 1, level: Level = "storages") -> None:
        self._block, self.level = block_bytes, level
        self._follows, self._notes_costs = level == "storages", level == "costs"
        self._execution: Any = None
        self._is_on = False
        self.watch: Watch | None = None
        self.inside: list[Call | None] = []
        self.every: list[Allocation] = []
        self.clones: dict[int, int] = {}
        self.read: set[int] = set()
        self.saves: list[tuple[Call | None, int, int]] = []
        self.offloaded = 0
        self.host_is_apart = True
        self._live: dict[int, tuple[Any, Allocation]] = {}
        self._ended: int | None = None  # number of the autograd node that ended last
        self._params: set[int] = set()  # identities of the storages of parameters
        self.identity = self._identity if self._follows else _Identities().of
        self.log = OperatorLog(self.identity, self._params)
        self._imported = len(sys.modules)
        self._in_layer = 0  # calls of linear and recurrent functions that run

    def around(self, execution: Execution) -> Execution:
        """Return the execution that runs operators by ``execution`` and notes them."""
        self._execution = execution
        return self

    def __enter__(self) -> Self:
        self._is_on = True
        return self

    def __exit__(self, *_: object) -> None:
        self._is_on = False

    def run(self, func: Any, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, OpCost]:
        """Run one operator, note it, and return its result and cost."""
        result: tuple[Any, OpCost]
        if not self._is_on:
            result = self._execution.run(func, rule, args, kwargs)
            return result
        if not self._follows:
            result = self._execution.run(func, rule, args, kwargs)
            self.inside.append(self._innermost())
            if self._notes_costs or rule.is_view:
                self.log.note_cost(func, rule, result[1])
            else:
                self.log.note(func, args, kwargs, result[0], rule, result[1], self._execution.distinct)
            self._execution.distinct = None
            return result
        if "torch.distributed._functional_collectives" in sys.modules and any(
            map(_is_awaited, tensors_in((args, kwargs)))
        ):
            args, kwargs = tree_map(_unwrapped, (args, kwargs))
        operator_number = len(self.inside)
        if rule.facts.accumulates or func is _INDEX_PUT:
            self._note_reuse(func, rule, args, operator_number)
        elif rule.facts.multiplies == "matrices":
            self._note_clones(factors(rule.signature.bind(args, kwargs)), operator_number)
        self._meet_arguments((args, kwargs), func, operator_number)
        if rule.name in WAITS:
            out, cost = self._execution.run(_ALIAS, op_rule(_ALIAS), args, kwargs)
        else:
            out, cost = self._execution.run(func, rule, args, kwargs)
        if len(sys.modules) != self._imported:
            self._forget_importers()
        self.inside.append(self._innermost())
        self._meet(out, operator_number)
        self.log.note(func, args, kwargs, out, rule, cost, self._execution.distinct, model_line())
        self._execution.distinct = None  # it would keep the tensors alive
        return out, cost

    def _innermost(self) -> Call | None:
        """Return the module call that runs now; None outside of the model."""
        return None if self.watch is None else self.watch.innermost

    def _identity(self, tensor: Tensor) -> int:
        """Return a number that identifies the storage behind a tensor; -1 if it is not followed."""
        allocation = self.of(tensor)
        return id(allocation) if allocation is not None else -1

    def hold(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Follow storages that exist already, each counted once."""
        if self.level == "costs":
            return
        if not self._follows:
            inner_of = (inner for tensor in tensors for inner in inner_tensors(tensor)) if kind == "params" else ()
            self._params.update(self.identity(inner) for inner in inner_of if inner.layout is torch.strided)
            return
        for tensor in tensors:
            for inner in stored_tensors(tensor):
                if self.of(inner) is None:
                    self._follow(inner.untyped_storage(), len(self.inside), kind)

    def hold_state(self, states: Iterable[Tensor]) -> None:
        """Note that tensors are the state of the optimizer, made in this order by its first step."""
        allocations = {id(allocation): allocation for allocation in map(self.of, states) if allocation is not None}
        states_by_id = {key: allocation for key, allocation in allocations.items() if not allocation.kind}
        for allocation in states_by_id.values():
            allocation.kind = "optimizer_state"
        others = (allocation for allocation in self.every if id(allocation) not in states_by_id)
        self.every = [*others, *states_by_id.values()]

    def of(self, tensor: Tensor) -> Allocation | None:
        """Return the storage behind a tensor; None if it is not followed.

        It is the storage of the local tensor of a distributed one, and of the values of a sparse one.
        """
        if not self._follows:
            return None
        if is_distributed(type(tensor)):
            (tensor,) = inner_tensors(tensor)
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:
            storage = stored_tensors(tensor)[-1].untyped_storage()
        entry = self._live.get(storage._cdata)
        return entry[1] if entry is not None else None

    def _follow(
        self,
        storage: torch.UntypedStorage,
        born: int,
        kind: str = "",
        made_in: Call | None = None,
        nbytes: int | None = None,
    ) -> None:
        """Follow a storage until it is freed; ``nbytes`` is its size if it is about to be resized."""
        size = storage.size() if nbytes is None else nbytes
        allocation = Allocation(-(-size // self._block) * self._block, born, kind, made_in)
        key = storage._cdata

        def gone(_: object) -> None:
            if allocation.died is not None:  # it was resized
                return
            allocation.died = len(self.inside)
            if allocation.reused_by is not None and allocation.reused_by + 1 == allocation.died:
                allocation.died -= 1  # nothing else held it: the result replaced it
            self._live.pop(key, None)

        self._live[key] = (weakref.ref(storage, gone), allocation)
        self.every.append(allocation)
        if allocation.kind == "params":
            self._params.add(id(allocation))

    def _forget_importers(self) -> None:
        """Free the frames that an import left in a reference cycle, and with them the tensors of all its callers.

        ``torch.fx.wrap`` keeps its own frame. Kernels that torch writes in Python import ``torch._dynamo`` when first
        called, which calls it.
        """
        gc.collect()
        self._imported = len(sys.modules)

    def _note_clones(self, matrices: Sequence[Tensor], operator_number: int) -> None:
        """Note matrices that torch copies because BLAS cannot read their strides, such as an expanded gradient.

        See ``addmm_impl_cpu_`` in aten/src/ATen/native/LinearAlgebra.cpp.
        """
        for matrix in matrices if all(matrix.layout is torch.strided for matrix in matrices) else ():
            (rows, columns), (down, right) = matrix.shape, matrix.stride()
            if not ((right == 1 and down >= columns) or (down == 1 and right >= rows)):
                self.clones[operator_number] = self.clones.get(operator_number, 0) + matrix.nbytes

    def _note_reuse(self, func: Any, rule: OpRule, args: Any, operator_number: int) -> None:
        """Note that torch would write into its argument here, which it does not while a dispatch mode is on.

        Without a mode, autograd works in place if nothing else holds a gradient: when it adds up gradients between two
        nodes (``accumulate`` in torch/csrc/autograd/input_buffer.cpp; a view shares its storage with its base), and in
        the backward of an index (``index_backward`` in FunctionsManual.cpp). So does a layer that adds its bias to a
        product (``linear`` in aten/src/ATen/native/Linear.cpp).
        """
        node = None if torch.is_grad_enabled() else _torch.current_node()
        if (node is None and not self._in_layer) or not all(isinstance(argument, Tensor) for argument in args[:1]):
            return
        is_sum = rule.facts.accumulates and _is_dense(args[0]) and not args[0]._is_view()
        is_gradient = is_sum and node is not None and node._sequence_nr() == self._ended
        is_biased = is_sum and self._in_layer > 0 and isinstance(args[1], Tensor) and args[1].dim() == 1 < args[0].dim()
        is_index = func is _INDEX_PUT and node is not None and node.name() == "IndexBackward0"
        if is_gradient or is_biased or is_index:
            allocation = self.of(args[0])
            if allocation is not None:
                allocation.reused_by = operator_number

    def save(self, tensor: Tensor) -> SavedTensor:
        """Note that a tensor is kept for the backward, for ``saved_tensors_hooks``."""
        kept = self._meet_argument(tensor, max(len(self.inside) - 1, 0))
        allocation = self.of(kept)
        self.saves.append((self._innermost(), self._identity(kept), len(self.inside)))
        if allocation is not None:
            allocation.save(self._innermost())
        return SavedTensor.of(tensor)

    def unpack(self, saved: SavedTensor) -> Tensor:
        """Return a saved tensor, for ``saved_tensors_hooks``.

        Raises:
            OverwrittenError: it has changed in place since it was saved; says which operator wrote it.
        """
        try:
            return saved.unpack()
        except RuntimeError as error:
            storage = self.identity(saved.tensor)
            writer = next((run for run in reversed(self.log.runs) if storage in run.writes), None)
            if writer is None:
                raise
            where = "" if writer.line is None else f" in line {writer.line[1]} of {writer.line[0]}"
            raise OverwrittenError(f"{error}; {writer.call.name} wrote it{where}", writer.line) from error

    def note_node(self, node: Any) -> None:
        """Follow a node of the backward: its end, and a Python number that it keeps."""
        if not self._follows or node.name() == _COMPILED:  # a hook would hold its gradients until it has ended
            return
        node_number = node._sequence_nr()

        def ended(*_: object) -> None:
            self._ended = node_number

        node.register_hook(ended)
        self._hold_number_of(node)

    def _hold_number_of(self, node: Any) -> None:
        """Follow the tensor that autograd makes of a Python factor, which neither operators nor default hooks see.

        Other saved tensors have hooks already and accept no more; reading them would run those hooks.
        """
        saved = getattr(node, "_raw_saved_other", None) if node.name() in _KEEP_NUMBERS else None
        if saved is not None:
            with disable_current_modes(), suppress(RuntimeError):
                saved.register_hooks(self._hold_number, lambda factor: factor)

    def _hold_number(self, factor: Tensor) -> Tensor:
        if self.of(factor) is None and not self.host_is_apart:
            self._follow(factor.untyped_storage(), len(self.inside) - 1, "activations")
        return factor

    def _meet_arguments(self, value: Any, func: Any, operator_number: int) -> None:
        """Follow arguments. Torch makes a tensor of a Python number before it gets here, and one of a list of them."""
        meet = self._meet if func is _LIFT_FRESH else self._meet_argument
        for tensor in tensors_in(value):
            meet(tensor, operator_number)

    def _meet_argument(self, tensor: Tensor, operator_number: int) -> Tensor:
        """Follow a tensor and return it; of one of other code, such as labels of the loss, the one that stands for it.

        The stand-in copies the values of a tensor of other code outside of the step.
        """
        stand_in = tensor
        if type(tensor) in _REAL and tensor.dim():
            with disable_current_modes():
                stand_in = self._execution.stand_in(tensor)
        if stand_in is tensor:
            self._meet(tensor, operator_number)
        elif self._has_bytes(stand_in) and self.of(stand_in) is None:
            self._follow(stand_in.untyped_storage(), 0, "inputs")
        return stand_in

    def _meet(self, value: Any, operator_number: int) -> None:
        for tensor in tensors_in(value):
            if tensor.is_meta and tensor.is_sparse:
                raise self._execution.needing_values("the number of elements that a sparse tensor stores")
            for inner in (tensor,) if type(tensor) is ShapeTensor else stored_tensors(tensor):
                if inner.layout is torch.strided and self._has_bytes(inner) and self.of(inner) is None:
                    self._follow(inner.untyped_storage(), operator_number, made_in=self._innermost())

    def _has_bytes(self, tensor: Tensor) -> bool:
        """Torch itself traces functions (a ``score_mod``) with tensors on meta, which take no memory in a real run."""
        return not tensor.is_meta and type(tensor) is not FakeTensor

    @contextmanager
    def following(self) -> Iterator[None]:
        """Return a context that tells of resized storages, layers that add biases in place, and elements that are read.

        FSDP2 frees gathered parameters by resizing. Linear and recurrent functions add biases in place. Copies of saved
        tensors in the memory of the host count no bytes of a device.
        """
        original: Any = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            if storage.size() != size:
                self._resized(storage, size)
            return original(storage, size)

        def followed(original: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                # tensors of other classes do not add in place
                is_plain = all(type(tensor) in _PLAIN for tensor in tensors_in((args, kwargs)))
                self._in_layer += is_plain
                try:
                    return original(*args, **kwargs)
                finally:
                    self._in_layer -= is_plain

            return call

        def noted(original: Any) -> Any:
            def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                with suppress(NotImplementedError, RuntimeError):  # no storage
                    self.read.add(self.identity(tensor))
                return original(tensor, *args, **kwargs)

            return call

        reading = [
            (kind, name) for kind in (Tensor, ShapeTensor) for name in _READING if kind is Tensor or name in vars(kind)
        ]
        to_host = offloading.to_host

        def to_host_noted(elements: Tensor, stream: Any) -> tuple[Tensor, Any]:
            copy, event = to_host(elements, stream)
            allocation = self.of(copy)
            if allocation is not None:
                self.offloaded += allocation.nbytes
                allocation.nbytes = 0 if self.host_is_apart else allocation.nbytes
            return copy, event

        with ExitStack() as stack:
            stack.enter_context(_torch.swapped(offloading, "to_host", to_host_noted))
            stack.enter_context(_torch.swapped(torch.UntypedStorage, "resize_", resize_))
            for owner, name in _LAYERS:
                stack.enter_context(_torch.swapped(owner, name, followed(getattr(owner, name))))
            for kind, name in reading if self._follows else ():
                stack.enter_context(_torch.swapped(kind, name, noted(getattr(kind, name))))
            yield

    def _resized(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Follow a storage that is resized: its old bytes are freed, and as many as it has now are allocated."""
        entry = self._live.pop(storage._cdata, None)
        operator_number = len(self.inside)
        kind = ""
        if entry is not None:
            entry[1].died, kind = operator_number, entry[1].kind
        if nbytes:
            self._follow(storage, operator_number, kind, nbytes=nbytes)

    def leave_out(self, unused: Iterable[Tensor], used: Iterable[Tensor]) -> int:
        """Count the storages of unused gradients and optimizer states as if they had never existed.

        A storage of a parameter or of a used tensor is still counted.

        Returns:
            The bytes that were counted for them.
        """
        allocations = [self.of(tensor) for tensor in unused]
        gone = {
            id(allocation): allocation
            for allocation in allocations
            if allocation is not None and allocation.kind in ("grads", "optimizer_state")
        }
        for tensor in used if gone else ():
            gone.pop(id(self.of(tensor)), None)
        nbytes = sum(allocation.nbytes for allocation in gone.values())
        for allocation in gone.values():
            allocation.nbytes = 0
        return nbytes

    def keep(self, tensor: Tensor) -> None:
        """Follow a tensor that no operator made and that is kept for the backward."""
        if self._follows:
            self._follow(tensor.untyped_storage(), len(self.inside), made_in=self._innermost())

    def forward_ended(self, results: Iterable[Tensor]) -> None:
        """Mark all living storages except the results as kept for the backward, and freed ones as not kept.

        Some are kept by closures instead of autograd nodes: a checkpoint keeps the arguments of the function that it
        runs again.
        """
        for allocation in self.every:
            if allocation.died is not None:
                allocation.is_saved, allocation.saved_in = False, None
        result_ids = {id(self.of(tensor)) for tensor in results if tensor.layout is torch.strided}
        for _, allocation in self._live.values():
            if not allocation.kind and id(allocation) not in result_ids:
                allocation.save(allocation.made_in)

    def held(self) -> int:
        """Return the number of bytes alive now."""
        return sum(allocation.nbytes for _, allocation in self._live.values())


def _is_awaited(value: Any) -> bool:
    """Return True for the wrapper in which older versions of torch return the result of a collective."""
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    return collectives is not None and isinstance(value, collectives.AsyncCollectiveTensor)


def _unwrapped(value: Any) -> Any:
    """Return the tensor behind the result of a collective, and anything else as it is.

    The wrapper would call operators that no mode sees, such as the wait, whose result has the same memory.
    """
    if not _is_awaited(value):
        return value
    inner: Any = value
    return inner.elem if type(inner.elem) is ShapeTensor else inner.trigger_wait()


def _is_dense(tensor: Tensor) -> bool:
    """Return True if the elements fill memory without gaps or overlaps, in any order of the dimensions."""
    if tensor.is_nested:  # one of its sizes is not a number
        return False
    step = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        if size != 1 and stride != step:
            return False
        step *= size
    return True

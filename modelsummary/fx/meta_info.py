"""What is known of a node: where it comes from, the memory behind its results and what it saves, its costs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from modelsummary.capture.values import tensors_of

__all__ = ["MetaInfo", "TensorSet", "sim_env"]

Key = tuple[int, int]  # memory, and place of the first element in it: what ``data_ptr`` tells of a tensor with data


class TensorSet(dict[Key, int]):
    """Tensors by where they lie in memory -> bytes; two views that begin at the same place are one."""

    @classmethod
    def of(cls, value: Any) -> TensorSet:
        """The tensors in a value."""
        return cls({key_of(tensor): _nbytes(tensor) for tensor in tensors_of(value)})

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return sum(self.values())

    def union(self, other: TensorSet) -> TensorSet:
        """What is in either; the bytes of this one where it is in both."""
        return TensorSet({**other, **self})

    def intersect(self, other: TensorSet) -> TensorSet:
        """What is in both, with the bytes of this one."""
        return TensorSet({key: nbytes for key, nbytes in self.items() if key in other})

    def subtract(self, other: TensorSet) -> TensorSet:
        """What is in this one alone."""
        return TensorSet({key: nbytes for key, nbytes in self.items() if key not in other})


def key_of(tensor: Tensor) -> Key:
    """Where a tensor lies; it must be kept alive for that to mean anything."""
    try:
        return int(tensor.untyped_storage()._cdata), int(tensor.storage_offset()) * tensor.element_size()
    except (RuntimeError, NotImplementedError):  # sparse
        return id(tensor), 0


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class sim_env(saved_tensors_hooks):
    """Context that notes what is saved for the backward, without parameters and buffers; works on tensors without data.

    Args:
        module: whose parameters and buffers are left out; None: nothing is.

    Attributes:
        ctx: the tensors that were saved.
        param_ctx, buffer_ctx: parameters and buffers of the module.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        super().__init__(self._pack, lambda tensor: tensor)
        self.ctx = TensorSet()
        self.param_ctx = TensorSet.of(list(module.parameters())) if module is not None else TensorSet()
        self.buffer_ctx = TensorSet.of(list(module.buffers())) if module is not None else TensorSet()
        self._left_out = {memory for memory, _ in (*self.param_ctx, *self.buffer_ctx)}
        self._alive: list[Tensor] = []

    def __enter__(self) -> sim_env:  # type: ignore[override]
        super().__enter__()
        return self

    def _pack(self, tensor: Tensor) -> Tensor:
        key = key_of(tensor)
        if key[0] not in self._left_out:
            self._alive.append(tensor)
            self.ctx.setdefault(key, _nbytes(tensor))
        return tensor


@dataclass
class MetaInfo:
    """What is known of a node; it is ``node.meta["info"]``. Costs and memory are 0 until ``symbolic_profile``.

    Attributes:
        fqn: of the module that the node calls; of the module whose forward called it, for a function.
        call_index: number of that call of the module: with ``fqn`` it is the ``LayerInfo``.
        shape: of the first tensor in the result; None if there is none.
        outputs: tensors of the result.
        saved: what it saves for the backward, without parameters and buffers.
        kept: of ``outputs`` and with its bytes there, what a later node saves.
        accumulate_size: bytes of all that the nodes up to this one save, and of what they made that a later one saves;
            inputs of the graph included, which ``MemoryEstimate.activations`` leaves out.
        incremental_size: of these, what the nodes before had not.
        param_size: bytes of the parameters that it uses.
        backward_size: bytes of the gradients of its inputs: of the tensors it is given that are no parameters.
        fwd_flop, bwd_flop: FLOPs of products, 2 a multiply-add, forward and backward.
        fwd_comm, bwd_comm: bytes that are communicated.
        fwd_time, bwd_time: seconds of that, by a ``MeshSpec``.
        elementwise_ops: of other operators, one an element; in no other figure.
        uncounted: operators that look like products and have no formula -> calls, forward and backward.
    """

    fqn: str = ""
    call_index: int = 0
    shape: tuple[int, ...] | None = None
    outputs: TensorSet = field(default_factory=TensorSet, repr=False)
    saved: TensorSet = field(default_factory=TensorSet, repr=False)
    kept: TensorSet = field(default_factory=TensorSet, repr=False)
    accumulate_size: int = 0
    incremental_size: int = 0
    param_size: int = 0
    backward_size: int = 0
    fwd_flop: int = 0
    bwd_flop: int = 0
    fwd_comm: int = 0
    bwd_comm: int = 0
    fwd_time: float = 0.0
    bwd_time: float = 0.0
    elementwise_ops: int = 0
    uncounted: dict[str, int] = field(default_factory=dict)

    @property
    def output_size(self) -> int:
        """Bytes of the results that a later node saves."""
        return self.kept.nbytes

    @property
    def temp_size(self) -> int:
        """Bytes of the results that no later node saves."""
        return self.outputs.subtract(self.kept).nbytes

    @property
    def macs(self) -> int:
        """Multiply-adds of products, forward."""
        return self.fwd_flop // 2

    @property
    def bwd_macs(self) -> int:
        """Multiply-adds of products, backward."""
        return self.bwd_flop // 2

    def intersect(self, other: MetaInfo) -> TensorSet:
        """What both keep: of results and saved tensors."""
        return self._tensors().intersect(other._tensors())

    def union(self, other: MetaInfo) -> TensorSet:
        """What either keeps."""
        return self._tensors().union(other._tensors())

    def subtract(self, other: MetaInfo) -> TensorSet:
        """What this one keeps and the other does not."""
        return self._tensors().subtract(other._tensors())

    def _tensors(self) -> TensorSet:
        return self.saved.union(self.kept)

    def fresh(self) -> MetaInfo:
        """The same node, nothing measured yet."""
        return replace(MetaInfo(), fqn=self.fqn, call_index=self.call_index)

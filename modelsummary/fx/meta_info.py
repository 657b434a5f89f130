"""Facts of a node: its origin, the memory of its results and saved tensors, its costs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Node

from modelsummary.capture.containers import tensors_of

__all__ = ["MetaInfo", "TensorSet", "info_of", "sim_env"]

Key = tuple[int, int]  # storage, and offset of the first element in bytes: the ``data_ptr`` of a tensor without data


class TensorSet(dict[Key, int]):
    """A set of tensors as a dict: place in memory -> bytes. Views that begin at the same place are one tensor.

    >>> import torch
    >>> x = torch.empty(4, 8, device="meta")
    >>> TensorSet.of([x, x.view(32), torch.empty(2, device="meta")]).nbytes  # 32 floats and 2 floats
    136
    """

    @classmethod
    def of(cls, value: Any) -> TensorSet:
        """Return the tensors in a value, such as a tuple or a dict of tensors."""
        return cls({key_of(tensor): _nbytes(tensor) for tensor in tensors_of(value)})

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.values())

    def union(self, other: TensorSet) -> TensorSet:
        """Return the tensors in either set. The bytes of this one count for tensors in both."""
        return TensorSet({**other, **self})

    def intersect(self, other: TensorSet) -> TensorSet:
        """Return the tensors in both sets, with the bytes of this one."""
        return TensorSet({key: nbytes for key, nbytes in self.items() if key in other})

    def subtract(self, other: TensorSet) -> TensorSet:
        """Return the tensors in this set alone."""
        return TensorSet({key: nbytes for key, nbytes in self.items() if key not in other})


def key_of(tensor: Tensor) -> Key:
    """Return the place of a tensor in memory. It identifies the tensor only while that is alive."""
    try:
        return int(tensor.untyped_storage()._cdata), int(tensor.storage_offset()) * tensor.element_size()
    except (RuntimeError, NotImplementedError):  # sparse
        return id(tensor), 0


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class sim_env(saved_tensors_hooks):
    """A context that collects the tensors saved for the backward. It works on tensors with and without data.

    Args:
        module: module whose parameters and buffers are left out; None: all tensors are collected.

    Attributes:
        ctx: the saved tensors.
        param_ctx, buffer_ctx: parameters and buffers of the module.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
    >>> with sim_env(model) as env:
    ...     result = model(torch.rand(4, 8))
    >>> env.ctx.nbytes  # the input of the layer, 4 x 8 floats, and the result of ReLU, 4 x 16 floats
    384
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
    """The facts of a node, in ``node.meta["info"]``. Costs and sizes are 0 until ``symbolic_profile``.

    Attributes:
        fqn: FQN of the module that the node calls; for a function, of the module whose forward calls it.
        call_index: index of that call of the module. ``fqn`` and ``call_index`` identify the ``LayerInfo``.
        shape: shape of the first tensor in the result; None if the result has no tensors.
        outputs: tensors of the result.
        saved: tensors that the node saves for the backward, without parameters and buffers.
        kept: tensors of ``outputs`` that a later node saves, with the bytes that it saves.
        accumulate_size: bytes that this node and all before it add to the memory kept for the backward: tensors they
            save, and results that a later node saves. Inputs of the graph are included, unlike in
            ``MemoryEstimate.activations``.
        incremental_size: the part of ``accumulate_size`` that this node adds.
        param_size: bytes of the parameters that it uses.
        backward_size: bytes of the gradients of its inputs, without parameters.
        fwd_flop, bwd_flop: FLOPs of products, 2 per multiply-add, forward and backward.
        fwd_comm, bwd_comm: bytes communicated, forward and backward.
        fwd_time, bwd_time: seconds of the communication, by a ``MeshSpec``.
        elementwise_ops: operations of other operators, one per element; not included in any other figure.
        uncounted: operator that looks like a product and has no formula -> its calls, forward and backward.

    >>> from modelsummary.fx import symbolic_profile, symbolic_trace
    >>> import torch
    >>> gm = symbolic_trace(nn.Sequential(nn.Linear(8, 16)), meta_args={"input": (x := torch.rand(4, 8))})
    >>> info = next(node for node in symbolic_profile(gm, x).graph.nodes if node.op == "call_module").meta["info"]
    >>> info.shape, info.macs, info.param_size  # 4 x 8 x 16 products; 8 x 16 + 16 floats of 4 bytes
    ((4, 16), 512, 576)
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
        """Return the tensors, saved or kept, that both nodes have."""
        return self._tensors().intersect(other._tensors())

    def union(self, other: MetaInfo) -> TensorSet:
        """Return the tensors, saved or kept, that either node has."""
        return self._tensors().union(other._tensors())

    def subtract(self, other: MetaInfo) -> TensorSet:
        """Return the tensors, saved or kept, that this node has and the other has not."""
        return self._tensors().subtract(other._tensors())

    def _tensors(self) -> TensorSet:
        return self.saved.union(self.kept)

    def fresh(self) -> MetaInfo:
        """Return the facts of the same node before profiling."""
        return MetaInfo(self.fqn, self.call_index)


def info_of(node: Node) -> MetaInfo:
    """Return the facts of a node; without any, empty ones, which are not stored."""
    info = node.meta.get("info")
    return info if isinstance(info, MetaInfo) else MetaInfo()

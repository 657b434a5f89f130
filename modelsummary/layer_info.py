"""``LayerInfo``: the facts of one call of one module, as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeAlias

from modelsummary.errors import harmless
from modelsummary.tables import Printed, Report
from modelsummary.units import grouped

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "UNKNOWN",
    "CallKey",
    "CallKeys",
    "LayerInfo",
    "Sizes",
    "first_shape",
    "leaf_output_bytes",
    "ledger",
    "rows_around",
    "total",
]

UNKNOWN = "?"
_DISPLAYED = (  # if there is such a figure
    "class_name input_size output_size inner_layers num_params trainable_params params_bytes num_buffers macs flops"
    " elementwise_ops bytes_read bytes_written arithmetic_intensity activation_bytes peak_bytes latency_ms"
    " estimated_latency_ms uncounted_ops note"
).split()

Sizes: TypeAlias = "list[int] | tuple[Sizes, ...] | Mapping[str, Sizes] | str | None"
"""Shapes of a nested value: a list is the shape of one tensor, a tuple or a dict is a container (list, tuple, dict,
dataclass, object), None is a value other than a tensor, and ``UNKNOWN`` is a value whose size cannot be known."""

CallKey: TypeAlias = "tuple[str, int]"
"""FQN of a module and running number of one of its calls, from 0."""


class CallKeys:
    """The keys of the module calls of one run: rows, timers, operators and events of a call share its key.

    >>> keys = CallKeys()
    >>> [keys.next_of(fqn) for fqn in ("", "relu", "fc", "relu")]
    [('', 0), ('relu', 0), ('fc', 0), ('relu', 1)]
    """

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()

    def next_of(self, fqn: str) -> CallKey:
        """Return the key of the next call of a module; to be asked once per call, in the order in which they begin."""
        key = fqn, self._calls[fqn]
        self._calls[fqn] += 1
        return key


def first_shape(sizes: Sizes) -> list[int] | str | None:
    """Return the shape of the first tensor in a nested value, depth first; None if it holds no tensor.

    >>> first_shape(({"mask": None}, [2, 3], [4]))
    [2, 3]
    """
    if not isinstance(sizes, (tuple, Mapping)):
        return sizes
    inner = map(first_shape, sizes.values() if isinstance(sizes, Mapping) else sizes)
    return next((shape for shape in inner if shape is not None), None)


@dataclass(eq=False, repr=False, slots=True)
class LayerInfo(Printed):
    """One call of one module, or a module that was not called.

    A module called twice has two rows, distinguished by ``call_index``. A container without a call of its own
    (``nn.ModuleList``) and a module that was not reached have one row with ``executed`` False.

    ``self_*`` are the module's own share: operators that ran while no submodule was running, and parameters that it
    registers itself, each tensor in the first row that owns it. They add up: the sum over all rows is the model's
    total. The names without ``self_`` include the descendants of this row.

    >>> layer = LayerInfo("fc", "fc", "Linear", layer_id=0, module=None, macs=6, bytes_read=20, bytes_written=4)
    >>> layer.flops, layer.arithmetic_intensity
    (12, 0.5)

    Attributes:
        fqn: fully qualified name, the first path in ``model.named_modules()``; ``""`` is the model.
        name: attribute under which the parent row holds it (``conv1``; ``layers.3`` if it is not a direct child).
        class_name: class of the module; the original class for a ScriptModule.
        layer_id: ``id()`` of the module when it ran: equal for the calls of one module.
        module: the live module; None after unpickling.
        depth: 0 for the model.
        depth_index: running number among the rows of the same depth, from 1.
        call_index: running number among the calls of the same module, from 0.
        call_order: running number among all calls in the order in which they began, from 0; None if not called.
        executed: whether the module was called.
        is_recursive: whether the module, or every parameter it owns, already has an earlier row.
        training: ``module.training`` during the run.
        trainable: ``"True"``, ``"False"``, ``"Partial"``, or ``"--"`` without parameters.
        inner_layers: shape of each parameter the module registers itself; None while uninitialised (lazy).
        kernel_size: kernel size of a convolution or pooling; empty for other modules.
        groups: groups of a convolution; None for other modules.
        input_size, output_size: shapes of all tensors in the arguments and in the result, with the
            structure kept (see ``Sizes``). A sole argument is given without its tuple.
        input_bytes, output_bytes: bytes of those tensors, each tensor object once.
        num_params, trainable_params, params_bytes: parameters of the module and its submodules, a tensor
            used twice counted once. An uninitialised parameter counts 0 and sets ``has_uninitialized``.
        num_buffers, buffer_bytes: elements and bytes of its buffers, likewise, and of packed quantised
            weights, which torch does not register as parameters.
        macs: multiply-adds of matrix products, convolutions and attention products.
        skipped_macs: the part of ``macs`` in attention blocks that the ``BlockMask`` of a ``flex_attention`` leaves
            out: the compiled kernel does not compute them. None if the values of a mask are not known.
        elementwise_ops: one per output element of pointwise operators and interpolation, one per input
            element of reductions, normalisations, softmax and pooling.
        bytes_read, bytes_written: of all operators, each reading its inputs and writing its outputs once.
        uncounted_ops: operators of this row without a MAC formula, and how often each ran.
        latency_ms: time of the call in milliseconds, median over runs, with everything inside it; None if not
            measured. A row without a call of its own has the sum of its children.
        self_latency_ms: the part of ``latency_ms`` outside the rows below. The sum over all rows is the root's
            ``latency_ms``.
        latency_share: ``latency_ms`` as a part of the root's, 0 to 1.
        latency_iqr_ms: interquartile range of ``latency_ms`` over the runs.
        backward_*: the same figures for the backward.
        estimated_latency_ms, estimated_backward_latency_ms: predicted time of the call on a device, and of its
            backward; see ``Statistics.estimate_latency``. ``self_estimated_*``: the same without the rows below.
        activation_bytes: bytes that the call keeps for the backward: storages that it is the first to save, without
            parameters, buffers and inputs; None before ``Statistics.memory`` ran. ``self_*`` adds up.
        peak_bytes: the most bytes alive at one time during the call's forward, everything included.
        findings: codes of the rules that found something at the module or at this call; None before
            ``Statistics.check`` ran.
        values: figures of the first tensor in the result, such as ``"output_std"``, and of its gradient, such as
            ``"gradient_norm"``; None before ``Statistics.values`` ran.
        note: what is not known about this row, and why; empty if everything is known.
    """

    fqn: str
    name: str
    class_name: str
    layer_id: int
    module: nn.Module | None
    depth: int = 0
    depth_index: int = 0
    call_index: int = 0
    call_order: int | None = None
    executed: bool = False
    is_recursive: bool = False
    training: bool = False
    parent_info: LayerInfo | None = None
    children: list[LayerInfo] = field(default_factory=list)

    inner_layers: dict[str, list[int] | None] = field(default_factory=dict)
    kernel_size: list[int] = field(default_factory=list)
    groups: int | None = None
    input_size: Sizes = None
    output_size: Sizes = None
    input_bytes: int = 0
    output_bytes: int = 0

    num_params: int = 0
    trainable_params: int = 0
    params_bytes: int = 0
    num_buffers: int = 0
    buffer_bytes: int = 0
    self_params: int = 0
    self_trainable_params: int = 0
    self_params_bytes: int = 0
    self_buffers: int = 0
    self_buffer_bytes: int = 0
    has_uninitialized: bool = False

    macs: int = 0
    elementwise_ops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    self_macs: int = 0
    self_elementwise_ops: int = 0
    self_bytes_read: int = 0
    self_bytes_written: int = 0
    skipped_macs: int | None = 0
    self_skipped_macs: int | None = 0
    uncounted_ops: dict[str, int] = field(default_factory=dict)

    latency_ms: float | None = None
    self_latency_ms: float | None = None
    latency_share: float | None = None
    latency_iqr_ms: float | None = None
    backward_latency_ms: float | None = None
    backward_self_latency_ms: float | None = None
    backward_latency_share: float | None = None
    backward_latency_iqr_ms: float | None = None
    estimated_latency_ms: float | None = None
    self_estimated_latency_ms: float | None = None
    estimated_backward_latency_ms: float | None = None
    self_estimated_backward_latency_ms: float | None = None

    activation_bytes: int | None = None
    self_activation_bytes: int | None = None
    peak_bytes: int | None = None

    findings: str | None = None
    values: dict[str, float] | None = None

    note: str = ""

    @property
    def key(self) -> CallKey:
        """The key of the call: ``(fqn, call_index)``."""
        return self.fqn, self.call_index

    @property
    def flops(self) -> int:
        """2 x ``macs``; element-wise work is counted separately, in ``elementwise_ops``."""
        return 2 * self.macs

    @property
    def self_flops(self) -> int:
        """2 x ``self_macs``."""
        return 2 * self.self_macs

    @property
    def achieved_flops_per_second(self) -> float | None:
        """``flops`` divided by ``latency_ms``, per second; None if the latency was not measured."""
        return self.flops / self.latency_ms * 1e3 if self.latency_ms else None

    @property
    def achieved_bytes_per_second(self) -> float | None:
        """Bytes read and written divided by ``latency_ms``, per second; None if the latency was not measured."""
        return (self.bytes_read + self.bytes_written) / self.latency_ms * 1e3 if self.latency_ms else None

    @property
    def arithmetic_intensity(self) -> float | None:
        """``flops`` per byte that operators read or write (Williams et al. 2009); None if they move no bytes."""
        moved = self.bytes_read + self.bytes_written
        return self.flops / moved if moved else None

    @property
    def size_bytes(self) -> int:
        """Bytes of everything the call touches: inputs, outputs, parameters and buffers."""
        return self.input_bytes + self.output_bytes + self.params_bytes + self.buffer_bytes

    @property
    def trainable(self) -> str:
        """``"True"``, ``"False"`` or ``"Partial"``; ``"--"`` without parameters."""
        if self.num_params == 0:
            return "--"
        if self.trainable_params == 0:
            return "False"
        return "True" if self.trainable_params == self.num_params else "Partial"

    @property
    def is_uncertain(self) -> bool:
        """Whether the MACs are only a lower bound: an operator has no formula, or calls cannot be seen."""
        return bool(self.uncounted_ops) or (bool(self.note) and not self.executed)

    @property
    def is_leaf(self) -> bool:
        """Whether no other module ran during this call."""
        return all(not child.executed and child.is_leaf for child in self.children)

    def walk(self, depth: int | None = None) -> Iterator[LayerInfo]:
        """Yield this row and its descendants in printed order, down to ``depth`` (None: all)."""
        stack = [self]
        while stack:
            info = stack.pop()
            yield info
            if depth is None or info.depth < depth:
                stack.extend(reversed(info.children))

    def __repr__(self) -> str:
        return harmless(f"{self.class_name}: {self.depth}-{self.depth_index}" if self.depth else self.class_name)

    def _report(self) -> Report:
        facts = {name: value for name in _DISPLAYED if (value := getattr(self, name))}
        numbers = {
            name: f"{value:,.4g}" if isinstance(value, float) else grouped(value)
            for name, value in facts.items()
            if isinstance(value, (int, float))
        }
        rows = [[name, numbers.get(name, ""), "" if name in numbers else value] for name, value in facts.items()]
        return Report(rows, [self.fqn or self.class_name, "", ""], "lrl")

    def __getstate__(self) -> dict[str, Any]:
        return {attribute.name: getattr(self, attribute.name) for attribute in fields(self)} | {"module": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


def rows_around(row: LayerInfo) -> Iterator[LayerInfo]:
    """Yield the rows above a row, the nearest first and the model last."""
    while row.parent_info is not None:
        row = row.parent_info
        yield row


def total(first: int | None, second: int | None) -> int | None:
    """Return the sum of two figures; None if either is unknown.

    >>> total(2, None) is None
    True
    """
    return None if first is None or second is None else first + second


def leaf_output_bytes(root: LayerInfo) -> int:
    """Return the bytes of the outputs of all leaf calls: the forward's activations as modules see them."""
    return sum(row.output_bytes for row in root.walk() if row.executed and row.is_leaf)


def ledger(root: LayerInfo) -> dict[str, int]:
    """Return the operators below ``root`` that have no MAC formula, with the number of times each ran."""
    counts: Counter[str] = Counter()
    for row in root.walk():
        counts.update(row.uncounted_ops)
    return dict(counts)

"""Shape-only execution: every operator runs on tensors without data, so nothing is computed or allocated.

Parameters, buffers and inputs are replaced by twins before the run: ``ShapeTensor``s, which report the model's own
device. Any other tensor (in a list, from a numpy array) is replaced by a twin when an operator gets it.

Two additions make it fast and general:

- **Remembered results.** Networks repeat themselves, and one network runs often. An operator called again with the same
  shapes, strides, dtypes and arguments returns an output like the first one, without the (slow) meta kernel. Results of
  torch's own operators are remembered for all runs of the process.
- **Known values.** Small tensors whose values do not depend on the floating point input (``torch.arange``, a buffer,
  an attention mask) are computed beside their twins, so a branch on them needs no real execution. An operator that
  needs unknown values raises ``DataDependentError``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from modelsummary import _torch
from modelsummary._torch import OpOverload, disable_current_modes
from modelsummary.capture.containers import map_tensors
from modelsummary.capture.devices import with_index
from modelsummary.capture.execution.known_values import KnownValues, is_small
from modelsummary.capture.execution.results import Remake, remake_of
from modelsummary.capture.execution.shape_tensor import (
    OnMeta,
    ShapeTensor,
    executes,
    run_on_metadata,
    storages_resized,
)
from modelsummary.capture.execution.twins import Twins
from modelsummary.errors import DataDependentError
from modelsummary.operators.attention import BLOCK_MASKED, skipped_macs
from modelsummary.operators.operator_calls import DistinctCall, spec_of
from modelsummary.operators.operator_rules import NO_COST, OpCost, OpRule, op_cost, tensors_in
from modelsummary.operators.products import is_outer_product
from modelsummary.operators.table import Arguments

__all__ = ["WAITS", "ShapeOnly", "selects_by_mask"]

_META = torch.device("meta")
_CPU = torch.device("cpu")
_STRIDED = torch.strided
_TO_COPY = torch.ops.aten._to_copy.default
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default  # a view that its schema does not declare
_ATOMS = frozenset({int, float, bool, type(None), str, torch.dtype, torch.layout, torch.memory_format})
# Arguments without effect on shapes; a generator of the CPU refuses tensors on meta.
_WITHOUT_DATA = (("pin_memory", False), ("generator", None))
# Collectives that return what they take, in its memory, which their schemas do not declare.
WAITS = frozenset({"_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd"})
_MASKS = (torch.bool, torch.uint8)
_MOST_REMEMBERED = 2**14
_MOST_ROUTED = 2**26  # choices of experts: more than prompts have on one rank


class _Remembered(NamedTuple):
    """What equal calls of an operator share; keys hold the identity of its rule, which lives as long."""

    rule: OpRule
    remake: Remake | None
    cost: OpCost


_remembered: dict[tuple[Any, ...], _Remembered] = {}


def _of_all_runs() -> dict[tuple[Any, ...], _Remembered]:
    """Return what was remembered of torch's operators; a run that goes on keeps what it began with."""
    global _remembered  # noqa: PLW0603
    if len(_remembered) > _MOST_REMEMBERED:
        _remembered = {}
    return _remembered


def _settings() -> tuple[Any, ...]:
    """Return the settings of the process on which layouts of results depend, apart from the default dtype."""
    return torch.backends.cudnn.enabled, torch.are_deterministic_algorithms_enabled(), _torch.is_onednn_enabled()


@executes
class ShapeOnly:
    """An execution on shape tensors; ``run`` returns the result and the cost of one operator.

    Args:
        device: device of the model; factory functions make tensors there unless they name another device.
        dtype: dtype of the twins of floating point tensors; None: the dtype of each tensor.

    Attributes:
        current: the execution that is running, or None.
        obstacle: the first operator that could not run on shapes, or None. The model may have caught the exception.
        needs_values: whether the obstacle is that the values of a tensor are not known.
        routes_evenly: whether values are assumed, see ``assume_values``: choices by unknown scores (top-k, argmax) are
            taken to fall on all candidates in turn, so that the forward of a mixture may loop over its experts.
        log: None, or a list to which every operator is appended with its shapes and constants.
        checks_indices_of: the model; known indices beyond the end of a table are refused then, as on data, and named by
            it. None: they are not, as the model of a rank has fewer rows.
        distinct: the remembered result that equal calls of the last operator share, and its tensors; None if its cost
            depends on values.
    """

    current: ClassVar[ShapeOnly | None] = None

    def __init__(self, device: torch.device = _META, dtype: torch.dtype | None = None) -> None:
        self.device = device = with_index(device)
        self._several_devices = device.type not in ("cpu", "meta")  # tensors that a forward makes may be on the CPU
        self.obstacle: str | None = None
        self.needs_values = self.routes_evenly = False
        self.checks_indices_of: nn.Module | None = None
        self.log: list[Any] | None = None
        self.distinct: DistinctCall | None = None
        self._of_all_runs, self._of_this_run = _of_all_runs(), dict[tuple[Any, ...], _Remembered]()
        self._settings = _settings()
        self._known = KnownValues()
        self._twins = Twins(device, dtype, self._known, self._note_obstacle)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Return a context in which shape tensors get their values from this execution."""
        with _torch.swapped(ShapeOnly, "current", self), storages_resized():
            yield

    def end(self) -> None:
        """Forget the tensors of the run: a run that made a large model's twins would keep them in reference cycles."""
        self._known, self.distinct = KnownValues(), None
        self._twins.end()

    def stand_in(self, tensor: Tensor) -> Tensor:
        """Return the tensor that operators get instead of one that neither the model nor its inputs hold."""
        return self._twins.of(tensor)

    def input(self, tensor: Tensor) -> Tensor:
        """Return the twin of an input tensor."""
        return self._twins.of_input(tensor)

    def replace_tensors_of(self, modules: Iterable[nn.Module]) -> None:
        """Replace parameters, buffers and plain tensor attributes by twins."""
        self._twins.replace_tensors_of(modules)

    def values(self, twin: Tensor, asker: str) -> Tensor:
        """Return a copy of the values of a twin. Raises ``DataDependentError`` if they are not known."""
        with disable_current_modes(), _torch.DisableTorchFunction():
            value = self._known.value(twin) if self._known.cover((twin,)) else None
        if value is None:
            raise self.needing_values(asker)
        return value

    def follow_values(self, most_elements: int) -> None:
        """Follow the values of larger tensors from now on, of at least ``most_elements``."""
        self._known.most_elements = max(self._known.most_elements, most_elements)

    def known_value(self, tensor: Tensor) -> Tensor | None:
        """Return a copy of the values of a tensor of the run, or None if they are not known."""
        with disable_current_modes(), _torch.DisableTorchFunction():
            return self._value_of(tensor)

    def knows_values_of(self, tensor: Tensor) -> bool:
        """Return True if the values of a tensor of the run are known."""
        with _torch.DisableTorchFunction():
            return self._known.cover((tensor,))

    def computes(self, *_: Any, **__: Any) -> bool:
        """Return True if an operator on known values may compute its values; the operators of a model may."""
        return True

    # ---------------------------------------------------------------------------------- one operator

    def run(self, func: Any, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, OpCost]:
        """Run one operator and return its result and cost.

        Raises:
            DataDependentError: it needs values that are not known. Exceptions of its meta kernel propagate.
        """
        self.distinct = None
        written = self._writable(rule, args, kwargs) if rule.may_write else ()
        key: list[Any] = [id(rule)]  # hashing an operator takes time
        tensors: list[Tensor] = []
        args, kwargs = self._on_twins(rule, args, kwargs, key, tensors)
        are_known = not (rule.is_random or rule.is_collective) and self._known.cover(tensors)
        if self.checks_indices_of is not None and rule.gathers:
            self._check_indices(rule.signature.bind(args, kwargs), self.checks_indices_of)
        if rule.needs_values or selects_by_mask(rule, args):
            out, cost = self._run_on_elements(func, rule, args, kwargs, key, are_known=are_known)
        else:
            for tensor in written:
                self._known.before_write(tensor)
            try:
                out, cost = self._run_on_shapes(func, rule, args, kwargs, tensors, key)
            except Exception:
                if not are_known or not self.computes(func, rule, args):
                    self._note_obstacle(rule.name)
                    raise
                out, cost = self._run_on_values(func, rule, args, kwargs, are_known), NO_COST
            else:
                if are_known or written:
                    out = self._follow(func, rule, args, kwargs, out, cost, written, are_known=are_known)
                elif self.routes_evenly:
                    self._assume_result(rule, args, out)
                if rule.name in BLOCK_MASKED:
                    cost, self.distinct = cost._replace(skipped_macs=skipped_macs(rule, args, self._value_of)), None
        if self.log is not None and (rule.writes or next(tensors_in(out), None) is not None):
            self.log.append((func, *key[1:]))  # it does not only return a value to Python
        return out, cost

    def _assume_result(self, rule: OpRule, args: tuple[Any, ...], out: Any) -> None:
        """Assume the values of a choice, of random numbers, or of what other ranks sent."""
        if rule.facts.chooses:
            self._assume_choice(args[0], out if isinstance(out, Tensor) else out[1])
        elif rule.facts.mean is not None:
            self._assume(out, rule.facts.mean)
        elif rule.is_collective:
            self._assume_alike(rule, args, out)

    def _check_indices(self, call: Arguments, model: nn.Module) -> None:
        """Raise ``IndexError`` for known indices that a table, such as of positions, does not have."""
        for table, dim, indices in _lookups(call):
            values = self.known_value(indices) if indices.numel() else None
            if values is None:
                continue
            least, most = map(int, values.aminmax())
            size = table.shape[dim] if table.dim() else 1
            counts_from_end = "indices" in call and "weight" not in call  # as in x[-1]
            if most >= size or least < (-size if counts_from_end else 0):
                named = (*model.named_parameters(), *model.named_buffers())
                name = next((name for name, tensor in named if tensor is table), "a tensor")
                wrong = most if most >= size else least
                raise IndexError(
                    f"index {wrong} is out of range for {name} of shape {list(table.shape)}; pass 0 to {size - 1}"
                )

    def assume_values(self, inputs: Any) -> None:
        """Assume values that are not known, as no real run can tell them: choices fall on all candidates in turn.

        Integers among the inputs without values are zeros, as a real run makes them for inputs given by size. Random
        numbers have their mean. Masks, and what depends on floating point inputs, stay unknown.
        """
        self.routes_evenly = True
        self.follow_values(_MOST_ROUTED)
        for tensor in tensors_in(inputs):
            if not (tensor.dtype in _MASKS or tensor.dtype.is_floating_point or tensor.dtype.is_complex):
                self._assume(tensor, 0)

    def _assume(self, tensor: Tensor, value: float) -> None:
        """Let a small tensor of unknown values be filled with one value."""
        if type(tensor) is ShapeTensor and is_small(tensor) and not self._known.cover((tensor,)):
            with disable_current_modes(), _torch.DisableTorchFunction():
                self._known.set(tensor, torch.full(tensor.shape, value, dtype=tensor.dtype, device="cpu"))

    def _assume_choice(self, scores: Tensor, chosen: Tensor) -> None:
        """Let choices along the last dimension fall on all candidates in turn."""
        if chosen.dtype is torch.int64 and chosen.shape[:1] == scores.shape[:1] and scores.dim():
            with disable_current_modes(), _torch.DisableTorchFunction():
                in_turn = torch.arange(chosen.numel(), device="cpu") % scores.shape[-1]
                self._known.set(chosen, in_turn.view(chosen.shape))

    def _assume_alike(self, rule: OpRule, args: tuple[Any, ...], out: Any) -> None:
        """Let other ranks send the numbers that this one does: an all-to-all returns its own part once per rank.

        Numbers for several ranks are rows for their experts. Other ranks choose other experts, so a rank gets as many
        rows as it sends, from all ranks, and evenly for its experts.
        """
        sent = args[0]
        is_number = isinstance(sent, Tensor) and not sent.dtype.is_floating_point and isinstance(out, Tensor)
        values = self._known.value(sent) if is_number and self._known.cover((sent,)) else None
        if values is None:
            return
        if rule.name == "_c10d_functional.all_to_all_single":
            rank, n_ranks = _torch.place_in_group(args[-1])
            if len(values) > n_ranks or int(values.count_nonzero()) > 1:
                values = _spread(int(values.sum()), n_ranks, len(values) // n_ranks)
            else:
                values = values.chunk(n_ranks)[rank].repeat(n_ranks)
        elif rule.name not in WAITS:
            return
        self._known.set(out, values)

    def _writable(self, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Tensor]:
        """Return the tensors that an operator writes. Raise ``DataDependentError`` if one of them is not a twin."""
        written = list(tensors_in(rule.written(args, kwargs)))
        # The write would change only the twin, while Python would read the tensor itself.
        if not all(type(tensor) is ShapeTensor or tensor.is_meta for tensor in written):
            raise self.needing_values(rule.name)
        return written

    def _run_on_elements(
        self, func: Any, rule: OpRule, args: Any, kwargs: dict[str, Any], key: list[Any], *, are_known: bool
    ) -> tuple[Any, OpCost]:
        """Run an operator that needs the values of its arguments, or the number of elements in a mask."""
        if are_known or rule.needs_values:
            return self._run_on_values(func, rule, args, kwargs, are_known), NO_COST
        tensors: list[Tensor] = []
        by_position = tuple(self._to_twins((args[0], self._places(args[1])), key, tensors))
        out, _ = self._run_on_shapes(func, rule, by_position, kwargs, tensors, key)
        self.distinct = None
        return out, op_cost(rule, args, kwargs, out)

    def _follow(
        self,
        func: Any,
        rule: OpRule,
        args: Any,
        kwargs: dict[str, Any],
        out: Any,
        cost: OpCost,
        written: Sequence[Tensor],
        *,
        are_known: bool,
    ) -> Any:
        """Keep the known values valid: follow the results, or forget the overwritten tensors. Return the result."""
        are_known = are_known and isinstance(func, OpOverload) and self.computes(func, rule, args, cost, out)
        if not (are_known and self._known.follow(func, rule, args, kwargs, out)):
            for tensor in written:
                self._known.overwritten(tensor)
        # A copy to the CPU has its values, as .cpu().numpy() needs them.
        if func is _TO_COPY and are_known and kwargs.get("device") == _CPU and self.device.type != "cpu":
            value = self._known.value(out)
            return out if value is None else value
        return out

    def _note_obstacle(self, what: str) -> None:
        self.obstacle = self.obstacle or what

    def needing_values(self, name: str) -> DataDependentError:
        """Return the error for ``name``, such as an operator, which needs values that are not known."""
        if self.obstacle is None:
            self.obstacle, self.needs_values = name, True
        return DataDependentError(name)

    def _run_on_shapes(
        self,
        func: Any,
        rule: OpRule,
        args: Any,
        kwargs: dict[str, Any],
        tensors: Sequence[Tensor],
        key: Sequence[Any],
    ) -> tuple[Any, OpCost]:
        device = self._place(kwargs, tensors) if kwargs or self._several_devices else self.device
        identity = (device, torch.get_default_dtype(), self._settings, *key)
        is_alone = not _torch.number_of_dispatch_modes()  # another mode, as of ``fused_recurrent``, may change results
        results = self._of_all_runs if rule.is_builtin and is_alone else self._of_this_run
        try:
            remembered = results.get(identity)
        except TypeError:  # an unhashable argument
            remembered, identity = None, ()
        if remembered is None:
            out = self._run_kernel(func, rule, args, kwargs, tensors, device)
            cost = op_cost(rule, args, kwargs, out)
            if identity:
                shares = _shares_storage(func, rule)
                results[identity] = remembered = _Remembered(rule, remake_of(func, shares, args, tensors, out), cost)
                self.distinct = remembered, tensors
            return out, cost
        self.distinct = remembered, tensors
        if rule.keeps_shape:
            return args[0], remembered.cost
        remake = remembered.remake
        out = None if remake is None or device is None else remake(args, device)
        return (self._run_kernel(func, rule, args, kwargs, tensors, device) if out is None else out), remembered.cost

    def _place(self, kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> torch.device | None:
        """Return the device of an operator's results; None for tensors that the forward makes on meta."""
        device: torch.device | None = kwargs.get("device")
        if device is None:
            if not self._several_devices:
                return self.device
            return next((tensor.device for tensor in tensors if tensor.dim()), tensors[0].device if tensors else _CPU)
        if self.device.type in (device.type, "meta"):
            return self.device
        self._several_devices = True
        return None if device.type == "meta" else device

    @staticmethod
    def _run_kernel(
        func: Any,
        rule: OpRule,
        args: Any,
        kwargs: dict[str, Any],
        tensors: Sequence[Tensor],
        device: torch.device | None,
    ) -> Any:
        """Run a shape rule, the operator on metadata, or the meta kernel."""
        if _shares_storage(func, rule) and all(type(tensor) is ShapeTensor for tensor in tensors):
            return run_on_metadata(func, args, kwargs)
        shortcut = rule.facts.shape
        _check_dtypes(rule, args)
        there = OnMeta(device or _META)
        out = shortcut(*args, **kwargs) if shortcut is not None else None
        if out is None:
            kwargs = there.leave(kwargs)
            names_device = kwargs.get("device") is not None or any(type(value) is torch.device for value in args)
            if rule.makes_tensor and not names_device and not tensors:
                kwargs["device"] = _META
            out = func(*there.leave(args), **kwargs)
            result = rule.facts.result
            if result is not None and device is not None and all(type(tensor) is ShapeTensor for tensor in tensors):
                out = result(out, *args)
        if rule.facts.cpu_result is not None and device is not None and device.type == "cpu":
            out = rule.facts.cpu_result(out, *args)
        return out if device is None else there.enter(out)

    def _places(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return ``indices`` with integers for masks. The values of a mask must be known to count its elements."""
        positions: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in _MASKS:
                positions.append(index)
                continue
            values = self._value_of(index)
            if values is None:
                raise self.needing_values("aten.index")
            positions += map(self._know, values.nonzero(as_tuple=True))
        return positions

    # --------------------------------------------------------------------------------------- twins

    def _on_twins(
        self, rule: OpRule, args: Sequence[Any], kwargs: dict[str, Any], key: list[Any], tensors: list[Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with twins for tensors; fill ``key`` and ``tensors`` as ``_to_twins`` does."""
        on_twins = tuple(self._to_twins(args, key, tensors))
        if kwargs:
            key.extend(kwargs)
            kwargs = dict(zip(kwargs, self._to_twins(kwargs.values(), key, tensors), strict=True))
            for name, value in _WITHOUT_DATA:
                if kwargs.get(name):
                    kwargs[name] = value
        if rule.facts.depends_on_views:
            key.append(is_outer_product(*on_twins[:2]))
        return on_twins, kwargs

    def _to_twins(self, values: Iterable[Any], key: list[Any], tensors: list[Tensor]) -> list[Any]:
        """Return ``values`` with twins for tensors; append twins to ``tensors`` and items that identify to ``key``."""
        replaced = []
        for value in values:
            kind = type(value)
            if kind is ShapeTensor:
                key += (value.shape, value.stride(), value.dtype)
                tensors.append(value)
                replaced.append(value)
            elif kind in _ATOMS:
                key += (kind, value)  # 1, 1.0 and True are equal, but promote to different dtypes
                replaced.append(value)
            elif isinstance(value, Tensor):
                twin = self._twins.of(value)
                key += (twin.shape, twin.stride() if twin.layout is _STRIDED else object(), twin.dtype)
                tensors.append(twin)
                replaced.append(twin)
            elif isinstance(value, (list, tuple)):
                key.append(len(value))
                if _ATOMS.issuperset(map(type, value)):  # sizes, nearly always
                    key += (*map(type, value), *value)
                    replaced.append(value)
                else:
                    replaced.append(kind(self._to_twins(value, key, tensors)))
            elif isinstance(value, dict):
                key.extend(value)
                replaced.append(dict(zip(value, self._to_twins(value.values(), key, tensors), strict=True)))
            else:
                key.append(_identity(value))
                replaced.append(value)
        return replaced

    # ---------------------------------------------------------------------------------- known values

    def _run_on_values(self, func: Any, rule: OpRule, args: Any, kwargs: dict[str, Any], are_known: bool) -> Any:
        computes = are_known and (not rule.needs_values or self.computes(func, rule, args))
        values = self._known.filled_in(args, kwargs) if computes else None
        if values is None:
            raise self.needing_values(rule.name)
        return map_tensors(self._know, func(*values[0], **values[1]))

    def _value_of(self, tensor: Tensor) -> Tensor | None:
        """Return a copy of the values of a tensor; None if they are not known."""
        twin = self._twins.of(tensor)
        return self._known.value(twin) if self._known.cover((twin,)) else None

    def _know(self, value: Tensor) -> Tensor:
        twin = self._twins.without_data(value, is_stray=True)
        if twin is None:
            return value
        self._known.set(twin, value)
        return twin


def _shares_storage(func: Any, rule: OpRule) -> bool:
    """Return True if results share the storage of an argument: such an operator reads no data."""
    return rule.is_view or func is _UNSAFE_VIEW or rule.moves_shape


def _lookups(call: Arguments) -> Iterator[tuple[Tensor, int, Tensor]]:
    """Yield the table in which an operator looks up, the dimension, and the indices."""
    if "weight" in call:  # of an embedding
        yield call["weight"], 0, call["indices"]
    elif "dim" in call:
        yield call["self"], call["dim"], call["index"]
    elif "indices" in call:
        dim = 0
        for index in call["indices"]:
            is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
            if index is not None and not is_mask:
                yield call["self"], dim, index
            dim += index.dim() if is_mask else 1


def _spread(n_rows: int, n_ranks: int, n_experts: int) -> Tensor:
    """Return how many rows come from each rank for each expert: consecutive ones of a rank go to consecutive experts.

    >>> _spread(8, n_ranks=2, n_experts=4), _spread(4, n_ranks=2, n_experts=4)
    (tensor([1, 1, 1, 1, 1, 1, 1, 1]), tensor([1, 1, 0, 0, 0, 0, 1, 1]))
    """
    ends = torch.arange(n_ranks + 1, device="cpu")[:, None] * n_rows // n_ranks
    experts = torch.arange(n_experts, device="cpu")
    before = (ends - experts + n_experts - 1) // n_experts  # rows of an expert that come from ranks before
    return before.diff(dim=0).flatten()


def _check_dtypes(rule: OpRule, args: Any) -> None:
    """Raise ``RuntimeError`` for operands of different dtypes, which device kernels refuse and meta kernels accept."""
    if not rule.facts.dtypes:
        return
    dtypes = [tensor.dtype for tensor in tensors_in(args)]
    if rule.facts.dtypes == "norm":  # half-precision input with float32 weights is allowed
        dtypes = [dtypes[0], *(dtype for dtype in dtypes[1:] if dtype is not torch.float32 or dtypes[0].itemsize > 4)]
    if len(set(dtypes)) > 1:
        raise RuntimeError(f"{rule.name} expects operands of one dtype, got {', '.join(map(str, dtypes))}")


def _identity(value: Any) -> Any:
    """Return a key that identifies a constant; functions that a forward defines anew each time have equal keys."""
    if not isinstance(value, FunctionType):
        return value
    contents = (cell.cell_contents for cell in value.__closure__ or ())
    kept = (spec_of(content) if isinstance(content, Tensor) else _identity(content) for content in contents)
    return value.__code__, value.__defaults__, *kept


def selects_by_mask(rule: OpRule, args: Any) -> bool:
    """Return True for ``x[mask]``, where the values of the mask decide the size of the result."""
    return rule.name == "aten.index" and any(index.dtype in _MASKS for index in tensors_in(args[1]))

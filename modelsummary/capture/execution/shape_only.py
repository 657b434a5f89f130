"""Shape-only execution: every operator runs on meta tensors, so nothing is computed or allocated.

Parameters, buffers and inputs give way to meta twins before the run. A tensor that is met later and is not on meta
(one in a list, a numpy array) is replaced by a twin as operators meet it.

Two things make it more than ``model.to("meta")``:

- **Memory of results.** Networks repeat themselves. An operator called again with the same shapes, strides, dtypes
  and arguments gets an output like the first one, without asking the (slow) meta kernel.
- **Known values.** Small tensors whose values do not depend on the floating point input (``torch.arange``, a buffer,
  an attention mask) are computed beside their twins, so a branch on them needs no real execution. An
  operator that needs other values raises ``DataDependentError``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from modelsummary.attention_blocks import BLOCK_MASKED, skipped_macs
from modelsummary.capture.execution.known_values import KnownValues
from modelsummary.capture.execution.shape_rules import SHAPE_RULES
from modelsummary.capture.structure import map_tensors
from modelsummary.errors import DataDependentError
from modelsummary.op_costs import NO_COST, OpCost, OpRule, op_cost, tensors_in
from modelsummary.op_formulas import is_outer_product, outer_product_macs
from modelsummary.stored import is_distributed

__all__ = ["ShapeOnly", "Spec", "like", "selects_by_mask", "spec_of"]

_META = torch.device("meta")
_CPU = torch.device("cpu")
_STRIDED = torch.strided
_TO_COPY = torch.ops.aten._to_copy.default
_ATOMS = frozenset({int, float, bool, type(None), str, torch.dtype, torch.layout, torch.memory_format})
_REPLACED = (nn.Parameter, Tensor, FakeTensor)


class Spec(NamedTuple):
    """What a plain tensor is without its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class ShapeOnly:
    """Runs operators on meta tensors; ``run`` returns the result and the cost of one operator.

    Attributes:
        obstacle: the first operator that could not run on shapes, or None. The model may have caught the exception.
        needs_values: what the obstacle lacks is the values of a tensor.
        log: if it is a list, every operator is noted here with the shapes and constants it was called with.
        written: if it is a list, every tensor that is written in place is noted here.
        values_read: how often an operator needed the values of tensors.
    """

    def __init__(self) -> None:
        self.obstacle: str | None = None
        self.needs_values = False
        self.log: list[Any] | None = None
        self.written: list[Tensor] | None = None
        self.values_read = 0
        self._results: dict[tuple[Any, ...], tuple[Spec | tuple[Spec, ...] | None, OpCost]] = {}
        self._twins: dict[int, tuple[Tensor, Tensor]] = {}  # id(tensor) -> tensor (kept alive), twin
        self._known = KnownValues()

    def input(self, tensor: Tensor) -> Tensor:
        """The meta twin of an input tensor. Values of floating point inputs count as unknown."""
        if tensor.is_meta or id(tensor) in self._twins:
            return self.twin(tensor)
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            return self._new_twin(tensor)
        return self._adopt(tensor)

    def twin(self, tensor: Tensor) -> Tensor:
        """The meta twin of a tensor that an operator meets."""
        if tensor.is_meta:
            return tensor
        known_twin = self._twins.get(id(tensor))
        return known_twin[1] if known_twin is not None else self._adopt(tensor, is_stray=True)

    def knows(self, twin: Tensor) -> bool:
        """The values of ``twin`` are known."""
        return self._known.cover((twin,))

    def overwrite(self, twin: Tensor) -> None:
        """The values of ``twin`` are not known any more."""
        self._known.overwritten(twin)
        if self.written is not None:
            self.written.append(twin)

    def replace_tensors_of(self, modules: Iterable[nn.Module]) -> None:
        """Put twins in the place of parameters, buffers and plain tensor attributes."""
        modules = list(modules)
        keeps_distributed = any(map(_is_fully_sharded, modules))
        for module in modules:
            places: tuple[Any, ...] = (module._parameters, module._buffers, vars(module))
            for tensors in places:
                if not isinstance(tensors, dict):  # a ScriptModule keeps them elsewhere
                    continue
                for name, tensor in tensors.items():
                    replaced = type(tensor) in _REPLACED or (is_distributed(type(tensor)) and not keeps_distributed)
                    if replaced and not tensor.is_meta and not is_lazy(tensor):
                        known_twin = self._twins.get(id(tensor))
                        tensors[name] = known_twin[1] if known_twin is not None else self._adopt(tensor)
            if isinstance(module, nn.RNNBase):
                flat = module._flat_weights
                module._flat_weights = [weight if weight is None else self.twin(weight) for weight in flat]

    # ---------------------------------------------------------------------------------- one operator

    def run(self, func: Any, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, OpCost]:
        """Run one operator. Raises ``DataDependentError``, and whatever its meta kernel raises."""
        key = [func]
        out, cost = self._run(func, rule, args, kwargs, key)
        if rule.name in BLOCK_MASKED:
            cost = cost._replace(skipped_macs=skipped_macs(rule.name, args, self._value_of))
        if self.log is None:
            return out, cost
        if rule.writes or next(tensors_in(out), None) is not None:  # else it hands a value to Python, no more
            self.log.append(tuple(key))
        return out, cost

    def _run(
        self, func: Any, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any], key: list[Any]
    ) -> tuple[Any, OpCost]:
        """Run one operator; what identifies the call goes to ``key``."""
        written = _written(rule, args, kwargs)
        if not all(tensor.is_meta for tensor in written):  # only the twin would change; Python would read the other
            raise self._needing_values(rule)
        copies_to_cpu = func is _TO_COPY and kwargs.get("device") == _CPU
        tensors: list[Tensor] = []
        args = tuple(self._to_meta(args, key, tensors))
        if kwargs:
            key.extend(kwargs)
            kwargs = dict(zip(kwargs, self._to_meta(kwargs.values(), key, tensors), strict=True))
        if rule.formula is outer_product_macs:
            key.append(is_outer_product(*args[:2]))
        if rule.makes_tensor and kwargs.get("device") is None and not tensors:
            kwargs = {**kwargs, "device": _META}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if kwargs.get("generator") is not None:  # nothing is drawn, and a CPU generator refuses meta tensors
            kwargs["generator"] = None
        known = not (rule.is_random or rule.is_collective) and self._known.cover(tensors)
        if rule.needs_values or selects_by_mask(rule, args):
            return self._run_on_values(func, rule, args, kwargs, known), NO_COST
        self._before_writes(written)
        try:
            out, cost = self._run_on_meta(func, rule, args, kwargs, tuple(key))
        except Exception:
            if not known:
                self.obstacle = self.obstacle or rule.name
                raise
            return self._run_on_values(func, rule, args, kwargs, known), NO_COST
        # Keep what is known true: follow the results, or forget what was overwritten.
        if not (known and isinstance(func, OpOverload) and self._known.follow(func, rule, args, kwargs, out)):
            for tensor in written:
                self._known.overwritten(tensor)
        if copies_to_cpu and known:  # a copy with values, as .tolist() and .numpy() ask for
            self.values_read += 1
            value = self._known.value(out)
            return (out if value is None else value), cost
        return out, cost

    def _before_writes(self, written: Sequence[Tensor]) -> None:
        for tensor in written:
            self._known.before_write(tensor)
        if self.written is not None:
            self.written += written

    def _needing_values(self, rule: OpRule) -> DataDependentError:
        if self.obstacle is None:
            self.obstacle, self.needs_values = rule.name, True
        return DataDependentError(rule.name)

    def _run_on_meta(
        self, func: Any, rule: OpRule, args: Any, kwargs: dict[str, Any], key: tuple[Any, ...]
    ) -> tuple[Any, OpCost]:
        try:
            remembered = self._results.get(key)
        except TypeError:  # an unhashable argument
            return self._run_kernel(func, rule, args, kwargs)
        if remembered is not None:
            specs, cost = remembered
            if rule.keeps_shape:
                return args[0], cost
            if specs is None:
                return func(*args, **kwargs), cost
            if isinstance(specs, Spec):
                return like(specs), cost
            return tuple(map(like, specs)), cost
        out, cost = self._run_kernel(func, rule, args, kwargs)
        self._results[key] = (None if rule.returns_alias else _specs(out), cost)
        return out, cost

    @staticmethod
    def _run_kernel(func: Any, rule: OpRule, args: Any, kwargs: dict[str, Any]) -> tuple[Any, OpCost]:
        shortcut = SHAPE_RULES.get(func)
        _check_dtypes(rule, args)
        out = shortcut(*args, **kwargs) if shortcut is not None else None
        if out is None:
            out = func(*args, **kwargs)
        return out, op_cost(rule, args, kwargs, out)

    # ---------------------------------------------------------------------------------- meta twins

    def _to_meta(self, values: Iterable[Any], key: list[Any], tensors: list[Tensor]) -> list[Any]:
        """``values`` with twins for tensors and ``meta`` for devices; twins also go to ``tensors``.

        What identifies the values goes to ``key``.
        """
        replaced = []
        for value in values:
            kind = type(value)
            if kind in _ATOMS:
                key += (kind, value)  # 1, 1.0 and True are equal, but promote to different dtypes
                replaced.append(value)
            elif isinstance(value, Tensor):
                twin = value if value.is_meta else self.twin(value)
                key += (twin.shape, twin.stride() if twin.layout is _STRIDED else object(), twin.dtype)
                tensors.append(twin)
                replaced.append(twin)
            elif isinstance(value, (list, tuple)):
                key.append(len(value))
                replaced.append(kind(self._to_meta(value, key, tensors)))
            elif isinstance(value, dict):
                key.extend(value)
                replaced.append(dict(zip(value, self._to_meta(value.values(), key, tensors), strict=True)))
            else:
                key.append(_identity(value))
                replaced.append(_META if kind is torch.device else value)
        return replaced

    def _adopt(self, tensor: Tensor, is_stray: bool = False) -> Tensor:
        """The twin of a tensor whose values are known as long as nobody writes them.

        The memory of a stray one may belong to somebody else, such as a numpy array, who can write at any time.
        """
        twin = self._new_twin(tensor)
        if type(tensor) is not FakeTensor:  # has no values
            self._known.borrow(twin, tensor, copy=is_stray)
        return twin

    def _new_twin(self, tensor: Tensor) -> Tensor:
        if is_distributed(type(tensor)):
            twin = self._distributed_twin(tensor)
        elif tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested:
            twin = like(spec_of(tensor))
        else:
            try:
                if tensor.is_sparse:
                    raise RuntimeError("on meta, its views forget how many elements it stores")
                twin = torch.empty_like(tensor, device=_META)
            except (RuntimeError, AssertionError):  # of a few layouts there are none on meta
                self.obstacle = self.obstacle or f"a {'nested' if tensor.is_nested else tensor.layout} tensor"
                return tensor
        is_fake = type(tensor) is FakeTensor
        if type(tensor) is nn.Parameter or (is_fake and isinstance(tensor, nn.Parameter)):
            twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
        elif tensor.requires_grad and tensor.is_leaf:
            twin.requires_grad_()
        if tensor.__dict__ and not is_fake:
            twin.__dict__.update({**tensor.__dict__, **twin.__dict__})  # a wrapper has tensors of its own there
        self._twins[id(tensor)] = (tensor, twin)
        return twin

    def _distributed_twin(self, tensor: Any) -> Tensor:
        """Return a distributed tensor with the twin of what this process holds."""
        names, context = tensor.__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in names}
        inner = {name: self.twin(each) if isinstance(each, Tensor) else each for name, each in inner.items()}
        twin: Tensor = tensor.__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
        return nn.Parameter(twin, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin

    # ---------------------------------------------------------------------------------- known values

    def _run_on_values(self, func: Any, rule: OpRule, args: Any, kwargs: dict[str, Any], known: bool) -> Any:
        self.values_read += 1
        values = self._known.filled_in(args, kwargs) if known else None
        if values is None:
            raise self._needing_values(rule)
        return map_tensors(self._know, func(*values[0], **values[1]))

    def _value_of(self, tensor: Tensor) -> Tensor | None:
        """Return a copy of the values of a tensor; None if they are not known."""
        twin = self.twin(tensor)
        self.values_read += 1
        return self._known.value(twin) if self._known.cover((twin,)) else None

    def _know(self, value: Tensor) -> Tensor:
        twin = self._new_twin(value)
        self._known.set(twin, value)
        return twin


def _written(rule: OpRule, args: Any, kwargs: dict[str, Any]) -> Sequence[Tensor]:
    """Tensors that the operator writes in place."""
    if rule.writes:
        places = (kwargs.get(place) if isinstance(place, str) else args[place : place + 1] for place in rule.writes)
        return [tensor for value in places for tensor in tensors_in(value)]
    if rule.name in _WRITES_STATISTICS and args[5]:  # while training, of which the schema says nothing
        return list(tensors_in(args[3:5]))
    return ()


_WRITES_STATISTICS = frozenset({"aten.native_batch_norm", "aten.cudnn_batch_norm", "aten.miopen_batch_norm"})
_SAME_DTYPE = frozenset(f"aten.{name}" for name in ("mm", "addmm", "mv", "addmv", "dot", "vdot", "baddbmm"))
_NORMS = frozenset({"aten.native_layer_norm", "aten.native_batch_norm", "aten.native_group_norm"})


def _check_dtypes(rule: OpRule, args: Any) -> None:
    """Meta kernels of products and normalisations take operands of any dtypes; the kernels of a device do not."""
    if rule.name not in _SAME_DTYPE and rule.name not in _NORMS:
        return
    dtypes = [tensor.dtype for tensor in tensors_in(args)]
    if rule.name in _NORMS:  # half-precision input with float32 weights is fine
        dtypes = [dtypes[0], *(dtype for dtype in dtypes[1:] if dtype is not torch.float32 or dtypes[0].itemsize > 4)]
    if len(set(dtypes)) > 1:
        raise RuntimeError(f"{rule.name} takes operands of one dtype, but got {', '.join(map(str, dtypes))}")


def _is_fully_sharded(module: nn.Module) -> bool:
    """Return True for a module of FSDP2, which exchanges the parameters by itself and refuses them on meta."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # absent: there is none
    return fsdp is not None and isinstance(module, getattr(fsdp, "FSDPModule", ()))


def _identity(value: Any) -> Any:
    """Return what tells a constant from others: functions that a forward makes anew each time are equal."""
    if not isinstance(value, FunctionType):
        return value
    cells = (cell.cell_contents for cell in value.__closure__ or ())
    kept = (spec_of(each) if isinstance(each, Tensor) else _identity(each) for each in cells)
    return value.__code__, value.__defaults__, *kept


def selects_by_mask(rule: OpRule, args: Any) -> bool:
    """``x[mask]``: how many elements it keeps is in the values of the mask."""
    return rule.name == "aten.index" and any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(args[1]))


def _specs(out: Any) -> Spec | tuple[Spec, ...] | None:
    """What is needed to make an output like ``out``; None if it is no plain tensor or tuple of them."""
    if type(out) is Tensor:
        return spec_of(out) if out.layout is _STRIDED else None
    if type(out) is tuple and out and all(type(each) is Tensor and each.layout is _STRIDED for each in out):
        return tuple(map(spec_of, out))
    return None


def spec_of(tensor: Tensor) -> Spec:
    """The spec of a strided tensor."""
    return Spec(tensor.shape, tensor.stride(), tensor.dtype)


def like(spec: Spec) -> Tensor:
    """A meta tensor of this spec."""
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=_META)

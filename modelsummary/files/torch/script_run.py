"""Follow a TorchScript program on inputs of some sizes: its code is interpreted, and its operators run on shapes.

If values decide what the program does, it is followed again with the values of zeros as inputs, as far as the program
asks for them and computing them is safe.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from modelsummary import _torch
from modelsummary._torch import disable_current_modes
from modelsummary.capture.execution.known_values import MOST_ELEMENTS, MOST_ELEMENTS_OF_PARAMETER
from modelsummary.capture.execution.recurrent import fused_recurrent
from modelsummary.capture.execution.shape_only import ShapeOnly
from modelsummary.capture.execution.shape_tensor import new_tensor
from modelsummary.capture.operator_mode import Operators
from modelsummary.capture.run import nothing_hidden
from modelsummary.errors import InputError, ModelFileError, in_short
from modelsummary.files.budget import Budget
from modelsummary.files.program import Program, Scope
from modelsummary.files.torch.archive import Archive
from modelsummary.files.torch.script_file import ScriptFile
from modelsummary.files.torch.script_functions import CONTAINER_FUNCTIONS, FUNCTIONS, ScriptError, called_function
from modelsummary.files.torch.script_interpreter import EnumMember, Instance, Interpreter
from modelsummary.files.torch.script_operators import DTYPES, RefusedNameError, call_operator, dtype_of, number_of
from modelsummary.files.torch.script_pickle import ScriptObject, ScriptTensor
from modelsummary.files.torch.script_quantized import packed_weight, quantized_function
from modelsummary.files.torch.script_shapes import ScriptRecord, ScriptShapes
from modelsummary.operators.operator_calls import TensorSpec

__all__ = ["run_script"]

_CPU = torch.device("cpu")
_QUANTIZED = {torch.qint8: "qint8", torch.quint8: "quint8", torch.qint32: "qint32"}


def run_script(file: ScriptFile, inputs: Mapping[str | int, Any], budget: Budget) -> Program:
    """Follow the module in a file on inputs of these sizes; return its operators.

    Args:
        inputs: sizes, tensors, or lists of them, in the order of the arguments or by name. A size has the dtype of the
            first floating point parameter.
        budget: what reading the file has left; a second pass spends from it, too.

    Raises:
        InputError: the module raises, or values decide that are not followed.
        ModelFileError: the code does more than compute, or more than a budget allows.
    """
    _load_kernels(file.archive)
    budget.restart()
    failed = f"it does not run on {[_shown(value) for value in inputs.values()]}"
    run = _Run(file, budget, follows=False)
    try:
        try:
            return run.program(inputs)
        except ModelFileError:
            raise
        except Exception:
            if run.shapes.obstacle is None:
                raise
        run = _Run(file, budget, follows=True)
        return run.program(inputs)
    except ModelFileError:
        raise
    except RecursionError:
        raise ModelFileError("its code is nested too deep") from None
    except ScriptError as error:
        raise InputError(f"{failed}: {error}") from None
    except Exception as error:
        if run.shapes.is_used_up:
            raise InputError(f"{failed}: values decide what it does, and computing them takes too much") from None
        raise InputError(f"{failed}: {in_short(error)[:200]}") from None


def _load_kernels(archive: Archive) -> None:
    """Import what torch imports with its first operator on shapes, which takes more seconds than most files."""
    x = new_tensor(TensorSpec((2, 2), (2, 1), torch.float32), _CPU)
    execution = ShapeOnly(_CPU)
    with torch.no_grad(), nothing_hidden(), execution.answering(), Operators(execution):
        for other in (torch.zeros(2), torch.ops.aten.zeros.default([2], dtype=x.dtype, device=_CPU)):
            torch.nn.functional.layer_norm(x @ x + other, (2,))
    names = [name for name in archive.names if name.startswith("code/") and name.endswith(".py")]
    uses_torchvision = any(b"ops.torchvision." in archive.read(name) for name in names if archive.size(name) < 2**22)
    for library in ("torch._dynamo", *(["torchvision"] if uses_torchvision else [])):
        with suppress(ImportError, RuntimeError):
            import_module(library)


class _Run:
    """One run of a program."""

    def __init__(self, file: ScriptFile, budget: Budget, *, follows: bool) -> None:
        self._file, self._budget, self._follows = file, budget, follows
        self.shapes = ScriptShapes(
            self._budget,
            follows=follows,
            most_bytes=256 * 2**20 + 24 * file.stored().nbytes,
            most_work=2 * 10**9 + 2000 * file.stored().nbytes,
        )
        self._record = ScriptRecord(self.shapes)
        self._is_grad_enabled = False
        self._tensors: dict[ScriptTensor, Tensor] = {}
        self._storages: dict[str, Tensor] = {}
        self._values: dict[int, Any] = {}
        self._interpreter: Interpreter

    def program(self, inputs: Mapping[str | int, Any]) -> Program:
        """Return the operators of the program on zeros of these sizes."""
        with torch.no_grad(), nothing_hidden(), fused_recurrent(), self.shapes.answering():
            with Operators(self._record), self._record.unrecorded():
                constants: list[Any] = []
                self._interpreter = Interpreter(self._file.code, constants, self, self._budget)
                constants += self._materialized(self._file.constants) or ()
                model = self._materialized(self._file.model)
            method = self._forward(model, len(inputs))
            self._check_lists(model, method, inputs)
            kinds = [tensor.dtype for tensor, listed in self._file.tensors.items() if listed.kind == "parameter"]
            usual = next((dtype for dtype in kinds if dtype.is_floating_point), torch.float32)
            with disable_current_modes():
                passed = {name: self._input(value, usual) for name, value in inputs.items()}
            self._record.add_inputs(_tensors_in(list(passed.values()), self._budget))
            named = {name: value for name, value in passed.items() if isinstance(name, str)}
            args = [] if named else list(passed.values())
            with Operators(self._record):
                out = self._interpreter.call_method(model, method, args, named)
            outputs = _tensors_in(out, self._budget)
            return self._record.program(self._file.model.class_name.rpartition(".")[2], outputs)

    def _forward(self, model: Any, count: int) -> str:
        """Return the name of the method to call: ``forward``, or the first overload that takes so many tensors."""
        if not isinstance(model, Instance):
            raise ModelFileError("data.pkl must hold a module")
        if self._interpreter.method(model, "forward") is not None:
            return "forward"
        for overload in range(20):
            definition = self._interpreter.method(model, f"forward__{overload}")
            if definition is not None:
                parameters = definition.args.args[1:]
                annotations = [getattr(parameter.annotation, "id", "") for parameter in parameters[:count]]
                if len(parameters) - len(definition.args.defaults) <= count and set(annotations) <= {"Tensor"}:
                    return f"forward__{overload}"
        return "forward"

    def _check_lists(self, model: Any, method: str, inputs: Mapping[str | int, Any]) -> None:
        """Raise ``ScriptError`` if an input is a list of sizes where a tensor is wanted, or one size for a list."""
        definition = self._interpreter.method(model, method)
        for position, argument in enumerate(definition.args.args[1:] if definition is not None else ()):
            value = inputs.get(argument.arg, inputs.get(position))
            if value is None or argument.annotation is None:
                continue
            kind = ast.unparse(argument.annotation)
            if _is_list(value) and not kind.startswith("List["):
                raise ScriptError(f"its input {argument.arg!r} is {kind[:80]}, which no list of sizes fits")
            if not _is_list(value) and kind == "List[Tensor]":
                example = f"input={{{argument.arg!r}: [{tuple(_shown(value))}]}}"
                raise ScriptError(f"its input {argument.arg!r} is {kind}, which takes a list of sizes: {example}")

    def _input(self, value: Any, usual: torch.dtype) -> Any:
        """Return an argument of the program: zeros of a size, or a list of them."""
        if _is_list(value):
            return [self._input(item, usual) for item in value]
        size, dtype = (value.shape, value.dtype) if isinstance(value, Tensor) else (value, usual)
        zeros = torch.empty(list(size), dtype=dtype, device="meta")
        is_small = zeros.numel() <= MOST_ELEMENTS and not (dtype.is_floating_point or dtype.is_complex)
        if is_small or (self._follows and zeros.nbytes <= self.shapes.most_bytes):
            return self.shapes.with_values(torch.zeros(size, dtype=dtype))
        return new_tensor(TensorSpec(tuple(zeros.shape), zeros.stride(), dtype), _CPU)

    # ------------------------------------------------------------------------------- what the file holds

    def _materialized(self, value: Any) -> Any:
        """Return a value of a pickle as the interpreter has it: each object, list and dict once."""
        if isinstance(value, ScriptTensor):
            return self._tensor(value)
        if value is None or isinstance(value, (bool, int, float, complex, str, torch.device)):
            return value
        if id(value) in self._values:
            return self._values[id(value)]
        self._budget.spend(5)
        with self._budget.enter():
            result: Any
            if isinstance(value, ScriptObject):
                result = self._object(value)
            elif isinstance(value, list):
                result = self._values[id(value)] = []
                result += [self._materialized(item) for item in value]
            elif isinstance(value, dict):
                result = self._values[id(value)] = {}
                result.update((self._materialized(key), self._materialized(item)) for key, item in value.items())
            elif type(value) is tuple:
                result = tuple(self._materialized(item) for item in value)
            else:
                raise ModelFileError(f"a pickle has {type(value).__name__}, which is not a value")
        self._values[id(value)] = result
        return result

    def _object(self, value: ScriptObject) -> Any:
        if value.class_name.startswith("__torch__.torch.classes."):
            return packed_weight(value.class_name, self._materialized(value.state))
        script_class = self._interpreter.script_class(value.class_name)
        if script_class.base == "Enum":
            return EnumMember(value.class_name, self._materialized(value.state))
        instance = self._values[id(value)] = Instance(script_class, scopes=self._file.scopes.get(id(value)))
        if self._interpreter.method(instance, "__setstate__") is not None:
            self._interpreter.call_method(instance, "__setstate__", [self._materialized(value.state)], {})
        elif isinstance(value.state, dict):
            instance.attributes.update((str(name), self._materialized(item)) for name, item in value.state.items())
        return instance

    def _tensor(self, tensor: ScriptTensor) -> Tensor:
        if tensor in self._tensors:
            return self._tensors[tensor]
        listed = self._file.listed("constant", tensor)
        is_quantized = tensor.dtype in _QUANTIZED
        dtype = torch.float32 if is_quantized else tensor.dtype
        if is_quantized:
            with disable_current_modes():
                like = torch.empty(tensor.size, dtype=dtype, device="meta")
            shape_tensor = new_tensor(TensorSpec(tuple(like.shape), like.stride(), dtype), _CPU)
        else:
            base = self._storage(tensor.storage, dtype, listed.kind == "parameter")
            shape_tensor = torch.as_strided(base, tensor.size, tensor.stride, tensor.offset)
        self._tensors[tensor] = shape_tensor
        self._record.add(shape_tensor, listed, _QUANTIZED.get(tensor.dtype, ""))
        return shape_tensor

    def _storage(self, name: str, dtype: torch.dtype, is_parameter: bool) -> Tensor:
        """Return a tensor of all elements of a storage; its values are known if it is small, or if values decide."""
        if name in self._storages and self._storages[name].dtype is dtype:
            return self._storages[name]
        count = self._file.archive.size(name) // dtype.itemsize
        if self._follows or count <= (MOST_ELEMENTS_OF_PARAMETER if is_parameter else MOST_ELEMENTS):
            self._budget.take(self._file.archive.size(name))
            data = bytearray(self._file.archive.read(name)[: count * dtype.itemsize])
            read = torch.uint8 if dtype is torch.bool else dtype
            with disable_current_modes():
                values = torch.frombuffer(data, dtype=read) if count else torch.empty(0, dtype=read)
                values = values != 0 if dtype is torch.bool else values
            base = self.shapes.with_values(values)
        else:
            base = new_tensor(TensorSpec((count,), (1,), dtype), _CPU)
        self._storages[name] = base
        return base

    # --------------------------------------------------------------------- what the interpreter asks for

    @contextmanager
    def enter(self, scopes: tuple[Scope, ...] | None) -> Iterator[None]:
        """Return a context in which operators belong to a module; None: to the one that is running."""
        outer = self._record.scopes
        if scopes is not None:
            self._record.scopes = scopes
        try:
            yield
        finally:
            self._record.scopes = outer

    def item(self, tensor: Tensor) -> Any:
        """Return the number in a tensor with one element; raise ``DataDependentError`` if it is not known."""
        if tensor.numel() != 1:
            raise ScriptError(f"a tensor with {tensor.numel()} elements cannot be converted to a number")
        value = self.shapes.numbers(tensor, "aten._local_scalar_dense")
        while isinstance(value, list):
            (value,) = value
        return value

    def to_list(self, tensor: Tensor) -> Any:
        """Return the values of a tensor as a list; raise ``DataDependentError`` if they are not known."""
        if tensor.numel() > MOST_ELEMENTS:
            raise ModelFileError(f"a list of more than {MOST_ELEMENTS:,} values")
        self._budget.spend(tensor.numel())
        return self.shapes.numbers(tensor, "aten.tolist")

    def call(self, namespace: str, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operator, or of a function on plain values."""
        if namespace == "prim":
            return self._primitive(name, args, kwargs)
        if namespace == "quantized":
            return self._quantized(name, args, kwargs)
        if namespace == "aten":
            if name in _ANSWERS:
                return _ANSWERS[name]
            if name == "is_grad_enabled":
                return self._is_grad_enabled
            if name in _OF_TENSORS and args and isinstance(args[0], Tensor):
                return _OF_TENSORS[name](args[0])
            special = self._SPECIAL.get(name)
            if special is not None:
                return special(self, *args, **kwargs)
            first = args[0] if args else None
            if isinstance(first, (list, tuple, dict, str)):
                function_of = CONTAINER_FUNCTIONS.get(name) or (FUNCTIONS.get(name) if isinstance(first, str) else None)
                if function_of is not None:
                    return called_function(function_of, args, kwargs, self._budget)
            if name in FUNCTIONS and (name in _OF_ANYTHING or not _holds_tensor((*args, *kwargs.values()))):
                return called_function(FUNCTIONS[name], args, kwargs, self._budget)
        return call_operator(namespace, name, args, kwargs, self.item)

    def _quantized(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        function = quantized_function(name)
        inputs = [item for value in args for item in ([value] if not isinstance(value, list) else value)]
        tensors = [item for item in inputs if isinstance(item, Tensor)] if "prepack" not in name else []
        is_float = "dynamic" in name or "pack" in name
        quantized = "" if is_float else "quint8"
        called = partial(function, *args, **kwargs)
        return self._record.whole(f"quantized.{name}", called, tensors[:2], quantized) if tensors else called()

    def _primitive(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if name == "RaiseException":
            raise ScriptError(str(args[0] if args else "")[:200])
        if not args:
            raise RefusedNameError(f"ops.prim.{name}")
        if name == "NumToTensor":
            return self._tensor_of(*args)
        if name == "tolist":
            return self.to_list(args[0])
        if name in ("type", "index") and isinstance(args[0], torch.device):
            return getattr(args[0], name)
        if name == "EnumValue" and isinstance(args[0], EnumMember):
            return args[0].value
        if name in _ABOUT_TENSORS:
            return _ABOUT_TENSORS[name]
        if name in _OF_TENSORS and isinstance(args[0], Tensor):
            return _OF_TENSORS[name](args[0])
        if name in ("data", "unchecked_cast"):
            return args[0]
        if name in ("min", "max", "abs", "unchecked_unwrap_optional", "rangelist", "TupleIndex", "StringIndex"):
            return self.call("aten", name, args, kwargs)
        if name == "is_quantized":
            return bool(self._record.quantized(args[0]))
        raise RefusedNameError(f"ops.prim.{name}")

    def _tensor_of(self, data: Any, dtype: int | None = None, *_: Any, **__: Any) -> Tensor:
        """Return a tensor of numbers in nested lists."""
        if isinstance(data, Tensor):
            return data if dtype is None else data.to(dtype_of(dtype))
        self._budget.spend(_count(data, self._budget))
        try:
            with disable_current_modes():
                values = torch.tensor(data, dtype=None if dtype is None else dtype_of(dtype), device=_CPU)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ScriptError(in_short(error)) from None
        return self.shapes.with_values(values)

    def _to(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Convert a tensor; devices have no meaning here."""
        if not isinstance(tensor, Tensor):
            raise ScriptError("to() takes a tensor")
        kwargs.pop("device", None)
        left = [value for value in args if not isinstance(value, torch.device)]
        while left and left[0] is None:
            left.pop(0)
        if left and isinstance(left[0], Tensor):
            left[0] = number_of(left[0].dtype)
        numbers = [value for value in left[:1] if type(value) is int]
        dtype = numbers[0] if numbers else kwargs.get("dtype")
        flags = [value for value in left[len(numbers) :] if isinstance(value, bool)]
        copy = flags[1] if len(flags) > 1 else bool(kwargs.get("copy", False))
        kind = tensor.dtype if dtype is None else dtype_of(dtype)
        return tensor.to(kind, copy=copy)

    def _quantize(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        numbers = [value for value in args if type(value) is int]
        dtype = _QUANTIZED.get(DTYPES.get(kwargs.get("dtype", numbers[-1] if numbers else 13), torch.quint8), "quint8")
        return self._record.whole("aten.quantize_per_tensor", lambda: tensor + 0, [tensor], dtype)

    def _dequantize(self, tensor: Any) -> Any:
        if isinstance(tensor, list):
            return [self._dequantize(item) for item in tensor]
        if not self._record.quantized(tensor):
            return tensor
        return self._record.whole("aten.dequantize", lambda: tensor + 0, [tensor])

    def _pooled(self, name: str, tensor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pool a tensor; a quantized one with a kernel of its own."""

        def pooled() -> Any:
            return call_operator("aten", name, [tensor, *args], kwargs, self.item)

        quantized = self._record.quantized(tensor)
        kernel = {"max_pool2d": "quantized_max_pool2d", "adaptive_avg_pool2d": "_adaptive_avg_pool2d"}[name]
        return self._record.whole(f"aten.{kernel}", pooled, [tensor], quantized) if quantized else pooled()

    def _lstm(self, *args: Any) -> Any:
        for arg in args:
            if not isinstance(arg, (Tensor, list, tuple, bool, int, float)):
                raise ScriptError("lstm() takes tensors and numbers")
        return _torch.VF.lstm(*args)

    def _length(self, value: Any) -> int:
        if isinstance(value, Instance):
            result = self._interpreter.call_method(value, "__len__", [], {})
            return int(result)
        if not isinstance(value, Tensor):
            return int(called_function(CONTAINER_FUNCTIONS["len"], [value], {}, self._budget))
        if not value.dim():
            raise ScriptError("len() of a tensor without dimensions")
        return value.shape[0]

    def _size(self, tensor: Any, dim: Any = None) -> Any:
        if not isinstance(tensor, Tensor):
            raise ScriptError("size() takes a tensor")
        if dim is None:
            return list(tensor.shape)
        if type(dim) is not int or not -tensor.dim() <= dim < tensor.dim():
            raise ScriptError(f"size() of dimension {dim!r:.40} of a tensor of {list(tensor.shape)}")
        return tensor.shape[dim]

    def _copy(self, tensor: Any, other: Any, *_: Any) -> Any:
        if isinstance(tensor, Tensor) and isinstance(other, (int, float)):
            return call_operator("aten", "fill_", [tensor, other], {}, self.item)
        return call_operator("aten", "copy_", [tensor, other], {}, self.item)

    def _set_grad_enabled(self, value: Any) -> None:
        self._is_grad_enabled = bool(value)

    def _first(self, value: Any, *_: Any, **__: Any) -> Any:
        return value

    def _number_of(self, value: Any) -> Any:
        return self.item(value) if isinstance(value, Tensor) else value

    def _device(self, text: Any, *_: Any) -> torch.device:
        kind = str(text).partition(":")[0]
        return torch.device(kind) if kind in ("cpu", "cuda", "meta", "mps", "xla", "xpu") else _CPU

    def _stride(self, tensor: Any, dim: Any = None) -> Any:
        self._size(tensor, dim)  # checks them
        return list(tensor.stride()) if dim is None else tensor.stride()[dim]

    _SPECIAL: ClassVar[dict[str, Callable[..., Any]]] = {
        "tensor": _tensor_of,
        "as_tensor": _tensor_of,
        "to": _to,
        "cpu": _first,
        "cuda": _first,
        "wait": _first,
        "requires_grad_": _first,
        "contiguous_format": _first,
        "quantize_per_tensor": _quantize,
        "quantize_per_channel": _quantize,
        "quantize_per_tensor_dynamic": _quantize,
        "dequantize": _dequantize,
        **{
            name: lambda self, tensor, *args, name=name, **kwargs: self._pooled(name, tensor, args, kwargs)
            for name in ("max_pool2d", "adaptive_avg_pool2d")
        },
        "lstm": _lstm,
        "len": _length,
        "size": _size,
        "copy_": _copy,
        "item": _number_of,
        "ScalarImplicit": _number_of,
        "device": _device,
        "set_grad_enabled": _set_grad_enabled,
        "stride": _stride,
        **dict.fromkeys(("IntImplicit", "FloatImplicit"), _number_of),
    }


# Functions that take tensors and other values alike.
_OF_ANYTHING = frozenset("__is__ __isnot__ str format percentFormat _unwrap_optional unchecked_unwrap_optional".split())
# Questions with one answer here, whatever is asked about.
_ANSWERS: dict[str, Any] = {
    "is_scripting": True,
    "warn": None,
    "manual_seed": None,
    "get_device": -1,
    "get_autocast_dtype": number_of(torch.bfloat16),
    **dict.fromkeys(
        "is_autocast_enabled is_autocast_cpu_enabled _is_tracing _get_tracing_state has_torch_function".split(), False
    ),
}
_ABOUT_TENSORS: dict[str, Any] = {
    "device": _CPU,
    "layout": 0,
    "requires_grad": False,
    "grad": None,
    "name": None,
    "is_cpu": True,
    **dict.fromkeys(
        (f"is_{kind}" for kind in "cuda ipu maia meta mkldnn mps mtia nested sparse sparse_csr vulkan xla xpu".split()),
        False,
    ),
}
_OF_TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "dtype": lambda tensor: number_of(tensor.dtype),
    "itemsize": lambda tensor: tensor.element_size(),
    "element_size": lambda tensor: tensor.element_size(),
    "nbytes": lambda tensor: tensor.nbytes,
    "shape": lambda tensor: list(tensor.shape),
    "ndim": lambda tensor: tensor.dim(),
    "dim": lambda tensor: tensor.dim(),
    "numel": lambda tensor: tensor.numel(),
    "storage_offset": lambda tensor: tensor.storage_offset(),
}


def _is_list(value: Any) -> bool:
    """Return True for an input that is a list of sizes or tensors, False for a size or a tensor."""
    return not isinstance(value, Tensor) and any(not isinstance(item, int) for item in value)


def _shown(value: Any) -> list[Any]:
    return list(map(_shown, value)) if _is_list(value) else list(value.shape if isinstance(value, Tensor) else value)


def _holds_tensor(values: Sequence[Any]) -> bool:
    return any(
        isinstance(value, Tensor)
        or (isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value[:1]))
        for value in values
    )


def _count(data: Any, budget: Budget) -> int:
    """Return the number of items in nested lists."""
    budget.spend()
    if not isinstance(data, (list, tuple)):
        return 1
    with budget.enter():
        return sum(_count(item, budget) for item in data)


def _tensors_in(value: Any, budget: Budget) -> list[Tensor]:
    """Return the tensors in a result, each list once."""
    tensors: list[Tensor] = []
    seen: set[int] = set()
    pending = [value]
    while pending:
        item = pending.pop()
        budget.spend()
        if isinstance(item, Tensor):
            tensors.append(item)
        elif id(item) not in seen:
            seen.add(id(item))
            inner = item.attributes if isinstance(item, Instance) else item
            if isinstance(inner, dict):
                pending += reversed(inner.values())
            elif isinstance(inner, (list, tuple)):
                pending += reversed(inner)
    return tensors

"""Read the pickles of a torch archive as plain data: names in them are not looked up, and nothing is called.

TorchScript, and ``torch.save`` of tensors, write a small part of pickle's language. Tensors become descriptions, and
objects become their states. Every other call is refused.
"""

from __future__ import annotations

import pickletools
import warnings
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from modelsummary.errors import ModelFileError
from modelsummary.files.budget import Budget
from modelsummary.files.weights.stored import MOST_DIMENSIONS

__all__ = ["ScriptObject", "ScriptTensor", "read_pickle"]

_STORAGES = {
    "Float": torch.float32,
    "Double": torch.float64,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexFloat": torch.complex64,
    "ComplexDouble": torch.complex128,
    "QInt8": torch.qint8,
    "QUInt8": torch.quint8,
    "QInt32": torch.qint32,
    "Untyped": torch.uint8,
}
_DTYPES = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
# Functions that return their first argument: they tag a value or a list with its type.
_TAGS = ("restore_type_tag", "build_intlist", "build_tensorlist", "build_doublelist", "build_boollist")
_MODULE_OF_TAGS, _MODULE_OF_TENSORS = "torch.jit._pickle", ".".join(("torch", "_utils"))
# Functions that make a tensor of a storage -> the position of their argument requires_grad.
_TENSORS = {"_rebuild_tensor_v2": 4, "_rebuild_qtensor": 5, "_rebuild_tensor_v3": 4}
_MODULES_OF_STORAGES = ("torch", "torch.storage")
_DTYPE_OF_V3 = 6  # position of the dtype, as its storage has none


class ScriptTensor(NamedTuple):
    """A tensor of a torch archive; equal descriptions are the same tensor.

    Attributes:
        storage: name of the storage's entry in the archive, such as ``data/0``.
        offset: position of the first element in the storage, in elements.

    >>> ScriptTensor("data/0", 10, (2, 3), (3, 1), torch.float16, True).bytes_needed
    32
    """

    storage: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def bytes_needed(self) -> int:
        """Bytes of storage from its start to the tensor's last element."""
        if not prod(self.size):
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return (self.offset + last + 1) * self.dtype.itemsize


@dataclass(eq=False, slots=True)
class ScriptObject:
    """A module or another object: its class name, and its attributes or the result of its ``__getstate__``."""

    class_name: str
    state: Any = None


class _Name(NamedTuple):
    """The name of a global, such as a class or function."""

    module: str
    name: str


class _Storage(NamedTuple):
    key: str
    dtype: torch.dtype


_MARK = object()
_KEYS = (str, int, float, complex, ScriptTensor)  # of a dict: to hash nested tuples takes exponential time


def read_pickle(
    data: bytes,
    folder: str = "data",
    budget: Budget | None = None,
    refusal: str = "which TorchScript does not write; nothing of it is run",
) -> Any:
    """Return the value of a pickle of TorchScript, or of ``torch.save``.

    Args:
        folder: the folder of the archive with the storages that the pickle names.
        budget: what reading the file may cost; default: a million steps.
        refusal: what the error says of other objects and calls.

    Raises:
        ModelFileError: the pickle is broken, is over the budget, or has other objects and calls.

    >>> import pickle
    >>> read_pickle(pickle.dumps([1, (2, None)], 2))
    [1, (2, None)]
    """
    budget = budget or Budget(steps=1_000_000)
    machine = _Machine(folder, refusal)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            for opcode, argument, _ in pickletools.genops(data):
                budget.spend()
                machine.step(opcode.name, argument)
        (value,) = machine.stack
    except ModelFileError:
        raise
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError) as error:
        raise ModelFileError(f"a pickle is broken: {error}") from None
    return value


class _Machine:
    """The stack and the memo of a pickle machine."""

    def __init__(self, folder: str, refusal: str) -> None:
        self.folder, self.refusal = folder, refusal
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def step(self, opcode: str, argument: Any) -> None:
        """Execute one opcode."""
        stack = self.stack
        if opcode in ("PROTO", "FRAME", "STOP"):
            return
        if opcode in _CONSTANTS:
            stack.append(_CONSTANTS[opcode])
        elif opcode in _LITERALS:
            stack.append(argument)
        elif opcode in _EMPTY:
            stack.append(_EMPTY[opcode]())
        elif opcode in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = stack[-1]
        elif opcode in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif opcode == "GLOBAL":
            stack.append(_Name(*argument.split(" ")))
        elif opcode in _TUPLES:
            stack[len(stack) - _TUPLES[opcode] :] = [tuple(stack[len(stack) - _TUPLES[opcode] :])]
        elif opcode in ("TUPLE", "LIST"):
            items = self._popped()
            stack.append(tuple(items) if opcode == "TUPLE" else items)
        elif opcode in ("APPENDS", "SETITEMS"):
            self._extend(self._popped())
        elif opcode in ("APPEND", "SETITEM"):
            count = 1 if opcode == "APPEND" else 2
            items = stack[-count:]
            del stack[-count:]
            self._extend(items)
        else:
            last = stack.pop()
            _CALLS[opcode](self, last) if opcode in _CALLS else self._refuse(opcode)

    def _refuse(self, what: str) -> None:
        raise ModelFileError(f"a pickle has {what[:80]!r}, {self.refusal}")

    def _popped(self) -> list[Any]:
        """Remove the last mark and the values after it from the stack; return the values."""
        position = len(self.stack) - 1
        while self.stack[position] is not _MARK:
            position -= 1
            if position < 0:
                raise ValueError("a mark is missing")
        items = self.stack[position + 1 :]
        del self.stack[position:]
        return items

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, dict):
            keys = items[::2]
            if not all(isinstance(key, _KEYS) for key in keys):
                raise TypeError("a key is neither a number nor a text")
            target.update(zip(keys, items[1::2], strict=True))
        elif isinstance(target, list):
            target.extend(items)
        else:
            raise TypeError("a container is missing")

    def _new(self, _: Any) -> None:
        name = self.stack.pop()
        if not isinstance(name, _Name) or not name.module.startswith("__torch__"):
            self._refuse(".".join(name) if isinstance(name, _Name) else str(type(name)))
        self.stack.append(ScriptObject(f"{name.module}.{name.name}"))

    def _build(self, state: Any) -> None:
        target = self.stack[-1]
        if isinstance(target, dict):  # attributes of an OrderedDict, as the ``_metadata`` of a state dict
            return
        if not isinstance(target, ScriptObject):
            raise TypeError("an object is missing")
        target.state = state

    def _load(self, key: Any) -> None:
        kind, name, entry = key[:3]
        if (
            kind != "storage"
            or not isinstance(name, _Name)
            or name.module not in _MODULES_OF_STORAGES
            or not isinstance(entry, str)
        ):
            self._refuse("BINPERSID")
        self.stack.append(_Storage(f"{self.folder}/{entry}", _STORAGES[name.name.removesuffix("Storage")]))

    def _call(self, arguments: Any) -> None:
        function = self.stack.pop()
        if not isinstance(function, _Name):
            self._refuse(str(type(function)))
        module, name = function
        if function == ("collections", "OrderedDict") and not arguments:
            self.stack.append({})
        elif module == _MODULE_OF_TAGS and name in _TAGS:
            self.stack.append(arguments[0])
        elif module == _MODULE_OF_TENSORS and name in _TENSORS:
            storage, offset, size, stride = arguments[:4]
            if name == "_rebuild_tensor_v3":
                storage = storage._replace(dtype=_DTYPES[arguments[_DTYPE_OF_V3].name])
            self.stack.append(_tensor(storage, offset, size, stride, arguments[_TENSORS[name]]))
        elif function == (_MODULE_OF_TENSORS, "_rebuild_parameter"):
            self.stack.append(arguments[0]._replace(requires_grad=bool(arguments[1])))
        elif module.startswith("__torch__") and isinstance(arguments, (str, int, float)):  # of an enumeration
            self.stack.append(ScriptObject(f"{module}.{name}", arguments))
        elif function == ("torch", "device"):
            self.stack.append(torch.device("cpu"))
        else:
            self._refuse(".".join(function))


def _tensor(storage: _Storage, offset: int, size: Any, stride: Any, requires_grad: bool) -> ScriptTensor:
    numbers = (offset, *size, *stride)
    if not all(type(value) is int and 0 <= value < 2**63 for value in numbers):
        raise ModelFileError("a tensor has a size, stride or offset that is not a number of 63 bits")
    if len(size) != len(stride) or len(size) > MOST_DIMENSIONS:
        raise ModelFileError(f"a tensor has {len(size):,} dimensions and {len(stride):,} strides")
    if prod(size) >= 2**63:
        raise ModelFileError("a tensor has more elements than a number of 63 bits can count")
    return ScriptTensor(storage.key, offset, tuple(size), tuple(stride), storage.dtype, bool(requires_grad))


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "MARK": _MARK}
_LITERALS = frozenset(
    "BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8 SHORT_BINSTRING BINSTRING".split()
)
_EMPTY = {"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_CALLS = {"REDUCE": _Machine._call, "NEWOBJ": _Machine._new, "BUILD": _Machine._build, "BINPERSID": _Machine._load}

"""Interpret the code of TorchScript, a subset of Python, within a budget; Python and torch run nothing of it.

The code has assignments, conditions, loops over ranges, calls and literals. A name stands for a local variable, a class
or function of the file, a constant, or an operator that ``script_operators`` allows. Everything else is refused.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from modelsummary.errors import ModelFileError
from modelsummary.files.budget import Budget
from modelsummary.files.program import Scope
from modelsummary.files.torch.script_code import Code, ScriptClass
from modelsummary.files.torch.script_functions import ScriptError, text_of
from modelsummary.files.torch.script_operators import RefusedNameError
from modelsummary.files.torch.script_quantized import PackedWeight

__all__ = ["EnumMember", "Instance", "Interpreter"]


@dataclass(eq=False, slots=True)
class Instance:
    """An object of a class of the file.

    Attributes:
        scopes: of a module in the tree, the modules around it and itself; None for other objects.
    """

    script_class: ScriptClass
    attributes: dict[str, Any] = field(default_factory=dict)
    scopes: tuple[Scope, ...] | None = None


@dataclass(frozen=True, slots=True)
class EnumMember:
    """A member of an enumeration of the file; its value is a number or a text."""

    class_name: str
    value: Any

    def __post_init__(self) -> None:
        if not isinstance(self.value, (int, float, str)):
            raise ModelFileError(f"{self.class_name[:80]!r} has a member that is not a number or a text")


@dataclass(frozen=True, slots=True)
class _Function:
    """A function or a bound method; a function inside another one has the variables around it."""

    definition: ast.FunctionDef
    owner: Instance | None = None
    around: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Path:
    """A dotted name that is not a local variable."""

    name: str


_GOES_ON = object()
_UNINITIALIZED = object()
_Variables = dict[str, Any]
_NUMBERS = {
    "inf": float("inf"),
    "nan": float("nan"),
    "infj": complex(0, float("inf")),
    "nanj": complex(0, float("nan")),
}
_TYPES: dict[str, tuple[type, ...]] = {
    "Tensor": (Tensor,),
    "int": (int,),
    "float": (float,),
    "bool": (bool,),
    "str": (str,),
    "complex": (complex,),
    "NoneType": (type(None),),
    "Device": (torch.device,),
    "number": (int, float, complex),
    "list": (list,),
    "tuple": (tuple,),
    "dict": (dict,),
}


class Interpreter:
    """An interpreter of the code of one archive.

    Args:
        constants: the values of ``CONSTANTS.c0``, ``CONSTANTS.c1`` ...
        operators: what works on tensors, ``script_run._Run``: ``call`` runs an operator or a function, ``item`` and
            ``to_list`` return values of a tensor, and ``enter`` is a context whose operators belong to a module.
    """

    def __init__(self, code: Code, constants: Sequence[Any], operators: Any, budget: Budget) -> None:
        self._code, self._constants, self._operators, self._budget = code, constants, operators, budget

    # -------------------------------------------------------------------------------------------- calls

    def method(self, instance: Instance, name: str) -> ast.FunctionDef | None:
        """Return the definition of a method; None if the class has none of this name."""
        return self._code.method(instance.script_class, name)

    def call_method(self, instance: Instance, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a method of an object and return its result.

        Raises:
            ModelFileError: the code does more than compute, or more than the budget allows.
            ScriptError: the program raises an exception.
        """
        definition = self.method(instance, name)
        if definition is None:
            raise ModelFileError(f"{instance.script_class.name[:80]!r} has no method {name[:80]!r}")
        return self._invoke(_Function(definition, instance), args, kwargs)

    def _invoke(self, function: _Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        definition, owner = function.definition, function.owner
        variables = dict(function.around)
        positional = [owner, *args] if owner is not None else list(args)
        names = [parameter.arg for parameter in definition.args.args]
        if len(positional) > len(names):
            raise ScriptError(f"{definition.name}() takes {len(names)} arguments, got {len(positional)}")
        variables.update(zip(names, positional, strict=False))
        defaults = dict(zip(reversed(names), reversed(definition.args.defaults), strict=False))
        for name in names[len(positional) :]:
            if name in kwargs:
                variables[name] = kwargs[name]
            elif name in defaults:
                variables[name] = self._value(defaults[name], {})
            else:
                raise ScriptError(f"{definition.name}() misses its argument {name!r}")
        unknown = [name for name in kwargs if name not in names[len(positional) :]]
        if unknown:
            raise ScriptError(f"{definition.name}() has no argument {unknown[0][:80]!r}")
        with self._budget.enter(), self._operators.enter(owner.scopes if owner is not None else None):
            result = self._block(definition.body, variables)
        return None if result is _GOES_ON else result

    def _visit_Call(self, node: ast.Call, variables: _Variables) -> Any:
        if isinstance(node.func, ast.Name) and node.func.id not in variables and node.func.id in self._BUILTINS:
            return self._BUILTINS[node.func.id](self, node, variables)
        function = self._value(node.func, variables)
        args = [self._value(arg, variables) for arg in node.args]
        kwargs = {str(keyword.arg): self._value(keyword.value, variables) for keyword in node.keywords}
        if isinstance(function, _Function):
            return self._invoke(function, args, kwargs)
        if isinstance(function, _Path):
            return self._called_path(function.name, args, kwargs)
        if callable(function) and isinstance(node.func, ast.Attribute):  # of a tensor or of a packed weight
            return function(*args)
        raise ModelFileError(f"the code calls {ast.unparse(node.func)[:80]!r}, which is not a function")

    def _called_path(self, path: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        parts = path.split(".")
        if parts[0] == "torch" and len(parts) == 2:
            return self._operators.call("aten", parts[1], args, kwargs)
        if parts[0] == "ops" and len(parts) == 3:
            return self._operators.call(parts[1], parts[2], args, kwargs)
        if parts[0] == "__torch__":
            if parts[-1] == "__new__":
                return Instance(self.script_class(path.removesuffix(".__new__")))
            definition = self._code.function(path)
            if definition is not None:
                return self._invoke(_Function(definition), args, kwargs)
            script_class = self.script_class(path)
            if script_class.base == "NamedTuple":
                named = dict(zip(script_class.fields, args, strict=False)) | kwargs
                return tuple(named.get(name) for name in script_class.fields)
        if path in _PLAIN_NAMES:
            return self._operators.call("aten", path, args, kwargs)
        raise RefusedNameError(path)

    def script_class(self, name: str) -> ScriptClass:
        """Return a class of the file; raise ``ModelFileError`` if it has none of this name."""
        script_class = self._code.script_class(name)
        if script_class is None:
            raise RefusedNameError(name)
        return script_class

    # --------------------------------------------------------------------------------------- statements

    def _block(self, body: Sequence[ast.stmt], variables: _Variables) -> Any:
        """Execute statements; return the value of a ``return``, or ``_GOES_ON``."""
        for statement in body:
            self._budget.spend()
            result = self._visitor(statement)(statement, variables)
            if result is not _GOES_ON:
                return result
        return _GOES_ON

    def _visitor(self, node: ast.AST) -> Callable[..., Any]:
        """Return the method that executes statements, or evaluates expressions, of this kind."""
        visitor: Callable[..., Any] | None = getattr(self, f"_visit_{type(node).__name__}", None)
        if visitor is None:
            raise ModelFileError(f"the code has {ast.unparse(node)[:80]!r}, which TorchScript does not write")
        return visitor

    def _visit_Pass(self, _: ast.Pass, __: _Variables) -> Any:
        return _GOES_ON

    def _visit_Assign(self, statement: ast.Assign, variables: _Variables) -> Any:
        value = self._value(statement.value, variables)
        for target in statement.targets:
            self._bind(target, value, variables)
        return _GOES_ON

    def _visit_AnnAssign(self, statement: ast.AnnAssign, variables: _Variables) -> Any:
        if statement.value is not None:
            self._bind(statement.target, self._value(statement.value, variables), variables)
        return _GOES_ON

    def _bind(self, target: ast.expr, value: Any, variables: _Variables) -> None:
        if isinstance(target, ast.Name):
            variables[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            if not isinstance(value, (list, tuple)) or len(value) != len(target.elts):
                raise ScriptError(f"expected {len(target.elts)} values, got {text_of(value)}")
            for inner, item in zip(target.elts, value, strict=True):
                self._bind(inner, item, variables)
        elif isinstance(target, ast.Attribute):
            owner = self._value(target.value, variables)
            if not isinstance(owner, Instance):
                raise ModelFileError(f"the code sets {ast.unparse(target)[:80]!r}")
            owner.attributes[target.attr] = value
        else:
            raise ModelFileError(f"the code assigns to {ast.unparse(target)[:80]!r}")

    def _visit_Expr(self, statement: ast.Expr, variables: _Variables) -> Any:
        self._value(statement.value, variables)
        return _GOES_ON

    def _visit_If(self, statement: ast.If, variables: _Variables) -> Any:
        return self._block(statement.body if self._truth(statement.test, variables) else statement.orelse, variables)

    def _visit_While(self, statement: ast.While, variables: _Variables) -> Any:
        while self._truth(statement.test, variables):
            self._budget.spend()
            result = self._block(statement.body, variables)
            if result is not _GOES_ON:
                return result
        return _GOES_ON

    def _visit_For(self, statement: ast.For, variables: _Variables) -> Any:
        source = statement.iter
        if not (isinstance(source, ast.Call) and isinstance(source.func, ast.Name) and source.func.id == "range"):
            raise ModelFileError(f"the code loops over {ast.unparse(source)[:80]!r}, and TorchScript over ranges")
        limits = [self._value(arg, variables) for arg in source.args]
        if not 1 <= len(limits) <= 3 or not all(type(limit) is int for limit in limits):
            raise ScriptError("range() takes integers")
        for index in range(*limits):
            self._budget.spend()
            self._bind(statement.target, index, variables)
            result = self._block(statement.body, variables)
            if result is not _GOES_ON:
                return result
        return _GOES_ON

    def _visit_With(self, statement: ast.With, variables: _Variables) -> Any:
        managers = [self._value(item.context_expr, variables) for item in statement.items]
        for manager, item in zip(managers, statement.items, strict=True):
            if not isinstance(manager, Instance):
                raise ModelFileError("the code enters something other than an object")
            value = self.call_method(manager, "__enter__", [], {})
            if item.optional_vars is not None:
                self._bind(item.optional_vars, value, variables)
        result = self._block(statement.body, variables)
        for manager in reversed(managers):
            self.call_method(manager, "__exit__", [None, None, None], {})
        return result

    def _visit_Return(self, statement: ast.Return, variables: _Variables) -> Any:
        return None if statement.value is None else self._value(statement.value, variables)

    def _visit_FunctionDef(self, statement: ast.FunctionDef, variables: _Variables) -> Any:
        variables[statement.name] = _Function(statement, None, variables)
        return _GOES_ON

    def _truth(self, node: ast.expr, variables: _Variables) -> bool:
        value = self._value(node, variables)
        return bool(self._operators.item(value) if isinstance(value, Tensor) else value)

    # -------------------------------------------------------------------------------------- expressions

    def _value(self, node: ast.expr, variables: _Variables) -> Any:
        self._budget.spend()
        return self._visitor(node)(node, variables)

    def _visit_Constant(self, node: ast.Constant, _: _Variables) -> Any:
        value = node.value
        if isinstance(value, str) and not value.isascii():  # torch writes the bytes of UTF-8 as escapes
            try:
                return value.encode("latin1").decode()
            except UnicodeError:
                return value
        if type(value) is int and value >= 2**63:
            raise ModelFileError("an integer does not fit 64 bits")
        if value is Ellipsis or isinstance(value, bytes):
            raise ModelFileError(f"the code has {value!r:.80}, which TorchScript does not write")
        return value

    def _visit_Name(self, node: ast.Name, variables: _Variables) -> Any:
        if node.id in variables:
            return variables[node.id]
        return _NUMBERS[node.id] if node.id in _NUMBERS else _Path(node.id)

    def _visit_Attribute(self, node: ast.Attribute, variables: _Variables) -> Any:
        owner = self._value(node.value, variables)
        if isinstance(owner, _Path):
            return self._global(f"{owner.name}.{node.attr}")
        return self._attribute_of(owner, node.attr)

    def _global(self, path: str) -> Any:
        """Return what a dotted name stands for, if it is a value; otherwise the name."""
        if path.startswith("CONSTANTS."):
            index = path.removeprefix("CONSTANTS.c")
            if index.isdecimal() and len(index) < 9 and int(index) < len(self._constants):
                return self._constants[int(index)]
            raise ModelFileError(f"{path[:80]!r} is not in constants.pkl")
        if path.startswith("__torch__."):
            owner, _, last = path.rpartition(".")
            if owner != "__torch__" and last != "__new__":
                script_class = self._code.script_class(owner)
                if script_class is not None and last in script_class.values:
                    value = self._value(script_class.values[last], {})
                    return EnumMember(owner, value) if script_class.base == "Enum" else value
        return _Path(path)

    def _attribute_of(self, owner: Any, name: str) -> Any:
        if isinstance(owner, Instance):
            if name in owner.attributes:
                return owner.attributes[name]
            if name in owner.script_class.values:
                return self._value(owner.script_class.values[name], {})
            definition = self.method(owner, name)
            if definition is None:
                raise ModelFileError(f"{owner.script_class.name[:80]!r} has no attribute {name[:80]!r}")
            return _Function(definition, owner)
        if isinstance(owner, Tensor) and name == "tolist":
            return lambda: self._operators.to_list(owner)
        if isinstance(owner, PackedWeight) and name == "unpack":
            return owner.unpack
        if isinstance(owner, EnumMember) and name == "value":
            return owner.value
        raise RefusedNameError(f"{type(owner).__name__}.{name}")

    def _visit_Subscript(self, node: ast.Subscript, variables: _Variables) -> Any:
        owner, key = self._value(node.value, variables), self._value(node.slice, variables)
        if isinstance(owner, Instance):  # a container of modules
            return self._attribute_of(owner, str(key))
        return self._operators.call("aten", "__getitem__", [owner, key], {})

    def _visit_List(self, node: ast.List, variables: _Variables) -> list[Any]:
        self._budget.take(8 * len(node.elts))
        return [self._value(item, variables) for item in node.elts]

    def _visit_Tuple(self, node: ast.Tuple, variables: _Variables) -> tuple[Any, ...]:
        return tuple(self._visit_List(node, variables))  # type: ignore[arg-type]

    def _visit_Dict(self, node: ast.Dict, variables: _Variables) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for key, item in zip(node.keys, node.values, strict=True):
            if key is None:
                raise ModelFileError("the code unpacks a dict")
            self._operators.call(
                "aten", "_set_item", [result, self._value(key, variables), self._value(item, variables)], {}
            )
        return result

    def _visit_UnaryOp(self, node: ast.UnaryOp, variables: _Variables) -> Any:
        value = self._value(node.operand, variables)
        if not isinstance(node.op, ast.USub) or not isinstance(value, (int, float, complex)):
            raise ModelFileError(f"the code has {ast.unparse(node)[:80]!r}, which TorchScript does not write")
        return -value

    # ----------------------------------------------------------------------------------------- builtins

    def _annotate(self, node: ast.Call, variables: _Variables) -> Any:
        kind, value = self._two(node)
        result = self._value(value, variables)
        if isinstance(result, Tensor) and isinstance(kind, ast.Name) and kind.id in ("int", "float", "number", "bool"):
            return self._number(kind.id, result)
        return result

    def _cast(self, node: ast.Call, variables: _Variables) -> Any:
        return self._value(self._two(node)[1], variables)

    def _converted(self, node: ast.Call, variables: _Variables) -> Any:
        if len(node.args) != 1 or not isinstance(node.func, ast.Name):
            raise ScriptError("a conversion takes one value")
        value = self._value(node.args[0], variables)
        name = node.func.id
        if name == "str":
            return text_of(value)
        return self._number(name, value) if isinstance(value, Tensor) else self._plain_number(name, value)

    def _plain_number(self, name: str, value: Any) -> Any:
        return self._operators.call(
            "aten", {"int": "Int", "float": "Float", "bool": "Bool"}.get(name, name), [value], {}
        )

    def _number(self, name: str, tensor: Tensor) -> Any:
        value = self._operators.item(tensor)
        return value if name == "number" else self._plain_number(name, value)

    def _getattr(self, node: ast.Call, variables: _Variables) -> Any:
        owner, name = self._two(node)
        value = self._value(owner, variables)
        if not isinstance(value, Instance) or not isinstance(name, ast.Constant) or not isinstance(name.value, str):
            raise RefusedNameError(ast.unparse(node))
        return self._attribute_of(value, name.value)

    def _isinstance(self, node: ast.Call, variables: _Variables) -> bool:
        value, kinds = self._two(node)
        result = self._value(value, variables)
        several = kinds.elts if isinstance(kinds, (ast.List, ast.Tuple)) else [kinds]
        return any(self._is_of(result, kind) for kind in several)

    def _is_of(self, value: Any, kind: ast.expr) -> bool:
        """Return True if a value has the type of an annotation; of a list, the first item says its type."""
        self._budget.spend()
        if isinstance(kind, ast.Name):
            return (
                kind.id == "Any"
                or type(value) in _TYPES.get(kind.id, ())
                or (kind.id == "Tensor" and isinstance(value, Tensor))
            )
        if isinstance(kind, ast.Subscript) and isinstance(kind.value, ast.Name):
            inner = kind.slice.elts if isinstance(kind.slice, ast.Tuple) else [kind.slice]
            if kind.value.id == "Optional":
                return value is None or self._is_of(value, inner[0])
            if kind.value.id == "Union":
                return any(self._is_of(value, member) for member in inner)
            if kind.value.id == "List":
                return isinstance(value, list) and all(self._is_of(item, inner[0]) for item in value[:1])
            if kind.value.id == "Dict":
                return isinstance(value, dict) and all(
                    self._is_of(item, inner[-1]) for item in list(value.values())[:1]
                )
            if kind.value.id == "Tuple":
                is_fitting = isinstance(value, tuple) and len(value) == len(inner)
                return is_fitting and all(map(self._is_of, value, inner))
            return False
        name = ast.unparse(kind)
        return (isinstance(value, Instance) and value.script_class.name == name) or (
            isinstance(value, EnumMember) and value.class_name == name
        )

    def _print(self, node: ast.Call, variables: _Variables) -> None:
        for arg in node.args:
            self._value(arg, variables)

    def _fork(self, node: ast.Call, variables: _Variables) -> Any:
        function, *args = [self._value(arg, variables) for arg in node.args]
        if not isinstance(function, _Function):
            raise RefusedNameError("fork")
        return self._invoke(function, args, {})

    @staticmethod
    def _two(node: ast.Call) -> tuple[ast.expr, ast.expr]:
        if len(node.args) != 2 or node.keywords:
            raise ModelFileError(f"the code has {ast.unparse(node)[:80]!r}, which TorchScript does not write")
        return node.args[0], node.args[1]

    _BUILTINS: ClassVar[dict[str, Callable[..., Any]]] = {
        "annotate": _annotate,
        "unchecked_cast": _cast,
        "uninitialized": lambda *_: _UNINITIALIZED,
        "int": _converted,
        "float": _converted,
        "bool": _converted,
        "str": _converted,
        "complex": _converted,
        "getattr": _getattr,
        "isinstance": _isinstance,
        "print": _print,
        "fork": _fork,
    }


# Operators that the code names without ``torch.``.
_PLAIN_NAMES = frozenset("sorted len min max abs sum round divmod any all ord chr hex oct bin hash list dict".split())

"""Functions of TorchScript on numbers, texts, lists and dicts; none of them can reach outside or grow without limit."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from modelsummary.errors import ModelFileError
from modelsummary.files.budget import Budget

__all__ = ["CONTAINER_FUNCTIONS", "FUNCTIONS", "ScriptError", "called_function", "text_of"]

_LARGEST = 2**63 - 1
_LONGEST = 1_000_000  # characters of a text
_ITEM_BYTES = 100  # of an item in a new list or dict, with the text, number or pair that it is


class ScriptError(Exception):
    """The program in the file raises an exception of its own."""


def _whole(value: Any) -> Any:
    """Return a result; raise ``ModelFileError`` for integers that do not fit 64 bits."""
    if type(value) is int and not -_LARGEST - 1 <= value <= _LARGEST:
        raise ModelFileError("an integer does not fit 64 bits")
    return value


def _power(base: Any, exponent: Any) -> Any:
    if type(base) is int and type(exponent) is int:
        if exponent < 0:
            return float(base) ** exponent
        if abs(base) > 1 and exponent > 64:
            raise ModelFileError("an integer does not fit 64 bits")
        return float(base**exponent)  # as TorchScript declares it
    return base**exponent


def _shift(left: bool) -> Callable[[int, int], int]:
    def shifted(value: int, by: int) -> int:
        if not 0 <= by < 64:
            raise ModelFileError("a shift by 64 bits or more")
        return value << by if left else value >> by

    return shifted


def _divided_to_zero(a: int, b: int) -> int:
    return int(a / b) if abs(a) < 2**52 else (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


def _set_item(values: Any, key: Any, value: Any) -> Any:
    values[key] = value
    return values


def _extended(values: list[Any], others: Any) -> list[Any]:
    values.extend(list(others))
    return values


def _appended(values: list[Any], value: Any) -> list[Any]:
    values.append(value)
    return values


def _repeated(a: Any, b: Any) -> Any:
    values, count = (a, b) if isinstance(a, list) else (b, a)
    if not isinstance(values, list) or type(count) is not int:
        raise TypeError("a list and an integer are multiplied")
    if len(values) * max(count, 0) > _LONGEST:
        raise ModelFileError(f"a list of more than {_LONGEST:,}")
    return values * count


def _range_length(low: int, high: int, step: int) -> int:
    return len(range(low, high, step)) if abs(high - low) < 2**62 else _LARGEST


def _as_dict(pairs: Any = ()) -> dict[Any, Any]:
    items = pairs.items() if isinstance(pairs, dict) else pairs
    return {_checked_key(key): value for key, value in items}


def _popped(values: Any, key: Any = -1, *default: Any) -> Any:
    return values.pop(_checked_key(key), *default)


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (a is not None and type(a) is type(b) and not _is_object(a) and a == b)


def _is_equal(a: Any, b: Any) -> bool:
    """Compare values other than lists."""
    return a is b if _is_object(a) else bool(a == b)


def _is_object(value: Any) -> bool:
    return isinstance(value, (Tensor, list, tuple, dict)) or hasattr(value, "attributes")


def _counted(count: int) -> list[int]:
    if count > _LONGEST:
        raise ModelFileError(f"a list of more than {_LONGEST:,}")
    return list(range(count))


def _of_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes numbers only: operators of Python mean other things for texts and lists."""

    def called(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if not isinstance(value, _NUMBERS):
                raise TypeError(f"a number is expected, got {type(value).__name__}")
        return function(*args, **kwargs)

    return called


def _of_flat(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that compares: in nested lists that share their parts, this takes exponential time.

    A long text takes little memory, however often it is in a list, and all the more time.
    """

    def called(*args: Any, **kwargs: Any) -> Any:
        characters = 0
        for value in args:
            items = value.values() if isinstance(value, dict) else value
            for item in items if isinstance(value, (list, tuple, dict)) else ():
                inner = item if isinstance(item, (list, tuple)) else (item,)
                if isinstance(item, dict) or (
                    inner is item and any(isinstance(part, (list, tuple, dict)) for part in inner)
                ):
                    raise ModelFileError("lists within lists within lists are compared")
                characters += sum(len(text) for text in inner if isinstance(text, str))
        if characters > 2 * _LONGEST:
            raise ModelFileError(f"texts of more than {2 * _LONGEST:,} characters are compared")
        return function(*args, **kwargs)

    return called


def _of_keys(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose second argument is a key or an index."""

    def called(values: Any, key: Any, *others: Any) -> Any:
        return function(values, _checked_key(key), *others)

    return called


def _checked_key(key: Any) -> Any:
    """Return a key or an index; raise ``TypeError`` for tuples: to hash nested ones takes exponential time."""
    if not isinstance(key, (*_NUMBERS, str, Tensor)):
        raise TypeError(f"a key is expected, got {type(key).__name__}")
    return key


_NUMBERS = (int, float, complex)


def text_of(value: Any, depth: int = 3) -> str:
    """Return a value as TorchScript prints it, a long one in part; a tensor by its size.

    >>> text_of([1, 2.0, "a"])
    '[1, 2.0, a]'
    """
    if isinstance(value, Tensor):
        return f"a tensor of {list(value.shape)}"
    if isinstance(value, (list, tuple)):
        inner = ", ".join(text_of(item, depth - 1)[:1000] for item in value[:20]) if depth else "..."
        return (f"[{inner}]" if isinstance(value, list) else f"({inner})")[:1000]
    if isinstance(value, Mapping):
        return f"a dict of {len(value)}"
    return (
        str(value)[:_LONGEST] if isinstance(value, (str, int, float, complex, bool, type(None))) else repr(value)[:200]
    )


def _formatted(template: str, *values: Any) -> str:
    parts = template.split("{}")
    texts = [text_of(value) for value in values][: len(parts) - 1]
    texts += [""] * (len(parts) - len(texts))
    if sum(map(len, texts)) > _LONGEST:
        raise ModelFileError(f"a text of more than {_LONGEST:,} characters")
    return "".join(part + text for part, text in zip(parts, texts, strict=True))


def _percent_formatted(template: str, *values: Any) -> str:
    pending = list(values[0] if len(values) == 1 and isinstance(values[0], tuple) else values)
    parts = template.replace("%%", "\0").split("%")
    text = parts[0]
    for part in parts[1:]:
        kind = part.lstrip("0123456789.+- #")
        value = pending.pop(0) if pending else ""
        text += text_of(value) + kind[1:]
        if len(text) > _LONGEST:
            raise ModelFileError(f"a text of more than {_LONGEST:,} characters")
    return text.replace("\0", "%")


def _replaced(text: str, old: str, new: str, count: int = -1) -> str:
    if len(text) + len(new) * (text.count(old) + 1) > _LONGEST:
        raise ModelFileError(f"a text of more than {_LONGEST:,} characters")
    return text.replace(old, new, count)


def _joined(separator: str, texts: Sequence[str]) -> str:
    if sum(map(len, texts)) + len(separator) * len(texts) > _LONGEST:
        raise ModelFileError(f"a text of more than {_LONGEST:,} characters")
    return separator.join(texts)


def _padded(name: str) -> Callable[..., str]:
    def padded(text: str, width: int, *fill: str) -> str:
        if width > 10_000:
            raise ModelFileError("a text of more than 10,000 characters")
        result: str = getattr(str, name)(text, width, *fill)
        return result

    return padded


def _unwrapped(value: Any) -> Any:
    if value is None:
        raise ScriptError("Unwrapping null optional")
    return value


def _extreme(best: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``max`` or ``min`` of a list, of two numbers, or of the pairs of two lists."""

    def chosen(a: Any, b: Any = None) -> Any:
        if b is None:
            return best(a)
        return list(map(best, a, b)) if isinstance(a, list) else best(a, b)

    return chosen


def _code_point(code_point: int) -> str:
    if not 0 <= code_point < 256:
        raise ModelFileError("chr() takes 0 to 255")
    return chr(code_point)


def _factorial(value: int) -> int:
    if not 0 <= value <= 20:
        raise ModelFileError("an integer does not fit 64 bits")
    return math.factorial(value)


def _broadcast(a: Sequence[int], b: Sequence[int]) -> list[int]:
    length = max(len(a), len(b))
    pairs = zip([1] * (length - len(a)) + list(a), [1] * (length - len(b)) + list(b), strict=True)
    return [other if size == 1 else size for size, other in pairs]


def _float_text(value: Any) -> float:
    return float(value[:100]) if isinstance(value, str) else float(value)


def _integer(value: Any) -> int:
    return int(value[:30]) if isinstance(value, str) else int(value)


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "sub": lambda a, b, alpha=1: a - b * alpha,
    "rsub": lambda a, b, alpha=1: b - a * alpha,
    "div": operator.truediv,
    "truediv": operator.truediv,
    "true_divide": operator.truediv,
    "floordiv": operator.floordiv,
    "floor_divide": operator.floordiv,
    "__round_to_zero_floordiv": _divided_to_zero,
    "remainder": operator.mod,
    "mathremainder": math.remainder,
    "fmod": math.fmod,
    "divmod": divmod,
    "pow": _power,
    "neg": operator.neg,
    "__and__": operator.and_,
    "__or__": operator.or_,
    "__xor__": operator.xor,
    "bitwise_not": operator.invert,
    "__lshift__": _shift(left=True),
    "__rshift__": _shift(left=False),
    "ceil": math.ceil,
    "floor": math.floor,
    "round": lambda value, digits=0: float(round(value, max(digits, -400))),  # Python makes 10**400
    "abs": abs,
    "fabs": abs,
    "Bool": bool,
    "Complex": complex,
    "mul": operator.mul,
    "factorial": _factorial,
    "gcd": math.gcd,
    "isnan": math.isnan,
    "isinf": math.isinf,
    "isfinite": math.isfinite,
    "gamma": math.gamma,
    "lgamma": math.lgamma,
    "log": math.log,
    "pi": lambda: math.pi,
    "__derive_index": lambda index, start, step: start + index * step,
    "__range_length": _range_length,
    "chr": _code_point,
    "hex": hex,
    "oct": oct,
    "bin": bin,
    "complex": complex,
    "polar": lambda length, angle: complex(length * math.cos(angle), length * math.sin(angle)),
    **{
        name: getattr(math, name)
        for name in "sqrt exp expm1 log1p log2 log10 sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh atan2"
        " copysign degrees radians erf erfc frexp ldexp modf".split()
    },
}

# Functions of lists, dicts, tuples and texts, which may hold tensors.
CONTAINER_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "len": len,
    "append": _appended,
    "extend": _extended,
    "insert": lambda values, index, value: values.insert(index, value),
    "pop": _popped,
    "popitem": lambda values: values.popitem(),
    "clear": lambda values: values.clear(),
    "reverse": lambda values: values.reverse(),
    "remove": _of_flat(lambda values, value: values.remove(value)),
    "copy": lambda values: values.copy(),
    "count": _of_flat(lambda values, *args: values.count(*args)),
    "index": _of_flat(lambda values, *args: values.index(*args)),
    "Delete": _of_keys(operator.delitem),
    "select": _of_keys(operator.getitem),
    "__getitem__": _of_keys(operator.getitem),
    "_set_item": _of_keys(_set_item),
    "__contains__": _of_keys(_of_flat(lambda values, key: key in values)),
    "slice": lambda values, start=None, end=None, step=1: values[start:end:step],
    "list": list,
    "dict": _as_dict,
    "keys": lambda values: list(values.keys()),
    "values": lambda values: list(values.values()),
    "items": lambda values: list(values.items()),
    "get": _of_keys(lambda values, key, default=None: values.get(key, default)),
    "setdefault": _of_keys(lambda values, key, default: values.setdefault(key, default)),
    "update": lambda values, others: values.update(_as_dict(others)),
    "add": lambda a, b: a + b,
    "add_": _extended,
    "mul": _repeated,
    "eq": _of_flat(operator.eq),
    "ne": _of_flat(operator.ne),
    "lt": _of_flat(operator.lt),
    "le": _of_flat(operator.le),
    "gt": _of_flat(operator.gt),
    "ge": _of_flat(operator.ge),
    "sorted": _of_flat(sorted),
    "sort": _of_flat(lambda values, reverse=False: values.sort(reverse=reverse)),
    "sum": lambda values: sum(value for value in values if isinstance(value, _NUMBERS)),
    "any": any,
    "all": all,
    "max": _of_flat(_extreme(max)),
    "min": _of_flat(_extreme(min)),
    "Size": list,
    "_unwrap_optional": _unwrapped,
    "TupleIndex": _of_keys(operator.getitem),
    "StringIndex": _of_keys(operator.getitem),
    "broadcast_shapes": _broadcast,
    "_infer_size": _broadcast,
    "_size_if_not_equal": _of_flat(lambda a, b: None if list(a) == list(b) else list(a)),
    "ord": ord,
    "Int": _integer,
    "Float": _float_text,
}

FUNCTIONS: dict[str, Callable[..., Any]] = {
    **CONTAINER_FUNCTIONS,
    **{name: _of_numbers(function) for name, function in _ARITHMETIC.items()},
    "add": _of_numbers(lambda a, b, alpha=1: a + b * alpha),
    "eq": _is_equal,
    "ne": lambda a, b: not _is_equal(a, b),
    "__not__": operator.not_,
    "__is__": _is_same,
    "__isnot__": lambda a, b: not _is_same(a, b),
    "str": text_of,
    "format": _formatted,
    "percentFormat": _percent_formatted,
    "replace": _replaced,
    "join": _joined,
    **{name: _padded(name) for name in ("center", "ljust", "rjust", "zfill")},
    **{
        name: getattr(str, name)
        for name in "upper lower capitalize title swapcase strip lstrip rstrip startswith endswith find rfind rindex"
        " isalnum isalpha isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper"
        " partition rpartition split rsplit splitlines".split()
    },
    "unchecked_unwrap_optional": _unwrapped,
    "rangelist": _counted,
}


def called_function(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], budget: Budget
) -> Any:
    """Call one of the functions; what it looks at, and what it makes or adds, is counted.

    Raises:
        ScriptError: it raises an exception, as it would in the program.
        ModelFileError: an integer or a text grows beyond any use.
    """
    sizes = [len(value) if isinstance(value, (str, list, tuple, dict)) else 0 for value in args]
    if function not in _OF_ONE_ITEM:
        budget.spend(sum(sizes) // 8)
    if any(isinstance(value, str) and len(value) > _LONGEST for value in args):
        raise ModelFileError(f"a text of more than {_LONGEST:,} characters")
    try:
        result = _whole(function(*args, **kwargs))
    except ModelFileError:
        raise
    except RecursionError:
        raise ModelFileError("lists are nested too deep") from None
    except (ArithmeticError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ScriptError(f"{type(error).__name__}: {error}"[:200]) from None
    budget.take(8 * sum(sizes[1:]))
    if isinstance(result, (str, list, tuple, dict)) and not any(result is value for value in args):
        budget.spend(len(result) // 8)
        budget.take(len(result) * (1 if isinstance(result, str) else _ITEM_BYTES))
    return result


# Functions whose time does not grow with their first argument.
_OF_ONE_ITEM = frozenset(
    CONTAINER_FUNCTIONS[name] for name in "len append __getitem__ _set_item select get TupleIndex StringIndex".split()
)

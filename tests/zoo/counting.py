"""Count the multiply-adds of a real run, apart from the package: each product from the sizes of its operands.

Attention runs by its mathematical definition and recurrent layers step by step, so a handful of formulas suffices.
``FlopCounterMode`` of torch counts the same run; it does not know all of these operators.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.zoo.example import Example

__all__ = ["Count", "count"]


def _product(a: Tensor, b: Tensor) -> int:
    """Rows of ``a`` times its columns times columns of ``b``, for each matrix of a batch."""
    return a.numel() * b.shape[-1]


def _added_product(_: Tensor, a: Tensor, b: Tensor, *rest: Any, **scales: Any) -> int:
    return _product(a, b)


def _vector_product(a: Tensor, _: Tensor) -> int:
    return a.numel()


def _of_result(out: Tensor, x: Tensor, weight: Tensor, transposed: bool) -> int:
    """Each position meets a whole filter: positions of the result, or of the input if transposed."""
    if transposed:  # weight: inputs x outputs per group x window
        return x.numel() * math.prod(weight.shape[1:])
    return out.numel() * math.prod(weight.shape[1:])  # weight: outputs x inputs per group x window


def _trilinear(a: Tensor, b: Tensor, c: Tensor, expand1: Any, expand2: Any, expand3: Any, *rest: Any) -> int:
    """``bilinear``: x1 (n, i), weight (o, i, j), x2 (n, j): n x o x i x j."""
    sizes = [list(each.shape) for each in (a, b, c)]
    for shape, expand in zip(sizes, (expand1, expand2, expand3), strict=True):
        for dim in sorted(expand):
            shape.insert(dim, 1)
    return math.prod(max(each) for each in zip(*sizes, strict=True))


FORMULAS: dict[str, Callable[..., int]] = {
    "aten::mm": _product,
    "aten::bmm": _product,
    "aten::_int_mm": _product,
    "aten::_scaled_mm": lambda a, b, *rest: _product(a, b),
    "aten::addmm": _added_product,
    "aten::_addmm_activation": _added_product,
    "aten::baddbmm": _added_product,
    "aten::addbmm": _added_product,
    "aten::mv": _vector_product,
    "aten::dot": _vector_product,
    "aten::vdot": _vector_product,
    "aten::addmv": lambda _, a, b, *rest: a.numel(),
    "aten::addr": lambda _, a, b, *rest: a.numel() * b.numel(),
    "aten::_trilinear": _trilinear,
    "aten::_grouped_mm": lambda a, b, *rest: _product(a, b),  # the groups part the rows of the first
    "aten::_sparse_addmm": lambda _, a, b, *rest: a._nnz() * b.shape[-1],
    "aten::_sparse_mm": lambda a, b, *rest: a._nnz() * b.shape[-1],
    "aten::_weight_int8pack_mm": lambda x, weight, *rest: x.numel() * weight.shape[0],
    "aten::_dyn_quant_matmul_4bit": lambda x, weight, block, inputs, outputs: x.numel() * outputs,
    "aten::linalg_solve_triangular": lambda a, b, *, left=True, **rest: b.numel() * a.shape[-1],
    "aten::_cdist_forward": lambda a, b, p, *rest: a.numel() * b.shape[-2] if p == 2 else 0,
    "aten::_euclidean_dist": lambda a, b: a.numel() * b.shape[-2],
}
# ``torch.outer`` reaches the dispatcher as the product of a vector, viewed as a column, and a vector: docs/numbers.md
OUTER = {"aten::mul", "aten::mul_"}
CONVOLUTIONS = {"aten::convolution", "aten::convolution_overrideable"}
# The matrices that stand behind these are in an object; the sizes of input and result tell of them.
QUANTISED = {"quantized::linear", "quantized::linear_relu", "quantized::linear_dynamic"}
QUANTISED_CONVOLUTIONS = {"quantized::conv2d", "quantized::conv2d_relu"}


class Count(TorchDispatchMode):
    """Context that counts the multiply-adds of each operator.

    Attributes:
        macs: of all operators.
        of_each: of each operator that multiplies, in the order of their calls; what one torch function calls, such as
            ``scaled_dot_product_attention``, is together one.
        by_name: of each kind of operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.macs = 0
        self.of_each: list[int] = []
        self.by_name: Counter[str] = Counter()
        self.in_one = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.name().split(".")[0] if hasattr(func, "name") else str(func)
        macs = _macs(name, out, args, kwargs)
        if macs:
            self.macs += macs
            self.by_name[name] += macs
            if self.in_one:
                self.of_each[-1] += macs
            else:
                self.of_each.append(macs)
        return out


def _macs(name: str, out: Any, args: Any, kwargs: Any) -> int:
    if name in CONVOLUTIONS:
        return _of_result(out, args[0], args[1], bool(args[6]))
    if name == "torchvision::deform_conv2d":
        return out.numel() * math.prod(args[1].shape[1:])
    if name in QUANTISED:
        return args[0].numel() * out.shape[-1]
    if name in QUANTISED_CONVOLUTIONS:
        weight = args[1].weight() if hasattr(args[1], "weight") else args[1].unpack()[0]
        return out.numel() * math.prod(weight.shape[1:])
    if name in OUTER:
        a, b = args[:2]
        column = isinstance(a, Tensor) and a.dim() == 2 and a.shape[1] == 1 and a._is_view() and a._base.dim() == 1
        return out.numel() if column and isinstance(b, Tensor) and b.dim() == 1 else 0
    formula = FORMULAS.get(name)
    return formula(*args, **kwargs) if formula is not None else 0


_ONE_FUNCTION = {
    torch.nn.functional.scaled_dot_product_attention,
    *(getattr(torch._VF, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")),
}


class _Together(TorchFunctionMode):
    """What the operators of one torch function multiply is one entry."""

    def __init__(self, counting: Count) -> None:
        super().__init__()
        self._counting = counting

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _ONE_FUNCTION or self._counting.in_one:
            return func(*args, **(kwargs or {}))
        self._counting.of_each.append(0)
        self._counting.in_one = True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._counting.in_one = False


@contextmanager
def _plain_kernels() -> Iterator[None]:
    """No fused kernels that hide products: attention by its definition, recurrent layers step by step."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=False):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def count(example: Example) -> tuple[Count, int | None]:
    """Count a run's multiply-adds: by this module, and by ``FlopCounterMode`` (its FLOPs // 2, None if it fails)."""
    counted = Count()
    with torch.no_grad(), _plain_kernels():
        with counted, _Together(counted):
            copy.deepcopy(example)()
        torchs = FlopCounterMode(display=False)
        try:
            with torchs:
                copy.deepcopy(example)()
        except Exception:
            return counted, None
    return counted, torchs.get_total_flops() // 2

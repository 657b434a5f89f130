"""The dispatcher: its keys, kernels and modes, and the classes of operators and tensors that go through it.

All names hold from torch 2.6 to 2.14.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch._C import _pop_torch_function_stack as pop_function_mode
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch._library.custom_ops import CustomOpDef
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
)
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
from torch.utils._python_dispatch import _pop_mode as pop_dispatch_mode

__all__ = [
    "CustomOpDef",
    "DisableAutocast",
    "DisableTorchDispatch",
    "DisableTorchFunction",
    "DispatchKey",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "disable_current_modes",
    "disabled_dispatch",
    "disabled_function",
    "dispatch_modes",
    "exclude_dispatch_key",
    "fake_mode",
    "flex_attention",
    "flex_attention_backward",
    "has_kernel",
    "has_kernel_for",
    "is_excluded",
    "is_traceable_wrapper_subclass",
    "is_transformed",
    "kernels_for",
    "meta_kernels",
    "number_of_dispatch_modes",
    "number_of_function_modes",
    "pop_dispatch_mode",
    "pop_function_mode",
    "scoped_library",
]

# Context: operators are not cast.
DisableAutocast: Any = torch._C._DisableAutocast
# Context: torch functions reach no mode, so that a trace does not mistake our own calls for the model's.
DisableTorchFunction: Any = torch._C.DisableTorchFunction
# Context: operators reach neither modes nor subclasses.
DisableTorchDispatch: Any = torch._C._DisableTorchDispatch
# Names of dispatch keys.
DispatchKey: Any = torch._C.DispatchKey
# Whether a dispatch key is switched off, as while C++ code converts a tensor to a number.
is_excluded: Any = torch._C._dispatch_tls_is_dispatch_key_excluded
# Whether a tensor is a wrapper of a transform, such as ``vmap``, without elements of its own.
is_transformed: Any = torch._C._functorch.is_functorch_wrapped_tensor
# ``__torch_function__`` of a subclass that does not override functions.
disabled_function: Any = torch._C._disabled_torch_function_impl
# ``__torch_dispatch__`` of a class that does not override operators.
disabled_dispatch: Any = torch._C._disabled_torch_dispatch_impl
# Whether an operator has a kernel for a dispatch key.
has_kernel_for: Any = torch._C._dispatch_has_kernel_for_dispatch_key
# Context: a ``torch.library.Library`` whose kernels are removed at the end.
scoped_library: Any = torch.library._scoped_library
# Names of the operators that have a kernel for a dispatch key.
kernels_for: Any = torch._C._dispatch_get_registrations_for_dispatch_key
# Whether an operator is registered in C++.
has_kernel: Any = torch._C._dispatch_has_kernel
# Number of active dispatch modes, without the one that handles an operator now.
number_of_dispatch_modes: Any = torch._C._len_torch_dispatch_stack
# Number of active function modes.
number_of_function_modes: Any = torch._C._len_torch_function_stack
# Context: operators run the kernels of meta tensors, and reach no mode, no subclass and no autograd. It restores all
# keys: in torch 2.6, the guard that adds one key leaves the key's backend behind.
meta_kernels: Any = partial(
    torch._C._ForceDispatchKeyGuard,
    torch._C.DispatchKeySet(torch._C.DispatchKey.Meta),
    torch._C._dispatch_keyset_full() - torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.Python),
)


def exclude_dispatch_key(key: Any) -> Any:
    """Return a context in which operators run without the kernels of a dispatch key."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key))


def fake_mode() -> Any:
    """Return the active ``FakeTensorMode``, or None."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)

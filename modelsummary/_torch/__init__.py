"""The private names of torch that the package uses. No other module of the package names ``torch._``.

A comment says what each name is. All exist in torch 2.6 and later, except where a default is given.
``tests/test_torch_names.py`` fails on a torch in which a name is missing or has another meaning.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch._C import _pop_torch_function_stack as pop_function_mode
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = [
    "GLOBAL_DEVICE_CONTEXT",
    "VF",
    "DisableTorchDispatch",
    "DisableTorchFunction",
    "DispatchKey",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "StorageBase",
    "TensorBase",
    "bound_functions",
    "clear_sharding_caches",
    "conv_memory_format",
    "current_node",
    "disabled_dispatch",
    "disabled_function",
    "exclude_dispatch_key",
    "export_serializer",
    "fake_mode",
    "fake_store",
    "flex_attention",
    "flex_attention_backward",
    "fsdp_groups",
    "functional_collectives",
    "has_kernel",
    "has_kernel_for",
    "is_any_autocast_enabled",
    "is_cudnn_sdp_enabled",
    "is_excluded",
    "is_flash_sdp_enabled",
    "is_math_sdp_enabled",
    "is_mem_efficient_sdp_enabled",
    "is_onednn_enabled",
    "is_xpu_built",
    "kernels_for",
    "meta_kernels",
    "next_node_number",
    "number_of_function_modes",
    "pop_function_mode",
    "running_backward",
    "scoped_library",
    "select_conv_backend",
    "set_conj",
    "set_grad_enabled",
    "set_neg",
    "strided_shard",
    "swapped",
    "top_saved_tensors_hooks",
    "type_hints_once",
]

# Context: torch functions reach no mode, so that a trace does not mistake our own calls for the model's.
DisableTorchFunction: Any = torch._C.DisableTorchFunction
# Context: operators reach neither modes nor subclasses.
DisableTorchDispatch: Any = torch._C._DisableTorchDispatch
# Names of dispatch keys.
DispatchKey: Any = torch._C.DispatchKey
# Whether a dispatch key is switched off, as while C++ code converts a tensor to a number.
is_excluded: Any = torch._C._dispatch_tls_is_dispatch_key_excluded
# ``__torch_function__`` of a subclass that does not override functions.
disabled_function: Any = torch._C._disabled_torch_function_impl
# ``__torch_dispatch__`` of a class that does not override operators.
disabled_dispatch: Any = torch._C._disabled_torch_dispatch_impl
# The base class whose ``resize_`` refuses storages without memory.
StorageBase: Any = torch._C.StorageBase
# The base class whose getters are the properties of tensors.
TensorBase: Any = torch._C.TensorBase
# The module whose functions torch binds to names of its own.
bound_functions: Any = torch._C
# Marks a tensor as conjugated.
set_conj: Any = torch._C._set_conj
# Marks a tensor as negated.
set_neg: Any = torch._C._set_neg
# Whether an operator has a kernel for a dispatch key.
has_kernel_for: Any = torch._C._dispatch_has_kernel_for_dispatch_key
# Context: a ``torch.library.Library`` whose kernels are removed at the end.
scoped_library: Any = torch.library._scoped_library
# Names of the operators that have a kernel for a dispatch key.
kernels_for: Any = torch._C._dispatch_get_registrations_for_dispatch_key
# Whether an operator is registered in C++.
has_kernel: Any = torch._C._dispatch_has_kernel
# The function that ``torch.no_grad`` calls, and that fx graphs contain.
set_grad_enabled: Any = torch._C._set_grad_enabled
# Number of the next autograd node.
next_node_number: Any = torch._C._autograd._get_sequence_nr
# Id of the running backward, -1 without one.
running_backward: Any = torch._C._current_graph_task_id
RUNNING_BACKWARD = "from torch._C import _current_graph_task_id as running_backward"  # for code that is written
# The running autograd node, or None.
current_node: Any = torch._C._current_autograd_node
# The kernel that a convolution uses.
select_conv_backend: Any = torch._C._select_conv_backend
# The memory format of the result of that kernel.
conv_memory_format: Any = torch._C._conv_determine_backend_memory_format
# Whether oneDNN runs recurrent layers on the CPU.
is_onednn_enabled: Any = torch._C._get_mkldnn_enabled
# True if torch was built with support for Intel GPUs.
is_xpu_built: Any = torch.xpu._is_compiled
# Whether autocast is on for any device.
is_any_autocast_enabled: Any = torch._C._is_any_autocast_enabled
# Switches of the attention backends.
is_flash_sdp_enabled: Any = torch._C._get_flash_sdp_enabled
is_mem_efficient_sdp_enabled: Any = torch._C._get_mem_efficient_sdp_enabled
is_math_sdp_enabled: Any = torch._C._get_math_sdp_enabled
is_cudnn_sdp_enabled: Any = torch._C._get_cudnn_sdp_enabled
# Number of active function modes.
number_of_function_modes: Any = torch._C._len_torch_function_stack
# Functions without Python code, such as the recurrent layers.
VF: Any = torch._VF
# The holder of the device set by ``torch.set_default_device``.
GLOBAL_DEVICE_CONTEXT: Any = torch._GLOBAL_DEVICE_CONTEXT
# Context: operators run the kernels of meta tensors, and reach no mode, no subclass and no autograd. It restores all
# keys: in torch 2.6, the guard that adds one key leaves the key's backend behind.
meta_kernels: Any = partial(
    torch._C._ForceDispatchKeyGuard,
    torch._C.DispatchKeySet(torch._C.DispatchKey.Meta),
    torch._C._dispatch_keyset_full() - torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.Python),
)
# Innermost default hooks of saved tensors; None on torch 2.6.
top_saved_tensors_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def exclude_dispatch_key(key: Any) -> Any:
    """Return a context in which operators run without the kernels of a dispatch key."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key))


def fake_mode() -> Any:
    """Return the active ``FakeTensorMode``, or None."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def export_serializer() -> Any:
    """Return the module that reads exported programs. It is imported here because the import is slow."""
    from torch._export.serde import serialize

    return serialize


_MISSING = object()


@contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Run the body with ``value`` as an attribute of a module, a class or an object.

    Afterwards the attribute is what ``owner`` itself held before. What it inherits is only covered by ``value``.

    >>> with swapped(torch.nn.Linear, "forward", lambda self, x: "swapped"):
    ...     torch.nn.Linear(2, 2)("x")
    'swapped'
    """
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextmanager
def type_hints_once() -> Iterator[None]:
    """Run the body while the module that reads exported programs asks for the types of each class once, not per object.

    That is half of the time of reading a program. The name ``typing`` in the module is another one meanwhile.
    """
    serializer = export_serializer()
    typing_module = getattr(serializer, "typing", None)
    if typing_module is None:
        yield
        return
    hints: dict[Any, Any] = {}

    def get_type_hints(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls not in hints:
            hints[cls] = typing_module.get_type_hints(cls, *args, **kwargs)
        return hints[cls]

    cached_typing = ModuleType("typing")
    cached_typing.__dict__.update(vars(typing_module), get_type_hints=get_type_hints)
    with swapped(serializer, "typing", cached_typing):
        yield


def fake_store() -> Any:
    """Return the store of a fake process group, which moves nothing; importing it registers the backend ``fake``."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def clear_sharding_caches() -> None:
    """Forget the layouts that DTensor inferred: an equal mesh of a later process group has groups of other names."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        getattr(debug, "_clear_sharding_prop_cache", lambda: None)()  # absent from old versions of torch


def functional_collectives() -> Any:
    """Return the namespace of collectives that return their results; importing them gives them shapes in torch 2.6."""
    import torch.distributed._functional_collectives

    return torch.ops._c10d_functional


def fsdp_groups(module: torch.nn.Module) -> list[Any]:
    """Return the groups of parameters that FSDP2 gathers together for a module; [] if it does not shard the module.

    Each has ``fsdp_params``, whose objects hold a shard and the gathered parameter.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # absent: FSDP is not in use
    if fsdp is None or not isinstance(module, getattr(fsdp, "FSDPModule", ())):
        return []
    sharded: Any = module
    state = sharded._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups is not None else [group for group in (state._fsdp_param_group,) if group is not None]


def flat_shards(module: torch.nn.Module) -> tuple[int, int]:
    """Return the elements of the parameters that FSDP1 keeps flat for a module, and of this rank's part."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # absent: FSDP is not in use
    if fsdp is None or not isinstance(module, fsdp.FullyShardedDataParallel):
        return 0, 0
    handle: Any = getattr(module, "_handle", None)
    if handle is None:
        return 0, 0
    whole = handle.flat_param._unpadded_unsharded_size.numel()
    return whole, -(-whole // (handle.world_size if handle.uses_sharded_strategy else 1))


def strided_shard(dim: int, split_factor: int) -> Any:
    """Return the placement of a dimension that is ``split_factor`` pieces, each cut into chunks."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)

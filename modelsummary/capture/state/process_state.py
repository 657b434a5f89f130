"""The list of process-wide states that a run may change: switches of torch and generators of random numbers.

``unchanged`` restores all of them after a run. The recorder compares those with ``changes_results`` between calls.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from modelsummary import _torch

__all__ = ["ProcessState", "process_states", "surroundings"]


class ProcessState(NamedTuple):
    """One switch, or one generator.

    Attributes:
        read: returns the current value.
        write: restores a value that ``read`` returned.
        changes_results: whether functions between layers compute different results under another value.
        is_switch: whether values can be compared, and are written only if they differ.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    changes_results: bool = False
    is_switch: bool = False

    def saved(self) -> Callable[[], object]:
        """Return a function that restores the current value."""
        value = self.read()

        def put_back() -> None:
            if not self.is_switch or self.read() != value:  # setting a switch may warn, or begin a mode
                self.write(value)

        return put_back


def process_states() -> list[ProcessState]:
    """Return the states that exist now. An unused accelerator and a library that is not imported have none.

    >>> {state.name: state.read() for state in process_states()}["default dtype"]
    torch.float32
    """
    states = list(_ALWAYS)
    for kind, accelerator in (("cuda", torch.cuda), ("xpu", torch.xpu)):
        if accelerator.is_initialized():
            states.append(ProcessState(f"{kind} rng", accelerator.get_rng_state_all, accelerator.set_rng_state_all))
    if torch.backends.mps.is_available():
        states.append(ProcessState("mps rng", torch.mps.get_rng_state, torch.mps.set_rng_state))
    if (numpy := sys.modules.get("numpy")) is not None:
        states.append(ProcessState("numpy rng", numpy.random.get_state, numpy.random.set_state))
    return states


def surroundings() -> tuple[Any, ...]:
    """Return the states with ``changes_results``, and whether inference mode is on, which cannot be set."""
    return torch.is_inference_mode_enabled(), *[state.read() for state in _OF_RESULTS]


def _default_device() -> torch.device | None:
    """Return the default device; None if none was set, which differs from the CPU as no mode is active then."""
    context = getattr(_torch.GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _set_default_device(device: torch.device | None) -> None:
    torch.set_default_device(device)
    if device is None:  # before torch 2.7, get_default_device() fails on the attribute that is left behind
        del _torch.GLOBAL_DEVICE_CONTEXT.device_context


def _autocast() -> list[tuple[bool, torch.dtype]]:
    """Return per kind of device whether autocast is on, and its dtype; empty if it is off, as dtypes have no effect."""
    if not _torch.is_any_autocast_enabled():
        return []
    return [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _AUTOCAST_KINDS]


def _set_autocast(saved: list[Any]) -> None:
    for kind, (enabled, dtype) in zip(_AUTOCAST_KINDS, saved or [(False, None)] * 2, strict=True):
        torch.set_autocast_enabled(kind, enabled)
        if dtype is not None:
            torch.set_autocast_dtype(kind, dtype)


_AUTOCAST_KINDS = ("cpu", "cuda")


def _attention_backends() -> tuple[bool, ...]:
    cuda: Any = torch.backends.cuda
    getters = (cuda.flash_sdp_enabled, cuda.math_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.cudnn_sdp_enabled)
    return tuple([is_enabled() for is_enabled in getters])


def _set_attention_backends(saved: tuple[bool, ...]) -> None:
    cuda = torch.backends.cuda
    setters = (cuda.enable_flash_sdp, cuda.enable_math_sdp, cuda.enable_mem_efficient_sdp, cuda.enable_cudnn_sdp)
    for setter, enabled in zip(setters, saved, strict=True):
        setter(enabled)


def _determinism() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_determinism(saved: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(saved[0], warn_only=saved[1])


def _cudnn() -> tuple[bool, bool, bool]:
    cudnn = torch.backends.cudnn
    return cudnn.enabled, cudnn.benchmark, cudnn.deterministic


def _set_cudnn(saved: tuple[bool, bool, bool]) -> None:
    cudnn = torch.backends.cudnn
    cudnn.enabled, cudnn.benchmark, cudnn.deterministic = saved


def _module_hooks() -> list[dict[Any, Any]]:
    """Return the hooks of all modules; the ``torch.export`` of torch 2.6 leaves one behind if it raises."""
    return [dict(table) for table in _torch.HOOKS_OF_ALL_MODULES]


def _set_module_hooks(saved: list[dict[Any, Any]]) -> None:
    for table, entries in zip(_torch.HOOKS_OF_ALL_MODULES, saved, strict=True):
        table.clear()
        table.update(entries)


def _float32_products() -> str | tuple[str, ...]:
    """Return torch's precision of float32 products; one for each library if they were set apart, as since torch 2.9."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it cannot tell one for all
        return tuple(settings.fp32_precision for settings in _float32_settings())


def _set_float32_products(saved: str | tuple[str, ...]) -> None:
    if isinstance(saved, str):
        torch.set_float32_matmul_precision(saved)
        return
    for settings, precision in zip(_float32_settings(), saved, strict=True):
        settings.fp32_precision = precision


def _float32_settings() -> tuple[Any, ...]:
    backends: Any = torch.backends
    return backends, backends.cuda.matmul, backends.mkldnn.matmul


_switch = partial(ProcessState, is_switch=True)
_mha = torch.backends.mha
_ALWAYS = (
    _switch("gradients", torch.is_grad_enabled, torch.set_grad_enabled),
    _switch("autocast", _autocast, _set_autocast, changes_results=True),
    _switch("attention backends", _attention_backends, _set_attention_backends, changes_results=True),
    _switch("default dtype", torch.get_default_dtype, torch.set_default_dtype, changes_results=True),
    _switch("default device", _default_device, _set_default_device),
    _switch("fused attention layers", _mha.get_fastpath_enabled, _mha.set_fastpath_enabled),
    _switch("deterministic algorithms", _determinism, _set_determinism),
    _switch("cudnn", _cudnn, _set_cudnn),
    _switch("float32 products", _float32_products, _set_float32_products),
    _switch("anomaly detection", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    _switch("hooks of all modules", _module_hooks, _set_module_hooks),
    _switch("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    ProcessState("torch rng", torch.get_rng_state, torch.set_rng_state),
    ProcessState("python rng", random.getstate, random.setstate),
)
_OF_RESULTS = tuple(state for state in _ALWAYS if state.changes_results)

"""The canary of ``modelsummary._torch``: each private name of torch is there, and is still what it was."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import modelsummary
from modelsummary import _torch

PACKAGE = Path(modelsummary.__file__).parent
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


def test_nothing_else_names_private_parts_of_torch():
    private = re.compile(r"\b(from )?torch\._(?!_version__|dynamo)\w+")
    found = {path.name for path in PACKAGE.rglob("*.py") if private.search(path.read_text())}
    assert found == {"_torch.py"}


@pytest.mark.parametrize("name", _torch.__all__)
def test_names(name):
    if name != "top_saved_tensors_hooks" or TORCH >= (2, 7):
        assert getattr(_torch, name) is not None


def test_switches_tell_what_is_on():
    assert not _torch.is_any_autocast_enabled()
    with torch.autocast("cpu"):
        assert _torch.is_any_autocast_enabled()
    assert _torch.number_of_function_modes() == 0
    with torch.overrides.TorchFunctionMode():
        assert _torch.number_of_function_modes() == 1
    assert _torch.fake_mode() is None
    with _torch.FakeTensorMode() as mode:
        assert _torch.fake_mode() is mode


def test_the_dispatcher():
    assert _torch.has_kernel("aten::mm")
    assert not _torch.has_kernel("aten::no_such_operator")
    assert _torch.has_kernel_for("aten::linear", "CompositeImplicitAutograd")
    assert not _torch.has_kernel_for("aten::mm", "CompositeImplicitAutograd")
    assert not _torch.is_excluded(_torch.DispatchKey.Python)
    with _torch.DisableTorchDispatch():
        assert _torch.is_excluded(_torch.DispatchKey.Python)


def test_autograd():
    first = _torch.next_node_number()
    y = nn.Linear(2, 2)(torch.ones(1, 2)).exp()
    assert y.grad_fn._sequence_nr() >= first
    assert _torch.next_node_number() > y.grad_fn._sequence_nr()
    assert (_torch.running_backward(), _torch.current_node()) == (-1, None)
    seen = []
    y.register_hook(lambda _: seen.append(_torch.running_backward()))
    y.sum().backward()
    assert seen != [-1]


def test_kernels_of_convolutions():
    x, weight = torch.ones(1, 2, 8, 8), torch.ones(4, 2, 3, 3)
    backend = _torch.select_conv_backend(x, weight, None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1)
    assert _torch.conv_memory_format(x, weight, backend) in (torch.contiguous_format, torch.channels_last)


def test_dispatch_keys_are_restored():
    before = torch._C._dispatch_tls_local_include_set().raw_repr()
    x = torch.ones(2, requires_grad=True)
    with _torch.meta_kernels():
        assert torch._C._dispatch_tls_local_include_set().raw_repr() != before
        assert _torch.is_excluded(_torch.DispatchKey.Python)
        assert not (x * 2).requires_grad
    assert torch._C._dispatch_tls_local_include_set().raw_repr() == before
    nn.Linear(2, 2)


def test_flags_of_tensors():
    x = torch.ones(2, dtype=torch.complex64)
    _torch.set_conj(x, True)
    assert x.is_conj()
    y = torch.ones(2)
    _torch.set_neg(y, True)
    assert y.is_neg()
    assert "shape" in vars(_torch.TensorBase)


def test_the_serializer_knows_dtypes():
    assert torch.float32 in _torch.export_serializer()._SERIALIZE_TO_TORCH_DTYPE.values()


@pytest.mark.skipif(TORCH < (2, 10), reason="a fake process group of older versions runs no FSDP")
def test_the_parameters_that_fsdp_gathers():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from modelsummary.parallel.fake_world import fake_world

    model = nn.Linear(4, 2)
    assert _torch.fsdp_groups(model) == []
    with fake_world(0, 2):
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        (group,) = _torch.fsdp_groups(model)
        weight, bias = group.fsdp_params
        assert weight.sharded_param is model.weight
        assert bias._sharded_param_data.shape == (1,)

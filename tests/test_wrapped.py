"""Models in the wrappers and modes of torch, and with tensors that are no plain ones: same figures, model untouched."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from modelsummary import Statistics
from tests.untouched import untouched

PARAMS = 8 * 16 + 16 + 2 * 16 + 16 * 4 + 4
MACS = 2 * (8 * 16 + 16 * 4)  # a batch of two


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))


def check(model, x=None, execution="shape"):
    x = torch.rand(2, 8) if x is None else x
    with untouched(model):
        stats = Statistics(model, x)
    assert (stats.total_params, stats.total_mult_adds, stats.execution) == (PARAMS, MACS, execution)
    return stats


shapes_of_collectives = pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < "2.10", reason="collectives of older versions know no shapes"
)


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_ddp(group):
    model = nn.parallel.DistributedDataParallel(net())
    assert check(model)["3"].macs == 2 * 16 * 4
    model(torch.rand(2, 8)).sum().backward()


@shapes_of_collectives
def test_fsdp(group):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    model = net()
    for layer in (model[0], model[3], model):
        fsdp.fully_shard(layer, mesh=group)
    check(model)
    model(torch.rand(2, 8)).sum().backward()
    assert type(model[0].weight.grad).__name__ == "DTensor"


@shapes_of_collectives
def test_tensor_parallel(group):
    parallel = pytest.importorskip("torch.distributed.tensor.parallel")
    plan = {"0": parallel.ColwiseParallel(), "3": parallel.RowwiseParallel()}
    model = parallel.parallelize_module(net(), group, plan)
    assert "placements" in check(model, execution="real").fallback_reason


@shapes_of_collectives
def test_tensors_over_devices(group):
    tensor = pytest.importorskip("torch.distributed.tensor")
    check(tensor.distribute_module(net(), group), tensor.DTensor.from_local(torch.rand(2, 8), group))


def test_inference_mode():
    with torch.inference_mode():
        check(net())
        model, x = net(), torch.rand(2, 8)
    check(model, x)


def test_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "autocast" in check(net(), execution="real").fallback_reason


class Functional(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.body, self.kind = net(), kind

    def forward(self, x):
        if self.kind == "vmap":
            return torch.func.vmap(self.body)(x)
        return torch.func.functional_call(self.body, dict(self.body.named_parameters()), (x,))


@pytest.mark.parametrize("kind", ["vmap", "functional_call"])
def test_functional_transforms(kind):
    check(Functional(kind))


class Named(torch.Tensor):
    """A subclass that changes nothing."""


def test_subclasses_of_tensor():
    check(net(), torch.rand(2, 8).as_subclass(Named))
    model = net()
    model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(Named))
    check(model)
    weight = model[3].weight.detach()
    model[3].weight = nn.Parameter(TwoTensor(weight, weight.clone()))
    check(model)

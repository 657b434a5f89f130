"""A summary in one or both of two processes: the model continues to train as without a summary."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from modelsummary import ForwardError, Statistics
from tests.models import Call
from tests.parallel import processes
from tests.untouched import untouched

knows_shapes = torch.torch_version.TorchVersion(torch.__version__) >= "2.10"  # of collectives


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def wrapped(kind):
    model = net()
    if kind == "DDP":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for layer in (model[0], model[3], model):
        fully_shard(layer, mesh=mesh)
    return model


def gradients(model, x):
    model.zero_grad()
    model(x).square().sum().backward()
    return [getattr(each.grad, "_local_tensor", each.grad) for each in model.parameters()]


def refuse(*_):
    raise ValueError("no")


def summarise(rank, _n, kind):
    """Run one of the two processes."""
    torch.manual_seed(1 + rank)
    x, expected = torch.rand(3, 8), Statistics(net(), (3, 8))
    figures = [(row.fqn, row.num_params, row.macs, row.output_size) for row in expected]
    reference, model = wrapped(kind), wrapped(kind)

    def trains():
        for ours, theirs in zip(gradients(model, x), gradients(reference, x), strict=True):
            assert torch.equal(ours, theirs)

    for _ in range(2):  # before the first step, when FSDP has no buffers yet, and after it
        for execution in ("auto", "real"):
            with untouched(model):
                stats = Statistics(model, x, execution=execution)
            assert [(row.fqn, row.num_params, row.macs, row.output_size) for row in stats] == figures
        trains()
    hook = (model.module if kind == "DDP" else model)[2].register_forward_hook(refuse)
    for execution in ("auto", "real"):
        with untouched(model), pytest.raises(ForwardError, match="no"):
            Statistics(model, x, execution=execution)
    if knows_shapes and rank == 0:  # the other process does not take part in collectives
        with untouched(model), pytest.raises(ForwardError, match="no"):
            Statistics(model, x, execution="shape")
    hook.remove()
    if knows_shapes and rank == 0:
        with untouched(model):
            stats = Statistics(model, x)
            once, again = (stats.memory(optimizer="adamw", accumulates=accumulates) for accumulates in (False, True))
            assert stats.execution == once.execution == again.execution == "shape"
        assert once.grads == again.grads == once.params  # all parameters get a gradient
        assert once.optimizer_state == again.optimizer_state > 2 * once.params
    trains()


def reduce(rank, _n):
    """Known values are not sent to other processes either, and are unknown afterwards."""

    def forward(self, x):
        dist.all_reduce(self.count)
        return x if int(self.count) > 2 else 2 * x

    model = Call(forward)
    model.register_buffer("count", torch.tensor(2))
    if knows_shapes and rank == 0:
        with untouched(model), pytest.raises(ForwardError, match="needs the values"):
            Statistics(model, (3, 8), execution="shape")
    with untouched(model):
        stats = Statistics(model, (3, 8))
    assert stats.execution == "real"
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    assert total == 3


@pytest.mark.parametrize("kind", ["DDP", "FSDP"])
def test_wrapped_models(kind):
    if kind == "FSDP":
        pytest.importorskip("torch.distributed.fsdp")
        if not knows_shapes:
            pytest.skip("collectives of older versions know no shapes")
    processes.run(summarise, 2, kind)


def test_collectives_of_known_values():
    processes.run(reduce, 2)

"""Models in wrappers and modes of torch, and with tensor subclasses: same figures, model untouched."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from modelsummary import ForwardError, InputError, Statistics
from modelsummary.parallel.applied_rank import fake_world
from tests.models import Call
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
    check(parallel.parallelize_module(net(), group, plan))


@shapes_of_collectives
@pytest.mark.parametrize("execution", ["shape", "real"])
def test_figures_of_a_rank(execution):
    """One of two ranks holds and multiplies half of each layer; the model's parameters are counted in full."""
    parallel = pytest.importorskip("torch.distributed.tensor.parallel")
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=2)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
        model = parallel.parallelize_module(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), mesh, plan)
        x = torch.rand(2, 8)
        with untouched(model):
            stats = Statistics(model, x, execution=execution)
    finally:
        dist.destroy_process_group()
    assert (stats.execution, stats.uncounted_ops) == (execution, {})
    assert stats.total_params == 8 * 16 + 16 + 16 * 4 + 4
    assert stats.total_param_bytes == 4 * (8 * 16 // 2 + 16 // 2 + 16 * 4 // 2 + 4)  # each rank has the last bias
    assert stats.total_mult_adds == 2 * (8 * 16 + 16 * 4) // 2


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
        check(net())


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


# ----------------------------------------------------------------------------------------- tensor subclasses


class Named(torch.Tensor):
    """A subclass that changes nothing."""


class Int8(torch.Tensor):
    """A weight kept in int8 with one scale per row; products are computed in floating point."""

    @staticmethod
    def __new__(cls, stored, scale):
        return torch.Tensor._make_wrapper_subclass(cls, stored.shape, dtype=scale.dtype, device=stored.device)

    def __init__(self, stored, scale):
        self.stored, self.scale = stored, scale

    def __tensor_flatten__(self):
        return ["stored", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["stored"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(func(args[0].stored), func(args[0].scale))
        if func is torch.ops.aten.mul_.Tensor:
            args[0].scale.mul_(args[1])
            return args[0]
        plain = (each.stored * each.scale if isinstance(each, cls) else each for each in args)
        return func(*plain, **(kwargs or {}))


def int8(weight):
    scale = weight.detach().abs().amax(1, keepdim=True) / 127
    return nn.Parameter(Int8((weight.detach() / scale).round().to(torch.int8), scale), requires_grad=False)


def test_subclasses_of_tensor():
    check(net(), torch.rand(2, 8).as_subclass(Named))
    model = net()
    model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(Named))
    check(model)
    model = net()  # a plain call refuses to mix the two classes
    weight = model[3].weight.detach()
    model[3].weight = nn.Parameter(TwoTensor(weight, weight.clone()))
    execution = "shape" if torch.__version__ >= "2.11" else "real"  # its class made no tensors on shapes
    check(model, execution=execution)
    model[0].weight = int8(model[0].weight)
    check(model, execution=execution)


def twice(self, x):
    self.state.mul_(2)
    return x.mul_(2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.parametrize("execution", ["auto", "real"])
@pytest.mark.parametrize("kind", ["int8", "two", "jagged", "masked"])
def test_written_in_place(kind, execution):
    """The inner tensors of a wrapper are restored, in the model and in an input."""
    values = torch.arange(1.0, 7.0).view(2, 3)
    state, x = {
        "int8": lambda: (int8(values).data, values),
        "two": lambda: (TwoTensor(values.clone(), values.clone()), TwoTensor(values, values.clone())),
        "jagged": lambda: (values, torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2]))),
        "masked": lambda: (values.clone(), torch.masked.masked_tensor(values, values > 2)),
    }[kind]()
    model = Call(twice)
    model.register_buffer("state", state)
    with untouched(model):
        Statistics(model, x, execution=execution)
    assert torch.equal(values, torch.arange(1.0, 7.0).view(2, 3))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 16) for _ in range(3))
        self.out = nn.Linear(16, 8)

    def forward(self, x):
        parts = (layer(x).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return self.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(-2))


def ragged(layout):
    """A nested tensor with sequences of lengths 3 and 5."""
    return torch.nested.nested_tensor([torch.rand(3, 8), torch.rand(5, 8)], layout=layout)


def test_jagged_tensors():
    model, x = net(), ragged(torch.jagged)
    with untouched(model):
        stats = Statistics(model, x)
    assert stats.total_mult_adds == (3 + 5) * (8 * 16 + 16 * 4)
    assert (stats["0"].output_size, stats["0"].output_bytes) == ("?", (3 + 5) * 16 * 4)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_attention_of_jagged_tensors():
    model, x = Attention(), ragged(torch.jagged)
    with untouched(model):
        stats = Statistics(model, x)
    assert stats.execution == "real"
    scores_and_values = 2 * 2 * (3 * 3 + 5 * 5) * 8  # two heads of size 8, each sequence with itself
    assert stats.total_mult_adds == (3 + 5) * 4 * 8 * 16 + scores_and_values
    assert stats.uncounted_ops == {}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_strided_nested_tensors():
    model, x = net(), ragged(torch.strided)
    with untouched(model):
        stats = Statistics(model, x)
    assert stats.execution == "real"
    assert stats.fallback_reason.startswith("a nested tensor cannot run on shapes")
    assert (stats.total_mult_adds, stats.uncounted_ops) == ((3 + 5) * (8 * 16 + 16 * 4), {})
    with untouched(model), pytest.raises(ForwardError):
        Statistics(model, x, execution="shape")


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_tensors(layout):
    model = Call(lambda self, x: torch.sparse.mm(self.adjacency, self.linear(x)), linear=nn.Linear(8, 4))
    model.register_buffer("adjacency", torch.eye(3).to_sparse(layout=layout))
    x = torch.rand(3, 8)
    with untouched(model):
        stats = Statistics(model, x)
    assert (stats.execution, stats["linear"].macs) == ("real", 3 * 8 * 4)
    # three stored elements, four columns
    assert (stats.total_mult_adds, stats.uncounted_ops) == (3 * 8 * 4 + 3 * 4, {})
    if layout is torch.sparse_coo:
        return  # a linear layer refuses such a weight
    weight = nn.Linear(8, 4)
    weight.weight = nn.Parameter(weight.weight.detach().to_sparse(layout=layout), requires_grad=False)
    with untouched(weight):
        stats = Statistics(weight, x)
    assert stats.total_mult_adds == 3 * 8 * 4  # every element is stored


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_masked_tensors():
    model = Call(lambda self, x: (x * 2).sum(1))
    x = torch.masked.masked_tensor(torch.rand(2, 8), torch.rand(2, 8) > 0.5)
    for execution in ("shape", "real"):
        with untouched(model):
            stats = Statistics(model, x, execution=execution)
        assert stats.root.input_size == [2, 8]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_tensors_of_other_layouts():
    model = Call(lambda self, x: self.linear(x.to_dense()), linear=nn.Linear(8, 4))
    x = torch.rand(2, 8).to_mkldnn()
    with untouched(model):
        stats = Statistics(model, x)
    assert stats.fallback_reason.startswith("a torch._mkldnn tensor cannot run on shapes")
    assert stats.total_mult_adds == 2 * 8 * 4


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("has_run", [False, True])
def test_fsdp1_is_refused(has_run):
    """Its flat shards have neither the shapes nor the number of the parameters."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    with fake_world(0, 2):
        model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
        if has_run:
            model(torch.rand(2, 8)).sum().backward()
        for x in ((torch.rand(2, 8),), ()):
            with pytest.raises(
                InputError, match=rf"the {PARAMS} parameters as flat shards, {PARAMS // 2} of them on this"
            ):
                Statistics(model, *x)

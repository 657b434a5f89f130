"""Shape-only execution: same shapes as a real run, cached results like the first ones, known values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from modelsummary import ForwardError, Statistics
from modelsummary.capture.execution import known_values, shape_only
from modelsummary.capture.execution.shape_only import ShapeOnly
from modelsummary.operators.operator_rules import op_rule
from tests.models import Call
from tests.untouched import untouched

aten = torch.ops.aten


def run(shapes, func, *args, **kwargs):
    return shapes.run(func, op_rule(func), args, kwargs)[0]


def same_metadata(a, b):
    return (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


OPERATORS = [
    (aten.relu.default, lambda x: (x,)),
    (aten.add.Tensor, lambda x: (x, x[:1])),
    (aten.add.Tensor, lambda x: (x, 1)),
    (aten.add.Tensor, lambda x: (x, 1.0)),
    (aten.sum.dim_IntList, lambda x: (x, [0])),
    (aten.native_layer_norm.default, lambda x: (x, [x.shape[-1]], None, None, 1e-5)),
    (aten._softmax.default, lambda x: (x, -1, False)),
    (aten.clone.default, lambda x: (x,)),
    (aten.cat.default, lambda x: ([x, x], 0)),
    (aten.var_mean.correction, lambda x: (x,)),
    (aten.sort.default, lambda x: (x,)),
    (aten.mul_.Tensor, lambda x: (x.clone(), 2)),
    (aten.gt.Scalar, lambda x: (x, 0)),
]


@given(
    st.sampled_from(OPERATORS),
    st.lists(st.integers(1, 4), min_size=2, max_size=4),
    st.permutations([0, 1, 2, 3]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
)
@settings(max_examples=150, deadline=None)
def test_a_remembered_result_is_like_the_meta_kernel_s(operator, shape, order, dtype):
    """The first call runs the kernel, the second uses the cached result; both must equal the meta kernel's result."""
    func, arguments = operator
    x = torch.empty(shape, dtype=dtype, device="meta").permute([dim for dim in order if dim < len(shape)])
    try:
        expected = func(*arguments(x))
    except (RuntimeError, NotImplementedError):
        return  # the operator refuses this dtype
    shapes = ShapeOnly()
    for _ in range(2):
        out = run(shapes, func, *arguments(x))
        pairs = zip(out, expected, strict=True) if isinstance(out, tuple) else [(out, expected)]
        assert all(same_metadata(*pair) for pair in pairs)


def test_equal_numbers_of_another_type_are_another_call():
    """1 == 1.0 == True, but an integer tensor plus 1.0 is a float tensor."""
    shapes, x = ShapeOnly(), torch.empty(3, dtype=torch.int64, device="meta")
    assert run(shapes, aten.add.Tensor, x, 1).dtype == torch.int64
    assert run(shapes, aten.add.Tensor, x, 1.0).dtype == torch.float32


def test_outputs_are_separate_tensors():
    shapes, x = ShapeOnly(), torch.empty(3, device="meta")
    first, second = (run(shapes, aten.relu.default, x) for _ in range(2))
    assert first is not second
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata


def test_views_share_their_storage_each_time():
    shapes = ShapeOnly()
    for x in (torch.empty(4, device="meta"), torch.empty(4, device="meta")):
        view = run(shapes, aten.view.default, x, [2, 2])
        assert view.untyped_storage()._cdata == x.untyped_storage()._cdata


def test_views_begin_where_their_argument_does():
    """The result of the second call is made from the first one's sizes and its offset in its argument."""
    shapes = ShapeOnly(torch.device("cpu"))
    whole = shapes.input(torch.rand(3, 8))
    for row in range(3):
        argument = run(shapes, aten.select.int, whole, 0, row)
        halves = run(shapes, aten.split.Tensor, argument, 4)
        assert [half.storage_offset() for half in halves] == [8 * row, 8 * row + 4]
        assert all(half.untyped_storage()._cdata == whole.untyped_storage()._cdata for half in halves)
        assert run(shapes, aten.as_strided.default, argument, [2], [1], 1).storage_offset() == 1
        assert run(shapes, aten.select.int, torch.empty(3, 8, device="meta"), 0, row).is_meta  # made by the forward


def executed(function, **modules):
    model = Call(function, **modules)
    x = torch.rand(2, 4)
    with untouched(model):
        stats = Statistics(model, x)
    real = Statistics(model, x, execution="real")
    assert stats.root.output_size == real.root.output_size
    return stats


SHAPES_SUFFICE = {
    "factories on the default device": lambda self, x: x + torch.arange(4) + torch.zeros(4) + torch.tensor([1.0] * 4),
    "factories on the device of a parameter": lambda self, x: x + torch.ones(4, device=self.linear.weight.device),
    "moving to a device": lambda self, x: self.linear(x.to("cpu").cpu()),
    "moving to the place of a parameter": lambda self, x: x.to(self.linear.weight),
    "random numbers": lambda self, x: F.dropout(x, 0.5, True) + torch.rand(4) + torch.randn_like(x),
    "a generator": lambda self, x: x + torch.rand(4, generator=torch.Generator().manual_seed(1)),
    "a decision on a constant": lambda self, x: x if torch.arange(3).sum().item() == 3 else x[:1],
    "a loop over a constant": lambda self, x: x * sum(torch.linspace(0, 1, 3).tolist()),
    "a constant as numpy": lambda self, x: x * float(torch.linspace(0, 1, 3).cpu().numpy().sum()),
    "a decision on a constant as numpy": lambda self, x: x if torch.arange(3).numpy().sum() == 3 else x[:1],
    "numpy arrays": lambda self, x: x * torch.from_numpy(__import__("numpy").ones(4, dtype="float32")),
    "a decision on a buffer": lambda self, x: x if self.norm.num_batches_tracked == 0 else x[:1],
    "a decision on a changed buffer": lambda self, x: x[:1] if self.norm.num_batches_tracked.add_(1).item() == 1 else x,
    "text of a constant": lambda self, x: x[: len(f"{torch.arange(3).sum():d}")],
    "text of a tensor": lambda self, x: (f"{x} {x.mean()}", x)[1],
    "a scalar parameter": lambda self, x: x * self.prelu.weight.item(),
    "nonzero of a constant": lambda self, x: x[:, torch.tensor([1, 0, 1, 0]).nonzero().squeeze(1)],
    "integer indices": lambda self, x: x[torch.tensor([0, 1, 1])],
    "indices from the input": lambda self, x: x[:, x[0].argsort()],
    "writing into a new tensor": lambda self, x: torch.zeros(2, 4).copy_(x),
    "writing through a mask": lambda self, x: x.clone().masked_fill_(x > 0, 0.0),
    "inference mode": lambda self, x: torch.inference_mode()(lambda: self.linear(x) @ torch.rand(4, 3))(),
    "vmap": lambda self, x: torch.func.vmap(self.linear)(x),
    "functional call": lambda self, x: torch.func.functional_call(self.linear, {"weight": torch.ones(4, 4)}, x),
    "checkpoint": lambda self, x: torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=False),
    "gradient inside": lambda self, x: torch.autograd.grad(self.linear(x.requires_grad_()).sum(), x)[0],
}


def modules():
    return {"linear": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4, momentum=None), "prelu": nn.PReLU()}


@pytest.mark.parametrize("case", SHAPES_SUFFICE)
def test_shapes_suffice(case):
    stats = executed(SHAPES_SUFFICE[case], **modules())
    assert stats.execution == "shape"
    assert stats.fallback_reason is None


VALUES_DECIDE = {
    "item": (lambda self, x: x if x.sum().item() > 0 else x[:1], "aten._local_scalar_dense needs the values"),
    "bool": (lambda self, x: x if (x >= 0).all() else x[:1], "needs the values"),
    "mask": (lambda self, x: x[x[:, 0] >= 0.0], "aten.index needs the values"),
    "nonzero": (lambda self, x: (x >= 0).nonzero(), "aten.nonzero needs the values"),
    "unique": (lambda self, x: torch.zeros_like(x).unique(), "aten._unique2 needs the values"),
    "tolist": (lambda self, x: x * len(x.tolist()), "tolist() needs the values"),
    "numpy": (lambda self, x: x * x.numpy().shape[0], "numpy() needs the values"),
    "overwritten constant": (
        lambda self, x: x if torch.zeros(2, 4).copy_(x).sum().item() >= 0 else x[:1],
        "needs the values",
    ),
    "view of an overwritten constant": (
        lambda self, x: (zeros := torch.zeros(2, 4), view := zeros[0], zeros.copy_(x), x[: int(view.sum() >= 0)])[3],
        "needs the values",
    ),
    "text": (lambda self, x: x[: len(f"{x.mean():.0f}")], "aten._local_scalar_dense needs the values"),
    "lengths": (
        lambda self, x: nn.utils.rnn.pack_padded_sequence(x, x[:, 0].int().cpu() * 0 + 2, True).data,
        "aten._pack_padded_sequence cannot run on shapes",
    ),
    "random constant": (lambda self, x: x if torch.rand(3).sum().item() >= 0 else x[:1], "needs the values"),
}


@pytest.mark.parametrize("case", VALUES_DECIDE)
def test_values_decide(case):
    function, reason = VALUES_DECIDE[case]
    stats = executed(function, **modules())
    assert stats.execution == "real"
    assert reason in stats.fallback_reason
    assert f"Execution: real, because {stats.fallback_reason}" in " ".join(str(stats).split())


def test_shape_only_says_what_it_needs():
    model = Call(lambda self, x: x if x.sum() > 0 else -x)
    with untouched(model), pytest.raises(ForwardError, match=r"aten\._local_scalar_dense needs the values .* use exec"):
        Statistics(model, (2, 4), execution="shape")


def test_a_model_on_meta_cannot_fall_back():
    model = Call(lambda self, x: x if self.linear(x).sum() > 0 else -x, linear=nn.Linear(4, 4, device="meta"))
    with untouched(model), pytest.raises(ForwardError, match="needs the values"):
        Statistics(model, (2, 4))


def test_known_values_never_write_into_the_model():
    norm = nn.BatchNorm1d(4, momentum=None)
    model = Call(lambda self, x: x * float(self.norm.num_batches_tracked.add_(7)), norm=norm)
    with untouched(model):
        assert Statistics(model, (2, 4)).execution == "shape"
    assert norm.num_batches_tracked.item() == 0


def caught(self, x):
    try:
        times = int(x.abs().sum() * 0) + 2
    except Exception:
        times = 1
    return x.repeat(times, 1)


STALE = {
    "adding to a constant": lambda self, x: (t := torch.arange(3), t.add_(5), x.repeat(t.tolist()[0] + 1, 1))[2],
    "turning a constant": lambda self, x: (t := torch.zeros(2), t.unsqueeze_(0), x.repeat(t.dim(), 1))[2],
    "transposing a constant": lambda self, x: (v := torch.zeros(2, 3), v.transpose_(0, 1), x.new_zeros(v.shape))[2],
    "a copy on the CPU, changed": lambda self, x: (
        c := torch.arange(3).cpu(),
        c.add_(5),
        x.repeat(c.tolist()[0] + 1, 1),
    )[2],
    "a buffer that the input wrote": lambda self, x: (
        self.norm.running_mean.copy_(x[0] * 0 + 3),
        x.repeat(int(self.norm.running_mean.tolist()[0]), 1),
    )[1],
    "caught": caught,
    "a tensor in a list": lambda self, x: (self.kept[0].add_(2), x.repeat(int(self.kept[0][0]), 1))[1],
}


@pytest.mark.parametrize("case", STALE)
def test_python_never_reads_a_stale_value(case):
    model = Call(STALE[case], **modules())
    model.kept = [torch.ones(1)]
    with untouched(model):
        stats = Statistics(model, torch.ones(1, 4))
    assert stats.root.output_size == Statistics(model, torch.ones(1, 4), execution="real").root.output_size


def test_integer_and_boolean_inputs_are_known():
    """Attention masks decide which branch is taken, not what is computed in it."""
    model = Call(lambda self, x, mask: x if mask.all() else x[:1])
    for mask in (torch.ones(2, dtype=torch.bool), torch.tensor([1, 0])):
        stats = Statistics(model, torch.rand(2, 4), mask)
        assert stats.execution == "shape"
        assert stats.root.output_size == [2 if mask.all() else 1, 4]
    on_meta = Call(lambda self, ids, mask: self.e(ids) if mask.all() else ids, e=nn.Embedding(9, 4, device="meta"))
    stats = Statistics(on_meta, torch.ones(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.long))
    assert stats.root.output_size == [2, 3, 4]


SAME_DEVICE = {
    "states of an LSTM": lambda self, x: self.lstm(x[None], (torch.zeros(1, 2, 5), torch.zeros(1, 2, 5)))[0],
    "a query of attention": lambda self, x: F.scaled_dot_product_attention(self.query, x, x),
    "a distribution": lambda self, x: torch.distributions.Normal(x, x.exp() + self.query.exp()).rsample(),
}


@pytest.mark.parametrize("case", SAME_DEVICE)
def test_functions_that_compare_devices(case):
    model = Call(SAME_DEVICE[case], lstm=nn.LSTM(4, 5))
    model.query = nn.Parameter(torch.rand(2, 4))
    with untouched(model):
        stats = Statistics(model, torch.ones(2, 4))
    assert stats.execution == "shape"


def test_under_autocast_bytes_are_those_of_autocast():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stats = Statistics(model, (2, 4))
        on_meta = Statistics(nn.Linear(4, 4, device="meta"), (2, 4))
    assert (stats.execution, stats["0"].output_bytes) == ("shape", 16)
    assert (on_meta.root.output_bytes, on_meta.root.note) == (16, "")


def test_a_model_on_meta_is_cast_by_the_autocast_of_cuda_around_it():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).to("meta")
    inside = Call(lambda self, x: under_cuda(lambda: self.linear(x)), linear=nn.Linear(4, 4, device="meta"))
    stats = under_cuda(lambda: Statistics(model, (2, 4)))
    assert [row.output_bytes for row in stats.root.walk()] == [32, 16, 32]  # CUDA's norms run in float32
    assert stats.root.note == ""
    assert "without autocast" in Statistics(inside, (2, 4)).root.note


def under_cuda(run):
    """Run with autocast on for CUDA, which ``torch.autocast`` switches off without a device."""
    dtype = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        return run()
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", dtype)


def test_fused_attention_moves_the_same_bytes_on_meta():
    size = batch, length, width = 1, 512, 64
    model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    stats, on_meta = Statistics(model, size), Statistics(model.to("meta"), size)
    figures = ("macs", "bytes_read", "bytes_written", "elementwise_ops")
    for row, other in zip(stats.root.walk(), on_meta.root.walk(), strict=True):
        assert [getattr(row, name) for name in figures] == [getattr(other, name) for name in figures]
    scores = batch * 4 * length * length * 4  # of 4 heads; to write and read them once takes twice these bytes
    attention = on_meta["self_attn"]
    assert attention.self_bytes_read + attention.self_bytes_written < scores + 40 * batch * length * width


def test_a_forward_on_meta_may_ask_for_autocast_and_for_the_device_of_its_tensors():
    model = Call(
        lambda self, x: self.linear(x) + torch.ones(4, device=self.device) * torch.is_autocast_enabled(x.device.type),
        linear=nn.Linear(4, 4, device="meta"),
    )
    model.device = torch.device("meta")
    stats = Statistics(model, (2, 4))
    assert (stats.execution, stats.root.macs) == ("shape", 32)
    asks = Call(
        lambda self, x: self.down(self.up(x) * (1 + torch.is_autocast_enabled(x.device.type))),
        up=nn.Linear(4, 8, device="meta"),
        down=nn.Linear(8, 4, device="meta"),
    )
    styles = str(Statistics(asks, (2, 4)).parallel_plan(2))  # runs the model of one rank
    assert "RowwiseParallel" in styles
    assert "whole activations" not in styles


def test_gradients_are_taken_where_the_forward_needs_them():
    hooks = Call(
        lambda self, x: (y := self.linear(x), y.register_hook(lambda g: g), y.retain_grad(), y)[-1], **modules()
    )
    with untouched(hooks):
        assert Statistics(hooks, torch.ones(2, 4)).execution == "shape"


def test_memory_of_overwritten_tensors_is_not_taken_for_another():
    def forward(self, x):
        keep = torch.arange(3)
        for i in range(200):
            z = x * 2
            w = z + 1
            z.add_(1)
            w.relu_()
            del z, w
            k = torch.full((i % 7 + 1,), 2)
            x = x * int(k.sum() > 0)
        return x + keep.sum()

    assert Statistics(Call(forward), torch.ones(2, 4)).execution == "shape"


DTYPES = {
    "half layer, float input": lambda: (nn.Linear(4, 4).half(), torch.ones(2, 4)),
    "float64 array": lambda: (nn.Linear(4, 4), np.ones((2, 4))),
    "integers into a linear layer": lambda: (nn.Linear(4, 4), torch.ones(2, 4, dtype=torch.long)),
    "half norm, float input": lambda: (nn.LayerNorm(4).half(), torch.ones(2, 4)),
    "a product of two dtypes": lambda: (Call(lambda self, a: a @ a.half().t()), torch.ones(2, 4)),
}


@pytest.mark.parametrize("execution", ["shape", "auto"])
@pytest.mark.parametrize("case", DTYPES)
def test_dtypes_that_a_real_run_refuses_are_refused(case, execution):
    model, x = DTYPES[case]()
    with pytest.raises(ForwardError):
        Statistics(model, x, execution="real")
    with pytest.raises(ForwardError):
        Statistics(model, x, execution=execution)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dtypes_that_a_real_run_takes_are_taken(dtype):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4), nn.GroupNorm(2, 4)).to(dtype)
    assert Statistics(model, (2, 4)).execution == "shape"
    norms = nn.Sequential(nn.LayerNorm(4))
    if dtype == torch.bfloat16:
        assert Statistics(norms, torch.ones(2, 4, dtype=dtype)).execution == "shape"


def test_exchanged_data_is_not_known_by_its_old_values():
    def forward(self, x):
        self.n.data = torch.tensor([4, 5, 6])
        return torch.zeros(int(self.n[0]))

    model = Call(forward)
    model.register_buffer("n", torch.tensor([3, 4]))
    with untouched(model):
        assert Statistics(model, torch.ones(1)).root.output_size == [4]


# ------------------------------------------------------------------------------- values that change unseen


def branching(condition, prepare=lambda model: None):
    """A forward that takes the small layer (24 MACs for a batch of 3) if ``condition`` holds, else the large one."""
    model = Call(lambda self, x: (self.a if condition(self, x) else self.b)(x), a=nn.Linear(4, 2), b=nn.Linear(4, 300))
    prepare(model)
    return model


def changed_array(_model, _x):
    array = np.zeros(2, dtype=np.int64)
    later = torch.from_numpy(array) + 1  # computed with the current values
    array[0] = 5
    return bool(later[0] == 1)


def with_view(model):
    model.register_buffer("whole", torch.zeros(4))
    model.register_buffer("part", model.whole[:2])


def with_expanded(model):
    model.register_buffer("one", torch.zeros(1).expand(4))


def norm(model):
    model.norm = nn.BatchNorm1d(4)


@pytest.mark.parametrize(
    ("condition", "prepare"),
    [
        (changed_array, lambda model: None),
        (lambda self, _: bool(self.whole.add_(1).sum() > 0 and self.part.sum() > 0), with_view),
        (lambda self, _: bool(self.part.add_(1).sum() > 0 and self.whole.sum() > 0), with_view),
        (lambda self, _: bool(self.one[0].fill_(1) > 0 and self.one.sum() == 4), with_expanded),
        # running statistics are written, although the schema of the operator does not declare it
        (lambda self, x: bool(self.norm(x).dim() == 2 and self.norm.running_mean.sum() > 0), norm),
        (lambda self, x: bool(self.norm(x).dim() == 2 and self.norm.running_var.sum() < 4), norm),
    ],
)
def test_values_that_change(condition, prepare):
    x = torch.rand(3, 4) + 5
    really = Statistics(branching(condition, prepare), x, execution="real")
    assert Statistics(branching(condition, prepare), x).total_mult_adds == really.total_mult_adds == 24


def test_values_of_stray_tensors_are_where_operators_on_values_run(monkeypatch):
    """``torch.tensor(3, device="cuda")`` in a forward makes a real tensor; other known values are on the CPU."""
    monkeypatch.setattr(known_values, "_CPU", torch.device("meta"))  # any device that is not the tensor's
    known, twin = known_values.KnownValues(), torch.empty(2, device="meta")
    known.borrow(twin, torch.ones(2), copy=True)
    assert known.value(twin).device.type == "meta"


def test_deferred_values():
    def condition(_model, x):
        mask = torch.ones(3, 3).tril()
        first = mask.sum()  # reads the mask before it is written
        mask.fill_(0)
        chain = torch.zeros(())
        for _ in range(3000):  # deep, but without recursion
            chain = chain + 1
        return bool(first == 6 and mask.sum() == 0 and chain == 3000)

    stats = Statistics(branching(condition), (3, 4))
    assert (stats.execution, stats.total_mult_adds) == ("shape", 24)


def test_a_known_mask_selects_from_unknown_values():
    def forward(self, x, mask):
        y = self.a(x)
        return self.a(y[mask]).sum() + y[0, mask[0]].sum() + y[:, torch.tensor([True, False, True])].sum()

    model, x = Call(forward, a=nn.Linear(4, 4)), torch.rand(2, 3, 4)
    mask = torch.tensor([[True, False, True], [False, False, True]])
    shapes = Statistics(model, (x, mask), execution="shape")
    real = Statistics(model, (x, mask), execution="real")
    assert shapes.total_mult_adds == real.total_mult_adds == 6 * 16 + 3 * 16
    assert shapes.to_records() == real.to_records()
    assert shapes["a"].output_size == [2, 3, 4]


def test_results_are_remembered_by_the_default_dtype():
    model, x = Call(lambda model, x: x + torch.ones(2)), torch.ones(2, dtype=torch.float16)
    dtype = torch.get_default_dtype()
    nbytes = []
    for default in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(default)
        try:
            nbytes.append(Statistics(model, x)[""].output_bytes)
        finally:
            torch.set_default_dtype(dtype)
    assert nbytes == [8, 16, 8]


def test_results_are_remembered_only_of_torch_s_own_operators():
    """The shapes of another library's operator may be registered anew."""
    namespace, sizes = "modelsummary_again", []
    with torch.library._scoped_library(namespace, "FRAGMENT") as library:
        library.define("resized(Tensor x) -> Tensor")
        for size in (3, 5):
            with torch.library._scoped_library(namespace, "FRAGMENT") as shapes:
                torch.library.register_fake(f"{namespace}::resized", lambda x, size=size: x.new_empty(size), lib=shapes)
                model = Call(lambda model, x: torch.ops.modelsummary_again.resized.default(x))
                sizes.append(Statistics(model, (2,)).root.output_size)
    assert sizes == [[3], [5]]


def test_a_run_keeps_what_it_remembered_while_another_one_begins(monkeypatch):
    monkeypatch.setattr(shape_only, "_remembered", {})
    monkeypatch.setattr(shape_only, "_MOST_REMEMBERED", 0)
    x = torch.ones(2)
    first = ShapeOnly(torch.device("cpu"))
    run(first, aten.relu.default, x)
    run(ShapeOnly(torch.device("cpu")), aten.neg.default, x)
    run(first, aten.relu.default, x)
    remembered = first.distinct[0]
    run(first, aten.relu.default, x)
    assert first.distinct[0] is remembered


def test_a_remembered_result_has_a_storage_of_the_same_size():
    """Bags of embeddings return a part of what they made: one offset per index, of one more."""
    arguments = torch.ones(10, 4), torch.tensor([1, 2, 3]), torch.tensor([0, 2])
    nbytes = []
    for _ in range(2):
        shapes = ShapeOnly(torch.device("cpu"))
        out = run(shapes, aten._embedding_bag.default, *arguments, False, 0, False, None, False, 0)
        nbytes.append([part.untyped_storage().nbytes() for part in out])
    assert nbytes[0] == nbytes[1]
    assert nbytes[1][1] == 4 * 8


class LooksUp(nn.Module):
    def __init__(self, look_up, indices):
        super().__init__()
        self.look_up = look_up
        self.register_buffer("mask", torch.tensor([[True, False, True], [False, True, True]]))
        self.register_buffer("indices", torch.tensor(indices))

    def forward(self, x):
        return self.look_up(x, self.mask, self.indices)


# a mask of two dimensions takes two; a number has one place, and no place from its end
LOOK_UPS = {
    "behind a mask": (lambda x, mask, i: x[mask, i], [40, 41, 42, 49], [40, 41, 42, 50]),
    "from the end": (lambda x, mask, i: x[:, :, i], [-50], [-51]),
    "gather of a number": (lambda x, mask, i: x.sum().gather(0, i), [0], [1]),
    "index_select": (lambda x, mask, i: x.index_select(2, i), [49], [50]),
}


@pytest.mark.parametrize("name", LOOK_UPS)
def test_indices_are_refused_where_a_run_refuses_them(name):
    look_up, valid, wrong = LOOK_UPS[name]
    x = torch.rand(2, 3, 50)
    LooksUp(look_up, valid)(x)
    Statistics(LooksUp(look_up, valid), x, execution="shape")
    with pytest.raises((IndexError, RuntimeError)):
        LooksUp(look_up, wrong)(x)
    with pytest.raises(
        ForwardError, match=rf"index {wrong[-1]} is out of range for a tensor of shape \[.*\]; pass 0 to"
    ):
        Statistics(LooksUp(look_up, wrong), x, execution="shape")

"""The rows of a run: their places in the tree, and their sums."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from modelsummary import Statistics
from tests.models import Attention, Call, Decoder, Nested, Stack


def outline(stats):
    """(depth, fqn, executed) of each row."""
    return [(row.depth, row.fqn, row.executed) for row in stats]


def test_containers_that_are_never_called_get_a_row():
    stats = Statistics(Stack(), (2, 4))
    assert outline(stats) == [
        (1, "layers", False),
        (2, "layers.0", True),
        (2, "layers.1", True),
        (1, "heads", False),
        (2, "heads.used", True),
        (2, "heads.unused", False),
    ]
    assert stats["layers"].macs == 2 * 32  # two linears of 2*4*4
    assert stats["layers"].self_macs == 0
    assert [repr(row) for row in stats] == [
        "ModuleList: 1-1",
        "Linear: 2-1",
        "Linear: 2-2",
        "ModuleDict: 1-2",
        "Linear: 2-3",
        "Linear: 2-4",
    ]


def test_a_module_called_again_has_another_row():
    shared = nn.Linear(4, 4)
    stats = Statistics(nn.Sequential(shared, nn.ReLU(), shared), (2, 4))
    first, relu, second = stats
    assert (first.fqn, second.fqn) == ("0", "0")
    assert (first.call_index, second.call_index) == (0, 1)
    assert (first.is_recursive, second.is_recursive) == (False, True)
    assert (first.self_params, second.self_params) == (20, 0)
    assert (first.macs, second.macs) == (32, 32)
    assert stats.total_params == 20
    assert stats.calls("0") == [first, second]
    assert stats["2"] is first  # the other path to the same module
    assert not relu.is_recursive


def test_a_tied_tensor_is_counted_where_it_first_appears():
    model = Decoder()
    stats = Statistics(model, torch.zeros(2, 6, dtype=torch.long))
    assert stats.total_params == sum(p.numel() for p in model.parameters())
    assert stats["embed"].self_params == 50 * 32
    assert stats["head"].self_params == 0
    assert stats["head"].num_params == 50 * 32
    assert stats["head"].is_recursive
    assert sum(row.self_params for row in stats.root.walk()) == stats.total_params


def test_one_of_two_tensors_tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    stats = Statistics(model, (2, 4))
    assert stats["1"].self_params == 4
    assert not stats["1"].is_recursive
    assert stats.total_params == 24


def test_the_parent_is_who_called():
    """``outer`` calls a layer registered in ``store``: its row is below the caller."""
    layer = nn.Linear(4, 4)

    class Borrower(nn.Module):
        def __init__(self):
            super().__init__()
            self.borrowed = [layer]  # not registered here

        def forward(self, x):
            return self.borrowed[0](x)

    stats = Statistics(
        Call(
            lambda self, x: self.user(x) + self.store.layer(x), store=nn.ModuleDict({"layer": layer}), user=Borrower()
        ),
        (2, 4),
    )
    assert [(row.depth, row.fqn, row.name) for row in stats] == [
        (1, "user", "user"),
        (2, "store.layer", "layer"),
        (1, "store", "store"),
        (2, "store.layer", "layer"),
    ]
    assert stats["user"].macs == 32


def test_a_forward_called_directly_belongs_to_the_caller():
    block = nn.Sequential(nn.Linear(4, 5), nn.ReLU())
    stats = Statistics(Call(lambda self, x: self.block.forward(x), block=block), (2, 4))
    assert outline(stats) == [(1, "block", False), (2, "block.0", True), (2, "block.1", True)]
    assert stats["block"].macs == stats.total_mult_adds == 40
    stats = Statistics(Call(lambda self, x: self.linear.forward(x), linear=nn.Linear(4, 5)), (2, 4))
    assert outline(stats) == [(1, "linear", False)]
    assert stats.root.self_macs == 40


def test_functional_work_is_never_lost():
    """Attention products run outside the submodules: they belong to the block itself."""
    stats = Statistics(Attention(), (2, 8, 32))
    products = 2 * (2 * 4 * 8 * 8 * 8)  # scores and values: batch 2, heads 4, 8 x 8 positions, size 8
    rotary = 2 * (8 * 4)  # two outer products of 8 positions and 4 frequencies: the cache starts empty, then serves
    assert stats.root.self_macs == products + rotary // 2
    linears = 2 * 8 * 32 * (32 + 16 + 16 + 32)
    assert stats.total_mult_adds == linears + products + rotary // 2


def test_modules_made_in_the_forward_belong_to_the_caller():
    stats = Statistics(Call(lambda self, x: nn.ReLU()(nn.Linear(4, 5)(x))), (2, 4))
    assert len(stats) == 0
    assert stats.root.self_macs == 40
    assert stats.total_params == 0


def test_parts_of_a_sequential_keep_their_names():
    model = Call(
        lambda self, x: self.layers[1:](self.layers[:1](x)), layers=nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6))
    )
    stats = Statistics(model, (2, 4))
    assert outline(stats) == [(1, "layers", False), (2, "layers.0", True), (2, "layers.1", True)]


def test_modules_that_are_not_reached_are_listed():
    stats = Statistics(Call(lambda self, x: x, head=nn.Sequential(nn.Linear(4, 5))), (2, 4))
    assert outline(stats) == [(1, "head", False), (2, "head.0", False)]
    assert stats.total_params == 25
    assert stats["head.0"].macs == 0


def test_without_a_forward_the_registered_tree():
    stats = Statistics(Stack())
    assert stats.execution == "none"
    assert [row.fqn for row in stats] == ["layers", "layers.0", "layers.1", "heads", "heads.used", "heads.unused"]
    assert stats.total_params == 2 * 20 + 10 + 15


def test_doubly_shared_levels_do_not_multiply():
    model = nn.Linear(4, 4)
    for _ in range(18):
        model = Nested(model)
    assert len(Statistics(model)) == 18
    assert len(Statistics(model, (2, 4))) == 18
    assert Statistics(model, (2, 4)).total_params == 20


def test_recursion_into_itself():
    class Recursive(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, times=2):
            return self(self.linear(x), times=times - 1) if times else x

    stats = Statistics(Recursive(), (2, 4))
    assert [(row.depth, row.fqn) for row in stats] == [(1, "linear"), (1, ""), (2, "linear"), (2, "")]
    assert stats.total_mult_adds == 64


def test_an_exception_caught_in_the_model():
    def risky(self, x):
        try:
            self.wrong(x)
        except RuntimeError:
            return self.right(x)

    stats = Statistics(Call(risky, wrong=nn.Linear(3, 3), right=nn.Linear(4, 4)), (2, 4))
    assert stats["wrong"].note == "raised an exception"
    assert stats["right"].parent_info is stats.root
    assert stats.total_mult_adds == 32


def test_layer_facts():
    conv = nn.Conv2d(4, 8, (3, 5), groups=2)
    conv.bias.requires_grad_(False)
    info = Statistics(nn.Sequential(conv.eval()), (2, 4, 9, 9))["0"]
    assert info.class_name == "Conv2d"
    assert info.kernel_size == [3, 5]
    assert info.groups == 2
    assert info.inner_layers == {"weight": [8, 2, 3, 5], "bias": [8]}
    assert info.trainable == "Partial"
    assert info.training is False
    assert (info.num_params, info.trainable_params, info.params_bytes) == (248, 240, 992)
    assert info.input_size == [2, 4, 9, 9]
    assert info.output_size == [2, 8, 7, 5]
    assert (info.input_bytes, info.output_bytes) == (2 * 4 * 81 * 4, 2 * 8 * 35 * 4)
    assert info.size_bytes == info.input_bytes + info.output_bytes + 992
    assert info.macs == 2 * 8 * 35 * (2 * 15)
    assert info.flops == 2 * info.macs
    assert info.module is conv
    assert info.layer_id == id(conv)
    assert repr(info) == "Conv2d: 1-1"


def test_a_kernel_size_kept_in_a_tensor():
    conv = nn.Conv1d(1, 1, 3)
    conv.kernel_size = torch.tensor(3)
    assert Statistics(conv, (1, 1, 9)).root.kernel_size == [3]


def test_trainable_has_four_answers():
    frozen = nn.Linear(1, 1).requires_grad_(False)
    stats = Statistics(nn.Sequential(nn.Linear(1, 1), frozen, nn.ReLU()), (1, 1))
    assert [row.trainable for row in stats] == ["True", "False", "--"]
    assert stats.root.trainable == "Partial"


def test_buffers_are_apart_from_parameters():
    stats = Statistics(nn.BatchNorm2d(3), (2, 3, 4, 4))
    assert (stats.total_params, stats.root.num_buffers) == (6, 7)  # two statistics of 3 and a counter
    assert stats.total_buffer_bytes == 2 * 3 * 4 + 8


def test_lazy_layers_are_counted_as_initialised_by_the_run():
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d())
    stats = Statistics(model, (2, 4))
    assert stats.total_params == 40 + 16
    assert stats["0"].inner_layers == {"weight": [8, 4], "bias": [8]}
    assert stats["0"].class_name == "LazyLinear"
    without = Statistics(model)
    assert without.root.has_uninitialized
    assert without["0"].inner_layers == {"weight": None, "bias": None}
    assert "?" in str(without)


class Tree(nn.Module):
    """A random tree of modules; each calls its children in order, some of them twice, and works itself."""

    def __init__(self, spec):
        super().__init__()
        self.children_list = nn.ModuleList([Tree(each) for each in spec[1]])
        self.again = spec[0]
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        for child in self.children_list:
            x = child(x)
            if self.again:
                x = child(x)
        return self.linear(x) @ torch.ones(2, 2)


specs = st.recursive(
    st.tuples(st.booleans(), st.just([])),
    lambda inner: st.tuples(st.booleans(), st.lists(inner, max_size=3)),
    max_leaves=6,
)


def number_of_calls(spec):
    return 1 + (2 if spec[0] else 1) * sum(number_of_calls(child) for child in spec[1])


@given(specs)
@settings(max_examples=30, deadline=None)
def test_sums_over_any_tree(spec):
    model = Tree(spec)
    stats = Statistics(model, (3, 2))
    calls = number_of_calls(spec)
    assert sum(row.class_name == "Tree" and row.executed for row in stats.root.walk()) == calls
    assert stats.total_mult_adds == calls * 2 * (3 * 2 * 2)
    assert stats.total_params == sum(p.numel() for p in model.parameters())
    for total in ("macs", "elementwise_ops", "bytes_read", "bytes_written"):
        assert sum(getattr(row, f"self_{total}") for row in stats.root.walk()) == getattr(stats.root, total)
    for row in stats.root.walk():
        assert row.macs == row.self_macs + sum(child.macs for child in row.children)
        assert all(child.parent_info is row and child.depth == row.depth + 1 for child in row.children)
    indices = [(row.depth, row.depth_index) for row in stats]
    assert len(indices) == len(set(indices))


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager")])
def test_wrapped_models_are_summarised_inside(wrap):
    stats = Statistics(wrap(nn.Sequential(nn.Linear(4, 5))), (2, 4))
    assert stats.root.class_name == "Sequential"
    assert [row.fqn for row in stats] == ["0"]


def test_distributed_data_parallel(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        stats = Statistics(nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 5))), (2, 4))
    finally:
        torch.distributed.destroy_process_group()
    assert [row.fqn for row in stats] == ["0"]


def test_a_compiled_submodule_runs_eagerly():
    inner = torch.compile(nn.Linear(4, 5), backend="eager")
    stats = Statistics(nn.Sequential(inner, nn.ReLU()), (2, 4))
    assert stats.total_mult_adds == 40
    assert stats["0._orig_mod"].executed


def script(module):
    return torch.jit.script(module)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_inside_torchscript_calls_are_unknown_but_work_is_counted():
    scripted = script(nn.Sequential(nn.Linear(4, 5), nn.ReLU()))
    stats = Statistics(nn.Sequential(scripted, nn.Linear(5, 2)), (2, 4))
    assert stats["0"].class_name == "Sequential"
    assert stats["0"].executed
    assert not stats["0.0"].executed
    assert stats["0.0"].num_params == 25
    assert stats["0.0"].note == "runs inside TorchScript, where calls cannot be seen"
    assert stats.total_mult_adds == 2 * 4 * 5 + 2 * 5 * 2
    row = next(line for line in str(stats).splitlines() if "Linear: 2-1" in line)
    assert row.split()[-4:] == ["?", "?", "25", "?"]
    assert Statistics(scripted, (2, 4)).total_mult_adds == 40


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # once per process, in whichever test runs first
def test_quantized_weights_count_as_buffers():
    model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 5)), {nn.Linear})
    stats = Statistics(model, torch.rand(2, 4))
    assert (stats.total_params, stats.root.num_buffers) == (0, 25)
    assert stats.total_buffer_bytes == 20 + 5 * 4  # int8 weight, float32 bias
    assert stats.total_mult_adds == 40

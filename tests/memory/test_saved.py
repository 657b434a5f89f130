"""The storages that are kept for the backward: what they are, and what would make each of them again."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from modelsummary import InputError, Statistics
from tests.models import Call
from tests.untouched import untouched


def names(saved, storage):
    return [saved.calls[index].name.removeprefix("aten.") for index in storage.remade_by]


def test_a_hand_written_block():
    """linear -> gelu -> linear: the backward needs the input, what goes into GELU, and what comes out of it."""
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    memory = Statistics(model, (16, 8)).memory(optimizer="sgd")
    saved = memory.saved
    assert [(storage.fqn, storage.operator, storage.nbytes) for storage in saved] == [
        ("1", "aten.addmm", 16 * 32 * 4),
        ("2", "aten.gelu", 16 * 32 * 4),
    ]
    assert sum(storage.nbytes for storage in saved) == memory.activations
    assert [names(saved, storage) for storage in saved] == [["addmm"], ["gelu"]]
    phases = [point.phase for point in memory.timeline]
    for storage in saved:
        assert memory.timeline[storage.born].operator.startswith(storage.operator)
        assert phases[storage.last_use] == "forward"
        assert phases[storage.next_use] == phases[storage.died - 1] == "backward"
        assert storage.next_use < storage.died


def test_temporary_results_are_made_again_too():
    """What the last layer reads needs the sum, which needs the doubled input, which nothing keeps."""
    model = Call(lambda self, x: self.last((x * 2.0 + 1.0).sigmoid().exp()), last=nn.Linear(4, 4))
    saved = Statistics(model, (2, 4)).memory().saved
    assert [names(saved, storage) for storage in saved] == [["mul", "add", "sigmoid", "exp"]]


def test_empty_storages_are_left_out():
    """A cache of keys and values begins with an empty tensor, to which the first layer appends."""
    model = Call(lambda self, x: self.up(x.new_empty(0, 8)).sum() + self.up(x).relu().sum(), up=nn.Linear(8, 16))
    saved = Statistics(model, (4, 8)).memory().saved
    assert [storage.nbytes for storage in saved] == [4 * 16 * 4]


def test_what_cannot_be_made_again():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
    stats = Statistics(model, (2, 3, 8, 8))
    reasons = {(storage.operator, storage.obstacle) for storage in stats.memory().saved}
    assert reasons == {
        ("aten.convolution", ""),
        ("aten.native_batch_norm", "aten.native_batch_norm writes buffers"),
        ("aten.relu", "aten.native_batch_norm writes buffers"),
    }
    model.eval()
    assert not any(storage.obstacle for storage in stats.memory().saved)


def test_states_of_generators_are_made_by_no_operator():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout()) for _ in range(2)))
    saved = Statistics(model, (4, 8)).memory(checkpoint=["0", "1"]).saved
    states = [storage for storage in saved if storage.operator is None]
    assert {(storage.nbytes, storage.obstacle) for storage in states} == {
        (torch.get_rng_state().nbytes, "no operator makes it")
    }
    assert "not: no operator makes it" in str(saved)


class Recorder(TorchDispatchMode):
    """The operators of a forward with their arguments and results, all kept alive."""

    def __init__(self):
        super().__init__()
        self.runs = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.detach.default:  # autograd's own, to save a result
            return result
        self.runs.append((func, args, kwargs or {}, result))
        return result


class Written(nn.Module):
    """Writes in place into what it keeps, and into what it does not keep."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = torch.relu_(self.one(x))
        sums = torch.zeros_like(x)
        sums.add_(x.flip(1)).mul_(2.0)
        return self.two(sums.mul(x)).sigmoid().view(-1, 2, 4).transpose(1, 2).exp()


MODELS = {
    "encoder layer": (lambda: nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), (2, 4, 16)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 2, 3)),
        (2, 3, 8, 8),
    ),
    "in place": (Written, (4, 8)),
    "attention": (
        lambda: Call(
            lambda self, x: self.b(nn.functional.scaled_dot_product_attention(*self.a(x).chunk(3, -1))),
            a=nn.Linear(8, 24),
            b=nn.Linear(8, 8),
        ),
        (2, 1, 4, 8),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_replayed(name):
    """Running these operators again from what is kept gives the same bits."""
    make, size = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(size)
    with untouched(model):
        saved = Statistics(model, x).memory().saved
    with Recorder() as recorder:
        result = model(x)
        assert result.requires_grad
    assert [str(func) for func, *_ in recorder.runs] == [str(call.func) for call in saved.calls[: len(recorder.runs)]]
    assert saved
    for storage in saved:
        assert not storage.obstacle
        assert not storage.is_random
        assert_same_bits(recorder.runs, storage)


def view_of(value):
    """Return what identifies a tensor; autograd may wrap one tensor in several objects."""
    if not isinstance(value, torch.Tensor):
        return None
    return value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride()


def assert_same_bits(runs, storage):
    """Run the operators again, and the views between them, on the recorded tensors; compare the results."""
    remade = {}  # view of a recorded storage -> the tensor that replaces it
    fresh = set()  # storages that the replay made
    for index, (func, args, kwargs, result) in enumerate(runs):
        is_again = index in storage.remade_by
        is_view = not func._schema.is_mutable and any(value.alias_info is not None for value in func._schema.returns)
        if not is_again and not (is_view and any(view_of(value) in remade for value in tree_flatten(args)[0])):
            continue
        new_args, new_kwargs = tree_map(lambda value: remade.get(view_of(value), value), (args, kwargs))
        if func._schema.is_mutable:
            assert new_args[0].untyped_storage().data_ptr() in fresh, f"{func} would write into what is kept"
        new = func(*new_args, **new_kwargs)
        for old, value in zip(tree_flatten(result)[0], tree_flatten(new)[0], strict=True):
            if isinstance(value, torch.Tensor):
                remade[view_of(old)] = value
                fresh.add(value.untyped_storage().data_ptr())
    results = [value for value in tree_flatten(runs[storage.born][3])[0] if view_of(value) in remade]
    assert results
    for old in results:
        assert torch.equal(old, remade[view_of(old)])


def test_prices():
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512), nn.GELU())
    stats = Statistics(model, (1024, 512))
    saved = stats.memory(device="cuda").saved
    assert {storage.seconds for storage in saved} == {None}
    priced = saved.on("A100", link_bandwidth=20e9)
    seconds = {
        kernel.name: kernel.seconds for kernel in stats.kernels("A100", backward=True) if kernel.fqn in ("0", "1")
    }
    assert [storage.seconds for storage in priced[:2]] == [seconds["aten.addmm"], seconds["aten.gelu"]]
    assert priced[0].seconds > priced[1].seconds
    assert [storage.transfer_seconds for storage in priced] == [2 * storage.nbytes / 20e9 for storage in saved]
    # the first one lies idle while the layers behind it run
    assert priced[0].idle_seconds > priced[1].idle_seconds > priced[2].idle_seconds > 0
    assert priced.device == "A100 80GB"
    assert "To host and back" in str(priced)
    with pytest.raises(InputError, match=r"link_bandwidth must be bytes per second above 0 or None, got -1"):
        saved.on("A100", link_bandwidth=-1)
    with pytest.raises(InputError, match="no accelerator 'A1OO' in the table"):
        saved.on("A1OO")


def test_equal_layers_are_one_line():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(5)))
    saved = Statistics(model, (4, 8)).memory().saved
    assert len(saved) == 14
    lines = str(saved).splitlines()
    assert lines[0] == "Kept for the backward of Sequential, [4, 8], float32: 14 storages, 3.07 kB"
    assert [line.split()[:3] for line in lines[2:]] == [
        ["0.1", "5", "aten.addmm"],
        ["0.2", "5", "aten.gelu"],
        ["1.0", "4", "aten.addmm"],
    ]


def test_exports():
    memory = Statistics(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout()), (4, 8)).memory()
    saved = memory.saved
    for other in (pickle.loads(pickle.dumps(memory)).saved, copy.deepcopy(memory).saved):
        assert other == saved
        assert [call.key for call in other.calls] == [call.key for call in saved.calls]
        assert other.on("A100") == saved.on("A100")
    records = json.loads(saved.to_json())["saved"]
    assert [record["remade_by"] for record in records] == [
        ["aten.addmm"],
        ["aten.empty_like", "aten.bernoulli_", "aten.div_"],
    ]
    assert records[1]["is_random"]
    pytest.importorskip("pandas")
    assert list(saved.to_pandas()["nbytes"]) == [storage.nbytes for storage in saved]
    assert not Statistics(nn.Linear(8, 8), (4, 8)).memory("inference").saved
